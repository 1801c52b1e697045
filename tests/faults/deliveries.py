"""A fifth of all messages of the beat and of the worker is lost, and a fifth is delivered twice."""

import json
from collections import Counter
from pathlib import Path

from tests.faults import expected_verdicts
from tests.faults.campaign import begin_campaign, is_over, judge_campaign
from tests.faults.merchants import gateway_token, make_merchants
from tests.faults.message_loss import SEED, TALLY
from tests.faults.programs import GaveUpError, served, until
from tests.faults.results import Options, Result
from tests.faults.traffic import MerchantTraffic

MEMBERS = 60
REQUESTS_PER_SECOND = 80
END_SECONDS = 900
FEWEST = 0.15
"""Minimum share of lost and of duplicate messages. With fewer the experiment proves nothing."""


def run(options: Options) -> Result:
    result, tally = Result("messages"), options.folder / "messages"
    merchants, token = make_merchants(MEMBERS), gateway_token()
    loss = {SEED: str(options.seed), TALLY: str(tally)}
    with (
        served(options.folder, environ=loss, wrapper="tests.faults.lossy_celery") as (service, port),
        MerchantTraffic(merchants, port, token, REQUESTS_PER_SECOND, options.seed) as sent,
    ):
        campaign = begin_campaign()
        try:
            until("the end of the campaign", lambda: is_over(campaign, MEMBERS), END_SECONDS, service.restart_ended)
        except GaveUpError as gave_up:
            result.must_be(False, str(gave_up))
    _count(result, tally)
    judge_campaign(result, campaign, MEMBERS)
    expected_verdicts.judge_traffic(result, sent.answers)
    expected_verdicts.judge_end(result, merchants)
    expected_verdicts.judge_logs(result, options.folder / "logs")
    return result


def _count(result: Result, tally: Path) -> None:
    times = Counter(json.loads(line)["times"] for line in tally.read_text().splitlines())
    result.n = times.total()
    result.counts |= {"lost": times[0], "delivered twice": times[2]}
    for fate in (0, 2):
        result.must_be(times[fate] >= FEWEST * result.n, f"only {times[fate]} of {result.n} messages met fate {fate}")
