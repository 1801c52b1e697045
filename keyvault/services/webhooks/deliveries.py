"""Deliver notices to the merchants' webhook endpoints, at least once and with identical content on each attempt.

Messages are sent outside any transaction. One worker at a time runs a round of an environment. It sends to several
endpoints concurrently, one message at a time for each, so that a slow endpoint delays only itself. One thread of a
worker runs the rounds of all its environments at the same time, so that webhooks never hold its other threads.

The worker visits the endpoints with due messages in turn, so that no backlog delays another account. It visits
them for urgent messages first, and then for the others. An account holds at most MAX_PER_ACCOUNT attempts. The breaker
of an endpoint pauses it when it repeatedly does not reply; a paused message is not counted as attempted.

An attempt is counted before it is made, and its outcome is stored under that count. If a worker dies in between, the
message is due again after HOLD. A worker that returns late stores nothing.
"""

import logging
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Protocol

from django.conf import settings
from django.db import connection, transaction
from django.db.models import Exists, OuterRef, QuerySet

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.access.principals import WORKER
from keyvault.backends import meters
from keyvault.backends.outbound import OutboundError, Reply, ResolversBusyError, post
from keyvault.domain.errors import KeyvaultError, StateConflictError
from keyvault.domain.networks import IPNetwork
from keyvault.domain.notifications import NoticeKind
from keyvault.models import DeliveryState, MerchantStatus, Notice, WebhookBreaker, WebhookDelivery, WebhookEndpoint
from keyvault.models.notifications import SETTLED_NOTICE
from keyvault.services.recording.authorization import authorize
from keyvault.services.recording.notifications import announce, message_of
from keyvault.services.recording.signals import notice_settled
from keyvault.services.recording.transaction import recorded
from keyvault.services.usage.recorder import utc_now
from keyvault.services.webhooks.endpoints import breaker_of, host_of, signing_secrets, write_disabled
from keyvault.services.work import leases
from keyvault.services.work.deletion import delete_batch
from keyvault.wire.destinations import Destination, parse_url
from keyvault.wire.webhooks import (
    DeliveryAssessment,
    DeliveryOutcome,
    judge_response,
    next_attempt,
    open_breaker_for,
    sign,
)

MAX_CONCURRENT = 16
"""Maximum attempts of an environment under way at the same time, each to a different endpoint."""
MAX_PER_ACCOUNT = 4
"""Maximum attempts of one account under way at the same time."""
MAX_WITHOUT_REPLY = 8
"""Maximum attempts under way to endpoints whose last attempt got no reply."""
MAX_VISITS = 200
"""Maximum endpoints visited in one search for due messages. The next search continues with the endpoint after it."""
BEGIN_SECONDS = 4.0
"""Time in which a round starts attempts, in seconds. The longest attempt after that still ends within the lease."""
SEARCH_SECONDS = 1.0
"""Maximum time between two searches for due messages while no attempt ends, in seconds."""
HOLD = timedelta(seconds=30)
"""Exclusive time of a started attempt. Longer than an attempt can take."""

_P = Permission.WEBHOOKS_DELIVER
_NO_REPLY = DeliveryAssessment(DeliveryOutcome.RETRY)

_log = logging.getLogger(__name__)


