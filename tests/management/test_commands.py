"""The scripting commands: one JSON object; exit 0, 1 (refused) or 2 (usage); secrets only on request, once."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import override_settings

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST
from keyvault.access.roles import Role
from keyvault.domain.environments import Environment
from keyvault.domain.keystring import parse_keystring
from keyvault.management.commands.run import _demo_curl, _prepare_sign_ins
from keyvault.management.service import lock_data_folder
from keyvault.models import AuditEntry, BreakGlass, Credential, IssuanceRequest, Merchant, Operator, ServiceToken
from keyvault.services.change_feed import receipts
from keyvault.services.operators.operators import disable_operator
from rotation.services.rotations.engine import advance_rotation
from tests.factories import grant, make_operator
from tests.starting_rows import start_with
from tests.verifiers import confirm, make_verifier

from .command_line import run_command_line

ROOT = Path(__file__).resolve().parent.parent.parent

pytestmark = pytest.mark.django_db


def run(*arguments: str) -> Any:
    output = io.StringIO()
    call_command(*arguments, "--json", stdout=output)
    lines = output.getvalue().splitlines()
    assert len(lines) == 1
    return json.loads(lines[0])


def run_text(*arguments: str) -> str:
    output = io.StringIO()
    call_command(*arguments, stdout=output)
    return output.getvalue()


@pytest.fixture
def seeded() -> Any:
    return start_with(run, "seed_demo")


def issue(environment: str = "sandbox", *more: str) -> Any:
    arguments = ["--merchant", "acme", "--environment", environment, "--kind", "private"]
    return run("issue_key", *arguments, "--requested-by", "tam", "--approved-by", "approver", *more)


@pytest.mark.database
def test_seed_demo_is_idempotent_and_makes_no_superuser(seeded: Any) -> None:
    assert run("seed_demo") == seeded
    assert {merchant["merchant_id"] for merchant in seeded["merchants"]} >= {"acme", "globex"}
    assert {operator["username"] for operator in seeded["operators"]} >= {"tam", "approver", "admin", "auditor"}
    assert {environment["name"] for environment in seeded["environments"]} == {"sandbox", "production"}
    assert not Operator.objects.filter(is_superuser=True).exists()


def test_demo_in_a_database_that_it_did_not_make_changes_nothing() -> None:
    """Guarantee: the demo replaces no password and no factor of an operator that it did not make."""
    make_operator("admin", Role.KEY_ADMINISTRATOR)
    before = Operator.objects.get().password
    with pytest.raises(CommandError, match="operators that the demo did not make"):
        run("seed_demo")
    assert _prepare_sign_ins() == {}
    assert (Operator.objects.get().password, Merchant.objects.count()) == (before, 0)


def test_demo_renews_only_the_operators_that_it_made(seeded: Any) -> None:
    make_operator("jane", Role.KEY_ADMINISTRATOR, person=Operator.objects.get(username="admin").person)
    disable_operator(grant(HOST, P.OPERATORS_WRITE), Operator.objects.get(username="tam"))
    assert run("seed_demo") == seeded
    assert sorted(_prepare_sign_ins()) == ["admin", "approver", "auditor", "responder"]


@pytest.mark.parametrize("served", list(Environment))
def test_demo_in_a_single_environment_process_stays_in_that_environment(served: Environment) -> None:
    """A process for production only has no demo key and no demo token, and prints a reason in place of the curl
    command.
    """
    with override_settings(ENVIRONMENTS=(served.value,)):
        assert [environment["name"] for environment in run("seed_demo")["environments"]] == [served]
        curl = _demo_curl(8000)
    if served is Environment.SANDBOX:
        assert curl.startswith("curl ")
        assert set(Credential.objects.values_list("account__environment", flat=True)) == {"sandbox"}
    else:
        assert curl == "(no key was issued: the demo needs the sandbox, and KEYVAULT_ENVIRONMENTS is production)"
        assert not IssuanceRequest.objects.exists()
        assert not ServiceToken.objects.exists()


def test_seed_demo_beside_a_running_service_names_its_port(
    seeded: Any, monkeypatch: pytest.MonkeyPatch, settings: Any, tmp_path: Path
) -> None:
    monkeypatch.delenv("KEYVAULT_ORIGIN", raising=False)
    settings.DATA_DIR = tmp_path
    with lock_data_folder(8123):
        urls = [place["base_url"] for place in run("seed_demo")["environments"]]
    assert urls == ["http://127.0.0.1:8123/sandbox", "http://127.0.0.1:8123/production"]


def test_issue_key_reveals_only_when_asked(seeded: Any) -> None:
    hidden = issue()
    assert "key" not in hidden
    shown = issue("sandbox", "--reveal")
    assert parse_keystring(shown["key"], "kv") is not None
    assert shown["key_id"] in shown["key"]
    assert shown["credential_id"] != hidden["credential_id"]


def test_issue_key_in_production_requires_two_persons(seeded: Any) -> None:
    """Two identical names are refused, and no pending request remains that a person could approve by mistake."""
    arguments = ["issue_key", "--merchant", "acme", "--environment", "production", "--kind", "private"]
    with pytest.raises(CommandError, match="second person"):
        run(*arguments, "--requested-by", "admin", "--approved-by", "admin")
    with pytest.raises(CommandError, match="second person"):
        run(*arguments, "--requested-by", "tam")
    with pytest.raises(CommandError, match="permission_missing"):
        run(*arguments, "--requested-by", "tam", "--approved-by", "auditor")
    assert set(IssuanceRequest.objects.values_list("state", flat=True)) == {"withdrawn"}
    assert not Credential.objects.exists()


def test_issue_key_in_production_is_break_glass_until_reviewed(seeded: Any) -> None:
    """A command line proves no identity: the approval awaits review and names the host's user beside the operator."""
    issue("production")
    act = BreakGlass.objects.get()
    assert (act.event, act.reviewed_at) == ("issuance.approved", None)
    assert act.host_user
    person = Operator.objects.get(username="tam").person
    assert (act.is_claimed, act.requester_person, act.excluded_persons) == (True, person, person)
    approved = AuditEntry.objects.get(event="issuance.approved")
    assert json.loads(bytes(approved.body))["details"]["host_user"] == act.host_user
    assert json.loads(bytes(approved.body))["channel"] == "command_line"


