"""`manage.py report_leak` and `reissue_key`: keys end whatever the rest comes to; a new one under its approval."""

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

pytestmark = [pytest.mark.database, pytest.mark.django_db]


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


class Run:
    """One command; `told` is its JSON, `refusal` what it said beside it when it answered with exit 1."""

    def __init__(self, *words: str) -> None:
        output = io.StringIO()
        self.refusal = ""
        try:
            call_command(*words, "--json", stdout=output)
        except CommandError as error:
            self.refusal = str(error)
        self.told: Any = json.loads(output.getvalue()) if output.getvalue() else None


def test_report_leak_ends_the_keys_that_are_named_and_those_of_the_file(tmp_path: Path) -> None:
    made = [issue(account("acme")), issue(account("acme", PRODUCTION))]
    found = tmp_path / "leak.txt"
    found.write_text(f"{made[1][1].reveal()}\n\n")
    run = Run("report_leak", made[0][0].key_id, "--file", str(found), "--by", "responder", "--reason", "a gist")
    assert run.refusal == ""
    assert (run.told["revoked"], run.told["not_revoked"]) == (2, 0)
    assert {told["state"] for told in run.told["keys"]} == {"compromised"}
    assert all(told["sequence"] > 0 for told in run.told["keys"])
    assert "rotation_id" not in run.told["keys"][0]
    assert made[1][1].reveal() not in json.dumps(run.told)
    assert set(Key.objects.values_list("state", flat=True)) == {KeyState.COMPROMISED}


def test_report_leak_with_a_stranger_among_them_ends_the_rest_and_fails(tmp_path: Path) -> None:
    """Every key is told of on standard output; exit 1 says that one was not revoked."""
    key, _ = issue(account("acme"))
    run = Run("report_leak", "0" * 16, key.key_id, "--by", "responder")
    assert run.refusal == "Keys not revoked: 1"
    assert [told["state"] for told in run.told["keys"]] == [None, "compromised"]
    assert Key.objects.get().state == KeyState.COMPROMISED


def test_report_leak_that_recognizes_nothing_fails_and_says_that_no_key_was_revoked() -> None:
    run = Run("report_leak", "nonsense", "0" * 16, "--by", "responder")
    assert run.refusal == "No key was revoked: none of the 2 is a known key that you may revoke"
    assert (run.told["revoked"], run.told["not_revoked"]) == (0, 2)


def test_report_leak_asks_for_replacements_when_told_to() -> None:
    key, _ = issue(account("acme"))
    run = Run("report_leak", key.key_id, "--by", "responder", "--replace")
    (told,) = run.told["keys"]
    assert get_rotation(told["rotation_id"]).state == S.EMERGENCY
    assert told["no_replacement"] is None


@pytest.mark.parametrize(
    "words",
    [["--by", "responder"], ["0000000000000000", "--by", "nobody"], ["--file", "/no/such", "--by", "responder"]],
)
def test_report_leak_of_nothing_or_by_nobody_is_refused(words: list[str]) -> None:
    run = Run("report_leak", *words)
    assert run.told is None
    assert run.refusal


def test_report_leak_by_somebody_who_may_not_ends_nothing() -> None:
    key, _ = issue(account("acme"))
    run = Run("report_leak", key.key_id, "--by", "auditor")
    assert run.told["revoked"] == 0
    assert run.refusal.startswith("No key was revoked")
    assert Key.objects.get().state == KeyState.ACTIVE


def reissue(key: Key, *more: str) -> Run:
    credential = key.credential_id
    return Run("reissue_key", "--credential", credential, "--requested-by", "tam", "--reason", "it leaked", *more)


def lost(environment: Environment = SANDBOX) -> Key:
    """The key of a credential that has no other."""
    key, _ = issue(account("acme", environment))
    Run("revoke_key", key.key_id, "--reason", "key_compromise", "--by", "responder")
    return key


def test_reissue_key_with_an_approver_waits_for_nobody() -> None:
    run = reissue(lost(PRODUCTION), "--approved-by", "approver")
    assert (run.told["state"], run.refusal) == (S.EMERGENCY, "")
    assert "approval" not in run.told["waiting_for"]
    act = BreakGlass.objects.get(subject=run.told["rotation_id"])
    assert act.requester_person == get_rotation(act.subject).requester_person, "who does not review it"


def test_reissue_key_without_an_approver_waits_for_one_in_the_console() -> None:
    run = reissue(lost(PRODUCTION))
    assert (run.told["state"], run.told["waiting_for"]) == (S.EMERGENCY, "approval by a second person")


def test_reissue_key_approved_by_its_requester_leaves_nothing_behind() -> None:
    """The same person twice is refused, and the rotation is closed, so that it blocks no other."""
    key = lost(PRODUCTION)
    refused = reissue(key, "--approved-by", "tam")
    assert (refused.told, bool(refused.refusal)) == (None, True)
    assert reissue(key, "--approved-by", "approver").told is not None
    assert sorted(Rotation.objects.values_list("state", flat=True)) == [S.CANCELLED, S.EMERGENCY]


def test_reissue_key_in_sandbox_wants_nobody_else() -> None:
    run = reissue(lost())
    assert (run.told["state"], run.told["waiting_for"]) == (S.EMERGENCY, "the replacement to be made")


def test_reissue_key_of_a_credential_that_has_one_or_does_not_exist_is_refused() -> None:
    key, _ = issue(account("acme"))
    assert "has a key that is active" in reissue(key).refusal
    key.credential_id = "crd_none"
    assert "There is no credential" in reissue(key).refusal
