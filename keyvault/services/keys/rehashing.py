"""Progressive rehashing: a key proved with an older pepper gets a new digest with the newest pepper.

Only a process that sees the key string can compute the new digest. It does so in memory when the key is proved, and
the thread that reports usage writes the digest a moment later. A lost digest costs nothing, because the next proof
computes it again. Customer access tokens are not rehashed: none lives longer than a day.
"""

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from keyvault.access.permissions import Permission
from keyvault.access.principals import WORKER
from keyvault.domain.canonical import JsonValue
from keyvault.domain.digests import Peppers
from keyvault.domain.keys import DEAD_STATES
from keyvault.domain.plaintext import Plaintext
from keyvault.models import Account, Key, ServiceToken
from keyvault.services.recording.authorization import authorize
from keyvault.services.recording.transaction import recorded
from keyvault.services.work.background_thread import forget_at_fork

_MAX_PENDING: Final = 5_000
_BATCH_SIZE: Final = 100
"""Keys of one account written in one transaction, with one audit entry."""


@dataclass(frozen=True, slots=True)
class Rehash:
    """A replacement for a stored digest, valid while the stored one is the digest that was proved."""

    digest: bytes = field(repr=False)
    pepper_version: int
    new_digest: bytes = field(repr=False)
    new_pepper_version: int

    @property
    def seen(self) -> dict[str, object]:
        return {"digest": self.digest, "pepper_version": self.pepper_version}

    @property
    def changes(self) -> dict[str, object]:
        return {"digest": self.new_digest, "pepper_version": self.new_pepper_version}


class PendingRehashes:
    """Rehashes of this process that are not written yet. Bounded: a dropped one is computed again at the next proof."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[tuple[type[Key | ServiceToken], str], Rehash] = {}

    def note_proof(
        self,
        kind: type[Key | ServiceToken],
        identity: str,
        text: Plaintext,
        proved: tuple[bytes, int],
        peppers: Peppers,
    ) -> None:
        """Compute a new digest if the proved one has an older pepper. This takes some microseconds.

        `proved`: the stored digest that `text` matched, and its pepper version.
        """
        digest, version = proved
        if version >= peppers.current_version:
            return
        with self._lock:
            if len(self._pending) < _MAX_PENDING:
                self._pending[kind, identity] = Rehash(digest, version, *peppers.digest(text))

    def write(self, now: datetime) -> None:
        """Write the pending rehashes. A failure raises and drops the rest."""
        with self._lock:
            pending, self._pending = self._pending, {}
        _rehash_keys({identity: rehash for (kind, identity), rehash in pending.items() if kind is Key}, now)
        for (kind, identity), rehash in sorted(pending.items(), key=lambda item: item[0][1]):
            if kind is ServiceToken:
                rehash_service_token(identity, rehash, now)

    def forget(self) -> None:
        """Drop the pending rehashes in a forked child: its parent writes them."""
        self.__init__()  # type: ignore[misc]  # its own, which takes nothing


pending_rehashes = PendingRehashes()
"""The pending rehashes of this process."""

forget_at_fork(pending_rehashes)


def _rehash_keys(rehashes: Mapping[str, Rehash], now: datetime) -> None:
    """Write rehashes of keys, grouped into transactions by account."""
    accounts: dict[int, list[str]] = defaultdict(list)
    for chosen in _batches(sorted(rehashes), _BATCH_SIZE):
        for key_id, account in Key.objects.filter(key_id__in=chosen).values_list("key_id", "credential__account_id"):
            accounts[account].append(key_id)
    for pk, key_ids in accounts.items():
        account = Account.objects.select_related("merchant").get(pk=pk)
        for chosen in _batches(key_ids, _BATCH_SIZE):
            rehash_keys(account, {key_id: rehashes[key_id] for key_id in chosen}, now)


def rehash_keys(account: Account, rehashes: Mapping[str, Rehash], now: datetime) -> None:
    """Replace digests of one account's keys, in one transaction with one audit entry that names them.

    Compares and swaps the digest and its pepper version, not the row version, so that a concurrent revocation or
    suspension wins. Skips locked keys, which the next proof rehashes, so that this delays no other transaction. Dead
    keys keep their digest.
    """
    grant = authorize(WORKER, Permission.KEYS_REHASH, account, now=now)
    rows = Key.objects.filter(key_id__in=rehashes, credential__account=account).exclude(state__in=DEAD_STATES)
    with (
        suppress(_NothingToDoError),
        recorded(grant, Permission.KEYS_REHASH, "key.rehashed", account=account) as record,
    ):
        done: dict[str, JsonValue] = {}
        for row in rows.order_by("key_id").select_for_update(of=("self",), skip_locked=True, no_key=True):
            rehash = rehashes[row.key_id]
            if row.swap_beside(rehash.seen, **rehash.changes):
                done[row.key_id] = rehash.new_pepper_version
        if not done:
            raise _NothingToDoError
        record.details["pepper_versions"] = done


def rehash_service_token(token_id: str, rehash: Rehash, now: datetime) -> None:
    """Replace the digest of a service token that is not revoked."""
    grant = authorize(WORKER, Permission.KEYS_REHASH, now=now)
    rows = ServiceToken.objects.filter(token_id=token_id, revoked_at__isnull=True)
    event, number = "service_token.rehashed", rehash.new_pepper_version
    with (
        suppress(_NothingToDoError),
        recorded(grant, Permission.KEYS_REHASH, event, token_id=token_id, pepper_version=number),
    ):
        row = rows.select_for_update(of=("self",), skip_locked=True, no_key=True).first()
        if row is None or not row.swap_beside(rehash.seen, **rehash.changes):
            raise _NothingToDoError


class _NothingToDoError(Exception):
    """No row was written, because another transaction was faster. Rolls back the audit entry."""


def _batches(names: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    return (names[start : start + size] for start in range(0, len(names), size))
