"""The only writers of rotations, schedules and campaigns. Operators call `requests`, workers call `engine`."""
