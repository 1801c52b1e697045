"""Operators on the host's command line: listed, disabled, changed; Django's own commands are refused."""

import base64
import io
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError
from django.test import Client
from pytest_django import Settings

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST
from keyvault.access.roles import Role
from keyvault.access.scopes import EVERYWHERE, NOWHERE, AccessScope
from keyvault.domain.plaintext import Plaintext
from keyvault.management import json_command
from keyvault.management.service import lock_data_folder
from keyvault.models import AuditEntry, BreakGlass, Key, Notice, Operator, OperatorChange
from keyvault.models.recording import collect_subjects
from keyvault.services.sessions.invitations import prepare_sign_in
from keyvault.services.sessions.second_factors import FactorAttempt, check_code, totp_code
from tests.admin.desk import browser
from tests.factories import PASSWORD, SANDBOX, grant, have_peppers, make_merchant, make_operator, make_token

from .command_line import run_command_line

ROOT = Path(__file__).resolve().parent.parent.parent
NEW = "another long pass phrase"

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def administrator() -> None:
    make_operator("admin", Role.KEY_ADMINISTRATOR)


def run(*arguments: str) -> Any:
    output = io.StringIO()
    call_command(*arguments, "--json", stdout=output)
    return json.loads(output.getvalue())


def type_in(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{line}\n"))


def details_of(event: str) -> dict[str, Any]:
    body = json.loads(bytes(AuditEntry.objects.get(event=event).body))
    assert body["actor"] == "system:host"
    assert body["details"].pop("host_user")
    found: dict[str, Any] = body["details"]
    return found


def signs_in(username: str, password: str) -> bool:
    return Client().post("/admin/login/", {"username": username, "password": password}).status_code == 302


@pytest.mark.database
def test_disable_operator_ends_sessions_and_sign_in_immediately() -> None:
    """A disabled operator is signed out of every browser with the next request and cannot sign in again."""
    tam = make_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER)
    browsers = [browser(tam), browser(tam)]
    assert [each.get("/admin/").status_code for each in browsers] == [200, 200]
    assert run("disable_operator", "tam") == {"username": "tam", "is_active": False}
    assert [each.get("/admin/").status_code for each in browsers] == [302, 302]
    assert not signs_in("tam", PASSWORD)
    assert details_of("operator.disabled") == {"username": "tam", "sessions_ended": 2}
    with pytest.raises(CommandError, match=r"is disabled\. Create a new one"):
        run("disable_operator", "tam")


def test_disabled_operator_enabled_by_a_stray_write_regains_no_session() -> None:
    """Sessions are ended, not suspended: an old cookie stays invalid whatever happens to the row later."""
    client = browser(make_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER))
    run("disable_operator", "tam")
    row = Operator.objects.get(username="tam")
    with collect_subjects():
        row.swap_beside({}, is_active=True)
    assert client.get("/admin/").status_code == 302


def test_end_operator_sessions_of_one_of_the_last_two_approving_persons() -> None:
    """Guarantee: every operator can be signed out, one of the last two approving persons too."""
    approver = make_operator("approver", Role.APPROVER)
    client = browser(approver)
    assert client.get("/admin/").status_code == 200
    assert run("end_operator_sessions", "approver") == {"username": "approver"}
    assert client.get("/admin/").status_code == 302
    assert details_of("operator.sessions_ended") == {"username": "approver", "sessions_ended": 1}


@pytest.mark.parametrize(
    "arguments", [["disable_operator", "admin"], ["set_operator_roles", "admin", "--role", "auditor"]]
)
def test_last_administrator_is_not_disabled(arguments: list[str]) -> None:
    """The installation always keeps an active administrator."""
    make_operator("approver", Role.APPROVER)
    with pytest.raises(
        CommandError, match=r"the last active one with the role key_administrator .* Make another operator"
    ):
        run(*arguments)
    row = Operator.objects.get(username="admin")
    assert row.is_active
    assert row.roles == {Role.KEY_ADMINISTRATOR}
    assert not AuditEntry.objects.filter(event__in=["operator.disabled", "operator.roles_changed"]).exists()
    make_operator("second", Role.KEY_ADMINISTRATOR)
    run(*arguments)
    with pytest.raises(CommandError, match="the last active one"):
        run("disable_operator", "second")


