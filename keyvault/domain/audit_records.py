"""The audit log as lines of JSON: what `manage.py export_audit` writes and the off-host checker reads.

One record a line, in the order in which it can be checked in one pass: for each scope, each checkpoint after the
entries that it is the first to sign; then the entries that no checkpoint signs yet, and the head of every chain.

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
    Kept,
    KeyName,
    PublicKeys,
    SignedCheckpoint,
    find_signature_fault,
)

EXPORT_FORMAT = "keyvault/audit-export/v1"
KEYS_FORMAT = "keyvault/audit-public-keys/v1"


@dataclass(frozen=True, slots=True)
class ExportStart:
    """`since` None: from the first entry. Otherwise each scope begins with the newest checkpoint that is older."""

    at: datetime
    scopes: tuple[str, ...]
    since: datetime | None


@dataclass(frozen=True, slots=True)
class ChainHead:
    chain: str
    head: Head


@dataclass(frozen=True, slots=True)
class ExportEnd:
    """How many lines of each kind came before: what tells a whole file from one that was cut off."""

    entries: int
    checkpoints: int


Record = ExportStart | ChainedEntry | SignedCheckpoint | ChainHead | ExportEnd


def record_line(record: Record) -> str:
    """One line, without its end."""
    told: dict[str, Any]
    match record:
        case ExportStart():
            since = None if record.since is None else record.since.isoformat()
            told = {"record": "export", "format": EXPORT_FORMAT, "at": record.at.isoformat()}
            told |= {"scopes": list(record.scopes), "since": since}
        case ChainedEntry():
            told = {"record": "entry", "chain": record.chain, "sequence": record.sequence, "body": _text(record.body)}
            told |= {"previous": record.previous.hex(), "hash": record.hash.hex()}
        case SignedCheckpoint():
            told = {"record": "checkpoint", "scope": record.scope, "number": record.number, "body": _text(record.body)}
            told |= {"signature": _text(record.signature), "signer": record.signer, "key_version": record.key_version}
        case ChainHead():
            told = {"record": "head", "chain": record.chain, "sequence": record.head.sequence}
            told |= {"hash": record.head.hash.hex()}
        case ExportEnd():
            told = {"record": "end", "entries": record.entries, "checkpoints": record.checkpoints}
    return json.dumps(told)


def parse_record(line: bytes) -> Record:
    """Raises ValueError, saying what is wrong with the line."""
    try:
        told: Any = json.loads(line.decode())
    except (ValueError, RecursionError):
        raise ValueError("no whole line of JSON: the file was cut off or altered") from None
    kind = told.get("record") if isinstance(told, dict) else None
    if kind not in _PARSERS:
        raise ValueError("no record of an audit export")
    try:
        return _PARSERS[kind](told)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise ValueError(f"a record of kind {kind} with a field missing or malformed") from None


def public_keys_text(keys: PublicKeys) -> str:
    """A file for auditors: the public key of every signer there was, by scope and version."""
    told = [
        {"scope": scope, "signer": signer, "version": version, "public_key": _text(key)}
        for (scope, signer, version), key in sorted(keys.items())
    ]
    return json.dumps({"format": KEYS_FORMAT, "keys": told}, indent=1)


def parse_public_keys(text: bytes) -> dict[KeyName, bytes]:
    """Raises ValueError."""
    try:
        told: Any = json.loads(text.decode())
        if told["format"] != KEYS_FORMAT:
            raise ValueError
        return {
            (_str(key["scope"]), _str(key["signer"]), _int(key["version"])): _hash(_bytes(key["public_key"]))
            for key in told["keys"]
        }
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError("no public keys as manage.py audit_public_key prints them") from None


def gather_kept(lines: Iterable[bytes], keys: PublicKeys, unchecked: Container[str] = ()) -> Kept:
    """The checkpoints among the lines of earlier exports. Raises ValueError on a line that is none of an export's,
    and on a checkpoint that nobody signed: what an auditor compares with must be beyond doubt itself.

    `unchecked`: scopes whose signatures cannot be checked here.
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


def _start(told: Mapping[str, Any]) -> Record:
    if told["format"] != EXPORT_FORMAT:
        raise ValueError
    since = None if told["since"] is None else datetime.fromisoformat(told["since"])
    return ExportStart(datetime.fromisoformat(told["at"]), tuple(_str(scope) for scope in told["scopes"]), since)


def _entry(told: Mapping[str, Any]) -> Record:
    chain, sequence, body = _str(told["chain"]), _int(told["sequence"]), _bytes(told["body"])
    return ChainedEntry(
        chain=chain,
        sequence=sequence,
        body=body,
        previous=_hash(bytes.fromhex(told["previous"])),
        hash=_hash(bytes.fromhex(told["hash"])),
        columns_agree=_says(body, chain, sequence),
    )


def _checkpoint(told: Mapping[str, Any]) -> Record:
    return SignedCheckpoint(
        scope=_str(told["scope"]),
        number=_int(told["number"]),
        body=_bytes(told["body"]),
        signature=_bytes(told["signature"]),
        signer=_str(told["signer"]),
        key_version=_int(told["key_version"]),
    )


def _head(told: Mapping[str, Any]) -> Record:
    return ChainHead(_str(told["chain"]), Head(_int(told["sequence"]), _hash(bytes.fromhex(told["hash"]))))


def _end(told: Mapping[str, Any]) -> Record:
    return ExportEnd(_int(told["entries"]), _int(told["checkpoints"]))


_PARSERS = {"export": _start, "entry": _entry, "checkpoint": _checkpoint, "head": _head, "end": _end}


def _says(body: bytes, chain: str, sequence: int) -> bool:
    """Whether an entry's bytes are about that place."""
    try:
        told = json.loads(body.decode())
        return bool(told["chain"] == chain and told["sequence"] == sequence)
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


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
