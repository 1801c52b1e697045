"""The doors of the golden matrix: how each is asked, and how its answer is read back as a status and a code.

A door says which cases can be put to it, and where it answers otherwise than the matrix demands, with the reason.
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
from tests.entry_points.golden import ADDRESS, STATUS, UNPROVED, Row
from tests.entry_points.golden_rows import Rows, endpoint_named
from tests.factories import now

Outcome = tuple[int, str]
"""Status and code; 200 and `allowed` for whatever a door says yes with."""

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

_attempts = count()


@dataclass(frozen=True)
class Asked:
    """One case: the key's home, and the environment that the request goes to."""

    row: Row
    home: Environment
    environment: Environment


@dataclass(frozen=True)
class Door:
    """`demanded` are the matrix's verdicts."""

    rows: Rows
    demanded: Mapping[Row, str]
    # One for all cases: making a client takes longer than being answered.
    client: Client = field(default_factory=Client)
    name: ClassVar[str] = ""
    at_once: ClassVar[int] = 1

    def can_ask(self, row: Row) -> bool:
        return True

    def demand(self, row: Row) -> Outcome:
        code = self.demanded[row]
        return STATUS[code], code

    def ask(self, asked: Sequence[Asked]) -> list[Outcome]:
        return [self.ask_one(each) for each in asked]

    def ask_one(self, asked: Asked) -> Outcome:
        raise NotImplementedError

    def credentials(self, asked: Asked) -> dict[str, str]:
        """The client's own headers."""
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


class Integration(Door):
    name: ClassVar[str] = "integration"

    def can_ask(self, row: Row) -> bool:
        """Nothing on this plane names a merchant but the key."""
        return row.merchant == "nobody"

    def demand(self, row: Row) -> Outcome:
        if row.endpoint in UPSTREAM:
            # Their servers are somewhere else: here there is nothing of that name.
            row = row._replace(endpoint="(unknown)")
        if row.endpoint == "credentials.revoke_self" and self._may_still_end(row):
            # Whoever ends a leaked key may say so twice, and may end one that is merely suspended.
            return ALLOWED
        return super().demand(row)

    def _may_still_end(self, row: Row) -> bool:
        code = self.demanded[row]
        ended = code in {"key_revoked", "merchant_suspended"} or (code == "key_not_active" and row.state == "suspended")
        return row.kind == "private" and ended

    def ask_one(self, asked: Asked) -> Outcome:
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
        if response.status_code < 300:
            return ALLOWED
        found = read_problem(response)
        if found == (404, "not_found") and asked.row.endpoint == "credentials.acknowledge":
            return ALLOWED  # the key was let in; it is the replacement of no rotation
        return found


_BODIES = {"orders.create": {"amount_minor": 1, "currency": "EUR"}}


class Verify(Door):
    """Asks by the endpoint's name."""

    name: ClassVar[str] = "verify"

    def can_ask(self, row: Row) -> bool:
        """A name has no URL, and the line of payouts.list always names a merchant."""
        return row.state != "in_url_too" or row.endpoint != "payouts.list" or row.merchant != "nobody"

    def ask_one(self, asked: Asked) -> Outcome:
        return self.read(self.post("/v1/keys/verify", self.body(asked)), asked)

    def body(self, asked: Asked) -> dict[str, Any]:
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

    def line(self, asked: Asked) -> dict[str, str]:
        if asked.row.endpoint == "(other_method)" or asked.row.state == "in_url_too":
            return self.by_line(asked)
        return {"endpoint": "nothing.here" if asked.row.endpoint == "(unknown)" else asked.row.endpoint}

    def by_line(self, asked: Asked) -> dict[str, str]:
        method, path = self.rows.path(asked.environment, asked.row)
        return {"method": method, "path": path}

    def post(self, path: str, body: Any) -> Any:
        headers = {"Authorization": f"Bearer {self.rows.service}"}
        response = self.client.post(path, json.dumps(body), "application/json", headers=headers)
        assert response.status_code == 200, response.content
        return response.json()

    def read(self, answer: dict[str, Any], asked: Asked) -> Outcome:
        """The decision, once it was seen to agree with itself."""
        code = answer["code"] or "allowed"
        assert answer["allowed"] is (answer["status"] == 200) is (answer["code"] is None)
        is_named = code not in PROVES_NOTHING and asked.row.state not in UNPROVED
        assert ("key_id" in answer) is is_named, (asked, answer)
        if is_named:
            assert answer["key_id"] == self.rows.stored(asked.home, asked.row).key_id
        if not answer["allowed"]:
            problem = answer["problem"]
            assert (problem["status"], problem["code"]) == (answer["status"], code)
            assert problem["request_id"] == answer["request_id"]
            assert answer["check"] == problem.get("check") == PROBLEM_TYPES[ErrorCode(code)].check
            assert ("WWW-Authenticate" in answer["headers"]) is (answer["status"] == 401)
        return answer["status"], code


