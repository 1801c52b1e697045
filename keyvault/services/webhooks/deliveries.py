"""Notices on their way to the merchants' endpoints: sent outside any transaction, at least once, the same each time.

One worker at a time runs a round: several endpoints at once, one message at a time for each, so that one that hangs
holds up nobody but itself. An attempt is counted before it is made, and its outcome noted under that count: a worker
that dies in between leaves a message that is due again a little later, and one that comes back late notes nothing.
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
from keyvault.services.recording.transaction import recorded
from keyvault.services.usage.recorder import utc_now
from keyvault.services.webhooks.endpoints import host_of, signing_secrets, write_disabled
from keyvault.services.work import leases
from keyvault.wire.destinations import Destination, parse_url
from keyvault.wire.webhooks import DeliveryAssessment, DeliveryOutcome, judge_response, next_attempt, sign

AT_ONCE = 16
BEGIN_SECONDS = 4.0
"""So long a round begins attempts: with the longest one after that, it still ends within its lease."""
HOLD = timedelta(seconds=30)
"""So long an attempt that was begun keeps others away: longer than it can take."""
KEEP = timedelta(days=30)

_LEASE = "webhooks"
_P = Permission.WEBHOOKS_DELIVER
_NO_ANSWER = DeliveryAssessment(DeliveryOutcome.RETRY)

_log = logging.getLogger(__name__)


class Send(Protocol):
    """`backends.outbound.post`, or what stands for it."""

    def __call__(
        self,
        destination: Destination,
        headers: Mapping[str, str],
        body: bytes,
        *,
        own_networks: Sequence[IPNetwork] = (),
    ) -> Reply: ...


# --- what came of it -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeliveryReport:
    """Whether a merchant was told. `has_failed`: nothing is on its way any more, and nothing arrived; `reason` why."""

    delivered_at: datetime | None
    has_failed: bool
    reason: str


def find_telling(kind: NoticeKind, subject: str) -> DeliveryReport:
    """How the notices of this kind about this subject fared: one endpoint that took one of them is enough.

    Known as long as deliveries are kept, which is KEEP after the notice.
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
    """What was delivered or given up long ago. The notices themselves stay."""
    WebhookDelivery.objects.filter(notice__created_at__lt=now - KEEP).exclude(state=DeliveryState.DUE).delete()


# --- one round -------------------------------------------------------------------------------------------------


def deliver_due(clock: Callable[[], datetime] = utc_now, send: Send = post) -> int:
    """Makes the attempts that are due, for a few seconds; how many. None while another worker is at it."""
    lease = leases.claim(_LEASE, clock())
    if lease is None:
        return 0
    try:
        with ThreadPoolExecutor(AT_ONCE, "webhook") as pool:
            return _attempt_all(pool, clock, send)
    finally:
        leases.release(lease)


def _attempt_all(pool: ThreadPoolExecutor, clock: Callable[[], datetime], send: Send) -> int:
    """The database is this thread's alone; the pool's threads only send."""
    begun, last_beginning = 0, time.monotonic() + BEGIN_SECONDS
    under_way: dict[Future[Reply], WebhookDelivery] = {}
    while True:
        if time.monotonic() < last_beginning:
            busy = [delivery.endpoint_id for delivery in under_way.values()]
            for delivery in _next_due(clock(), busy, AT_ONCE - len(under_way)):
                if _begin(delivery, clock()):
                    begun += 1
                    under_way[pool.submit(_prepared(delivery, clock(), send))] = delivery
        if not under_way:
            return begun
        for future in wait(under_way, return_when=FIRST_COMPLETED).done:
            _note(under_way.pop(future), future, clock())


def _next_due(now: datetime, busy: Sequence[int], room: int) -> list[WebhookDelivery]:
    """One of each endpoint: first attempts before later ones, then what waits longest.

    The endpoints of a merchant that has left still take what was announced before: that everything has ended.
    """
    takes = Q(endpoint__disabled_at__isnull=True) | Q(endpoint__account__merchant__status=MerchantStatus.OFFBOARDED)
    due = WebhookDelivery.objects.filter(
        takes,
        state=DeliveryState.DUE,
        due_at__lte=now,
        endpoint__account__environment__in=settings.ENVIRONMENTS,
    ).exclude(endpoint__in=busy)
    endpoints = due.values("endpoint").annotate(fewest=Min("attempts"), since=Min("due_at")).order_by("fewest", "since")
    rows = due.select_related("notice__account", "endpoint__account").order_by("due_at", "pk")
    found = (rows.filter(endpoint=each["endpoint"]).first() for each in endpoints[:room])
    return [delivery for delivery in found if delivery is not None]


