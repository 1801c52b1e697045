"""POST /v1/keys/verify: the answer that the caller must give to its own client."""

import logging
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

from rest_framework.request import Request
from rest_framework.response import Response

from keyvault.access.catalog import Endpoint, Miss, find_endpoint, match_endpoint
from keyvault.access.decision import Denial, Grant, decide
from keyvault.access.permissions import Permission
from keyvault.access.principals import KeyHolder, Service
from keyvault.access.rules import Target, operation
from keyvault.access.verification import INVALID
from keyvault.api.enforcement import ServiceView
from keyvault.api.exceptions import DeniedError
from keyvault.api.middleware import request_id_of
from keyvault.api.serializers import VerifyRequest
from keyvault.domain.environments import Environment
from keyvault.services.lookup import BASE_URLS
from keyvault.services.usage import usage_log
from keyvault.services.verification import Judgement, Presented, before_proof, judge_presented, note_use
from keyvault.wire.problems import PROBLEM_TYPES, problem

_log = logging.getLogger(__name__)


class VerifyView(ServiceView):
    permission = Permission.KEYS_VERIFY

    def post(self, request: Request) -> Response:
        usage_log.start()
        form = VerifyRequest(data=request.data)
        form.is_valid(raise_exception=True)
        return Response(verify(form.validated_data, self.service, request_id_of(request._request), self.now))


def verify(asked: dict[str, Any], service: Service, request_id: str, now: datetime) -> dict[str, Any]:
    """One decision, as the body of the answer. Raises DeniedError when the token does not serve the environment."""
    environment = Environment(asked["environment"])
    serves = decide(operation(Permission.KEYS_VERIFY), service, Target(environment=environment), now)
    if isinstance(serves, Denial):
        raise DeniedError(serves)
    endpoint = _endpoint(asked, environment)
    presented = Presented(
        key=asked["key"],
        environment=environment,
        endpoint=endpoint,
        url=asked.get("path", ""),
        merchant=asked.get("merchant"),
        bearer=asked.get("customer_token"),
        origin=asked.get("origin"),
    )
    judgement = _within_scope(judge_presented(presented, now), service)
    is_dry = asked.get("dry_run", False)
    if not is_dry:
        note_use(
            judgement,
            usage_log,
            source=asked.get("client_ip") or f"token:{service.token_id}",
            user_agent=asked.get("user_agent") or "",
            endpoint=endpoint.name if isinstance(endpoint, Endpoint) else "",
        )
    answer = _answer(judgement, request_id)
    if is_dry:
        answer["trace"] = [{"rule": check.rule, "passed": check.passed} for check in judgement.trace]
    _log_denial(judgement, request_id)
    return answer


def _endpoint(asked: dict[str, Any], environment: Environment) -> Endpoint | Miss:
    if "endpoint" in asked:
        return find_endpoint(asked["endpoint"])
    return match_endpoint(asked["method"], asked["path"], urlsplit(BASE_URLS[environment]).path)


def _within_scope(judgement: Judgement, service: Service) -> Judgement:
    """A key of a merchant that is not the token's to ask about proves nothing to it."""
    merchants, holder = service.merchants, judgement.holder
    if holder is None or merchants is None or holder.merchant_id in merchants:
        return judgement
    return before_proof(INVALID)


def _answer(judgement: Judgement, request_id: str) -> dict[str, Any]:
    verdict = judgement.verdict
    if isinstance(verdict, Grant):
        body: dict[str, Any] = {"allowed": True, "status": 200, "code": None, "check": None, "headers": {}}
    else:
        found = problem(verdict.code, verdict.detail, request_id, allowed_methods=verdict.allowed_methods)
        body = {
            "allowed": False,
            "status": found.status,
            "code": verdict.code,
            "check": PROBLEM_TYPES[verdict.code].check,
            "headers": found.headers,
            "problem": found.body,
        }
    return {**body, "request_id": request_id, **_identity(judgement.holder)}


def _identity(holder: KeyHolder | None) -> dict[str, Any]:
    """Whose key it is, to somebody who was shown possession of its secret, and to nobody else."""
    if holder is None:
        return {}
    return {
        "key_id": holder.key_id,
        "credential_id": holder.credential_id,
        "kind": holder.kind,
        "merchant_id": holder.merchant_id,
        "environment": holder.environment,
        "customer_id": None,
    }


def _log_denial(judgement: Judgement, request_id: str) -> None:
    """For whoever is asked "why was this refused?" with a request id."""
    verdict = judgement.verdict
    if isinstance(verdict, Denial):
        holder = judgement.holder
        _log.info(
            "denied",
            extra={
                "request_id": request_id,
                "code": verdict.code,
                "internal": verdict.internal,
                "key_id": holder.key_id if holder else "",
            },
        )
