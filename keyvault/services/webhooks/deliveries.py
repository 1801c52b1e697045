"""Deliver notices to the merchants' webhook endpoints, at least once and with identical content on each attempt.

Messages are sent outside any transaction. One worker at a time runs a round. It sends to several endpoints
concurrently, one message at a time for each, so that a slow endpoint delays only itself.

An attempt is counted before it is made, and its outcome is stored under that count. If a worker dies in between, the
message is due again after HOLD. A worker that returns late stores nothing.
"""

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol

from django.conf import settings
from django.db import transaction
from django.db.models import Min, Q, QuerySet

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.access.principals import WORKER
from keyvault.backends.outbound import Reply, post
from keyvault.domain.errors import KeyvaultError, StateConflictError
from keyvault.domain.networks import IPNetwork
from keyvault.domain.notifications import NoticeKind
from keyvault.models import DeliveryState, MerchantStatus, Notice, WebhookDelivery, WebhookEndpoint
from keyvault.services.recording.authorization import authorize
from keyvault.services.recording.notifications import announce, message_of
from keyvault.services.recording.signals import notice_settled
from keyvault.services.recording.transaction import recorded
from keyvault.services.usage.recorder import utc_now
from keyvault.services.webhooks.endpoints import host_of, signing_secrets, write_disabled
from keyvault.services.work import leases
from keyvault.wire.destinations import Destination, parse_url
from keyvault.wire.webhooks import DeliveryAssessment, DeliveryOutcome, judge_response, next_attempt, sign

MAX_CONCURRENT = 16
"""Maximum attempts under way at the same time, each to a different endpoint."""
BEGIN_SECONDS = 4.0
"""Time in which a round starts attempts, in seconds. The longest attempt after that still ends within the lease."""
HOLD = timedelta(seconds=30)
"""Exclusive time of a started attempt. Longer than an attempt can take."""
KEEP = timedelta(days=30)
"""Retention of settled deliveries, from the time of the notice."""
_MAX_DELETED = 5_000
"""Maximum deliveries deleted in one run."""

_LEASE = "webhooks"
_P = Permission.WEBHOOKS_DELIVER
_NO_REPLY = DeliveryAssessment(DeliveryOutcome.RETRY)

_log = logging.getLogger(__name__)


class Send(Protocol):
    """The signature of `backends.outbound.post`, or of its substitute in tests."""

    def __call__(
        self,
        destination: Destination,
        headers: Mapping[str, str],
        body: bytes,
        *,
        own_networks: Sequence[IPNetwork] = (),
    ) -> Reply: ...


# --- delivery reports ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeliveryReport:
    """Whether a notice reached the merchant.

    `has_failed`: nothing was delivered and nothing is pending. `reason`: why nothing was delivered.
    """

    delivered_at: datetime | None
    has_failed: bool
    reason: str


def find_delivery_report(kind: NoticeKind, subject: str) -> DeliveryReport:
    """Report the delivery of a subject's notices of one kind. One delivery to one endpoint is enough.

    The report is available for as long as deliveries are kept, which is KEEP after the notice.
    """
    notices = Notice.objects.filter(kind=kind, subject=subject)
    deliveries = WebhookDelivery.objects.filter(notice__in=notices)
    delivered_at = deliveries.aggregate(first=Min("delivered_at"))["first"]
    if delivered_at is not None:
        return DeliveryReport(delivered_at, has_failed=False, reason="")
    if not notices.exists():
        return DeliveryReport(None, has_failed=False, reason="nothing was announced yet")
    last = deliveries.order_by("state", "pk").first()
    if last is None:
        return DeliveryReport(None, has_failed=True, reason="the account had no enabled webhook endpoint")
    return DeliveryReport(None, has_failed=last.state == DeliveryState.GIVEN_UP, reason=last.last_error)


def forget_old_deliveries(now: datetime) -> None:
    """Delete old deliveries that were delivered or given up, some thousands at a time. The notices stay."""
    old = WebhookDelivery.objects.filter(notice__created_at__lt=now - KEEP).exclude(state=DeliveryState.DUE)
    deleted = old.order_by("pk").values_list("pk", flat=True)[:_MAX_DELETED]
    WebhookDelivery.objects.filter(pk__in=list(deleted)).delete()


