"""The only writers of rotations: `requests` (asked for and decided by people), `engine` (moved on by workers)."""
