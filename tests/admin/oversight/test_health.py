"""The page of verifiers and health."""

import re
from datetime import timedelta

import pytest

from keyvault.access.roles import Role
from keyvault.access.scopes import AccessScope
from keyvault.models import AuditChain, ServiceProcess, Verifier, WorkLease
from keyvault.services.audit.checkpoints import signing_lease
from keyvault.services.startup.system_health import SystemHealth
from tests.admin.desk import Desk, address, browser, text_of
from tests.factories import make_operator, now
from tests.services.rows import disable_triggers

pytestmark = pytest.mark.database


def test_health_shows_stale_verifiers_and_lost_workers(desk: Desk) -> None:
    """Guarantee: a verifier that no longer reports is stale, a worker lost, and the page says so first."""
    for name, ago in (("fresh-1", 0), ("silent-1", 3600)):
        at = now() - timedelta(seconds=ago)
        Verifier.objects.create(verifier_id=name, entry_point="server", started_at=at, seen_at=at, staleness_ms=2_500)
    ServiceProcess.objects.create(name="worker celery@one", kind="worker", seen_at=now())
    ServiceProcess.objects.create(name="beat one", kind="beat", seen_at=now() - timedelta(hours=1))
    page = text_of(browser(desk.auditor).get(address("health")))
    assert "Something does not run." in page
    assert "no scheduler runs, last seen 1 h ago" in page
    rows = {line.split("</code>")[0]: line for line in page.split("<code>")[1:]}
    assert "badge-stale" in rows["silent-1"].split("</tr>")[0]
    assert "badge-current" in rows["fresh-1"].split("</tr>")[0]
    assert "badge-lost" in rows["beat one"].split("</tr>")[0]
    assert "Webhook endpoints that fail" in page


def test_health_of_an_operator_of_one_merchant_has_only_webhooks(desk: Desk) -> None:
    """Guarantee: the processes of the installation are not shown to an operator of some merchants."""
    Verifier.objects.create(
        verifier_id="fresh-1", entry_point="server", started_at=now(), seen_at=now(), staleness_ms=2_500
    )
    limited = make_operator("limited", Role.AUDITOR, scope=AccessScope(frozenset({"acme"})))
    page = text_of(browser(limited).get(address("health")))
    assert "Webhook endpoints that fail" in page
    assert "fresh-1" not in page


def test_health_does_not_wait_for_the_signature_of_an_environment_that_was_never_used() -> None:
    at = now()
    signed = {"production": at, "sandbox": None, "service": at + timedelta(minutes=1)}
    assert SystemHealth([], [], signed, set(), {}, set()).signed_at == at


def test_overview_and_health_alarm_about_the_audit_chain(desk: Desk) -> None:
    """Guarantee: an audit log that is unsigned for long or does not match its checkpoints is shown in red."""
    client = browser(desk.auditor)

    def audit_line() -> str:
        return text_of(client.get("/admin/")).partition("<dt>Audit chain</dt>")[2].partition("</div>")[0]

    assert "badge-wait" in audit_line()
    disable_triggers()
    AuditChain.objects.filter(scope="service").update(unsigned_since=now() - timedelta(hours=2))
    assert "badge-bad" in audit_line()
    assert "unsigned for 2 h" in audit_line()
    scopes = text_of(client.get(address("health"))).partition("<h2>Audit chain</h2>")[2].partition("</table>")[0]
    states = re.findall('<td>([a-z]+)</td><td><span class="badge badge-[a-z]+ badge-([a-z]+)">([a-z]+)<', scopes)
    assert states == [("production", "wait", "waiting"), ("sandbox", "wait", "waiting"), ("service", "bad", "unsigned")]
    WorkLease.objects.create(subject=signing_lease("sandbox"), last_error="entry 5 differs", due_at=now())
    assert "broken in sandbox" in audit_line()
    page = text_of(client.get(address("health")))
    assert "Audit chain: broken in sandbox" in page
    assert "badge-broken" in page
