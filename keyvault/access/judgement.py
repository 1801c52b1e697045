"""The complete judgement of a presented key: every rule, in the order of the contract's verdict table.

    judge(presented, sources, now) -> Judgement

Entry points differ only in their `Sources`: where they find records, and where they keep buckets.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Protocol

from keyvault.access.catalog import Bearer, Endpoint, LimiterFailurePolicy, NoMatchingEndpoint
from keyvault.access.customers import (
    Customer,
    CustomerFault,
    CustomerRecord,
    judge_customer_record,
    judge_customer_token,
    read_customer_token,
)
from keyvault.access.decision import Check, Denial, Grant, decide, deny_unmatched
from keyvault.access.limits import Bucket, Spend
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
from keyvault.domain.digests import Peppers
from keyvault.domain.environments import Environment
from keyvault.domain.errors import DependencyUnavailableError, ErrorCode, VerifierStaleError
from keyvault.domain.keys import DEAD_STATES, KeyRecord
from keyvault.domain.keystring import STRING_SCOPE, KeyString


@dataclass(frozen=True, slots=True)
class VerificationRequest:
    """The input of a judgement: the untrusted content of a request for an endpoint.

    The entry point, not the client, sets `scope`: a key of any other merchant is invalid. A dry run (`is_dry`)
    spends no limit and counts no failed attempt.
    """

    key: str | None
    environment: Environment
    endpoint: Endpoint | NoMatchingEndpoint
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
    """The verdict, with the trace of the applied rules. `holder` is set once possession was proved, even on a denial.

    `spend` is the result of the limits, `exposed_key_id` the id of a genuine key in the URL.
    """

    verdict: Grant | Denial
    holder: KeyHolder | None = None
    record: KeyRecord | None = None
    customer: Customer | None = None
    spend: Spend | None = None
    trace: list[Check] = field(default_factory=list)
    exposed_key_id: str | None = None
    has_origin: bool = False


class Sources(Protocol):
    """An entry point's data access for a judgement. An exception that it raises aborts the judgement."""

    key_prefix: str
    base_urls: Mapping[Environment, str]

    def peppers(self, environment: Environment) -> Peppers:
        """Return the currently loaded peppers."""

    def take_pepper(self, peppers: Peppers, version: int) -> Peppers:
        """Return these peppers, or newer ones with that version. Raises VerifierStaleError if it is not loaded yet."""

    def find_key(self, key_id: str, address: str | None) -> KeyRecord | None:
        """Look up a key. `address`: the client's; look-ups for an address with too many failures run one at a time."""

    def find_customer(self, token_id: str) -> CustomerRecord | None: ...

    def buckets(self, record: KeyRecord, endpoint: Endpoint) -> tuple[Bucket, ...]:
        """Return the buckets of a request: the account's, and the endpoint's if it has a limit."""

    def spend(self, buckets: tuple[Bucket, ...], cost: int, *, refuse_on_loss: bool) -> Spend:
        """Spend tokens. Raises DependencyUnavailableError if the limiter is unavailable and no fallback is allowed."""

    def note_failed_proof(self, address: str | None) -> int | None:
        """Count a failed proof. Returns the seconds to wait when the address has exceeded its limit, else None."""

    def note_proof(self, record: KeyRecord, keystring: KeyString, peppers: Peppers) -> None:
        """Record the proof of a live key, so that a digest with an old pepper can be recomputed with a new one."""


def judge(presented: VerificationRequest, sources: Sources, now: datetime) -> Judgement:
    """Apply every rule in order; the first that fails determines the verdict. Raises what the sources raise.

    A revoked or expired key whose pepper version was retired cannot be proved any more: the code is then
    `credential_invalid`, not `key_revoked`.
    """
    exposed = find_exposed(presented.url)
    if exposed is not None:
        return replace(before_proof(exposed), exposed_key_id=_prove_exposed(presented, sources, now))
    ambiguous = find_ambiguous(presented.key, presented.bearer)
    if ambiguous is not None:
        return before_proof(ambiguous)
    if presented.key is None and isinstance(presented.endpoint, NoMatchingEndpoint):
        # A request without a credential learns that the endpoint does not exist.
        return before_proof(deny_unmatched(presented.endpoint, None))
    keystring = read_key(
        presented.key, environment=presented.environment, key_prefix=sources.key_prefix, base_urls=sources.base_urls
    )
    if isinstance(keystring, Denial):
        return _deny_unproved(keystring, presented, sources)
    # Take the peppers before reading the record. Otherwise the record's version could be retired between the two.
    peppers = sources.peppers(presented.environment)
    record = sources.find_key(keystring.key_id, presented.client_address)
    if record is not None:
        peppers = sources.take_pepper(peppers, record.pepper_version)
    judged = judge_key(keystring, record, peppers, now)
    if record is None or not _is_proved(judged, presented.scope):
        return _deny_unproved(INVALID, presented, sources)
    if record.state not in DEAD_STATES and not presented.is_dry:
        sources.note_proof(record, keystring, peppers)
    return _judge_proved(
        presented, record, judged, now, sources, partial(_judge_bearer, presented, sources=sources, now=now)
    )