def test_set_operator_roles_replaces_them_and_ends_sessions() -> None:
    """No session continues with roles that were removed."""
    client = browser(make_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER, Role.AUDITOR))
    answer = {"username": "tam", "roles": ["incident_responder"]}
    assert run("set_operator_roles", "tam", "--role", "incident_responder") == answer
    assert Operator.objects.get(username="tam").roles == {Role.INCIDENT_RESPONDER}
    assert client.get("/admin/").status_code == 302
    assert signs_in("tam", PASSWORD)
    old, new = ["auditor", "technical_account_manager"], ["incident_responder"]
    changed = {"username": "tam", "old": old, "new": new, "sessions_ended": 1}
    assert details_of("operator.roles_changed") == changed
    run("set_operator_roles", "tam", "--role", "incident_responder")
    assert AuditEntry.objects.filter(event="operator.roles_changed").count() == 1


BY_TWO = ("--requested-by", "admin", "--approved-by", "approver", "--reason", "joins the approvers")


def test_set_operator_roles_adds_an_approving_role_with_two_operators_only() -> None:
    """A shell that adds an approver names two operators, and their approval is reviewed in the console."""
    make_operator("approver", Role.APPROVER)
    make_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER)
    wanted = ("set_operator_roles", "tam", "--role", "approver")
    with pytest.raises(CommandError, match="requires two operators"):
        run(*wanted)
    answer = run(*wanted, *BY_TWO)
    assert (answer["state"], answer["roles"]) == ("applied", ["approver"])
    act = BreakGlass.objects.get()
    assert (act.subject, act.is_claimed, act.operator.username) == (answer["change_id"], True, "approver")


@pytest.mark.parametrize(
    "command", [("set_operator_roles", "tam", "--role", "approver"), ("reset_operator_factors", "tam")]
)
def test_change_of_an_operator_without_an_approver_leaves_no_request(command: tuple[str, ...]) -> None:
    """Guarantee: a command's request in another's name is withdrawn, so that its author cannot approve it later."""
    make_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER)
    with pytest.raises(CommandError, match="Name the approver with --approved-by"):
        run(*command, "--requested-by", "admin", "--reason", "why")
    assert OperatorChange.objects.get().state == "withdrawn"
    assert Operator.objects.get(username="tam").roles == {Role.TECHNICAL_ACCOUNT_MANAGER}


@pytest.mark.parametrize(
    ("approver", "why"), [("admin", "second person"), ("tam", "permission"), ("approver-too", "your own operator")]
)
def test_set_operator_roles_whose_approval_is_refused_leaves_no_request(approver: str, why: str) -> None:
    tam = make_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER)
    make_operator("approver-too", Role.APPROVER, person=tam.person)
    asked = ("--requested-by", "admin", "--approved-by", approver, "--reason", "why")
    with pytest.raises(CommandError, match=why):
        run("set_operator_roles", "tam", "--role", "approver", *asked)
    assert OperatorChange.objects.get().state == "withdrawn"
    assert Operator.objects.get(username="tam").roles == {Role.TECHNICAL_ACCOUNT_MANAGER}


def test_reset_operator_factors_requires_two_operators() -> None:
    make_operator("approver", Role.APPROVER)
    client = browser(make_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER))
    with pytest.raises(CommandError, match="requires two operators"):
        run("reset_operator_factors", "tam")
    assert client.get("/admin/").status_code == 200
    assert run("reset_operator_factors", "tam", *BY_TWO)["state"] == "applied"
    assert client.get("/admin/").status_code == 302


def test_review_access_prints_csv_and_json() -> None:
    """What an operator does in a command counts as a use of its role."""
    make_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER)
    run("set_operator_roles", "tam", "--role", "auditor", "--requested-by", "admin")
    lines = {line["username"]: line for line in run("review_access")["lines"]}
    assert lines["tam"]["role"] == "auditor"
    assert (lines["admin"]["role_last_used_at"] is None, lines["tam"]["role_last_used_at"]) == (False, None)
    output = io.StringIO()
    call_command("review_access", stdout=output)
    first, *rest = output.getvalue().splitlines()
    assert first.startswith("username,person,state,")
    assert len(rest) == 2


