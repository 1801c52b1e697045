"""Lost replies to requests that the server has executed."""

import pytest
import requests

from keyvault.backends.vault.layout import SecretsEngine, VaultRole
from keyvault.models import WorkLease
from rotation.services.rotations.reports import get_rotation, subject_of
from tests.rotation.steps import advance

from .faults import LIMITED, LOST
from .harness import LIMITED_SECONDS, SCOPE, VaultHarness
from .journey import Journey
from .proxy import Injection

pytestmark = pytest.mark.django_db

WRITE = "POST keys-sandbox/data"
OPEN = "POST sys/wrapping/unwrap"
LOGIN = "POST auth/approle/login"


def test_lost_reply_to_a_successful_check_and_set_is_found_by_reading_back(harness: VaultHarness) -> None:
    """Guarantee: the service adopts its own write in the same turn and does not write twice."""
    calls = Journey(harness).run().calls
    trial = Journey(harness, LOST, calls.index(WRITE) + 1).run()
    assert (trial.violations, trial.pauses) == ([], 0)
    assert trial.calls.count(WRITE) == calls.count(WRITE)


def test_lost_reply_to_a_login_pauses_the_rotation_and_loses_no_key(harness: VaultHarness) -> None:
    calls = Journey(harness).run().calls
    logins = [number for number, name in enumerate(calls, 1) if name == LOGIN]
    assert len(logins) >= 3
    for number in logins:
        trial = Journey(harness, LOST, number).run()
        assert (trial.was_injected, trial.violations, trial.pauses, trial.stalled) == (True, [], 1, "")


def test_lost_reply_to_an_unwrap_stalls_the_rotation_as_a_taken_login(harness: VaultHarness) -> None:
    """Guarantee: a secret id that was unwrapped, perhaps by another party, is reported and not used.

    Every key stays valid, and with a new login the rotation completes.
    """
    journey = Journey(harness)
    _renew_wrapped(harness)
    opens = journey.run().calls.index(OPEN) + 1
    injected = Journey(harness)
    _renew_wrapped(harness)
    harness.proxy.inject_at(opens, Injection(is_lost=True))
    rotation = advance(get_rotation(injected.rotation_id), harness.clock, 3)
    assert harness.proxy.injected.is_set()
    assert harness.proxy.calls[opens - 1 :] == [OPEN, "GET keys-sandbox/data"], (
        "no second unwrap; only a read of the path"
    )
    lease = WorkLease.objects.get(subject=subject_of(rotation.rotation_id))
    assert lease.last_error != ""
    harness.clock.tick(60)
    rotation = advance(rotation, harness.clock)
    assert rotation.state == "stalled"
    assert "may have been intercepted" in rotation.why
    assert harness.verify(next(iter(injected.strings.values()))) == (True, None)
    harness.make_logins(renew=True, wrap_seconds=300, roles=(VaultRole.ISSUER,))
    trial = injected.resumed()
    assert trial.violations == []


def _renew_wrapped(harness: VaultHarness) -> None:
    """Wrap the issuer's secret id after the journey's own keys are issued, so that it is unwrapped during the
    rotation.
    """
    harness.make_logins(renew=True, wrap_seconds=300, roles=(VaultRole.ISSUER,))
    harness.begin_process()


def test_rotation_with_retry_after_does_not_retry_earlier(harness: VaultHarness) -> None:
    """Guarantee: Retry-After of a rate limit is honored, with jitter, and resumption stays within 60 s of the
    recovery.
    """
    journey = Journey(harness)
    harness.proxy.inject_at(2, LIMITED.inject(harness))
    rotation = advance(get_rotation(journey.rotation_id), harness.clock, 3)
    assert "429" in WorkLease.objects.get(subject=subject_of(rotation.rotation_id)).last_error
    mount = harness.layout.mount(SecretsEngine.KEYS, SCOPE)
    answer = requests.get(
        f"{harness.server.address}/v1/{mount}/metadata?list=true",
        headers={"X-Vault-Token": harness.server.root_token},
        timeout=5,
    )
    assert answer.status_code == 429, answer.headers
    retry_after = int(answer.headers["Retry-After"])
    assert 0 < retry_after <= LIMITED_SECONDS
    due_at = WorkLease.objects.get(subject=subject_of(rotation.rotation_id)).due_at
    assert due_at is not None
    assert retry_after <= (due_at - harness.clock()).total_seconds() <= 60
    assert harness.verify(next(iter(journey.strings.values()))) == (True, None)
    harness.lift_limit()
    assert journey.resumed().violations == []
