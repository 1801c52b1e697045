"""Page access: every address of the console, for every role, by GET and by POST."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from datetime import timedelta
from typing import Any, cast

import pytest
from django.contrib import admin
from django.contrib.auth.models import AnonymousUser, Group
from django.contrib.sessions.backends.db import SessionStore
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.db.models import Model
from django.http import HttpResponse
from django.test import Client, RequestFactory

from keyvault.access.limits import Limit
from keyvault.access.permissions import Permission as P
from keyvault.access.roles import ROLE_PERMISSIONS, Role
from keyvault.admin.framework.enforcement import Guarded
from keyvault.admin.framework.middleware import ConsoleAccessMiddleware, open_before_sign_in
from keyvault.domain.environments import Environment
from keyvault.domain.issuance import Delivery
from keyvault.domain.keys import KeyKind
from keyvault.domain.plaintext import Plaintext
from keyvault.models import (
    AuditEntry,
    BreakGlass,
    ConsoleSession,
    IssuanceRequest,
    Key,
    Operator,
    PepperVersion,
    UseBucket,
)
from keyvault.models.recording import collect_subjects
from keyvault.services.audit.signers import audit_signer
from keyvault.services.issuance.requests import collect_key
from keyvault.services.keys.lifecycle import last_sequence
from keyvault.services.keys.recipient_keys import set_recipient_key
from keyvault.services.limits.overrides import set_endpoint_limit
from keyvault.services.operator_changes import request_factor_reset
from keyvault.services.peppers.ring import list_served_sets
from keyvault.services.secrets.provider_connections import set_connection
from keyvault.services.webhooks.endpoints import add_endpoint as add_webhook
from keyvault.services.webhooks.endpoints import send_test
from rotation.domain.pacing import Pace
from rotation.domain.plan_fields import PlanOverrides
from rotation.services.campaigns.campaigns import request_campaign
from rotation.services.rotations.interventions import request_retirement
from rotation.services.rotations.requests import request_rotation
from rotation.services.schedules.schedules import ScheduleDraft, ScheduleScope, save_calendar, save_schedule
from rotation.services.schedules.standing_approvals import request_standing_approval
from tests.admin.desk import Desk, browser, list_routes, make_endpoint, make_refusal, with_password
from tests.admin.framework.golden_access import require_column
from tests.factories import (
    PRODUCTION,
    SANDBOX,
    approve,
    grant,
    issue,
    issue_request,
    make_operator,
    make_token,
    now,
    request_key,
)
from tests.rotation.scene import holder_of

ANY_ROLE = frozenset(P)
RECIPIENT = "3p7bfXt9wbTTW2HC7OQ1Nz-DQ8hbeGdNrfx-FG-IK08"
"""An X25519 public key."""

_APPROVING = frozenset({P.ISSUANCE_APPROVE, P.ROTATIONS_APPROVE, P.OPERATORS_APPROVE, P.RECIPIENTS_APPROVE})

MATRIX: dict[str, frozenset[P]] = {
    "index": ANY_ROLE,
    "search": ANY_ROLE,
    "environment": ANY_ROLE,
    "everything else": ANY_ROLE,
    "second_factors": ANY_ROLE,
    "add_totp": ANY_ROLE,
    "add_passkey": ANY_ROLE,
    "recovery_codes": ANY_ROLE,
    "remove_second_factor": ANY_ROLE,
    "approvals": _APPROVING,
    "approvals_review": _APPROVING,
    "approvals_outcome": _APPROVING,
    "health": frozenset({P.KEYS_READ}),
    "choices_merchants": frozenset({P.MERCHANTS_READ}),
    "choices_credentials": frozenset({P.KEYS_READ}),
    "choices_actors": frozenset({P.AUDIT_READ}),
    "choices_calendars": frozenset({P.ROTATIONS_READ}),
    "keyvault_merchant_changelist": frozenset({P.MERCHANTS_READ}),
    "keyvault_merchant_change": frozenset({P.MERCHANTS_READ}),
    "keyvault_merchant_create": frozenset({P.MERCHANTS_WRITE}),
    "keyvault_merchant_suspend": frozenset({P.MERCHANTS_WRITE}),
    "keyvault_merchant_resume": frozenset({P.MERCHANTS_WRITE}),
    "keyvault_merchant_offboard": frozenset({P.MERCHANTS_OFFBOARD}),
    "keyvault_account_changelist": frozenset({P.MERCHANTS_READ}),
    "keyvault_account_change": frozenset({P.MERCHANTS_READ}),
    "keyvault_account_suspend": frozenset({P.MERCHANTS_WRITE}),
    "keyvault_account_resume": frozenset({P.MERCHANTS_WRITE}),
    "keyvault_account_configure": frozenset({P.MERCHANTS_WRITE}),
    "keyvault_account_origins": frozenset({P.MERCHANTS_WRITE}),
    "keyvault_account_token-bound": frozenset({P.MERCHANTS_WRITE}),
    "keyvault_catalogendpoint_changelist": frozenset({P.CATALOG_READ}),
    "keyvault_catalogendpoint_change": frozenset({P.CATALOG_READ}),
    "keyvault_catalogendpoint_panels": frozenset({P.CATALOG_READ}),
    "keyvault_catalogendpoint_add": frozenset({P.CATALOG_WRITE}),
    "keyvault_catalogendpoint_edit": frozenset({P.CATALOG_WRITE}),
    "keyvault_catalogendpoint_withdraw": frozenset({P.CATALOG_WRITE}),
    "keyvault_catalogendpoint_restore": frozenset({P.CATALOG_WRITE}),
    "keyvault_providerconnection_changelist": frozenset({P.CONNECTIONS_READ}),
    "keyvault_providerconnection_change": frozenset({P.CONNECTIONS_READ}),
    "keyvault_providerconnection_set": frozenset({P.CONNECTIONS_WRITE}),
    "keyvault_providerconnection_replace": frozenset({P.CONNECTIONS_WRITE}),
    "keyvault_providerconnection_remove": frozenset({P.CONNECTIONS_WRITE}),
    "keyvault_webhookendpoint_changelist": frozenset({P.MERCHANTS_READ}),
    "keyvault_webhookendpoint_change": frozenset({P.MERCHANTS_READ}),
    "keyvault_webhookendpoint_add": frozenset({P.WEBHOOKS_WRITE}),
    "keyvault_webhookendpoint_test": frozenset({P.WEBHOOKS_WRITE}),
    "keyvault_webhookendpoint_rotate": frozenset({P.WEBHOOKS_WRITE}),
    "keyvault_webhookendpoint_enable": frozenset({P.WEBHOOKS_WRITE}),
    "keyvault_webhookendpoint_disable": frozenset({P.WEBHOOKS_WRITE}),
    "keyvault_notice_changelist": frozenset({P.NOTICES_READ}),
    "keyvault_notice_change": frozenset({P.NOTICES_READ}),
    "keyvault_notice_seen": frozenset({P.NOTICES_MARK}),
    "keyvault_notice_all_seen": frozenset({P.NOTICES_MARK}),
    "keyvault_limitoverride_changelist": frozenset({P.CATALOG_READ}),
    "keyvault_limitoverride_change": frozenset({P.CATALOG_READ}),
    "keyvault_limitoverride_set": frozenset({P.LIMITS_WRITE}),
    "keyvault_limitoverride_clear": frozenset({P.LIMITS_WRITE}),
    "keyvault_refusal_changelist": frozenset({P.VERDICTS_EXPLAIN}),
    "keyvault_refusal_change": frozenset({P.VERDICTS_EXPLAIN}),
    "explain": frozenset({P.VERDICTS_EXPLAIN}),
    "keyvault_credential_restrict": frozenset({P.CREDENTIALS_RESTRICT}),
    "keyvault_credential_changelist": frozenset({P.KEYS_READ}),
    "keyvault_credential_change": frozenset({P.KEYS_READ}),
    "keyvault_key_changelist": frozenset({P.KEYS_READ}),
    "keyvault_key_change": frozenset({P.KEYS_READ}),
    "keyvault_key_receipt": frozenset({P.KEYS_READ}),
    "keyvault_key_show": frozenset({P.KEYS_READ}),
    "keyvault_key_suspend": frozenset({P.KEYS_SUSPEND}),
    "keyvault_key_resume": frozenset({P.KEYS_RESUME}),
    "keyvault_key_revoke": frozenset({P.KEYS_REVOKE}),
    "keyvault_key_report-compromise": frozenset({P.KEYS_REPORT_COMPROMISE}),
    "audit_export": frozenset({P.AUDIT_READ}),
    "audit_export_log": frozenset({P.AUDIT_READ}),
    "audit_export_keys": frozenset({P.AUDIT_READ}),
    "incidents": frozenset({P.KEYS_REPORT_COMPROMISE}),
    "incident_receipt": frozenset({P.KEYS_REPORT_COMPROMISE}),
    "keyvault_credential_compromised": frozenset({P.KEYS_REPORT_COMPROMISE}),
    "keyvault_credential_reissue": frozenset({P.ROTATIONS_WRITE}),
    "keyvault_recipientkey_changelist": frozenset({P.KEYS_READ}),
    "keyvault_recipientkey_change": frozenset({P.KEYS_READ}),
    "keyvault_recipientkey_approve": frozenset({P.RECIPIENTS_APPROVE}),
    "keyvault_recipientkey_withdraw": frozenset({P.RECIPIENTS_WITHDRAW}),
    "keyvault_issuancerequest_changelist": frozenset({P.ISSUANCE_READ}),
    "keyvault_issuancerequest_change": frozenset({P.ISSUANCE_READ}),
    "keyvault_issuancerequest_request": frozenset({P.ISSUANCE_REQUEST}),
    "keyvault_issuancerequest_approve": frozenset({P.ISSUANCE_APPROVE}),
    "keyvault_issuancerequest_reject": frozenset({P.ISSUANCE_REJECT}),
    "keyvault_issuancerequest_withdraw": frozenset({P.ISSUANCE_WITHDRAW}),
    "keyvault_issuancerequest_collect": frozenset({P.ISSUANCE_COLLECT}),
    "keyvault_servicetoken_changelist": frozenset({P.TOKENS_READ}),
    "keyvault_servicetoken_change": frozenset({P.TOKENS_READ}),
    "keyvault_servicetoken_create": frozenset({P.TOKENS_WRITE}),
    "keyvault_servicetoken_revoke": frozenset({P.TOKENS_WRITE}),
    "keyvault_servicetoken_rotate": frozenset({P.TOKENS_WRITE}),
    "keyvault_auditentry_changelist": frozenset({P.AUDIT_READ}),
    "keyvault_auditentry_change": frozenset({P.AUDIT_READ}),
    "keyvault_pepperversion_changelist": frozenset({P.PEPPERS_READ}),
    "keyvault_pepperversion_change": frozenset({P.PEPPERS_READ}),
    "keyvault_consolesession_changelist": ANY_ROLE,
    "keyvault_consolesession_change": ANY_ROLE,
    "keyvault_consolesession_end": ANY_ROLE,
    "keyvault_consolesession_end-others": ANY_ROLE,
    "keyvault_operator_changelist": frozenset({P.OPERATORS_READ}),
    "keyvault_operator_change": frozenset({P.OPERATORS_READ}),
    "keyvault_operator_review": frozenset({P.OPERATORS_READ}),
    "keyvault_operator_export": frozenset({P.OPERATORS_READ}),
    "keyvault_operator_roles": frozenset({P.OPERATORS_WRITE}),
    "keyvault_operator_scope": frozenset({P.OPERATORS_WRITE}),
    "keyvault_operator_same-person": frozenset({P.OPERATORS_WRITE}),
    "keyvault_operator_reset-factors": frozenset({P.OPERATORS_WRITE}),
    "keyvault_operator_disable": frozenset({P.OPERATORS_WRITE}),
    "keyvault_operatorchange_changelist": frozenset({P.OPERATORS_READ}),
    "keyvault_operatorchange_change": frozenset({P.OPERATORS_READ}),
    "keyvault_operatorchange_approve": frozenset({P.OPERATORS_APPROVE}),
    "keyvault_operatorchange_reject": frozenset({P.OPERATORS_APPROVE}),
    "keyvault_operatorchange_withdraw": frozenset({P.OPERATORS_WRITE}),
    "keyvault_breakglass_changelist": frozenset({P.BREAK_GLASS_REVIEW, P.AUDIT_READ}),
    "keyvault_breakglass_change": frozenset({P.BREAK_GLASS_REVIEW, P.AUDIT_READ}),
    "keyvault_breakglass_review": frozenset({P.BREAK_GLASS_REVIEW}),
    "keyvault_breakglass_confirm": frozenset({P.BREAK_GLASS_REVIEW}),
    "keyvault_breakglass_disown": frozenset({P.BREAK_GLASS_REVIEW}),
    "rotation_rotation_changelist": frozenset({P.ROTATIONS_READ}),
    "rotation_rotation_change": frozenset({P.ROTATIONS_READ}),
    "rotation_rotation_request": frozenset({P.ROTATIONS_WRITE}),
    "rotation_rotation_approve": frozenset({P.ROTATIONS_APPROVE}),
    "rotation_rotation_reject": frozenset({P.ROTATIONS_APPROVE}),
    "rotation_rotation_resume": frozenset({P.ROTATIONS_WRITE}),
    "rotation_rotation_abort": frozenset({P.ROTATIONS_WRITE}),
    "rotation_rotation_collect": frozenset({P.ISSUANCE_COLLECT}),
    "rotation_rotation_bypass": frozenset({P.ROTATIONS_BYPASS}),
    "rotation_rotation_extend": frozenset({P.ROTATIONS_WRITE}),
    "rotation_rotation_confirm": frozenset({P.ROTATIONS_WRITE}),
    "rotation_rotation_waive": frozenset({P.ROTATIONS_WRITE}),
    "rotation_rotation_hold": frozenset({P.KEYS_SUSPEND}),
    "rotation_rotation_release": frozenset({P.KEYS_RESUME}),
    "rotation_rotation_retire": frozenset({P.ROTATIONS_WRITE}),
    "rotation_rotation_roll-back": frozenset({P.ROTATIONS_WRITE}),
    "rotation_retirement_changelist": frozenset({P.ROTATIONS_READ}),
    "rotation_retirement_change": frozenset({P.ROTATIONS_READ}),
    "rotation_retirement_approve": frozenset({P.ROTATIONS_APPROVE}),
    "rotation_rotationschedule_changelist": frozenset({P.ROTATIONS_READ}),
    "rotation_rotationschedule_change": frozenset({P.ROTATIONS_READ}),
    "rotation_rotationschedule_calendar": frozenset({P.ROTATIONS_READ}),
    "rotation_rotationschedule_save": frozenset({P.SCHEDULES_WRITE}),
    "rotation_rotationschedule_edit": frozenset({P.SCHEDULES_WRITE}),
    "rotation_rotationschedule_disable": frozenset({P.SCHEDULES_WRITE}),
    "rotation_rotationschedule_enable": frozenset({P.SCHEDULES_WRITE}),
    "rotation_rotationschedule_request-standing-approval": frozenset({P.SCHEDULES_WRITE}),
    "rotation_standingapproval_changelist": frozenset({P.ROTATIONS_READ}),
    "rotation_standingapproval_change": frozenset({P.ROTATIONS_READ}),
    "rotation_standingapproval_approve": frozenset({P.ROTATIONS_APPROVE}),
    "rotation_standingapproval_reject": frozenset({P.ROTATIONS_APPROVE}),
    "rotation_standingapproval_withdraw": frozenset({P.SCHEDULES_WRITE}),
    "rotation_blackoutcalendar_changelist": frozenset({P.ROTATIONS_READ}),
    "rotation_blackoutcalendar_change": frozenset({P.ROTATIONS_READ}),
    "rotation_blackoutcalendar_save": frozenset({P.SCHEDULES_WRITE}),
    "rotation_blackoutcalendar_edit": frozenset({P.SCHEDULES_WRITE}),
    "rotation_campaign_changelist": frozenset({P.ROTATIONS_READ}),
    "rotation_campaign_change": frozenset({P.ROTATIONS_READ}),
    "rotation_campaign_request": frozenset({P.ROTATIONS_WRITE}),
    "rotation_campaign_approve": frozenset({P.ROTATIONS_APPROVE}),
    "rotation_campaign_reject": frozenset({P.ROTATIONS_APPROVE}),
    "rotation_campaign_pause": frozenset({P.ROTATIONS_WRITE}),
    "rotation_campaign_resume": frozenset({P.ROTATIONS_WRITE}),
    "rotation_campaign_cancel": frozenset({P.ROTATIONS_WRITE}),
}
"""Every page of the console and its permissions, written down apart from the code."""

OPEN = frozenset({"login", "logout", "second_factor", "invitation", "single_sign_on", "single_sign_on_callback"})
"""Pages that answer before the sign-in is complete."""

REFUSED, TO_LOGIN = 403, 302


def every_row(desk: Desk) -> dict[str, Model]:
    """Return one row of each model, by its label, requested by `tam`."""
    key, _ = issue(desk.sandbox, kind=KeyKind.PUBLIC)
    rotated, _ = issue(desk.production)
    token, _ = make_token()
    seen = request_key(desk.production, delivery=Delivery.SHOW_ONCE, by=desk.tam)
    approve(seen, by=desk.approver)
    issue_request(seen)
    seen.refresh_from_db()
    collect_key(grant(desk.tam, P.ISSUANCE_COLLECT, desk.production), seen)
    rotation = request_rotation(
        grant(desk.tam, P.ROTATIONS_WRITE, desk.production), rotated.credential, PlanOverrides(reason="yearly")
    )
    campaign = request_campaign(
        grant(desk.tam, P.ROTATIONS_WRITE),
        environment=PRODUCTION,
        merchants=None,
        older_than_days=None,
        overrides=PlanOverrides(),
        pace=Pace(),
        reason="yearly",
    )
    public, _ = issue(desk.production, kind=KeyKind.PUBLIC, label="shop")
    asking = grant(desk.tam, P.ROTATIONS_WRITE, desk.production)
    retirement = request_retirement(
        asking, request_rotation(asking, public.credential, PlanOverrides()), now() + timedelta(days=9)
    )
    scheduling = grant(desk.tam, P.SCHEDULES_WRITE)
    schedule = save_schedule(scheduling, ScheduleScope(Environment.PRODUCTION), ScheduleDraft(365))
    endpoint = make_endpoint()
    limit = set_endpoint_limit(grant(desk.admin, P.LIMITS_WRITE), SANDBOX, endpoint.name, Limit(5, 1))
    assert limit is not None
    webhooks = grant(desk.tam, P.WEBHOOKS_WRITE, desk.sandbox)
    webhook, _ = add_webhook(webhooks, desk.sandbox, "https://acme.example/")
    browser(desk.tam)
    tam = Operator.objects.get(username="tam")
    return {
        "keyvault_operator": tam,
        "keyvault_operatorchange": request_factor_reset(grant(desk.admin, P.OPERATORS_WRITE), tam, "lost"),
        # Its own for an operator who is signed in.
        "keyvault_consolesession": ConsoleSession.objects.order_by("last_used_at")[0],
        "keyvault_providerconnection": set_connection(
            grant(desk.tam, P.CONNECTIONS_WRITE, desk.sandbox), desk.sandbox, "stripe", Plaintext("sk_test_1")
        ),
        "keyvault_webhookendpoint": webhook,
        "keyvault_notice": send_test(webhooks, webhook),
        "keyvault_catalogendpoint": endpoint,
        "keyvault_limitoverride": limit,
        "keyvault_refusal": make_refusal(),
        "keyvault_merchant": desk.sandbox.merchant,
        "keyvault_account": desk.sandbox,
        "keyvault_credential": key.credential,
        "keyvault_key": key,
        "keyvault_recipientkey": set_recipient_key(
            grant(holder_of(rotated), P.RECIPIENTS_WRITE, desk.production), rotated, RECIPIENT
        ),
        "keyvault_issuancerequest": request_key(desk.production, by=desk.tam),
        "keyvault_servicetoken": token,
        "keyvault_auditentry": AuditEntry.objects.latest("id"),
        "keyvault_breakglass": BreakGlass.objects.get(),
        "keyvault_pepperversion": PepperVersion.objects.get(pepper_set="sandbox"),
        "rotation_rotation": rotation,
        "rotation_retirement": retirement,
        "rotation_campaign": campaign,
        "rotation_rotationschedule": schedule,
        "rotation_standingapproval": request_standing_approval(scheduling, schedule, 90),
        "rotation_blackoutcalendar": save_calendar(scheduling, "holidays", []),
    }


def every_address(desk: Desk) -> list[tuple[str, str]]:
    rows = every_row(desk)
    for scope in list_served_sets():
        # The keystore is that of the whole run: another test may have made these keys, or none.
        audit_signer().sign(scope, b"")
    found = []
    for name, path in list_routes():
        path = path.replace("(?P<url>.*)$", "no/such/page/")
        path = path.replace("<int:factor_id>", "1")
        path = path.replace("<int:sequence>", str(last_sequence(cast(Key, rows["keyvault_key"]))))
        if "<str:object_id>" in path:
            path = path.replace("<str:object_id>", str(rows["_".join(name.split("_")[:2])].pk))
        found.append((name, path))
    return found


def answers(client: Client, path: str, methods: Sequence[str] = ("get", "post")) -> dict[str, Any]:
    """Return the response for each method, each from the same initial state."""
    found = {}
    for method in methods:
        # No transaction around it: revocations refuse to run inside another transaction.
        before, cookies = transaction.savepoint(), deepcopy(client.cookies)
        found[method] = getattr(client, method)(path)
        transaction.savepoint_rollback(before)
        client.cookies = cookies
    return found


def statuses(client: Client, path: str, methods: Sequence[str] = ("get", "post")) -> dict[str, int]:
    """Return the status for each method, each from the same initial state."""
    return {method: answer.status_code for method, answer in answers(client, path, methods).items()}


def as_cell(found: Mapping[str, int]) -> str:
    """Return the statuses as the golden table has them."""
    return "/".join(map(str, found.values()))


def test_enforcement_every_address_is_in_the_matrix() -> None:
    """A new page of the console must be added to the matrix."""
    names = {name for name, _ in list_routes()}
    assert names == {*MATRIX, *OPEN}


@pytest.mark.parametrize(
    "role",
    # One role opens every page on PostgreSQL too.
    [pytest.param(role, marks=pytest.mark.database if role is Role.KEY_ADMINISTRATOR else ()) for role in Role],
)
def test_enforcement_role_opens_exactly_its_pages(desk: Desk, role: Role) -> None:
    """A page opens only by a permission of the role, for reading and for acting, and never with a 500."""
    client = browser(make_operator("somebody", role))
    wrong, cells = [], {}
    for name, path in every_address(desk):
        found = statuses(client, path)
        cells[name] = as_cell(found)
        if name in OPEN | {"everything else"}:
            continue
        may = bool(MATRIX[name] & ROLE_PERMISSIONS[role])
        for method, status in found.items():
            fits = status in ({200, 302, 400, 405, 409} if may else {REFUSED})
            if not fits or (status == TO_LOGIN and method == "get"):
                wrong.append((name, method, status, "may" if may else "may not"))
    assert wrong == []
    require_column(role, cells)


def test_enforcement_operator_without_role_opens_nothing(desk: Desk) -> None:
    """A login without a role is no operator, whatever Django's own permissions and groups say."""
    nobody = make_operator("nobody")
    row = Operator.objects.get(username="nobody")
    with collect_subjects():
        row.groups.add(Group.objects.create(name="invented"))
    client = browser(nobody)
    for name, path in every_address(desk):
        if name not in OPEN:
            assert set(statuses(client, path).values()) == {TO_LOGIN}, name


