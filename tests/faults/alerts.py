"""Each fault fires exactly its alerts, in a real Prometheus with the shipped rules; a quiet minute fires none.

A server, a worker and a beat have an address each in KEYVAULT_METRICS, as the documentation says.
"""

import time
from contextlib import ExitStack

from django.db import connections

from tests.faults.alert_deployment import Deployment, open_deployment, shorten_rules
from tests.faults.alert_faults import PARTS, AlertFault
from tests.faults.programs import GaveUpError, until
from tests.faults.results import Options, Result, say

WITHIN_SECONDS = 60
"""Maximum time from a fault to its alerts. Each fault lasts that long, so that a wrong alert is seen, too."""

RECOVERY_SECONDS = 120
LOOK_SECONDS = 0.5

ALWAYS_SHORTER = frozenset({"KeyvaultVaultTokenExpires"})
"""Rules whose threshold would be reached in a quiet minute: the Vault's tokens have a short period here."""


def run(options: Options) -> Result:
    result = Result("faults")
    with ExitStack() as stack:
        deployment = open_deployment(options, stack, on_vault=options.choice == "vault", shortened=ALWAYS_SHORTER)
        _restore(deployment)
        fired = set(_watch(deployment, is_restarting=True))
        result.must_be(not fired, f"a quiet minute fires {sorted(fired)}")
        say(f"a quiet minute: {sorted(fired) or 'no alert'}")
        for name, fault in PARTS[options.choice].items():
            if fault.needs_disk and deployment.disk is None:
                say(f"{name}: not caused, no file system can be mounted")
                continue
            try:
                _perform(deployment, result, name, fault)
            except GaveUpError as gave_up:
                result.must_be(False, f"{name}: {gave_up}")
    return result


def _perform(deployment: Deployment, result: Result, name: str, fault: AlertFault) -> None:
    _restore(deployment)
    deployment.prometheus.load(shorten_rules(ALWAYS_SHORTER | fault.alerts))
    undo = fault.cause(deployment)
    first = _watch(deployment, is_restarting=fault.is_restarting)
    undo()
    connections.close_all()  # this process is no part of the experiment
    deployment.prometheus.load(shorten_rules(ALWAYS_SHORTER))
    say(f"{name}: " + (", ".join(f"{alert} after {at:.0f} s" for alert, at in sorted(first.items())) or "no alert"))
    result.n += 1
    result.must_be(first.keys() == fault.alerts, f"{name} fires {sorted(first)}, expected {sorted(fault.alerts)}")
    slowest = max(first.values(), default=0)
    result.counts["slowest alert in seconds"] = max(result.counts.get("slowest alert in seconds", 0), slowest)


def _watch(deployment: Deployment, *, is_restarting: bool) -> dict[str, float]:
    """Return every alert that fires within the time, with the seconds after which it first fires."""
    first: dict[str, float] = {}
    began = time.monotonic()
    while (passed := time.monotonic() - began) < WITHIN_SECONDS:
        if is_restarting:
            deployment.supervisor.restart_ended()
        for alert in deployment.prometheus.firing():
            first.setdefault(alert, round(passed))
        time.sleep(LOOK_SECONDS)
    return first


def _restore(deployment: Deployment) -> None:
    """Wait until every program is scraped and no alert fires. Raises GaveUpError."""

    def is_quiet() -> bool:
        return deployment.prometheus.are_all_scraped() and not deployment.prometheus.firing()

    until("no alert to fire", is_quiet, RECOVERY_SECONDS, deployment.supervisor.restart_ended)
