"""The key lifecycle: stage, activate, suspend, resume, revoke, expire. The only writer of key states."""

import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import Q, QuerySet

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import KeyHolder, System
from keyvault.access.rules import OperationRule
from keyvault.domain.canonical import JsonValue
from keyvault.domain.digests import PEPPER_SET
from keyvault.domain.errors import PermissionMissingError, StateConflictError
from keyvault.domain.free_text import clean_text
from keyvault.domain.keys import DEAD_STATES, KeyKind, KeyState, RetirementReason, can_transition
from keyvault.domain.keystring import STRING_KIND, STRING_SCOPE, mint_keystring
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.revocation import RevocationReason, state_after
from keyvault.models import Change, Credential, Key, KeyUse, Material, Merchant, MerchantStatus
from keyvault.services.limits.limiter import spend_repeat
from keyvault.services.peppers.ring import load_peppers
from keyvault.services.recording.changes import notify_host, notify_host_again
from keyvault.services.recording.notifications import announce
from keyvault.services.recording.transaction import Record, recorded
from keyvault.services.work.row_turns import batch_after

_ENGINE = frozenset({P.ISSUANCE_EXECUTE, P.ROTATIONS_ADVANCE})
_REVOKE = frozenset({P.KEYS_REVOKE, P.MERCHANTS_OFFBOARD, *_ENGINE})

MAX_VERIFYING = 2
"""Maximum number of active keys of one credential. A database trigger enforces it too."""


def stage_key(grant: Grant, credential: Credential, *, expires_in_days: int | None) -> tuple[Key, Plaintext]:
    """Create a key that does not verify yet, and return it with its string, which only the caller has.

    The digest is stored before the string is delivered, so that a crash costs only an undelivered key.
    """
    kind, environment = KeyKind(credential.kind), credential.environment
    minted = mint_keystring(settings.KEY_PREFIX, STRING_KIND[kind], STRING_SCOPE[environment], secrets.token_bytes)
    digest, pepper_version = load_peppers(PEPPER_SET[environment]).digest(minted.text)
    key = Key(
        key_id=minted.key_id,
        credential=credential,
        account_environment=credential.account_environment,
        digest=digest,
        pepper_version=pepper_version,
        state=KeyState.PRE_ACTIVATION,
        created_at=grant.at,
        expires_at=None if expires_in_days is None else grant.at + timedelta(days=expires_in_days),
    )
    with recorded(grant, _ENGINE, "key.staged", account=credential.account, **_about(key)):
        key.save()
    return key, minted.text


def activate_key(grant: Grant, key: Key) -> None:
    """Activate a staged key: it verifies from now on."""
    _transition(grant, _ENGINE, key, KeyState.ACTIVE, "key.activated", activated_at=grant.at)


def note_stored(grant: Grant, key: Key, backend_version: int) -> None:
    """Record the backend version of the key's string. A dead key's copy becomes due for destruction."""
    material = Material.DESTROY_DUE if KeyState(key.state) in DEAD_STATES else Material.HELD
    with recorded(
        grant,
        _ENGINE,
        "key.stored",
        account=key.credential.account,
        backend_version=backend_version,
        **_about(key),
    ):
        key.compare_and_swap(backend_version=backend_version, material=material)


def suspend_key(grant: Grant, key: Key, *, hides_copy: bool = False) -> Record:
    """Suspend a key: deny it from now on, reversibly. Raises an alarm when a person suspends the last usable key.

    `hides_copy`: the key enters quarantine, and its copy in the backend is soft-deleted too. This excludes the newest
    version, because merchants read that one and would find nothing.
    """
    is_hidden = hides_copy and key.material in {Material.HELD, Material.RESTORE_DUE} and _is_superseded(key)
    return _transition(
        grant,
        frozenset({P.KEYS_SUSPEND, P.ROTATIONS_ADVANCE}),
        key,
        KeyState.SUSPENDED,
        "key.suspended",
        suspended_at=grant.at,
        material=Material.DELETE_DUE if is_hidden else Material(key.material),
    )


