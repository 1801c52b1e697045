"""Workers whose clock is wrong: nothing irreversible, an alarm, and the due work once the clock is right."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from keyvault.domain.keys import KeyState
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.plaintext import Plaintext
from keyvault.models import Key, Notice
from tests.faults import expected_verdicts
from tests.faults.merchants import gateway_token, make_merchants
from tests.faults.programs import GaveUpError, served, until
from tests.faults.results import Options, Result, say
from tests.faults.traffic import Merchant, MerchantTraffic
from tests.rotation import scene

MERCHANTS = 8
OVERDUE = 20
REQUESTS_PER_SECOND = 20
SKEWS = (3600.0, -3600.0)
"""Differences of the workers' clock from PostgreSQL's, in seconds."""

REFUSED = "irreversible actions are refused: the clock is wrong"
REFUSALS = 3
"""Runs of the maintenance in which nothing overdue may end."""

STEP_SECONDS = 300


def run(options: Options) -> Result:
    result = Result("clocks", n=len(SKEWS))
    merchants, token = make_merchants(MERCHANTS), gateway_token()
    place, long_ago = scene.account("overdue"), datetime.now(UTC) - timedelta(days=2)
    overdue = [
        scene.issue(place, long_ago, label=f"overdue {number}", expires_in_days=1)[0].key_id
        for number in range(OVERDUE)
    ]
    try:
        for skew in SKEWS:
            _serve_skewed(options, result, merchants, token, overdue, skew)
        result.must_be(Notice.objects.filter(kind=NoticeKind.CLOCK_DIFFERS).exists(), "there is no alarm")
        with served(options.folder) as (service, _):
            until("the overdue keys to expire", lambda: not _list_active(overdue), STEP_SECONDS, service.restart_ended)
    except GaveUpError as gave_up:
        result.must_be(False, str(gave_up))
    expected_verdicts.judge_end(result, merchants)
    return result


def _serve_skewed(
    options: Options, result: Result, merchants: Sequence[Merchant], token: Plaintext, overdue: list[str], skew: float
) -> None:
    before, clock = _count_refusals(options), options.folder / "clock"
    clock.write_text(str(skew))
    with (
        served(options.folder, environ={"FAULTS_CLOCK": str(clock)}, wrapper="tests.faults.skewed") as (service, port),
        MerchantTraffic(merchants, port, token, REQUESTS_PER_SECOND, options.seed) as sent,
    ):
        say(f"the workers' clock is {skew:+.0f} s from PostgreSQL's")
        until(
            "the workers to refuse",
            lambda: _count_refusals(options) >= before + REFUSALS,
            STEP_SECONDS,
            service.restart_ended,
        )
        ended = sorted(set(overdue) - set(_list_active(overdue)))
    result.must_be_none("ended under a wrong clock", ended)
    expected_verdicts.judge_traffic(result, sent.answers)


def _count_refusals(options: Options) -> int:
    return sum(log.read_text(errors="replace").count(REFUSED) for log in (options.folder / "logs").glob("worker*.log"))


def _list_active(keys: list[str]) -> list[str]:
    return list(Key.objects.filter(pk__in=keys, state=KeyState.ACTIVE).values_list("pk", flat=True))
