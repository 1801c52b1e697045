"""The table of a plan's fields: the model has exactly these, and every entry point has the same bounds."""

import html
import re
from collections.abc import Callable
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import Client

from keyvault.access.permissions import SERVICE_PERMISSIONS
from keyvault.access.permissions import Permission as P
from keyvault.domain.environments import Environment
from keyvault.domain.errors import RequestInvalidError
from keyvault.domain.keys import KeyKind
from keyvault.domain.keystring import StringScope
from keyvault.models import Credential
from keyvault.services.recording.authorization import authorize
from rotation.admin.plan_fields import show_period
from rotation.admin.rotation_forms import RotationForm
from rotation.domain.plan_fields import FARTHEST, FIELDS, NUMBERS, SHARED_FIELDS, FieldType, PlanOverrides
from rotation.domain.policy import Plan
from rotation.models import Rotation
from rotation.services.rotations.planning import plan_rotation
from rotation.services.rotations.requests import request_rotation
from rotation.services.schedules.schedules import ScheduleDraft, ScheduleScope, save_schedule
from tests.admin.desk import address, browser, text_of
from tests.clocks import Clock
from tests.factories import make_token, now
from tests.rotation.campaigning import asked
from tests.rotation.scene import account, issue, tam

SANDBOX, PRODUCTION = Environment.SANDBOX, Environment.PRODUCTION
BOUNDED = [name for name, each in FIELDS.items() if each.type in NUMBERS | {FieldType.TEXT, FieldType.INSTANT}]
BOUNDED_NUMBERS = [name for name in BOUNDED if FIELDS[name].type in NUMBERS]

Request = Callable[[str, dict[str, Any]], str]
"""Request a rotation of a credential; the refusal, or an empty text."""


# --- the model ----------------------------------------------------------------------------------------------


def test_plan_has_exactly_the_fields_of_the_table() -> None:
    found = {"credential_id", "predecessor_key_id", "is_dormant", "late_sources"}
    assert {each.name for each in fields(Plan)} == {*found, *FIELDS}


@pytest.mark.parametrize("name", FIELDS)
def test_plan_field_has_a_label_a_help_sentence_and_bounds(name: str) -> None:
    field = FIELDS[name]
    assert field.label
    assert field.help.endswith(".")
    assert bool(field.unit) == (field.type in NUMBERS | {FieldType.TEXT, FieldType.NAMES})
    assert bool(field.choices) == (field.type in {FieldType.CHOICE, FieldType.CHANNELS})
    for environment in Environment if field.type in NUMBERS else ():
        assert field.least[environment] <= field.defaults.get(environment, field.most) <= field.most


def test_form_of_a_rotation_has_each_field_of_the_table_in_one_group() -> None:
    grouped = [name for group in RotationForm.groups for name in group.names]
    assert sorted(grouped) == sorted(set(grouped))
    assert {*RotationForm().fields} == {*grouped, "credential_id", "reason"}


# --- the bounds at every entry point ------------------------------------------------------------------------


def by_service(credential_id: str, values: dict[str, Any]) -> str:
    credential = Credential.objects.select_related("account__merchant").get(pk=credential_id)
    grant = authorize(tam(), P.ROTATIONS_WRITE, credential.account, now=now())
    try:
        request_rotation(grant, credential, PlanOverrides(**values))
    except RequestInvalidError as error:
        return "; ".join(fault.detail for fault in error.faults)
    return ""


def by_rest(credential_id: str, values: dict[str, Any]) -> str:
    _, token = make_token(*SERVICE_PERMISSIONS, scope=StringScope.ALL)
    sent = {name: value.isoformat() if isinstance(value, datetime) else value for name, value in values.items()}
    answer = Client().post(
        "/v1/rotations",
        {"credential_id": credential_id, **sent},
        content_type="application/json",
        headers={"authorization": f"Bearer {token.reveal()}", "idempotency-key": "one"},
    )
    if answer.status_code == 201:
        return ""
    assert (answer.status_code, answer.json()["code"]) == (400, "request_invalid")
    return "; ".join(fault["detail"] for fault in answer.json()["errors"])


