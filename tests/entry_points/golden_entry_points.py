"""Entry points of the golden matrix: how to send a case to each, and how to read its response as a status and a code.

Each entry point defines the cases that it can express, and where its verdict differs from the matrix, with the reason.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, ClassVar

from django.test import Client

from keyvault.access.catalog import Bearer, Endpoint, NoMatchingEndpoint
from keyvault.access.decision import Denial
from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode
from keyvault.services.catalog.catalog import find_endpoint, match_endpoint
from keyvault.services.verification.judging import VerificationRequest, explain_described
from keyvault.wire.problems import PROBLEM_TYPES
from tests.access.judging import ADDED
from tests.entry_points.golden import ADDRESS, IN_URL, STATUS, UNPROVED, Row
from tests.entry_points.golden_rows import Rows, endpoint_named
from tests.factories import now

Outcome = tuple[int, str]
"""Status and code; 200 and `allowed` for every response that lets the request through."""

ALLOWED: Outcome = (200, "allowed")
ORIGIN = "https://shop.example"
SPECIAL = ("(unknown)", "(other_method)")
UPSTREAM = {endpoint.name for endpoint in ADDED}
PROVES_NOTHING = {
    "credential_missing",
    "credential_invalid",
    "environment_mismatch",
}
IDENTITY = ("X-Merchant-Id", "X-Environment", "X-Key-Id", "X-Credential-Id", "X-Customer-Id", "X-Request-Id")

LEAST_SECRET = 20
"""Length, in characters, from which a presented string can be a secret."""

_attempts = count()


@dataclass(frozen=True)
class PlacedCase:
    """One case: the environment of the key (`home`), and the environment that the request names."""

    row: Row
    home: Environment
    environment: Environment


@dataclass(frozen=True)
class EntryPoint:
    """One way to ask for a verdict. `demanded`: the verdicts of the matrix."""

    rows: Rows
    demanded: Mapping[Row, str]
    # One client for all cases: making a client takes longer than a request.
    client: Client = field(default_factory=Client)
    name: ClassVar[str] = ""
    batch_size: ClassVar[int] = 1

    def can_ask(self, row: Row) -> bool:
        return True

    def demand(self, row: Row) -> Outcome:
        code = self.demanded[row]
        return STATUS[code], code

    def ask(self, asked: Sequence[PlacedCase]) -> list[Outcome]:
        return [self.ask_one(each) for each in asked]

    def ask_one(self, asked: PlacedCase) -> Outcome:
        raise NotImplementedError

    def expect_no_secret(self, content: bytes, asked: PlacedCase) -> None:
        """No response repeats the presented key or customer token."""
        presented = (self.rows.key(asked.home, asked.row), self.rows.bearer(asked.environment, asked.row))
        for text in presented:
            assert text is None or len(text) < LEAST_SECRET or text.encode() not in content, asked

    def credentials(self, asked: PlacedCase) -> dict[str, str]:
        """Return the headers that the client sends."""
        key, bearer = self.rows.key(asked.home, asked.row), self.rows.bearer(asked.environment, asked.row)
        headers = {"User-Agent": "golden/1"}
        if key is not None:
            headers["X-Api-Key"] = key
        if bearer is not None:
            headers["Authorization"] = f"Bearer {bearer}"
        if asked.row.origin == "origin":
            headers["Origin"] = ORIGIN
        if asked.row.store == "store":
            headers["X-Store"] = "store-1"
        return headers


class Integration(EntryPoint):
    name: ClassVar[str] = "integration"

    def can_ask(self, row: Row) -> bool:
        """On this plane only the key names a merchant."""
        return row.merchant == "unnamed"

    def demand(self, row: Row) -> Outcome:
        if row.endpoint in UPSTREAM:
            # Other servers serve these endpoints: this plane does not know their names.
            row = row._replace(endpoint="(unknown)")
        if row.endpoint == "credentials.revoke_self" and self._may_still_revoke(row):
            # A holder may revoke a leaked key again, and may revoke a suspended one.
            return ALLOWED
        return super().demand(row)

    def _may_still_revoke(self, row: Row) -> bool:
        code, is_suspended = self.demanded[row], row.state == "suspended"
        is_stopped = code in {"key_revoked", "merchant_suspended"} or (code == "key_not_active" and is_suspended)
        return row.kind == "private" and is_stopped

    def ask_one(self, asked: PlacedCase) -> Outcome:
        method, path = self.rows.path(asked.environment, asked.row)
        headers = self.credentials(asked)
        body = b""
        if method == "POST":
            headers["Idempotency-Key"] = f"golden-{next(_attempts)}"
            body = json.dumps(_BODIES.get(asked.row.endpoint, {})).encode()
        response = self.client.generic(
            method,
            f"/{asked.environment}{path}",
            data=body,
            content_type="application/json",
            headers=headers,
            REMOTE_ADDR=ADDRESS,
        )
        self.expect_no_secret(response.content, asked)
        if response.status_code < 300:
            return ALLOWED
        found = read_problem(response)
        return ALLOWED if found == _ACCEPTED.get(asked.row.endpoint) else found


_ACCEPTED: dict[str, Outcome] = {
    "credentials.acknowledge": (404, "not_found"),
    "credentials.replacement": (404, "not_found"),
    "credentials.recipient_key": (400, "request_invalid"),
}
"""Refusals for another reason than the key: it belongs to no rotation, or the body has no recipient key."""

_BODIES = {"orders.create": {"amount_minor": 1, "currency": "EUR"}}


class Verify(EntryPoint):
    """Names the endpoint."""

    name: ClassVar[str] = "verify"

    def can_ask(self, row: Row) -> bool:
        """A name has no URL, and the path of payouts.list always names a merchant."""
        return row.state not in IN_URL or row.endpoint != "payouts.list" or row.merchant != "unnamed"

    def ask_one(self, asked: PlacedCase) -> Outcome:
        response = self.post("/v1/keys/verify", self.body(asked))
        self.expect_no_secret(response.content, asked)
        return self.read(response.json(), asked)

    def body(self, asked: PlacedCase) -> dict[str, Any]:
        row = asked.row
        return {
            "key": self.rows.key(asked.home, row),
            "environment": asked.environment,
            "client_ip": ADDRESS,
            **self.line(asked),
            **_without_none(
                merchant=self.rows.merchant(row),
                customer_token=self.rows.bearer(asked.environment, row),
                origin=ORIGIN if row.origin == "origin" else None,
                store="store-1" if row.store == "store" else None,
            ),
        }

    def line(self, asked: PlacedCase) -> dict[str, str]:
        if asked.row.endpoint == "(other_method)" or asked.row.state in IN_URL:
            return self.by_line(asked)
        return {"endpoint": "nothing.here" if asked.row.endpoint == "(unknown)" else asked.row.endpoint}

    def by_line(self, asked: PlacedCase) -> dict[str, str]:
        method, path = self.rows.path(asked.environment, asked.row)
        return {"method": method, "path": path}

    def post(self, path: str, body: Any) -> Any:
        headers = {"Authorization": f"Bearer {self.rows.service}"}
        response = self.client.post(path, json.dumps(body), "application/json", headers=headers)
        assert response.status_code == 200, response.content
        return response

    def read(self, answer: dict[str, Any], asked: PlacedCase) -> Outcome:
        """Return the decision after a check that its members agree with each other."""
        code = answer["code"] or "allowed"
        assert answer["allowed"] is (answer["status"] == 200) is (answer["code"] is None)
        is_named = code not in PROVES_NOTHING and asked.row.state not in UNPROVED
        assert ("key_id" in answer) is is_named, (asked, answer)
        if is_named:
            assert answer["key_id"] == self.rows.stored(asked.home, asked.row).key_id
            customer = "cust-1" if takes_bearer(asked.row) else None
            assert answer["customer_id"] in ({customer} if answer["allowed"] else {customer, None})
        if not answer["allowed"]:
            problem = answer["problem"]
            assert (problem["status"], problem["code"]) == (answer["status"], code)
            assert problem["request_id"] == answer["request_id"]
            assert answer["check"] == problem.get("check") == PROBLEM_TYPES[ErrorCode(code)].check
            expect_headers(answer["status"], code, answer["headers"])
            if code == "environment_mismatch":
                assert f"http://127.0.0.1:8000/{asked.home}" in problem["detail"]
        return answer["status"], code


class VerifyBatch(Verify):
    """Sends the method and path, in batches, where they express the same as the endpoint's name."""

    name: ClassVar[str] = "verify-batch"
    batch_size: ClassVar[int] = 100

    def ask(self, asked: Sequence[PlacedCase]) -> list[Outcome]:
        response = self.post("/v1/keys/verify-batch", {"requests": [self.body(each) for each in asked]})
        for case in asked:
            self.expect_no_secret(response.content, case)
        return [self.read(each, case) for each, case in zip(response.json()["decisions"], asked, strict=True)]

    def line(self, asked: PlacedCase) -> dict[str, str]:
        # The path of payouts.list always names a merchant; only the endpoint's name can leave it out.
        if asked.row.endpoint == "payouts.list" and asked.row.merchant == "unnamed":
            return super().line(asked)
        return self.by_line(asked)