def test_list_operators_prints_each_on_one_line() -> None:
    make_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER)
    output = io.StringIO()
    call_command("list_operators", stdout=output)
    _, *lines = output.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines] == ["  - username admin", "  - username tam"]
    assert "roles technical_account_manager, " in lines[1]


def test_reset_operator_password_reads_it_and_ends_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    client = browser(make_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER))
    type_in(monkeypatch, NEW)
    assert run("reset_operator_password", "tam") == {"username": "tam"}
    assert client.get("/admin/").status_code == 302
    assert not signs_in("tam", PASSWORD)
    assert signs_in("tam", NEW)
    assert details_of("operator.password_reset") == {"username": "tam", "sessions_ended": 1}


@pytest.mark.database
def test_reset_operator_password_reveals_a_random_one_once() -> None:
    make_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER)
    password = run("reset_operator_password", "tam", "--reveal")["password"]
    assert signs_in("tam", password)
    assert password not in json.dumps(details_of("operator.password_reset"))


def test_reset_operator_password_of_a_disabled_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new password does not re-enable a disabled operator."""
    make_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER)
    run("disable_operator", "tam")
    type_in(monkeypatch, NEW)
    with pytest.raises(CommandError, match="is disabled"):
        run("reset_operator_password", "tam")


def test_invite_operator_creates_one_that_only_the_link_lets_in() -> None:
    make_merchant("acme")
    answer = run("invite_operator", "new", "--role", "auditor", "--role", "incident_responder", "--merchant", "acme")
    assert answer.keys() == {"username", "enrolment_url"}
    row = Operator.objects.get(username="new")
    assert row.roles == {Role.AUDITOR, Role.INCIDENT_RESPONDER}
    assert row.access_scope == AccessScope(frozenset({"acme"}))
    assert not row.has_usable_password()
    parts = urlsplit(answer["enrolment_url"])
    assert (parts.hostname, parts.path) == ("localhost", "/admin/invitation/")
    assert Client().get(f"{parts.path}?{parts.query}").status_code == 200
    assert details_of("operator.invited")["username"] == "new"
    alarm = Notice.objects.get(kind="operator.invited")
    assert (alarm.subject, alarm.is_alarm) == ("new", True)


@pytest.mark.parametrize("variable", [None, "KEYVAULT_ORIGIN", "KEYVAULT_CONSOLE_ORIGIN"])
def test_invite_operator_names_the_default_origin_of_its_link(
    variable: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server at another port, such as that of `run --port`, does not answer the link."""
    monkeypatch.delenv("KEYVAULT_ORIGIN", raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "https://keys.example")
    run("invite_operator", "new", "--role", "auditor", "--all")
    is_hinted = "KEYVAULT_ORIGIN is not set, so the link is for http://localhost:8000" in capsys.readouterr().err
    assert is_hinted is (variable is None)


def test_invite_operator_beside_a_running_service_links_to_its_port(
    monkeypatch: pytest.MonkeyPatch, settings: Settings, tmp_path: Path
) -> None:
    monkeypatch.delenv("KEYVAULT_ORIGIN", raising=False)
    settings.DATA_DIR = tmp_path
    with lock_data_folder(8123):
        url = run("invite_operator", "new", "--role", "auditor", "--all")["enrolment_url"]
        assert url.startswith("http://localhost:8123/admin/invitation/?token=")
    url = run("invite_operator", "new")["enrolment_url"]
    assert url.startswith("http://localhost:8000/")