def test_enforcement_anonymous_user_is_redirected_to_login(desk: Desk) -> None:
    """An anonymous user sees nothing of the console."""
    require_closed(desk, Client(), "no_session", "/admin/login/")


def test_enforcement_password_alone_opens_nothing(desk: Desk) -> None:
    """A stolen password without the second factor opens no page, not even that of an operator with every role."""
    client = with_password(make_operator("stolen", *Role))
    require_closed(desk, client, "password", "/admin/second-factor/?next=")


def require_closed(desk: Desk, client: Client, column: str, beginning: str) -> None:
    """Require that each page but the open ones leads to a page that begins so, and the column of the golden table."""
    cells = {}
    for name, path in every_address(desk):
        found = answers(client, path)
        cells[name] = as_cell({method: response.status_code for method, response in found.items()})
        for response in found.values() if name not in OPEN else ():
            assert response.status_code == TO_LOGIN, name
            assert response["Location"].startswith(beginning), name
    require_column(column, cells)


def test_enforcement_view_that_is_not_marked_is_closed(rf: RequestFactory) -> None:
    """A view that is routed below /admin/ without a check of its own is closed."""
    request = rf.get("/admin/new/")
    request.user, request.session = AnonymousUser(), SessionStore()
    check = ConsoleAccessMiddleware(lambda request: HttpResponse())
    response = check.process_view(request, lambda request: HttpResponse(), (), {})
    assert response is not None
    assert response["Location"] == "/admin/login/?next=%2Fadmin%2Fnew%2F"
    assert check.process_view(request, open_before_sign_in(lambda request: HttpResponse()), (), {}) is None