@override_settings(APPROVALS_NEEDED={"sandbox": 0, "production": 2})
def test_issue_key_that_takes_two_approvals_leaves_them_to_the_console(seeded: Any) -> None:
    """One of two approvers cannot claim the other on a command line."""
    with pytest.raises(CommandError, match="Each approver approves it in the console"):
        issue("production")
    request = IssuanceRequest.objects.get()
    assert (request.state, request.approvals.count(), BreakGlass.objects.count()) == ("pending", 0, 0)


def test_rotation_is_requested_shown_and_collected_once(seeded: Any) -> None:
    issued = issue()
    begun = run(
        "rotate_key",
        *("--credential", issued["credential_id"], "--requested-by", "tam", "--approved-by", "approver"),
        *("--proof", "ack", "--quiet-seconds", "1", "--quarantine-seconds", "1"),
    )
    assert set(begun) == {"rotation_id", "state"}
    advance_rotation(begun["rotation_id"])
    shown = run("show_rotation", begun["rotation_id"])
    assert shown["state"] == "awaiting_proof"
    assert shown["predecessor_key_id"] == issued["key_id"]
    assert isinstance(shown["evidence"], list)
    collected = run("collect_key", "--rotation", begun["rotation_id"], "--by", "tam", "--reveal")
    assert collected["key_id"] == shown["replacement_key_id"]
    assert collected["key_id"] in collected["key"]
    with pytest.raises(CommandError, match="already"):
        run("collect_key", "--rotation", begun["rotation_id"], "--by", "tam", "--reveal")


def test_rotate_key_whose_approval_is_refused_leaves_no_open_rotation(seeded: Any) -> None:
    issued = issue("production")
    arguments = ["--credential", issued["credential_id"], "--requested-by", "admin"]
    with pytest.raises(CommandError, match="second person"):
        run("rotate_key", *arguments, "--approved-by", "admin")
    assert run("rotate_key", *arguments, "--approved-by", "approver")["state"] == "scheduled"


def test_revoke_key_repeated_answers_the_same(seeded: Any) -> None:
    issued = issue()
    arguments = ("revoke_key", issued["key_id"], "--reason", "superseded", "--by", "admin")
    first = run(*arguments)
    assert first["state"] == "deactivated"
    assert first["sequence"] > 0
    assert run(*arguments) == first
    assert run("show_key", issued["key_id"])["state"] == "deactivated"
    with pytest.raises(CommandError, match="permission_missing"):
        run("revoke_key", issued["key_id"], "--reason", "superseded", "--by", "auditor")


