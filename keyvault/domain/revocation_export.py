"""An export of the revocations: lines of the revocation log, and at the end their signed description.

    {"at":…,"boot":"","id":…,"kind":"key","reason":…,"sequence":77,"state":…,"unit":"","what":"ended"} 3c…
    {"body":{"at":…,"count":1,"digest":…,"format":…,"installation":…,"sequence":77},"key_version":1,…}

The signature covers the digest of all lines before, so that a file that was cut or altered has no valid end. Signatures
are those of the audit log's checkpoints of the platform (Ed25519).
"""

import base64
import json
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from keyvault.domain.canonical import JsonValue, canonical_bytes
from keyvault.domain.digests import PepperSet
from keyvault.domain.timestamps import format_timestamp

FORMAT = "keyvault/revocations/v1"


@dataclass(frozen=True, slots=True)
class RevocationExport:
    """Every revocation of an installation that was acknowledged before `at`.

    `sequence`: newest change of the database at that time. `count` and `digest`: number of lines, and the hexadecimal
    SHA-256 of their bytes.
    """

    installation: str
    at: datetime
    sequence: int
    count: int
    digest: str


@dataclass(frozen=True, slots=True)
class SignedExport:
    """The end of an export. `body`: the bytes that the signature covers."""

    export: RevocationExport
    signature: bytes
    signer: str
    key_version: int
    scope: str = PepperSet.SERVICE

    @property
    def body(self) -> bytes:
        return export_bytes(self.export)


def export_bytes(export: RevocationExport) -> bytes:
    """Return the canonical body, which the signature covers."""
    return canonical_bytes(_body(export))


def end_line(signed: SignedExport) -> bytes:
    """Serialize the last line, with its line feed."""
    signature = base64.b64encode(signed.signature).decode()
    end: dict[str, JsonValue] = {"body": _body(signed.export), "signature": signature}
    return canonical_bytes({**end, "signer": signed.signer, "key_version": signed.key_version}) + b"\n"


def parse_end_line(text: bytes) -> SignedExport:
    """Parse the last line. Raises ValueError on anything that `end_line` would not write."""
    try:
        data: Any = json.loads(text)
        body = data["body"]
        export = RevocationExport(
            installation=body["installation"],
            at=datetime.fromisoformat(body["at"]),
            sequence=body["sequence"],
            count=body["count"],
            digest=body["digest"],
        )
        signature = base64.b64decode(data["signature"], validate=True)
        signer, key_version = data["signer"], data["key_version"]
        if not isinstance(signer, str) or type(key_version) is not int:
            raise TypeError("the signer or the version of its key")
        signed = SignedExport(export, signature, signer, key_version)
        is_canonical = end_line(signed) == text
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        raise ValueError("its last line is not the end of an export") from None
    if not is_canonical:
        raise ValueError("its last line is not the end of an export")
    return signed


def _body(export: RevocationExport) -> dict[str, JsonValue]:
    return {**asdict(export), "at": format_timestamp(export.at), "format": FORMAT}
