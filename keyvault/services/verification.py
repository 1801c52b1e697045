"""The whole judgement of a presented key, for the doors that look keys up in the database."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial

from django.conf import settings
from django.db import InterfaceError, OperationalError

from keyvault.access.catalog import Bearer, Endpoint, LimiterLoss, Miss
from keyvault.access.customers import (
    Customer,
    CustomerFault,
    judge_customer_record,
    judge_customer_token,
    read_customer_token,
)
from keyvault.access.decision import Check, Denial, Grant, decide, deny_miss
from keyvault.access.limits import Limit, Spend
from keyvault.access.principals import KeyHolder
from keyvault.access.rules import EndpointRequest, EndpointRule
from keyvault.access.verification import (
    INVALID,
    deny_other_environment,
    find_ambiguous,
    find_exposed,
    judge_key,
    judge_record,
    read_exposed,
    read_key,
)
from keyvault.domain.digests import PEPPER_SET
from keyvault.domain.environments import Environment
from keyvault.domain.errors import DependencyUnavailableError, ErrorCode, NotFoundError, VerifierStaleError
from keyvault.domain.keys import DEAD_STATES, KeyKind, KeyRecord, KeyState
from keyvault.domain.keystring import STRING_SCOPE
from keyvault.models import Key
from keyvault.models.usage import Outcome
from keyvault.services.catalog import endpoint_limit, limit_of
from keyvault.services.limits import account_buckets, failed_proofs, limiter
from keyvault.services.lookup import BASE_URLS, find_customer_record, find_key_record
from keyvault.services.peppers import load_peppers, take_pepper
from keyvault.services.rehashing import pending_rehashes
from keyvault.services.usage import UsageLog

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Presented:
    """What came with a request for an endpoint; all of it untrusted.

    `scope` is the door's, not the client's: a key of a merchant outside it proves nothing there. `is_dry` spends no
    limit and is no failed attempt either.
    """

    key: str | None
    environment: Environment
    endpoint: Endpoint | Miss
    url: str = ""
    merchant: str | None = None
    merchant_context: str | None = None
    store_context: str | None = None
    bearer: str | None = None
    origin: str | None = None
    client_address: str | None = None
    cost: int = 1
    scope: frozenset[str] | None = None
    is_dry: bool = False


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict; `holder` once possession was proved, whatever the verdict; `trace` of the applied rules.

    `spend` is what the limits said, `exposed_key_id` the key that was proved to stand in the URL.
    """

    verdict: Grant | Denial
    holder: KeyHolder | None = None
    record: KeyRecord | None = None
    customer: Customer | None = None
    spend: Spend | None = None
    trace: list[Check] = field(default_factory=list)
    exposed_key_id: str | None = None
    has_origin: bool = False


def judge_presented(presented: Presented, now: datetime) -> Judgement:
    """Every rule in the order of the contract's table of verdicts; the first that fails answers.

    Raises NotFoundError for an environment that this process does not serve.
    A database that does not answer leaves nothing to vouch for: `verifier_stale`, never a yes. So does a pepper that
    this process has not loaded yet. A dead key of a pepper version that was retired can no longer be proved: it is
    `credential_invalid` from then on, not `key_revoked`.
    """
    if presented.environment not in settings.ENVIRONMENTS:
        raise NotFoundError(f"This process does not serve {presented.environment}.")
    try:
        return _judge(presented, now)
    except (OperationalError, InterfaceError):
        _log.exception("a key cannot be looked up")
        return before_proof(
            Denial(ErrorCode.VERIFIER_STALE, "The key cannot be looked up right now.", retry_after_seconds=1)
        )
    except VerifierStaleError as error:
        _log.warning("a key cannot be judged", extra={"why": error.internal})
        return before_proof(Denial(error.code, error.detail, error.internal, retry_after_seconds=1))


def _judge(presented: Presented, now: datetime) -> Judgement:
    exposed = find_exposed(presented.url)
    if exposed is not None:
        return replace(before_proof(exposed), exposed_key_id=_prove_exposed(presented, now))
    ambiguous = find_ambiguous(presented.key, presented.bearer)
    if ambiguous is not None:
        return before_proof(ambiguous)
    if presented.key is None and isinstance(presented.endpoint, Miss):
        # Whoever sends no credential learns that there is nothing to send one to.
        return before_proof(deny_miss(presented.endpoint, None))
    keystring = read_key(
        presented.key, environment=presented.environment, brand=settings.KEY_BRAND, base_urls=BASE_URLS
    )
    if isinstance(keystring, Denial):
        return _refused_before_proof(keystring, presented)
    # Taken before the record is read: what it was hashed with is in these, or came since; retired it cannot be.
    peppers = load_peppers(PEPPER_SET[presented.environment])
    with failed_proofs().look_up(presented.client_address):
        record = find_key_record(keystring.key_id)
    if record is not None:
        peppers = take_pepper(peppers, record.pepper_version)
    judged = judge_key(keystring, record, peppers, now)
    if record is None or not _is_proved(judged, presented.scope):
        return _refused_before_proof(INVALID, presented)
    if record.state not in DEAD_STATES and not presented.is_dry:
        proved = (record.digest, record.pepper_version)
        pending_rehashes.note_proof(Key, record.key_id, keystring.text, proved, peppers)
    return _judge_proved(presented, record, judged, now, partial(_judge_bearer, presented, now=now))