# --- one round -------------------------------------------------------------------------------------------------


def deliver_due(clock: Callable[[], datetime] = utc_now, send: Send = post) -> int:
    """Make the attempts that are due, for a few seconds. Return how many; 0 while another worker runs."""
    lease = leases.claim(_LEASE, clock())
    if lease is None:
        return 0
    try:
        with ThreadPoolExecutor(MAX_CONCURRENT, "webhook") as pool:
            return _attempt_all(pool, clock, send)
    finally:
        leases.release(lease)


def _attempt_all(pool: ThreadPoolExecutor, clock: Callable[[], datetime], send: Send) -> int:
    """Run a round. Only this thread uses the database; the pool's threads only send."""
    begun, stop_at = 0, time.monotonic() + BEGIN_SECONDS
    under_way: dict[Future[Reply], WebhookDelivery] = {}
    while True:
        if time.monotonic() < stop_at:
            busy = [delivery.endpoint_id for delivery in under_way.values()]
            for delivery in _next_due(clock(), busy, MAX_CONCURRENT - len(under_way)):
                if _begin(delivery, clock()):
                    begun += 1
                    under_way[pool.submit(_prepared(delivery, clock(), send))] = delivery
        if not under_way:
            return begun
        for future in wait(under_way, return_when=FIRST_COMPLETED).done:
            _store_outcome(under_way.pop(future), future, clock())


def _next_due(now: datetime, busy: Sequence[int], limit: int) -> list[WebhookDelivery]:
    """Return one delivery for each endpoint: first attempts before retries, then the longest waiting.

    Endpoints of an offboarded merchant still receive earlier notices, including those about the end of its access.
    """
    accepts = Q(endpoint__disabled_at__isnull=True) | Q(endpoint__account__merchant__status=MerchantStatus.OFFBOARDED)
    due = WebhookDelivery.objects.filter(
        accepts,
        state=DeliveryState.DUE,
        due_at__lte=now,
        endpoint__account__environment__in=settings.ENVIRONMENTS,
    ).exclude(endpoint__in=busy)
    endpoints = due.values("endpoint").annotate(fewest=Min("attempts"), since=Min("due_at")).order_by("fewest", "since")
    rows = due.select_related("notice__account", "endpoint__account").order_by("due_at", "pk")
    found = (rows.filter(endpoint=each["endpoint"]).first() for each in endpoints[:limit])
    return [delivery for delivery in found if delivery is not None]


def _begin(delivery: WebhookDelivery, now: datetime) -> bool:
    """Count the attempt and hold the delivery. False: another worker has it, or the endpoint is disabled."""
    if _current_attempt(delivery).update(attempts=delivery.attempts + 1, due_at=now + HOLD) != 1:
        return False
    delivery.attempts += 1
    return True


def _prepared(delivery: WebhookDelivery, now: datetime, send: Send) -> Callable[[], Reply]:
    """Return a callable that makes the attempt without a database, or one that raises why it cannot be made."""
    endpoint = delivery.endpoint
    try:
        destination = parse_url(endpoint.url, settings.WEBHOOK_NETWORKS)
        body = message_of(delivery.notice)
        headers = sign(signing_secrets(endpoint, now), delivery.notice_id, now, body)
    except (KeyvaultError, ValueError, TypeError) as error:
        return _raise_later(error)
    return lambda: send(destination, headers, body, own_networks=settings.WEBHOOK_NETWORKS)


def _raise_later(error: Exception) -> Callable[[], Reply]:
    def attempt() -> Reply:
        raise error

    return attempt


# --- outcomes --------------------------------------------------------------------------------------------------


