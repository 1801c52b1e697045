"""Tests that every entry point applies the same rules, and of what the server does to a request before them."""
