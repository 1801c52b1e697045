"""The one transaction helper: it commits rows, change rows and audit entries together or not at all.

    with recorded(grant, Permission.KEYS_REVOKE, "key.revoked", account=account, key_id=key_id) as record:
        key.compare_and_swap(state=...)
    record.sequence

`recorded` checks that the grant is for this permission and this account. It collects the subjects that the written
rows name, and adds one change row for each and one audit entry. Blocks may nest: the outermost one commits. It locks
the audit chains last and in the order of their names, so that two transactions never deadlock.

Audit details are permanent, so they are redacted here regardless of the caller. A command-line action is recorded
with the user of the host.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from itertools import groupby

from django.db import transaction

from keyvault.access.decision import OUTSIDE_SCOPE, Grant
from keyvault.access.permissions import Permission
from keyvault.access.principals import Channel, OperatorPrincipal, Principal
from keyvault.access.rules import OperationRule, Target
from keyvault.access.scopes import EVERYWHERE, AccessScope
from keyvault.domain.audit import PLATFORM_CHAIN, account_chain, customer_token_chains
from keyvault.domain.canonical import JsonValue
from keyvault.domain.errors import PermissionMissingError
from keyvault.domain.ids import Subject
from keyvault.domain.redaction import redact
from keyvault.models import Account
from keyvault.models.recording import collect_subjects
from keyvault.services.recording.audit_chain import NewEntry, append_entries, choose_slot
from keyvault.services.recording.authorization import find_host_user
from keyvault.services.recording.changes import announce_changes
from keyvault.services.recording.revocation_log import append_ended
from keyvault.services.recording.signals import accounts_changed, keys_changed


@dataclass(slots=True)
class Record:
    """One pending audit entry. `sequence` is set once the outermost block has ended.

    `chain`: the account's or the platform's. `is_customer_token`: the entry goes to one of the account's chains for
    customer tokens instead, because many of these are written concurrently.
    """

    chain: str
    is_customer_token: bool
    event: str
    grant: Grant
    details: dict[str, JsonValue]
    sequence: int | None = None


@dataclass(slots=True)
class _Unit:
    """The records of one outermost block. `details`: added to those of each record."""

    records: list[Record] = field(default_factory=list)
    details: dict[str, JsonValue] = field(default_factory=dict)


_open_unit: ContextVar[_Unit | None] = ContextVar("open_unit", default=None)


@contextmanager
def recorded(
    grant: Grant,
    permission: Permission | frozenset[Permission],
    event: str,
    *,
    account: Account | AccessScope | None = None,
    **details: JsonValue,
) -> Iterator[Record]:
    """Record one change of state. Raises PermissionMissingError when the grant is for something else.

    Args:
        permission: when a set, any one of its members is enough (an operator or the engine suspends a key).
        account: the account that the change concerns; or the accounts, for a change of no particular one; None: the
            whole installation. The grant covers it.
    """
    within = account if isinstance(account, AccessScope) else EVERYWHERE
    account = None if isinstance(account, AccessScope) else account
    _require(grant, frozenset({permission}) if isinstance(permission, Permission) else permission, account, within)
    chain = account_chain(account.merchant_id, account.environment) if account else PLATFORM_CHAIN
    unit = _open_unit.get()
    shared = {} if unit is None else unit.details
    record = Record(chain, permission is Permission.CUSTOMER_TOKENS_WRITE, event, grant, {**details, **shared})
    if unit is not None:
        with _rolled_back_together(unit), transaction.atomic():
            # The entry of the cause comes before those of its effects, so append it before the block runs.
            unit.records.append(record)
            yield record
        return
    with _outermost(_Unit([record])):
        yield record


@contextmanager
def recorded_together(**details: JsonValue) -> Iterator[None]:
    """Commit all blocks inside together or not at all. `details` are added to the audit entry of each."""
    with _outermost(_Unit(details=details)):
        yield


@contextmanager
def _outermost(unit: _Unit) -> Iterator[None]:
    token = _open_unit.set(unit)
    try:
        with transaction.atomic():
            with collect_subjects() as subjects:
                yield
            if unit.records:
                _commit(unit, subjects, unit.records[0].grant.at)
    finally:
        _open_unit.reset(token)


@contextmanager
def _rolled_back_together(unit: _Unit) -> Iterator[None]:
    """Drop the entries and change rows of a nested block that is rolled back."""
    with collect_subjects() as subjects:
        entries, altered = len(unit.records), dict(subjects)
        try:
            yield
        except BaseException:
            del unit.records[entries:]
            subjects.clear()
            subjects.update(altered)
            raise


def _commit(unit: _Unit, subjects: dict[Subject, bool], now: datetime) -> None:
    rule = unit.records[0].grant.rule
    permission = rule.permission if isinstance(rule, OperationRule) else None
    key_ids = [identity for kind, identity in subjects if kind == "key"]
    if key_ids and permission is not Permission.KEYS_REHASH:
        keys_changed.send(None, key_ids=key_ids, permission=permission, now=now)
    merchants, accounts = (
        [identity for kind, identity in subjects if kind == name] for name in ("merchant", "account")
    )
    if merchants or accounts:
        accounts_changed.send(None, merchants=merchants, accounts=accounts, now=now)
    sequence = announce_changes(subjects, now)
    ordered = sorted(unit.records, key=_chain_of)
    for (is_customer_token, chain), records in groupby(ordered, _chain_of):
        entries = [_new_entry(record) for record in records]
        append_entries(chain=choose_slot(customer_token_chains(chain)) if is_customer_token else chain, entries=entries)
    for record in ordered:
        record.sequence = sequence
    append_ended(subjects, sequence, now)


def _chain_of(record: Record) -> tuple[bool, str]:
    """Return the order in which chains are locked."""
    return record.is_customer_token, record.chain


def _new_entry(record: Record) -> NewEntry:
    principal = record.grant.principal
    details = {name: _redacted(value) for name, value in record.details.items()}
    if (host_user := _host_user(principal)) is not None:
        details["host_user"] = host_user
    return NewEntry(record.grant.at, record.event, principal.actor, principal.channel, details)


def _redacted(value: JsonValue) -> JsonValue:
    """Return the value with every secret masked, at any depth."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {redact(name): _redacted(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_redacted(inner) for inner in value]
    return value


def _host_user(principal: Principal) -> str | None:
    """Return the host user of a command-line action: an operator's is in its principal, else this process's."""
    if isinstance(principal, OperatorPrincipal):
        return principal.host_user
    if principal.channel is not Channel.COMMAND_LINE:
        return None
    return find_host_user()


def _require(grant: Grant, permissions: frozenset[Permission], account: Account | None, within: AccessScope) -> None:
    """Require a grant for one of these permissions, on this account or on the accounts of the platform's object."""
    scope = (None, None) if account is None else (account.environment, account.merchant_id)
    fits = (
        isinstance(grant.rule, OperationRule)
        and grant.rule.permission in permissions
        and isinstance(grant.target, Target)
        and (grant.target.environment, grant.target.merchant_id) == scope
    )
    if not fits:
        raise PermissionMissingError(
            "This action is not allowed.",
            internal=f"{grant!r} permits none of {sorted(permissions)} on {account or 'the platform'}",
        )
    if account is None and isinstance(grant.target, Target) and not grant.target.within.covers(within):
        raise PermissionMissingError(OUTSIDE_SCOPE, internal=f"{grant!r} is not for {within}")
