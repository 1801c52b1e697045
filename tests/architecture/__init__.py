"""The rules of the house, as tests: imports, linters, locks, names."""
