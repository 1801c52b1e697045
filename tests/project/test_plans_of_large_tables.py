"""Query plans of periodic jobs and requests, with the statistics of a large installation.

The tables have some hundreds of rows; the planner believes in a thousand times as many.
"""

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest
from django.conf import settings
from django.contrib import admin
from django.db import connection
from django.db.models import Model
from django.test import Client
from django.urls import reverse

from keyvault.access.permissions import SERVICE_PERMISSIONS
from keyvault.access.permissions import Permission as P
from keyvault.access.roles import Role
from keyvault.access.scopes import AccessScope
from keyvault.admin.oversight import audit
from keyvault.domain.checkpoints import SignedCheckpoint
from keyvault.domain.digests import PepperSet
from keyvault.domain.environments import Environment
from keyvault.domain.keystring import StringScope
from keyvault.domain.notifications import NoticeKind
from keyvault.models import AuditCheckpoint, Change, Credential, IssuanceRequest, Key, Notice, Refusal
from keyvault.models.usage import UseOutcome
from keyvault.project import celery_app
from keyvault.services.audit import checkpoints
from keyvault.services.audit.signers import LOCAL, LocalSigner
from keyvault.services.change_feed import readers
from keyvault.services.secrets.backend import secret_backend
from keyvault.services.secrets.stored_copies import read_string
from keyvault.services.usage import recorder
from keyvault.services.usage.recorder import UsageLog
from rotation.domain.events import RotationState as S
from rotation.domain.pacing import Pace
from rotation.domain.plan_fields import PlanOverrides
from rotation.models import LedgerEntry, LedgerState, Rotation
from rotation.services.campaigns.campaigns import approve_campaign, request_campaign
from rotation.services.rotations.engine import advance_rotation
from tests.admin.desk import browser, list_routes
from tests.admin.framework.test_enforcement import OPEN
from tests.bench import scale_rows
from tests.bench.scale_rows import PlatformSize, Samples
from tests.factories import grant, make_operator, make_token, own_keystore
from tests.plans import SlowQueries, empty_files, list_plan_faults, multiply_statistics
from tests.rotation import scene

pytestmark = [pytest.mark.postgres, pytest.mark.django_db, pytest.mark.long]

SIZE = PlatformSize(1_000)
FACTOR = 1_000
DUE = 3

PAGES = (
    ("/v1/credentials", "kind=public"),
    ("/v1/issuance-requests", "state=pending"),
    ("/v1/rotations", "state=completed"),
    ("/v1/rotations", "state=stalled"),
)
"""The lists of the service plane, each with a filter; some filters find no row."""


AUDIT_QUERIES = (
    "q=operator:nobody",
    "q=req_1&event=issuance.requested",
    "q=req_1&chain=account:merchant-7/production",
    "q=req_1&at__gte=2020-01-01T00:00:00Z",
    "q=req_1&actor=worker",
    "q=req_1&merchant=merchant-7",
    "actor=nobody",
    "actor=worker",
    "actor=worker&event=issuance.requested",
    "actor=worker&at__gte=2020-01-01T00:00:00Z",
    "actor=worker&merchant=merchant-7",
    "merchant=merchant-7",
    "merchant=merchant-7&event=issuance.requested",
)
"""Searches and filters of the audit entries, with and without a chain."""

SCOPES = {
    "production": AccessScope(environments=frozenset({Environment.PRODUCTION})),
    "sandbox": AccessScope(environments=frozenset({Environment.SANDBOX})),
    "merchants": AccessScope(frozenset({"merchant-7", "merchant-8", "merchant-9"})),
}
"""Limited scopes of operators, by user name. Nearly all rows are of production: a list of the sandbox has few."""


