"""Adapters for web frameworks. Each asks about every request, and answers the refused ones."""
