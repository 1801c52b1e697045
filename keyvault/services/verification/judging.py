"""Judge a presented key by every rule, for the entry points that look keys up in the database."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime

from django.conf import settings
from django.db import InterfaceError, OperationalError

from keyvault.access.catalog import Endpoint
from keyvault.access.customers import CustomerRecord
from keyvault.access.decision import Denial, Grant
from keyvault.access.judgement import (
    KEY_STATE_CODES,
    Judgement,
    VerificationRequest,
    deny_stale,
    judge,
    judge_described,
)
from keyvault.access.limits import Bucket, Limit, Spend
from keyvault.domain.digests import PEPPER_SET, Peppers
from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode, NotFoundError, VerifierStaleError
from keyvault.domain.keys import KeyKind, KeyRecord, KeyState
from keyvault.domain.keystring import KeyString
from keyvault.models import Key
from keyvault.models.usage import UseOutcome
from keyvault.services.catalog.base_urls import BASE_URLS
from keyvault.services.catalog.catalog import endpoint_limit, limit_of
from keyvault.services.keys.records import find_customer_record, find_key_record
from keyvault.services.keys.rehashing import pending_rehashes
from keyvault.services.limits.defaults import default_limit
from keyvault.services.limits.limiter import account_buckets, failed_proofs, limiter
from keyvault.services.peppers.ring import load_peppers, take_pepper
from keyvault.services.usage.recorder import UsageLog

__all__ = ["Judgement", "VerificationRequest", "explain_described", "judge_presented", "note_use"]

_log = logging.getLogger(__name__)


class DatabaseSources:
    """Judgement inputs from the database: records are always read, and the process's limiter counts the limits."""

    key_prefix: str = settings.KEY_PREFIX
    base_urls: Mapping[Environment, str] = BASE_URLS

    def peppers(self, environment: Environment) -> Peppers:
        return load_peppers(PEPPER_SET[environment])

    def take_pepper(self, peppers: Peppers, version: int) -> Peppers:
        return take_pepper(peppers, version)

    def find_key(self, key_id: str, address: str | None) -> KeyRecord | None:
        with failed_proofs().look_up(address), _stale_on_failure():
            return find_key_record(key_id)

    def find_customer(self, token_id: str) -> CustomerRecord | None:
        with _stale_on_failure():
            return find_customer_record(token_id)

    def buckets(self, record: KeyRecord, endpoint: Endpoint) -> tuple[Bucket, ...]:
        with _stale_on_failure():
            limit, row = endpoint_limit(record.account_id, record.environment, endpoint)
        return record_buckets(record, endpoint, limit, "" if row is None else f"{row.pk}.{row.version}")

    def spend(self, buckets: tuple[Bucket, ...], cost: int, *, refuse_on_loss: bool) -> Spend:
        return limiter().spend(buckets, cost, refuse_on_loss=refuse_on_loss)

    def note_failed_proof(self, address: str | None) -> int | None:
        return failed_proofs().note(address)

    def note_proof(self, record: KeyRecord, keystring: KeyString, peppers: Peppers) -> None:
        pending_rehashes.note_proof(Key, record.key_id, keystring.text, (record.digest, record.pepper_version), peppers)


@contextmanager
def _stale_on_failure() -> Iterator[None]:
    """Convert a database failure into VerifierStaleError: without fresh key data the request is denied."""
    try:
        yield
    except (OperationalError, InterfaceError) as error:
        _log.exception("a key cannot be looked up")
        raise VerifierStaleError("The key cannot be looked up right now.") from error


_sources = DatabaseSources()


