"""The audit log as JSON lines: `manage.py export_audit` writes it, the off-host checker reads it.

Each line is one record. The order allows verification in one pass: within each scope, every checkpoint follows the
entries that it signs. The entries after the last checkpoint come next, then the head of every chain. A partial export
has every checkpoint too, but not the entries that its first checkpoints sign.

    {"record": "export", "format": …, "at": …, "scopes": […], "since": …}
    {"record": "entry", "chain": …, "sequence": …, "body": …, "previous": …, "hash": …}
    {"record": "checkpoint", "scope": …, "number": …, "body": …, "signature": …, "signer": …, "key_version": …}
    {"record": "head", "chain": …, "sequence": …, "hash": …}
    {"record": "end", "entries": …, "checkpoints": …}

Bodies, signatures and public keys are base64 of the stored bytes, hashes are hexadecimal.
"""

import base64
import json
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from keyvault.domain.audit import ChainedEntry
from keyvault.domain.checkpoints import (
    HASH_BYTES,
    Head,
    KeptCheckpoints,
    KeyName,
    PublicKeys,
    SignedCheckpoint,
    find_signature_fault,
)
from keyvault.domain.timestamps import format_timestamp

EXPORT_FORMAT = "keyvault/audit-export/v1"
KEYS_FORMAT = "keyvault/audit-public-keys/v1"


@dataclass(frozen=True, slots=True)
class ExportStart:
    """The first record. `since` None: the export has every entry.

    Otherwise the export omits the entries that a checkpoint up to that time signs.
    """

    at: datetime
    scopes: tuple[str, ...]
    since: datetime | None


@dataclass(frozen=True, slots=True)
class ChainHead:
    chain: str
    head: Head


@dataclass(frozen=True, slots=True)
class ExportEnd:
    """The number of entries and checkpoints in the file. Detects a truncated file."""

    entries: int
    checkpoints: int


ExportRecord = ExportStart | ChainedEntry | SignedCheckpoint | ChainHead | ExportEnd


def record_line(record: ExportRecord) -> str:
    """Serialize a record to one line without its line feed."""
    data: dict[str, Any]
    match record:
        case ExportStart():
            since = format_timestamp(record.since)
            data = {"record": "export", "format": EXPORT_FORMAT, "at": format_timestamp(record.at)}
            data |= {"scopes": list(record.scopes), "since": since}
        case ChainedEntry():
            data = {"record": "entry", "chain": record.chain, "sequence": record.sequence, "body": _text(record.body)}
            data |= {"previous": record.previous.hex(), "hash": record.hash.hex()}
        case SignedCheckpoint():
            data = {"record": "checkpoint", "scope": record.scope, "number": record.number, "body": _text(record.body)}
            data |= {"signature": _text(record.signature), "signer": record.signer, "key_version": record.key_version}
        case ChainHead():
            data = {"record": "head", "chain": record.chain, "sequence": record.head.sequence}
            data |= {"hash": record.head.hash.hex()}
        case ExportEnd():
            data = {"record": "end", "entries": record.entries, "checkpoints": record.checkpoints}
    return json.dumps(data)


def parse_record(line: bytes) -> ExportRecord:
    """Parse one line. Raises ValueError with a description of the fault."""
    try:
        data: Any = json.loads(line.decode())
    except (ValueError, RecursionError):
        raise ValueError("not a complete line of JSON: the file was truncated or altered") from None
    kind = data.get("record") if isinstance(data, dict) else None
    if kind not in _PARSERS:
        raise ValueError("not a record of an audit export")
    try:
        return _PARSERS[kind](data)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise ValueError(f"a record of kind {kind} with a field missing or malformed") from None


def public_keys_text(keys: PublicKeys) -> str:
    """Serialize the public keys of all signers, past and present, by scope and version. Auditors keep this file."""
    data = [
        {"scope": scope, "signer": signer, "version": version, "public_key": _text(key)}
        for (scope, signer, version), key in sorted(keys.items())
    ]
    return json.dumps({"format": KEYS_FORMAT, "keys": data}, indent=1)


