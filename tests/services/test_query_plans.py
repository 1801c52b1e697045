"""Queries of workers and repeated requests use an index that returns exactly the rows asked for."""

from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import pytest
from django.db import connection
from django.db.models import Model
from django.test.utils import CaptureQueriesContext

from keyvault.access.permissions import Permission
from keyvault.access.principals import OperatorPrincipal
from keyvault.access.roles import Role
from keyvault.domain.environments import Environment
from keyvault.domain.notifications import NoticeKind
from keyvault.models import (
    Account,
    AlarmChannel,
    AlarmDelivery,
    Change,
    IssuanceRequest,
    KeySource,
    Merchant,
    Notice,
    Operator,
    OperatorChange,
    RecipientKey,
    UseBucket,
    UseContext,
    Verifier,
    WebhookDelivery,
)
from keyvault.models.usage import UseOutcome
from keyvault.services import alarm_messages, idempotency, operator_changes
from keyvault.services.change_feed import receipts
from keyvault.services.issuance import requests
from keyvault.services.keys import lifecycle
from keyvault.services.merchants.client_configuration import is_listed_by_any_account
from keyvault.services.operators import role_use
from keyvault.services.recording.notifications import announce
from keyvault.services.recording.transaction import recorded
from keyvault.services.secrets.provider_connections import find_by_path
from keyvault.services.sessions import sessions
from keyvault.services.startup.processes import measure
from keyvault.services.tokens import customer_tokens
from keyvault.services.usage.recorder import UsageLog
from keyvault.services.usage.reports import find_attempts, list_attempts
from keyvault.services.verification import refusals
from keyvault.services.webhooks import deliveries
from keyvault.services.webhooks.deliveries import EndpointTurns
from keyvault.services.webhooks.endpoints import add_endpoint
from keyvault.services.work import leases
from tests.admin.desk import browser
from tests.factories import account, grant, have_peppers, issue, make_merchant, make_operator, now
from tests.plans import copy_row, explain
from tests.rotation.scene import set_recipient
from tests.verifiers import make_verifier

pytestmark = [pytest.mark.postgres, pytest.mark.django_db]


@pytest.fixture(autouse=True)
def merchant(db: None) -> None:
    make_merchant()


def test_last_sequence_reads_only_the_changes_of_its_key() -> None:
    """The cost of an engine run or a repeated revocation does not grow with the change feed."""
    key, _ = issue(account())
    copy_row(Change, subject_id="'key' || n")
    (plan,) = explain(lambda: lifecycle.last_sequence(key))
    assert "change_by_subject" in plan
    assert "Index Cond: (((subject_kind)::text = 'key'::text) AND ((subject_id)::text =" in plan
    assert "Sort" not in plan


def test_list_expired_reads_only_expired_keys() -> None:
    """When it looks whether there are any, and when it reads them."""
    issue(account(), expires_in_days=1, at=now() - timedelta(days=2))
    plans = explain(lambda: lifecycle.list_expired(now()))
    assert len(plans) == 2
    for plan in plans:
        assert "key_expiring" in plan
        assert "Seq Scan on keyvault_key" not in plan
        assert "Sort" not in plan


@pytest.mark.parametrize(
    ("list_after", "index"),
    [
        (partial(lifecycle.list_expired, now()), "key_expiring"),
        (partial(requests.list_uncollected, now()), "request_uncollected"),
    ],
    ids=["list_expired", "list_uncollected"],
)
def test_batch_of_due_rows_is_read_in_the_order_of_its_index(
    list_after: Callable[[Model | None], object], index: str
) -> None:
    """The next batch skips the earlier rows and sorts none. The plans of large tables cover the other batches."""
    key, _ = issue(account())
    last = requests.get_request(IssuanceRequest.objects.get().pk) if "request" in index else key
    if key.expires_at is None:
        key.expires_at = now()
    for after in (None, last):
        (plan,) = explain(partial(list_after, after))
        assert index in plan
        assert "Sort" not in plan


def test_connection_is_found_by_its_path_among_those_of_its_account() -> None:
    """The nightly reconciliation reads one for each path. The cost does not grow with the accounts."""
    number = account().pk
    (plan,) = explain(lambda: find_by_path(Environment.SANDBOX, f"{number}/con_0"))
    assert f"account_id = {number})" in plan


def test_preflight_finds_the_accounts_of_its_origin_by_their_index() -> None:
    """It carries no key, so that anyone can ask about any origin."""
    copy_row(Merchant, merchant_id="'m' || n", name="'m' || n")
    copy_row(Account, merchant="'m' || n", allowed_origins="jsonb_build_array('https://shop' || n || '.example')")
    with CaptureQueriesContext(connection) as made:
        assert not is_listed_by_any_account("https://other.example", Environment.SANDBOX)
    with connection.cursor() as cursor:
        cursor.execute("EXPLAIN " + made.captured_queries[0]["sql"])
        plan = "\n".join(line for (line,) in cursor.fetchall())
    assert "account_origins" in plan
    assert "Seq Scan on keyvault_account" not in plan


