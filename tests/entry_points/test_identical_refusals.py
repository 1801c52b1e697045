"""Every entry point of the real server denies all unproved credentials with byte-identical responses.

A client cannot learn which key ids exist, which merchant owns them, or their state.
"""

import json
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from keyvault.access.limits import FAILED_PROOF_LIMIT
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST, KeyHolder
from keyvault.access.roles import Role
from keyvault.domain.keys import KeyKind
from keyvault.domain.keystring import StringKind, StringScope
from keyvault.domain.revocation import RevocationReason
from keyvault.models import Key
from keyvault.services.keys.lifecycle import get_key, revoke_key, suspend_key
from keyvault.services.merchants.merchants import suspend_merchant
from keyvault.services.tokens.customer_tokens import issue_customer_token
from tests.domain.minting import mint
from tests.entry_points.golden import forged
from tests.factories import PRODUCTION, account, grant, issue, make_merchant, make_token, the_operator
from tests.fuzz.drive import UNLIMITED
from tests.fuzz.served import serving

pytestmark = [pytest.mark.database, pytest.mark.django_db(transaction=True), pytest.mark.long]

DENIED = re.compile(rb'"code": ?"credential_invalid"')
ORDERS = "/sandbox/merchants/orders/ord_00000000000000000000"


@dataclass(frozen=True)
class RefusalScene:
    """The server's port; issued keys by their state; service tokens; customer tokens by their owner."""

    port: int
    keys: Mapping[str, str]
    services: Mapping[str, str]
    customers: Mapping[str, str]

    def send(self, method: str, path: str, headers: Mapping[str, bytes | str], body: bytes = b"") -> bytes:
        """Return the raw response with the request id and the date masked."""
        lines = [f"{method} {path} HTTP/1.1".encode(), b"Host: 127.0.0.1", b"Connection: close"]
        lines += [
            name.encode() + b": " + (value.encode() if isinstance(value, str) else value)
            for name, value in headers.items()
        ]
        lines += [b"Content-Length: %d" % len(body), b"", body]
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as connection:
            connection.sendall(b"\r\n".join(lines))
            answer = b"".join(iter(lambda: connection.recv(65_536), b""))
        answer = re.sub(rb"(?mi)^(x-request-id|date): [^\r]+", rb"\1: *", answer)
        return re.sub(rb'("request_id": ?)"[0-9A-Za-z-]{22,}"', rb'\1"*"', answer)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[RefusalScene]:
    for merchant_id in ("acme", "globex", "initech"):
        make_merchant(merchant_id)
    admin = the_operator("admin", Role.KEY_ADMINISTRATOR)
    issued = {
        "good": issue(account()),
        "good, too": issue(account(), label="good, too"),
        "suspended": issue(account(), label="suspended"),
        "revoked": issue(account(), label="revoked"),
        "initech's": issue(account("initech")),
        "globex's": issue(account("globex")),
    }
    fresh = {what: _fresh(key) for what, (key, _) in issued.items()}
    suspend_key(grant(admin, P.KEYS_SUSPEND, account()), fresh["suspended"])
    revoke_key(grant(admin, P.KEYS_REVOKE, account()), fresh["revoked"], RevocationReason.SUPERSEDED)
    customers = {
        "acme": _customer_token(fresh["good"]),
        "acme, production": _customer_token(_fresh(issue(account("acme", PRODUCTION))[0])),
        "globex": _customer_token(fresh["globex's"]),
    }
    suspend_merchant(grant(HOST, P.MERCHANTS_WRITE), account("initech").merchant)
    services = {
        "all": make_token(P.KEYS_VERIFY, scope=StringScope.SANDBOX)[1].reveal(),
        "of globex": make_token(P.KEYS_VERIFY, scope=StringScope.SANDBOX, merchants=["globex"])[1].reveal(),
    }
    with serving(tmp_path, **UNLIMITED) as port:
        yield RefusalScene(port, {what: text.reveal() for what, (_, text) in issued.items()}, services, customers)


def _fresh(key: Key) -> Key:
    found = get_key(key.key_id)
    assert found is not None
    return found


