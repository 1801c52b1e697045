"""Architecture rules as tests: imports, linters, locks and names."""
