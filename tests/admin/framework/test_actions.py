"""Every registered action of the console, posted in full by each role that lacks its permission."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.contrib import admin
from django.db.models import Model

from keyvault.access.permissions import Permission as P
from keyvault.access.roles import ROLE_PERMISSIONS, Role
from keyvault.admin.framework.actions import CreateAction, RowAction
from keyvault.admin.framework.model_admin import ConsoleModelAdmin
from keyvault.domain.keys import KeyKind
from keyvault.domain.revocation import RevocationReason
from keyvault.models import Account
from keyvault.services.keys.lifecycle import revoke_key
from rotation.domain.events import RotationState
from rotation.domain.plan_fields import PlanOverrides
from rotation.models import Rotation
from rotation.services.rotations.engine import advance_rotation
from rotation.services.rotations.reports import get_rotation
from rotation.services.rotations.requests import request_rotation
from tests.admin.desk import Desk, address, browser, dump, text_of
from tests.admin.framework.test_enforcement import every_row
from tests.factories import grant, issue, make_operator, now

FAR = f"{now() + timedelta(days=400):%Y-%m-%dT%H:%M}"
FIELDS: dict[str, Any] = {
    "merchant": "acme",
    "merchant_id": "acme",
    "environment": "sandbox",
    "name": "holidays",
    "url": "https://acme.example/hooks",
    "provider": "stripe",
    "secret": "sk_test_2",
    "configuration": '{"theme": "dark"}',
    "origins": "https://shop.example",
    "seconds": "600",
    "cryptoperiod_days": "90",
    "jitter_days": "0",
    "lead_days": "0",
    "overlap_hours": "24",
    "why": "because",
    "reason": "because",
    "deadline": FAR,
    "retire_at": FAR,
}
"""What the forms ask for."""


def delivered(desk: Desk, kind: KeyKind) -> Rotation:
    place: Account = desk.sandbox
    key, _ = issue(place, kind=kind, label=f"rotated-{kind}")
    row = request_rotation(grant(desk.tam, P.ROTATIONS_WRITE, place), key.credential, PlanOverrides())
    advance_rotation(row.pk)
    assert get_rotation(row.pk).state == RotationState.AWAITING_PROOF
    return get_rotation(row.pk)


def rows_by_model(desk: Desk) -> dict[str, list[Model]]:
    """Rows of each model, by its label; several where no row allows every action."""
    rows: dict[str, list[Model]] = {label: [row] for label, row in every_row(desk).items()}
    rows["rotation_rotation"] += [delivered(desk, kind) for kind in KeyKind]
    lost, _ = issue(desk.sandbox, label="lost")
    revoke_key(grant(desk.responder, P.KEYS_REVOKE, desk.sandbox), lost, RevocationReason.UNSPECIFIED)
    rows["keyvault_credential"].append(lost.credential)
    return rows


def model_admins() -> Iterator[tuple[str, ConsoleModelAdmin]]:
    for model, model_admin in admin.site._registry.items():
        assert isinstance(model_admin, ConsoleModelAdmin)
        yield model._meta.label_lower.replace(".", "_"), model_admin


def unpermitted(role: Role, actions: tuple[RowAction, ...] | tuple[CreateAction, ...]) -> list[Any]:
    return [action for action in actions if action.permission not in ROLE_PERMISSIONS[role]]


@pytest.mark.parametrize("role", Role)
def test_action_by_a_role_without_its_permission_is_refused_and_changes_nothing(desk: Desk, role: Role) -> None:
    """A button that is hidden is no protection: the POST itself is refused, whatever it carries."""
    rows = rows_by_model(desk)
    client = browser(make_operator("somebody", role))
    before, wrong = dump(), list[tuple[str, str, str]]()
    for label, model_admin in model_admins():
        wrong += [
            (label, action.name, "answered")
            for action in unpermitted(role, model_admin.create_actions)
            if client.post(address(f"{label}_{action.name}"), FIELDS).status_code != 403
        ]
        may_view = bool({*model_admin.view_permissions} & ROLE_PERMISSIONS[role])
        for row in rows[label]:
            shown = text_of(client.get(address(f"{label}_change", row.pk))) if may_view else ""
            sent = {**FIELDS, "version": getattr(row, "version", 1), "plan_digest": getattr(row, "plan_digest", "")}
            for action in unpermitted(role, model_admin.row_actions):
                url = address(f"{label}_{action.name}", row.pk)
                if url in shown:
                    wrong.append((label, action.name, "offered"))
                if client.post(url, sent).status_code != 403:
                    wrong.append((label, action.name, "answered"))
    assert wrong == []
    assert dump() == before