class SendMessage(Protocol):
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

    The report is available for as long as deliveries are kept.
    """
    notices = Notice.objects.filter(kind=kind, subject=subject).order_by("deliveries__state", "deliveries__pk")
    rows = list(notices.values_list("deliveries__state", "deliveries__delivered_at", "deliveries__last_error"))
    made = [row for row in rows if row[0] is not None]  # a notice without any has one row
    if not rows:
        return DeliveryReport(None, has_failed=False, reason="nothing was announced yet")
    if not made:
        return DeliveryReport(None, has_failed=True, reason="the account had no enabled webhook endpoint")
    delivered_at = min((at for _, at, _ in made if at is not None), default=None)
    if delivered_at is not None:
        return DeliveryReport(delivered_at, has_failed=False, reason="")
    state, _, last_error = made[0]
    return DeliveryReport(None, has_failed=state == DeliveryState.GIVEN_UP, reason=last_error)


def forget_old_deliveries(now: datetime) -> int:
    """Delete a batch of old deliveries that succeeded or were given up. Return how many."""
    settled = WebhookDelivery.objects.exclude(state=DeliveryState.DUE)
    return delete_batch(settled.filter(due_at__lt=now - timedelta(days=settings.DELIVERY_DAYS)).order_by("due_at"))


def forget_old_notices(now: datetime) -> int:
    """Delete a batch of old notices, except alarms that no operator has seen and notices with deliveries.

    Return how many.
    """
    old = Notice.objects.filter(SETTLED_NOTICE, created_at__lt=now - timedelta(days=settings.NOTICE_DAYS))
    return delete_batch(
        old.filter(~Exists(WebhookDelivery.objects.filter(notice=OuterRef("pk")))).order_by("created_at")
    )


# --- one round -------------------------------------------------------------------------------------------------


def deliver_due(clock: Callable[[], datetime] = utc_now, send: SendMessage = post) -> int:
    """Make the attempts that are due in the environments that this process serves, for a few seconds. Return how many.

    An environment in which another worker runs a round is left to it. Without a due message nothing is claimed.
    """
    if not _has_due(clock()):
        return 0
    environments: list[str] = []
    with ExitStack() as claims:
        for environment in settings.ENVIRONMENTS:
            lease = leases.claim(f"webhooks:{environment}", clock())
            if lease is not None:
                claims.callback(leases.release, lease)
                environments.append(environment)
        if not environments:
            return 0
        with ThreadPoolExecutor(MAX_CONCURRENT * len(environments), "webhook") as pool:
            return _attempt_all(tuple(environments), pool, clock, send)


def _has_due(now: datetime) -> bool:
    due = WebhookDelivery.objects.filter(state=DeliveryState.DUE, due_at__lte=now)
    return any(due.filter(is_urgent__in=[is_urgent]).exists() for is_urgent in (True, False))


def _attempt_all(
    environments: tuple[str, ...], pool: ThreadPoolExecutor, clock: Callable[[], datetime], send: SendMessage
) -> int:
    """Run a round. Only this thread uses the database; the pool's threads only send."""
    begun, stop_at = 0, time.monotonic() + BEGIN_SECONDS
    under_way: dict[Future[Reply], WebhookDelivery] = {}
    while True:
        may_begin = time.monotonic() < stop_at
        if may_begin:
            for delivery in _next_due(environments, clock(), list(under_way.values())):
                with _isolated(delivery):
                    if _begin(delivery, clock()):
                        begun += 1
                        under_way[pool.submit(_prepared(delivery, clock(), send))] = delivery
        if not under_way:
            return begun
        timeout = SEARCH_SECONDS if may_begin else None
        for future in wait(under_way, timeout, return_when=FIRST_COMPLETED).done:
            delivery = under_way.pop(future)
            with _isolated(delivery):
                _store_outcome(delivery, future, clock())


@contextmanager
def _isolated(delivery: WebhookDelivery) -> Iterator[None]:
    """Log an error of one message, so that the round continues. The message is due again, after HOLD at the latest.

    An error that lost the database connection ends the round.
    """
    try:
        yield
    except Exception:
        _log.exception("a webhook delivery failed", extra={"notice": delivery.notice_id})
        if not connection.is_usable():
            raise


