"""One row of each kind that the database rules protect."""

import copy
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from django.db import connection, transaction
from pytest_django import DjangoDbBlocker

from keyvault.access import principals
from keyvault.access.permissions import Permission
from keyvault.access.principals import HOST
from keyvault.access.roles import Role
from keyvault.domain.ids import mint_id
from keyvault.domain.keys import KeyKind
from keyvault.domain.revocation import RevocationReason
from keyvault.models import (
    Account,
    AlarmChannel,
    AlarmDelivery,
    CatalogEndpoint,
    CustomerToken,
    IssuanceRequest,
    Key,
    LimitOverride,
    Notice,
    OperatorChange,
    Order,
    ProviderConnection,
    RecipientKey,
    Refusal,
    ServiceToken,
    WebhookEndpoint,
)
from keyvault.models import Operator as OperatorRow
from keyvault.models.usage import UseOutcome
from keyvault.services.approvals.break_glass import note_break_glass
from keyvault.services.audit.checkpoints import sign_due
from keyvault.services.idempotency import StoredResponse, run_once
from keyvault.services.keys.lifecycle import revoke_key
from keyvault.services.keys.recipient_keys import approve_recipient_key, set_recipient_key
from keyvault.services.merchants.orders import create_order
from keyvault.services.operator_changes import approve_change, change_roles
from keyvault.services.recording.transaction import recorded
from keyvault.services.tokens.customer_tokens import issue_customer_token
from keyvault.services.usage.recorder import UsageLog
from keyvault.services.usage.totals import write_totals
from rotation.domain.pacing import Pace
from rotation.domain.plan_fields import PlanOverrides
from rotation.models import (
    BlackoutCalendar,
    Campaign,
    EvidenceKind,
    Retirement,
    Rotation,
    RotationSchedule,
    StandingApproval,
)
from rotation.services.campaigns.campaigns import approve_campaign, request_campaign
from rotation.services.rotations.facts import note_evidence
from rotation.services.rotations.interventions import request_retirement
from rotation.services.rotations.requests import approve_rotation, request_rotation
from rotation.services.schedules.standing_approvals import approve_standing_approval, request_standing_approval
from tests.domain.test_recipient_keys import public_text
from tests.factories import (
    PRODUCTION,
    SANDBOX,
    account,
    grant,
    issue,
    make_merchant,
    make_operator,
    make_token,
    now,
    request_key,
)
from tests.process_state import forget_process_state
from tests.rotation.scene import holder_of
from tests.verifiers import confirm, make_verifier


@dataclass(frozen=True)
class World:
    """The rows of the fixture.

    In production, `pending` awaits approval and `issued` had one; likewise `waiting` and `scheduled`. `recipient`, set
    with `key`, has one of its two approvals.

    `tam` requests everything and has a second login, `tam_too`; `approver` approves. `change` awaits approval, and is
    about `auditor`.
    """

    tam: principals.OperatorPrincipal
    tam_too: principals.OperatorPrincipal
    approver: principals.OperatorPrincipal
    auditor: principals.OperatorPrincipal
    sandbox: Account
    production: Account
    key: Key
    other_key: Key
    dead_key: Key
    pending: IssuanceRequest
    issued: IssuanceRequest
    token: ServiceToken
    waiting: Rotation
    scheduled: Rotation
    retirement: Retirement
    campaign: Campaign
    standing: StandingApproval
    customer_token: CustomerToken
    order: Order
    change: OperatorChange
    recipient: RecipientKey


@pytest.fixture(scope="module")
def world_of_module(django_db_setup: None, django_db_blocker: DjangoDbBlocker, data_dir: Path) -> Iterator[World]:
    """Make the rows once for all tests of a module, and roll them back after it."""
    # Fixtures of a module come before those of a test, which would prepare the revocation log.
    forget_process_state(data_dir)
    around = transaction.atomic()
    # As in Django's TestCase: a durable block counts as the outermost one.
    around._from_testcase = True  # type: ignore[attr-defined]  # a private name
    with django_db_blocker.unblock(), around:
        world = make_world()
        connection.check_constraints()  # A table with deferred checks cannot be altered.
        yield world
        transaction.set_rollback(True)


@pytest.fixture
def world(world_of_module: World, db: None) -> World:
    """Return the rows of the module as they are in the database, whatever an earlier test did to its own copies."""
    return copy.deepcopy(world_of_module)