def test_enforcement_django_permissions_are_not_consulted(desk: Desk) -> None:
    """Role permissions are defined in code: rows in Django's permission tables have no effect."""
    from django.contrib.auth.models import Permission

    row = Operator.objects.get(username="tam")
    with collect_subjects():
        row.user_permissions.set(Permission.objects.all())
    client = browser(desk.tam)
    assert client.get("/admin/keyvault/auditentry/").status_code == REFUSED
    assert client.get("/admin/keyvault/servicetoken/new/create/").status_code == REFUSED


@pytest.mark.parametrize("role", Role)
def test_enforcement_rows_are_never_added_changed_or_deleted(desk: Desk, role: Role) -> None:
    """No role may edit a row directly through Django's admin."""
    request = RequestFactory().get("/admin/")
    request.user = Operator.objects.get(username=make_operator("somebody", role).username)
    for noun in admin.site._registry.values():
        assert isinstance(noun, Guarded)
        assert not noun.has_add_permission(request)
        assert not noun.has_change_permission(request)
        assert not noun.has_delete_permission(request)
        assert dict(noun.get_actions(request)) == {}
        assert tuple(noun.list_editable) == ()
        assert noun.get_inline_instances(request) == []


@pytest.mark.parametrize("way", ["add/", "{id}/change/", "{id}/delete/", "{id}/history/", "{id}/", ""])
def test_enforcement_key_row_cannot_be_edited_by_any_stock_address(desk: Desk, way: str) -> None:
    """No POST to an address of Django's stock admin changes, adds or deletes a key row."""
    key, _ = issue(desk.sandbox)
    before = list(Key.objects.values())
    fields = {"key_id": "A" * 16, "state": "active", "version": 7, "action": "delete_selected", "post": "yes"}
    fields |= {"_selected_action": key.pk, "form-TOTAL_FORMS": 1, "form-INITIAL_FORMS": 1, "form-0-state": "destroyed"}
    answer = browser(desk.admin).post("/admin/keyvault/key/" + way.format(id=key.pk), fields)
    assert answer.status_code in {404, 405}
    assert list(Key.objects.values()) == before


