"""Manage the webhook endpoints of merchants' accounts, and the secrets that sign their messages.

A secret is shown once and stored sealed under the environment's peppers. The database alone can therefore sign nothing,
and neither can a process that does not serve the environment.
"""

import secrets
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import IntegrityError
from django.db.models import Count

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.domain.canonical import JsonValue
from keyvault.domain.digests import PEPPER_SET, Peppers
from keyvault.domain.environments import Environment
from keyvault.domain.errors import Fault, RequestInvalidError, StateConflictError
from keyvault.domain.keystring import SHAPED
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.sealing import seal, sealed_with, unseal
from keyvault.models import Account, DeliveryState, Notice, WebhookBreaker, WebhookDelivery, WebhookEndpoint
from keyvault.services.merchants.merchants import require_not_offboarded
from keyvault.services.peppers.ring import load_peppers, refresh_peppers
from keyvault.services.recording.notifications import announce_to
from keyvault.services.recording.signals import notice_settled
from keyvault.services.recording.transaction import recorded
from keyvault.services.work.row_turns import batch_after
from keyvault.wire.destinations import Destination, parse_url
from keyvault.wire.webhooks import GIVE_UP_AFTER, mint_secret

MAX_ENDPOINTS = 5
"""Maximum enabled endpoints of one account."""
DEFAULT_OVERLAP_HOURS, MAX_OVERLAP_HOURS = 24, 168
CATCH_UP = timedelta(days=7)
"""Age up to which given-up messages are sent again when the endpoint is enabled."""

_P = Permission.WEBHOOKS_WRITE


def add_endpoint(grant: Grant, account: Account, url: str) -> tuple[WebhookEndpoint, Plaintext]:
    """Add an endpoint. Return it and its secret, which is not shown again.

    Raises RequestInvalidError for a URL that is not a permitted destination. Raises StateConflictError if the account
    already has the URL or has too many endpoints.
    """
    destination = _read_url(url)
    refresh_peppers(PEPPER_SET[Environment(account.environment)])
    secret = mint_secret(secrets.token_bytes)
    endpoint = WebhookEndpoint(
        account=account,
        url=destination.url,
        secret=_sealed(account, destination.url, secret),
        created_at=grant.at,
    )
    duplicate = f"The account already has this endpoint: {destination.host}."
    if WebhookEndpoint.objects.filter(account=account, url=destination.url).exists():
        raise StateConflictError(duplicate)
    try:
        with recorded(grant, _P, "webhook_endpoint.added", account=account, host=destination.host):
            require_not_offboarded(account)
            _require_room(account)
            endpoint.save()
    except IntegrityError as error:
        raise StateConflictError(duplicate) from error
    return endpoint, secret


def rotate_secret(grant: Grant, endpoint: WebhookEndpoint, overlap_hours: int = DEFAULT_OVERLAP_HOURS) -> Plaintext:
    """Rotate the signing secret and return the new one, which is not shown again. Both sign during the overlap.

    An overlap of 0, for use after a leak, is accepted at any time. Raises StateConflictError while an overlap runs: a
    third secret would invalidate the one that the merchant still uses. Raises RequestInvalidError for an overlap out of
    range.
    """
    if overlap_hours and endpoint.previous_until is not None and grant.at < endpoint.previous_until:
        end = f"{endpoint.previous_until:%Y-%m-%d %H:%M} UTC"
        raise StateConflictError(
            f"The secret is already being rotated: two secrets sign until {end}. Wait, or set the overlap to 0 hours."
        )
    if not 0 <= overlap_hours <= MAX_OVERLAP_HOURS:
        raise RequestInvalidError(
            f"Invalid overlap of {overlap_hours} hours.", [Fault("/overlap_hours", f"0 to {MAX_OVERLAP_HOURS}")]
        )
    refresh_peppers(PEPPER_SET[Environment(endpoint.account.environment)])
    secret = mint_secret(secrets.token_bytes)
    until = grant.at + timedelta(hours=overlap_hours)
    details = {**_audit_details(endpoint), "overlap_hours": overlap_hours}
    with recorded(grant, _P, "webhook_endpoint.secret_rotated", account=endpoint.account, **details):
        endpoint.compare_and_swap(
            secret=_sealed(endpoint.account, endpoint.url, secret),
            previous_secret=bytes(endpoint.secret) if overlap_hours else None,
            previous_until=until if overlap_hours else None,
        )
    return secret