def make_world() -> World:
    """Create a merchant in both environments with keys, requests, rotations, a token, uses and a break-glass act."""
    tam = make_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER)
    tam_too = make_operator("tam-too", Role.KEY_ADMINISTRATOR, person=tam.person)
    approver = make_operator("approver", Role.APPROVER)
    admin = make_operator("admin", Role.KEY_ADMINISTRATOR)
    make_merchant("acme")
    confirm(make_verifier(), 1)
    production = account("acme", PRODUCTION)
    key, _ = issue(production, expires_in_days=90)
    other_key, _ = issue(production)
    dead_key, _ = issue(production)
    revoke_key(grant(admin, Permission.KEYS_REVOKE, production), dead_key, RevocationReason.SUPERSEDED)
    token, _ = make_token()
    waiting = _rotation(tam, key)
    scheduled = _rotation(tam, other_key)
    allowed = grant(approver, Permission.ROTATIONS_APPROVE, production, scheduled.requester_person)
    approve_rotation(allowed, scheduled, scheduled.plan_digest)
    for environment, mode in ((SANDBOX, "test"), (PRODUCTION, "live")):
        _connect(account("acme", environment), mode)
    customer_token, order = _integrate(account("acme", SANDBOX))
    _configure(production)
    allowed = grant(approver, Permission.ROTATIONS_APPROVE, production, scheduled.requester_person)
    with recorded(allowed, Permission.ROTATIONS_APPROVE, "test.noted", account=production):
        note_evidence(scheduled, EvidenceKind.ACCEPTED, {}, now())
        note_break_glass(allowed, event="x", subject="y", requester_person=tam.person, why="z")
    assert sign_due(now()) > 0
    log = UsageLog()
    for outcome in (UseOutcome.ALLOWED, UseOutcome.DENIED):
        log.note(key.key_id, source="192.0.2.1", user_agent="", endpoint="", outcome=outcome)
    log.flush()
    write_totals(now())
    AlarmDelivery.objects.create(
        notice=Notice.objects.earliest("pk"), channel=AlarmChannel.EMAIL, created_at=now(), due_at=now()
    )
    issued = IssuanceRequest.objects.get(key=key)
    auditor = make_operator("auditor", Role.AUDITOR)
    _change(tam_too, approver, make_operator("colleague"), approved=True)
    retirement = _retirement(tam, production)
    campaign, standing = _requests(tam, approver, production)
    return World(
        tam=tam,
        tam_too=tam_too,
        approver=approver,
        auditor=auditor,
        sandbox=account("acme", SANDBOX),
        production=production,
        key=key,
        other_key=other_key,
        dead_key=dead_key,
        pending=request_key(production, by=tam),
        issued=issued,
        token=token,
        waiting=waiting,
        scheduled=scheduled,
        retirement=retirement,
        campaign=campaign,
        standing=standing,
        customer_token=customer_token,
        order=order,
        change=_change(tam_too, approver, auditor, approved=False),
        recipient=_recipient(key, approver),
    )


def _change(
    requester: principals.OperatorPrincipal,
    approver: principals.OperatorPrincipal,
    operator: principals.OperatorPrincipal,
    *,
    approved: bool,
) -> OperatorChange:
    """Request a role that needs an approval."""
    row = OperatorRow.objects.get(username=operator.username)
    change = change_roles(grant(requester, Permission.OPERATORS_WRITE), row, [Role.APPROVER], "joins the approvers")
    assert change is not None
    if approved:
        approve_change(
            grant(approver, Permission.OPERATORS_APPROVE, None, change.requester_person), change, change.plan_digest
        )
    return change


def _rotation(tam: principals.OperatorPrincipal, key: Key) -> Rotation:
    allowed = grant(tam, Permission.ROTATIONS_WRITE, key.credential.account)
    return request_rotation(allowed, key.credential, PlanOverrides(predecessor_may_expire=True))


def _recipient(key: Key, approver: principals.OperatorPrincipal) -> RecipientKey:
    """Set a recipient key that does not apply yet, and approve it as one of two persons."""
    place = key.credential.account
    public_key = public_text(X25519PrivateKey.generate())
    made = set_recipient_key(grant(holder_of(key), Permission.RECIPIENTS_WRITE, place), key, public_key)
    return approve_recipient_key(grant(approver, Permission.RECIPIENTS_APPROVE, place), made, made.plan_digest)


