"""The console without the counts of its menu."""

from tests.admin.menu import menu_counts, menu_without_counts

__all__ = ["menu_counts", "menu_without_counts"]
