"""Reads for the frontends: each runs one query and returns frozen values."""

from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from django.conf import settings
from django.db.models import QuerySet
from msgspec.json import decode

from keyvault.access.customers import CustomerRecord
from keyvault.access.principals import Service
from keyvault.access.verification import TokenRecord, judge_service_token, read_service_token
from keyvault.domain.digests import PepperSet
from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind, KeyRecord, KeyState, RetirementReason
from keyvault.domain.networks import IPNetwork, parse_network
from keyvault.models import CustomerToken, Key, MerchantStatus, ServiceToken
from keyvault.models.keys import OriginHeader
from keyvault.services.keys.rehashing import pending_rehashes
from keyvault.services.peppers.ring import load_peppers, take_pepper

_KEY_COLUMNS = (
    "credential_id",
    "credential__kind",
    "credential__account__environment",
    "credential__account__merchant_id",
    "digest",
    "pepper_version",
    "state",
    "retirement",
    "expires_at",
    "credential__account__merchant__status",
    "credential__account__status",
    "credential__origin_header",
    "credential__networks",
    "credential__account_id",
    "credential__account__limit_count",
    "credential__account__limit_seconds",
    "credential__account__version",
    "key_id",
)
KEY_ID = _KEY_COLUMNS.index("key_id")


def key_rows(key_ids: Collection[str]) -> QuerySet[Key, tuple[Any, ...]]:
    """Return the rows from which `key_record` builds records, in one query."""
    return Key.objects.filter(key_id__in=key_ids).values_list(*_KEY_COLUMNS)


def find_key_record(key_id: str) -> KeyRecord | None:
    row = Key.objects.filter(key_id=key_id).values_list(*_KEY_COLUMNS).first()
    return None if row is None else key_record(row)


def _networks(found: Sequence[str]) -> tuple[IPNetwork, ...]:
    return tuple(map(_network, found))


def key_record(row: Sequence[Any], read_networks: Callable[[Any], tuple[IPNetwork, ...]] = _networks) -> KeyRecord:
    """Build the record of a row of `key_rows`. `read_networks`: parses the networks if they are not a list yet.

    Nearly every cache miss of a verifier calls this. So enums come from lookup tables and fields are positional.
    """
    return KeyRecord(
        row[17],
        row[0],
        _KINDS[row[1]],
        _ENVIRONMENTS[row[2]],
        row[3],
        bytes(row[4]),
        row[5],
        _STATES[row[6]],
        RetirementReason(row[7]) if row[7] else None,
        row[8],
        row[9] == _ACTIVE,
        row[10] == _ACTIVE,
        row[11] == _REPORT,
        read_networks(row[12]) if row[12] else (),
        row[13],
        row[14],
        row[15],
        row[16],
    )


_KINDS = {kind.value: kind for kind in KeyKind}
_ENVIRONMENTS = {environment.value: environment for environment in Environment}
_STATES = {state.value: state for state in KeyState}
_ACTIVE, _REPORT = MerchantStatus.ACTIVE.value, OriginHeader.REPORT.value
_network = lru_cache(maxsize=4096)(parse_network)


def find_customer_record(token_id: str) -> CustomerRecord | None:
    row = CustomerToken.objects.select_related("account").filter(token_id=token_id).first()
    return None if row is None else customer_record(row)


def customer_record(row: CustomerToken) -> CustomerRecord:
    return CustomerRecord(
        token_id=row.token_id,
        environment=Environment(row.account.environment),
        merchant_id=row.account.merchant_id,
        customer_id=row.customer_id,
        digest=bytes(row.digest),
        pepper_version=row.pepper_version,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
    )


def find_token_record(token_id: str) -> TokenRecord | None:
    row = ServiceToken.objects.filter(token_id=token_id).first()
    return None if row is None else token_record(row)


def token_record(row: ServiceToken) -> TokenRecord:
    return TokenRecord(
        Service(
            token_id=row.token_id,
            name=row.name,
            person=row.creator_person,
            permissions=row.permission_set,
            scope=row.access_scope,
            lineage=row.lineage,
            is_probe=row.is_probe,
        ),
        bytes(row.digest),
        row.pepper_version,
        row.expires_at,
        row.revoked_at,
    )


def prove_service_token(text: str | None, now: datetime) -> Service | None:
    """Return the service that holds this token; None for any failure, so that the caller learns no reason.

    Raises VerifierStaleError while this process has not loaded the pepper of the token's digest.
    """
    keystring = read_service_token(text, settings.KEY_PREFIX)
    if keystring is None:
        return None
    peppers = load_peppers(PepperSet.SERVICE)  # before the row is read, see `access.judgement`
    record = find_token_record(keystring.key_id)
    if record is not None:
        peppers = take_pepper(peppers, record.pepper_version)
    service = judge_service_token(keystring, record, peppers, now)
    if service is not None and record is not None:
        proved = (record.digest, record.pepper_version)
        pending_rehashes.note_proof(ServiceToken, service.token_id, keystring.text, proved, peppers)
    return service


def find_keys(key_ids: Collection[str]) -> dict[str, KeyRecord]:
    """Return the existing keys' records by key id."""
    return {row[KEY_ID]: key_record(row) for row in key_rows(key_ids)}


def keys_of_raw(rows: Iterable[Any]) -> dict[str, KeyRecord]:
    """Return the records of rows already read, by key id; their JSON is in PostgreSQL's binary format."""
    return {row[KEY_ID]: key_record(row, _raw_networks) for row in rows}


@lru_cache(maxsize=1024)
def _raw_networks(raw: bytes) -> tuple[IPNetwork, ...]:
    """Parse a raw list of networks. Most lists are empty, and many of the others are equal."""
    return tuple(map(parse_network, decode(raw[1:]) or ()))  # the first byte is the version of the jsonb format


def find_customers(token_ids: Collection[str]) -> dict[str, CustomerRecord]:
    rows = CustomerToken.objects.select_related("account").filter(token_id__in=token_ids)
    return {row.token_id: customer_record(row) for row in rows}


def find_tokens(token_ids: Collection[str]) -> dict[str, TokenRecord]:
    return {row.token_id: token_record(row) for row in ServiceToken.objects.filter(token_id__in=token_ids)}
