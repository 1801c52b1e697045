"""REST endpoints: request, read and abort rotations on the service plane, acknowledge on the integration plane."""

from datetime import UTC
from typing import Any

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from keyvault.access.catalog import ACKNOWLEDGEMENT, REPLACEMENT
from keyvault.access.permissions import Permission
from keyvault.api.enforcement import ServiceView
from keyvault.api.idempotency import answer_once
from keyvault.api.integration import Call, EndpointServer
from keyvault.api.openapi import NEEDED, documented, in_path
from keyvault.api.pages import read_page
from keyvault.api.serializers import OneOf, PageQuery, StrictBoolean, StrictInteger, StrictSerializer, StrictText
from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode, Fault, NotFoundError, RequestInvalidError, StateConflictError
from keyvault.domain.recipient_keys import SUITE
from keyvault.domain.sources import MAX_NAME_LENGTH
from keyvault.models import Credential
from keyvault.services.idempotency import Effect, StoredResponse
from keyvault.services.recording.authorization import authorize
from rotation.api.schemas import REPLACEMENT_BODY, ROTATION_BODY, ROTATIONS_BODY
from rotation.domain.events import RotationState
from rotation.domain.pacing import FAILED
from rotation.domain.plan_fields import FIELDS, NUMBERS, FieldType, PlanField, PlanOverrides, find_value_faults
from rotation.domain.windows import Window
from rotation.models import Rotation
from rotation.services.rotations.interventions import abort_rotation, acknowledge
from rotation.services.rotations.reports import (
    describe,
    find_introduction,
    find_sealed,
    get_rotation,
    summarize,
)
from rotation.services.rotations.requests import request_rotation


class WindowRequest(StrictSerializer):
    """When the rotation may begin: hours (`HH:MM`) of weekdays (0 is Monday) in a time zone."""

    time_zone = StrictText(max_length=64)
    weekdays = serializers.ListField(
        child=StrictInteger(min_value=0, max_value=6), required=False, min_length=1, max_length=7
    )
    opens = StrictText(required=False, max_length=5)
    closes = StrictText(required=False, max_length=5)


class AbortRequest(StrictSerializer):
    reason = StrictText(required=False, max_length=300)


class RotationRequest(StrictSerializer):
    credential_id = StrictText(max_length=32)

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        return {**super().get_fields(), **{field.name: _request_field(field) for field in FIELDS.values()}}

    def overrides(self) -> PlanOverrides:
        """Return the requested plan overrides. Raises RequestInvalidError for an invalid window."""
        values = {field.name: field for field in FIELDS.values() if field.name in self.validated_data}
        return PlanOverrides(**{name: _read(field, self.validated_data[name]) for name, field in values.items()})


def _request_field(field: PlanField) -> serializers.Field[Any, Any, Any, Any]:
    """Return the field of the request. The service checks the bounds, which OpenAPI only documents."""
    options: dict[str, Any] = {"required": False, "help_text": field.describe()}
    if field.type in NUMBERS:
        limits = {"type": "integer", "minimum": min(field.least.values()), "maximum": field.most}
        return _documented(StrictInteger(**options), limits)
    if field.type is FieldType.TEXT:
        # PostgreSQL cannot store NUL.
        limits = {"type": "string", "maxLength": field.most, "pattern": r"^[^\u0000]*$"}
        return _documented(StrictText(allow_blank=True, **options), limits)
    if field.type is FieldType.FLAG:
        return StrictBoolean(**options)
    if field.type is FieldType.INSTANT:
        return serializers.DateTimeField(default_timezone=UTC, **options)
    if field.type is FieldType.CHOICE:
        return OneOf(field.choices, **options)
    if field.type is FieldType.CHANNELS:
        return serializers.ListField(child=OneOf(field.choices), min_length=1, max_length=len(field.choices), **options)
    if field.type is FieldType.NAMES:
        return serializers.ListField(child=StrictText(max_length=MAX_NAME_LENGTH), **options)
    return WindowRequest(required=False)