class ForwardAuth(EntryPoint):
    """A gateway with the configuration of its sample."""

    def can_ask(self, row: Row) -> bool:
        """A gateway names a merchant only where the endpoint's rule reads one."""
        if row.endpoint in SPECIAL or endpoint_named(row.endpoint).merchant_from is None:
            return row.merchant == "unnamed"
        return row.endpoint != "payouts.list" or row.merchant != "unnamed"

    def ask_one(self, asked: PlacedCase) -> Outcome:
        method, path = self.rows.path(asked.environment, asked.row)
        headers = self.credentials(asked) | {"X-Service-Token": self.rows.gateways[asked.environment]}
        merchant = self.rows.merchant(asked.row)
        if merchant is not None:
            headers["X-Merchant"] = merchant
        response = self.send(method, f"/{asked.environment}{path}", headers)
        self.expect_no_secret(response.content, asked)
        if response.status_code == 200:
            assert response.content == b""
            assert all(name in response for name in IDENTITY)
            assert response["X-Key-Id"] == self.rows.stored(asked.home, asked.row).key_id
            assert response["X-Customer-Id"] == ("cust-1" if takes_bearer(asked.row) else "")
            return ALLOWED
        assert not any(name in response for name in IDENTITY[:-1])
        return self.read(response)

    def send(self, method: str, uri: str, headers: dict[str, str]) -> Any:
        raise NotImplementedError

    def read(self, response: Any) -> Outcome:
        return read_problem(response)