@pytest.mark.parametrize("role", ["approver", "key_administrator"])
def test_invite_operator_makes_no_approver_from_one_shell(role: str, settings: Settings) -> None:
    """Guarantee: beyond the first two approving persons, the command leads to the change under four eyes."""
    settings.IS_VAULT = True
    run("invite_operator", "approver", "--role", "approver", "--all")
    with pytest.raises(CommandError, match=r"A second person must approve .* with another role, such as auditor"):
        run("invite_operator", "new", "--role", role, "--all")
    assert not Operator.objects.filter(username="new").exists()
    run("invite_operator", "new", "--role", "auditor", "--all")
    assert run("set_operator_roles", "new", "--role", role, *BY_TWO)["roles"] == [role]
    assert BreakGlass.objects.get().is_claimed


def test_invite_operator_on_the_embedded_backend_gives_every_role() -> None:
    """The host's owner holds every secret there. The alarm remains."""
    for name in ("one", "two", "three"):
        run("invite_operator", name, "--role", "approver")
    row = Operator.objects.get(username="three")
    assert (row.roles, row.access_scope) == (frozenset({Role.APPROVER}), EVERYWHERE)
    assert Notice.objects.filter(kind="operator.invited", is_alarm=True, subject="three").exists()


def test_invite_operator_without_a_clear_scope_is_refused() -> None:
    with pytest.raises(CommandError, match="give --all, or --merchant, --environment or both"):
        run("invite_operator", "new", "--role", "auditor", "--all", "--merchant", "acme")
    with pytest.raises(CommandError, match="are for a new operator"):
        run("invite_operator", "admin", "--all")
    assert not Operator.objects.filter(username="new").exists()


@pytest.mark.database
def test_invite_operator_reveals_a_sign_in_that_works_at_once() -> None:
    answer = run("invite_operator", "new", "--role", "auditor", "--all", "--reveal")
    client = Client()
    assert client.post("/admin/login/", {"username": "new", "password": answer["password"]}).status_code == 302
    code = totp_code(Plaintext(answer["totp_secret"]), datetime.now(UTC))
    assert client.post("/admin/second-factor/", {"second_factor_code": code})["Location"] == "/admin/"
    assert client.get("/admin/").status_code == 200
    link = urlsplit(answer["enrolment_url"])
    assert Client().get(f"{link.path}?{link.query}").status_code == 404, "the sign-in ends the invitation"


def test_invite_operator_again_only_without_a_second_factor() -> None:
    """A second invitation replaces the first one, and never a second factor."""
    first = run("invite_operator", "new", "--role", "auditor", "--all")["enrolment_url"]
    second = run("invite_operator", "new")["enrolment_url"]
    statuses = [Client().get(url.partition("8000")[2]).status_code for url in (first, second)]
    assert statuses == [404, 200]
    prepare_sign_in(grant(HOST, P.OPERATORS_ENROLL), Operator.objects.get(username="new"))
    with pytest.raises(CommandError, match="Reset its second factors first"):
        run("invite_operator", "new")
    with pytest.raises(CommandError, match="already exists"):
        run("invite_operator", "new", "--role", "auditor", "--all")


def test_show_totp_code_prints_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """RFC 6238, appendix B: the seed of the test vectors, whose codes have eight digits there."""
    seed = base64.b32encode(b"12345678901234567890").decode()
    type_in(monkeypatch, seed)
    at = datetime.fromtimestamp(59, UTC)
    monkeypatch.setattr("keyvault.management.json_command.datetime", mock.Mock(now=lambda zone: at))
    assert run("show_totp_code") == {"code": "287082"}
    type_in(monkeypatch, "not Base32!")
    with pytest.raises(CommandError, match="Base32"):
        run("show_totp_code")


@pytest.mark.parametrize("arguments", [["disable_operator"], ["set_operator_roles", "--role", "auditor"]])
def test_unknown_operator_is_refused_by_name(arguments: list[str]) -> None:
    with pytest.raises(CommandError, match=r"There is no operator nobody\. `manage\.py list_operators` lists them"):
        run(arguments[0], "nobody", *arguments[1:])


