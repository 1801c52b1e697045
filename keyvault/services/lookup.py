"""Reads for the doors: one query each, frozen values out."""

from datetime import datetime

from django.conf import settings

from keyvault.access.customers import CustomerRecord
from keyvault.access.principals import Service
from keyvault.domain.digests import DECOY_DIGEST, DECOY_VERSION, PepperSet
from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind, KeyRecord, KeyState, Retirement
from keyvault.domain.keystring import StringKind, parse_keystring
from keyvault.domain.networks import parse_network
from keyvault.models import CustomerToken, Key, MerchantStatus, ServiceToken
from keyvault.models.keys import OriginHeader
from keyvault.services.peppers import load_peppers, take_pepper
from keyvault.services.rehashing import pending_rehashes

BASE_URLS = {Environment(name): url for name, url in settings.BASE_URLS.items()}


def find_key_record(key_id: str) -> KeyRecord | None:
    row = (
        Key.objects.filter(key_id=key_id)
        .values_list(
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
        )
        .first()
    )
    if row is None:
        return None
    return KeyRecord(
        key_id=key_id,
        credential_id=row[0],
        kind=KeyKind(row[1]),
        environment=Environment(row[2]),
        merchant_id=row[3],
        digest=bytes(row[4]),
        pepper_version=row[5],
        state=KeyState(row[6]),
        retirement=Retirement(row[7]) if row[7] else None,
        expires_at=row[8],
        merchant_active=row[9] == MerchantStatus.ACTIVE,
        account_active=row[10] == MerchantStatus.ACTIVE,
        reports_origin=row[11] == OriginHeader.REPORT,
        networks=tuple(map(parse_network, row[12])),
        account_id=row[13],
        limit_count=row[14],
        limit_seconds=row[15],
        account_version=row[16],
    )


def find_customer_record(token_id: str) -> CustomerRecord | None:
    row = CustomerToken.objects.select_related("account").filter(token_id=token_id).first()
    if row is None:
        return None
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


def prove_service_token(text: str | None, now: datetime) -> Service | None:
    """The service that holds this token, or None for every reason there may be: the caller learns no more.

    Raises VerifierStaleError while this process has not loaded the pepper that the token is hashed with.
    """
    keystring = parse_keystring(text, settings.KEY_BRAND) if text else None
    if keystring is None or keystring.kind is not StringKind.SERVICE_TOKEN:
        return None
    peppers = load_peppers(PepperSet.SERVICE)  # before the row is read, see `services.verification`
    row = ServiceToken.objects.filter(token_id=keystring.key_id).first()
    if row is not None:
        peppers = take_pepper(peppers, row.pepper_version)
    digest, version = (DECOY_DIGEST, DECOY_VERSION) if row is None else (bytes(row.digest), row.pepper_version)
    proved = peppers.matches(keystring.text, digest, version)
    if row is None or not proved or row.revoked_at is not None or now >= row.expires_at:
        return None
    pending_rehashes.note_proof(ServiceToken, row.token_id, keystring.text, (digest, version), peppers)
    return Service(
        token_id=row.token_id,
        name=row.name,
        person=row.creator_person,
        permissions=row.permission_set,
        environments=row.environments,
        merchants=None if row.merchants is None else frozenset(row.merchants),
        lineage=row.lineage,
        is_probe=row.is_probe,
    )
