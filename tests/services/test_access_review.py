"""The access review: complete, bounded in memory, and safe to open in a spreadsheet."""

import csv
import io
from datetime import timedelta
from unittest import mock

import pytest
from allauth.socialaccount.models import SocialAccount
from django.contrib.auth.models import Group
from pytest_django import Settings

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST
from keyvault.access.roles import ROLE_PERMISSIONS, Role
from keyvault.access.scopes import NOWHERE, AccessScope
from keyvault.models import Operator
from keyvault.models.recording import collect_subjects
from keyvault.services import access_review
from keyvault.services.access_review import export_lines, format_csv
from keyvault.services.operators.operators import disable_operator
from keyvault.services.operators.role_use import UNUSED_AFTER, write_uses
from keyvault.services.sessions.invitations import prepare_sign_in
from tests.factories import SANDBOX, grant, make_merchant, make_operator, now

pytestmark = pytest.mark.django_db


@pytest.mark.database
def test_access_review_lists_every_operator_and_role(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operator is listed, however many batches it takes: also disabled ones, and those without a role."""
    monkeypatch.setattr(access_review, "_BATCH", 2)
    make_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER)
    make_operator("both", Role.APPROVER, Role.AUDITOR)
    make_operator("nobody")
    make_operator("gone", Role.AUDITOR)
    make_operator("zoe", Role.INCIDENT_RESPONDER)
    disable_operator(grant(HOST, P.OPERATORS_WRITE), Operator.objects.get(username="gone"))
    write_uses("tam", [Role.TECHNICAL_ACCOUNT_MANAGER], now())
    prepare_sign_in(grant(HOST, P.OPERATORS_ENROLL), Operator.objects.get(username="zoe"))
    lines = list(export_lines(now()))
    assert [(line["username"], line["role"], line["state"]) for line in lines] == [
        ("both", "approver", "active"),
        ("both", "auditor", "active"),
        ("gone", "auditor", "disabled"),
        ("nobody", "", "active"),
        ("tam", "technical_account_manager", "active"),
        ("zoe", "incident_responder", "active"),
    ]
    assert {line["username"] for line in lines if line["role_last_used_at"]} == {"tam"}
    assert set(lines[0]["permissions"].split()) == ROLE_PERMISSIONS[Role.APPROVER]
    assert {line["username"] for line in lines if line["second_factor"] == "yes"} == {"zoe"}


@pytest.mark.parametrize(("factors", "shown"), [(["mfa"], "identity_provider"), ([], "no")])
def test_access_review_names_a_second_factor_at_the_identity_provider(
    settings: Settings, factors: list[str], shown: str
) -> None:
    """Guarantee: an operator counts as secured by the provider only after a sign-in that the provider secured."""
    settings.IDENTITY_PROVIDER = mock.Mock(second_factors=factors)
    for name in ("both", "new", "signed-on", "local"):
        make_operator(name)
    prepare_sign_in(grant(HOST, P.OPERATORS_ENROLL), Operator.objects.get(username="both"))
    with collect_subjects():
        for name in ("both", "new", "signed-on"):
            SocialAccount(user=Operator.objects.get(username=name), provider="https://id.example", uid=name).save()
        for name in ("both", "signed-on", "local"):
            Operator.objects.get(username=name).compare_and_swap(last_login=now())
    expected = {"both": "yes", "new": "no", "signed-on": shown, "local": "no"}
    assert {line["username"]: line["second_factor"] for line in export_lines(now())} == expected


def test_access_review_says_on_which_accounts() -> None:
    for name in ("acme", "globex"):
        make_merchant(name)
    make_operator("all", Role.AUDITOR)
    make_operator("some", Role.AUDITOR, scope=AccessScope(frozenset({"globex", "acme"}), frozenset({SANDBOX})))
    make_operator("new", scope=NOWHERE)
    assert {line["username"]: (line["merchants"], line["environments"]) for line in export_lines(now())} == {
        "all": ("all", "production sandbox"),
        "some": ("acme globex", "sandbox"),
        "new": ("none", "production sandbox"),
    }


def test_access_review_reports_roles_that_are_not_used() -> None:
    make_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER, Role.AUDITOR)
    later = now() + UNUSED_AFTER
    write_uses("tam", [Role.AUDITOR], later - timedelta(days=1))
    assert {line["role"]: line["role_unused"] for line in export_lines(later)} == {
        "auditor": "no",
        "technical_account_manager": "yes",
    }


def test_access_review_shows_a_role_that_no_service_granted() -> None:
    """Guarantee: the review reads the roles that count, not the record of their use."""
    make_operator("tam", Role.AUDITOR)
    with collect_subjects():
        Operator.objects.get().groups.add(Group.objects.get(name=Role.KEY_ADMINISTRATOR))
    lines = {line["role"]: line for line in export_lines(now())}
    assert set(lines) == {"auditor", "key_administrator"}
    assert (lines["key_administrator"]["role_granted_at"], lines["key_administrator"]["role_unused"]) == (None, "yes")


def test_access_review_as_csv_has_no_formula() -> None:
    """A user name may begin with a plus sign or an at sign, which a spreadsheet would take for a formula."""
    for name in ("+cmd", "@sum", "-1", 'tam,"x'):
        make_operator(name, Role.AUDITOR)
    rows = list(csv.DictReader(io.StringIO("".join(format_csv(export_lines(now()))))))
    assert {row["username"] for row in rows} == {"'+cmd", "'@sum", "'-1", 'tam,"x'}
    assert {row["role"] for row in rows} == {"auditor"}
