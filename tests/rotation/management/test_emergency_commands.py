"""`manage.py report_leak` and `reissue_key`: keys are revoked in any case; a new key needs its approval."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from keyvault.access.roles import Role
from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyState
from keyvault.models import BreakGlass, Key
from rotation.domain.events import RotationState as S
from rotation.models import Rotation
from rotation.services.rotations.reports import get_rotation
from tests.factories import PRODUCTION, SANDBOX, account, issue, make_merchant, make_operator

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _people(db: None) -> None:
    make_merchant("acme")
    for username, role in (
        ("tam", Role.TECHNICAL_ACCOUNT_MANAGER),
        ("approver", Role.APPROVER),
        ("responder", Role.INCIDENT_RESPONDER),
        ("auditor", Role.AUDITOR),
    ):
        make_operator(username, role)


class CommandRun:
    """One command: `answer` is its JSON, `refusal` the error text when it answered with exit 1."""

    def __init__(self, *arguments: str) -> None:
        output = io.StringIO()
        self.refusal = ""
        try:
            call_command(*arguments, "--json", stdout=output)
        except CommandError as error:
            self.refusal = str(error)
        self.answer: Any = json.loads(output.getvalue()) if output.getvalue() else None


@pytest.mark.database
def test_report_leak_revokes_keys_from_arguments_and_file(tmp_path: Path) -> None:
    made = [issue(account("acme")), issue(account("acme", PRODUCTION))]
    found = tmp_path / "leak.txt"
    found.write_text(f"{made[1][1].reveal()}\n\n")
    run = CommandRun("report_leak", made[0][0].key_id, "--file", str(found), "--by", "responder", "--reason", "a gist")
    assert run.refusal == ""
    assert (run.answer["revoked"], run.answer["not_revoked"]) == (2, 0)
    assert {answer["state"] for answer in run.answer["keys"]} == {"compromised"}
    assert all(answer["sequence"] > 0 for answer in run.answer["keys"])
    assert "rotation_id" not in run.answer["keys"][0]
    assert made[1][1].reveal() not in json.dumps(run.answer)
    assert set(Key.objects.values_list("state", flat=True)) == {KeyState.COMPROMISED}


def test_report_leak_with_an_unknown_key_revokes_the_rest_and_fails(tmp_path: Path) -> None:
    """Every key is listed on standard output; exit 1 reports that one was not revoked."""
    key, _ = issue(account("acme"))
    run = CommandRun("report_leak", "0" * 16, key.key_id, "--by", "responder")
    assert run.refusal == "Keys not revoked: 1"
    assert [answer["state"] for answer in run.answer["keys"]] == [None, "compromised"]
    assert Key.objects.get().state == KeyState.COMPROMISED


def test_report_leak_without_a_known_key_fails() -> None:
    run = CommandRun("report_leak", "nonsense", "0" * 16, "--by", "responder")
    assert run.refusal == "No key was revoked: none of the 2 is a known key that you may revoke"
    assert (run.answer["revoked"], run.answer["not_revoked"]) == (0, 2)


def test_report_leak_with_replace_requests_replacements() -> None:
    key, _ = issue(account("acme"))
    run = CommandRun("report_leak", key.key_id, "--by", "responder", "--replace")
    (answer,) = run.answer["keys"]
    assert get_rotation(answer["rotation_id"]).state == S.EMERGENCY
    assert answer["no_replacement"] is None


@pytest.mark.parametrize(
    "arguments",
    [["--by", "responder"], ["0000000000000000", "--by", "nobody"], ["--file", "/no/such", "--by", "responder"]],
)
def test_report_leak_without_keys_or_operator_is_refused(arguments: list[str]) -> None:
    run = CommandRun("report_leak", *arguments)
    assert run.answer is None
    assert run.refusal


def test_report_leak_without_permission_revokes_nothing() -> None:
    key, _ = issue(account("acme"))
    run = CommandRun("report_leak", key.key_id, "--by", "auditor")
    assert run.answer["revoked"] == 0
    assert run.refusal.startswith("No key was revoked")
    assert Key.objects.get().state == KeyState.ACTIVE


def reissue(key: Key, *more: str) -> CommandRun:
    credential = key.credential_id
    return CommandRun(
        "reissue_key", "--credential", credential, "--requested-by", "tam", "--reason", "it leaked", *more
    )


def lost(environment: Environment = SANDBOX) -> Key:
    """Return the revoked key of a credential that has no other."""
    key, _ = issue(account("acme", environment))
    CommandRun("revoke_key", key.key_id, "--reason", "key_compromise", "--by", "responder")
    return key


def test_reissue_key_with_an_approver_starts_immediately() -> None:
    run = reissue(lost(PRODUCTION), "--approved-by", "approver")
    assert (run.answer["state"], run.refusal) == (S.EMERGENCY, "")
    assert "approval" not in run.answer["waiting_for"]
    act = BreakGlass.objects.get(subject=run.answer["rotation_id"])
    assert act.requester_person == get_rotation(act.subject).requester_person, "the requester may not review it"


def test_reissue_key_without_an_approver_awaits_one() -> None:
    run = reissue(lost(PRODUCTION))
    assert (run.answer["state"], run.answer["waiting_for"]) == (S.EMERGENCY, "approval by a second person")


def test_reissue_key_approved_by_its_requester_is_refused_and_closed() -> None:
    """One person twice is refused, and the rotation is closed, so it does not block another request."""
    key = lost(PRODUCTION)
    refused = reissue(key, "--approved-by", "tam")
    assert (refused.answer, bool(refused.refusal)) == (None, True)
    assert reissue(key, "--approved-by", "approver").answer is not None
    assert sorted(Rotation.objects.values_list("state", flat=True)) == [S.CANCELLED, S.EMERGENCY]


def test_reissue_key_in_sandbox_needs_no_approver() -> None:
    run = reissue(lost())
    assert (run.answer["state"], run.answer["waiting_for"]) == (S.EMERGENCY, "the replacement to be made")


def test_reissue_key_of_a_credential_with_a_key_or_unknown_is_refused() -> None:
    key, _ = issue(account("acme"))
    assert "has a key that is active" in reissue(key).refusal
    key.credential_id = "crd_none"
    assert "There is no credential" in reissue(key).refusal
