"""Fill a migrated PostgreSQL with the rows of a payments platform, one function for each table.

`load` makes a few rows through the services: an issued key, a rotation in each state, a used source, a notice. Then it
copies them with INSERT ... SELECT, so that a copy has what the product writes. A function names the columns in which
its copies differ, as SQL expressions of the number `n`.

The copies skip triggers and foreign keys, which the session turns off. CHECK and UNIQUE constraints apply. Ids and
digests are hashes of `n`; hashes of audit entries are random, so that `audit_verify` reports the copies.
"""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from unittest import mock

from django.db import connection
from django.db.models import AutoField, Model

from keyvault.access.permissions import Permission as P
from keyvault.backends.outbound import Reply
from keyvault.domain.audit import account_chain, customer_token_chains
from keyvault.domain.environments import Environment
from keyvault.domain.issuance import Delivery
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.revocation_log import CaughtUp
from keyvault.models import (
    Account,
    AuditChain,
    AuditEntry,
    Change,
    Confirmation,
    CustomerToken,
    DeliveryState,
    IdempotentRequest,
    IssuanceApproval,
    IssuanceRequest,
    Key,
    KeySource,
    KeyUse,
    Merchant,
    Notice,
    ProviderConnection,
    RecipientKey,
    Refusal,
    UsageReporter,
    UseBucket,
    Verifier,
    WebhookDelivery,
    WebhookEndpoint,
    WorkLease,
)
from keyvault.models.usage import UseSpan
from keyvault.services import maintenance
from keyvault.services.issuance.requests import collect_key
from keyvault.services.recording.revocation_log import append_lines
from keyvault.services.revocations import anchor
from keyvault.services.secrets.provider_connections import set_connection
from keyvault.services.tokens.customer_tokens import issue_customer_token
from keyvault.services.usage.recorder import UsageLog
from keyvault.services.webhooks import deliveries
from keyvault.services.webhooks.endpoints import add_endpoint
from rotation.domain.events import RotationState as S
from rotation.domain.pacing import MAX_CONCURRENCY, MAX_PER_MINUTE, Pace
from rotation.domain.plan_fields import PlanOverrides, Proof
from rotation.models import (
    Campaign,
    Evidence,
    LedgerEntry,
    Rotation,
    RotationApproval,
    ScheduledCredential,
    ScheduleSweep,
)
from rotation.services.campaigns.campaigns import approve_campaign, request_campaign
from rotation.services.rotations.engine import advance_rotation
from rotation.services.rotations.reports import get_rotation, subject_of
from rotation.services.rotations.requests import approve_rotation, request_rotation
from rotation.services.schedules.schedules import ScheduleDraft, ScheduleScope, save_schedule
from rotation.services.schedules.starting import begin_due
from tests import factories
from tests.clocks import Clock
from tests.factories import PRODUCTION, grant, make_merchant
from tests.rotation import scene

MERCHANTS_EVERY = 20
"""Credentials of each merchant."""

CONNECTIONS = 3
"""Provider connections of each account."""

BUSY_EVERY = 10
"""One credential in this many is used; each of them has 100 minute rows."""

SHARES = {S.AWAITING_APPROVAL: 5, S.SCHEDULED: 20, S.AWAITING_PROOF: 20, S.OVERLAP: 45, S.QUARANTINE: 10}
"""States of the open rotations, in percent."""

_FIRST_ACCOUNT = 1_000_000
"""Ids of the copied accounts and endpoints begin after this; new rows are numbered from 1."""

_FIRST_CONTEXT = 1_000_000
"""Ids of the copied use contexts begin after this."""


@dataclass(frozen=True, slots=True)
class PlatformSize:
    """Numbers of rows, all in proportion to the number of credentials."""

    credentials: int

    @property
    def merchants(self) -> int:
        return self.credentials // MERCHANTS_EVERY

    @property
    def rotations(self) -> int:
        """Number of open rotations."""
        return self.credentials * 3 // 100

    @property
    def closed(self) -> int:
        """Number of completed rotations: a month of them."""
        return self.credentials // 10

    @property
    def busy(self) -> int:
        return self.credentials // BUSY_EVERY

    @property
    def changes(self) -> int:
        return self.credentials * 3

    @property
    def uses(self) -> int:
        return self.credentials * 10