def _documented(field: Any, schema: dict[str, Any]) -> serializers.Field[Any, Any, Any, Any]:
    described: serializers.Field[Any, Any, Any, Any] = extend_schema_field(schema)(field)
    return described


def _read(field: PlanField, value: Any) -> Any:
    if field.type is FieldType.CHOICE:
        return field.read_choice(value)
    if field.type is FieldType.CHANNELS:
        return tuple(dict.fromkeys(map(field.read_choice, value)))
    if field.type is FieldType.NAMES:
        return tuple(value)
    return _read_window(value) if field.type is FieldType.WINDOW else value


def _read_window(values: dict[str, Any]) -> Window:
    try:
        return Window.from_json(values)
    except RequestInvalidError as error:
        faults = [Fault(f"/window{fault.pointer}", fault.detail) for fault in error.faults]
        raise RequestInvalidError(error.detail, faults) from error


class RotationQuery(PageQuery):
    state = OneOf(RotationState, required=False, help_text="Rotations in this state only.")


class RotationsView(ServiceView):
    def initial(self, request: Request, *args: object, **kwargs: object) -> None:
        self.permission = Permission.ROTATIONS_WRITE if request.method == "POST" else Permission.ROTATIONS_READ
        super().initial(request, *args, **kwargs)

    @documented(
        "rotations_list",
        summary="List rotations, paginated.",
        description="The rotations of the merchants and environments that the token names, the newest first, without "
        "their plans and evidence. To read on, send `next_cursor` as `cursor` with the same filters; it "
        "is null on the last page.",
        permission=Permission.ROTATIONS_READ,
        answers={200: ROTATIONS_BODY},
        parameters=[RotationQuery],
    )
    def get(self, request: Request) -> Response:
        form = RotationQuery(data=request.query_params)
        form.is_valid(raise_exception=True)
        query, rows = form.validated_data, Rotation.objects.select_related("account")
        page = read_page(self, rows, query, [{"state": query["state"]} if "state" in query else {}])
        return Response({"rotations": [*map(summarize, page.rows)], "next_cursor": page.next_cursor})

    @documented(
        "rotations_create",
        summary="Request a rotation.",
        description="Asks for a replacement of the credential's key. An operator approves the plan; fields that you "
        "omit have the environment's defaults. A credential has at most one open rotation: a second "
        "request is refused with `state_conflict`, which names the open one.",
        permission=Permission.ROTATIONS_WRITE,
        takes=RotationRequest,
        answers={201: ROTATION_BODY},
        codes=[ErrorCode.STATE_CONFLICT],
        idempotency_key=NEEDED,
    )
    def post(self, request: Request) -> Response:
        return answer_once(
            request,
            holder=self.service.lineage,
            endpoint="rotations.create",
            environment=None,  # no secret in the response
            now=self.now,
            prepare=lambda: self._prepare(request),
        )

    def _prepare(self, request: Request) -> Effect:
        form = RotationRequest(data=request.data)
        form.is_valid(raise_exception=True)
        overrides = form.overrides()
        try:
            credential = _find_credential(form.validated_data["credential_id"])
            grant = self.grant_for(credential.account)
        except NotFoundError:
            # A body that no environment accepts is invalid, whatever credential it names.
            if faults := list(find_value_faults(overrides, Environment.SANDBOX, self.now)):
                raise RequestInvalidError("The rotation is invalid.", faults) from None
            raise

        def create() -> StoredResponse:
            rotation = request_rotation(grant, credential, overrides)
            return StoredResponse(201, describe(get_rotation(rotation.rotation_id), self.now))

        return create


def _find_credential(credential_id: str) -> Credential:
    """Return the credential. Raises NotFoundError."""
    found: Credential | None = Credential.objects.select_related("account__merchant").filter(pk=credential_id).first()
    if found is None:
        raise NotFoundError
    return found


