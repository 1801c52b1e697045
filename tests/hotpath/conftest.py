"""A key, a service token and changes of the key; the engine's notes go to logs without threads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from keyvault.access.permissions import SERVICE_PERMISSIONS
from keyvault.access.permissions import Permission as P
from keyvault.access.roles import Role
from keyvault.domain.keystring import StringScope
from keyvault.domain.revocation import RevocationReason
from keyvault.hotpath.adapters.stores import DatabaseStore
from keyvault.hotpath.messages.pending_requests import Found
from keyvault.models import Key
from keyvault.services.keys.lifecycle import revoke_key
from keyvault.services.usage.recorder import UsageLog
from keyvault.services.verification.refusals import RefusalLog
from tests.factories import account, grant, issue, make_merchant, make_token, the_operator
from tests.services.conftest import scene as scene
from tests.starting_rows import start_with


@pytest.fixture
def usage(monkeypatch: pytest.MonkeyPatch) -> UsageLog:
    """A usage log that the test flushes by hand."""
    log = UsageLog()
    monkeypatch.setattr("keyvault.hotpath.adapters.assembly.usage_log", log)
    monkeypatch.setattr("keyvault.hotpath.adapters.assembly.refusal_log", RefusalLog())
    return log


@dataclass(frozen=True)
class Stage:
    key: Key
    text: str
    token: str

    @property
    def asked(self) -> dict[str, Any]:
        return {"key": self.text, "environment": "sandbox", "endpoint": "orders.create"}


@pytest.fixture
def stage(db: None) -> Stage:
    return start_with(_make_stage)


def _make_stage() -> Stage:
    make_merchant("acme")
    key, text = issue(account())
    _, token = make_token(*SERVICE_PERMISSIONS, scope=StringScope.SANDBOX)
    return Stage(key, text.reveal(), token.reveal())


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return the kind and id of every look-up in the database."""
    seen: list[tuple[str, str]] = []
    find = DatabaseStore.find

    def find_and_note(store: DatabaseStore, of: str, ids: frozenset[str], address: str | None) -> Mapping[str, Found]:
        seen.extend((of, identity) for identity in ids)
        return find(store, of, ids, address)

    monkeypatch.setattr(DatabaseStore, "find", find_and_note)
    return seen


def revoke(key: Key) -> None:
    """Revoke the key in the transaction of the test, which notifies no engine."""
    admin = the_operator("admin", Role.KEY_ADMINISTRATOR)
    revoke_key(grant(admin, P.KEYS_REVOKE, key.credential.account), key, RevocationReason.SUPERSEDED)