@dataclass(frozen=True, slots=True)
class Samples:
    """The rows that are copied, as the services wrote them."""

    account: Account
    key: Key
    request: IssuanceRequest
    endpoint: WebhookEndpoint
    token: CustomerToken
    rotations: dict[S, Rotation]


def load(size: PlatformSize) -> Samples:
    """Fill the database; return the samples, which are rows of it."""
    samples = make_samples(datetime.now(UTC))
    # PostgreSQL does not use an index in the transaction that created it, if the table's rows were updated there.
    with fast_session(), nullcontext() if connection.in_atomic_block else without_indexes():
        load_merchants(size, samples)
        load_accounts(size, samples)
        load_chains(size, samples)
        load_endpoints(size, samples)
        load_connections(size, samples)
        load_credentials(size, samples)
        load_rotations(size, samples)
        load_keys(size, samples)
        load_schedule(size, samples)
        load_issuance(size, samples)
        load_recipient_keys(size, samples)
        load_changes(size, samples)
        load_audit(size, samples)
        load_notices(size, samples)
        load_deliveries(size, samples)
        load_uses(size, samples)
        load_tokens(size, samples)
        load_replies(size)
        load_refusals(size)
        load_confirmations(size)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    return samples


@contextmanager
def fast_session() -> Iterator[None]:
    """Write without triggers and foreign keys, as a superuser."""
    with connection.cursor() as cursor:
        cursor.execute("SET session_replication_role = replica")
        yield
        cursor.execute("SET session_replication_role = origin")


