"""Restarts of PostgreSQL under load, in both modes; no other process is restarted.

`fast` disconnects every client and shuts down in order (SIGINT); `immediate` aborts, and recovers from the log at its
next start (SIGQUIT). `pg_ctl restart -m fast|immediate` does the same, with some seconds between.
"""

import signal
import time
from collections.abc import Callable
from functools import partial

from django.db import InterfaceError, OperationalError, connections

from keyvault.management.supervisor import Supervisor
from rotation.models import Campaign
from tests.faults import expected_verdicts
from tests.faults.campaign import begin_campaign, count_closed, is_over, judge_campaign
from tests.faults.merchants import gateway_token, make_merchants
from tests.faults.programs import GaveUpError, restarted, served, until
from tests.faults.results import Options, Result, say
from tests.faults.servers import Restartable
from tests.faults.traffic import MerchantTraffic

MEMBERS = 60
REQUESTS_PER_SECOND = 80
AWAY_SECONDS = 4
RIGHT_WITHIN_SECONDS = 3
"""Time after PostgreSQL accepts connections again until every response is right again, in seconds."""

STEP_SECONDS = 300
END_SECONDS = 900
WAYS = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}


def run(options: Options) -> Result:
    result, outages = Result("restarts", n=len(WAYS)), []
    merchants, token = make_merchants(MEMBERS), gateway_token()
    with (
        served(options.folder) as (service, port),
        MerchantTraffic(merchants, port, token, REQUESTS_PER_SECOND, options.seed) as sent,
    ):
        campaign = begin_campaign()
        try:
            for number, (name, how) in enumerate(WAYS.items(), 1):
                enough = partial(_has_closed, campaign, MEMBERS * number // (len(WAYS) + 2))
                until("rotations to be closed", _in_spite(enough), STEP_SECONDS, service.restart_ended)
                outages.append(_restart(options.servers["postgres"], service, name, how))
            over = _in_spite(lambda: is_over(campaign, MEMBERS))
            began = time.monotonic()
            until("the end of the campaign", over, END_SECONDS, service.restart_ended)
            result.counts["seconds from the last return to the end"] = round(time.monotonic() - began, 1)
        except GaveUpError as gave_up:
            result.must_be(False, str(gave_up))
        # Wait so that the last responses are long after the last outage.
        service.wait(RIGHT_WITHIN_SECONDS)
    result.counts["programs started again"] = sum("starts again" in line for line in restarted)
    judge_campaign(result, campaign, MEMBERS)
    expected_verdicts.judge_traffic(result, sent.answers, outages)
    expected_verdicts.judge_end(result, merchants)
    expected_verdicts.judge_logs(result, options.folder / "logs", outages)
    return result


def _restart(server: Restartable, service: Supervisor, name: str, how: signal.Signals) -> tuple[float, float]:
    """Restart the server. Return the interval in which there may be no verdict."""
    began = time.time()
    server.stop(how)
    say(f"PostgreSQL is stopped: {name}")
    until_then = time.monotonic() + AWAY_SECONDS
    while time.monotonic() < until_then:
        service.restart_ended()
        service.wait(0.2)
    server.start()
    say("PostgreSQL is back")
    connections.close_all()  # this process is no part of the experiment
    return began, time.time() + RIGHT_WITHIN_SECONDS


def _has_closed(campaign: Campaign, enough: int) -> bool:
    return count_closed(campaign) >= enough


def _in_spite(look: Callable[[], bool]) -> Callable[[], bool]:
    """Check with a new connection if the old one was lost."""

    def looked() -> bool:
        try:
            return look()
        except (OperationalError, InterfaceError):
            connections.close_all()
            return False

    return looked
