"""Adapters for web frameworks. Each asks the service about every request, and answers refused requests itself."""
