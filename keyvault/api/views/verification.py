"""POST /v1/keys/verify and its batch: the answer that the caller must give to its own client."""

from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

from rest_framework.request import Request
from rest_framework.response import Response

from keyvault.access.catalog import Endpoint, Miss
from keyvault.access.customers import Customer
from keyvault.access.decision import Denial, Grant, decide
from keyvault.access.limits import Spend
from keyvault.access.permissions import Permission
from keyvault.access.principals import KeyHolder, Service
from keyvault.access.rules import Target, operation
from keyvault.api.bodies import DecisionBody, DecisionsBody
from keyvault.api.enforcement import ServiceView
from keyvault.api.exceptions import DeniedError
from keyvault.api.middleware import request_id_of
from keyvault.api.openapi import documented
from keyvault.api.serializers import VerifyBatchRequest, VerifyRequest
from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode, Fault, RequestInvalidError
from keyvault.services.catalog import find_endpoint, match_endpoint
from keyvault.services.lookup import BASE_URLS
from keyvault.services.refusals import refusal_log
from keyvault.services.usage import usage_log
from keyvault.services.verification import Judgement, Presented, judge_presented, note_use
from keyvault.wire.limits import limit_headers
from keyvault.wire.problems import PROBLEM_TYPES, problem


class VerifyView(ServiceView):
    permission = Permission.KEYS_VERIFY

    @documented("keys_verify", summary="Judges one key.", takes=VerifyRequest, answers={200: DecisionBody})
    def post(self, request: Request) -> Response:
        usage_log.start()
        form = VerifyRequest(data=request.data)
        form.is_valid(raise_exception=True)
        answer = verify(form.validated_data, self.service, request_id_of(request._request), self.now)
        if answer["code"] is ErrorCode.REQUEST_INVALID:
            # A cost that no burst holds is the caller's to mend, not its client's.
            raise RequestInvalidError("The request does not fit.", [Fault("/cost", answer["problem"]["detail"])])
        return Response(answer)


class VerifyBatchView(ServiceView):
    """Up to 100 of them, each judged by itself and answered in order. One malformed one refuses the call."""

    permission = Permission.KEYS_VERIFY

    @documented(
        "keys_verify_batch", summary="Judges up to 100.", takes=VerifyBatchRequest, answers={200: DecisionsBody}
    )
    def post(self, request: Request) -> Response:
        usage_log.start()
        form = VerifyBatchRequest(data=request.data)
        form.is_valid(raise_exception=True)
        request_id = request_id_of(request._request)
        asked = form.validated_data["requests"]
        for each in asked:
            _require_served(each, self.service, self.now)
        decisions = [
            verify(each, self.service, f"{request_id}-{number}", self.now) for number, each in enumerate(asked)
        ]
        return Response({"decisions": decisions})


def verify(asked: dict[str, Any], service: Service, request_id: str, now: datetime) -> dict[str, Any]:
    """One decision, as the body of the answer. Raises DeniedError when the token does not serve the environment."""
    _require_served(asked, service, now)
    environment = Environment(asked["environment"])
    endpoint = _endpoint(asked, environment)
    is_dry = asked.get("dry_run", False)
    merchant, store = asked.get("merchant"), asked.get("store")
    if isinstance(endpoint, Endpoint):
        merchant, store = endpoint.read_contexts(asked.get("path"), {}, merchant, store)
    presented = Presented(
        key=asked["key"],
        environment=environment,
        endpoint=endpoint,
        url=asked.get("path", ""),
        merchant=asked.get("merchant"),
        merchant_context=merchant,
        store_context=store,
        bearer=asked.get("customer_token"),
        origin=asked.get("origin"),
        client_address=asked.get("client_ip"),
        cost=asked.get("cost", 1),
        scope=service.merchants,
        is_dry=is_dry,
    )
    judgement = judge_presented(presented, now)
    if not is_dry:
        name = endpoint.name if isinstance(endpoint, Endpoint) else ""
        source = asked.get("client_ip") or f"token:{service.token_id}"
        note_use(
            judgement,
            usage_log,
            source=source,
            user_agent=asked.get("user_agent") or "",
            endpoint=name,
            origin=presented.origin,
            is_probe=service.is_probe,
        )
        refusal_log.note(
            judgement,
            request_id=request_id,
            door="verify",
            environment=environment,
            endpoint=name,
            source=source,
            at=now,
        )
    answer = _answer(judgement, request_id)
    if is_dry:
        answer["trace"] = [{"rule": check.rule, "passed": check.passed} for check in judgement.trace]
    return answer


def _require_served(asked: dict[str, Any], service: Service, now: datetime) -> None:
    target = Target(environment=Environment(asked["environment"]))
    serves = decide(operation(Permission.KEYS_VERIFY), service, target, now)
    if isinstance(serves, Denial):
        raise DeniedError(serves)


def _endpoint(asked: dict[str, Any], environment: Environment) -> Endpoint | Miss:
    if "endpoint" in asked:
        return find_endpoint(asked["endpoint"])
    return match_endpoint(asked["method"], asked["path"], urlsplit(BASE_URLS[environment]).path)


def _answer(judgement: Judgement, request_id: str) -> dict[str, Any]:
    verdict = judgement.verdict
    limits = limit_headers(judgement.spend)
    if isinstance(verdict, Grant):
        body: dict[str, Any] = {"allowed": True, "status": 200, "code": None, "check": None, "headers": limits}
    else:
        found = problem(
            verdict.code,
            verdict.detail,
            request_id,
            allowed_methods=verdict.allowed_methods,
            retry_after_seconds=verdict.retry_after_seconds,
        )
        body = {
            "allowed": False,
            "status": found.status,
            "code": verdict.code,
            "check": PROBLEM_TYPES[verdict.code].check,
            "headers": {**found.headers, **limits},
            "problem": found.body,
        }
    return {
        **body,
        "request_id": request_id,
        **_identity(judgement.holder, judgement.customer),
        **_limit(judgement.spend),
    }


def _limit(spend: Spend | None) -> dict[str, Any]:
    """The limit that binds first."""
    if spend is None:
        return {}
    binding = spend.binding
    standing = {"policy": binding.policy, "remaining": binding.remaining, "reset_seconds": binding.reset_seconds}
    return {"limit": standing}


def _identity(holder: KeyHolder | None, customer: Customer | None) -> dict[str, Any]:
    """Whose key it is, to somebody who was shown possession of its secret, and to nobody else."""
    if holder is None:
        return {}
    return {
        "key_id": holder.key_id,
        "credential_id": holder.credential_id,
        "kind": holder.kind,
        "merchant_id": holder.merchant_id,
        "environment": holder.environment,
        "customer_id": None if customer is None else customer.customer_id,
    }