class Traefik(ForwardAuth):
    name: ClassVar[str] = "traefik"

    def send(self, method: str, uri: str, headers: dict[str, str]) -> Any:
        described = {"Method": method, "Uri": uri, "Host": "127.0.0.1:8000", "For": f"10.9.9.9, {ADDRESS}"}
        sent = headers | {f"X-Forwarded-{name}": value for name, value in described.items()}
        return self.client.get("/v1/authorize/traefik", headers=sent)


class Nginx(ForwardAuth):
    """nginx passes on 401 and 403 alone: every other status becomes 403, and X-Auth-Status holds the original."""

    name: ClassVar[str] = "nginx"

    def send(self, method: str, uri: str, headers: dict[str, str]) -> Any:
        described = {"Method": method, "URI": uri, "Host": "127.0.0.1:8000", "Address": ADDRESS}
        return self.client.get(
            "/v1/authorize/nginx", headers=headers | {f"X-Original-{name}": value for name, value in described.items()}
        )

    def read(self, response: Any) -> Outcome:
        status = int(response["X-Auth-Status"])
        assert response.status_code == (401 if status == 401 else 403)
        expect_headers(status, response["X-Auth-Code"], response)
        return status, response["X-Auth-Code"]


class Envoy(ForwardAuth):
    name: ClassVar[str] = "envoy"

    def send(self, method: str, uri: str, headers: dict[str, str]) -> Any:
        sent = headers | {"X-Envoy-External-Address": ADDRESS}
        return self.client.generic(method, f"/v1/authorize/envoy{uri}", headers=sent)