def by_console(credential_id: str, values: dict[str, Any]) -> str:
    """As a browser sends it: a period as text, a time to the minute, a list in lines."""
    sent = {name: _as_typed(value) for name, value in values.items()}
    untouched = {"at_deadline": "stall", "reinstatement": "once", "time_zone": "UTC", "reason": "yearly"}
    answer = browser(tam()).post(
        address("rotation_rotation_request"), {**untouched, "credential_id": credential_id, **sent}
    )
    if answer.status_code == 302:
        return ""
    assert answer.status_code == 400
    listed = re.findall(r'<ul class="errorlist"[^>]*>(.*?)</ul>', text_of(answer), re.DOTALL)
    return html.unescape("; ".join(re.findall(r"<li>(.*?)</li>", " ".join(listed), re.DOTALL)))


def _as_typed(value: Any) -> str:
    if isinstance(value, list):
        return "\r\n".join(value)
    return f"{value:%Y-%m-%dT%H:%M}" if isinstance(value, datetime) else str(value)


def by_command(credential_id: str, values: dict[str, Any]) -> str:
    words = [
        f"--{name.replace('_', '-')}={each}"
        for name, value in values.items()
        for each in (value if isinstance(value, list) else [value])
    ]
    tam()
    try:
        call_command("rotate_key", f"--credential={credential_id}", "--requested-by=tam", "--json", *words)
    except CommandError as error:
        return str(error)
    return ""


REQUESTS: list[Request] = [by_service, by_rest, by_console, by_command]


def fresh_credential(name: str) -> str:
    """A credential that a plan with this field can be for."""
    kind = KeyKind.PUBLIC if name == "retire_at" else KeyKind.PRIVATE
    return issue(account(), now(), kind=kind)[0].credential_id


def accepted(name: str) -> list[dict[str, Any]]:
    """Both bounds, with whatever else such a plan needs."""
    field = FIELDS[name]
    if field.type is FieldType.TEXT:
        return [{name: "a"}, {name: "a" * field.most}]
    if field.type is FieldType.INSTANT:
        return [{name: minute(now() + FARTHEST - timedelta(minutes=5))}]
    least, most = {name: field.least[SANDBOX]}, {name: field.most}
    if name == "expires_in_days":
        return [{**least, "deadline": minute(now() + timedelta(hours=12))}, most]
    return [least, {**most, "deadline": minute(now() + timedelta(days=700))}]


def refused(name: str) -> list[Any]:
    """One past each bound; both are the same text at every entry point."""
    field = FIELDS[name]
    if field.type is FieldType.TEXT:
        return ["a" * (field.most + 1)]
    if field.type is FieldType.INSTANT:
        return [minute(now() + sign * (FARTHEST + timedelta(minutes=5))) for sign in (1, -1)]
    return [field.least[SANDBOX] - 1, field.most + 1, 10**30]


def minute(at: datetime) -> datetime:
    return at.replace(second=0, microsecond=0)


@pytest.mark.postgres_once
@pytest.mark.database
@pytest.mark.django_db
@pytest.mark.parametrize("request_by", REQUESTS)
@pytest.mark.parametrize("name", BOUNDED)
def test_plan_field_at_its_bounds_is_accepted_at_every_entry_point(name: str, request_by: Request) -> None:
    for values in accepted(name):
        assert request_by(fresh_credential(name), values) == ""
        plan = Rotation.objects.latest("created_at").approved_plan
        assert getattr(plan, name) == values[name]


@pytest.mark.postgres_once
@pytest.mark.database
@pytest.mark.django_db
@pytest.mark.parametrize("request_by", REQUESTS)
@pytest.mark.parametrize("name", BOUNDED)
def test_plan_field_past_its_bounds_is_refused_with_the_same_sentence_at_every_entry_point(
    name: str, request_by: Request
) -> None:
    """The sentence names the value and what is accepted, and nothing is requested. The console has no seconds."""
    credential_id = fresh_credential(name)
    for value in refused(name):
        is_typed = request_by is by_console and FIELDS[name].type is FieldType.SECONDS
        sentence = FIELDS[name].find_fault(value, SANDBOX, now(), show_period if is_typed else None)
        assert sentence is not None
        said = request_by(credential_id, {name: value})
        if is_typed and (value < 0 or value > 10**8):
            assert "Invalid period" in said  # it cannot be written as a period
        else:
            assert sentence in said
    assert not Rotation.objects.exists()