def _is_proved(judged: KeyHolder | Denial, scope: frozenset[str] | None) -> bool:
    """Whether possession was shown, of a key that the door may be told of."""
    holder = judged if isinstance(judged, KeyHolder) else judged.holder
    return holder is not None and (scope is None or holder.merchant_id in scope)


def explain_described(
    presented: Presented, key_id: str, customer_token_id: str | None, now: datetime
) -> Judgement | None:
    """What a request would be answered if it came with this key: for whoever is asked why. None: no such key.

    Nobody needs the secret for it, so possession is assumed, of the customer access token too. Nothing is spent.
    `presented.bearer` says only whether there is one.
    """
    record = find_key_record(key_id)
    if record is None:
        return None
    if record.environment is not presented.environment:
        return before_proof(deny_other_environment(record.environment, presented.environment, BASE_URLS))
    customer = find_customer_record(customer_token_id) if customer_token_id else None

    def judge_named(holder: KeyHolder) -> Customer | CustomerFault | None:
        if presented.bearer is None or not _takes_bearer(presented.endpoint):
            return None
        return CustomerFault.INVALID if customer is None else judge_customer_record(customer, holder, now)

    return _judge_proved(replace(presented, is_dry=True), record, judge_record(record, now), now, judge_named)


def _judge_proved(
    presented: Presented,
    record: KeyRecord,
    judged: KeyHolder | Denial,
    now: datetime,
    judge_customer: Callable[[KeyHolder], Customer | CustomerFault | None],
) -> Judgement:
    """From the key's state on: possession is proved, or assumed to explain."""
    if isinstance(judged, Denial):
        return Judgement(judged, judged.holder, record, trace=[_PROVED, *_state_checks(judged.code)])
    holder = judged
    trace = [_PROVED, *_state_checks(None)]
    customer = judge_customer(holder)
    request = EndpointRequest(
        named_merchant=presented.merchant,
        has_bearer=presented.bearer is not None,
        has_origin=presented.origin is not None,
        client_address=presented.client_address,
        merchant_context=presented.merchant_context,
        store_context=presented.store_context,
        customer=customer,
    )
    verdict = decide(EndpointRule(presented.endpoint), holder, request, now, trace)
    judgement = Judgement(
        verdict,
        holder,
        record,
        customer if isinstance(customer, Customer) else None,
        trace=trace,
        has_origin=request.has_origin,
    )
    return judgement if isinstance(verdict, Denial) else _spent(judgement, presented)


def _takes_bearer(endpoint: Endpoint | Miss) -> bool:
    return isinstance(endpoint, Endpoint) and endpoint.bearer is not Bearer.NONE


def _judge_bearer(presented: Presented, holder: KeyHolder, *, now: datetime) -> Customer | CustomerFault | None:
    """None where there is no Bearer, or none is taken: then nothing is looked up."""
    if presented.bearer is None or not _takes_bearer(presented.endpoint):
        return None
    keystring = read_customer_token(presented.bearer, environment=presented.environment, brand=settings.KEY_BRAND)
    if isinstance(keystring, CustomerFault):
        return keystring
    peppers = load_peppers(PEPPER_SET[presented.environment])
    record = find_customer_record(keystring.key_id)
    if record is not None:
        peppers = take_pepper(peppers, record.pepper_version)
    return judge_customer_token(keystring, record, holder, peppers, now)


def _spent(judgement: Judgement, presented: Presented) -> Judgement:
    """The judgement once both limits have had their say; a request that is refused spends from neither."""
    endpoint, record, holder = presented.endpoint, judgement.record, judgement.holder
    if isinstance(endpoint, Miss) or record is None or holder is None:
        raise TypeError("a grant is for an endpoint, after proof")
    if not endpoint.spends:
        return judgement
    own = limit_of(record.limit_count, record.limit_seconds)
    endpoints_own, row = endpoint_limit(record.account_id, record.environment, endpoint)
    buckets = account_buckets(
        record.account_id,
        record.kind,
        own or default_limit(record.environment),
        endpoint.name,
        endpoints_own,
        account_setting=str(record.account_version),
        endpoint_setting="" if row is None else f"{row.pk}.{row.version}",
    )
    largest = min(bucket.limit.count for bucket in buckets)
    if presented.cost > largest:
        # More can never be spent, so that waiting would not help.
        detail = f"The cost {presented.cost} is more than the limit's burst of {largest}."
        return replace(judgement, verdict=Denial(ErrorCode.REQUEST_INVALID, detail, holder=holder))
    if presented.is_dry:
        return judgement
    try:
        spend = limiter().spend(buckets, presented.cost, refuse_on_loss=endpoint.on_limiter_loss is LimiterLoss.REFUSE)
    except DependencyUnavailableError as error:
        # Asked for by the endpoint's failure policy: without its limiter it lets nobody in.
        denial = Denial(error.code, error.detail, holder=holder, retry_after_seconds=error.retry_after_seconds)
        return replace(judgement, verdict=denial)
    judgement.trace.append(Check(ErrorCode.RATE_LIMITED, spend.allowed))
    if spend.allowed:
        return replace(judgement, spend=spend)
    binding = spend.binding
    denial = Denial(
        ErrorCode.RATE_LIMITED,
        f"The {binding.policy} limit of {binding.limit.count} in {binding.limit.seconds} s is used up.",
        holder=holder,
        retry_after_seconds=spend.retry_after_seconds,
    )
    return replace(judgement, verdict=denial, spend=spend)


