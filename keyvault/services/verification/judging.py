"""The whole judgement of a presented key, for the doors that look keys up in the database."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime

from django.conf import settings
from django.db import InterfaceError, OperationalError

from keyvault.access.catalog import Endpoint
from keyvault.access.customers import CustomerRecord
from keyvault.access.decision import Denial, Grant
from keyvault.access.judgement import KEY_STATES, Judgement, VerificationRequest, deny_stale, judge, judge_described
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
    """Every record is read anew, and limits are counted where the process's limiter counts them."""

    brand: str = settings.KEY_PREFIX
    base_urls: Mapping[Environment, str] = BASE_URLS

    def peppers(self, environment: Environment) -> Peppers:
        return load_peppers(PEPPER_SET[environment])

    def take_pepper(self, peppers: Peppers, version: int) -> Peppers:
        return take_pepper(peppers, version)

    def find_key(self, key_id: str, address: str | None) -> KeyRecord | None:
        with failed_proofs().look_up(address), _answering():
            return find_key_record(key_id)

    def find_customer(self, token_id: str) -> CustomerRecord | None:
        with _answering():
            return find_customer_record(token_id)

    def buckets(self, record: KeyRecord, endpoint: Endpoint) -> tuple[Bucket, ...]:
        with _answering():
            endpoints_own, row = endpoint_limit(record.account_id, record.environment, endpoint)
        return record_buckets(record, endpoint, endpoints_own, "" if row is None else f"{row.pk}.{row.version}")

    def spend(self, buckets: tuple[Bucket, ...], cost: int, *, refuse_on_loss: bool) -> Spend:
        return limiter().spend(buckets, cost, refuse_on_loss=refuse_on_loss)

    def note_failed_proof(self, address: str | None) -> int | None:
        return failed_proofs().note(address)

    def note_proof(self, record: KeyRecord, keystring: KeyString, peppers: Peppers) -> None:
        pending_rehashes.note_proof(Key, record.key_id, keystring.text, (record.digest, record.pepper_version), peppers)


@contextmanager
def _answering() -> Iterator[None]:
    """A database that does not answer leaves nothing to vouch for."""
    try:
        yield
    except (OperationalError, InterfaceError) as error:
        _log.exception("a key cannot be looked up")
        raise VerifierStaleError("The key cannot be looked up right now.") from error


_sources = DatabaseSources()


def judge_presented(presented: VerificationRequest, now: datetime) -> Judgement:
    """Every rule in the order of the contract's table of verdicts; the first that fails answers.

    Raises NotFoundError for an environment that this process does not serve.
    A database that does not answer leaves nothing to vouch for: `verifier_stale`, never a yes. So does a pepper that
    this process has not loaded yet.
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
    """What a request would be answered if it came with this key, as `judge_described`. None: there is no such key."""
    record = find_key_record(key_id)
    if record is None:
        return None
    customer = find_customer_record(customer_token_id) if customer_token_id else None
    return judge_described(presented, record, customer, _sources, now)


def record_buckets(
    record: KeyRecord, endpoint: Endpoint, endpoints_own: Limit | None, endpoint_setting: str
) -> tuple[Bucket, ...]:
    """`endpoints_own` and where it is set, as `services.catalog.endpoint_limit` found them."""
    return account_buckets(
        record.account_id,
        record.kind,
        limit_of(record.limit_count, record.limit_seconds) or default_limit(record.environment),
        endpoint.name,
        endpoints_own,
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
    """Notes what a door has judged: real use is evidence, a try on a suspended key restarts its quarantine and alerts.

    A key in a URL, or a private one from a browser, is noted as a suspected exposure. Of a public key the page's
    origin is noted too. What `is_probe`, a test call of our own, is noted as that and as nothing else. Nothing is
    noted before proof: whoever merely names a key id leaves no trace on the key.
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
    UseOutcome.EXPOSED_IN_URL: "a key stands in a URL",
    UseOutcome.EXPOSED_IN_BROWSER: "a private key came with an Origin",
    UseOutcome.REFUSED: "suspended key was tried",
}


def _outcomes(judgement: Judgement) -> Iterator[tuple[str, UseOutcome]]:
    """What is proved of which key. One that was good, but denied for another reason, is in somebody's hands still."""
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
    elif denied not in KEY_STATES:
        yield holder.key_id, UseOutcome.DENIED
    elif record.state is KeyState.SUSPENDED:
        yield holder.key_id, UseOutcome.REFUSED