def _retirement(tam: principals.OperatorPrincipal, place: Account) -> Retirement:
    """Request the retirement of a public key in a rotation; it is not approved."""
    key, _ = issue(place, kind=KeyKind.PUBLIC)
    rotation = _rotation(tam, key)
    return request_retirement(grant(tam, Permission.ROTATIONS_WRITE, place), rotation, now() + timedelta(days=90))


def _requests(
    tam: principals.OperatorPrincipal, approver: principals.OperatorPrincipal, place: Account
) -> tuple[Campaign, StandingApproval]:
    """Create a campaign and a standing approval that await approval, an approved one of each, and a calendar."""
    made = []
    for _ in range(2):
        issue(place)
        made.append(
            request_campaign(
                grant(tam, Permission.ROTATIONS_WRITE),
                environment=PRODUCTION,
                merchants=["acme"],
                older_than_days=None,
                overrides=PlanOverrides(),
                pace=Pace(),
                reason="yearly",
            )
        )
    approve_campaign(grant(approver, Permission.ROTATIONS_APPROVE), made[1], made[1].plan_digest)
    allowed = grant(HOST, Permission.MERCHANTS_WRITE, place)
    row = OperatorRow.objects.get(username=tam.username)
    with recorded(allowed, Permission.MERCHANTS_WRITE, "test.scheduled", account=place):
        calendar = BlackoutCalendar(name="holidays", created_at=now())
        calendar.save()
        schedule = RotationSchedule(
            environment=PRODUCTION,
            cryptoperiod_days=365,
            calendar=calendar,
            author=row,
            author_person=tam.person,
            is_author_claimed=False,
            created_at=now(),
        )
        schedule.save()
    return made[0], _standing(tam, approver, schedule)


def _standing(
    tam: principals.OperatorPrincipal, approver: principals.OperatorPrincipal, schedule: RotationSchedule
) -> StandingApproval:
    """Create an approved standing approval of the schedule, and one that awaits approval."""
    allowed = grant(tam, Permission.SCHEDULES_WRITE)
    made = request_standing_approval(allowed, schedule, 90)
    approve_standing_approval(grant(approver, Permission.ROTATIONS_APPROVE), made, made.plan_digest)
    return request_standing_approval(allowed, schedule, 90)


def _connect(place: Account, mode: str) -> None:
    allowed = grant(HOST, Permission.MERCHANTS_WRITE, place)
    with recorded(allowed, Permission.MERCHANTS_WRITE, "test.connected", account=place):
        ProviderConnection(account=place, provider="stripe", mode=mode, created_at=now()).save()
        WebhookEndpoint(account=place, url="https://acme.example/hooks", created_at=now()).save()


def _integrate(place: Account) -> tuple[CustomerToken, Order]:
    """Create what a merchant's private key makes on the integration plane, and one refused request."""
    key, _ = issue(place)
    holder = holder_of(key)
    allowed = grant(holder, Permission.CUSTOMER_TOKENS_WRITE, place)
    token, _ = issue_customer_token(allowed, place, key, customer_id="alice")
    allowed = grant(holder, Permission.ORDERS_CREATE, place)
    order = create_order(allowed, place, amount_minor=1, currency="EUR", customer_id="alice")
    Refusal.objects.create(
        request_id="x", at=now(), entry_point="integration", environment=SANDBOX, code="rate_limited"
    )
    run_once(
        holder=holder.credential_id,
        endpoint="orders.create",
        environment=SANDBOX,
        key="attempt-1",
        body=b"",
        now=now(),
        prepare=lambda: lambda: StoredResponse(201, {}),
    )
    return token, order


def _configure(place: Account) -> None:
    """Create an upstream endpoint, a limit for it in the account's environment, and a limit for the account alone."""
    allowed = grant(HOST, Permission.MERCHANTS_WRITE, place)
    with recorded(allowed, Permission.MERCHANTS_WRITE, "test.configured", account=place):
        CatalogEndpoint(
            name="stays.search", method="GET", path="/stays", credentials=["private"], created_at=now()
        ).save()
        for of in (place, None):
            LimitOverride(account=of, environment=place.environment, endpoint="stays.search", created_at=now()).save()


def fresh_id() -> str:
    return mint_id("req", secrets.token_bytes)