def resume_key(grant: Grant, key: Key) -> Record:
    """Resume a suspended key. Raises StateConflictError when it is not suspended or has expired."""
    if key.state != KeyState.SUSPENDED:
        raise StateConflictError(f"Only a suspended key can be resumed. This key is {key.state}.")
    if key.expires_at is not None and grant.at >= key.expires_at:
        raise StateConflictError("The key has expired and cannot be resumed.")
    permissions = frozenset({P.KEYS_RESUME, P.ROTATIONS_WRITE, P.ROTATIONS_ADVANCE})
    # A deletion that is due may already be under way, so the copy must be undeleted in that case too.
    is_hidden = key.material in {Material.DELETE_DUE, Material.DELETED}
    material = Material.RESTORE_DUE if is_hidden else Material(key.material)
    is_by_operator = isinstance(grant.rule, OperationRule) and grant.rule.permission is P.KEYS_RESUME
    resumed_at = grant.at if is_by_operator else key.resumed_at
    return _transition(
        grant, permissions, key, KeyState.ACTIVE, "key.resumed", material=material, resumed_at=resumed_at
    )


def revoke_key(
    grant: Grant,
    key: Key,
    reason: RevocationReason,
    *,
    evidence: Sequence[str] = (),
) -> Record:
    """Revoke a key permanently and record the `evidence`. Needs neither the secret backend nor the broker.

    Idempotent: a dead key does not change, except that a report of compromise still marks a deactivated one. Notifies
    the merchant and the operators, and raises an alarm when the credential has no usable key left.
    """
    with _locked_and_current(grant, key):
        return _revoke(grant, key, reason, evidence)


def _revoke(grant: Grant, key: Key, reason: RevocationReason, evidence: Sequence[str]) -> Record:
    if reason is RevocationReason.KEY_COMPROMISE:
        return _report_compromise(grant, key)
    if key.state in {KeyState.DEACTIVATED, KeyState.COMPROMISED, KeyState.DESTROYED}:
        with recorded(grant, _REVOKE, "key.revoke_repeated", account=key.credential.account, **_about(key)) as record:
            pass
        # The first response may have been lost after the commit, and this host's notification with it.
        notify_host([key.alters()])
        return record
    if key.state == KeyState.PRE_ACTIVATION:
        return discard_key(grant, key)
    return _transition(
        grant,
        _REVOKE,
        key,
        state_after(reason),
        "key.revoked",
        notice=NoticeKind.KEY_REVOKED,
        details={"reason": reason.value, "evidence": list(evidence)},
        deactivated_at=grant.at,
        retirement=RetirementReason.REVOKED,
        reason=reason,
        material=_material_after_end(key),
    )


def report_compromise(grant: Grant, key: Key, *, why: str = "") -> Record:
    """Revoke a key that is known or suspected to be compromised, without a second person, and raise an alarm.

    `why` is recorded in the audit log.
    """
    with _locked_and_current(grant, key):
        return _report_compromise(grant, key, why)


def revoke_own_key(grant: Grant, key: Key) -> int:
    """Revoke the presented key as compromised; return the sequence of the revocation, the same on each repeat.

    A repeat writes nothing, so that it cannot fill the audit log, and counts against a limit before any read. Raises
    RateLimitedError after too many repeats, PermissionMissingError for a key other than the presented one.
    """
    if not isinstance(grant.principal, KeyHolder) or grant.principal.key_id != key.key_id:
        raise PermissionMissingError(
            "This action is not allowed.", internal=f"{grant.principal.actor} ends {key.key_id}"
        )
    ended = {KeyState.COMPROMISED, KeyState.DESTROYED}
    is_repeat = key.state in ended
    if is_repeat:
        spend_repeat(key.key_id)
    else:
        with _locked_and_current(grant, key):
            is_repeat = key.state in ended
            if not is_repeat:
                _report_compromise(grant, key)
    if is_repeat:
        notify_host_again(key.alters(), key.compromised_at, grant.at)
    return last_sequence(key)


@contextmanager
def _locked_and_current(grant: Grant, key: Key) -> Iterator[None]:
    """Open a transaction, and lock and reload the key, unless the engine acts.

    A person revokes the key in its current state, whatever changed since the page was loaded. The engine revokes the
    version it read, or fails.
    """
    if isinstance(grant.principal, System):
        yield
        return
    with transaction.atomic():
        key.refresh_from_db(from_queryset=_keys().select_for_update(of=("self",), no_key=True))
        yield


def _report_compromise(grant: Grant, key: Key, why: str = "") -> Record:
    permissions = frozenset({P.KEYS_REVOKE, P.KEYS_REPORT_COMPROMISE, P.KEYS_REVOKE_SELF})
    if key.state in {KeyState.COMPROMISED, KeyState.DESTROYED}:
        with recorded(
            grant, permissions, "key.compromise_repeated", account=key.credential.account, **_about(key)
        ) as record:
            pass
        notify_host([key.alters()])  # as in `_revoke`
        return record
    return _transition(
        grant,
        permissions,
        key,
        KeyState.COMPROMISED,
        "key.compromised",
        notice=NoticeKind.KEY_COMPROMISED,
        details={
            "reason": RevocationReason.KEY_COMPROMISE.value,
            "was": key.state,
            **({"why": clean_text(why, 300)} if why else {}),
        },
        compromised_at=grant.at,
        reason=RevocationReason.KEY_COMPROMISE,
        material=_material_after_end(key),
    )


