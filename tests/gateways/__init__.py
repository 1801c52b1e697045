"""The shipped gateway samples in front of the real server."""