def test_list_withdrawn_reads_only_requests_with_a_staged_key() -> None:
    """The cost does not grow with the withdrawn requests, which are kept."""
    issue(account())
    copy_row(IssuanceRequest, issuance_request_id="'req_' || n", state="'withdrawn'")
    for after in (None, IssuanceRequest.objects.order_by("created_at")[0]):
        (plan,) = explain(partial(requests.list_withdrawn, after))
        assert "request_by_state" not in plan
        assert "Seq Scan on keyvault_issuancerequest" not in plan


def test_list_used_uncollected_after_a_request_skips_the_earlier_ones() -> None:
    (plan,) = explain(lambda: requests.list_used_uncollected(now(), after=(now(), "req_0")))
    assert "request_uncollected" in plan
    assert "Index Cond: ((issued_at" in plan
    assert "Sort" not in plan


@pytest.mark.parametrize(
    ("read", "index"),
    [
        (lambda operator: list(sessions.list_sessions(operator, now())), "session_by_operator"),
        (lambda operator: role_use.write_uses(operator.username, operator.roles, now()), "role_use_unique"),
    ],
    ids=["list_sessions", "write_uses"],
)
def test_rows_of_an_operator_are_read_by_their_index(read: Callable[[OperatorPrincipal], object], index: str) -> None:
    """The cost does not grow with the operators."""
    operator = make_operator("tam", Role.AUDITOR)
    assert index in explain(lambda: read(operator))[0]


def test_list_undecided_reads_no_change_that_is_decided() -> None:
    """The cost does not grow with the decided changes of operators, which are kept."""
    make_operator("tam", Role.AUDITOR)
    asking = grant(make_operator("admin", Role.KEY_ADMINISTRATOR), Permission.OPERATORS_WRITE)
    operator_changes.request_factor_reset(asking, Operator.objects.get(username="tam"), "the phone was lost")
    copy_row(OperatorChange, change_id="'opc_' || n", state="'withdrawn'", closed_at="now()")
    (plan,) = explain(lambda: list(operator_changes.list_undecided(now())))
    assert "operator_change_by_state" in plan
    assert "Sort" not in plan


def test_approvals_page_reads_only_recipient_keys_that_await_one() -> None:
    """The cost does not grow with the other recipient keys, which are kept."""
    key, _ = issue(account(environment=Environment.PRODUCTION))
    set_recipient(key, now())
    copy_row(RecipientKey, recipient_key_id="'rcp_' || n", withdrawn_at="now()")
    client = browser(make_operator("admin", *Role))
    client.get("/admin/approvals/")  # what is written once a day is not explained
    plans = [plan for plan in explain(lambda: client.get("/admin/approvals/")) if "recipientkey" in plan]
    assert any("recipient_pending" in plan for plan in plans)
    assert not any("recipient_newest" in plan for plan in plans)


@pytest.mark.parametrize(
    ("forget", "indexes"),
    [
        (idempotency.forget_expired, ["idempotent_request_expiring"]),
        (refusals.forget_old, ["refusal_unproved", "keyvault_refusal_at"]),
        (deliveries.forget_old_deliveries, ["webhook_delivery_settled"]),
        (deliveries.forget_old_notices, ["notice_settled"]),
        (customer_tokens.forget_expired_tokens, ["customer_token_expiring"]),
        (sessions.forget_expired_sessions, ["keyvault_consolesession_expire_date"]),
        (leases.forget_abandoned, ["work_lease_abandoned", "work_lease_held"]),
    ],
    ids=lambda each: each.__name__ if callable(each) else "",
)
def test_retention_reads_only_expired_rows(forget: Callable[[datetime], object], indexes: list[str]) -> None:
    """The cost of a deletion does not grow with the rows that are kept."""
    plans = explain(lambda: forget(now()))
    assert len(plans) == len(indexes)
    for plan, index in zip(plans, indexes, strict=True):
        assert index in plan
        assert "Index Cond" in plan
        assert "Sort" not in plan


def make_backlog() -> None:
    """Make many messages for one endpoint."""
    have_peppers()
    tam = make_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER)
    allowed = grant(tam, Permission.WEBHOOKS_WRITE, account())
    add_endpoint(allowed, account(), "https://acme.example/")
    with recorded(allowed, Permission.WEBHOOKS_WRITE, "webhook_endpoint.tested", account=account()):
        notices = [announce(allowed, NoticeKind.KEY_ISSUED, account(), f"{number}") for number in range(2)]
    WebhookDelivery.objects.filter(notice=notices[1]).delete()
    copy_row(Notice, notice_id="'ntc_' || n")
    copy_row(WebhookDelivery, notice="'ntc_' || n")


