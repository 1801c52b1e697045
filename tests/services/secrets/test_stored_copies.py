"""The secret backend's copies of key strings, read by the labels of their versions."""

import pytest

from keyvault.domain.plaintext import Plaintext
from keyvault.services.secrets.backend import MOUNT, secret_backend
from keyvault.services.secrets.stored_copies import ForeignWriterError, read_string
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
