"""Every fact that a rule may read is accounted for where a grant is kept for later requests.

The engine keeps a grant for all plain keys of an account, the Python client's memory one for each key. A new fact that
they do not read would let a kept grant authorize what the rules deny. Before you add a fact here, read
`Engine._eligible_key`, `Engine._template_key` and `_grant` and `_decide` in keyvault_client/local/memory.py.
"""

from dataclasses import fields

import pytest

from keyvault.access.rules import EndpointRequest
from keyvault.domain.keys import KeyRecord

RECORD = {
    "key_id": "identifies the cached entry",
    "credential_id": "only in the response, see `EligibleKey.identity`",
    "kind": "in `_template_key`",
    "environment": "in `_template_key`",
    "merchant_id": "`_template_key` refuses another merchant",
    "digest": "compared in `_proves`",
    "pepper_version": "compared in `_proves`",
    "state": "`_eligible_key` accepts active keys only",
    "retirement": "only the code of a denial",
    "expires_at": "the deadline of the cached entry",
    "merchant_active": "required by `_eligible_key`",
    "account_active": "required by `_eligible_key`",
    "reports_origin": "only for private keys with an Origin, which `_template_key` refuses",
    "networks": "checked for each request, see `EligibleKey.within`",
    "account_id": "in the key of the spend plans",
    "limit_count": "in the key of the spend plans",
    "limit_seconds": "in the key of the spend plans",
    "account_version": "in the key of the spend plans",
}
"""How the engine decides by each member of the key record. The client's memory keeps its grants with the record."""

REQUEST = {
    "named_merchant": ("in `_template_key`", "in the key of `_grant`"),
    "has_bearer": ("decided by the slow path", "decided by the service"),
    "has_origin": ("in `_template_key`", "in the key of `_grant`"),
    "client_address": ("checked for each request if the key has networks", "in the key of `_grant`, likewise"),
    "merchant_context": ("in `_template_key`", "the path is in the key of `_grant`"),
    "store_context": ("in `_template_key`", "the path is in the key of `_grant`"),
    "customer": ("decided by the slow path", "decided by the service"),
}
"""How the engine, and how the client's memory, decides by each fact of a request."""


@pytest.mark.parametrize(
    ("facts", "accounted"),
    [(KeyRecord.__struct_fields__, RECORD), ([each.name for each in fields(EndpointRequest)], REQUEST)],
    ids=["record", "request"],
)
def test_kept_grants_account_for_every_fact(facts: tuple[str, ...], accounted: dict[str, object]) -> None:
    assert set(facts) == set(accounted)