@pytest.fixture(autouse=True)
def usage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the uses of the requests in memory: their keys end with the test."""
    monkeypatch.setattr(UsageLog, "start", lambda self: None)
    for module in ("keyvault.hotpath.adapters.assembly", "keyvault.api.integration"):
        monkeypatch.setattr(f"{module}.usage_log", UsageLog())


@pytest.fixture(autouse=True)
def searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a search of the audit entries read few: its cost is that of the entries it reads, by their ids."""
    monkeypatch.setattr(audit, "_MAX_SEARCHED", 50)


@pytest.mark.timeout(300)  # explains some thousand queries
def test_no_job_and_no_request_reads_a_large_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: the cost of a periodic job or a request does not grow with the number of keys, uses or changes."""
    empty_files()
    samples = scale_rows.load(SIZE)
    multiply_statistics(FACTOR)
    queries = SlowQueries()
    celery_app.loader.import_default_modules()
    tasks = {
        name: partial(celery_app.tasks[str(entry["task"])], *cast("tuple[Any, ...]", entry.get("args", ())))
        for name, entry in settings.CELERY_BEAT_SCHEDULE.items()
    }
    for name, task in tasks.items():
        with queries.watch(f"{name}, nothing due"):
            task()
    make_due(samples)
    with scale_rows.accept_messages():
        for name, task in tasks.items():
            with queries.watch(f"{name}, some due"):
                task()
    assert Rotation.objects.filter(campaign__isnull=False).count() == DUE
    assert LedgerEntry.objects.filter(step=S.STAGED, state=LedgerState.DONE).count() == DUE
    try_quarantined(samples)
    for state in (S.SCHEDULED, S.AWAITING_PROOF, S.OVERLAP, S.QUARANTINE):
        with queries.watch(f"a rotation's turn in {state}"):
            advance_rotation(samples.rotations[state].rotation_id)
    make_requests(samples, queries)
    follow_changes(samples, queries, monkeypatch)
    make_campaigns(queries)
    open_objects(samples, queries)
    open_pages(samples, queries)
    open_lists_in_scope(samples, queries)
    assert Notice.objects.filter(kind=NoticeKind.USED_IN_QUARANTINE, payload__is_exposure=True).exists()
    assert queries.count > 500
    assert queries.found == {}
    assert list_report_faults(queries) == []


def test_version_of_a_checkpoint_is_compared_by_an_index(tmp_path: Path) -> None:
    """Guarantee: the cost of the comparison with earlier checkpoints does not grow with them, also after a rotation.

    Version 1 signed the first half of the checkpoints, version 2 the others. Version 3 signed none yet.
    """
    scope, half = PepperSet.SANDBOX.value, SIZE.credentials // 2
    AuditCheckpoint.objects.bulk_create(
        AuditCheckpoint(
            scope=scope,
            number=number,
            at=datetime.now(UTC),
            body=b"",
            signature=b"",
            signer=LOCAL,
            key_version=1 if number <= half else 2,
        )
        for number in range(1, 2 * half + 1)
    )
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE keyvault_auditcheckpoint")
    multiply_statistics(FACTOR)
    queries, keys = SlowQueries(), {(scope, LOCAL, version): b"" for version in (1, 2, 3)}
    for number, version, highest in ((half, 1, 0), (2 * half, 2, 0), (2 * half + 1, 1, 2)):
        signed = SignedCheckpoint(scope, number, b"", b"", LOCAL, version)
        with queries.watch(f"checkpoint {number} of version {version}"):
            assert checkpoints._highest_version_before(signed, keys) == highest
    with own_keystore(tmp_path):
        signer = LocalSigner(secret_backend())
        for version in range(2):
            signer._put(scope, version)
        with queries.watch("rotation"):
            assert signer.rotate(scope) == 3
    assert queries.count == 6
    assert queries.found == {}


def list_report_faults(queries: SlowQueries) -> list[str]:
    """List the tables that a verifier's report reads, and where it compares each row with each of another part.

    A verifier sends it each second, by a statement of its own. PostgreSQL expects one row where there are thousands.
    """
    with connection.cursor() as cursor:
        cursor.execute(f"PREPARE report AS {recorder._REPORT}")
        cursor.execute("EXPLAIN (FORMAT JSON) EXECUTE report('reporter', '1', now(), NULL, '{}', '[]')")
        plan = cursor.fetchone()[0][0]["Plan"]
    faults = [fault for fault in list_plan_faults(plan, queries.sizes) if fault.startswith("reads")]
    compared = [part["CTE Name"] for part in list_inner_parts(plan) if "CTE Name" in part]
    return faults + [f"compares with each row of {name}" for name in compared]


def list_inner_parts(plan: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield what each nested loop of a plan reads for each of its rows."""
    for part in plan.get("Plans", ()):
        if plan["Node Type"] == "Nested Loop" and part["Parent Relationship"] == "Inner":
            yield part
        yield from list_inner_parts(part)


