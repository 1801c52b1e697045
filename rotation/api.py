"""Rotations over REST: asked for and read on the service plane, acknowledged on the integration plane."""

from datetime import UTC, datetime

from rest_framework import serializers
from rest_framework.permissions import AllowAny
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from keyvault.access.catalog import find_endpoint
from keyvault.access.decision import Denial
from keyvault.access.permissions import Permission
from keyvault.access.principals import KeyHolder
from keyvault.access.verification import find_exposed
from keyvault.api.enforcement import ServiceView
from keyvault.api.exceptions import DeniedError
from keyvault.api.serializers import StrictBoolean, StrictInteger, StrictSerializer
from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode, NotFoundError
from keyvault.models import Credential
from keyvault.services.authorization import authorize
from keyvault.services.usage import usage_log
from keyvault.services.verification import Presented, judge_presented, note_use
from keyvault.wire.headers import API_KEY, came_twice, read_bearer
from rotation.policy import LONGEST_SECONDS, Proof
from rotation.services.facts import ACKNOWLEDGEMENT
from rotation.services.requests import Wish, acknowledge, describe, find_introduction, get_rotation, request_rotation


class RotationRequest(StrictSerializer):
    credential_id = serializers.CharField(max_length=32)
    reason = serializers.CharField(required=False, max_length=300)
    not_before = serializers.DateTimeField(required=False, default_timezone=UTC)
    deadline = serializers.DateTimeField(required=False, default_timezone=UTC)
    proof = serializers.ChoiceField(choices=[proof.value for proof in Proof], required=False)
    proof_count = StrictInteger(required=False, min_value=1, max_value=1_000_000)
    proof_sources = StrictInteger(required=False, min_value=1, max_value=10_000)
    soak_seconds = StrictInteger(required=False, min_value=0, max_value=LONGEST_SECONDS)
    quiet_seconds = StrictInteger(required=False, min_value=1, max_value=LONGEST_SECONDS)
    quarantine_seconds = StrictInteger(required=False, min_value=1, max_value=LONGEST_SECONDS)
    expires_in_days = StrictInteger(required=False, min_value=1, max_value=3650)
    predecessor_may_expire = StrictBoolean(required=False)

    def wish(self) -> Wish:
        values = {name: value for name, value in self.validated_data.items() if name != "credential_id"}
        if "proof" in values:
            values["proof"] = Proof(values["proof"])
        return Wish(**values)


class RotationsView(ServiceView):
    permission = Permission.ROTATIONS_WRITE

    def post(self, request: Request) -> Response:
        form = RotationRequest(data=request.data)
        form.is_valid(raise_exception=True)
        credential = (
            Credential.objects.select_related("account__merchant")
            .filter(pk=form.validated_data["credential_id"])
            .first()
        )
        if credential is None:
            raise NotFoundError
        rotation = request_rotation(self.grant_for(credential.account), credential, form.wish())
        return Response(describe(get_rotation(rotation.rotation_id), self.now), status=201)


class RotationView(ServiceView):
    permission = Permission.ROTATIONS_READ

    def get(self, request: Request, rotation_id: str) -> Response:
        rotation = get_rotation(rotation_id)
        self.grant_for(rotation.credential.account)
        return Response(describe(rotation, self.now))


_AMBIGUOUS = Denial(ErrorCode.CREDENTIAL_AMBIGUOUS, "The Authorization header came more than once, or holds a comma.")


class AcknowledgeView(APIView):
    """POST {base_url}/credentials/acknowledge, with the replacement itself in X-Api-Key."""

    http_method_names = ["post"]
    permission_classes = (AllowAny,)  # the judgement below is the permission
    environment: Environment = Environment.SANDBOX

    def post(self, request: Request) -> Response:
        usage_log.start()
        now = datetime.now(UTC)
        headers = request.headers
        url = request.get_full_path()
        if came_twice(headers.get("Authorization")):
            # Before the key, as the table of verdicts has it; only what stands in the URL comes earlier.
            raise DeniedError(find_exposed(url) or _AMBIGUOUS)
        judgement = judge_presented(
            Presented(
                key=headers.get(API_KEY),
                environment=self.environment,
                endpoint=find_endpoint(ACKNOWLEDGEMENT),
                url=url,
                bearer=read_bearer(headers.get("Authorization")),
                origin=headers.get("Origin"),
            ),
            now,
        )
        note_use(
            judgement,
            usage_log,
            source=request.META.get("REMOTE_ADDR") or "unknown",
            user_agent=headers.get("User-Agent", ""),
            endpoint=ACKNOWLEDGEMENT,
        )
        if isinstance(judgement.verdict, Denial):
            raise DeniedError(judgement.verdict)
        holder = judgement.verdict.principal
        if not isinstance(holder, KeyHolder):
            raise TypeError("only a key holder is granted an endpoint")
        rotation = find_introduction(holder.key_id)
        if rotation is None:
            raise NotFoundError("The key is not the replacement of a rotation.")
        grant = authorize(holder, Permission.ROTATIONS_ACKNOWLEDGE, rotation.credential.account, now=now)
        acknowledge(grant, rotation)
        return Response(status=204)
