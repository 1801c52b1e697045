"""`manage.py offboard_merchant`: nothing without --yes, everything with it, and again until nothing is left."""

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

pytestmark = [pytest.mark.database, pytest.mark.django_db]


@pytest.fixture(autouse=True)
def _merchant(db: None) -> None:
    make_merchant("acme")
    make_operator("responder", Role.INCIDENT_RESPONDER)
    make_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER)
    issue(account("acme"))


def run(*words: str, output: io.StringIO | None = None) -> Any:
    said = output or io.StringIO()
    call_command("offboard_merchant", *words, "--why", "contract ended", "--json", stdout=said)
    return json.loads(said.getvalue())


def test_offboard_merchant_without_yes_tells_what_it_would_end(db: None) -> None:
    with pytest.raises(CommandError, match=r"sandbox: 1 key\. This is irreversible"):
        run("acme", "--by", "responder")
    assert Merchant.objects.get().status == "active"
    assert Key.objects.get().state == "active"


def test_offboard_merchant_ends_everything_and_can_be_run_again(db: None) -> None:
    told = run("acme", "--by", "responder", "--yes")
    assert (told["merchant_id"], told["status"], told["is_complete"]) == ("acme", "offboarded", True)
    assert told["ended"]["sandbox"]["keys"] == 1
    assert set(told["left"]["sandbox"].values()) == {0}
    again = run("acme", "--by", "responder", "--yes")
    assert again["ended"]["sandbox"]["keys"] == 0
    assert Key.objects.get().state == "deactivated"
    entry = AuditEntry.objects.filter(event="merchant.offboarded").first()
    assert entry is not None
    assert b'"channel":"command_line"' in bytes(entry.body)


def test_offboard_merchant_that_leaves_something_says_so_and_fails(db: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts are told all the same, and exit 1 says that it is to be run again."""

    def in_use(*_: object) -> None:
        raise StateConflictError("Somebody else changed this meanwhile.")

    monkeypatch.setattr(offboarding, "revoke_key", in_use)
    output = io.StringIO()
    with pytest.raises(CommandError, match="run it again; remaining: production: nothing; sandbox: 1 key"):
        run("acme", "--by", "responder", "--yes", output=output)
    assert json.loads(output.getvalue())["left"]["sandbox"]["keys"] == 1


@pytest.mark.parametrize(("merchant", "by"), [("nobody", "responder"), ("acme", "tam"), ("acme", "nobody")])
def test_offboard_merchant_by_or_of_the_wrong_one_is_refused(db: None, merchant: str, by: str) -> None:
    with pytest.raises(CommandError):
        run(merchant, "--by", by, "--yes")
    assert Key.objects.get().state == "active"