def parse_public_keys(text: bytes) -> dict[KeyName, bytes]:
    """Parse the file that `public_keys_text` writes. Raises ValueError."""
    try:
        data: Any = json.loads(text.decode())
        if data["format"] != KEYS_FORMAT:
            raise ValueError
        return {
            (_str(key["scope"]), _str(key["signer"]), _int(key["version"])): _hash(_bytes(key["public_key"]))
            for key in data["keys"]
        }
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError("not the output of manage.py show_audit_keys") from None


def gather_kept(lines: Iterable[bytes], keys: PublicKeys, unchecked: Container[str] = ()) -> KeptCheckpoints:
    """Collect the checkpoints from lines of earlier exports.

    Raises ValueError on a line that is no export record, and on a checkpoint without a valid signature: the auditor's
    reference must itself be authentic. `unchecked`: scopes whose signatures cannot be checked here.
    """
    kept: dict[tuple[str, int], frozenset[bytes]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = parse_record(line)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        if not isinstance(record, SignedCheckpoint):
            continue
        why = None if record.scope in unchecked else find_signature_fault(record, keys)
        if why is not None:
            raise ValueError(f"line {number}: checkpoint {record.number} of {record.scope}: {why}")
        name = (record.scope, record.number)
        kept[name] = kept.get(name, frozenset()) | {record.digest}
    return kept


def _start(data: Mapping[str, Any]) -> ExportRecord:
    if data["format"] != EXPORT_FORMAT:
        raise ValueError
    since = None if data["since"] is None else datetime.fromisoformat(data["since"])
    return ExportStart(datetime.fromisoformat(data["at"]), tuple(_str(scope) for scope in data["scopes"]), since)


def _entry(data: Mapping[str, Any]) -> ExportRecord:
    chain, sequence, body = _str(data["chain"]), _int(data["sequence"]), _bytes(data["body"])
    return ChainedEntry(
        chain=chain,
        sequence=sequence,
        body=body,
        previous=_hash(bytes.fromhex(data["previous"])),
        hash=_hash(bytes.fromhex(data["hash"])),
        columns_agree=_matches_position(body, chain, sequence),
    )


def _checkpoint(data: Mapping[str, Any]) -> ExportRecord:
    return SignedCheckpoint(
        scope=_str(data["scope"]),
        number=_int(data["number"]),
        body=_bytes(data["body"]),
        signature=_bytes(data["signature"]),
        signer=_str(data["signer"]),
        key_version=_int(data["key_version"]),
    )


def _head(data: Mapping[str, Any]) -> ExportRecord:
    return ChainHead(_str(data["chain"]), Head(_int(data["sequence"]), _hash(bytes.fromhex(data["hash"]))))


def _end(data: Mapping[str, Any]) -> ExportRecord:
    return ExportEnd(_int(data["entries"]), _int(data["checkpoints"]))


_PARSERS = {"export": _start, "entry": _entry, "checkpoint": _checkpoint, "head": _head, "end": _end}


def _matches_position(body: bytes, chain: str, sequence: int) -> bool:
    """Return whether an entry's bytes state this chain and sequence."""
    try:
        data = json.loads(body.decode())
        return bool(data["chain"] == chain and data["sequence"] == sequence)
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def parse_time(body: bytes) -> datetime | None:
    """Return when an entry was written, according to its bytes; None if they contain no valid time."""
    try:
        at = datetime.fromisoformat(json.loads(body.decode())["at"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return at if at.tzinfo is not None else None


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def _bytes(text: object) -> bytes:
    return base64.b64decode(_str(text), validate=True)


def _hash(raw: bytes) -> bytes:
    if len(raw) != HASH_BYTES:
        raise ValueError
    return raw


def _str(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _int(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError
    return value
