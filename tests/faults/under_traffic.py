"""Rotation under traffic: all of 200 credentials are in constant use while a campaign rotates them."""

import time

from tests.faults import expected_verdicts
from tests.faults.campaign import begin_campaign, count_closed, is_over, judge_campaign
from tests.faults.merchants import gateway_token, make_merchants
from tests.faults.programs import GaveUpError, served, until
from tests.faults.results import Options, Result, say
from tests.faults.traffic import MerchantTraffic

MEMBERS = 200
REQUESTS_PER_SECOND = 150
BY_TURNS_SECONDS = 8
"""Time of alternating use, in seconds: an engine that ignores the quiet period would revoke a key in use."""

END_SECONDS = 900


def run(options: Options) -> Result:
    result = Result("rotations")
    merchants, token = make_merchants(MEMBERS), gateway_token()
    say(f"{MEMBERS} credentials")
    with (
        served(options.folder) as (service, port),
        MerchantTraffic(merchants, port, token, REQUESTS_PER_SECOND, options.seed, 8, BY_TURNS_SECONDS) as sent,
    ):
        began = time.monotonic()
        campaign = begin_campaign()
        try:
            until("the end of the campaign", lambda: is_over(campaign, MEMBERS), END_SECONDS, service.restart_ended)
        except GaveUpError as gave_up:
            result.must_be(False, str(gave_up))
        took = time.monotonic() - began
        result.n = count_closed(campaign)
    result.counts |= {
        "seconds": round(took, 1),
        "rotations a second": round(result.n / took, 2),
        "requests a second": round(len(sent.answers) / took, 1),
        "with the old key beside the new one": sum(merchant.old_turns for merchant in merchants),
    }
    result.must_be(sum(merchant.old_turns for merchant in merchants) >= 2 * MEMBERS, "too few used both keys by turns")
    judge_campaign(result, campaign, MEMBERS)
    expected_verdicts.judge_traffic(result, sent.answers)
    expected_verdicts.judge_end(result, merchants)
    expected_verdicts.judge_logs(result, options.folder / "logs")
    return result