@pytest.mark.parametrize(
    "path",
    [
        "auth/group/",
        "admin/logentry/",
        "password_change/",
        "password_reset/",
        "jsi18n/",
        "autocomplete/",
        "r/1/1/",
    ],
)
def test_enforcement_stock_pages_are_not_offered(desk: Desk, path: str) -> None:
    """Groups, users, Django's own log and its other pages have no address here. Passwords are set on the host."""
    assert browser(desk.admin).get(f"/admin/{path}").status_code == 404


def test_enforcement_unguarded_admin_is_refused() -> None:
    """An admin class that does not use the decision function cannot be registered."""
    for careless in (None, admin.ModelAdmin):
        with pytest.raises(ImproperlyConfigured):
            admin.site.register(UseBucket, careless)
    assert not admin.site.is_registered(UseBucket)
    assert not admin.site.is_registered(Group), "Django registers its own; the console leaves it out"


def test_enforcement_guarded_admin_without_permissions_is_closed(desk: Desk) -> None:
    """Access is denied by default: an admin class without view permissions is closed."""
    request = RequestFactory().get("/admin/")
    request.user = Operator.objects.get(username="admin")
    forgetful = type("Forgetful", (Guarded, admin.ModelAdmin), {})(Key, admin.site)
    assert not forgetful.has_view_permission(request)
    assert not forgetful.has_module_permission(request)


@pytest.mark.parametrize("query", ["digest__startswith=a", "pepper_version=1", "credential__account__merchant__name=x"])
def test_enforcement_other_columns_cannot_be_probed(desk: Desk, query: str) -> None:
    """List filters cover only the offered columns, so a digest cannot be probed letter by letter."""
    assert browser(desk.auditor).get(f"/admin/keyvault/key/?{query}").status_code == 400


def test_enforcement_removed_role_takes_effect_immediately(desk: Desk) -> None:
    """Roles are read at every request, so a removed role takes effect with the next one."""
    client = browser(desk.admin)
    assert client.get("/admin/").status_code == 200
    with collect_subjects():
        Operator.objects.get(username="admin").groups.clear()
    assert client.get("/admin/").status_code == TO_LOGIN


def test_enforcement_expired_request_is_not_offered_for_approval(desk: Desk) -> None:
    row = request_key(desk.production, by=desk.tam, at=now() - timedelta(days=8))
    assert IssuanceRequest.objects.get().pk == row.pk
    assert str(row.label) not in browser(desk.approver).get("/admin/").content.decode()
