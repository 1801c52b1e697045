"""Rotations on the real server, struck at a call of each kind; `python -m tests.faults vault` strikes at every one."""

import pytest

from keyvault.services.recording.audit_chain import verify_audit

from .faults import DELETED, FAULTS, LOST, NARROWED, REVOKED, SEALED, WAYS, can_be_staged
from .journey import Fault, Journey
from .stand import Stand

pytestmark = pytest.mark.django_db


def choose_sample(calls: list[str]) -> list[int]:
    """The first login, and the first of each kind of write."""
    firsts = {name: number for number, name in reversed(list(enumerate(calls, 1))) if not name.startswith("GET ")}
    return sorted(firsts.values())


def strike(stand: Stand, fault: Fault, way: str) -> None:
    undisturbed = Journey(stand, aborted_in=WAYS[way]).run()
    assert undisturbed.violations == []
    calls, sample = undisturbed.calls, choose_sample(undisturbed.calls)
    # Fewer would mean that the calls do not come by the proxy.
    assert len(sample) >= 4
    for number in sample:
        trial = Journey(stand, fault, number, aborted_in=WAYS[way]).run()
        assert trial.was_struck
        assert trial.violations == [], f"{fault.name} at {calls[number - 1]}"
        assert trial.verified == trial.asked >= 5
    assert verify_audit().first_broken is None


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_rotation_struck_by_a_fault_loses_nothing_and_resumes(stand: Stand, fault: Fault) -> None:
    """Guarantee: whatever befalls the server, every good key is allowed at every moment, no key is lost or orphaned,
    what was put off resumes within 60 s of the recovery, and a revocation is refused at once."""
    if not can_be_staged(fault):
        pytest.skip(f"{fault.name}: no prlimit on this machine")
    strike(stand, fault, "forward")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", [SEALED, LOST], ids=lambda fault: fault.name.replace(" ", "-"))
def test_rotation_rolled_back_from_quarantine_survives_a_fault_too(stand: Stand, fault: Fault) -> None:
    """Guarantee: the same on the way back, where the old key's copy is brought back and written again."""
    strike(stand, fault, "aborted in quarantine")


def test_rotation_with_all_tokens_revoked_goes_on_as_if_nothing_had_happened(stand: Stand) -> None:
    """Guarantee: one fresh login, and nobody notices; no pause, and not one turn more."""
    calls = Journey(stand).run().calls
    at = calls.index("POST keys-sandbox/data") + 1
    trial = Journey(stand, REVOKED, at).run()
    assert (trial.violations, trial.pauses, trial.stalled) == ([], 0, "")
    # The call that was refused, the login, and the call again; whatever is done about the old token between them.
    since = [call for call in trial.calls[at - 1 :] if not call.endswith("/revoke-self")]
    assert since[:3] == [calls[at - 1], "POST auth/approle/login", calls[at - 1]]


@pytest.mark.parametrize("fault", [DELETED, NARROWED], ids=lambda fault: fault.name.replace(" ", "-"))
def test_rotation_refused_by_the_server_stalls_by_name_and_waits_for_a_person(stand: Stand, fault: Fault) -> None:
    """Guarantee: a refusal is not tried again and again, and is told in plain words."""
    at = Journey(stand).run().calls.index("POST keys-sandbox/data") + 1
    trial = Journey(stand, fault, at).run()
    assert trial.violations == []
    assert trial.stalled.startswith("the secret backend denies access: ")