def try_quarantined(samples: Samples) -> None:
    """Try the key of the rotation in quarantine from an unknown source."""
    log = UsageLog()
    scene.use(log, samples.rotations[S.QUARANTINE].predecessor_id, source="198.51.100.1", outcome=UseOutcome.REFUSED)


def make_due(samples: Samples) -> None:
    scale_rows.make_rotations_due(SIZE, DUE)
    scale_rows.make_requests_due(samples, DUE)
    scale_rows.make_expiries_due(SIZE, DUE)
    scale_rows.make_destructions_due(SIZE, DUE)
    scale_rows.make_settlements_due(SIZE, DUE)
    scale_rows.make_connections_due(SIZE, DUE)
    scale_rows.make_discards_due(SIZE, DUE)
    scale_rows.make_schedules_due(SIZE, DUE)
    scale_rows.make_deliveries_due(SIZE, samples, DUE)
    scale_rows.make_rows_old(SIZE, samples, DUE)
    scale_rows.make_paths_due(SIZE, DUE)
    scale_rows.make_heads_due(SIZE, DUE)
    scale_rows.make_pending_due(SIZE, DUE)
    scale_rows.make_campaign_due(SIZE, DUE)


def make_campaigns(queries: SlowQueries) -> None:
    """Request campaigns over the oldest keys of the environment and over the keys of a merchant."""
    old, number = "now() - interval '500 days'", scale_rows.free(SIZE, 6, DUE)
    scale_rows.change(Key, DUE, f"row.key_id = {scale_rows.key(number)}", created_at=old, activated_at=old)
    asking = grant(scene.tam(), P.ROTATIONS_WRITE)
    for merchants, older_than_days in ((None, 390), (["merchant-30"], None)):
        with queries.watch(f"campaign over {merchants}"):
            campaign = request_campaign(
                asking,
                environment=Environment.PRODUCTION,
                merchants=merchants,
                older_than_days=older_than_days,
                overrides=PlanOverrides(),
                pace=Pace(),
                reason="old keys",
            )
        approving = grant(scene.approver(), P.ROTATIONS_APPROVE, None, campaign.requester_person)
        with queries.watch(f"approval of the campaign over {merchants}"):
            approve_campaign(approving, campaign, campaign.plan_digest)


def open_objects(samples: Samples, queries: SlowQueries) -> None:
    """Open the page of one row of each model that has rows."""
    client = browser(make_operator("reader", *Role))
    chosen = (samples.account.merchant, samples.account, samples.key, samples.key.credential, samples.endpoint)
    ids: dict[type[Model], Any] = {type(row): row.pk for row in (*chosen, samples.rotations[S.OVERLAP])}
    admin.autodiscover()
    for model in admin.site._registry:
        newest = model._default_manager.order_by("-pk").values_list("pk", flat=True).first()
        if newest is not None:
            name = f"{model._meta.app_label}_{model._meta.model_name}_change"
            with queries.watch(name):
                path = reverse(f"admin:{name}", args=[ids.get(model, newest)])
                assert client.get(path).status_code == 200, name