def disable_endpoint(grant: Grant, endpoint: WebhookEndpoint, why: str) -> None:
    """Disable an endpoint. Its pending messages are given up until it is enabled again."""
    if endpoint.disabled_at is not None:
        raise StateConflictError("The endpoint is already disabled.")
    with recorded(
        grant, _P, "webhook_endpoint.disabled", account=endpoint.account, why=why, **_audit_details(endpoint)
    ):
        write_disabled(endpoint, why, grant.at)


def write_disabled(endpoint: WebhookEndpoint, why: str, now: datetime) -> None:
    """Write the disabled state. Call it inside the caller's `recorded` block."""
    endpoint.compare_and_swap(disabled_at=now, disabled_why=why[:300])
    due = WebhookDelivery.objects.filter(endpoint=endpoint, state=DeliveryState.DUE)
    # A rotation may wait for the delivery of this message.
    awaited = Notice.objects.filter(kind=NoticeKind.REPLACEMENT_AVAILABLE, deliveries__in=due)
    notices = list(awaited.select_related("account"))
    due.update(state=DeliveryState.GIVEN_UP, last_error="the endpoint was disabled")
    for notice in notices:
        notice_settled.send(None, notice=notice, now=now)


def enable_endpoint(grant: Grant, endpoint: WebhookEndpoint) -> int:
    """Enable an endpoint. Return how many recently given-up messages are due again."""
    if endpoint.disabled_at is None:
        raise StateConflictError("The endpoint is already enabled.")
    with recorded(grant, _P, "webhook_endpoint.enabled", account=endpoint.account, **_audit_details(endpoint)):
        require_not_offboarded(endpoint.account)
        _require_room(endpoint.account)
        endpoint.compare_and_swap(disabled_at=None, disabled_why="")
        WebhookBreaker.objects.filter(endpoint=endpoint).delete()
        given_up = WebhookDelivery.objects.filter(
            endpoint=endpoint, state=DeliveryState.GIVEN_UP, notice__created_at__gt=grant.at - CATCH_UP
        )
        # A test is never repeated.
        return given_up.exclude(notice__kind=NoticeKind.WEBHOOK_TEST).update(
            state=DeliveryState.DUE, attempts=0, due_at=grant.at, give_up_at=grant.at + GIVE_UP_AFTER
        )


def send_test(grant: Grant, endpoint: WebhookEndpoint) -> Notice:
    """Send a test message by the normal route, also while the breaker is open.

    Raises StateConflictError if the endpoint is disabled.
    """
    if endpoint.disabled_at is not None:
        raise StateConflictError("The endpoint is disabled. Enable it before sending a test.")
    with recorded(grant, _P, "webhook_endpoint.tested", account=endpoint.account, **_audit_details(endpoint)):
        WebhookBreaker.objects.filter(endpoint=endpoint).update(open_until=None)
        return announce_to(grant, endpoint, NoticeKind.WEBHOOK_TEST, str(endpoint.pk))


def list_in_turn(after: WebhookEndpoint | None = None) -> list[WebhookEndpoint]:
    """Return a batch of endpoints to check for older peppers; none while each served environment has one version."""
    served = [load_peppers(PEPPER_SET[Environment(each)]) for each in settings.ENVIRONMENTS]
    if all(len(peppers.versions) == 1 for peppers in served):
        return []
    return batch_after(WebhookEndpoint.objects.select_related("account__merchant"), "pk", after)


def needs_resealing(endpoint: WebhookEndpoint) -> bool:
    """Whether a secret is sealed under an older pepper. False in an environment that this process does not serve."""
    if endpoint.account.environment not in settings.ENVIRONMENTS:
        return False
    return bool(sealed_versions(endpoint) - {_peppers(endpoint.account).current_version})


