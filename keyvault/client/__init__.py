"""What runs on somebody else's machine: no Django, no database, no network."""