def open_pages(samples: Samples, queries: SlowQueries) -> None:
    """Open each page of the console that is of no single row, as an administrator, and filtered ones."""
    client = browser(make_operator("console", *Role))
    addresses = dict(list_routes())
    # A passkey needs a domain, which the tests' origin has not; recovery codes are made by a POST.
    others = OPEN | {"add_passkey", "recovery_codes", "environment"}
    pages = [(name, path) for name, path in addresses.items() if "<" not in path and name not in others]
    assert len(pages) > 30
    for name, path in [*pages, *((path, path) for path in list_filtered(samples))]:
        with queries.watch(name):
            assert client.get(path).status_code == 200, name


def open_lists_in_scope(samples: Samples, queries: SlowQueries) -> None:
    """Open the overview and the lists, also filtered ones, as operators with a limited scope."""
    lists = [path for name, path in list_routes() if name.endswith(("_changelist", "_calendar"))]
    assert len(lists) > 20
    for username, scope in SCOPES.items():
        client = browser(make_operator(username, *Role, scope=scope))
        for path in [reverse("admin:index"), *lists, *list_filtered(samples)]:
            with queries.watch(f"{path} in the scope {username}"):
                assert client.get(path).status_code == 200, path


def list_filtered(samples: Samples) -> list[str]:
    """Return the addresses of filtered and searched lists."""
    rotations, merchant = reverse("admin:rotation_rotation_changelist"), samples.account.merchant_id
    calendar = reverse("admin:rotation_rotationschedule_calendar")
    filtered = [
        f"{rotations}?held=up",
        f"{rotations}?bypass=open",
        f"{rotations}?collection=open",
        f"{calendar}?environment=production",
        f"{calendar}?merchant={merchant}",
        *(f"{reverse('admin:choices_merchants')}?q={words}" for words in ("merchant-1", "Merchant")),
        *(f"{reverse('admin:choices_credentials')}?q={words}" for words in (merchant, "crd_1", "shop")),
        f"{reverse('admin:choices_actors')}?q=op",
        f"{reverse('admin:keyvault_key_changelist')}?exposed=lately",
        f"{reverse('admin:keyvault_notice_changelist')}?what=unseen",
        f"{reverse('admin:keyvault_breakglass_changelist')}?review=open",
        *(f"{reverse('admin:keyvault_auditentry_changelist')}?{query}" for query in AUDIT_QUERIES),
    ]
    for model in (IssuanceRequest, Credential, Key, Notice, Refusal, Rotation):
        listed = reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist")
        filtered.append(f"{listed}?o=2.3&q=merchant-1")
    return filtered


class Caller:
    """Sends requests as a merchant or its gateway does, and explains their queries."""

    def __init__(self, queries: SlowQueries) -> None:
        self._client, self._queries = Client(), queries
        _, token = make_token(*SERVICE_PERMISSIONS, scope=StringScope.ALL)
        self.service = {"Authorization": f"Bearer {token.reveal()}"}

    def ask(self, name: str, method: str, path: str, body: object = None, /, **headers: str) -> Any:
        with self._queries.watch(name):
            response = self._client.generic(
                method, path, json.dumps(body) if body else b"", content_type="application/json", headers=headers
            )
        assert response.status_code in (200, 201, 202, 204), (name, response.content)
        return response.json() if response.content else None