def reseal_secrets(grant: Grant, endpoint: WebhookEndpoint) -> None:
    """Seal the same secrets under the newest pepper, so that the older one can be retired."""
    peppers, context = _peppers(endpoint.account), _context(endpoint.account, endpoint.url)
    sealed = {
        name: seal(peppers, unseal(peppers, bytes(old), context), context, secrets.token_bytes)
        for name in ("secret", "previous_secret")
        if (old := getattr(endpoint, name))
    }
    details = {**_audit_details(endpoint), "pepper_version": peppers.current_version}
    with recorded(grant, Permission.KEYS_REHASH, "webhook_endpoint.resealed", account=endpoint.account, **details):
        endpoint.compare_and_swap(**sealed)


def sealed_versions(endpoint: WebhookEndpoint) -> set[int]:
    """Return the pepper versions that unseal the endpoint's secrets."""
    return {sealed_with(bytes(sealed)) for sealed in (endpoint.secret, endpoint.previous_secret) if sealed}


def list_endpoints(account: Account) -> Iterable[WebhookEndpoint]:
    rows = WebhookEndpoint.objects.filter(account=account).select_related("breaker")
    return rows.order_by("created_at", "pk")


def breaker_of(endpoint: WebhookEndpoint) -> WebhookBreaker | None:
    """Return the breaker of an endpoint whose last attempt got no reply."""
    return getattr(endpoint, "breaker", None)


def describe_endpoint(endpoint: WebhookEndpoint) -> dict[str, Any]:
    """Describe an endpoint, without its secret."""
    by_state = WebhookDelivery.objects.filter(endpoint=endpoint).values_list("state").annotate(Count("pk"))
    counts, breaker = dict(by_state), breaker_of(endpoint)
    return {
        "endpoint": endpoint.pk,
        "url": endpoint.url,
        "created_at": endpoint.created_at,
        "disabled_at": endpoint.disabled_at,
        "disabled_why": endpoint.disabled_why,
        "attempts_without_reply": 0 if breaker is None else breaker.failures,
        "paused_until": None if breaker is None else breaker.open_until,
        **{state.value: counts.get(state, 0) for state in DeliveryState},
    }


def signing_secrets(endpoint: WebhookEndpoint, now: datetime) -> list[Plaintext]:
    """Return the secrets that sign a message, newest first. Raises NotFoundError if another process must send it."""
    refresh_peppers(PEPPER_SET[Environment(endpoint.account.environment)])
    sealed = [endpoint.secret]
    if endpoint.previous_secret is not None and endpoint.previous_until is not None and endpoint.previous_until > now:
        sealed.append(endpoint.previous_secret)
    peppers, context = _peppers(endpoint.account), _context(endpoint.account, endpoint.url)
    return [unseal(peppers, bytes(each), context) for each in sealed]


def host_of(endpoint: WebhookEndpoint) -> str:
    """Return the only part of a URL that may be shown to those who may not change it.

    Merchants put secrets into the rest.
    """
    return endpoint.url.split("/", 3)[2]


def _audit_details(endpoint: WebhookEndpoint) -> dict[str, JsonValue]:
    return {"endpoint": endpoint.pk, "host": host_of(endpoint)}


def _read_url(url: str) -> Destination:
    fault = "must not contain a key string, because the URL is stored and displayed"
    if SHAPED.search(url) is None:
        try:
            return parse_url(url.strip(), settings.WEBHOOK_NETWORKS)
        except ValueError as error:
            fault = str(error)
    raise RequestInvalidError("Invalid webhook URL.", [Fault("/url", fault)])


def _require_room(account: Account) -> None:
    """Raise StateConflictError at the maximum. Locks the account, so that concurrent additions are counted in turn."""
    Account.objects.select_for_update(no_key=True).get(pk=account.pk)
    if WebhookEndpoint.objects.filter(account=account, disabled_at__isnull=True).count() >= MAX_ENDPOINTS:
        raise StateConflictError(f"An account can have at most {MAX_ENDPOINTS} enabled endpoints. Disable one first.")


def _sealed(account: Account, url: str, secret: Plaintext) -> bytes:
    return seal(_peppers(account), secret, _context(account, url), secrets.token_bytes)


def _peppers(account: Account) -> Peppers:
    return load_peppers(PEPPER_SET[Environment(account.environment)])


def _context(account: Account, url: str) -> bytes:
    """Return the sealing context: immutable facts of the endpoint, so that a secret only opens in its own row."""
    return f"webhook_endpoint|{account}|{url}".encode()