def test_revoke_key_with_wait_answers_with_the_receipt(seeded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code is 0 also with an incomplete receipt: the key is revoked."""
    issued = issue()
    arguments = ("revoke_key", issued["key_id"], "--reason", "superseded", "--by", "admin", "--wait")
    verifier = make_verifier()
    assert run(*arguments, "0")["receipt"]["complete"] is False
    sequence = run(*arguments, "0")["sequence"]
    monkeypatch.setattr(receipts, "sleep", lambda seconds: confirm(verifier, sequence))
    answer = run(*arguments, "5")
    assert (answer["receipt"]["sequence"], answer["receipt"]["complete"]) == (sequence, True)
    assert [row["state"] for row in answer["receipt"]["verifiers"]] == ["confirmed"]
    output_text = run_text(*arguments, "0")
    assert "receipt: complete" in output_text
    assert "verifier-1: confirmed, 20" in output_text


def test_collect_key_by_request_is_for_its_requester_once(seeded: Any) -> None:
    issued = issue()
    arguments = ("collect_key", "--request", issued["issuance_request_id"], "--reveal", "--by")
    with pytest.raises(CommandError, match="person who requested"):
        run(*arguments, "admin")
    assert run(*arguments, "tam")["key_id"] == issued["key_id"]
    with pytest.raises(CommandError, match="already"):
        run(*arguments, "tam")


def test_issue_key_with_an_unknown_approver_is_refused_where_none_is_needed(seeded: Any) -> None:
    """A mistyped name is an error before anything is requested."""
    requests_before = IssuanceRequest.objects.count()
    with pytest.raises(CommandError, match="nosuch"):
        issue("sandbox", "--approved-by", "nosuch")
    assert IssuanceRequest.objects.count() == requests_before


def test_create_service_token_reveals_only_when_asked(seeded: Any) -> None:
    arguments = ("create_service_token", "gateway", "--environment", "all", "--permission", "keys:verify")
    assert "token" not in run(*arguments)
    shown = run(*arguments, "--reveal")
    assert shown["key_id"] in shown["token"]
    with pytest.raises(CommandError, match="no merchant"):
        run(*arguments, "--merchant", "nobody")


def test_create_service_token_is_a_probe_only_when_asked(seeded: Any) -> None:
    arguments = ("create_service_token", "probe", "--environment", "all", "--permission", "keys:verify")
    assert run(*arguments)["is_probe"] is False
    assert run(*arguments, "--probe")["is_probe"] is True


def test_audit_verify_counts_and_is_intact(seeded: Any) -> None:
    issue()
    answer = run("audit_verify")
    assert set(answer.pop("checkpoints")) == {"sandbox", "production", "service"}
    assert answer == {"entries": AuditEntry.objects.count(), "intact": True, "first_broken": None, "unsigned": None}


def test_catalog_lists_every_endpoint_of_the_contract() -> None:
    names = {endpoint["name"] for endpoint in run("show_catalog")["endpoints"]}
    assert names == {
        "orders.retrieve",
        "orders.create",
        "client.configuration",
        "customer_tokens.create",
        "customer_tokens.revoke",
        "customers.me",
        "credentials.acknowledge",
        "credentials.replacement",
        "credentials.recipient_key",
        "credentials.revoke_self",
    }


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["show_catalog", "--json"], 0),
        (["show_key", "nobody", "--json"], 1),
        (["revoke_key", "x", "--reason", "superseded", "--by", "nobody"], 1),
        (["issue_key"], 2),
        (["revoke_key", "x", "--reason", "because", "--by", "tam"], 2),
        (["revoke_key", "x", "--reason", "superseded", "--by", "tam", "--wait", "-1"], 2),
        (["revoke_key", "x", "--reason", "superseded", "--by", "tam", "--wait", "soon"], 2),
    ],
)
def test_command_exit_code_distinguishes_refusal_from_usage_error(
    arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = run_command_line(*arguments)
    output = capsys.readouterr()
    assert ended == code, output.err
    assert "Traceback" not in output.err
    if code:
        assert output.out == ""
        assert output.err


@pytest.mark.django_db(transaction=True)
def test_command_refusal_is_the_exit_code_of_its_process() -> None:
    done = subprocess.run(
        [sys.executable, "manage.py", "show_key", "nobody", "--json"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert done.stderr
    assert "Traceback" not in done.stderr


def test_create_service_token_for_both_environments_serves_both(seeded: Any) -> None:
    """`--environment` is repeatable: no named environment is silently dropped."""
    arguments = [
        "create_service_token",
        "gateway",
        "--environment",
        "sandbox",
        "--permission",
        "keys:verify",
        "--reveal",
    ]
    assert "_svc_sbx_" in run(*arguments)["token"]
    assert "_svc_all_" in run(*arguments, "--environment", "production")["token"]


def test_command_error_repeats_no_key_string(seeded: Any) -> None:
    """A whole key pasted in place of an id is not printed."""
    key = issue("sandbox", "--reveal")["key"]
    with pytest.raises(CommandError) as refused:
        run("show_key", key)
    assert key not in str(refused.value)
