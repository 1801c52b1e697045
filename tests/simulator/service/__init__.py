"""The simulation over the real services and PostgreSQL; see README.md of the package above."""