def _store_outcome(delivery: WebhookDelivery, attempt: Future[Reply], now: datetime) -> None:
    """Store the outcome of an attempt. Errors are isolated per message; a failed one is due again after HOLD."""
    error = attempt.exception()
    if error is None:
        reply = attempt.result()
        assessment, delivery.last_status = judge_response(reply.status, reply.retry_after, now), reply.status
        delivery.last_error = "" if assessment.verdict is DeliveryOutcome.DELIVERED else f"answered {reply.status}"
    else:
        assessment, delivery.last_status = _NO_REPLY, None
        delivery.last_error = (error.detail if isinstance(error, KeyvaultError) else type(error).__name__)[:300]
        internal = error.internal if isinstance(error, KeyvaultError) else repr(error)
        _log.info("a webhook delivery got no reply", extra={"notice": delivery.notice_id, "why": internal})
    try:
        _settle(delivery, assessment, now)
    except KeyvaultError as fault:
        _log.warning("the outcome of a webhook delivery was not stored", extra={"why": fault.internal or fault.detail})


def _settle(delivery: WebhookDelivery, assessment: DeliveryAssessment, now: datetime) -> None:
    outcome = {"last_status": delivery.last_status, "last_error": delivery.last_error}
    if assessment.verdict is DeliveryOutcome.DELIVERED:
        with transaction.atomic():
            _current_attempt(delivery).update(**outcome, state=DeliveryState.DELIVERED, delivered_at=now)
            notice_settled.send(None, notice=delivery.notice, now=now)
        return
    if assessment.verdict is DeliveryOutcome.GONE:
        _give_up(delivery, now, is_disabled=True)
        return
    # A test reports its first outcome and is never retried.
    is_test = delivery.notice.kind == NoticeKind.WEBHOOK_TEST
    pause = None if is_test else next_attempt(delivery.attempts, random.random)
    if is_test:
        _current_attempt(delivery).update(**outcome, state=DeliveryState.GIVEN_UP)
    elif pause is None:
        _give_up(delivery, now, is_disabled=not _has_delivered_since(delivery))
    else:
        _current_attempt(delivery).update(**outcome, due_at=now + max(pause, assessment.wait))


def _give_up(delivery: WebhookDelivery, now: datetime, *, is_disabled: bool) -> None:
    """Give up one message, and disable its endpoint if nothing arrives there any more. Raise an alarm for operators."""
    endpoint: WebhookEndpoint = WebhookEndpoint.objects.select_related("account").get(pk=delivery.endpoint_id)
    why, host, message, grant = delivery.last_error, host_of(endpoint), delivery.notice_id, _grant(delivery, now)
    event = "webhook_endpoint.disabled" if is_disabled else "webhook_endpoint.message_given_up"
    with recorded(
        grant, _P, event, account=endpoint.account, endpoint=endpoint.pk, host=host, message=message, why=why
    ):
        settled = {"state": DeliveryState.GIVEN_UP, "last_status": delivery.last_status, "last_error": why}
        if _current_attempt(delivery).update(**settled) != 1:
            raise StateConflictError("Another worker settled this delivery first.", internal=f"delivery {delivery.pk}")
        if is_disabled and endpoint.disabled_at is None:
            write_disabled(endpoint, why, now)
        announce(
            grant,
            NoticeKind.WEBHOOK_FAILED,
            endpoint.account,
            str(endpoint.pk),
            host=host,
            message=message,
            why=why,
            is_disabled=is_disabled,
        )
        notice_settled.send(None, notice=delivery.notice, now=now)


def _has_delivered_since(delivery: WebhookDelivery) -> bool:
    """Whether the endpoint accepted other messages since: then only this message fails, not the endpoint."""
    return WebhookDelivery.objects.filter(
        endpoint=delivery.endpoint_id, delivered_at__gt=delivery.notice.created_at
    ).exists()


def _current_attempt(delivery: WebhookDelivery) -> QuerySet[WebhookDelivery]:
    """Select the row while this attempt is the latest and the delivery is still due."""
    return WebhookDelivery.objects.filter(pk=delivery.pk, state=DeliveryState.DUE, attempts=delivery.attempts)


def _grant(delivery: WebhookDelivery, now: datetime) -> Grant:
    return authorize(WORKER, _P, delivery.endpoint.account, now=now)
