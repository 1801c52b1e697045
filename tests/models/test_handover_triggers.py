"""What the database holds of wrapping tokens, attacked by SQL; `test_triggers` counts these in."""

from collections.abc import Callable

import pytest

from tests.factories import now

from .attacks import delete, insert_copy, refused, update
from .conftest import World

pytestmark = [pytest.mark.database, pytest.mark.django_db]

HANDOVERS = "keyvault_wrappedhandover"

ATTACKS: dict[str, Callable[[World], object]] = {
    "wrappedhandover_stays": lambda _: update(HANDOVERS, {"accessor": "another"}),
    "wrappedhandover_one_open": lambda _: insert_copy(HANDOVERS, {"id": None, "accessor": "another"}),
    "wrappedhandover_no_delete": lambda _: delete(HANDOVERS),
    "wrappedhandover_no_replace": lambda _: insert_copy(HANDOVERS, {"id": None, "subject": "another"}),
}


@pytest.mark.parametrize("end", ["confirmed_at", "revoked_at", "suspected_at"])
def test_triggers_handover_that_ended_is_not_opened_again(world: World, end: str) -> None:
    """What was suspected stays suspected, whoever would rather have it forgotten."""
    update(HANDOVERS, {end: now()})
    for changes in ({end: None}, {end: now()}, {"version": 9}):
        with refused("ends once"):
            update(HANDOVERS, changes)


def test_triggers_handover_after_one_that_ended_is_accepted(world: World) -> None:
    update(HANDOVERS, {"revoked_at": now()})
    insert_copy(HANDOVERS, {"id": None, "accessor": "another", "revoked_at": None})
