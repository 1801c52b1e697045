"""Answers that never came, where the server had done what it was asked."""

import pytest
import requests

from keyvault.backends.vault.layout import SecretsEngine, VaultRole
from keyvault.models import WorkLease
from rotation.services.rotations.reports import get_rotation, subject_of
from tests.rotation.steps import advance

from .faults import LIMITED, LOST
from .journey import Journey
from .proxy import Strike
from .stand import LIMITED_SECONDS, SCOPE, Stand

pytestmark = pytest.mark.django_db

WRITE = "POST keys-sandbox/data"
OPEN = "POST sys/wrapping/unwrap"
LOGIN = "POST auth/approle/login"


def test_reply_lost_to_a_successful_check_and_set_is_found_by_reading_back(stand: Stand) -> None:
    """Guarantee: what was written is ours and is adopted in the same turn; it is not written twice."""
    calls = Journey(stand).run().calls
    trial = Journey(stand, LOST, calls.index(WRITE) + 1).run()
    assert (trial.violations, trial.pauses) == ([], 0)
    assert trial.calls.count(WRITE) == calls.count(WRITE)


def test_reply_lost_to_a_login_costs_a_pause_and_no_key(stand: Stand) -> None:
    calls = Journey(stand).run().calls
    logins = [number for number, name in enumerate(calls, 1) if name == LOGIN]
    assert len(logins) >= 3
    for number in logins:
        trial = Journey(stand, LOST, number).run()
        assert (trial.was_struck, trial.violations, trial.pauses, trial.stalled) == (True, [], 1, "")


def test_reply_lost_to_an_unwrap_stalls_as_a_login_in_other_hands(stand: Stand) -> None:
    """Guarantee: a secret id that was opened, and not by us as far as we know, is told of and never guessed at; every
    key is good meanwhile, and with a new login the rotation completes."""
    journey = Journey(stand)
    _renew_wrapped(stand)
    opens = journey.run().calls.index(OPEN) + 1
    struck = Journey(stand)
    _renew_wrapped(stand)
    stand.proxy.strike_at(opens, Strike(is_lost=True))
    rotation = advance(get_rotation(struck.rotation_id), stand.clock, 3)
    assert stand.proxy.struck.is_set()
    assert stand.proxy.calls[opens - 1 :] == [OPEN, "GET keys-sandbox/data"], "no second try; only a look at the path"
    lease = WorkLease.objects.get(subject=subject_of(rotation.rotation_id))
    assert lease.last_error != ""
    stand.clock.tick(60)
    rotation = advance(rotation, stand.clock)
    assert rotation.state == "stalled"
    assert "Another party" in rotation.why
    assert stand.verify(next(iter(struck.strings.values()))) == (True, None)
    stand.make_logins(renew=True, wrap_seconds=300, roles=(VaultRole.ISSUER,))
    trial = struck.resumed()
    assert trial.violations == []


def _renew_wrapped(stand: Stand) -> None:
    """The issuer's secret id, once the journey's own keys are issued: it is opened in the middle of the rotation."""
    stand.make_logins(renew=True, wrap_seconds=300, roles=(VaultRole.ISSUER,))
    stand.begin_process()


def test_rotation_told_when_to_come_back_does_not_come_before(stand: Stand) -> None:
    """Guarantee: Retry-After of a rate limit is honoured, with jitter and never beyond what keeps us within 60 s of
    the recovery."""
    journey = Journey(stand)
    stand.proxy.strike_at(2, LIMITED.strike(stand))
    rotation = advance(get_rotation(journey.rotation_id), stand.clock, 3)
    assert "429" in WorkLease.objects.get(subject=subject_of(rotation.rotation_id)).last_error
    mount = stand.layout.mount(SecretsEngine.KEYS, SCOPE)
    answer = requests.get(
        f"{stand.server.address}/v1/{mount}/metadata?list=true",
        headers={"X-Vault-Token": stand.server.root_token},
        timeout=5,
    )
    assert answer.status_code == 429, answer.headers
    told = int(answer.headers["Retry-After"])
    assert 0 < told <= LIMITED_SECONDS
    due_at = WorkLease.objects.get(subject=subject_of(rotation.rotation_id)).due_at
    assert due_at is not None
    assert told <= (due_at - stand.clock()).total_seconds() <= 60
    assert stand.verify(next(iter(journey.strings.values()))) == (True, None)
    stand.lift_limit()
    assert journey.resumed().violations == []