def _customer_token(key: Key) -> str:
    place = key.credential.account
    holder = KeyHolder(key.key_id, key.credential_id, KeyKind.PRIVATE, key.credential.environment, place.merchant_id)
    allowed = grant(holder, P.CUSTOMER_TOKENS_WRITE, place)
    return issue_customer_token(allowed, place, key, customer_id="cust-1")[1].reveal()


def unproved(scene: RefusalScene) -> dict[str, bytes]:
    """Return strings that prove possession of no key, by the reason."""
    return {
        "unknown": mint(seed="unknown").encode(),
        "unknown public": mint(StringKind.PUBLIC, seed="unknown").encode(),
        **{f"wrong secret of {what} key": forged(text).encode() for what, text in scene.keys.items()},
        "wrong checksum": scene.keys["good"][:-6].encode() + b"000000",
        "malformed": b"nonsense",
        "empty": b"",
        "not ASCII": b"\xc3\xa9",
        "other key prefix": mint(key_prefix="other").encode(),
        "service token": scene.services["all"].encode(),
        "customer token": scene.customers["acme"].encode(),
    }


# --- entry points --------------------------------------------------------------------------------------------


def integration(scene: RefusalScene, key: bytes, service: str) -> bytes:
    return scene.send("GET", ORDERS, {"X-Api-Key": key})


def integration_posting(scene: RefusalScene, key: bytes, service: str) -> bytes:
    headers: dict[str, bytes | str] = {"X-Api-Key": key, "Content-Type": "application/json", "Idempotency-Key": "1"}
    return scene.send("POST", "/sandbox/merchants/orders", headers, b"{}")


def integration_unknown_path(scene: RefusalScene, key: bytes, service: str) -> bytes:
    return scene.send("GET", "/sandbox/nowhere", {"X-Api-Key": key})


def integration_revoking(scene: RefusalScene, key: bytes, service: str) -> bytes:
    return scene.send("POST", "/sandbox/credentials/revoke-self", {"X-Api-Key": key})


def verify(scene: RefusalScene, key: bytes, service: str, **more: Any) -> bytes:
    return _post(scene, "/v1/keys/verify", service, _question(key, **more))


def verify_dry(scene: RefusalScene, key: bytes, service: str) -> bytes:
    return verify(scene, key, service, dry_run=True)


def verify_naming(scene: RefusalScene, key: bytes, service: str) -> bytes:
    return verify(scene, key, service, merchant="acme", customer_token="x", origin="https://shop.example")


def verify_batch(scene: RefusalScene, key: bytes, service: str) -> bytes:
    return _post(scene, "/v1/keys/verify-batch", service, {"requests": [_question(key), _question(key)]})


def traefik(scene: RefusalScene, key: bytes, service: str) -> bytes:
    described = {"X-Forwarded-Method": "GET", "X-Forwarded-Uri": ORDERS, "X-Forwarded-Host": "127.0.0.1"}
    return scene.send("GET", "/v1/authorize/traefik", {"X-Service-Token": service, "X-Api-Key": key, **described})


def nginx(scene: RefusalScene, key: bytes, service: str) -> bytes:
    described = {"X-Original-Method": "GET", "X-Original-URI": ORDERS, "X-Original-Host": "127.0.0.1"}
    return scene.send("GET", "/v1/authorize/nginx", {"X-Service-Token": service, "X-Api-Key": key, **described})


def envoy(scene: RefusalScene, key: bytes, service: str) -> bytes:
    return scene.send("GET", f"/v1/authorize/envoy{ORDERS}", {"X-Service-Token": service, "X-Api-Key": key})


Send = Callable[[RefusalScene, bytes, str], bytes]
INTEGRATION: tuple[Send, ...] = (integration, integration_posting, integration_unknown_path, integration_revoking)
GATEWAYS: tuple[Send, ...] = (traefik, nginx, envoy)
SERVICE: tuple[Send, ...] = (verify, verify_dry, verify_naming, verify_batch, *GATEWAYS)


def _question(key: bytes, **more: Any) -> dict[str, Any]:
    return {"key": key.decode("latin-1"), "environment": "sandbox", "endpoint": "orders.retrieve", **more}


def _post(scene: RefusalScene, path: str, service: str, body: Any) -> bytes:
    headers = {"Authorization": f"Bearer {service}", "Content-Type": "application/json"}
    return scene.send("POST", path, headers, json.dumps(body).encode())


