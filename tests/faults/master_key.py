"""The master key and the session key leaked: both are rotated, the first one killed again and again on the way."""

import random
import signal
import subprocess
import sys

from keyvault.services.secrets.backend import secret_backend
from tests.environment import ROOT
from tests.faults import expected_verdicts
from tests.faults.campaign import begin_campaign, is_over
from tests.faults.merchants import gateway_token, make_merchants
from tests.faults.programs import GaveUpError, served, until
from tests.faults.results import Options, Result, say
from tests.faults.traffic import MerchantTraffic
from tests.killing import KILLED_MASTER_KEY_ROTATION

MEMBERS = 40
KILLS = 6
REQUESTS_PER_SECOND = 40
END_SECONDS = 600


def run(options: Options) -> Result:
    result, rng = Result("kills", n=KILLS), random.Random(options.seed)  # noqa: S311  not for secrets
    merchants, token = make_merchants(MEMBERS), gateway_token()
    former = (options.folder / "master.key").read_text()
    # This process has the keystore open, too.
    secret_backend.cache_clear()
    try:
        with served(options.folder):
            refused = _run("manage.py", "rotate_master_key")
            is_refused = refused.returncode == 1 and "Stop every server" in refused.stderr
            result.must_be(is_refused, f"it is not refused beside the service: {refused.stderr[-500:]}")
        for _ in range(KILLS):
            _kill_rotation(result, rng.randint(2, 12))
        done = _run("manage.py", "rotate_master_key")
        result.must_be(done.returncode == 0, f"the rotation does not end: {done.stderr[-500:]}")
        session = _run("manage.py", "rotate_session_key", "--end-sessions")
        result.must_be(session.returncode == 0, f"the session key is not rotated: {session.stderr[-500:]}")
        result.must_be((options.folder / "master.key").read_text() != former, "the master key is the former one")
        with (
            served(options.folder) as (service, port),
            MerchantTraffic(merchants, port, token, REQUESTS_PER_SECOND, options.seed) as sent,
        ):
            campaign = begin_campaign()
            until("the end of the campaign", lambda: is_over(campaign, MEMBERS), END_SECONDS, service.restart_ended)
        expected_verdicts.judge_traffic(result, sent.answers)
    except GaveUpError as gave_up:
        result.must_be(False, str(gave_up))
    expected_verdicts.judge_end(result, merchants)
    expected_verdicts.judge_logs(result, options.folder / "logs")
    return result


def _kill_rotation(result: Result, number: int) -> None:
    killed = _run("-c", KILLED_MASTER_KEY_ROTATION, str(number))
    say(f"killed at record {number}: {killed.returncode}")
    result.must_be(killed.returncode == -signal.SIGKILL, f"not killed: {killed.returncode} {killed.stderr[-500:]}")
    start = _run("-c", "import keyvault.project.wsgi")
    is_refused = start.returncode != 0 and "manage.py rotate_master_key" in start.stderr
    result.must_be(is_refused, f"the start is not refused: {start.returncode} {start.stderr[-500:]}")


def _run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
