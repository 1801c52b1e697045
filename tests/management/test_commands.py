"""The scripting commands: one JSON object, exit 0, 1 refused, 2 usage; material only when asked for, and once."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import override_settings

from keyvault.domain.environments import Environment
from keyvault.domain.keystring import parse_keystring
from keyvault.management.commands.run import _demo_curl
from keyvault.models import AuditEntry, BreakGlass, Credential, IssuanceRequest, Operator, ServiceToken
from keyvault.services.change_feed import receipts
from rotation.services.rotations.engine import advance_rotation
from tests.verifiers import confirm, make_verifier

ROOT = Path(__file__).resolve().parent.parent.parent

pytestmark = [pytest.mark.database, pytest.mark.django_db]


def run(*words: str) -> Any:
    output = io.StringIO()
    call_command(*words, "--json", stdout=output)
    lines = output.getvalue().splitlines()
    assert len(lines) == 1
    return json.loads(lines[0])


def tell(*words: str) -> str:
    output = io.StringIO()
    call_command(*words, stdout=output)
    return output.getvalue()


@pytest.fixture
def seeded() -> Any:
    return run("seed_demo")


def issue(environment: str = "sandbox", *more: str) -> Any:
    words = ["--merchant", "acme", "--environment", environment, "--kind", "private"]
    return run("issue_key", *words, "--requested-by", "tam", "--approved-by", "approver", *more)


def test_seed_demo_is_idempotent_and_makes_no_superuser(seeded: Any) -> None:
    assert run("seed_demo") == seeded
    assert {merchant["merchant_id"] for merchant in seeded["merchants"]} >= {"acme", "globex"}
    assert {operator["username"] for operator in seeded["operators"]} >= {"tam", "approver", "admin", "auditor"}
    assert {environment["name"] for environment in seeded["environments"]} == {"sandbox", "production"}
    assert not Operator.objects.filter(is_superuser=True).exists()


@pytest.mark.parametrize("served", list(Environment))
def test_demo_of_a_pinned_process_keeps_to_its_environment(served: Environment) -> None:
    """In production alone there is no demo key, no demo token, and a reason in place of the command to verify it."""
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


def test_issue_key_reveals_only_when_asked(seeded: Any) -> None:
    hidden = issue()
    assert "key" not in hidden
    shown = issue("sandbox", "--reveal")
    assert parse_keystring(shown["key"], "kv") is not None
    assert shown["key_id"] in shown["key"]
    assert shown["credential_id"] != hidden["credential_id"]


def test_issue_key_in_production_wants_two_names(seeded: Any) -> None:
    """The same name twice is refused, and leaves nothing behind that somebody could approve by mistake."""
    words = ["issue_key", "--merchant", "acme", "--environment", "production", "--kind", "private"]
    with pytest.raises(CommandError, match="second person"):
        run(*words, "--requested-by", "admin", "--approved-by", "admin")
    with pytest.raises(CommandError, match="second person"):
        run(*words, "--requested-by", "tam")
    with pytest.raises(CommandError, match="permission_missing"):
        run(*words, "--requested-by", "tam", "--approved-by", "auditor")
    assert set(IssuanceRequest.objects.values_list("state", flat=True)) == {"withdrawn"}
    assert not Credential.objects.exists()


def test_issue_key_in_production_is_break_glass_until_reviewed(seeded: Any) -> None:
    """A command line proves no identity: the approval stays in sight, with the host's user beside the operator."""
    issue("production")
    act = BreakGlass.objects.get()
    assert (act.event, act.reviewed_at) == ("issuance.approved", None)
    assert act.host_user
    assert act.requester_person == Operator.objects.get(username="tam").person, "who does not review it"
    approved = AuditEntry.objects.get(event="issuance.approved")
    assert json.loads(bytes(approved.body))["details"]["host_user"] == act.host_user
    assert json.loads(bytes(approved.body))["channel"] == "command_line"


