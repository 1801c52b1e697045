"""Password hashes give way to the requests of merchants."""

import os
import sys
import threading
from unittest import mock

import pytest

from keyvault.domain.plaintext import Plaintext
from keyvault.services.sessions import sign_in as module
from keyvault.services.sessions.lockout import SignInRefusedError
from keyvault.services.sessions.sign_in import SignInAttempt, sign_in
from tests.factories import now

pytestmark = [pytest.mark.database, pytest.mark.django_db]


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority for each thread")
def test_a_password_is_checked_at_a_lower_priority_than_the_request_has() -> None:
    """Guarantee: sign-ins under way leave the processor to requests that check keys."""
    measured: list[int] = []

    def verify(password: str, stored: str) -> tuple[bool, bool]:
        measured.append(niceness())
        return False, False

    before = niceness()
    with mock.patch.object(module, "verify_password", verify), pytest.raises(SignInRefusedError):
        sign_in(SignInAttempt("nobody", Plaintext("wrong"), None), now())
    assert measured == [min(before + 10, 19)]
    assert niceness() == before
