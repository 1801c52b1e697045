"""Service tokens on the command line: rotated with an overlap, revoked immediately, printed only with --reveal."""

import io
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from keyvault.access.roles import Role
from keyvault.models import AuditEntry, ServiceToken
from keyvault.services.keys.records import prove_service_token
from tests.factories import make_operator, make_token, now

pytestmark = pytest.mark.django_db


def run(*arguments: str) -> Any:
    output = io.StringIO()
    call_command(*arguments, "--json", stdout=output)
    lines = output.getvalue().splitlines()
    assert len(lines) == 1
    return json.loads(lines[0])


def rotate(token: ServiceToken, *more: str, hours: int = 24) -> Any:
    return run("rotate_service_token", token.token_id, "--overlap-hours", str(hours), *more)


@pytest.mark.database
def test_rotate_service_token_answers_with_both_tokens_and_reveals_on_request() -> None:
    token, old = make_token()
    answer = rotate(token, "--reveal")
    assert set(answer) == {"key_id", "token", "expires_at", "predecessor_key_id", "predecessor_expires_at"}
    assert answer["predecessor_key_id"] == token.token_id
    ends_at = datetime.fromisoformat(answer["predecessor_expires_at"])
    assert abs(ends_at - now() - timedelta(hours=24)) < timedelta(minutes=5)
    for text in (answer["token"], old.reveal()):
        assert prove_service_token(text, datetime.now(UTC)) is not None
    assert answer["key_id"] in answer["token"]
    assert prove_service_token(old.reveal(), ends_at) is None


def test_service_token_created_without_reveal_is_not_printed_and_warns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    token, _ = make_token()
    arguments = ("create_service_token", "gateway", "--environment", "sandbox", "--permission", "keys:verify")
    for command in (("rotate_service_token", token.token_id, "--overlap-hours", "1"), arguments):
        assert "token" not in run(*command)
        assert "without --reveal: this token can never be read" in capsys.readouterr().err
    run(*arguments, "--reveal")
    assert capsys.readouterr().err == ""


def test_service_token_caps_its_readers_and_their_staleness() -> None:
    """Without options: 64 readers, 10 seconds. A rotation keeps what was chosen."""
    arguments = ("create_service_token", "gateway", "--environment", "sandbox", "--permission", "keys:replicate")
    plain = ServiceToken.objects.get(pk=run(*arguments)["key_id"])
    assert (plain.max_readers, plain.max_staleness_seconds) == (64, 10)
    token = ServiceToken.objects.get(pk=run(*arguments, "--max-readers", "3", "--max-staleness", "20")["key_id"])
    assert (token.max_readers, token.max_staleness_seconds) == (3, 20)
    successor = ServiceToken.objects.get(pk=rotate(token)["key_id"])
    assert (successor.max_readers, successor.max_staleness_seconds) == (3, 20)


@pytest.mark.parametrize(
    ("option", "accepted"), [("--max-readers", (1, 10_000)), ("--max-staleness", (4, 60))], ids=["readers", "staleness"]
)
def test_service_token_with_a_cap_out_of_bounds_is_refused(option: str, accepted: tuple[int, int]) -> None:
    arguments = ("create_service_token", "gateway", "--environment", "sandbox", "--permission", "keys:replicate")
    least, most = accepted
    for value in accepted:
        run(*arguments, option, str(value))
    for value in (least - 1, most + 1):
        with pytest.raises(CommandError, match=f"{least} to {most}"):
            run(*arguments, option, str(value))
    assert ServiceToken.objects.count() == 2


def test_rotate_service_token_is_recorded_with_operator_and_host_user() -> None:
    """A command line proves no identity: the entry names the operator and the host's user."""
    admin = make_operator("admin", Role.KEY_ADMINISTRATOR)
    token, _ = make_token()
    answer = rotate(token, "--by", "admin")
    assert ServiceToken.objects.get(pk=answer["key_id"]).creator_person == admin.person
    entry = json.loads(bytes(AuditEntry.objects.get(event="service_token.rotated").body))
    assert entry["actor"] == "operator:admin"
    assert entry["details"]["host_user"]


@pytest.mark.parametrize("command", ["rotate_service_token", "revoke_service_token"])
def test_service_token_command_refuses_missing_permission_and_unknown_token(command: str) -> None:
    make_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER)
    token, text = make_token()
    more = ["--overlap-hours", "1"] if command.startswith("rotate") else []
    with pytest.raises(CommandError, match="permission_missing"):
        run(command, token.token_id, "--by", "tam", *more)
    with pytest.raises(CommandError, match="not_found"):
        run(command, "0" * 16, *more)
    assert prove_service_token(text.reveal(), now()) is not None


@pytest.mark.parametrize("hours", [-1, 169])
def test_rotate_service_token_with_an_overlap_out_of_bounds_is_refused(hours: int) -> None:
    token, _ = make_token()
    with pytest.raises(CommandError, match="/overlap_hours: 0 to 168"):
        rotate(token, hours=hours)


def test_revoke_service_token_is_effective_immediately() -> None:
    """The token is refused immediately; a second revocation is refused."""
    token, text = make_token()
    answer = run("revoke_service_token", token.token_id)
    assert (answer["key_id"], answer["state"]) == (token.token_id, "revoked")
    assert prove_service_token(text.reveal(), now()) is None
    with pytest.raises(CommandError, match="already revoked"):
        run("revoke_service_token", token.token_id)
    with pytest.raises(CommandError, match="revoked or expired"):
        rotate(token)
