"""Response bodies of rotations on the service plane, for the OpenAPI page."""

from typing import get_args, get_type_hints

from keyvault.api.openapi_components import (
    ANY_OBJECT,
    FLAG,
    INSTANT,
    INTEGER,
    TEXT,
    Schema,
    define,
    list_of,
    nullable,
    obj,
    one_of,
)
from keyvault.api.schemas import SEALED_BODY
from keyvault.domain.environments import Environment
from keyvault.services.usage.reports import TRACES
from rotation.domain.events import RotationState
from rotation.domain.plan_fields import FIELDS, NUMBERS, FieldType, PlanField
from rotation.domain.policy import Plan
from rotation.models import EvidenceKind
from rotation.services.rotations.planning import MAX_LATE_SOURCES

_PLAN_TYPES = get_type_hints(Plan)
_SCHEMAS = {FieldType.FLAG: FLAG, FieldType.INSTANT: INSTANT, FieldType.WINDOW: ANY_OBJECT}


def _plan_field(field: PlanField) -> Schema:
    choices = one_of(choice.value for choice in field.choices)
    if field.type is FieldType.CHOICE:
        schema = choices
    elif field.type is FieldType.CHANNELS:
        schema = list_of(choices)
    elif field.type is FieldType.NAMES:
        schema = list_of(TEXT)
    else:
        schema = INTEGER if field.type in NUMBERS else _SCHEMAS.get(field.type, TEXT)
    if type(None) in get_args(_PLAN_TYPES[field.name]):
        schema = nullable(schema)
    return {**schema, "description": field.help}


_PLAN_BODY = define(
    "PlanBody",
    obj(
        "The approved plan.",
        credential_id=TEXT,
        predecessor_key_id=TEXT,
        is_dormant=FLAG,
        late_sources={
            **nullable({"type": "object", "additionalProperties": nullable(INSTANT)}),
            "description": "Sources that cannot be silent by the deadline, each with a deadline that would fit; the "
            f"latest {MAX_LATE_SOURCES}. Null: seen only within 24 hours, so it must use the replacement or be waived.",
        },
        **{field.name: _plan_field(field) for field in FIELDS.values()},
    ),
)

_EVIDENCE_BODY = define(
    "EvidenceBody", obj(evidence_id=TEXT, kind=one_of(EvidenceKind), seen=ANY_OBJECT, created_at=INSTANT)
)

_USER_BODY = define(
    "UserBody",
    obj(
        "One client of a key: source, endpoint and counts. `is_probe`: a test call, which proves nothing.",
        source=TEXT,
        network=TEXT,
        user_agent=TEXT,
        endpoint=TEXT,
        origin=TEXT,
        outcome=one_of(TRACES),
        is_probe=FLAG,
        count=INTEGER,
        first_at=INSTANT,
        last_at=INSTANT,
    ),
)

_HANDOVER_BODY = define(
    "HandoverBody",
    obj(
        "The sealed replacement; only the holder of the recipient's private key can open it (HPKE, RFC 9180).",
        key_id=TEXT,
        enc=TEXT,
        ciphertext=TEXT,
    ),
)

REPLACEMENT_BODY = define(
    "ReplacementBody",
    obj("The sealed replacement of the presented key.", rotation_id=TEXT, key_id=TEXT, sealed=SEALED_BODY),
)

_AWAITED_SOURCE_BODY = define(
    "AwaitedSourceBody",
    obj(
        "A source that the rotation waits for. `until` null: seen only within 24 hours, so it must use the other key, "
        "or be waived; `others`, all clients beyond the limit on distinct sources, must be waived.",
        source=TEXT,
        last_used_at=INSTANT,
        until=nullable(INSTANT),
    ),
)

_OWN_COLUMNS: dict[str, Schema] = {
    "rotation_id": TEXT,
    "state": one_of(RotationState),
    "why": TEXT,
    "stalled_from": nullable(one_of(RotationState)),
    "credential_id": TEXT,
    "merchant_id": TEXT,
    "environment": one_of(Environment),
    "predecessor_key_id": TEXT,
    "replacement_key_id": nullable(TEXT),
    "plan_digest": TEXT,
    "approvals_needed": INTEGER,
    "is_bypass": FLAG,
    "campaign_id": nullable(TEXT),
    "created_at": INSTANT,
    "deadline": nullable(INSTANT),
    "retire_at": nullable(INSTANT),
    "accepted_at": nullable(INSTANT),
    "delivered_at": nullable(INSTANT),
    "acknowledged_at": nullable(INSTANT),
    "confirmed_at": nullable(INSTANT),
    "used_at": nullable(INSTANT),
    "silent_at": nullable(INSTANT),
    "quarantined_at": nullable(INSTANT),
    "held_at": nullable(INSTANT),
    "reinstated_at": nullable(INSTANT),
    "closed_at": nullable(INSTANT),
}

ROTATION_BODY = define(
    "RotationBody",
    obj(
        **_OWN_COLUMNS,
        waiting_for=nullable(TEXT),
        waiting_sources=list_of(_AWAITED_SOURCE_BODY),
        has_more_waiting_sources={**FLAG, "description": "Whether `waiting_sources` is incomplete."},
        plan=_PLAN_BODY,
        approvals=list_of(TEXT),
        handover=nullable(_HANDOVER_BODY),
        evidence=list_of(_EVIDENCE_BODY),
        predecessor_users=list_of(_USER_BODY),
        has_more_predecessor_users={**FLAG, "description": "Whether `predecessor_users` is incomplete."},
    ),
)

ROTATIONS_BODY = define(
    "RotationsBody",
    obj(
        rotations=list_of(
            define(
                "RotationSummaryBody",
                obj("A rotation without its plan, its evidence and what it waits for.", **_OWN_COLUMNS),
            )
        ),
        next_cursor=nullable(TEXT),
    ),
)