@dataclass(slots=True)
class EndpointTurns:
    """Take the endpoints with due messages in turn. `after`: the endpoint visited last, kept between rounds."""

    is_urgent: bool
    after: int = 0

    def visit(self, now: datetime) -> Iterator[WebhookDelivery]:
        """Yield the oldest due message of each endpoint that has one, once around from the endpoint visited last.

        Each step is one lookup. With few due messages it reads those only (`webhook_delivery_due_at`); with many it
        finds the next one in the order of endpoints, whatever the backlog of each (`webhook_delivery_due`).
        """
        due = (
            WebhookDelivery.objects.filter(state=DeliveryState.DUE, is_urgent__in=[self.is_urgent], due_at__lte=now)
            .select_related("notice__account", "endpoint__account__merchant", "endpoint__breaker")
            .order_by("endpoint_id", "due_at", "pk")
        )
        first, has_wrapped = self.after, False
        for _ in range(MAX_VISITS):
            delivery = due.filter(endpoint_id__gt=self.after).first()
            if delivery is None and not has_wrapped:
                self.after, has_wrapped = 0, True
                delivery = due.first()
            if delivery is None or (has_wrapped and delivery.endpoint_id > first):
                return
            self.after = delivery.endpoint_id
            yield delivery


_turns: defaultdict[tuple[str, ...], tuple[EndpointTurns, EndpointTurns]] = defaultdict(
    lambda: (EndpointTurns(is_urgent=True), EndpointTurns(is_urgent=False))
)
"""The turns of the environments of a round: those of urgent messages, and those of the others."""


def _next_due(
    environments: tuple[str, ...], now: datetime, under_way: Sequence[WebhookDelivery]
) -> list[WebhookDelivery]:
    """Return the messages to send now beside those under way, at most one for each endpoint."""
    chosen = list(under_way)
    for turns in _turns[environments]:
        visits = turns.visit(now)
        while len(chosen) < MAX_CONCURRENT * len(environments) and (delivery := next(visits, None)) is not None:
            if _is_withdrawn(delivery.endpoint):
                # Queued by a transaction that ended after the one that disabled the endpoint.
                with _isolated(delivery), transaction.atomic():
                    gone = {"state": DeliveryState.GIVEN_UP, "last_error": "the endpoint was disabled"}
                    if _current_attempt(delivery).update(**gone):
                        notice_settled.send(None, notice=delivery.notice, now=now)
            elif _may_send(delivery, environments, now) and _has_room(delivery, chosen):
                chosen.append(delivery)
    return chosen[len(under_way) :]


def _is_withdrawn(endpoint: WebhookEndpoint) -> bool:
    """Whether the endpoint receives nothing more.

    Endpoints of an offboarded merchant still receive earlier notices, including those about the end of its access.
    """
    return endpoint.disabled_at is not None and endpoint.account.merchant.status != MerchantStatus.OFFBOARDED


def _may_send(delivery: WebhookDelivery, environments: tuple[str, ...], now: datetime) -> bool:
    """Whether the round of the environments may send the due message now."""
    endpoint, breaker = delivery.endpoint, breaker_of(delivery.endpoint)
    is_open = breaker is not None and breaker.open_until is not None and breaker.open_until > now
    return not is_open and endpoint.account.environment in environments


def _has_room(delivery: WebhookDelivery, chosen: Sequence[WebhookDelivery]) -> bool:
    """Whether the endpoint is free, and its environment, its account and the endpoints without a reply have room."""
    account = delivery.endpoint.account
    beside = [each for each in chosen if each.endpoint.account.environment == account.environment]
    of_account = [each for each in beside if each.endpoint.account_id == account.pk]
    without_reply = [each for each in beside if breaker_of(each.endpoint) is not None]
    return (
        len(beside) < MAX_CONCURRENT
        and all(each.endpoint_id != delivery.endpoint_id for each in of_account)
        and len(of_account) < MAX_PER_ACCOUNT
        and (breaker_of(delivery.endpoint) is None or len(without_reply) < MAX_WITHOUT_REPLY)
    )


def _begin(delivery: WebhookDelivery, now: datetime) -> bool:
    """Count the attempt and hold the delivery. False: another worker has it, or the endpoint is disabled."""
    if _current_attempt(delivery).update(attempts=delivery.attempts + 1, due_at=now + HOLD) != 1:
        return False
    delivery.attempts += 1
    return True


