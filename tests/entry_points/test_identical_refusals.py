"""What proves nothing is answered in one way, byte by byte, by every door of the real server.

Whoever asks learns neither which key ids exist, nor whose they are, nor what became of them.
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
from tests.factories import account, grant, issue, make_merchant, make_token, the_operator
from tests.fuzz.drive import UNLIMITED
from tests.fuzz.served import serving

pytestmark = [pytest.mark.database, pytest.mark.django_db(transaction=True)]

ORDERS = "/sandbox/merchants/orders/ord_00000000000000000000"


@dataclass(frozen=True)
class Scene:
    """The server's port; good keys by what became of them; tokens of services, and of customers by their merchant."""

    port: int
    keys: Mapping[str, str]
    services: Mapping[str, str]
    customers: Mapping[str, str]

    def send(self, method: str, path: str, headers: Mapping[str, bytes | str], body: bytes = b"") -> bytes:
        """The whole answer as it came, but for what is new in each: request id and date."""
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
def scene(tmp_path: Path) -> Iterator[Scene]:
    for merchant_id in ("acme", "globex", "initech"):
        make_merchant(merchant_id)
    admin = the_operator("admin", Role.KEY_ADMINISTRATOR)
    issued = {
        "good": issue(account()),
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
        "globex": _customer_token(fresh["globex's"]),
    }
    suspend_merchant(grant(HOST, P.MERCHANTS_WRITE), account("initech").merchant)
    services = {
        "all": make_token(P.KEYS_VERIFY, scope=StringScope.SANDBOX)[1].reveal(),
        "of globex": make_token(P.KEYS_VERIFY, scope=StringScope.SANDBOX, merchants=["globex"])[1].reveal(),
    }
    with serving(tmp_path, **UNLIMITED) as port:
        yield Scene(port, {what: text.reveal() for what, (_, text) in issued.items()}, services, customers)


def _fresh(key: Key) -> Key:
    found = get_key(key.key_id)
    assert found is not None
    return found


def _customer_token(key: Key) -> str:
    place = key.credential.account
    holder = KeyHolder(key.key_id, key.credential_id, KeyKind.PRIVATE, key.credential.environment, place.merchant_id)
    allowed = grant(holder, P.CUSTOMER_TOKENS_WRITE, place)
    return issue_customer_token(allowed, place, key, customer_id="cust-1")[1].reveal()


def unproved(scene: Scene) -> dict[str, bytes]:
    """Strings that prove nothing, each for a reason of its own."""
    return {
        "unknown": mint(seed="nobody's").encode(),
        "unknown public": mint(StringKind.PUBLIC, seed="nobody's").encode(),
        **{f"wrong secret of {what} key": forged(text).encode() for what, text in scene.keys.items()},
        "wrong checksum": scene.keys["good"][:-6].encode() + b"000000",
        "malformed": b"nonsense",
        "empty": b"",
        "not ASCII": b"\xc3\xa9",
        "other brand": mint(brand="other").encode(),
        "service token": scene.services["all"].encode(),
        "customer token": scene.customers["acme"].encode(),
    }


# --- the doors --------------------------------------------------------------------------------------------


def integration(scene: Scene, key: bytes, service: str) -> bytes:
    return scene.send("GET", ORDERS, {"X-Api-Key": key})


def integration_posting(scene: Scene, key: bytes, service: str) -> bytes:
    headers: dict[str, bytes | str] = {"X-Api-Key": key, "Content-Type": "application/json", "Idempotency-Key": "1"}
    return scene.send("POST", "/sandbox/merchants/orders", headers, b"{}")


def integration_nowhere(scene: Scene, key: bytes, service: str) -> bytes:
    return scene.send("GET", "/sandbox/nowhere", {"X-Api-Key": key})


def integration_ending(scene: Scene, key: bytes, service: str) -> bytes:
    return scene.send("POST", "/sandbox/credentials/revoke-self", {"X-Api-Key": key})


def verify(scene: Scene, key: bytes, service: str, **more: Any) -> bytes:
    return _post(scene, "/v1/keys/verify", service, _question(key, **more))


def verify_dry(scene: Scene, key: bytes, service: str) -> bytes:
    return verify(scene, key, service, dry_run=True)


def verify_naming(scene: Scene, key: bytes, service: str) -> bytes:
    return verify(scene, key, service, merchant="acme", customer_token="x", origin="https://shop.example")


def verify_batch(scene: Scene, key: bytes, service: str) -> bytes:
    return _post(scene, "/v1/keys/verify-batch", service, {"requests": [_question(key), _question(key)]})


def traefik(scene: Scene, key: bytes, service: str) -> bytes:
    told = {"X-Forwarded-Method": "GET", "X-Forwarded-Uri": ORDERS, "X-Forwarded-Host": "127.0.0.1"}
    return scene.send("GET", "/v1/authorize/traefik", {"X-Service-Token": service, "X-Api-Key": key, **told})


