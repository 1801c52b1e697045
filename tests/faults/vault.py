"""A Vault or OpenBao on disk with every fault at every call of a rotation and of both rollbacks.

The engine and the maintenance functions run in one process on a frozen clock, so that an outage takes no time. The
server, its logins and policies, the connections and their faults are real.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from django.test.utils import setup_test_environment, teardown_test_environment

from tests.faults import expected_verdicts
from tests.faults.results import Options, Result, say
from tests.servers.openbao import openbao_on_disk
from tests.vault_faults.faults import FAULTS, SCENARIOS, can_be_injected
from tests.vault_faults.harness import VaultHarness, running_harness
from tests.vault_faults.journey import InconclusiveError, Journey, Trial, VaultFault

ATTEMPTS = 3
"""Trials of one point until one is conclusive."""


def run(options: Options) -> Result:
    result = Result("fault points")
    with ExitStack() as stack:
        setup_test_environment()  # the requests go through Django's test client
        stack.callback(teardown_test_environment)
        server = stack.enter_context(openbao_on_disk())
        harness = stack.enter_context(running_harness(server, _folder(options.folder)))
        for scenario in SCENARIOS:
            undisturbed = Journey(harness, aborted_in=SCENARIOS[scenario]).run()
            result.must_be(not undisturbed.violations, f"undisturbed, {scenario}: {undisturbed.violations}")
            for fault in filter(can_be_injected, FAULTS):
                say(f"{fault.name}, {scenario}: at each of {len(undisturbed.calls)} calls")
                _sweep(harness, fault, scenario, undisturbed.calls, result)
                verified = round(result.counts["verifications of a good key"])
                say(f"{result.n} fault points, {verified} verifications, {result.number_of_violations} violations")
    result.counts["faults"] = len([each for each in FAULTS if can_be_injected(each)])
    result.must_be_none("rotations stuck", expected_verdicts.find_stuck())
    result.must_be_none("broken audit", expected_verdicts.find_broken_audit())
    return result


def _sweep(harness: VaultHarness, fault: VaultFault, scenario: str, calls: list[str], result: Result) -> None:
    for number, call in enumerate(calls, 1):
        where = f"{fault.name} at {number} {call}, {scenario}"
        result.n += 1
        trial = _find_conclusive(
            partial(Journey, harness, fault, number, aborted_in=SCENARIOS[scenario]), where, result
        )
        if trial is None:
            result.must_be(False, f"{where}: no conclusive trial in {ATTEMPTS}")
            continue
        result.must_be(trial.was_injected, f"{where}: the call was not reached")
        broken = [f"{where}: {each}" for each in trial.violations]
        result.must_be_none("broken promises", broken)
        for each in broken:
            say(each)
        _count(trial, result.counts)


def _find_conclusive(begin: Callable[[], Journey], where: str, result: Result) -> Trial | None:
    """Run trials until the fault occurs as intended; None: it never does."""
    for _ in range(ATTEMPTS):
        try:
            return begin().run()
        except InconclusiveError as error:
            say(f"{where}: repeated, the fault itself failed: {error}")
            result.counts["inconclusive trials"] = result.counts.get("inconclusive trials", 0) + 1
    return None


def _count(trial: Trial, counts: dict[str, float]) -> None:
    counts["verifications of a good key"] = counts.get("verifications of a good key", 0) + trial.asked
    counts["of these refused"] = counts.get("of these refused", 0) + trial.asked - trial.verified
    counts["stalled by name"] = counts.get("stalled by name", 0) + bool(trial.stalled)
    resumed = 0.0 if trial.resumed_after is None else round(trial.resumed_after.total_seconds(), 1)
    longest = "longest from recovery to resumption, s"
    counts[longest] = max(counts.get(longest, 0), resumed)


def _folder(place: Path) -> Path:
    folder = place / "vault-logins"
    folder.mkdir(mode=0o700)
    return folder