def test_list_operators_shows_roles_state_and_last_sign_in_without_hash() -> None:
    make_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER)
    before = datetime.now(UTC)
    row = Operator.objects.get(username="admin")
    seed = prepare_sign_in(grant(HOST, P.OPERATORS_ENROLL), row).totp_seed
    check_code(FactorAttempt(row, None), totp_code(seed, before), before)
    run("disable_operator", "tam")
    admin, tam = run("list_operators")["operators"]
    assert (admin["username"], admin["roles"], admin["is_active"]) == ("admin", ["key_administrator"], True)
    assert datetime.fromisoformat(admin["last_sign_in_at"]) == before
    assert (tam["roles"], tam["is_active"], tam["last_sign_in_at"]) == (["technical_account_manager"], False, None)
    output = io.StringIO()
    call_command("list_operators", stdout=output)
    assert "pbkdf2" not in output.getvalue()


@pytest.mark.parametrize(
    ("command", "ours"),
    [
        ("changepassword", "reset_operator_password"),
        ("createsuperuser", "invite_operator"),
        ("flush", "setup"),
        ("loaddata", "replay_revocations"),
    ],
)
def test_django_command_that_bypasses_the_services_is_refused(
    command: str, ours: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """No command line bypasses the audit log; the refusal is one line, exits with 2, and names the command to run."""
    assert run_command_line(command, "--no-input") == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"{command} is refused: ")
    assert f"manage.py {ours}" in output.err
    assert output.err.count("\n") == 1


