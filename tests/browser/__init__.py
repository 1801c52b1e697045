"""The console in a real browser, on a whole service with the embedded default."""
