"""The console page of a subject that a notice, an audit entry or a break-glass action names.

A page is the name of its admin route without `_change`. Another app registers its pages when it registers its admins.
"""

from collections.abc import Mapping

_by_prefix = {
    "crd_": "keyvault_credential",
    "req_": "keyvault_issuancerequest",
    "opc_": "keyvault_operatorchange",
    "rcp_": "keyvault_recipientkey",
}
"""Page by the prefix of an id."""

_by_kind = {"webhook": ("webhook endpoint", "keyvault_webhookendpoint")}
"""Noun and page by the first part of a notice's kind, for subjects that are row numbers."""

_other_fields: dict[str, str] = {}
"""Page by the id field of an audit entry's details, of other apps."""

_FIELDS = {
    "issuance_request_id": "keyvault_issuancerequest",
    "token_id": "keyvault_servicetoken",
    "act_id": "keyvault_breakglass",
    "change_id": "keyvault_operatorchange",
    "recipient_key_id": "keyvault_recipientkey",
    "credential_id": "keyvault_credential",
    "merchant_id": "keyvault_merchant",
}


def register_pages(
    *,
    by_prefix: Mapping[str, str],
    by_kind: Mapping[str, tuple[str, str]],
    by_field: Mapping[str, str],
) -> None:
    """Add another app's pages."""
    _by_prefix.update(by_prefix)
    _by_kind.update(by_kind)
    _other_fields.update(by_field)


def pages_by_field() -> dict[str, str]:
    """Return the page for each id field of an audit entry's details, most specific first."""
    return {"key_id": "keyvault_key", **_other_fields, **_FIELDS}


def find_page(subject: str, kind: str = "") -> str | None:
    """Return the page of a subject that is no key. `kind`: the kind of the notice that names it."""
    if numbered := _by_kind.get(kind.partition(".")[0]):
        return numbered[1]
    return _by_prefix.get(subject[:4])


def find_noun(kind: str) -> str | None:
    """Return the noun of subjects that are row numbers; None where the subject is an id or a name."""
    numbered = _by_kind.get(kind.partition(".")[0])
    return None if numbered is None else numbered[0]
