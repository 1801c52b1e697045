"""Database rules on peppers and digests, attacked by SQL; `test_triggers` includes these attacks."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from keyvault.models import PepperVersion
from tests.factories import now

from .attacks import delete, insert_copy, refused, update
from .conftest import World

pytestmark = [pytest.mark.database, pytest.mark.django_db]

OTHER_DIGEST = b"x" * 32


def _pepper(pepper_set: str, number: int, *, is_retired: bool = False) -> None:
    """Add a version that has been creating digests since yesterday."""
    yesterday = now() - timedelta(days=1)
    row = {"id": None, "number": number, "hashes_from_at": yesterday, "retired_at": now() if is_retired else None}
    insert_copy("keyvault_pepperversion", row, pepper_set=pepper_set, number=1)


def _retire(pepper_set: str, number: int) -> None:
    update("keyvault_pepperversion", {"retired_at": now()}, pepper_set=pepper_set, number=number)


def _move(table: str, pepper_set: str, *, is_retired: bool, **row: Any) -> None:
    """Replace the row's digest by one of version 3."""
    _pepper(pepper_set, 3, is_retired=is_retired)
    update(table, {"digest": OTHER_DIGEST, "pepper_version": 3}, **row)


def _retire_under(table: str, pepper_set: str, **row: Any) -> None:
    _move(table, pepper_set, is_retired=False, **row)
    _pepper(pepper_set, 4)
    _retire(pepper_set, 3)


def _insert_under(table: str, pepper_set: str, key: str, identity: str) -> None:
    _pepper(pepper_set, 3, is_retired=True)
    insert_copy(table, {key: "another000000000", "pepper_version": 3}, **{key: identity})


def _retire_newest(_: World) -> None:
    _pepper("sandbox", 3)
    _retire("sandbox", 3)


def _revive(_: World) -> None:
    _pepper("sandbox", 3, is_retired=True)
    update("keyvault_pepperversion", {"retired_at": None}, pepper_set="sandbox", number=3)


ATTACKS: dict[str, Callable[[World], object]] = {
    "key_digest_stays": lambda world: update("keyvault_key", {"digest": OTHER_DIGEST}, key_id=world.key.pk),
    "servicetoken_digest_stays": lambda _: update("keyvault_servicetoken", {"digest": OTHER_DIGEST}),
    "customertoken_digest_stays": lambda _: update("keyvault_customertoken", {"digest": OTHER_DIGEST}),
    "key_pepper_insert": lambda world: _insert_under("keyvault_key", "production", "key_id", world.dead_key.pk),
    "servicetoken_pepper_insert": lambda world: _insert_under(
        "keyvault_servicetoken", "service", "token_id", world.token.pk
    ),
    "customertoken_pepper_insert": lambda world: _insert_under(
        "keyvault_customertoken", "sandbox", "token_id", world.customer_token.pk
    ),
    "key_pepper_update": lambda world: _move("keyvault_key", "production", is_retired=True, key_id=world.key.pk),
    "servicetoken_pepper_update": lambda world: _move(
        "keyvault_servicetoken", "service", is_retired=True, token_id=world.token.pk
    ),
    "customertoken_pepper_update": lambda world: _move(
        "keyvault_customertoken", "sandbox", is_retired=True, token_id=world.customer_token.pk
    ),
    "pepperversion_of_key": lambda world: _retire_under("keyvault_key", "production", key_id=world.key.pk),
    "pepperversion_of_servicetoken": lambda world: _retire_under(
        "keyvault_servicetoken", "service", token_id=world.token.pk
    ),
    "pepperversion_of_customertoken": lambda world: _retire_under(
        "keyvault_customertoken", "sandbox", token_id=world.customer_token.pk
    ),
    "pepperversion_newest": _retire_newest,
    "pepperversion_no_revival": _revive,
    "pepperversion_stays": lambda _: update("keyvault_pepperversion", {"check_value": b"y" * 16}, pepper_set="sandbox"),
    "pepperversion_no_delete": lambda _: delete("keyvault_pepperversion", pepper_set="sandbox"),
    "pepperversion_no_replace": lambda _: insert_copy("keyvault_pepperversion", {"id": None}, pepper_set="sandbox"),
}


@pytest.mark.parametrize("version", [1, 2])
def test_triggers_digest_moved_back_to_an_older_pepper_is_refused(world: World, version: int) -> None:
    """A digest only moves to a newer pepper, so a leaked old pepper cannot be used again."""
    update("keyvault_key", {"digest": OTHER_DIGEST, "pepper_version": 2}, key_id=world.key.pk)
    with refused("replaced only by one with a newer pepper"):
        update("keyvault_key", {"digest": b"z" * 32, "pepper_version": version}, key_id=world.key.pk)


def test_triggers_pepper_of_a_suspended_key_is_not_retired(world: World) -> None:
    """A suspended key may be resumed and must then be verifiable."""
    update("keyvault_key", {"state": "suspended", "suspended_at": now()}, key_id=world.key.pk)
    with refused("a pepper of a valid key is not retired"):
        _retire_under("keyvault_key", "production", key_id=world.key.pk)


def test_triggers_pepper_of_dead_keys_only_is_retired(world: World) -> None:
    _move("keyvault_key", "production", is_retired=False, key_id=world.dead_key.pk)
    _pepper("production", 4)
    _retire("production", 3)
    assert PepperVersion.objects.get(pepper_set="production", number=3).retired_at is not None


def test_triggers_pepper_of_the_other_environments_keys_is_retired(world: World) -> None:
    """Production's version 3 does not depend on sandbox's version 3."""
    _move("keyvault_key", "production", is_retired=False, key_id=world.key.pk)
    _pepper("sandbox", 3)
    _pepper("sandbox", 4)
    _retire("sandbox", 3)
    with refused("a pepper of a valid key"):
        _pepper("production", 4)
        _retire("production", 3)


def test_triggers_pepper_destroyed_before_it_is_retired_is_refused(world: World) -> None:
    with refused("is destroyed only after its retirement"):
        update("keyvault_pepperversion", {"destroyed_at": now()}, pepper_set="sandbox", number=1)


def test_triggers_pepper_whose_successor_does_not_hash_yet_is_not_retired(world: World) -> None:
    """Until then keys are hashed with the old pepper."""
    _pepper("sandbox", 3)
    soon = now() + timedelta(seconds=30)
    insert_copy(
        "keyvault_pepperversion", {"id": None, "number": 4, "hashes_from_at": soon}, pepper_set="sandbox", number=1
    )
    with refused("only after a newer one makes the digests"):
        _retire("sandbox", 3)
