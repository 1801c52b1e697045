"""The whole judgement of a presented key: every rule, in the order of the contract's table of verdicts.

    judge(presented, sources, now) -> Judgement

The doors differ in their sources alone: where a record comes from, and where a bucket lives.
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
from keyvault.access.decision import Check, Denial, Grant, decide, deny_miss
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
    """What came with a request for an endpoint; all of it untrusted.

    `scope` is the door's, not the client's: a key of a merchant outside it proves nothing there. `is_dry` spends no
    limit and is no failed attempt either.
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


class Sources(Protocol):
    """Where a door takes from what a judgement needs. Whatever it raises ends the judgement."""

    brand: str
    base_urls: Mapping[Environment, str]

    def peppers(self, environment: Environment) -> Peppers:
        """Those of this moment."""

    def take_pepper(self, peppers: Peppers, version: int) -> Peppers:
        """These, or newer ones that have that version. Raises VerifierStaleError when it is not there yet."""

    def find_key(self, key_id: str, address: str | None) -> KeyRecord | None:
        """`address` of the client: look-ups of those that have failed too often wait for each other."""

    def find_customer(self, token_id: str) -> CustomerRecord | None: ...

    def buckets(self, record: KeyRecord, endpoint: Endpoint) -> tuple[Bucket, ...]:
        """What a request for the endpoint spends from: the account's, and the endpoint's where it has a limit."""

    def spend(self, buckets: tuple[Bucket, ...], cost: int, *, refuse_on_loss: bool) -> Spend:
        """Raises DependencyUnavailableError when the limits are lost and nothing may stand in for them."""

    def note_failed_proof(self, address: str | None) -> int | None:
        """Counts one; the seconds after which to come back when this address has had too many."""

    def note_proof(self, record: KeyRecord, keystring: KeyString, peppers: Peppers) -> None:
        """A living key was proved: its digest can be renewed where it leans on an old pepper."""


def judge(presented: VerificationRequest, sources: Sources, now: datetime) -> Judgement:
    """Every rule in order; the first that fails answers. Raises what the sources raise.

    A dead key of a pepper version that was retired can no longer be proved: it is `credential_invalid` from then on,
    not `key_revoked`.
    """
    exposed = find_exposed(presented.url)
    if exposed is not None:
        return replace(before_proof(exposed), exposed_key_id=_prove_exposed(presented, sources, now))
    ambiguous = find_ambiguous(presented.key, presented.bearer)
    if ambiguous is not None:
        return before_proof(ambiguous)
    if presented.key is None and isinstance(presented.endpoint, NoMatchingEndpoint):
        # Whoever sends no credential learns that there is nothing to send one to.
        return before_proof(deny_miss(presented.endpoint, None))
    keystring = read_key(
        presented.key, environment=presented.environment, brand=sources.brand, base_urls=sources.base_urls
    )
    if isinstance(keystring, Denial):
        return _refused_before_proof(keystring, presented, sources)
    # Taken before the record is read: what it was hashed with is in these, or came since; retired it cannot be.
    peppers = sources.peppers(presented.environment)
    record = sources.find_key(keystring.key_id, presented.client_address)
    if record is not None:
        peppers = sources.take_pepper(peppers, record.pepper_version)
    judged = judge_key(keystring, record, peppers, now)
    if record is None or not _is_proved(judged, presented.scope):
        return _refused_before_proof(INVALID, presented, sources)
    if record.state not in DEAD_STATES and not presented.is_dry:
        sources.note_proof(record, keystring, peppers)
    return _judge_proved(
        presented, record, judged, now, sources, partial(_judge_bearer, presented, sources=sources, now=now)
    )


def judge_described(
    presented: VerificationRequest, record: KeyRecord, customer: CustomerRecord | None, sources: Sources, now: datetime
) -> Judgement:
    """What a request would be answered if it came with this key: for whoever is asked why.

    Nobody needs the secret for it, so possession is assumed, of the customer access token too. Nothing is spent.
    `presented.bearer` says only whether there is one.
    """
    if record.environment is not presented.environment:
        return before_proof(deny_other_environment(record.environment, presented.environment, sources.base_urls))

    def judge_named(holder: KeyHolder) -> Customer | CustomerFault | None:
        if presented.bearer is None or not _takes_bearer(presented.endpoint):
            return None
        return CustomerFault.INVALID if customer is None else judge_customer_record(customer, holder, now)

    return _judge_proved(replace(presented, is_dry=True), record, judge_record(record, now), now, sources, judge_named)


