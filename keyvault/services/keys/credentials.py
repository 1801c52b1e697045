"""Restrictions of a credential (networks, Origin header policy), and where its merchant reads its key."""

from collections.abc import Sequence

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.domain.canonical import JsonValue
from keyvault.domain.errors import Fault, RequestInvalidError
from keyvault.domain.issuance import Delivery
from keyvault.domain.keys import KeyKind
from keyvault.domain.networks import MAX_NETWORKS, parse_network
from keyvault.models import Credential
from keyvault.models.keys import OriginHeader
from keyvault.services.recording.transaction import recorded
from keyvault.services.secrets.backend import find_backend_location

_MAX_TEXT = 64
"""Maximum characters of a network that are parsed."""


def restrict_credential(
    grant: Grant, credential: Credential, networks: Sequence[str], origin_header: OriginHeader
) -> None:
    """Restrict a credential's keys to these networks from the next request on; no networks: no restriction.

    `origin_header`: the policy for a private key that arrives with an Origin header. Raises RequestInvalidError with a
    fault for each invalid network.
    """
    faults = []
    kept: list[JsonValue] = []
    if len(networks) > MAX_NETWORKS:
        faults.append(Fault("/networks", f"up to {MAX_NETWORKS} networks"))
    for index, text in enumerate(networks[:MAX_NETWORKS]):
        canonical = _canonical(text)
        if canonical is None:
            faults.append(Fault(f"/networks/{index}", "a CIDR block without host bits, such as 192.0.2.0/24"))
        elif canonical not in kept:
            kept.append(canonical)
    if origin_header is OriginHeader.REPORT and credential.kind != KeyKind.PRIVATE:
        faults.append(Fault("/origin_header", "only for private keys: browsers always send Origin with public keys"))
    if faults:
        raise RequestInvalidError("The restriction is invalid.", faults)
    with recorded(
        grant,
        Permission.CREDENTIALS_RESTRICT,
        "credential.restricted",
        account=credential.account,
        credential_id=credential.credential_id,
        old={"networks": list(credential.networks), "origin_header": credential.origin_header},
        new={"networks": kept, "origin_header": origin_header},
    ):
        credential.compare_and_swap(networks=kept, origin_header=origin_header)


def _canonical(text: str) -> str | None:
    """Return a network's canonical text; None when it is invalid or IPv4-mapped, which no client address matches."""
    try:
        network = parse_network(text.strip()[:_MAX_TEXT])
    except ValueError:
        return None
    mapped = getattr(network.network_address, "ipv4_mapped", None)
    return str(network) if mapped is None and "%" not in str(network) else None


def find_delivery_location(credential: Credential) -> dict[str, str]:
    """Return the mount and path at which the merchant's own backend reads the key; empty for other deliveries."""
    if credential.delivery != Delivery.SECRET_BACKEND:
        return {}
    return find_backend_location(credential.environment, credential.backend_path)