def judge_described(
    presented: VerificationRequest, record: KeyRecord, customer: CustomerRecord | None, sources: Sources, now: datetime
) -> Judgement:
    """Judge a hypothetical request with this key, to explain a verdict.

    The secret is not needed: possession of the key and of the customer access token is assumed. Nothing is spent.
    `presented.bearer` only states whether a token is present.
    """
    if record.environment is not presented.environment:
        return before_proof(deny_other_environment(record.environment, presented.environment, sources.base_urls))

    def judge_named(holder: KeyHolder) -> Customer | CustomerFault | None:
        if presented.bearer is None or not _takes_bearer(presented.endpoint):
            return None
        return CustomerFault.INVALID if customer is None else judge_customer_record(customer, holder, now)

    return _judge_proved(replace(presented, is_dry=True), record, judge_record(record, now), now, sources, judge_named)


def _is_proved(judged: KeyHolder | Denial, scope: frozenset[str] | None) -> bool:
    """Return whether possession was proved, of a key in the entry point's scope."""
    holder = judged if isinstance(judged, KeyHolder) else judged.holder
    return holder is not None and (scope is None or holder.merchant_id in scope)


def _judge_proved(
    presented: VerificationRequest,
    record: KeyRecord,
    judged: KeyHolder | Denial,
    now: datetime,
    sources: Sources,
    judge_customer: Callable[[KeyHolder], Customer | CustomerFault | None],
) -> Judgement:
    """Apply the rules from the key's state on. Possession is proved, or assumed to explain a verdict."""
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
    return judgement if isinstance(verdict, Denial) else _apply_limits(judgement, presented, sources)


def _takes_bearer(endpoint: Endpoint | NoMatchingEndpoint) -> bool:
    return isinstance(endpoint, Endpoint) and endpoint.bearer is not Bearer.NONE


def _judge_bearer(
    presented: VerificationRequest, holder: KeyHolder, *, sources: Sources, now: datetime
) -> Customer | CustomerFault | None:
    """Judge the Bearer. Returns None without a look-up if there is no Bearer or the endpoint takes none."""
    if presented.bearer is None or not _takes_bearer(presented.endpoint):
        return None
    keystring = read_customer_token(presented.bearer, environment=presented.environment, key_prefix=sources.key_prefix)
    if isinstance(keystring, CustomerFault):
        return keystring
    peppers = sources.peppers(presented.environment)
    record = sources.find_customer(keystring.key_id)
    if record is not None:
        peppers = sources.take_pepper(peppers, record.pepper_version)
    return judge_customer_token(keystring, record, holder, peppers, now)


def _apply_limits(judgement: Judgement, presented: VerificationRequest, sources: Sources) -> Judgement:
    """Apply the limits to a granted request. A request that exceeds one limit spends from none."""
    endpoint, record, holder = presented.endpoint, judgement.record, judgement.holder
    if isinstance(endpoint, NoMatchingEndpoint) or record is None or holder is None:
        raise TypeError("limits apply to a granted request for an endpoint")
    if not endpoint.spends:
        return judgement
    buckets = sources.buckets(record, endpoint)
    largest = min(bucket.limit.count for bucket in buckets)
    if presented.cost > largest:
        # The bucket never holds that many tokens, so waiting would not help.
        detail = f"The cost {presented.cost} exceeds the limit's burst of {largest}."
        return replace(judgement, verdict=Denial(ErrorCode.REQUEST_INVALID, detail, holder=holder))
    if presented.is_dry:
        return judgement
    try:
        spend = sources.spend(
            buckets, presented.cost, refuse_on_loss=endpoint.on_limiter_loss is LimiterFailurePolicy.REFUSE
        )
    except DependencyUnavailableError as error:
        # The endpoint's failure policy refuses all requests while the limiter is unavailable.
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


def _prove_exposed(presented: VerificationRequest, sources: Sources, now: datetime) -> str | None:
    """Return the id of the key in the URL if it is genuine, of this environment and of a merchant in scope."""
    keystring = read_exposed(presented.url, sources.key_prefix)
    if keystring is None or keystring.scope is not STRING_SCOPE[presented.environment]:
        return None
    peppers = sources.peppers(presented.environment)
    try:
        record = sources.find_key(keystring.key_id, None)
        if record is not None:
            peppers = sources.take_pepper(peppers, record.pepper_version)
    except VerifierStaleError:
        return None  # The denial is the same either way.
    judged = judge_key(keystring, record, peppers, now)
    return keystring.key_id if _is_proved(judged, presented.scope) else None


_PROVED = Check(ErrorCode.CREDENTIAL_INVALID, True)
KEY_STATE_CODES = (ErrorCode.KEY_NOT_ACTIVE, ErrorCode.KEY_EXPIRED, ErrorCode.KEY_REVOKED)
"""Error codes that depend only on a key's state."""


def before_proof(denial: Denial) -> Judgement:
    """Return a judgement without key and holder: a caller that has not proved possession learns only the denial."""
    return Judgement(denial, trace=[Check(denial.code, False)])


def deny_stale(detail: str, internal: str = "") -> Judgement:
    """Deny because the key data is not current (fail closed)."""
    return before_proof(Denial(ErrorCode.VERIFIER_STALE, detail, internal, retry_after_seconds=1))


def _deny_unproved(denial: Denial, presented: VerificationRequest, sources: Sources) -> Judgement:
    """Count a failed proof by the client's address. Beyond its limit the denial has a Retry-After."""
    if denial.code is ErrorCode.CREDENTIAL_INVALID and not presented.is_dry:
        denial = replace(denial, retry_after_seconds=sources.note_failed_proof(presented.client_address))
    return before_proof(denial)


def _state_checks(failed: ErrorCode | None) -> list[Check]:
    applied = KEY_STATE_CODES if failed is None else KEY_STATE_CODES[: KEY_STATE_CODES.index(failed) + 1]
    return [Check(code, code is not failed) for code in applied]
