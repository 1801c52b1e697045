"""Marks that tell workers which credentials' dates to recompute after a change.

A mark is written in the transaction of the change, so that none is lost. A change of one credential makes it due
immediately, and a worker then computes its date. A change that affects many credentials is recorded as a sweep, which
workers run in batches.
"""

from collections.abc import Collection, Iterable
from datetime import datetime
from typing import Any

from django.db.models import F

from keyvault.access.permissions import Permission
from keyvault.domain.keys import KeyKind
from keyvault.models import Account, Credential
from keyvault.services.merchants.merchants import select_accounts
from keyvault.services.recording.signals import accounts_changed, keys_changed
from rotation.models import ScheduledCredential, ScheduleSweep


def mark_credentials(credential_ids: Collection[str], now: datetime) -> None:
    """Mark private credentials."""
    rows = ScheduledCredential.objects.filter(pk__in=credential_ids)
    mark: dict[str, Any] = {"ask_at": now, "refusals": 0, "revision": F("revision") + 1}
    if rows.update(**mark) < len(credential_ids):
        add_missing(credential_ids)
        rows.update(**mark)


def add_missing(credential_ids: Collection[str]) -> None:
    """Add the rows of credentials that have none yet, without a date."""
    found = Credential.objects.filter(pk__in=credential_ids).values_list("pk", "account_id", "account_environment")
    new = (
        ScheduledCredential(credential_id=pk, account_id=account_id, environment=environment)
        for pk, account_id, environment in found
    )
    ScheduledCredential.objects.bulk_create(new, ignore_conflicts=True)


def mark_scopes(scopes: Iterable[tuple[str, Account | None, Credential | None]], now: datetime) -> None:
    """Mark what schedules apply to, in a few statements: credentials, or everything in accounts or environments.

    The items of a scope are: environment, account, credential.
    """
    credentials: set[str] = set()
    sweeps: list[ScheduleSweep] = []
    for environment, account, credential in scopes:
        if credential is not None:
            credentials.add(credential.pk)
        else:
            sweeps.append(ScheduleSweep(environment=environment, account=account))
    if credentials:
        mark_credentials(credentials, now)
    ScheduleSweep.objects.bulk_create(sweeps)


def connect_signals() -> None:
    """Subscribe to the changes in keyvault on which a credential's date depends."""
    keys_changed.connect(_mark_keys, dispatch_uid="rotation.schedules.keys_changed")
    accounts_changed.connect(_mark_accounts, dispatch_uid="rotation.schedules.accounts_changed")


def _mark_keys(key_ids: Collection[str], permission: Permission | None, now: datetime, **_: Any) -> None:
    if permission is Permission.ROTATIONS_ADVANCE:
        return  # A rotation is open, and marks its credential when it closes.
    rows = Credential.objects.filter(keys__in=key_ids, kind=KeyKind.PRIVATE)
    credentials = set(rows.values_list("pk", flat=True))
    if credentials:
        mark_credentials(credentials, now)


def _mark_accounts(merchants: Collection[str], accounts: Collection[str], **_: Any) -> None:
    with_keys = select_accounts(merchants, accounts).filter(credentials__kind=KeyKind.PRIVATE).distinct()
    ScheduleSweep.objects.bulk_create(
        ScheduleSweep(environment=account.environment, account=account) for account in with_keys
    )
