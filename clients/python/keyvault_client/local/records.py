"""The service's key records and rules, parsed into the types that the service itself decides with."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from keyvault.access.catalog import Bearer, Catalog, Endpoint, parse_context
from keyvault.access.limits import Limit
from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind, KeyRecord, KeyState, RetirementReason
from keyvault.domain.networks import parse_network


def parse_record(members: Mapping[str, Any]) -> KeyRecord:
    """Parse a key record. It has no digest. Raises ValueError, KeyError or TypeError for anything unexpected."""
    expires_at, retirement, limit = members["expires_at"], members["retirement"], members["limit"]
    return KeyRecord(
        key_id=_text(members["key_id"]),
        credential_id=_text(members["credential_id"]),
        kind=KeyKind(members["kind"]),
        environment=Environment(members["environment"]),
        merchant_id=_text(members["merchant_id"]),
        digest=b"",
        pepper_version=0,
        state=KeyState(members["state"]),
        retirement=None if retirement is None else RetirementReason(retirement),
        expires_at=None if expires_at is None else datetime.fromisoformat(expires_at),
        merchant_active=members["merchant_active"] is True,
        account_active=members["account_active"] is True,
        reports_origin=members["origin_header"] == "report",
        networks=tuple(parse_network(text) for text in members["networks"]),
        limit_count=None if limit is None else int(limit["count"]),
        limit_seconds=None if limit is None else int(limit["seconds"]),
    )


class Rules:
    """The endpoints and their limits. Raises ValueError, KeyError or TypeError for anything unexpected."""

    def __init__(self, members: Mapping[str, Any], environment: Environment) -> None:
        self.catalog = Catalog(tuple(_parse_endpoint(endpoint) for endpoint in members["endpoints"]))
        limits = members["limits"]
        self._default = _limit(limits["default"][environment])
        self._overrides = {
            (override["merchant_id"], override["endpoint"]): _limit(override["limit"])
            for override in limits["overrides"]
            if override["environment"] == environment
        }

    def smallest_count(self, record: KeyRecord, endpoint: Endpoint) -> int:
        """Return the smallest burst of the limits that a request spends from."""
        own = self._overrides.get((record.merchant_id, endpoint.name))
        limit = own or self._overrides.get((None, endpoint.name)) or endpoint.limit
        counts = [record.limit_count or (0 if self._default is None else self._default.count)]
        return min([*counts, limit.count] if limit is not None else counts)


def _parse_endpoint(members: Mapping[str, Any]) -> Endpoint:
    return Endpoint(
        name=_text(members["name"]),
        method=_text(members["method"]),
        path=_text(members["path"]),
        credentials=frozenset(map(KeyKind, members["credentials"])),
        bearer=Bearer(members["bearer"]),
        merchant_from=parse_context(members["merchant_from"] or ""),
        store_from=parse_context(members["store_from"] or ""),
        limit=_limit(members["limit"]),
    )


def _limit(members: Mapping[str, Any] | None) -> Limit | None:
    return None if members is None else Limit(int(members["count"]), int(members["seconds"]))


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError("not a text")
    return value