def test_receipt_reads_the_running_verifiers_and_the_latest_others() -> None:
    """The cost of a receipt, which a revocation polls, does not grow with the verifiers of the last days."""
    key, _ = issue(account())
    make_verifier()
    copy_row(Verifier, verifier_id="'stopped-' || n", stopped_at="now()")
    sequence = lifecycle.last_sequence(key)
    _, verifiers = explain(lambda: receipts.find_receipt(sequence))
    (unconfirmed,) = explain(lambda: receipts.list_unconfirmed(sequence))
    for plan in (verifiers, unconfirmed):
        assert "Index Cond: (stopped_at IS NULL)" in plan
        assert "Seq Scan" not in plan
    assert "Index Scan Backward using verifier_stopped" in verifiers


def test_measuring_the_queues_reads_only_due_rows() -> None:
    """Every process measures every few seconds, also beside the backlog of an outage."""
    make_backlog()
    plans = [plan for plan in explain(lambda: measure(now(), [])) if "webhookdelivery" in plan]
    assert len(plans) == 3  # the depth of urgent and other messages, and the oldest of the others: none is urgent
    for plan in plans:
        assert "webhook_delivery_due_at" in plan
        assert "Seq Scan" not in plan
        assert "Sort" not in plan


def test_alarm_messages_read_only_due_rows_and_the_oldest_alarms(settings: Any) -> None:
    """Thousands of unacknowledged alarms cost a worker no more than a few."""
    settings.ALARM_CHANNELS = ("email",)
    allowed = grant(make_operator("ivy", Role.INCIDENT_RESPONDER), Permission.KEYS_REVOKE, account())
    with recorded(allowed, Permission.KEYS_REVOKE, "key.revoked", account=account()):
        announce(allowed, NoticeKind.ROTATION_STALLED, account(), "rot_1")
    copy_row(Notice, notice_id="'ntc_' || n")
    copy_row(AlarmDelivery, notice="'ntc_' || n", due_at="now() + interval '1 hour'")
    plans = explain(lambda: alarm_messages._send_new(AlarmChannel.EMAIL, lambda: now() - timedelta(days=1)))
    assert "alarm_delivery_due" in plans[0]
    assert "Seq Scan on keyvault_alarmdelivery" not in plans[0]
    plans = explain(lambda: alarm_messages.list_unacknowledged(now()))
    assert len(plans) == 2
    for plan in plans:
        assert "notice_unseen" in plan
        assert "Seq Scan on keyvault_notice" not in plan
    (plan,) = explain(lambda: alarm_messages.forget_old(now()))
    assert "alarm_delivery_old" in plan


def test_webhook_turns_read_one_message_of_each_endpoint() -> None:
    """The backlog of one endpoint costs the next one nothing."""
    make_backlog()
    first, second = explain(lambda: list(EndpointTurns(is_urgent=False).visit(now())))[:2]
    for plan in (first, second):
        assert "webhook_delivery_due" in plan
        assert "Seq Scan" not in plan
        assert "Index Cond: ((is_urgent = false) AND (endpoint_id >" in plan


def test_attempts_with_a_suspended_key_read_only_the_latest_sources() -> None:
    """Thousands of known or unknown sources that try one key cost an engine run no more than a few."""
    key, _ = issue(account())
    at, log = now(), UsageLog(now=now)
    for source, outcome in (
        ("192.0.2.1", UseOutcome.ALLOWED),
        ("192.0.2.1", UseOutcome.REFUSED),
        ("198.51.100.1", UseOutcome.REFUSED),
    ):
        log.note(key.key_id, source=source, user_agent="curl", endpoint="orders.create", outcome=outcome)
    log.flush()
    copy_row(KeySource, name="n || '.0/24 curl'")
    copy_row(UseContext, source="'client-' || n", outcome="'refused'")
    copy_row(UseBucket, context=f"{UseContext.objects.latest('pk').pk} - n + 1")
    (found,), listed = (explain(partial(read, key.key_id, at)) for read in (find_attempts, list_attempts))
    for plan in (found, *listed):
        assert "Seq Scan" not in plan
        assert "Sort" not in plan
    assert "key_attempt_unique" in found
    assert "key_source_refused" in found
    assert "key_attempt_unique" in listed[0]
    assert "key_source_refused" in listed[1]
    assert any(index in listed[2] for index in ("key_source_refused", "key_source_unique"))
    assert listed[3].count("Index Scan Backward using use_bucket_unique") == 3