def nginx(scene: Scene, key: bytes, service: str) -> bytes:
    told = {"X-Original-Method": "GET", "X-Original-URI": ORDERS, "X-Original-Host": "127.0.0.1"}
    return scene.send("GET", "/v1/authorize/nginx", {"X-Service-Token": service, "X-Api-Key": key, **told})


def envoy(scene: Scene, key: bytes, service: str) -> bytes:
    return scene.send("GET", f"/v1/authorize/envoy{ORDERS}", {"X-Service-Token": service, "X-Api-Key": key})


Door = Callable[[Scene, bytes, str], bytes]
INTEGRATION: tuple[Door, ...] = (integration, integration_posting, integration_nowhere, integration_ending)
SERVICE: tuple[Door, ...] = (verify, verify_dry, verify_naming, verify_batch, traefik, nginx, envoy)


def _question(key: bytes, **more: Any) -> dict[str, Any]:
    return {"key": key.decode("latin-1"), "environment": "sandbox", "endpoint": "orders.retrieve", **more}


def _post(scene: Scene, path: str, service: str, body: Any) -> bytes:
    headers = {"Authorization": f"Bearer {service}", "Content-Type": "application/json"}
    return scene.send("POST", path, headers, json.dumps(body).encode())


# --- the comparison ---------------------------------------------------------------------------------------


def test_refusals_of_what_proves_nothing_are_identical_on_every_door(scene: Scene) -> None:
    """Status line, headers and their order, body: unknown, malformed and wrong are one answer but for its ids."""
    for door in (*INTEGRATION, *SERVICE):
        answers = {what: door(scene, key, scene.services["all"]) for what, key in unproved(scene).items()}
        _expect_one(answers, door)
        proved = door(scene, scene.keys["good"].encode(), scene.services["all"])
        assert proved not in answers.values(), "a good key is answered like a bad one: nothing was compared"


def test_refusals_of_another_merchant_s_keys_are_identical_to_unknown_ones(scene: Scene) -> None:
    """A service token of one merchant learns nothing of the others' keys: not that they are, nor how they are."""
    foreign = {what: text.encode() for what, text in scene.keys.items() if what != "globex's"}
    for door in SERVICE:
        asked = {**unproved(scene), **foreign}
        answers = {what: door(scene, key, scene.services["of globex"]) for what, key in asked.items()}
        _expect_one(answers, door)
        own = door(scene, scene.keys["globex's"].encode(), scene.services["of globex"])
        assert own not in answers.values()


def test_refusals_of_unproved_customer_tokens_are_identical(scene: Scene) -> None:
    """Beside a good key: unknown, malformed, wrong and another merchant's token are one answer."""
    key = scene.keys["good"]
    bearers = {
        "unknown": mint(StringKind.CUSTOMER_TOKEN, seed="nobody's"),
        "wrong secret": forged(scene.customers["acme"]),
        "another merchant's": scene.customers["globex"],
        "another environment's": mint(StringKind.CUSTOMER_TOKEN, StringScope.PRODUCTION),
        "malformed": "nonsense",
        "API key": key,
    }

    def ask(bearer: str) -> bytes:
        return scene.send("GET", "/sandbox/customers/me", {"X-Api-Key": key, "Authorization": f"Bearer {bearer}"})

    answers = {what: ask(bearer) for what, bearer in bearers.items()}
    _expect_one(answers, ask, code=b"customer_token_invalid")
    assert b" 200 " in ask(scene.customers["acme"]).partition(b"\r\n")[0]


def test_refusals_beyond_the_limit_of_failed_proofs_are_identical_too(scene: Scene) -> None:
    """Who guesses too often is told to come back later, in the same words for every guess; a good key still passes."""
    answers = {what: _until_told_to_wait(scene, key) for what, key in unproved(scene).items()}
    _expect_one(answers, integration)
    assert b'"not_found"' in integration(scene, scene.keys["good"].encode(), "")


def _until_told_to_wait(scene: Scene, key: bytes) -> bytes:
    """The limit gives one back every 0.6 s, which a slow machine takes for one request, but never for so many."""
    for _ in range(5 * FAILED_PROOF_LIMIT.count):
        answer = re.sub(rb"(?mi)^(retry-after): [0-9]+", rb"\1: *", integration(scene, key, ""))
        if b"\r\nretry-after: *" in answer.lower():
            return answer
    raise AssertionError("nobody was told to wait")


def _expect_one(answers: Mapping[str, bytes], door: object, code: bytes = b"credential_invalid") -> None:
    first = next(iter(answers.values()))
    assert b'"%b"' % code in first, (door, first)
    assert {what: answer for what, answer in answers.items() if answer != first} == {}, (door, first)
