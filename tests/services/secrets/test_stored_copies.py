"""The secret backend's copies of key strings, read by the labels of their versions."""

from datetime import datetime
from typing import Any

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER
from keyvault.backends.base import BackendDeniedError, BackendUnavailableError, StoredSecret, VersionState
from keyvault.backends.local import LocalKeystore
from keyvault.domain.errors import StateConflictError
from keyvault.domain.plaintext import Plaintext
from keyvault.models import Material
from keyvault.services.keys.lifecycle import get_key
from keyvault.services.recording.transaction import recorded
from keyvault.services.secrets.backend import MOUNT, secret_backend
from keyvault.services.secrets.stored_copies import (
    ForeignWriterError,
    copy_subject,
    read_string,
    settle_string,
    store_string,
)
from keyvault.services.work import leases
from tests.factories import account, grant, issue, make_merchant, now

pytestmark = pytest.mark.django_db


def test_string_of_another_key_at_the_version_of_this_one_is_not_returned() -> None:
    """Guarantee: no caller gets another key's string.

    A restored backup of the backend may reuse a version's number.
    """
    make_merchant("acme")
    key, text = issue(account())
    assert read_string(key).reveal() == text.reveal()
    credential = key.credential
    labels = {"key_id": "another", "credential_id": credential.credential_id}
    place = (MOUNT[credential.environment], credential.backend_path)
    assert key.backend_version is not None
    key.backend_version = secret_backend().put(
        *place, Plaintext("theirs"), labels, expected_version=key.backend_version
    )
    with pytest.raises(ForeignWriterError) as refused:
        read_string(key)
    assert f" at {place[0]}/{place[1]} " in refused.value.internal


@pytest.mark.parametrize("is_hiding", [True, False])
def test_copy_is_not_settled_by_a_worker_that_slept_past_its_lease(
    is_hiding: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: the copy stays as the worker that took over left it. A valid key stays readable."""
    make_merchant("acme")
    key, _ = issue(account())
    worker = grant(WORKER, P.BACKEND_RECONCILE, account())
    first, then = (Material.DELETE_DUE, Material.RESTORE_DUE)[:: 1 if is_hiding else -1]
    read = LocalKeystore.read

    def settle_as(due: Material, at: datetime) -> None:
        row = get_key(key.key_id)
        lease = leases.claim(copy_subject(key), at)
        assert row is not None
        assert lease is not None
        with recorded(worker, P.BACKEND_RECONCILE, "test.due", account=account()):
            row.compare_and_swap(material=due)
        settle_string(worker, row, lease, lambda: at)

    def sleep_before(self: LocalKeystore, *args: Any) -> StoredSecret:
        monkeypatch.setattr(LocalKeystore, "read", read)
        settle_as(then, now() + 2 * leases.LEASE)
        return read(self, *args)

    monkeypatch.setattr(LocalKeystore, "read", sleep_before)
    with pytest.raises(StateConflictError, match="Another worker took this over"):
        settle_as(first, now())
    stored = get_key(key.key_id)
    assert stored is not None
    assert stored.material == (Material.HELD if is_hiding else Material.DELETED)
    versions = secret_backend().versions(MOUNT[key.credential.environment], key.credential.backend_path)
    assert [each.state for each in versions] == [VersionState.LIVE if is_hiding else VersionState.DELETED]


def test_write_without_a_reply_stays_uncertain_if_reading_back_is_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: the write may still arrive, so its ledger entry stays open."""
    make_merchant("acme")
    key, text = issue(account())

    def lose_reply(self: LocalKeystore, *args: object, **options: object) -> int:
        monkeypatch.setattr(LocalKeystore, "read", deny)
        raise BackendUnavailableError("no answer in time", may_be_applied=True)

    def deny(self: LocalKeystore, *args: object, **options: object) -> StoredSecret:
        raise BackendDeniedError("the policy denies it")

    monkeypatch.setattr(LocalKeystore, "put", lose_reply)
    with pytest.raises(BackendUnavailableError) as raised:
        store_string(key, text, purpose="rot_x", again=True, fence=lambda: None)
    assert raised.value.may_be_applied