def test_rotation_is_begun_shown_and_collected_once(seeded: Any) -> None:
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
    words = ["--credential", issued["credential_id"], "--requested-by", "admin"]
    with pytest.raises(CommandError, match="second person"):
        run("rotate_key", *words, "--approved-by", "admin")
    assert run("rotate_key", *words, "--approved-by", "approver")["state"] == "scheduled"


def test_revoke_key_answers_and_repeats(seeded: Any) -> None:
    issued = issue()
    words = ("revoke_key", issued["key_id"], "--reason", "superseded", "--by", "admin")
    first = run(*words)
    assert first["state"] == "deactivated"
    assert first["sequence"] > 0
    assert run(*words) == first
    assert run("show_key", issued["key_id"])["state"] == "deactivated"
    with pytest.raises(CommandError, match="permission_missing"):
        run("revoke_key", issued["key_id"], "--reason", "superseded", "--by", "auditor")


def test_revoke_key_that_waits_answers_with_the_receipt(seeded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Revoked either way: the exit is 0 with a receipt that is not complete too."""
    issued = issue()
    words = ("revoke_key", issued["key_id"], "--reason", "superseded", "--by", "admin", "--wait")
    verifier = make_verifier()
    assert run(*words, "0")["receipt"]["complete"] is False
    sequence = run(*words, "0")["sequence"]
    monkeypatch.setattr(receipts, "sleep", lambda seconds: confirm(verifier, sequence))
    answer = run(*words, "5")
    assert (answer["receipt"]["sequence"], answer["receipt"]["complete"]) == (sequence, True)
    assert [row["state"] for row in answer["receipt"]["verifiers"]] == ["confirmed"]
    told = tell(*words, "0")
    assert "receipt: complete" in told
    assert "verifier-1: confirmed, 20" in told


def test_collect_key_by_request_is_for_whoever_asked_and_once(seeded: Any) -> None:
    issued = issue()
    words = ("collect_key", "--request", issued["issuance_request_id"], "--reveal", "--by")
    with pytest.raises(CommandError, match="person who requested"):
        run(*words, "admin")
    assert run(*words, "tam")["key_id"] == issued["key_id"]
    with pytest.raises(CommandError, match="already"):
        run(*words, "tam")


def test_create_service_token_reveals_only_when_asked(seeded: Any) -> None:
    words = ("create_service_token", "gateway", "--environment", "all", "--permission", "keys:verify")
    assert "token" not in run(*words)
    shown = run(*words, "--reveal")
    assert shown["key_id"] in shown["token"]
    with pytest.raises(CommandError, match="no merchant"):
        run(*words, "--merchant", "nobody")


def test_create_service_token_for_probes_only_when_asked(seeded: Any) -> None:
    words = ("create_service_token", "probe", "--environment", "all", "--permission", "keys:verify")
    assert run(*words)["is_probe"] is False
    assert run(*words, "--probe")["is_probe"] is True


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
        "credentials.revoke_self",
    }


@pytest.mark.parametrize(
    ("words", "code"),
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
@pytest.mark.django_db(transaction=True)
def test_command_exit_code_tells_refused_from_misused(words: list[str], code: int) -> None:
    done = subprocess.run(
        [sys.executable, "manage.py", *words],
        cwd=ROOT,
        env={**os.environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    if code:
        assert done.stdout == ""
        assert done.stderr


def test_create_service_token_for_both_environments_serves_both(seeded: Any) -> None:
    """`--environment` is repeatable: none of those named is silently dropped."""
    words = ["create_service_token", "gateway", "--environment", "sandbox", "--permission", "keys:verify", "--reveal"]
    assert "_svc_sbx_" in run(*words)["token"]
    assert "_svc_all_" in run(*words, "--environment", "production")["token"]


def test_command_error_repeats_no_key_string(seeded: Any) -> None:
    """A whole key pasted where an id belongs is not printed again."""
    key = issue("sandbox", "--reveal")["key"]
    with pytest.raises(CommandError) as refused:
        run("show_key", key)
    assert key not in str(refused.value)