class Explain(EntryPoint):
    """The console's dry run, which takes the ids of a key and of a customer token and never a secret."""

    name: ClassVar[str] = "explain"

    def can_ask(self, row: Row) -> bool:
        """The dry run assumes possession, so it needs a stored key and the id of a token."""
        return row.state not in UNPROVED and row.bearer != "wrong_secret"

    def ask_one(self, asked: PlacedCase) -> Outcome:
        row = asked.row
        merchant = self.rows.merchant(row)
        presented = VerificationRequest(
            key=None,
            environment=asked.environment,
            endpoint=self._endpoint(asked),
            merchant=merchant,
            merchant_context=merchant,
            store_context="store-1" if row.store == "store" else None,
            bearer=None if row.bearer == "no_bearer" else "a token was sent",
            origin=ORIGIN if row.origin == "origin" else None,
            client_address=ADDRESS,
            is_dry=True,
        )
        token_id = self.rows.tokens[asked.environment].ids.get(row.bearer)
        judgement = explain_described(presented, self.rows.stored(asked.home, row).key_id, token_id, now())
        assert judgement is not None
        assert judgement.spend is None
        code = judgement.verdict.code.value if isinstance(judgement.verdict, Denial) else "allowed"
        return STATUS[code], code

    def _endpoint(self, asked: PlacedCase) -> Endpoint | NoMatchingEndpoint:
        if asked.row.endpoint in SPECIAL:
            return match_endpoint(*self.rows.path(asked.environment, asked.row))
        return find_endpoint(asked.row.endpoint)


ENTRY_POINTS: Sequence[type[EntryPoint]] = (Integration, Verify, VerifyBatch, Traefik, Nginx, Envoy, Explain)


def read_problem(response: Any) -> Outcome:
    """Return the status and code of a problem document, the form of every denial."""
    assert response["Content-Type"] == "application/problem+json", response.content
    assert response["Cache-Control"] == "no-store"
    body = response.json()
    assert body["status"] == response.status_code
    assert body["request_id"] == response["X-Request-Id"]
    expect_headers(response.status_code, body["code"], response)
    return response.status_code, body["code"]


def expect_headers(status: int, code: str, headers: Any) -> None:
    """Check the challenge of a 401 (RFC 9110, 11.6.1) and the methods of a 405 (RFC 9110, 10.2.1)."""
    scheme = "Bearer " if code.startswith("customer_token_") else "ApiKey "
    assert ("WWW-Authenticate" in headers) is (status == 401)
    assert status != 401 or headers["WWW-Authenticate"].startswith(scheme), code
    assert ("Allow" in headers) is (code == "method_not_allowed")
    assert code != "method_not_allowed" or headers["Allow"] == "POST"


def takes_bearer(row: Row) -> bool:
    """Return whether the request carries a valid customer token to an endpoint that accepts one."""
    is_known = row.endpoint not in SPECIAL
    return is_known and row.bearer == "valid" and endpoint_named(row.endpoint).bearer is not Bearer.NONE


def in_batches(asked: Sequence[PlacedCase], size: int) -> Iterator[Sequence[PlacedCase]]:
    for start in range(0, len(asked), size):
        yield asked[start : start + size]


def _without_none(**values: str | None) -> dict[str, str]:
    return {name: value for name, value in values.items() if value is not None}
