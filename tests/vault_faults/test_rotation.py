"""Rotations on the real server with a fault at one call of each kind.

`python -m tests.faults vault` covers every call.
"""

import pytest

from keyvault.services.recording.audit_chain import verify_audit

from .faults import DELETED, FAULTS, LOST, NARROWED, REVOKED, SCENARIOS, SEALED, can_be_injected
from .harness import VaultHarness
from .journey import Journey, VaultFault

pytestmark = pytest.mark.django_db


def choose_sample(calls: list[str]) -> list[int]:
    """Return the first login and the first write of each kind."""
    firsts = {name: number for number, name in reversed(list(enumerate(calls, 1))) if not name.startswith("GET ")}
    return sorted(firsts.values())


def inject_at_sample(harness: VaultHarness, fault: VaultFault, scenario: str) -> None:
    faultless = Journey(harness, aborted_in=SCENARIOS[scenario]).run()
    assert faultless.violations == []
    calls, sample = faultless.calls, choose_sample(faultless.calls)
    # Fewer calls would mean that the service bypasses the proxy.
    assert len(sample) >= 4
    for number in sample:
        trial = Journey(harness, fault, number, aborted_in=SCENARIOS[scenario]).run()
        assert trial.was_injected
        assert trial.violations == [], f"{fault.name} at {calls[number - 1]}"
        assert trial.verified == trial.asked >= 5
    assert verify_audit().first_broken is None


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_rotation_with_a_fault_loses_nothing_and_resumes(harness: VaultHarness, fault: VaultFault) -> None:
    """Guarantee: under any server fault every good key is allowed at every moment, no key is lost or orphaned,
    postponed work resumes within 60 s of the recovery, and a revocation takes effect immediately.
    """
    if not can_be_injected(fault):
        pytest.skip(f"{fault.name}: no prlimit on this machine")
    inject_at_sample(harness, fault, "forward")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", [SEALED, LOST], ids=lambda fault: fault.name.replace(" ", "-"))
def test_rotation_rolled_back_from_quarantine_with_a_fault_loses_nothing(
    harness: VaultHarness, fault: VaultFault
) -> None:
    """Guarantee: the same holds during a rollback, which restores and rewrites the old key's copy."""
    inject_at_sample(harness, fault, "aborted in quarantine")


def test_rotation_with_all_tokens_revoked_continues_without_a_pause(harness: VaultHarness) -> None:
    """Guarantee: one new login suffices; there is no pause and no additional turn."""
    calls = Journey(harness).run().calls
    at = calls.index("POST keys-sandbox/data") + 1
    trial = Journey(harness, REVOKED, at).run()
    assert (trial.violations, trial.pauses, trial.stalled) == ([], 0, "")
    # The refused call, the login, and the retried call, with any cleanup of the old token between them.
    since = [call for call in trial.calls[at - 1 :] if not call.endswith("/revoke-self")]
    assert since[:3] == [calls[at - 1], "POST auth/approle/login", calls[at - 1]]


@pytest.mark.parametrize("fault", [DELETED, NARROWED], ids=lambda fault: fault.name.replace(" ", "-"))
def test_rotation_denied_by_the_server_stalls_with_the_reason(harness: VaultHarness, fault: VaultFault) -> None:
    """Guarantee: a denial is not retried repeatedly and is reported in plain words."""
    at = Journey(harness).run().calls.index("POST keys-sandbox/data") + 1
    trial = Journey(harness, fault, at).run()
    assert trial.violations == []
    assert trial.stalled.startswith("the secret backend denies access: ")