# --- comparison ---------------------------------------------------------------------------------------


def refusals_of_unproved_keys_are_identical_at_every_entry_point(scene: RefusalScene) -> None:
    """Guarantee: status line, header order and body do not reveal whether a key is unknown, malformed or wrong."""
    for send in (*INTEGRATION, *SERVICE):
        answers = {what: send(scene, key, scene.services["all"]) for what, key in unproved(scene).items()}
        _expect_one(answers, send)
        proved = send(scene, scene.keys["good"].encode(), scene.services["all"])
        assert not DENIED.search(proved), "the entry point refuses a good key too: nothing was compared"


def refusals_of_another_merchant_s_keys_are_identical_to_unknown_ones(scene: RefusalScene) -> None:
    """Guarantee: a service token of one merchant learns neither the existence nor the state of another's keys."""
    foreign = {what: text.encode() for what, text in scene.keys.items() if what != "globex's"}
    for send in SERVICE:
        asked = {**unproved(scene), **foreign}
        answers = {what: send(scene, key, scene.services["of globex"]) for what, key in asked.items()}
        _expect_one(answers, send)
        own = send(scene, scene.keys["globex's"].encode(), scene.services["of globex"])
        assert not DENIED.search(own)
        assert send not in GATEWAYS or own.startswith(b"HTTP/1.1 200 ")


def refusals_of_unproved_customer_tokens_are_identical(scene: RefusalScene) -> None:
    """Guarantee: with a good key, unknown, malformed, wrong and other merchants' tokens get the same response."""
    key = scene.keys["good"]
    bearers = {
        "unknown": mint(StringKind.CUSTOMER_TOKEN, seed="unknown"),
        "wrong secret": forged(scene.customers["acme"]),
        "another merchant's": scene.customers["globex"],
        "another environment's": scene.customers["acme, production"],
        "malformed": "nonsense",
        "empty": "",
        "API key": key,
    }

    def ask(bearer: str) -> bytes:
        return scene.send("GET", "/sandbox/customers/me", {"X-Api-Key": key, "Authorization": f"Bearer {bearer}"})

    answers = {what: ask(bearer) for what, bearer in bearers.items()}
    _expect_one(answers, ask, code=b"customer_token_invalid")
    assert b" 200 " in ask(scene.customers["acme"]).partition(b"\r\n")[0]


def refusals_beyond_the_limit_of_failed_proofs_are_identical(scene: RefusalScene) -> None:
    """Guarantee: beyond the limit every guess gets the same response with Retry-After; a good key still passes."""
    answers = {what: _guess_until_limited(scene, key) for what, key in unproved(scene).items()}
    _expect_one(answers, integration)
    assert b'"not_found"' in integration(scene, scene.keys["good, too"].encode(), "")


def _guess_until_limited(scene: RefusalScene, key: bytes) -> bytes:
    """Return the first response with Retry-After.

    The limit gives back one attempt every 0.6 s, so that a slow machine needs more attempts than the limit.
    """
    for _ in range(5 * FAILED_PROOF_LIMIT.count):
        answer = re.sub(rb"(?mi)^(retry-after): [0-9]+", rb"\1: *", integration(scene, key, ""))
        if b"\r\nretry-after: *" in answer.lower():
            return answer
    raise AssertionError("no response had a Retry-After")


def _expect_one(answers: Mapping[str, bytes], send: object, code: bytes = b"credential_invalid") -> None:
    first = next(iter(answers.values()))
    assert b'"%b"' % code in first, (send, first)
    assert {what: answer for what, answer in answers.items() if answer != first} == {}, (send, first)


CHECKS = (
    refusals_of_unproved_customer_tokens_are_identical,
    refusals_of_another_merchant_s_keys_are_identical_to_unknown_ones,
    refusals_of_unproved_keys_are_identical_at_every_entry_point,
    refusals_beyond_the_limit_of_failed_proofs_are_identical,
)
"""In this order, because the third check revokes the good key, and the last leaves its client limited."""


def test_refusals_of_unproved_credentials_are_identical(scene: RefusalScene, subtests: pytest.Subtests) -> None:
    """One server answers all checks, because its start takes most of the time."""
    for check in CHECKS:
        with subtests.test(check.__name__):
            check(scene)