@contextmanager
def without_indexes() -> Iterator[None]:
    """Build all indexes but those of primary keys at the end, which is several times as fast."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT relname, conname, indexrelid::regclass::text, pg_get_constraintdef(pg_constraint.oid),"
            " pg_get_indexdef(indexrelid) FROM pg_index JOIN pg_class ON pg_class.oid = indrelid"
            " LEFT JOIN pg_constraint ON conindid = indexrelid AND contype = 'u'"
            " WHERE NOT indisprimary AND relnamespace = 'public'::regnamespace"
        )
        indexes = cursor.fetchall()
        for table, constraint, index, _, _ in indexes:
            cursor.execute(f"ALTER TABLE {table} DROP CONSTRAINT {constraint}" if constraint else f"DROP INDEX {index}")
        yield
        cursor.execute("SET maintenance_work_mem = '512MB'")
        for table, constraint, _, unique, index in indexes:
            cursor.execute(f"ALTER TABLE {table} ADD CONSTRAINT {constraint} {unique}" if constraint else index)
        cursor.execute("RESET maintenance_work_mem")


# --- samples, through the services ------------------------------------------------------------------------------


def make_samples(now: datetime) -> Samples:
    """Make one row of each kind through the services; a rotation in each state of SHARES, and a completed one."""
    factories.have_peppers()
    make_merchant("platform")
    place = factories.account("platform", PRODUCTION)
    endpoint, _ = add_endpoint(grant(scene.tam(), P.WEBHOOKS_WRITE, place), place, "https://platform.example/hook")
    request = factories.request_key(place, delivery=Delivery.SHOW_ONCE)
    factories.approve(request)
    key = factories.issue_request(request)
    collect_key(grant(scene.tam(), P.ISSUANCE_COLLECT, place), request)
    clock = Clock(now)
    log = UsageLog(now=clock)
    reporter = UsageReporter.objects.create(
        reporter_id=log.reporter_id, started_at=clock(), flushed_through_at=clock(), peppers={}
    )
    scene.use(log, key.key_id)
    token, _ = issue_customer_token(
        grant(scene.holder_of(key), P.CUSTOMER_TOKENS_WRITE, place), place, key, customer_id="customer"
    )
    scene.set_recipient(key, datetime.now(UTC))
    connecting = grant(scene.tam(), P.CONNECTIONS_WRITE, place)
    set_connection(connecting, place, "stripe", Plaintext("sk_live_platform"))
    save_schedule(grant(scene.tam(), P.SCHEDULES_WRITE), ScheduleScope(PRODUCTION), ScheduleDraft(365))
    for environment in Environment:
        WorkLease.objects.create(subject=f"reconcile:{environment}", due_at=now + timedelta(days=1))
    _make_short_rows(now)
    rotations = {state: _make_rotation(state, place, log, clock, now) for state in (*SHARES, S.COMPLETED)}
    # What the worker does about the copies of keys that are collected, in quarantine or revoked.
    maintenance.destroy_due()
    maintenance.settle_due()
    while ScheduleSweep.objects.exists():
        begin_due(now)
    UsageReporter.objects.filter(pk=reporter.pk).update(stopped_at=now, flushed_through_at=now)
    WebhookDelivery.objects.update(state=DeliveryState.DELIVERED, delivered_at=now)
    for row in (key, request):
        row.refresh_from_db()
    return Samples(place, key, request, endpoint, token, rotations)


def _make_rotation(state: S, place: Account, log: UsageLog, clock: Clock, now: datetime) -> Rotation:
    """Take a rotation to the state with the services and the engine, by a clock that ends now."""
    began = {S.OVERLAP: 1, S.QUARANTINE: 8, S.COMPLETED: 10}.get(state, 0)
    clock.now = now - timedelta(days=began, hours=1)
    key, _ = scene.issue(place, clock())
    begins_at = now + timedelta(days=7) if state is S.SCHEDULED else None
    asking = grant(scene.tam(), P.ROTATIONS_WRITE, place, at=clock())
    rotation = request_rotation(asking, key.credential, PlanOverrides(proof=Proof.ACK, not_before=begins_at))
    if state is S.AWAITING_APPROVAL:
        return rotation
    approving = grant(scene.approver(), P.ROTATIONS_APPROVE, place, rotation.requester_person, at=clock())
    approve_rotation(approving, rotation, rotation.plan_digest)
    _advance(rotation, log, clock)
    if state in (S.OVERLAP, S.QUARANTINE, S.COMPLETED):
        scene.acknowledge_replacement(rotation.rotation_id, clock())
        _advance(rotation, log, clock)
    for days in {S.QUARANTINE: (7,), S.COMPLETED: (7, 1)}.get(state, ()):
        clock.tick(days * 86_400 + 60)
        _advance(rotation, log, clock)
    found = get_rotation(rotation.rotation_id)
    if found.state != state:
        raise RuntimeError(f"the sample of a rotation in {state} is in {found.state}")
    return found


def _advance(rotation: Rotation, log: UsageLog, clock: Clock) -> None:
    clock.tick(3)
    log.flush()
    advance_rotation(rotation.rotation_id, clock)


def _make_short_rows(now: datetime) -> None:
    """Make rows that are kept for a short time only, and that no service writes alone."""
    Refusal.objects.create(
        request_id="refusal",
        at=now,
        entry_point="verify",
        environment=PRODUCTION,
        endpoint="orders.retrieve",
        code="credential_invalid",
        detail="The API key is not valid.",
        source="192.0.2.7",
        trace=[["credential_invalid", False]],
    )
    IdempotentRequest.objects.create(
        holder="crd_holder",
        endpoint="orders.create",
        key_digest=secrets.token_bytes(32),
        body_digest=secrets.token_bytes(32),
        held_until=now,
        status=201,
        body='{"order_id": "ord_01234567890123456789", "status": "created"}',
        created_at=now,
        expires_at=now + timedelta(days=1),
    )
    verifier = Verifier.objects.create(
        verifier_id="gone", entry_point="verifier", started_at=now, seen_at=now, staleness_ms=1000, stopped_at=now
    )
    Confirmation.objects.create(verifier=verifier, sequence=1, at=now)


# --- copies, one function for each table ------------------------------------------------------------------------


def load_merchants(size: PlatformSize, samples: Samples) -> None:
    copy(samples.account.merchant, 1, size.merchants, merchant_id=merchant("n"))


def load_accounts(size: PlatformSize, samples: Samples) -> None:
    copy(samples.account, 1, size.merchants, id=f"{_FIRST_ACCOUNT} + n", merchant_id=merchant("n"))


def load_chains(size: PlatformSize, samples: Samples) -> None:
    """Load the chains, unsigned. The service signs them in many checkpoints, and those of adjacent accounts apart."""
    sample = AuditChain.objects.get(name=account_chain("platform", PRODUCTION))
    entries = size.changes // size.merchants
    since = "now() - n % 100 * interval '1 second'"
    unsigned = {"signed_in": "0", "signed_sequence": "0", "unsigned_since": since}
    copy(
        sample,
        1,
        size.merchants,
        name=chain("n"),
        sequence=str(entries),
        head_hash=hashed("entry", f"n * {entries} - 1"),
        **unsigned,
    )
    empty = {"sequence": "0", "head_hash": "decode(repeat('00', 32), 'hex')", "newest_at": "NULL"}
    for name in customer_token_chains(sample.name):
        of_merchant = chain("n").replace("account:", name.partition(":")[0] + ":")
        copy(sample, 1, size.merchants, name=of_merchant, **unsigned | empty | {"unsigned_since": "NULL"})


def load_endpoints(size: PlatformSize, samples: Samples) -> None:
    changed = {"id": f"{_FIRST_ACCOUNT} + n", "account_id": f"{_FIRST_ACCOUNT} + n"}
    copy(samples.endpoint, 1, size.merchants, **changed)


def load_connections(size: PlatformSize, samples: Samples) -> None:
    """Load connections of each account, compared with the backend. All have the path of the sample."""
    sample = ProviderConnection.objects.get(account=samples.account)
    changed = {"account_id": account_of("n", size), "provider": f"'provider-' || n / {size.merchants}"}
    copy(sample, 0, CONNECTIONS * size.merchants - 1, **changed, settle_due_at="NULL")


def load_credentials(size: PlatformSize, samples: Samples) -> None:
    copy(
        samples.key.credential,
        1,
        size.credentials,
        credential_id=credential("n"),
        account_id=account_of("n", size),
        created_at=spread_over("created_at", 60),
    )


def load_rotations(size: PlatformSize, samples: Samples) -> None:
    """Load the open rotations with their keys, and the completed ones after them."""
    first, share = 1, 0
    for state, percent in SHARES.items():
        share += percent
        last = size.rotations * share // 100
        load_rotation(
            size, samples.rotations[state], first, last, predecessor=key("n"), replacement=hashed_id("new", "n")
        )
        first = last + 1
    last = size.rotations + size.closed
    completed = samples.rotations[S.COMPLETED]
    load_rotation(size, completed, size.rotations + 1, last, predecessor=hashed_id("old", "n"), replacement=key("n"))


def load_rotation(
    size: PlatformSize, sample: Rotation, first: int, last: int, *, predecessor: str, replacement: str
) -> None:
    """Copy a rotation with its keys and what the engine wrote about it."""
    about, has_replacement = rotation("n"), sample.replacement is not None
    keys = {"predecessor_id": predecessor, **({"replacement_id": replacement} if has_replacement else {})}
    begun = spread_over("created_at", 1)
    place = {"credential_id": credential("n"), "account_id": account_of("n", size)}
    copy(sample, first, last, rotation_id=about, created_at=begun, **place, **keys)
    changed = {"credential_id": credential("n"), "digest": hashed("digest", "n")}
    copy(sample.predecessor, first, last, key_id=predecessor, **changed)
    if sample.replacement is not None:
        copy(sample.replacement, first, last, key_id=replacement, **changed)
    for approval in RotationApproval.objects.filter(rotation=sample):
        copy(approval, first, last, rotation_id=about)
    for entry in LedgerEntry.objects.filter(rotation=sample):
        copy(entry, first, last, rotation_id=about, **({"key_id": replacement} if entry.key_id else {}))
    for number, evidence in enumerate(Evidence.objects.filter(rotation=sample)):
        copy(evidence, first, last, evidence_id=prefixed_id("evd", f"evidence {number}", "n"), rotation_id=about)
    for lease in WorkLease.objects.filter(subject=subject_of(sample.rotation_id)):
        copy(lease, first, last, subject=f"'{subject_of('')}' || {about}", due_at="now() + interval '1 day'")
    for number, notice in enumerate(Notice.objects.filter(subject=sample.rotation_id)):
        copy(notice, first, last, notice_id=prefixed_id("ntc", f"notice {number}", "n"), subject=about)


def load_keys(size: PlatformSize, samples: Samples) -> None:
    """Load the keys of the credentials without a rotation."""
    copy(
        samples.key,
        size.rotations + size.closed + 1,
        size.credentials,
        key_id=key("n"),
        credential_id=credential("n"),
        digest=hashed("digest", "n"),
        created_at=spread_over("created_at", 60),
        activated_at=spread_over("activated_at", 60),
    )


def load_schedule(size: PlatformSize, samples: Samples) -> None:
    """Load the date of each credential's next rotation, which one with an open rotation does not have."""
    sample = ScheduledCredential.objects.get(credential=samples.key.credential)
    date = f"CASE WHEN n > {size.rotations} THEN now() + interval '300 days' END"
    place = {"credential_id": credential("n"), "account_id": account_of("n", size)}
    copy(sample, 1, size.credentials, ask_at=date, **place)


