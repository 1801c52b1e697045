"""Settings of an account for browsers and apps: client configuration, allowed origins, customer token lifetime."""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from django.db import connection
from django.db.models import TextField
from django.db.models.functions import Cast

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.domain.canonical import canonical_bytes
from keyvault.domain.environments import Environment
from keyvault.domain.errors import Fault, RequestInvalidError
from keyvault.domain.origins import find_origin_fault, is_origin
from keyvault.domain.redaction import redact
from keyvault.models import Account, MerchantStatus
from keyvault.services.recording.transaction import recorded

MAX_BYTES = 16_384
MAX_ORIGINS = 50
MIN_SECONDS, MAX_SECONDS = 60, 86_400


def set_client_configuration(grant: Grant, account: Account, configuration: Mapping[str, Any]) -> None:
    """Set the public JSON object. Raises RequestInvalidError when it is invalid, too large or contains a secret."""
    if (fault := _configuration_fault(configuration)) is not None:
        raise RequestInvalidError("The configuration is invalid.", [Fault("/configuration", fault)])
    digest = sha256(canonical_bytes(configuration)).hexdigest()
    with recorded(
        grant, Permission.MERCHANTS_WRITE, "account.client_configuration_set", account=account, sha256=digest
    ):
        account.compare_and_swap(client_configuration=configuration)


def set_allowed_origins(grant: Grant, account: Account, origins: Sequence[str]) -> None:
    """Replace the origins from which browsers may use the account's public keys.

    Raises RequestInvalidError with a fault for each invalid origin.
    """
    wanted = list(dict.fromkeys(origin.strip().lower() for origin in origins))
    faults = [
        Fault("/origins", f"line {number}: {fault}")
        for number, origin in enumerate(wanted, 1)
        if (fault := find_origin_fault(origin)) is not None
    ]
    if len(wanted) > MAX_ORIGINS:
        faults = [Fault("/origins", f"at most {MAX_ORIGINS}")]
    if faults:
        raise RequestInvalidError("The origins are invalid.", faults)
    with recorded(grant, Permission.MERCHANTS_WRITE, "account.origins_set", account=account, origins=wanted):
        account.compare_and_swap(allowed_origins=wanted)


def set_customer_token_bound(grant: Grant, account: Account, seconds: int) -> None:
    """Set the maximum lifetime of new customer access tokens, in seconds; issued tokens keep theirs."""
    if not MIN_SECONDS <= seconds <= MAX_SECONDS:
        fault = Fault("/seconds", f"{MIN_SECONDS} to {MAX_SECONDS}")
        raise RequestInvalidError("The bound is invalid.", [fault])
    with recorded(
        grant, Permission.MERCHANTS_WRITE, "account.customer_token_bound_set", account=account, seconds=seconds
    ):
        account.compare_and_swap(customer_token_seconds=seconds)


def is_listed_by_any_account(origin: str, environment: Environment) -> bool:
    """Whether any active account of the environment lists the origin. A CORS preflight carries no key to narrow it."""
    if not is_origin(origin):
        return False
    accounts = Account.objects.filter(
        environment=environment, status=MerchantStatus.ACTIVE, merchant__status=MerchantStatus.ACTIVE
    )
    if connection.features.supports_json_field_contains:
        accounts = accounts.filter(allowed_origins__contains=[origin])
    else:
        # JSON escapes nothing in a canonical origin, so a text search for the quoted origin is exact.
        listed = accounts.annotate(listed=Cast("allowed_origins", TextField()))
        accounts = listed.filter(listed__contains=f'"{origin}"')
    return bool(accounts.exists())


def is_listed_by(origin: str, merchant_id: str, environment: Environment) -> bool:
    """Whether this merchant's account lists the origin."""
    lists = Account.objects.filter(merchant=merchant_id, environment=environment).values_list(
        "allowed_origins", flat=True
    )
    return is_origin(origin) and any(origin in origins for origins in lists)


def _configuration_fault(configuration: object) -> str | None:
    if not isinstance(configuration, Mapping):
        return "a JSON object"
    try:
        text = canonical_bytes(configuration)
        looks_secret = _looks_secret(configuration)
    except (TypeError, ValueError, RecursionError):
        return "JSON of strings, integers, true, false and null; any other number as a string"
    if len(text) > MAX_BYTES:
        return f"at most {MAX_BYTES} bytes"
    if b"\\u0000" in text:
        return "no NUL character"
    if looks_secret:
        return "no secret: anyone who has a public key can read this"
    return None


def _looks_secret(value: object) -> bool:
    """Whether any string in the value contains a secret, or any name is a credential header.

    Other names are allowed: a payment page's own `apiKey` and `clientToken` are made for browsers.
    """
    if isinstance(value, Mapping):
        names = {str(name).lower().replace("_", "-") for name in value}
        return bool(names & _CREDENTIAL_HEADERS) or any(map(_looks_secret, (*value, *value.values())))
    if isinstance(value, list | tuple):
        return any(map(_looks_secret, value))
    return isinstance(value, str) and redact(value) != value


_CREDENTIAL_HEADERS = frozenset({"authorization", "proxy-authorization", "x-api-key", "x-service-token", "cookie"})