@pytest.mark.parametrize(
    ("name", "value", "environment", "sentence"),
    [
        ("quiet_seconds", 0, SANDBOX, "0 is out of range. Use 1 to 31622400 seconds in sandbox."),
        ("quiet_seconds", 3_599, PRODUCTION, "3599 is out of range. Use 3600 to 31622400 seconds in production."),
        ("proof_count", 1_000_001, PRODUCTION, "1000001 is out of range. Use 1 to 1000000 authentications."),
        ("expires_in_days", 10**30, SANDBOX, "A number of 31 digits is out of range. Use 1 to 3650 days."),
        ("reason", "a" * 301, SANDBOX, "The text has 301 characters. Use at most 300."),
        (
            "deadline",
            datetime(2999, 1, 1, tzinfo=UTC),
            SANDBOX,
            "2999-01-01T00:00:00Z is too far away. Use a time in the next 732 days.",
        ),
        ("waived_sources", ("a", "a"), SANDBOX, "2 sources are given. Use at most 50, each once."),
        ("waived_sources", tuple(map(str, range(51))), SANDBOX, "51 sources are given. Use at most 50, each once."),
        ("channels", (), SANDBOX, "secret_backend is missing. Add it: the merchant reads the replacement there."),
    ],
)
def test_plan_field_out_of_bounds_says_what_was_wrong_and_what_is_accepted(
    name: str, value: Any, environment: Environment, sentence: str
) -> None:
    assert FIELDS[name].find_fault(value, environment, datetime(2026, 11, 21, tzinfo=UTC)) == sentence


@pytest.mark.postgres_once
@pytest.mark.database
@pytest.mark.django_db
@pytest.mark.parametrize("request_by", REQUESTS)
def test_plan_with_a_waived_source_that_never_used_the_key_is_refused_at_every_entry_point(request_by: Request) -> None:
    said = request_by(fresh_credential("waived_sources"), {"waived_sources": ["192.0.2.0/24 curl"]})
    assert "'192.0.2.0/24 curl' has not used the old key. Use the name of a source that did, or omit it." in said
    assert not Rotation.objects.exists()


@pytest.mark.postgres_once
@pytest.mark.database
@pytest.mark.django_db
@pytest.mark.parametrize("name", BOUNDED_NUMBERS)
def test_plan_field_below_the_minimum_of_production_is_refused_there(name: str) -> None:
    at = now()
    key, _ = issue(account(environment=PRODUCTION), at)
    value: Any = FIELDS[name].least[PRODUCTION] - 1
    with pytest.raises(RequestInvalidError) as caught:
        plan_rotation(key.credential, PlanOverrides(**{name: value}), at)
    sentence = FIELDS[name].find_fault(value, PRODUCTION, at)
    assert [(fault.pointer, fault.detail) for fault in caught.value.faults] == [(f"/{name}", sentence)]


@pytest.mark.postgres_once
@pytest.mark.database
@pytest.mark.django_db
@pytest.mark.parametrize("name", [field.name for field in SHARED_FIELDS if field.type in NUMBERS])
def test_plan_field_past_its_bounds_is_refused_for_schedules_and_campaigns_too(name: str) -> None:
    at = now()
    issue(account(), at)
    for value in refused(name):
        sentence = FIELDS[name].find_fault(value, SANDBOX, at)
        overrides = PlanOverrides(**{name: value})
        with pytest.raises(RequestInvalidError) as campaign:
            asked(Clock(at), overrides=overrides)
        assert sentence in [fault.detail for fault in campaign.value.faults]
        grant = authorize(tam(), P.SCHEDULES_WRITE, now=at)
        with pytest.raises(RequestInvalidError) as schedule:
            save_schedule(grant, ScheduleScope(SANDBOX), ScheduleDraft(cryptoperiod_days=90, overrides=overrides))
        assert (f"/overrides/{name}", sentence) in [(fault.pointer, fault.detail) for fault in schedule.value.faults]
