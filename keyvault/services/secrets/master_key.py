"""Rotate the master key of the local keystore, and of the texts that it encrypted for rows of the database.

A run that was killed anywhere can be started again, because it changes things in this order: records, texts, audit
entry, the keystore's own check, and last the file of the key. Until the check is replaced, the former key is needed.
Because no process starts before such a run has ended, everything is decrypted once before it begins.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

from allauth.mfa.models import Authenticator
from django.conf import settings

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.backends.base import BackendInvalidError
from keyvault.backends.local_rekeying import Rekeying, rekeying
from keyvault.backends.private_files import (
    new_master_key,
    read_or_make_master_key,
    read_private_file,
    remove_private_file,
    write_private_file,
)
from keyvault.domain.errors import RequestInvalidError, StateConflictError
from keyvault.services.recording.transaction import recorded
from keyvault.services.secrets.backend import (
    is_wrapped,
    make_wrapped_master_key,
    read_master_key_text,
    unwrap_master_key,
)

BATCH: Final = 100
"""Rows of one transaction."""

_FIELDS: Final = ("secret", "seed")
"""Members of a second factor's data that the secret backend encrypted: an app's seed, and that of recovery codes."""


@dataclass(slots=True)
class MasterKeyRotation:
    """What this run has encrypted again: records of the keystore, and second factors of operators.

    `is_installed`: the new key is in the file that the processes read. Otherwise the operator sets it.
    """

    records: int = 0
    second_factors: int = 0
    is_installed: bool = False


def rotate_master_key(
    grant: Grant, new_key_file: Path | None = None, *, should_wrap: bool | None = None
) -> MasterKeyRotation:
    """Rotate the key. `new_key_file`: the new key, if the present one comes from KEYVAULT_MASTER_KEY.

    Without it, the keys are `master.key` of the data folder, and a new one beside it. `should_wrap`: whether the Vault
    makes and wraps the new one; None: like the present one.

    Raises:
        RequestInvalidError: an option is missing or not allowed here, or the secrets are in a Vault.
        StateConflictError: other processes have the keystore open, the keys are not those of the unfinished run, or
            second factors cannot be decrypted. Unless a run was begun, nothing was changed.
        BackendInvalidError: a record was altered. Unless a run was begun, nothing was changed.
        ImproperlyConfigured: a key file is missing, malformed, or others may read it, or cannot be unwrapped.
        BackendUnavailableError: the keystore cannot be read or written, or a key is wrapped and the Vault does not
            answer.
        BackendDeniedError: a key is wrapped, and the Vault refuses.
    """
    _require_local(new_key_file, should_wrap)
    current, made = settings.DATA_DIR / "master.key", settings.DATA_DIR / "master.key.new"
    old_text = read_master_key_text()
    if new_key_file is None and made.exists() and read_private_file(made) == old_text:
        # A run was killed after it had put the new key in place.
        remove_private_file(made)

    def read_new() -> str:
        return read_private_file(new_key_file) if new_key_file else _read_or_make(made, old_text, should_wrap)

    done = MasterKeyRotation(is_installed=new_key_file is None)
    with rekeying(settings.DATA_DIR, unwrap_master_key(old_text), lambda: unwrap_master_key(read_new())) as keystore:
        if not keystore.is_finished():
            is_begun = keystore.is_begun()
            try:
                _require_readable(keystore, is_begun=is_begun)
            except (BackendInvalidError, StateConflictError):
                if done.is_installed and not is_begun:
                    remove_private_file(made)
                raise
            if not is_begun:
                keystore.begin()
            while count := keystore.encrypt_batch():
                done.records += count
            done.second_factors = sum(_encrypt_second_factors(grant, keystore))
            with recorded(grant, Permission.INSTALLATION_MAINTAIN, "master_key.rotated"):
                pass
            keystore.finish()
        if done.is_installed:
            write_private_file(current, read_private_file(made))
            remove_private_file(made)
    return done


def _read_or_make(made: Path, old_text: str, should_wrap: bool | None) -> str:
    """Return the new key's text, that of an unfinished run if there is one. Raises StateConflictError."""
    wraps = is_wrapped(old_text) if should_wrap is None else should_wrap
    text = read_or_make_master_key(made, may_make=True, make=make_wrapped_master_key if wraps else new_master_key)
    if should_wrap is not None and is_wrapped(text) != should_wrap:
        raise StateConflictError(
            f"The new master key of an unfinished rotation is {'not ' if should_wrap else ''}wrapped. Finish that "
            "rotation without --wrap and --no-wrap, and then rotate once more."
        )
    return text


def _require_local(new_key_file: Path | None, should_wrap: bool | None) -> None:
    if settings.IS_VAULT:
        raise RequestInvalidError("With KEYVAULT_BACKEND=vault there is no master key. Rotate the Vault's own keys.")
    if settings.MASTER_KEY and should_wrap is not None:
        raise RequestInvalidError(
            "The master key comes from KEYVAULT_MASTER_KEY. Omit --wrap and --no-wrap, and put a key of either kind "
            "into the file of --new-key-file."
        )
    if settings.MASTER_KEY and new_key_file is None:
        raise RequestInvalidError(
            "The master key comes from KEYVAULT_MASTER_KEY. Write the new one to a private file "
            "(openssl rand -base64 32), and name it with --new-key-file."
        )
    if not settings.MASTER_KEY and new_key_file is not None:
        raise RequestInvalidError(
            "The master key is master.key in the data folder. Omit --new-key-file: a new key is created beside it."
        )


def _require_readable(keystore: Rekeying, *, is_begun: bool) -> None:
    """Raise BackendInvalidError for an altered record, StateConflictError for second factors that neither key opens."""
    if not is_begun:
        keystore.require_readable()
    usernames = set()
    for row in chain.from_iterable(_list_second_factors()):
        try:
            _encrypt_texts(keystore, row)
        except BackendInvalidError:
            usernames.add(row.user.username)
    if usernames:
        raise StateConflictError(
            f"The second factors of these operators cannot be decrypted: {', '.join(sorted(usernames))}. They were set "
            "up with another secret backend or master key, or were altered. Reset them (manage.py "
            "reset_operator_factors), and run this command again."
        )


def _list_second_factors() -> Iterator[list[Authenticator]]:
    """Yield batches of rows of active operators. Disabled ones cannot be enabled again, so their seeds stay."""
    rows, last = Authenticator.objects.filter(user__is_active=True).select_related("user").order_by("pk"), 0
    while batch := list(rows.filter(pk__gt=last)[:BATCH]):
        last = batch[-1].pk
        yield batch


def _encrypt_texts(keystore: Rekeying, row: Authenticator) -> dict[str, str]:
    return {name: keystore.encrypt_text(row.data[name]) for name in _FIELDS if name in row.data}


def _encrypt_second_factors(grant: Grant, keystore: Rekeying) -> Iterator[int]:
    """Encrypt the seeds again, in the order of their rows, and yield how many changed. One under the new key stays."""
    for rows in _list_second_factors():
        changed = []
        for row in rows:
            new = _encrypt_texts(keystore, row)
            if any(row.data[name] != text for name, text in new.items()):
                row.data |= new
                changed.append(row)
        if changed:
            with recorded(
                grant, Permission.INSTALLATION_MAINTAIN, "second_factors.encrypted_again", count=len(changed)
            ):
                for row in changed:
                    row.save(update_fields=["data"])
        yield len(changed)