def _is_proved(judged: KeyHolder | Denial, scope: frozenset[str] | None) -> bool:
    """Whether possession was shown, of a key that the door may be told of."""
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
    return judgement if isinstance(verdict, Denial) else _spent(judgement, presented, sources)


def _takes_bearer(endpoint: Endpoint | NoMatchingEndpoint) -> bool:
    return isinstance(endpoint, Endpoint) and endpoint.bearer is not Bearer.NONE


def _judge_bearer(
    presented: VerificationRequest, holder: KeyHolder, *, sources: Sources, now: datetime
) -> Customer | CustomerFault | None:
    """None where there is no Bearer, or none is taken: then nothing is looked up."""
    if presented.bearer is None or not _takes_bearer(presented.endpoint):
        return None
    keystring = read_customer_token(presented.bearer, environment=presented.environment, brand=sources.brand)
    if isinstance(keystring, CustomerFault):
        return keystring
    peppers = sources.peppers(presented.environment)
    record = sources.find_customer(keystring.key_id)
    if record is not None:
        peppers = sources.take_pepper(peppers, record.pepper_version)
    return judge_customer_token(keystring, record, holder, peppers, now)


def _spent(judgement: Judgement, presented: VerificationRequest, sources: Sources) -> Judgement:
    """The judgement once both limits have had their say; a request that is refused spends from neither."""
    endpoint, record, holder = presented.endpoint, judgement.record, judgement.holder
    if isinstance(endpoint, NoMatchingEndpoint) or record is None or holder is None:
        raise TypeError("a grant is for an endpoint, after proof")
    if not endpoint.spends:
        return judgement
    buckets = sources.buckets(record, endpoint)
    largest = min(bucket.limit.count for bucket in buckets)
    if presented.cost > largest:
        # More can never be spent, so that waiting would not help.
        detail = f"The cost {presented.cost} is more than the limit's burst of {largest}."
        return replace(judgement, verdict=Denial(ErrorCode.REQUEST_INVALID, detail, holder=holder))
    if presented.is_dry:
        return judgement
    try:
        spend = sources.spend(
            buckets, presented.cost, refuse_on_loss=endpoint.on_limiter_loss is LimiterFailurePolicy.REFUSE
        )
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


def _prove_exposed(presented: VerificationRequest, sources: Sources, now: datetime) -> str | None:
    """The id of the key in the URL if it is a real one of this environment, and of a merchant in scope."""
    keystring = read_exposed(presented.url, sources.brand)
    if keystring is None or keystring.scope is not STRING_SCOPE[presented.environment]:
        return None
    peppers = sources.peppers(presented.environment)
    try:
        record = sources.find_key(keystring.key_id, None)
        if record is not None:
            peppers = sources.take_pepper(peppers, record.pepper_version)
    except VerifierStaleError:
        return None  # The answer is the same either way.
    judged = judge_key(keystring, record, peppers, now)
    return keystring.key_id if _is_proved(judged, presented.scope) else None


_PROVED = Check(ErrorCode.CREDENTIAL_INVALID, True)
KEY_STATES = (ErrorCode.KEY_NOT_ACTIVE, ErrorCode.KEY_EXPIRED, ErrorCode.KEY_REVOKED)
"""What is said of a key by its state alone."""


def before_proof(denial: Denial) -> Judgement:
    """Nothing but the answer itself is told to whoever has not shown possession."""
    return Judgement(denial, trace=[Check(denial.code, False)])


def deny_stale(detail: str, internal: str = "") -> Judgement:
    """Nothing to vouch with: never a yes."""
    return before_proof(Denial(ErrorCode.VERIFIER_STALE, detail, internal, retry_after_seconds=1))


def _refused_before_proof(denial: Denial, presented: VerificationRequest, sources: Sources) -> Judgement:
    """Failed proofs are counted by the client's address, all alike: too many are told to come back later."""
    if denial.code is ErrorCode.CREDENTIAL_INVALID and not presented.is_dry:
        denial = replace(denial, retry_after_seconds=sources.note_failed_proof(presented.client_address))
    return before_proof(denial)


def _state_checks(failed: ErrorCode | None) -> list[Check]:
    applied = KEY_STATES if failed is None else KEY_STATES[: KEY_STATES.index(failed) + 1]
    return [Check(code, code is not failed) for code in applied]