@pytest.mark.parametrize("entry", [["manage.py"], ["-m", "django"]], ids=" ".join)
def test_django_command_is_refused_by_each_program(entry: list[str], tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "KEYVAULT_DATA_DIR": str(tmp_path),
        "DJANGO_SETTINGS_MODULE": "keyvault.project.settings",
    }
    done = subprocess.run(
        [sys.executable, *entry, "flush", "--no-input"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("flush is refused: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.database
def test_command_prints_its_answer_although_the_use_of_a_role_is_not_recorded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A string that is shown once is not lost, and an act that is done is not reported as failed."""
    make_merchant("acme")
    have_peppers()

    def fail(*_: object) -> None:
        raise OperationalError("disk full")

    monkeypatch.setattr(json_command, "write_uses", fail)
    arguments = ("--merchant", "acme", "--environment", "sandbox", "--kind", "private", "--requested-by", "admin")
    assert run("issue_key", *arguments, "--reveal")["key"]
    assert "was not recorded: disk full" in capsys.readouterr().err


# --- scope ----------------------------------------------------------------------------------------------------


def test_set_operator_scope_narrows_it_and_ends_sessions() -> None:
    make_merchant("acme")
    client = browser(make_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER))
    answer = run("set_operator_scope", "tam", "--environment", "production")
    assert answer == {"username": "tam", "merchants": None, "environments": ["production"]}
    assert client.get("/admin/").status_code == 302
    details = details_of("operator.scope_changed")
    assert (details["username"], details["new"]) == ("tam", {"merchants": None, "environments": ["production"]})
    assert run("list_operators")["operators"][1]["environments"] == ["production"]
    answer = run("set_operator_scope", "tam", "--merchant", "acme", "--environment", "production")
    assert answer == {"username": "tam", "merchants": ["acme"], "environments": ["production"]}


def test_set_operator_scope_widens_it_with_two_operators_only() -> None:
    make_merchant("acme")
    make_operator("approver", Role.APPROVER)
    make_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER, scope=AccessScope(frozenset({"acme"})))
    with pytest.raises(CommandError, match="requires two operators"):
        run("set_operator_scope", "tam", "--all")
    with pytest.raises(CommandError, match="Name the approver"):
        run("set_operator_scope", "tam", "--all", "--requested-by", "admin", "--reason", "why")
    answer = run("set_operator_scope", "tam", "--all", *BY_TWO)
    assert (answer["state"], answer["merchants"]) == ("applied", None)
    act = BreakGlass.objects.get()
    assert (act.subject, act.is_claimed) == (answer["change_id"], True)


def test_set_operator_scope_links_a_new_operator_to_its_person() -> None:
    tam = make_operator("tam", Role.APPROVER)
    make_operator("second", Role.APPROVER)
    make_operator("tam-sso", Role.TECHNICAL_ACCOUNT_MANAGER, scope=NOWHERE)
    wanted = ("set_operator_scope", "tam-sso", "--all", "--same-person-as", "tam", "--requested-by", "admin")
    with pytest.raises(CommandError, match="your own operator"):
        run(*wanted, "--approved-by", "tam", "--reason", "why")
    assert Operator.objects.get(username="tam-sso").person != tam.person
    run(*wanted, "--approved-by", "second", "--reason", "why")
    assert Operator.objects.get(username="tam-sso").person == tam.person


@pytest.mark.parametrize("options", [[], ["--all", "--merchant", "acme"], ["--all", "--environment", "sandbox"]])
def test_set_operator_scope_without_a_clear_choice_is_refused(options: list[str]) -> None:
    """An omitted option never widens a scope."""
    with pytest.raises(CommandError, match="give --all, or --merchant, --environment or both"):
        run("set_operator_scope", "admin", *options)


def test_set_operator_scope_names_unknown_merchants_and_missing_permission() -> None:
    make_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER)
    with pytest.raises(CommandError, match="there is no merchant absent"):
        run("set_operator_scope", "tam", "--merchant", "absent")
    with pytest.raises(CommandError, match="permission_missing"):
        run("set_operator_scope", "tam", "--environment", "sandbox", "--requested-by", "tam")


OUTSIDE = {
    "an account": "add_webhook --merchant acme --environment sandbox --url https://acme.example/ --by limited",
    "the other environment": "add_webhook --merchant globex --environment production --url https://x.example/ "
    "--by limited",
    "a request": "issue_key --merchant acme --environment sandbox --kind private --requested-by limited",
    "an approval": "issue_key --merchant globex --environment production --kind private --requested-by wide "
    "--approved-by limited",
    "a limit": "set_limit --merchant acme --environment sandbox --rate 1 --per-seconds 1 --by limited",
    "a limit of all": "set_limit --environment sandbox --endpoint orders.create --rate 1 --per-seconds 1 --by limited",
    "a token": "create_service_token gw --environment sandbox --permission keys:read --by limited",
    "a merchant": "offboard_merchant globex --why ended --yes --by limited",
    "a schedule of all": "set_schedule --environment sandbox --cryptoperiod-days 90 --by limited",
    "a campaign of all": "rotate_campaign --environment sandbox --requested-by limited",
    "a campaign": "rotate_campaign --environment sandbox --merchant acme --requested-by limited",
    "the audit log": "accept_audit_rollback --by wide --approved-by limited --reason restored",
    "the revocation log": "replay_revocations --accept-loss --by wide --approved-by limited --reason lost",
}
"""Commands in the name of `limited`, whose scope is globex/sandbox."""


@pytest.mark.parametrize("arguments", OUTSIDE.values(), ids=OUTSIDE)
def test_command_of_an_operator_outside_of_the_scope_is_refused(arguments: str) -> None:
    """Guarantee: the command line has the same scope as the console."""
    for name in ("acme", "globex"):
        make_merchant(name)
    make_operator("wide", *Role)
    make_operator("limited", *Role, scope=AccessScope(frozenset({"globex"}), frozenset({SANDBOX})))
    entries = AuditEntry.objects.exclude(event__startswith="issuance.").count()
    with pytest.raises(CommandError, match=r"not_found|permission_missing"):
        run(*arguments.split())
    assert AuditEntry.objects.exclude(event__startswith="issuance.").count() == entries
    assert not Key.objects.exists()


def test_command_of_an_operator_within_the_scope_succeeds() -> None:
    make_merchant("globex")
    have_peppers()
    make_operator("limited", *Role, scope=AccessScope(frozenset({"globex"}), frozenset({SANDBOX})))
    account = ("--merchant", "globex", "--environment", "sandbox")
    run("add_webhook", *account, "--url", "https://globex.example/", "--by", "limited")
    run("issue_key", *account, "--kind", "private", "--requested-by", "limited")
    token = run("create_service_token", "gw", *account, "--permission", "keys:read", "--by", "limited")
    run("revoke_service_token", token["key_id"], "--by", "limited")
    wide, _ = make_token()
    with pytest.raises(CommandError, match="permission_missing"):
        run("revoke_service_token", wide.pk, "--by", "limited")
