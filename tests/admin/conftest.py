"""The console with a merchant and one operator of each role."""

import pytest

from .desk import Desk, set_up_desk
from .menu import menu_counts, menu_without_counts

__all__ = ["desk", "menu_counts", "menu_without_counts"]


@pytest.fixture
def desk(db: None) -> Desk:
    return set_up_desk()