def follow_changes(samples: Samples, queries: SlowQueries, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the requests of a verifier that reads the change feed over HTTP."""
    # The test's own transaction has drawn sequences and stays open.
    monkeypatch.setattr(readers, "find_confirmed_here", lambda: Change.objects.latest("sequence").sequence)
    caller = Caller(queries)
    ask, service, read = caller.ask, caller.service, "/v1/changes?reader=r1"
    sequence = ask("register a reader", "GET", read, **service)["sequence"]
    ask("revoke for the reader", "POST", f"/v1/keys/{samples.key.key_id}/revoke", {"reason": "superseded"}, **service)
    sequence = ask("read changes", "GET", f"{read}&after={sequence}", **service)["sequence"]
    ask("confirm changes", "POST", "/v1/changes/confirmations", {"reader": "r1", "sequence": sequence}, **service)
    report = {"reader": "r1", "number": 1, "flushed_through": datetime.now(UTC).isoformat(), "uses": []}
    ask("report no use", "POST", "/v1/usage-reports", report, **service)
    ask("read the rules", "GET", "/v1/snapshot", **service)
    ask("read a record", "GET", f"/v1/snapshot/keys?key_ids={samples.key.key_id}", **service)
    ask("read a token", "GET", f"/v1/snapshot/customers?token_ids={samples.token.token_id}", **service)


def make_requests(samples: Samples, queries: SlowQueries) -> None:
    """Make the requests that use a key."""
    caller = Caller(queries)
    ask, service = caller.ask, caller.service
    rotation = Rotation.objects.get(pk=samples.rotations[S.AWAITING_PROOF].rotation_id)
    assert rotation.replacement is not None
    text = read_string(rotation.replacement).reveal()
    merchant = {"X-Api-Key": text}

    numbers = count()

    def send(name: str, path: str, body: object = None, /, **headers: str) -> Any:
        return ask(name, "POST", path, body, **headers, **{"Idempotency-Key": f"key-{next(numbers)}"})

    verified = {"key": text, "environment": "production", "endpoint": "orders.create"}
    ask("verify", "POST", "/v1/keys/verify", verified, **service)
    ask("rotation", "GET", f"/v1/rotations/{rotation.rotation_id}", **service)
    for path, condition in PAGES:
        for place in ("", "environment=production", "environment=sandbox", "merchant=merchant-7"):
            for query in (place, f"{place}&{condition}"):
                name = f"{path}?{query}"
                cursor = ask(name, "GET", name, **service)["next_cursor"]
                if cursor is not None:
                    ask(f"{name}, second page", "GET", f"{name}&cursor={cursor}", **service)
    unused, credential_id = samples.key.key_id, samples.key.credential_id
    ask("key", "GET", f"/v1/keys/{unused}", **service)
    ask("credential", "GET", f"/v1/credentials/{credential_id}", **service)
    asked = {"merchant": "platform", "environment": "production", "kind": "private"}
    request_id = send("request a key", "/v1/issuance-requests", asked, **service)["issuance_request_id"]
    ask("issuance request", "GET", f"/v1/issuance-requests/{request_id}", **service)
    plan = {"credential_id": credential_id, "reason": "old"}
    rotation_id = send("request a rotation", "/v1/rotations", plan, **service)["rotation_id"]
    send("abort the rotation", f"/v1/rotations/{rotation_id}/abort", {"reason": "no"}, **service)
    order = {"amount_minor": 1299, "currency": "EUR"}
    token = send("create an order", "/production/merchants/orders", order, **merchant)["order_token"]
    ask("order", "GET", f"/production/merchants/orders/{token}", **merchant)
    token_id = send("customer token", "/production/customers/one/access-tokens", None, **merchant)["token_id"]
    ask("revoke the token", "DELETE", f"/production/customers/access-tokens/{token_id}", **merchant)
    recipient = {"recipient_public_key": scene.RECIPIENT}
    ask("recipient key", "PUT", "/production/credentials/recipient-key", recipient, **merchant)
    ask("acknowledge", "POST", "/production/credentials/acknowledge", **merchant)
    ask("revoke-self", "POST", "/production/credentials/revoke-self", **merchant)
    ask("revoke-self, repeated", "POST", "/production/credentials/revoke-self", **merchant)
    reason = {"reason": "superseded"}
    receipt = ask("revoke", "POST", f"/v1/keys/{unused}/revoke", reason, **service, Prefer="wait=1")
    ask("receipt", "GET", f"/v1/revocations/{receipt['sequence']}", **service)