class RotationView(ServiceView):
    permission = Permission.ROTATIONS_READ

    @documented(
        "rotations_read",
        summary="Get a rotation's state and what it waits for.",
        description="The whole rotation: its approved plan, what it waits for, its evidence, and who still uses the "
        "old key. The replacement appears in `handover` only if it is sealed to the credential's "
        "recipient key.",
        permission=Permission.ROTATIONS_READ,
        answers={200: ROTATION_BODY},
        parameters=[in_path("rotation_id", "^rot_[0-9A-Za-z]{20}$")],
    )
    def get(self, request: Request, rotation_id: str) -> Response:
        rotation = get_rotation(rotation_id)
        self.grant_for(rotation.credential.account)
        return Response(describe(rotation, self.now))


class RotationAbortView(ServiceView):
    permission = Permission.ROTATIONS_WRITE

    @documented(
        "rotations_abort",
        summary="End a rotation: cancel it before delivery, roll it back afterwards.",
        description="Before delivery the rotation is canceled and its replacement discarded. Afterwards it is rolled "
        "back: both keys verify until the replacement is proved unused. Repeatable: a rotation that is "
        "already ending is returned as it is.",
        permission=Permission.ROTATIONS_WRITE,
        takes=AbortRequest,
        answers={200: ROTATION_BODY},
        codes=[ErrorCode.STATE_CONFLICT, ErrorCode.DEPENDENCY_UNAVAILABLE],
        parameters=[in_path("rotation_id", "^rot_[0-9A-Za-z]{20}$")],
    )
    def post(self, request: Request, rotation_id: str) -> Response:
        """Idempotent: a rotation that is canceled, rolling back or rolled back is returned unchanged."""
        rotation = get_rotation(rotation_id)
        grant = self.grant_for(rotation.credential.account)
        form = AbortRequest(data=request.data)
        form.is_valid(raise_exception=True)
        if rotation.current_state not in _ABORTED:
            abort_rotation(grant, rotation, form.validated_data.get("reason", "") or "aborted by a service")
        return Response(describe(get_rotation(rotation_id), self.now))


_ABORTED = FAILED - {RotationState.REJECTED, RotationState.EXPIRED}


_ATTEMPTS = 3
"""Attempts of an acknowledgement that meets other writers of its rotation."""


def _acknowledge(call: Call) -> Response:
    """Acknowledge the replacement; the merchant authenticates with it in X-Api-Key."""
    for attempt in range(_ATTEMPTS):
        rotation = find_introduction(call.holder.key_id)
        if rotation is None:
            raise NotFoundError("The key is not the replacement of a rotation.")
        grant = authorize(call.holder, Permission.ROTATIONS_ACKNOWLEDGE, rotation.credential.account, now=call.now)
        try:
            acknowledge(grant, rotation)
            break
        except StateConflictError:
            # Another process acknowledged at the same time, or a worker advanced the rotation.
            if attempt == _ATTEMPTS - 1:
                raise
    return Response(status=204)


def _retrieve_replacement(call: Call) -> Response:
    """Return the sealed replacement of the presented key, again and again until it is acknowledged."""
    rotation = find_sealed(call.holder.key_id)
    handover = None if rotation is None else rotation.sealed_replacement
    if rotation is None or handover is None:
        raise NotFoundError("No replacement of this key waits to be fetched.")
    sealed = {"suite": SUITE, "enc": handover["enc"], "ciphertext": handover["ciphertext"]}
    return Response({"rotation_id": rotation.rotation_id, "key_id": handover["key_id"], "sealed": sealed})


SERVERS = {
    REPLACEMENT: EndpointServer(
        description="The replacement of the presented private key, sealed to the credential's recipient key (HPKE, RFC "
        "9180). Repeatable until it is acknowledged, so that a lost webhook loses nothing. 404 if no replacement "
        "waits: no rotation is open, it is not delivered yet, or there was no recipient key when it was requested.",
        answers=_retrieve_replacement,
        gives=REPLACEMENT_BODY,
    ),
    ACKNOWLEDGEMENT: EndpointServer(
        description="Proves that the merchant has the replacement: send the request with the replacement itself. "
        "Repeatable. Any other key is 404, and no service token can acknowledge for a merchant.",
        answers=_acknowledge,
        status=204,
    ),
}
"""Rotation's endpoints on the integration plane."""
