"""The whole judgement of a presented key, for the doors that look keys up in the database."""

import logging
from dataclasses import dataclass, field
from datetime import datetime

from django.conf import settings

from keyvault.access.catalog import Endpoint, Miss
from keyvault.access.decision import Check, Denial, Grant, decide
from keyvault.access.principals import KeyHolder
from keyvault.access.rules import EndpointRequest, EndpointRule
from keyvault.access.verification import find_exposed, judge_key, read_key
from keyvault.domain.digests import PEPPER_SET
from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode
from keyvault.domain.keys import KeyRecord, KeyState
from keyvault.models.usage import Outcome
from keyvault.services.lookup import BASE_URLS, find_key_record
from keyvault.services.peppers import load_peppers
from keyvault.services.usage import UsageLog

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Presented:
    """What came with a request for an endpoint; all of it untrusted."""

    key: str | None
    environment: Environment
    endpoint: Endpoint | Miss
    url: str = ""
    merchant: str | None = None
    bearer: str | None = None
    origin: str | None = None


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict; `holder` once possession was proved, whatever the verdict; `trace` of the applied rules."""

    verdict: Grant | Denial
    holder: KeyHolder | None = None
    record: KeyRecord | None = None
    trace: list[Check] = field(default_factory=list)


def judge_presented(presented: Presented, now: datetime) -> Judgement:
    """Every rule in the order of the contract's table of verdicts; the first that fails answers."""
    exposed = find_exposed(presented.url)
    if exposed is not None:
        return before_proof(exposed)
    keystring = read_key(
        presented.key, environment=presented.environment, brand=settings.KEY_BRAND, base_urls=BASE_URLS
    )
    if isinstance(keystring, Denial):
        return before_proof(keystring)
    record = find_key_record(keystring.key_id)
    holder = judge_key(keystring, record, load_peppers(PEPPER_SET[presented.environment]), now)
    if isinstance(holder, Denial):
        if holder.holder is None:
            return before_proof(holder)
        return Judgement(holder, holder.holder, record, [_PROVED, *_state_checks(holder.code)])
    trace = [_PROVED, *_state_checks(None)]
    request = EndpointRequest(presented.merchant, presented.bearer is not None, presented.origin is not None)
    verdict = decide(EndpointRule(presented.endpoint), holder, request, now, trace)
    return Judgement(verdict, holder, record, trace)


_PROVED = Check(ErrorCode.CREDENTIAL_INVALID, True)
_STATES = (ErrorCode.KEY_NOT_ACTIVE, ErrorCode.KEY_EXPIRED, ErrorCode.KEY_REVOKED)


def before_proof(denial: Denial) -> Judgement:
    """Nothing but the answer itself is told to whoever has not shown possession."""
    return Judgement(denial, trace=[Check(denial.code, False)])


def _state_checks(failed: ErrorCode | None) -> list[Check]:
    applied = _STATES if failed is None else _STATES[: _STATES.index(failed) + 1]
    return [Check(code, code is not failed) for code in applied]


def note_use(judgement: Judgement, log: UsageLog, *, source: str, user_agent: str, endpoint: str) -> None:
    """Notes what a door has judged: real use is evidence, a try on a suspended key restarts its quarantine and alerts.

    Nothing is noted before proof: whoever merely names a key id leaves no trace on the key.
    """
    holder, record = judgement.holder, judgement.record
    if holder is None or record is None:
        return
    if isinstance(judgement.verdict, Grant):
        outcome = Outcome.ALLOWED
    elif record.state is KeyState.SUSPENDED:
        outcome = Outcome.REFUSED
        _log.warning("suspended key was tried", extra={"key_id": holder.key_id, "source": source})
    else:
        return
    log.note(holder.key_id, source=source, user_agent=user_agent, endpoint=endpoint, outcome=outcome)
