"""The secret backend's copies of key strings, read by the labels of their versions."""

import pytest

from keyvault.backends.base import BackendDeniedError, BackendUnavailableError, StoredSecret
from keyvault.backends.local import LocalKeystore
from keyvault.domain.plaintext import Plaintext
from keyvault.services.secrets.backend import MOUNT, secret_backend
from keyvault.services.secrets.stored_copies import ForeignWriterError, read_string, store_string
from tests.factories import account, issue, make_merchant

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
    with pytest.raises(ForeignWriterError):
        read_string(key)


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
        store_string(key, text, purpose="rot_x", again=True)
    assert raised.value.may_be_applied
