"""A deterministic simulator of a year of rotations; see README.md."""
