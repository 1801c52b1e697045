"""Render verdicts as response bytes: any judgement, or a template for repeated ones.

decision(judgement, request_id) -> the object that verify answers with
Template(judgement, buckets).fill(balances, request_id, identity) -> the bytes of that object
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec

from keyvault.access.customers import Customer
from keyvault.access.decision import Denial, Grant
from keyvault.access.judgement import Judgement
from keyvault.access.limits import Bucket, BucketStatus, Spend
from keyvault.access.principals import KeyHolder
from keyvault.domain.keys import KeyRecord
from keyvault.hotpath.messages.responses import HttpResponse
from keyvault.wire.gateways import AUTH_CODE, AUTH_STATUS, nginx_status
from keyvault.wire.limits import limit_headers
from keyvault.wire.problems import CONTENT_TYPE, PROBLEM_TYPES, Problem, problem

encode = msgspec.json.Encoder().encode


def decision(judgement: Judgement, request_id: str, *, has_trace: bool = False) -> dict[str, Any]:
    """Return the decision that the caller applies to its own client. `has_trace` is for dry runs."""
    verdict = judgement.verdict
    limits = limit_headers(judgement.spend)
    if isinstance(verdict, Grant):
        body: dict[str, Any] = {"allowed": True, "status": 200, "code": None, "check": None, "headers": limits}
    else:
        found = denial_problem(verdict, request_id)
        body = {
            "allowed": False,
            "status": found.status,
            "code": verdict.code,
            "check": PROBLEM_TYPES[verdict.code].check,
            "headers": {**found.headers, **limits},
            "problem": dict(found.body),
        }
    body |= {
        "request_id": request_id,
        **_identity(judgement.holder, judgement.customer),
        **_limit(judgement.spend),
    }
    if has_trace:
        body["trace"] = [{"rule": check.rule, "passed": check.passed} for check in judgement.trace]
    return body


def denial_problem(denial: Denial, request_id: str) -> Problem:
    return problem(
        denial.code,
        denial.detail,
        request_id,
        allowed_methods=denial.allowed_methods,
        retry_after_seconds=denial.retry_after_seconds,
    )


def problem_answer(found: Problem, request_id: str, headers: Mapping[str, str] | None = None) -> HttpResponse:
    """Render a problem document. `headers` are added to those of the problem itself."""
    sent = {"Content-Type": CONTENT_TYPE, **found.headers, **(headers or {})}
    return HttpResponse(found.status, encode(dict(found.body)), request_id, tuple(sent.items()))


def nginx_answer(answer: HttpResponse, code: str) -> HttpResponse:
    """Give a refusal a status that nginx auth_request passes on, and its actual status and code as headers."""
    actual = ((AUTH_STATUS, str(answer.status)), (AUTH_CODE, code))
    return HttpResponse(nginx_status(answer.status), answer.body, answer.request_id, (*answer.headers, *actual))


def _limit(spend: Spend | None) -> dict[str, Any]:
    """Return the binding limit."""
    if spend is None:
        return {}
    binding = spend.binding
    balances = {"policy": binding.policy, "remaining": binding.remaining, "reset_seconds": binding.reset_seconds}
    return {"limit": balances}


def _identity(holder: KeyHolder | KeyRecord | None, customer: Customer | None) -> dict[str, Any]:
    """Identify the key. Disclosed only to a caller that has proved possession of its secret."""
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


_NUMBER: Final = 8_000_000_000_000_000
"""Placeholder for a number. No limit is as large."""

_REQUEST_ID: Final = "<request id>"
_POLICY: Final = "<policy>"


def identity_text(holder: KeyHolder | KeyRecord) -> bytes:
    """Return the identity part of a decision."""
    return encode(_identity(holder, None))[1:-1]


def identity_template(record: KeyRecord) -> bytes:
    """Return the identity part of all keys of this kind and account, with placeholders for key id and credential id.

    The service generates both ids from characters that JSON does not escape.
    """
    marked = msgspec.structs.replace(record, key_id=_KEY_ID, credential_id=_CREDENTIAL_ID)
    text = identity_text(marked).replace(b"%", b"%%")
    return text.replace(_KEY_ID.encode(), b"%b", 1).replace(_CREDENTIAL_ID.encode(), b"%b", 1)


_KEY_ID: Final = "<key id>"
_CREDENTIAL_ID: Final = "<credential id>"


def denial_template(judgement: Judgement) -> bytes:
    """Return a denial rendered once, with two placeholders for the request id."""
    text = encode(decision(judgement, _REQUEST_ID)).replace(b"%", b"%%")
    return text.replace(_REQUEST_ID.encode(), b"%b")


class Template:
    """A grant under at most two limits, rendered once.

    It has placeholders for the request id, the identity and the balance of each limit.
    """

    __slots__ = ("_policies", "text")

    def __init__(self, judgement: Judgement, buckets: tuple[Bucket, ...]) -> None:
        holder = judgement.holder
        if holder is None or judgement.customer is not None:
            raise TypeError("a template needs a grant to a key without a customer")
        if len(buckets) > 2:
            raise TypeError(f"a template has at most two limits, not {len(buckets)}")
        self._policies = tuple(bucket.policy.encode() for bucket in buckets)
        statuses = tuple(
            BucketStatus(bucket.policy, bucket.limit, _NUMBER + 2 * index, _NUMBER + 2 * index + 1)
            for index, bucket in enumerate(buckets)
        )
        spend = Spend(True, statuses, 0) if statuses else None
        body = decision(replace(judgement, spend=spend), _REQUEST_ID)
        # Replace the identity first: an endpoint name must not be taken for a placeholder.
        placeholders = [(identity_text(holder), b"%b"), (_REQUEST_ID.encode(), b"%b")]
        placeholders += [(str(_NUMBER + index).encode(), b"%d") for index in range(2 * len(statuses))]
        if len(statuses) > 1:
            body["limit"]["policy"] = _POLICY
            placeholders.append((_POLICY.encode(), b"%b"))
        text = encode(body).replace(b"%", b"%%")
        for mark, placeholder in placeholders:
            text = text.replace(mark.replace(b"%", b"%%"), placeholder)
        self.text = text
        """Format string. Under one limit its arguments are remaining, reset_seconds, request id, identity, remaining,
        reset_seconds."""

    def fill(self, balances: tuple[int, ...], request_id: bytes, identity: bytes) -> bytes:
        """Return the response.

        Args:
            balances: Remaining requests and reset in seconds of each limit, as `EngineBudgets.spender` returns them.
            identity: The result of `identity_text`.
        """
        if not balances:
            return self.text % (request_id, identity)
        if len(balances) == 2:
            remaining, reset_seconds = balances
            return self.text % (remaining, reset_seconds, request_id, identity, remaining, reset_seconds)
        # The limit with the fewest tokens left binds; on a tie the first.
        first_left, first_reset, second_left, second_reset = balances
        if second_left < first_left:
            return self.text % (*balances, request_id, identity, self._policies[1], second_left, second_reset)
        return self.text % (*balances, request_id, identity, self._policies[0], first_left, first_reset)
