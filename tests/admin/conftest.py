"""The console with a merchant and one operator of each role."""

import pytest

from .desk import Desk, set_up_desk


@pytest.fixture
def desk(db: None) -> Desk:
    return set_up_desk()
