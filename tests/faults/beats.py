"""Two beats and two workers, as after a deployment that left the first ones running: all due work is done once."""

from tests.faults import expected_verdicts
from tests.faults.campaign import begin_campaign, is_over, judge_campaign
from tests.faults.merchants import gateway_token, make_merchants
from tests.faults.programs import GaveUpError, served, until
from tests.faults.results import Options, Result
from tests.faults.traffic import MerchantTraffic

MEMBERS = 60
REQUESTS_PER_SECOND = 60
END_SECONDS = 900
STEPS = tuple(f"rotation.{step}" for step in ("staged", "publishing", "awaiting_proof"))
"""Events that occur exactly once in an undisturbed rotation."""


def run(options: Options) -> Result:
    result = Result("rotations", n=MEMBERS)
    merchants, token = make_merchants(MEMBERS), gateway_token()
    with (
        served(options.folder, workers=2, beats=2) as (service, port),
        MerchantTraffic(merchants, port, token, REQUESTS_PER_SECOND, options.seed) as sent,
    ):
        campaign = begin_campaign()
        try:
            until("the end of the campaign", lambda: is_over(campaign, MEMBERS), END_SECONDS, service.restart_ended)
        except GaveUpError as gave_up:
            result.must_be(False, str(gave_up))
        for program in service.programs:
            result.must_be(service.is_running(program.name), f"{program.name} is not running any more")
    judge_campaign(result, campaign, MEMBERS)
    result.must_be_none("steps taken twice", expected_verdicts.find_repeated(*STEPS))
    expected_verdicts.judge_traffic(result, sent.answers)
    expected_verdicts.judge_end(result, merchants)
    expected_verdicts.judge_logs(result, options.folder / "logs")
    return result