def discard_key(grant: Grant, key: Key) -> Record:
    """Discard a key that was never delivered, whether it has verified or not."""
    permissions = _REVOKE | {P.ROTATIONS_WRITE}
    material = _material_after_end(key)
    if key.state == KeyState.PRE_ACTIVATION:
        return _transition(
            grant, permissions, key, KeyState.DESTROYED, "key.burned", destroyed_at=grant.at, material=material
        )
    return _transition(
        grant,
        permissions,
        key,
        KeyState.DEACTIVATED,
        "key.burned",
        deactivated_at=grant.at,
        retirement=RetirementReason.REVOKED,
        reason=RevocationReason.CESSATION_OF_OPERATION,
        material=material,
    )


def reapply_revocation(grant: Grant, key: Key, reason: RevocationReason, **details: JsonValue) -> Record:
    """Revoke again a key that a restored database has revived. Sends no notices: the first revocation did."""
    state = state_after(reason)
    if key.state == KeyState.PRE_ACTIVATION and state is KeyState.DEACTIVATED:
        state = KeyState.DESTROYED
    stamps: dict[str, Any] = {f"{state}_at": grant.at, "material": _material_after_end(key)}
    if state is not KeyState.DESTROYED:
        stamps["reason"] = reason
    if state is KeyState.DEACTIVATED:
        stamps["retirement"] = RetirementReason.REVOKED
    audit_details: dict[str, JsonValue] = {"reason": reason.value, "was": key.state, **details}
    return _transition(
        grant, frozenset({P.REVOCATIONS_REPLAY}), key, state, "key.revocation_replayed", details=audit_details, **stamps
    )


def expire_key(grant: Grant, key: Key) -> None:
    """Record an expiry. Verdicts check expiry themselves and do not wait for this."""
    if key.expires_at is None or grant.at < key.expires_at:
        raise StateConflictError("The key has not expired.")
    _transition(
        grant,
        _ENGINE,
        key,
        KeyState.DEACTIVATED,
        "key.expired",
        deactivated_at=grant.at,
        retirement=RetirementReason.EXPIRED,
        material=_material_after_end(key),
        notice=NoticeKind.KEY_REVOKED,
    )


def list_expired(now: datetime, after: Key | None = None) -> list[Key]:
    """Return a batch of keys to expire in the served environments, the longest expired first."""
    living = _keys().filter(state__in=[KeyState.ACTIVE, KeyState.SUSPENDED], expires_at__lte=now)
    served = living.filter(credential__account__environment__in=settings.ENVIRONMENTS)
    return batch_after(served, "expires_at", after)


def get_key(key_id: str) -> Key | None:
    return _keys().filter(key_id=key_id).first()


def last_sequence(key: Key) -> int:
    """Return the sequence of a key's revocation, so that a repeated revocation returns the same value.

    Later changes (the destruction of its material) do not count. For a living key: the sequence of its latest change.
    """
    changes = Change.objects.filter(subject_kind="key", subject_id=key.key_id)
    ended_at = key.compromised_at or key.deactivated_at or key.destroyed_at
    if ended_at is not None:
        changes = changes.filter(at__lte=ended_at)
    change = changes.order_by("-sequence").first()
    return 0 if change is None else change.sequence


def describe_key(key: Key) -> dict[str, Any]:
    """Return the public fields of a key, without its material or anything derived from it."""
    use: KeyUse | None = getattr(key, "use", None)  # a key that was never used has none
    credential = key.credential
    return {
        "key_id": key.key_id,
        "state": key.state,
        "kind": credential.kind,
        "credential_id": credential.credential_id,
        "merchant_id": credential.account.merchant_id,
        "environment": credential.account.environment,
        "created_at": key.created_at,
        "activated_at": key.activated_at,
        "expires_at": key.expires_at,
        "first_used_at": use.first_at if use else None,
        "last_used_at": use.last_at if use else None,
        "retirement": key.retirement,
        "reason": key.reason,
    }


def usable_keys(credential_id: str, now: datetime) -> QuerySet[Key]:
    """Return the credential's keys that verify now, provided that its merchant and account are active."""
    unexpired = Q(expires_at__isnull=True) | Q(expires_at__gt=now)
    keys: QuerySet[Key] = Key.objects.filter(unexpired, credential_id=credential_id, state=KeyState.ACTIVE)
    return keys


