"""Send generated requests to a server and compare its responses with those of the oracle."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from keyvault.access.permissions import Permission
from keyvault.access.principals import HOST
from keyvault.access.roles import Role
from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind
from keyvault.domain.revocation import RevocationReason
from keyvault.services.keys.lifecycle import revoke_key
from keyvault.services.merchants.merchants import suspend_merchant
from tests.factories import account, grant, issue, make_merchant, the_operator

from .oracle import BARE, SERVED, Known, Outcome, Sent, predict
from .requests import generate
from .served import Answer, Wire

UNLIMITED = {"KEYVAULT_SANDBOX_LIMIT": "1000000/1", "KEYVAULT_PRODUCTION_LIMIT": "1000000/1"}
"""Settings of the server with limits so high that none refuses a request."""


@dataclass(frozen=True)
class Surprise:
    """A response that the contract does not allow. With the same keys `seed` makes the same request again."""

    seed: int
    sent: Sent
    expected: frozenset[Outcome]
    answer: Answer
    what: str

    def __str__(self) -> str:
        got = f"{self.answer.status} {self.answer.body[:300]!r}"
        return f"seed {self.seed}: {self.what}\n  {self.sent}\n  wants {sorted(self.expected)}\n  got {got}"


def make_keys() -> dict[str, Known]:
    """Make keys in every standing, by their text. The database is set up and has none of these merchants."""
    known = {}
    for merchant in ("acme", "globex"):
        make_merchant(merchant)
    for environment in Environment:
        for kind in KeyKind:
            _, text = issue(account("acme", environment), kind=kind, label=f"{kind}-{environment}")
            known[text.reveal()] = Known(kind, environment)
    key, text = issue(account("acme"), label="revoked")
    admin = the_operator("admin", Role.KEY_ADMINISTRATOR)
    revoke_key(grant(admin, Permission.KEYS_REVOKE, key.credential.account), key, RevocationReason.SUPERSEDED)
    known[text.reveal()] = Known("private", "sandbox", "revoked")
    key, text = issue(account("globex"), label="suspended")
    suspend_merchant(grant(HOST, Permission.MERCHANTS_WRITE), key.credential.account.merchant)
    known[text.reveal()] = Known("private", "sandbox", "suspended")
    return known


def surprises(port: int, known: Mapping[str, Known], seeds: Iterator[int]) -> Iterator[Surprise]:
    wire = Wire(port)
    try:
        for seed in seeds:
            sent = generate(seed, known)
            answer, expected = wire.send(sent.method, sent.wire(port)), predict(sent, known)
            what = _find_fault(sent, answer, expected, known)
            if what:
                yield Surprise(seed, sent, expected, answer, what)
    finally:
        wire.close()


def _find_fault(sent: Sent, answer: Answer, expected: frozenset[Outcome], known: Mapping[str, Known]) -> str:
    if not any(_is_as(sent, answer, outcome) for outcome in expected):
        return "another outcome"
    if expected == {BARE}:
        return ""
    headers = answer.headers
    missing = {"x-request-id", "cache-control"} - headers.keys()
    if answer.status == 401:
        missing |= {"www-authenticate"} - headers.keys()
    if answer.status == 405:
        missing |= {"allow"} - headers.keys()
    if missing:
        return f"without {', '.join(sorted(missing))}"
    if any(text.encode() in answer.body or text in str(headers) for text in known):
        return "a key in the answer"
    return ""


def _is_as(sent: Sent, answer: Answer, outcome: Outcome) -> bool:
    if outcome == SERVED:
        return answer.status not in {401, 403, 429} and answer.status < 500
    if answer.status != outcome[0]:
        return False
    if sent.method == b"HEAD" or outcome[1] == "":
        return True
    if answer.headers.get("content-type") != "application/problem+json":
        return False
    problem = json.loads(answer.body)
    return bool(problem["code"] == outcome[1] and problem["request_id"] == answer.headers.get("x-request-id"))
