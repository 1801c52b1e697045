"""A differential fuzz of request lines and headers: the real server against an oracle read from API.md alone."""