class VerifyBatch(Verify):
    """Asks by the request line, where it says the same as the name."""

    name: ClassVar[str] = "verify-batch"
    at_once: ClassVar[int] = 100

    def ask(self, asked: Sequence[Asked]) -> list[Outcome]:
        answer = self.post("/v1/keys/verify-batch", {"requests": [self.body(each) for each in asked]})
        return [self.read(each, case) for each, case in zip(answer["decisions"], asked, strict=True)]

    def line(self, asked: Asked) -> dict[str, str]:
        # The line of payouts.list always names a merchant, so that only its name can leave it out.
        if asked.row.endpoint == "payouts.list" and asked.row.merchant == "nobody":
            return super().line(asked)
        return self.by_line(asked)


class ForwardAuth(Door):
    """A gateway that is set up as its sample."""

    def can_ask(self, row: Row) -> bool:
        """A gateway names a merchant where the endpoint's rule reads one, and nowhere else."""
        if row.endpoint in SPECIAL or endpoint_named(row.endpoint).merchant_from is None:
            return row.merchant == "nobody"
        return row.endpoint != "payouts.list" or row.merchant != "nobody"

    def ask_one(self, asked: Asked) -> Outcome:
        method, path = self.rows.path(asked.environment, asked.row)
        headers = self.credentials(asked) | {"X-Service-Token": self.rows.gateways[asked.environment]}
        merchant = self.rows.merchant(asked.row)
        if merchant is not None:
            headers["X-Merchant"] = merchant
        response = self.send(method, f"/{asked.environment}{path}", headers)
        if response.status_code == 200:
            assert response.content == b""
            assert all(name in response for name in IDENTITY)
            assert response["X-Key-Id"] == self.rows.stored(asked.home, asked.row).key_id
            assert (response["X-Customer-Id"] == "cust-1") is (self._takes_bearer(asked.row))
            return ALLOWED
        assert not any(name in response for name in IDENTITY[:-1])
        return self.read(response)

    def _takes_bearer(self, row: Row) -> bool:
        return row.bearer == "valid" and endpoint_named(row.endpoint).bearer is not Bearer.NONE

    def send(self, method: str, uri: str, headers: dict[str, str]) -> Any:
        raise NotImplementedError

    def read(self, response: Any) -> Outcome:
        return read_problem(response)


class Traefik(ForwardAuth):
    name: ClassVar[str] = "traefik"

    def send(self, method: str, uri: str, headers: dict[str, str]) -> Any:
        told = {"Method": method, "Uri": uri, "Host": "127.0.0.1:8000", "For": f"10.9.9.9, {ADDRESS}"}
        sent = headers | {f"X-Forwarded-{name}": value for name, value in told.items()}
        return self.client.get("/v1/authorize/traefik", headers=sent)


class Nginx(ForwardAuth):
    """Its statuses are mapped: 401 stays, whatever else denies is 403 and says in X-Auth-Status what it was."""

    name: ClassVar[str] = "nginx"

    def send(self, method: str, uri: str, headers: dict[str, str]) -> Any:
        told = {"Method": method, "URI": uri, "Host": "127.0.0.1:8000", "Address": ADDRESS}
        return self.client.get(
            "/v1/authorize/nginx", headers=headers | {f"X-Original-{name}": value for name, value in told.items()}
        )

    def read(self, response: Any) -> Outcome:
        status = int(response["X-Auth-Status"])
        assert response.status_code == (401 if status == 401 else 403)
        return status, response["X-Auth-Code"]


class Envoy(ForwardAuth):
    name: ClassVar[str] = "envoy"

    def send(self, method: str, uri: str, headers: dict[str, str]) -> Any:
        sent = headers | {"X-Envoy-External-Address": ADDRESS}
        return self.client.generic(method, f"/v1/authorize/envoy{uri}", headers=sent)


class Explain(Door):
    """The console's dry run: it is given the ids of a key and a token, and never a secret."""

    name: ClassVar[str] = "explain"

    def can_ask(self, row: Row) -> bool:
        """Possession is assumed, so that there has to be a key."""
        return row.state not in UNPROVED

    def ask_one(self, asked: Asked) -> Outcome:
        row = asked.row
        merchant = self.rows.merchant(row)
        presented = VerificationRequest(
            key=None,
            environment=asked.environment,
            endpoint=self._endpoint(asked),
            merchant=merchant,
            merchant_context=merchant,
            store_context="store-1" if row.store == "store" else None,
            bearer=None if row.bearer == "no_bearer" else "there is one",
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

    def _endpoint(self, asked: Asked) -> Endpoint | NoMatchingEndpoint:
        if asked.row.endpoint in SPECIAL:
            return match_endpoint(*self.rows.path(asked.environment, asked.row))
        return find_endpoint(asked.row.endpoint)


DOORS: Sequence[type[Door]] = (Integration, Verify, VerifyBatch, Traefik, Nginx, Envoy, Explain)


def read_problem(response: Any) -> Outcome:
    """A problem document, as every denial is."""
    assert response["Content-Type"] == "application/problem+json", response.content
    assert response["Cache-Control"] == "no-store"
    body = response.json()
    assert body["status"] == response.status_code
    assert body["request_id"] == response["X-Request-Id"]
    assert ("WWW-Authenticate" in response) is (response.status_code == 401)
    return response.status_code, body["code"]


def in_batches(asked: Sequence[Asked], size: int) -> Iterator[Sequence[Asked]]:
    for start in range(0, len(asked), size):
        yield asked[start : start + size]


def _without_none(**values: str | None) -> dict[str, str]:
    return {name: value for name, value in values.items() if value is not None}
