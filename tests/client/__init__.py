"""The programs that run on somebody else's machine."""
