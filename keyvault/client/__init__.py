"""Tools for machines outside the service: no Django, no database, no network."""