def judge_presented(presented: VerificationRequest, now: datetime) -> Judgement:
    """Judge a request by every rule, in the order of the contract's table of verdicts. The first failing rule decides.

    Fails closed: a database failure, or a pepper that this process has not loaded yet, yields `verifier_stale`.

    Raises NotFoundError for an environment that this process does not serve.
    """
    if presented.environment not in settings.ENVIRONMENTS:
        raise NotFoundError(f"This process does not serve {presented.environment}.")
    try:
        return judge(presented, _sources, now)
    except VerifierStaleError as error:
        if error.internal:
            _log.warning("a key cannot be judged", extra={"why": error.internal})
        return deny_stale(error.detail, error.internal)


def explain_described(
    presented: VerificationRequest, key_id: str, customer_token_id: str | None, now: datetime
) -> Judgement | None:
    """Predict the verdict for a described request with this key, as `judge_described` does. None: unknown key."""
    record = find_key_record(key_id)
    if record is None:
        return None
    customer = find_customer_record(customer_token_id) if customer_token_id else None
    return judge_described(presented, record, customer, _sources, now)


def record_buckets(
    record: KeyRecord,
    endpoint: Endpoint,
    own_limit: Limit | None,
    endpoint_setting: str,
    default_of: Callable[[Environment], Limit] = default_limit,
) -> tuple[Bucket, ...]:
    """Return the buckets to spend from. `own_limit` and `endpoint_setting`: the endpoint's, see `endpoint_limit`."""
    return account_buckets(
        record.account_id,
        record.kind,
        limit_of(record.limit_count, record.limit_seconds) or default_of(record.environment),
        endpoint.name,
        own_limit,
        account_setting=str(record.account_version),
        endpoint_setting=endpoint_setting,
    )


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
    """Record the uses that a judgement proves.

    An allowed use is evidence. An attempt on a suspended key restarts its quarantine and raises an alert. A key in a
    URL, or a private key from a browser, is recorded as a suspected exposure. For a public key the page's origin is
    recorded too. An `is_probe` judgement, the service's own test call, is recorded only as a probe.

    Nothing is recorded before proof: a request that only names a key id leaves no trace on the key.
    """
    holder, found = judgement.holder, list(_outcomes(judgement))
    if is_probe:
        found = [(key_id, UseOutcome.PROBED) for key_id in {key_id for key_id, _ in found}]
    page = origin if origin and holder is not None and holder.kind is KeyKind.PUBLIC else ""
    for key_id, outcome in found:
        if outcome in _ALERTS:
            _log.warning(_ALERTS[outcome], extra={"key_id": key_id, "source": source})
        log.note(key_id, source=source, user_agent=user_agent, endpoint=endpoint, origin=page, outcome=outcome)
    if judgement.customer is not None and isinstance(judgement.verdict, Grant) and not is_probe:
        log.note_secret_use(judgement.customer.token_id)


_ALERTS = {
    UseOutcome.EXPOSED_IN_URL: "a key was sent in a URL",
    UseOutcome.EXPOSED_IN_BROWSER: "a private key was sent with an Origin header",
    UseOutcome.REFUSED: "a suspended key was presented",
}


def _outcomes(judgement: Judgement) -> Iterator[tuple[str, UseOutcome]]:
    """Yield what the judgement proves about each key. A valid key denied for another reason is still in use."""
    if judgement.exposed_key_id is not None:
        yield judgement.exposed_key_id, UseOutcome.EXPOSED_IN_URL
    holder, record = judgement.holder, judgement.record
    if holder is None or record is None:
        return
    denied = judgement.verdict.code if isinstance(judgement.verdict, Denial) else None
    is_reported = denied is None and judgement.has_origin and holder.reports_origin
    if is_reported or denied is ErrorCode.PRIVATE_KEY_IN_BROWSER:
        yield holder.key_id, UseOutcome.EXPOSED_IN_BROWSER
    if denied is None:
        yield holder.key_id, UseOutcome.ALLOWED
    elif denied not in KEY_STATE_CODES:
        yield holder.key_id, UseOutcome.DENIED
    elif record.state is KeyState.SUSPENDED:
        yield holder.key_id, UseOutcome.REFUSED