def _begin(delivery: WebhookDelivery, now: datetime) -> bool:
    """Counts the attempt, and keeps others off while it lasts. False: somebody else has it, or it is off."""
    if _mine(delivery).update(attempts=delivery.attempts + 1, due_at=now + HOLD) != 1:
        return False
    delivery.attempts += 1
    return True


def _prepared(delivery: WebhookDelivery, now: datetime, send: Send) -> Callable[[], Reply]:
    """The attempt itself, for a thread without a database; or the reason why there can be none."""
    endpoint = delivery.endpoint
    try:
        destination = parse_url(endpoint.url, settings.WEBHOOK_NETWORKS)
        body = message_of(delivery.notice)
        headers = sign(signing_secrets(endpoint, now), delivery.notice_id, now, body)
    except (KeyvaultError, ValueError, TypeError) as error:
        return _raising(error)
    return lambda: send(destination, headers, body, own_networks=settings.WEBHOOK_NETWORKS)


def _raising(error: Exception) -> Callable[[], Reply]:
    def attempt() -> Reply:
        raise error

    return attempt


# --- how an attempt ended --------------------------------------------------------------------------------------


def _note(delivery: WebhookDelivery, attempt: Future[Reply], now: datetime) -> None:
    """One message's trouble is not the next one's: whatever goes wrong here, it is due again after HOLD."""
    error = attempt.exception()
    if error is None:
        reply = attempt.result()
        judgement, delivery.last_status = judge_response(reply.status, reply.retry_after, now), reply.status
        delivery.last_error = "" if judgement.verdict is DeliveryOutcome.DELIVERED else f"answered {reply.status}"
    else:
        judgement, delivery.last_status = _NO_ANSWER, None
        delivery.last_error = (error.detail if isinstance(error, KeyvaultError) else type(error).__name__)[:300]
        internal = error.internal if isinstance(error, KeyvaultError) else repr(error)
        _log.info("a webhook got no answer", extra={"notice": delivery.notice_id, "why": internal})
    try:
        _settle(delivery, judgement, now)
    except KeyvaultError as fault:
        _log.warning("the outcome of a webhook was not noted", extra={"why": fault.internal or fault.detail})


def _settle(delivery: WebhookDelivery, judgement: DeliveryAssessment, now: datetime) -> None:
    told = {"last_status": delivery.last_status, "last_error": delivery.last_error}
    if judgement.verdict is DeliveryOutcome.DELIVERED:
        _mine(delivery).update(**told, state=DeliveryState.DELIVERED, delivered_at=now)
        return
    if judgement.verdict is DeliveryOutcome.GONE:
        _give_up(delivery, now, is_disabled=True)
        return
    # A test says at once how it went.
    is_test = delivery.notice.kind == NoticeKind.WEBHOOK_TEST
    pause = None if is_test else next_attempt(delivery.attempts, random.random)
    if is_test:
        _mine(delivery).update(**told, state=DeliveryState.GIVEN_UP)
    elif pause is None:
        _give_up(delivery, now, is_disabled=not _has_delivered_since(delivery))
    else:
        _mine(delivery).update(**told, due_at=now + max(pause, judgement.wait))


def _give_up(delivery: WebhookDelivery, now: datetime, *, is_disabled: bool) -> None:
    """The end of one message; of its endpoint too when nothing arrives there any more. Operators are alarmed."""
    endpoint: WebhookEndpoint = WebhookEndpoint.objects.select_related("account").get(pk=delivery.endpoint_id)
    why, host, message, grant = delivery.last_error, host_of(endpoint), delivery.notice_id, _grant(delivery, now)
    event = "webhook_endpoint.disabled" if is_disabled else "webhook_endpoint.message_given_up"
    with recorded(
        grant, _P, event, account=endpoint.account, endpoint=endpoint.pk, host=host, message=message, why=why
    ):
        settled = {"state": DeliveryState.GIVEN_UP, "last_status": delivery.last_status, "last_error": why}
        if _mine(delivery).update(**settled) != 1:
            raise StateConflictError("Somebody else settled this meanwhile.", internal=f"delivery {delivery.pk}")
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


def _has_delivered_since(delivery: WebhookDelivery) -> bool:
    """Whether the endpoint took others since: then it is this message, not the endpoint, that is in trouble."""
    return WebhookDelivery.objects.filter(
        endpoint=delivery.endpoint_id, delivered_at__gt=delivery.notice.created_at
    ).exists()


def _mine(delivery: WebhookDelivery) -> QuerySet[WebhookDelivery]:
    """The row, as long as this attempt is the last that was begun, and nobody gave it up."""
    return WebhookDelivery.objects.filter(pk=delivery.pk, state=DeliveryState.DUE, attempts=delivery.attempts)


def _grant(delivery: WebhookDelivery, now: datetime) -> Grant:
    return authorize(WORKER, _P, delivery.endpoint.account, now=now)