def load_issuance(size: PlatformSize, samples: Samples) -> None:
    """Load the request of each credential's first key, collected, with its approval."""
    request = prefixed_id("req", "request", "n")
    changed = {"account_id": account_of("n", size), "credential_id": credential("n"), "key_id": key("n")}
    begun = spread_over("created_at", 60)
    copy(samples.request, 1, size.credentials, issuance_request_id=request, created_at=begun, **changed)
    approval = IssuanceApproval.objects.filter(request=samples.request).earliest("pk")
    copy(approval, 1, size.credentials, request_id=request)


def load_recipient_keys(size: PlatformSize, samples: Samples) -> None:
    """Load the recipient key of one credential in ten, of those that no rotation refers to."""
    number, sample = f"({size.credentials} + 1 - n)", RecipientKey.objects.get(credential=samples.key.credential)
    place = {"credential_id": credential(number), "account_id": account_of(number, size), "key_id": key(number)}
    times = {column: spread_over(column, 60) for column in ("created_at", "applies_at")}
    about = prefixed_id("rcp", "recipient", "n")
    copy(sample, 1, size.credentials // 10, recipient_key_id=about, **place, **times)


def load_changes(size: PlatformSize, samples: Samples) -> None:
    """Load the changes of each key one after the other, as the feed has them."""
    sample = Change.objects.filter(subject_kind="key", subject_id=samples.key.key_id).earliest("sequence")
    copy(sample, 1, size.changes, subject_id=key(f"(1 + n % {size.credentials})"))


def load_audit(size: PlatformSize, samples: Samples) -> None:
    """Load as many entries as changes. Their hashes are random; `load_chains` writes the heads."""
    sample = AuditEntry.objects.filter(chain_id=account_chain("platform", PRODUCTION)).latest("sequence")
    entries = size.changes // size.merchants
    copy(
        sample,
        0,
        size.merchants * entries - 1,
        chain_id=chain(f"(1 + n / {entries})"),
        sequence=f"1 + n % {entries}",
        at=spread_over("at", 60),
        previous=hashed("entry", "n - 1"),
        hash=hashed("entry", "n"),
    )


def load_notices(size: PlatformSize, samples: Samples) -> None:
    """Load the notice of each credential's first key."""
    sample = Notice.objects.filter(account=samples.account).earliest("created_at")
    changed = {"account_id": account_of("n", size), "subject": credential("n")}
    copy(sample, 1, size.credentials, notice_id=notice("n"), created_at=spread_over("created_at", 60), **changed)


def load_deliveries(size: PlatformSize, samples: Samples) -> None:
    """Load a delivery of the notices of the last month, delivered."""
    sample = WebhookDelivery.objects.filter(endpoint=samples.endpoint).earliest("pk")
    changed = {"notice_id": notice("n"), "endpoint_id": account_of("n", size)}
    copy(sample, 1, size.credentials // 2, **changed)


def load_uses(size: PlatformSize, samples: Samples) -> None:
    """Load the uses of each busy key with its source and its total: minutes of a day, hours, and days of a year."""
    sample = UseBucket.objects.get(context__key=samples.key)
    copy(sample.context, 1, size.busy, id=context("n"), key_id=key("n"))
    used, turn = f"(1 + n % {size.busy})", f"(n / {size.busy})"
    minute = f"date_trunc('minute', now()) - {turn} * interval '20 minutes'"
    hour = f"date_trunc('hour', now()) - interval '3 days' - {turn} * interval '1 day'"
    day = f"date_trunc('day', now()) - interval '40 days' - {turn} * interval '30 days'"
    for span, start, percent in ((UseSpan.MINUTE, minute, 60), (UseSpan.HOUR, hour, 30), (UseSpan.DAY, day, 10)):
        changed = {"span": str(span.value), "minute": start, "first_at": start, "last_at": start}
        changed["context_id"] = context(used)
        copy(sample, 0, size.uses * percent // 100 - 1, **changed)
    copy(KeySource.objects.get(key=samples.key), 1, size.busy, key_id=key("n"))
    copy(KeyUse.objects.get(key=samples.key), 1, size.busy, key_id=key("n"))


def load_tokens(size: PlatformSize, samples: Samples) -> None:
    """Load customer tokens that are valid."""
    changed = {"account_id": account_of("n", size), "issued_with_id": key("n"), "digest": hashed("token", "n")}
    copy(samples.token, 1, size.credentials // 2, token_id=hashed_id("token", "n"), **changed)


def load_replies(size: PlatformSize) -> None:
    """Load the stored replies of a day."""
    sample = IdempotentRequest.objects.earliest("pk")
    copy(sample, 1, size.credentials // 10, holder=credential("n"), expires_at="now() + interval '1 day'")


def load_refusals(size: PlatformSize) -> None:
    at = "now() - n * interval '1 second'"
    copy(Refusal.objects.get(pk="refusal"), 1, size.credentials // 10, request_id=hashed_id("refusal", "n"), at=at)


def load_confirmations(size: PlatformSize) -> None:
    copy(Confirmation.objects.earliest("pk"), 2, size.credentials // 10, sequence="n")


def catch_up() -> None:
    """Let the revocation log, and the anchor as this process knows it, be at the newest change."""
    newest = Change.objects.latest("sequence").sequence
    Verifier.objects.update(confirmed_sequence=newest)
    append_lines([CaughtUp(newest)])
    anchor._writer.position = newest


# --- due work, one function for each kind -----------------------------------------------------------------------


def make_rotations_due(size: PlatformSize, count: int) -> None:
    """Let open rotations of every state be due, evenly."""
    count = min(count, size.rotations)
    every = size.rotations // count
    subject = f"'{subject_of('')}' || {rotation(f'n * {every}')}"
    change(WorkLease, count, f"{subject} = row.subject", due_at="now()")


def make_requests_due(samples: Samples, count: int) -> None:
    """Let approved requests wait to be issued."""
    approved = factories.request_key(samples.account)
    factories.approve(approved)
    request = prefixed_id("req", "approved", "n")
    with fast_session():
        copy(approved, 1, count, issuance_request_id=request)
        copy(approved.approvals.get(), 1, count, request_id=request)


def make_expiries_due(size: PlatformSize, count: int) -> None:
    change(Key, count, f"row.key_id = {key(free(size, 0, count))}", expires_at="now()")


def make_destructions_due(size: PlatformSize, count: int) -> None:
    """Let keys be compromised whose copies still exist."""
    compromised = {"state": "'compromised'", "compromised_at": "now()", "reason": "'key_compromise'"}
    where = f"row.key_id = {key(free(size, 1, count))}"
    change(Key, count, where, **compromised, material="'destroy_due'", backend_version="1")


def make_settlements_due(size: PlatformSize, count: int) -> None:
    """Let keys be in quarantine whose copies are still readable."""
    suspended = {"state": "'suspended'", "suspended_at": "now()"}
    where = f"row.key_id = {key(free(size, 2, count))}"
    change(Key, count, where, **suspended, material="'delete_due'", backend_version="1")


def make_connections_due(size: PlatformSize, count: int) -> None:
    """Let connections be due to be compared with the backend."""
    count = min(count, size.merchants)
    change(ProviderConnection, count, f"row.account_id = {_FIRST_ACCOUNT} + n", settle_due_at="now()")


def make_discards_due(size: PlatformSize, count: int) -> None:
    """Let keys be issued long ago and never collected."""
    where = f"row.issuance_request_id = {prefixed_id('req', 'request', free(size, 3, count))}"
    uncollected = {"state": "'issued'", "collected_at": "NULL", "issued_at": "now() - interval '60 days'"}
    change(IssuanceRequest, count, where, **uncollected)


def make_backfill_due(size: PlatformSize, count: int) -> None:
    """Let keys be revoked that the revocation log of this host does not have."""
    where = f"row.key_id = {key(free(size, 5, count))}"
    change(Key, count, where, state="'compromised'", compromised_at="now()", reason="'key_compromise'")
    with fast_session():
        copy(Change.objects.latest("sequence"), 1, count, subject_id=key(free(size, 5, count)))
    Verifier.objects.update(confirmed_sequence=Change.objects.latest("sequence").sequence)


def make_schedules_due(size: PlatformSize, count: int) -> None:
    """Let keys be older than their cryptoperiod."""
    old, number = "now() - interval '400 days'", free(size, 4, count)
    change(Key, count, f"row.key_id = {key(number)}", created_at=old, activated_at=old)
    change(ScheduledCredential, count, f"row.credential_id = {credential(number)}", ask_at="now()")


def make_deliveries_due(size: PlatformSize, samples: Samples, count: int) -> None:
    sample = WebhookDelivery.objects.filter(endpoint=samples.endpoint).earliest("pk")
    changed = {"notice_id": notice(f"n + {size.credentials // 2}"), "endpoint_id": account_of("n", size)}
    with fast_session():
        copy(sample, 1, count, **changed, state="'due'", due_at="now()", delivered_at="NULL")


def make_rows_old(size: PlatformSize, samples: Samples, count: int) -> None:
    """Let rows of each table with a retention be older than that."""
    old = "now() - interval '500 days'"
    with fast_session():
        use = UseBucket.objects.get(context__key=samples.key)
        ages = "now() - CASE n % 2 WHEN 0 THEN interval '500 days' ELSE interval '4 days' END - n * interval '1 minute'"
        copy(use, 1, count, context_id=context(f"1 + n % {size.busy}"), minute=f"date_trunc('minute', {ages})")
        refusals = prefixed_id("old", "refusal", "n")
        copy(Refusal.objects.get(pk="refusal"), 1, count, request_id=refusals, at=old)
        copy(IdempotentRequest.objects.earliest("pk"), 1, count, holder="'old' || n", expires_at=old)
        copy(Confirmation.objects.earliest("pk"), 1, count, sequence=f"n + {size.credentials}", at=old)
    change(Notice, count, f"row.notice_id = {notice('n')}", created_at=old)


def make_campaign_due(size: PlatformSize, count: int) -> Campaign:
    """Let a campaign run whose members are so many old keys."""
    old, number = "now() - interval '600 days'", free(size, 7, count)
    change(Key, count, f"row.key_id = {key(number)}", created_at=old, activated_at=old)
    campaign = request_campaign(
        grant(scene.tam(), P.ROTATIONS_WRITE),
        environment=PRODUCTION,
        merchants=None,
        older_than_days=590,
        overrides=PlanOverrides(),
        pace=Pace(per_minute=MAX_PER_MINUTE, concurrency=MAX_CONCURRENCY),
        reason="old keys",
    )
    approving = grant(scene.approver(), P.ROTATIONS_APPROVE, None, campaign.requester_person)
    return approve_campaign(approving, campaign, campaign.plan_digest)


def make_pending_due(size: PlatformSize, count: int) -> None:
    """Let pending copies of completed rotations be left, as by workers that died."""
    first = size.rotations
    where = f"row.rotation_id = {rotation(f'n + {first}')} AND row.step = 'publishing'"
    change(LedgerEntry, min(count, size.closed), where, step="'staged'", state="'started'")


def make_paths_due(size: PlatformSize, count: int) -> None:
    """Offboard merchants whose keys have ended."""
    merchants = -(-count // MERCHANTS_EVERY)
    change(Merchant, merchants, f"row.merchant_id = {merchant('n')}", status="'offboarded'")
    ended = {"state": "'compromised'", "compromised_at": "now()", "reason": "'key_compromise'"}
    change(Key, size.credentials, f"row.key_id = {key('n')} AND n % {size.merchants} < {merchants}", **ended)


def make_heads_due(size: PlatformSize, count: int) -> None:
    """Let chains have an entry that no checkpoint signs."""
    changed = {"sequence": "row.sequence + 1", "unsigned_since": "now()"}
    change(AuditChain, count, f"row.name = {chain('n')}", **changed)


@contextmanager
def accept_messages() -> Iterator[None]:
    """Let every webhook endpoint accept its messages immediately."""
    defaults = deliveries.deliver_due.__defaults__ or ()
    send = mock.Mock(return_value=Reply(204, None))
    with mock.patch.object(deliveries.deliver_due, "__defaults__", (*defaults[:-1], send)):
        yield


def free(size: PlatformSize, window: int, count: int) -> str:
    """Return the numbers of keys that no rotation and no use refers to; each window has others."""
    return f"n + {size.credentials // 5 + window * count}"


# --- expressions ------------------------------------------------------------------------------------------------


def copy(sample: Model, first: int, last: int, **changed: str) -> None:
    """Insert a copy of the row for each n from first to last; `changed`: SQL for columns that differ, of `n`."""
    model = type(sample)
    fields = [
        field
        for field in model._meta.local_concrete_fields
        if not isinstance(field, AutoField) or field.attname in changed
    ]
    names = ", ".join(f'"{field.column}"' for field in fields)
    values = ", ".join(changed.get(field.attname, f'one."{field.column}"') for field in fields).replace("%", "%%")
    if unknown := changed.keys() - {field.attname for field in fields}:
        raise ValueError(f"{model.__name__} has no {', '.join(sorted(unknown))}")
    table, primary = model._meta.db_table, model._meta.pk
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {table} ({names}) SELECT {values} FROM {table} AS one, generate_series(%s, %s) AS n "  # noqa: S608  names of ours
            f'WHERE one."{primary.column}" = %s',
            [first, last, sample.pk],
        )


def change(model: type[Model], count: int, where: str, **changed: str) -> None:
    """Update the rows for each n from 1 to `count`; `where` and `changed`: SQL of `row` and `n`."""
    columns = ", ".join(f'"{name}" = {value}' for name, value in changed.items())
    with fast_session(), connection.cursor() as cursor:
        cursor.execute(
            f"UPDATE {model._meta.db_table} AS row SET {columns} FROM generate_series(1, {count}) AS n WHERE {where}"  # noqa: S608  names of ours
        )


def hashed_id(kind: str, number: str) -> str:
    """Return the id of a key or token: 16 characters that look random."""
    return f"substr(md5('{kind}:' || ({number})), 1, 16)"


def prefixed_id(prefix: str, kind: str, number: str) -> str:
    return f"'{prefix}_' || substr(md5('{kind}:' || ({number})), 1, 20)"


def hashed(kind: str, number: str) -> str:
    """Return 32 bytes that look random."""
    return f"sha256(('{kind}:' || ({number}))::bytea)"


def merchant(number: str) -> str:
    return f"'merchant-' || ({number})"


def chain(number: str) -> str:
    """Return the name of the account's audit chain."""
    return f"'{account_chain('merchant-', '')[:-1]}' || ({number}) || '/{PRODUCTION}'"


def credential(number: str) -> str:
    return prefixed_id("crd", "credential", number)


def key(number: str) -> str:
    return hashed_id("key", number)


def rotation(number: str) -> str:
    return prefixed_id("rot", "rotation", number)


def notice(number: str) -> str:
    return prefixed_id("ntc", "notice", number)


def account_of(number: str, size: PlatformSize) -> str:
    """Return the id of a credential's account."""
    return f"{_FIRST_ACCOUNT} + 1 + ({number}) % {size.merchants}"


def context(number: str) -> str:
    """Return the id of a busy key's use context."""
    return f"{_FIRST_CONTEXT} + {number}"


def spread_over(column: str, days: int) -> str:
    """Move a time back, evenly over the days, in the order of n."""
    return f"one.{column} - (n % {days * 1440}) * interval '1 minute'"