def _prepared(delivery: WebhookDelivery, now: datetime, send: SendMessage) -> Callable[[], Reply]:
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
    """Store the outcome of an attempt, unless it is not the latest any more."""
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
    is_refused = error is None and assessment.verdict is DeliveryOutcome.RETRY
    meters.note_webhook("no_reply" if error else "refused" if is_refused else assessment.verdict.value)
    try:
        with transaction.atomic():
            _settle(delivery, assessment, now)
            if not isinstance(error, ResolversBusyError):
                _set_breaker(delivery.endpoint, now, has_replied=not isinstance(error, OutboundError))
    except KeyvaultError as fault:
        _log.warning("the outcome of a webhook delivery was not stored", extra={"why": fault.internal or fault.detail})


def _set_breaker(endpoint: WebhookEndpoint, now: datetime, *, has_replied: bool) -> None:
    """Count an attempt without a reply, or close the breaker. One attempt per endpoint is under way at a time."""
    breaker = breaker_of(endpoint)
    if not has_replied:
        failures = 1 if breaker is None else breaker.failures + 1
        pause = open_breaker_for(failures)
        until = None if pause is None else now + pause
        WebhookBreaker.objects.update_or_create(endpoint=endpoint, defaults={"failures": failures, "open_until": until})
    elif breaker is not None:
        WebhookBreaker.objects.filter(endpoint=endpoint).delete()


def _settle(delivery: WebhookDelivery, assessment: DeliveryAssessment, now: datetime) -> None:
    """Write the outcome. Raises StateConflictError when the attempt is not the latest any more."""
    outcome = {"last_status": delivery.last_status, "last_error": delivery.last_error}
    if assessment.verdict is DeliveryOutcome.DELIVERED:
        _write(delivery, **outcome, state=DeliveryState.DELIVERED, delivered_at=now)
        notice_settled.send(None, notice=delivery.notice, now=now)
        return
    if assessment.verdict is DeliveryOutcome.GONE:
        _give_up(delivery, now, is_disabled=True)
        return
    # A test reports its first outcome and is never retried.
    is_test = delivery.notice.kind == NoticeKind.WEBHOOK_TEST
    pause = None if is_test or now >= delivery.give_up_at else next_attempt(delivery.attempts, random.random)
    if is_test:
        _write(delivery, **outcome, state=DeliveryState.GIVEN_UP)
    elif pause is None:
        _give_up(delivery, now, is_disabled=not _has_delivered_since(delivery))
    else:
        _write(delivery, **outcome, due_at=now + max(pause, assessment.wait))


def _write(delivery: WebhookDelivery, **outcome: Any) -> None:
    if _current_attempt(delivery).update(**outcome) != 1:
        raise StateConflictError("Another worker settled this delivery first.", internal=f"delivery {delivery.pk}")


def _give_up(delivery: WebhookDelivery, now: datetime, *, is_disabled: bool) -> None:
    """Give up one message, and disable its endpoint if nothing arrives there any more. Raise an alarm for operators."""
    # Locked before the delivery, as by a person who disables the endpoint.
    rows = WebhookEndpoint.objects.select_related("account").select_for_update(of=("self",), no_key=True)
    endpoint: WebhookEndpoint = rows.get(pk=delivery.endpoint_id)
    why, host, message, grant = delivery.last_error, host_of(endpoint), delivery.notice_id, _grant(delivery, now)
    event = "webhook_endpoint.disabled" if is_disabled else "webhook_endpoint.message_given_up"
    with recorded(
        grant, _P, event, account=endpoint.account, endpoint=endpoint.pk, host=host, message=message, why=why
    ):
        _write(delivery, state=DeliveryState.GIVEN_UP, last_status=delivery.last_status, last_error=why)
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
    meters.note_webhook_given_up()


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
