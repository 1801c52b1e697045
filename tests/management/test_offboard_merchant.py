"""`manage.py offboard_merchant`: changes nothing without --yes, ends everything with it, and is repeatable."""

import io
import json
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from keyvault.access.roles import Role
from keyvault.domain.errors import StateConflictError
from keyvault.models import AuditEntry, Key, Merchant
from keyvault.services import offboarding
from tests.factories import account, issue, make_merchant, make_operator

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _merchant(db: None) -> None:
    make_merchant("acme")
    make_operator("responder", Role.INCIDENT_RESPONDER)
    make_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER)
    issue(account("acme"))


def run(*arguments: str, output: io.StringIO | None = None) -> Any:
    stream = output or io.StringIO()
    call_command("offboard_merchant", *arguments, "--why", "contract ended", "--json", stdout=stream)
    return json.loads(stream.getvalue())


@pytest.mark.database
def test_offboard_merchant_without_yes_lists_what_it_would_end(db: None) -> None:
    with pytest.raises(CommandError, match=r"sandbox: 1 key\. This is irreversible"):
        run("acme", "--by", "responder")
    assert Merchant.objects.get().status == "active"
    assert Key.objects.get().state == "active"


def test_offboard_merchant_ends_everything_and_is_repeatable(db: None) -> None:
    counts = run("acme", "--by", "responder", "--yes")
    assert (counts["merchant_id"], counts["status"], counts["is_complete"]) == ("acme", "offboarded", True)
    assert counts["ended"]["sandbox"]["keys"] == 1
    assert set(counts["left"]["sandbox"].values()) == {0}
    again = run("acme", "--by", "responder", "--yes")
    assert again["ended"]["sandbox"]["keys"] == 0
    assert Key.objects.get().state == "deactivated"
    entry = AuditEntry.objects.filter(event="merchant.offboarded").first()
    assert entry is not None
    assert b'"channel":"command_line"' in bytes(entry.body)


def test_offboard_merchant_with_remains_reports_them_and_fails(db: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts are printed, and exit 1 asks for a repetition."""

    def in_use(*_: object) -> None:
        raise StateConflictError("Somebody else changed this meanwhile.")

    monkeypatch.setattr(offboarding, "revoke_key", in_use)
    output = io.StringIO()
    with pytest.raises(CommandError, match="run it again; remaining: production: nothing; sandbox: 1 key"):
        run("acme", "--by", "responder", "--yes", output=output)
    assert json.loads(output.getvalue())["left"]["sandbox"]["keys"] == 1


@pytest.mark.parametrize(("merchant", "by"), [("nobody", "responder"), ("acme", "tam"), ("acme", "nobody")])
def test_offboard_merchant_with_unknown_merchant_or_forbidden_operator_is_refused(
    db: None, merchant: str, by: str
) -> None:
    with pytest.raises(CommandError):
        run(merchant, "--by", by, "--yes")
    assert Key.objects.get().state == "active"