def default_limit(environment: Environment) -> Limit:
    """What an account may do unless it has a limit of its own."""
    return Limit(*settings.ACCOUNT_LIMITS[environment])


def _prove_exposed(presented: Presented, now: datetime) -> str | None:
    """The id of the key in the URL if it is a real one of this environment, and of a merchant in scope."""
    keystring = read_exposed(presented.url, settings.KEY_BRAND)
    if keystring is None or keystring.scope is not STRING_SCOPE[presented.environment]:
        return None
    peppers = load_peppers(PEPPER_SET[presented.environment])
    try:
        record = find_key_record(keystring.key_id)
        if record is not None:
            peppers = take_pepper(peppers, record.pepper_version)
    except (OperationalError, InterfaceError, VerifierStaleError):
        return None  # The answer is the same either way.
    judged = judge_key(keystring, record, peppers, now)
    return keystring.key_id if _is_proved(judged, presented.scope) else None


_PROVED = Check(ErrorCode.CREDENTIAL_INVALID, True)
_STATES = (ErrorCode.KEY_NOT_ACTIVE, ErrorCode.KEY_EXPIRED, ErrorCode.KEY_REVOKED)


def before_proof(denial: Denial) -> Judgement:
    """Nothing but the answer itself is told to whoever has not shown possession."""
    return Judgement(denial, trace=[Check(denial.code, False)])


def _refused_before_proof(denial: Denial, presented: Presented) -> Judgement:
    """Failed proofs are counted by the client's address, all alike: too many are told to come back later."""
    if denial.code is ErrorCode.CREDENTIAL_INVALID and not presented.is_dry:
        denial = replace(denial, retry_after_seconds=failed_proofs().note(presented.client_address))
    return before_proof(denial)


def _state_checks(failed: ErrorCode | None) -> list[Check]:
    applied = _STATES if failed is None else _STATES[: _STATES.index(failed) + 1]
    return [Check(code, code is not failed) for code in applied]


def note_use(
    judgement: Judgement,
    log: UsageLog,
    *,
    source: str,
    user_agent: str,
    endpoint: str,
    origin: str | None = None,
    is_probe: bool = False,
) -> None:
    """Notes what a door has judged: real use is evidence, a try on a suspended key restarts its quarantine and alerts.

    A key in a URL, or a private one from a browser, is noted as a suspected exposure. Of a public key the page's
    origin is noted too. What `is_probe`, a test call of our own, is noted as that and as nothing else. Nothing is
    noted before proof: whoever merely names a key id leaves no trace on the key.
    """
    holder, found = judgement.holder, list(_outcomes(judgement))
    if is_probe:
        found = [(key_id, Outcome.PROBED) for key_id in {key_id for key_id, _ in found}]
    page = origin if origin and holder is not None and holder.kind is KeyKind.PUBLIC else ""
    for key_id, outcome in found:
        if outcome in _ALERTS:
            _log.warning(_ALERTS[outcome], extra={"key_id": key_id, "source": source})
        log.note(key_id, source=source, user_agent=user_agent, endpoint=endpoint, origin=page, outcome=outcome)
    if judgement.customer is not None and isinstance(judgement.verdict, Grant) and not is_probe:
        log.note_secret_use(judgement.customer.token_id)


_ALERTS = {
    Outcome.EXPOSED_IN_URL: "a key stands in a URL",
    Outcome.EXPOSED_IN_BROWSER: "a private key came with an Origin",
    Outcome.REFUSED: "suspended key was tried",
}


def _outcomes(judgement: Judgement) -> Iterator[tuple[str, Outcome]]:
    """What is proved of which key. One that was good, but denied for another reason, is in somebody's hands still."""
    if judgement.exposed_key_id is not None:
        yield judgement.exposed_key_id, Outcome.EXPOSED_IN_URL
    holder, record = judgement.holder, judgement.record
    if holder is None or record is None:
        return
    denied = judgement.verdict.code if isinstance(judgement.verdict, Denial) else None
    is_reported = denied is None and judgement.has_origin and holder.reports_origin
    if is_reported or denied is ErrorCode.PRIVATE_KEY_IN_BROWSER:
        yield holder.key_id, Outcome.EXPOSED_IN_BROWSER
    if denied is None:
        yield holder.key_id, Outcome.ALLOWED
    elif denied not in _STATES:
        yield holder.key_id, Outcome.DENIED
    elif record.state is KeyState.SUSPENDED:
        yield holder.key_id, Outcome.REFUSED
