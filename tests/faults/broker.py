"""The broker is killed in the middle of a campaign, with every message in it, and restarted later."""

import signal
import time

from tests.faults import expected_verdicts
from tests.faults.campaign import begin_campaign, count_closed, is_over, judge_campaign
from tests.faults.merchants import gateway_token, make_merchants
from tests.faults.programs import GaveUpError, restarted, served, until
from tests.faults.results import Options, Result, say
from tests.faults.traffic import MerchantTraffic

MEMBERS = 60
REQUESTS_PER_SECOND = 80
AWAY_SECONDS = 12
RIGHT_WITHIN_SECONDS = 10
"""Time after the broker's return in which its clients recover, in seconds."""

BEGIN_SECONDS = 300
END_SECONDS = 900


def run(options: Options) -> Result:
    result, broker, outages = Result("members"), options.servers[options.choice], []
    merchants, token = make_merchants(MEMBERS), gateway_token()
    with (
        served(options.folder) as (service, port),
        MerchantTraffic(merchants, port, token, REQUESTS_PER_SECOND, options.seed) as sent,
    ):
        campaign = begin_campaign()
        try:
            until(
                "the first rotations",
                lambda: count_closed(campaign) >= MEMBERS // 10,
                BEGIN_SECONDS,
                service.restart_ended,
            )
            stopped_at = time.time()
            broker.stop(signal.SIGKILL)
            before = count_closed(campaign)
            say(f"{options.choice} is killed, with {before} of {MEMBERS} rotations completed")
            until_then = time.monotonic() + AWAY_SECONDS
            while time.monotonic() < until_then:
                service.restart_ended()
                service.wait(0.2)
            result.counts["completed while it was away"] = count_closed(campaign) - before
            broker.start()
            back_at = time.monotonic()
            outages.append((stopped_at, time.time() + RIGHT_WITHIN_SECONDS))
            say(f"{options.choice} is back")
            until("the end of the campaign", lambda: is_over(campaign, MEMBERS), END_SECONDS, service.restart_ended)
            result.counts["seconds from its return to the end"] = round(time.monotonic() - back_at, 1)
        except GaveUpError as gave_up:
            result.must_be(False, str(gave_up))
    result.n = MEMBERS
    result.counts["programs started again"] = sum("starts again" in line for line in restarted)
    judge_campaign(result, campaign, MEMBERS)
    expected_verdicts.judge_traffic(result, sent.answers)
    expected_verdicts.judge_end(result, merchants)
    expected_verdicts.judge_logs(result, options.folder / "logs", outages)
    return result