def _keys() -> QuerySet[Key]:
    return Key.objects.select_related("credential__account__merchant")


def _about(key: Key) -> dict[str, JsonValue]:
    return {"key_id": key.key_id, "credential_id": key.credential_id}


def _material_after_end(key: Key) -> Material:
    is_gone = key.material in {Material.NONE, Material.DESTROYED}
    return Material(key.material) if is_gone else Material.DESTROY_DUE


def _is_superseded(key: Key) -> bool:
    """Whether the database names another key as the owner of the credential's newest version."""
    others = Key.objects.filter(credential_id=key.credential_id).exclude(pk=key.pk)
    return others.filter(backend_version__gt=key.backend_version).exists()


def _transition(
    grant: Grant,
    permissions: frozenset[P],
    key: Key,
    state: KeyState,
    event: str,
    *,
    notice: NoticeKind | None = None,
    details: dict[str, JsonValue] | None = None,
    **stamps: object,
) -> Record:
    """Make one state transition in one transaction with its audit entry, change row and notices."""
    if not can_transition(KeyState(key.state), state):
        raise StateConflictError(
            f"A key that is {key.state} cannot become {state}.", internal=f"{key.key_id}: {key.state} to {state}"
        )
    with recorded(
        grant, permissions, event, account=key.credential.account, **_about(key), **(details or {})
    ) as record:
        if state is KeyState.ACTIVE:
            _require_room(key)
        was_active = key.state == KeyState.ACTIVE
        key.compare_and_swap(state=state, **stamps)
        if notice is not None:
            _announce(grant, notice, key, key.key_id, str(key.reason or key.retirement))
        is_quarantine = event == "key.suspended" and isinstance(grant.principal, System)
        if was_active and event in _WITHDRAWING_EVENTS and not is_quarantine:
            _alarm_if_last(grant, key)
    return record


_WITHDRAWING_EVENTS = frozenset({"key.revoked", "key.compromised", "key.expired", "key.suspended"})
"""Events that may leave a credential without a usable key. Discarded keys were not delivered.

The engine suspends a key only beside another usable one.
"""


def _find_none(credential_id: str) -> Collection[str]:
    return ()


find_undelivered: Callable[[str], Collection[str]] = _find_none
"""Returns the ids of a credential's keys that its merchant cannot read yet. The rotation app sets it."""


def _alarm_if_last(grant: Grant, key: Key) -> None:
    """Raise an alarm if the merchant has no usable key of the credential left, in the transaction that took one away.

    Not for an offboarded merchant, where this is intended. A key that another transaction has locked may be ending
    too and does not count. So at least one of two concurrent revocations raises the alarm, and neither waits.
    """
    if key.credential.account.merchant.status == MerchantStatus.OFFBOARDED:
        return
    undelivered = find_undelivered(key.credential_id)
    if key.pk in undelivered:
        return  # Its end takes no access away. The end of the key that the merchant reads raises the alarm.
    others = usable_keys(key.credential_id, grant.at).exclude(pk=key.pk).exclude(pk__in=undelivered)
    if not list(others.select_for_update(skip_locked=True, no_key=True)):
        why = str(key.reason or key.retirement or key.state)
        _announce(grant, NoticeKind.CREDENTIAL_WITHOUT_KEY, key, key.credential_id, why)


def _announce(grant: Grant, notice: NoticeKind, key: Key, subject: str, reason: str) -> None:
    account, credential_id = key.credential.account, key.credential_id
    announce(grant, notice, account, subject, reason=reason, key_id=key.key_id, credential_id=credential_id)


def _require_room(key: Key) -> None:
    """Require room for another active key, inside the transaction of the activation.

    Locks the credential's row to serialize activations. Locks the account's row too, so that an offboarding either
    precedes the activation (this raises StateConflictError) or finds the key.
    """
    rows = Credential.objects.select_related("account").select_for_update(no_key=True, of=("self", "account"))
    account = rows.get(pk=key.credential_id).account
    # Read after the lock is held; values read together with the lock may be older.
    if Merchant.objects.get(pk=account.merchant_id).status == MerchantStatus.OFFBOARDED:
        raise StateConflictError("The merchant was offboarded. Its credentials cannot get new keys.")
    verifying = Key.objects.filter(credential_id=key.credential_id, state=KeyState.ACTIVE).exclude(pk=key.pk)
    if verifying.count() >= MAX_VERIFYING:
        raise StateConflictError("Two keys of the credential are already active. Revoke one of them first.")
