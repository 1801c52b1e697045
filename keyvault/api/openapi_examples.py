"""Examples for the OpenAPI page: each operation shows its parameters, a body and a successful response."""

from collections.abc import Mapping
from typing import Any

from keyvault.api.openapi_components import Schema

KEY_ID, CREDENTIAL_ID = "4nWq8TzR1bYc6LdE", "crd_7Yk2Lm9QwXv3RtB5Nc1Z"
KEY = f"kv_prv_sbx_{KEY_ID}…"

VALUES: dict[str, Any] = {
    "allowed": True,
    "amount_minor": 1250,
    "approvals": ["approver"],
    "approvals_needed": 1,
    "campaign_id": None,
    "check": None,
    "ciphertext": "q83vEjRWeJA",
    "client_ip": "192.0.2.1",
    "closed_at": None,
    "code": None,
    "complete": True,
    "cost": 1,
    "credential": "private",
    "credential_id": CREDENTIAL_ID,
    "currency": "EUR",
    "cursor": f"1795000000000000.{CREDENTIAL_ID}",
    "customer_id": "customer-17",
    "door": "verify",
    "after": "4711",
    "enc": "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8",
    "endpoint": "orders.create",
    "environment": "sandbox",
    "errors": [],
    "evidence_id": "evd_2Bc5Df8Gh1Jk4Mn7Pq0S",
    "Idempotency-Key": "3f1c6d0e-1",
    "issuance_request_id": "req_9Zx6Cv3Bn0Ml7Kj4Hg1F",
    "key": KEY,
    "key_id": KEY_ID,
    "key_ids": KEY_ID,
    "kind": "private",
    "label": "checkout",
    "limit": 50,
    "merchant": "acme",
    "merchant_from": None,
    "merchant_id": "acme",
    "method": "POST",
    "name": "orders.create",
    "network": "192.0.2.0/24",
    "next_cursor": None,
    "order_token": "ord_5Tg8Hn2KpRz7Vw4Xy1Qb",
    "origin": "",
    "path": "merchants/orders",
    "plan_digest": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "predecessor_key_id": KEY_ID,
    "Prefer": "wait=1",
    "reason": "superseded",
    "reader": "payments-7c2f",
    "replacement_key_id": "9KpRz7Vw4Xy1Qb5T",
    "request_id": "req-6b1f0c2a9d3e4857",
    "retirement": None,
    "rotation_id": "rot_3Fh6Jk9Mn2Pq5Rs8Tv1W",
    "secret_available": True,
    "sequence": "4711",
    "source": "192.0.2.0/24 shop/1.0",
    "stalled_from": None,
    "state": "active",
    "status": 200,
    "store_from": None,
    "suite": "DHKEM(X25519, HKDF-SHA256), HKDF-SHA256, AES-256-GCM",
    "summary": "Creates an order.",
    "token": "kv_cat_sbx_8Lm3Np6Qr9St2Uv5…",
    "token_id": "8Lm3Np6Qr9St2Uv5",
    "token_ids": "8Lm3Np6Qr9St2Uv5",
    "ttl_seconds": 900,
    "user_agent": "shop/1.0",
    "verifier_id": "vrf_1Ab4Cd7Ef0Gh3Ij6Kl9M",
    "wait": "wait=1",
    "waiting_for": "approval by a second person",
    "why": "",
    "X-Forwarded-For": "192.0.2.1",
    "X-Forwarded-Host": "api.example.com",
    "X-Forwarded-Method": "GET",
    "X-Forwarded-Uri": "/sandbox/merchants/orders/ord_5Tg8Hn2KpRz7Vw4Xy1Qb",
    "X-Original-Address": "192.0.2.1",
    "X-Original-Host": "api.example.com",
    "X-Original-Method": "GET",
    "X-Original-URI": "/sandbox/merchants/orders/ord_5Tg8Hn2KpRz7Vw4Xy1Qb",
}
"""Values of parameters and members by their names; members without one get a value of their type."""

INSTANT = "2026-11-23T09:30:00Z"
_BY_TYPE: dict[str, Any] = {"string": "text", "integer": 1, "number": 1, "boolean": False, "null": None}


def example_of(schema: Mapping[str, Any], components: Mapping[str, Schema], name: str = "") -> Any:
    """Return a value that the schema accepts, with all required members; all members where none is required."""
    if "$ref" in schema:
        return example_of(components[schema["$ref"].rpartition("/")[2]], components, name)
    if "examples" in schema:
        return schema["examples"][0]
    for alternatives in ("allOf", "oneOf", "anyOf"):
        if alternatives in schema and "properties" not in schema and "type" not in schema:
            return example_of(schema[alternatives][0], components, name)
    kind = schema.get("type", "object")
    kinds = kind if isinstance(kind, list) else [kind]
    if "enum" in schema:
        return VALUES[name] if VALUES.get(name) in schema["enum"] and name in VALUES else schema["enum"][0]
    if "object" in kinds and "properties" in schema:
        members = schema.get("required") or schema["properties"]
        return {member: example_of(schema["properties"][member], components, member) for member in members}
    if "object" in kinds:
        return {}
    if "array" in kinds:
        listed = VALUES.get(name)
        return listed if isinstance(listed, list) else [example_of(schema["items"], components, name)]
    if name in VALUES and _fits(VALUES[name], kinds):
        return VALUES[name]
    if schema.get("format") == "date-time":
        return INSTANT
    return schema.get("minimum", _BY_TYPE[kinds[0]]) if kinds[0] == "integer" else _BY_TYPE[kinds[0]]


def _fits(value: Any, kinds: list[str]) -> bool:
    names = {str: "string", bool: "boolean", int: "integer", type(None): "null"}
    return names.get(type(value)) in kinds


def add_examples(operation: dict[str, Any], components: Mapping[str, Schema]) -> None:
    """Add an example to each parameter, to the request's body and to the body of each successful response."""
    for parameter in operation.get("parameters", ()):
        parameter.setdefault("example", example_of(parameter["schema"], components, parameter["name"]))
    bodies = [operation["requestBody"]] if "requestBody" in operation else []
    bodies += [response for status, response in operation["responses"].items() if status < "300"]
    for body in bodies:
        for media_type, content in body.get("content", {}).items():
            if media_type == "application/json":
                content.setdefault("example", example_of(content["schema"], components))
            elif media_type in TEXTS:
                content.setdefault("example", TEXTS[media_type])


TEXTS = {
    "text/plain": 'keyvault_denials_total{code="key_revoked"} 3\n',
    "text/html": "<!doctype html>\n<title>Keyvault</title>\n",
}
"""Examples of responses that are not JSON, by media type."""
