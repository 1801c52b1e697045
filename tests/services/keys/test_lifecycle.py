"""The key lifecycle: every transition of the transition table, and no other."""

from collections.abc import Callable
from datetime import datetime, timedelta

import pytest
from django.db import IntegrityError, transaction

from keyvault.access.decision import Denial, Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER
from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode, PermissionMissingError, StateConflictError
from keyvault.domain.keys import TRANSITIONS, KeyKind, KeyState
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.revocation import RevocationReason
from keyvault.models import Key, Material
from keyvault.services.catalog.catalog import find_endpoint
from keyvault.services.keys import lifecycle
from keyvault.services.verification.judging import VerificationRequest, judge_presented
from tests.factories import PRODUCTION, SANDBOX, grant, issue, now
from tests.services.conftest import Scene
from tests.services.rows import last_body, last_ids, written_since

pytestmark = [pytest.mark.database, pytest.mark.django_db]

S = KeyState


def verdict(text: Plaintext, at: datetime | None = None, environment: Environment = SANDBOX) -> ErrorCode | None:
    """Return the denial code, or None if the key is allowed."""
    presented = VerificationRequest(text.reveal(), environment, find_endpoint("orders.create"))
    judged = judge_presented(presented, at or now()).verdict
    return judged.code if isinstance(judged, Denial) else None


def engine(scene: Scene, at: datetime | None = None) -> Grant:
    return grant(WORKER, P.ISSUANCE_EXECUTE, scene.sandbox, at=at)


def by_admin(scene: Scene, permission: P, at: datetime | None = None) -> Grant:
    return grant(scene.admin, permission, scene.sandbox, at=at)


def in_state(scene: Scene, state: KeyState) -> tuple[Key, Plaintext]:
    """Bring a key to that state through the services."""
    key, text = issue(scene.sandbox, expires_in_days=30)
    if state in {S.PRE_ACTIVATION, S.DESTROYED}:
        key, text = lifecycle.stage_key(engine(scene), key.credential, expires_in_days=30)
        if state is S.DESTROYED:
            lifecycle.discard_key(engine(scene), key)
    elif state is S.SUSPENDED:
        lifecycle.suspend_key(by_admin(scene, P.KEYS_SUSPEND), key)
    elif state is S.DEACTIVATED:
        lifecycle.revoke_key(by_admin(scene, P.KEYS_REVOKE), key, RevocationReason.SUPERSEDED)
    elif state is S.COMPROMISED:
        lifecycle.report_compromise(by_admin(scene, P.KEYS_REVOKE), key)
    assert key.state == state
    return key, text


MOVES: dict[str, tuple[KeyState, Callable[[Scene, Key], object]]] = {
    "activate": (S.ACTIVE, lambda scene, key: lifecycle.activate_key(engine(scene), key)),
    "suspend": (S.SUSPENDED, lambda scene, key: lifecycle.suspend_key(by_admin(scene, P.KEYS_SUSPEND), key)),
    "resume": (S.ACTIVE, lambda scene, key: lifecycle.resume_key(by_admin(scene, P.KEYS_RESUME), key)),
    "expire": (S.DEACTIVATED, lambda scene, key: lifecycle.expire_key(engine(scene, at=key.expires_at), key)),
    "discard": (S.DEACTIVATED, lambda scene, key: lifecycle.discard_key(engine(scene), key)),
    "revoke": (
        S.DEACTIVATED,
        lambda scene, key: lifecycle.revoke_key(
            by_admin(scene, P.KEYS_REVOKE), key, RevocationReason.CESSATION_OF_OPERATION
        ),
    ),
    "report": (S.COMPROMISED, lambda scene, key: lifecycle.report_compromise(by_admin(scene, P.KEYS_REVOKE), key)),
}

REPEATABLE = {
    ("revoke", S.DEACTIVATED),
    ("revoke", S.COMPROMISED),
    ("revoke", S.DESTROYED),
    ("report", S.COMPROMISED),
    ("report", S.DESTROYED),
}
"""Revoking or reporting a key again returns the same outcome and changes nothing."""

DISCARDS = {("discard", S.PRE_ACTIVATION), ("revoke", S.PRE_ACTIVATION)}
"""A key that no holder received is destroyed immediately."""


def _outcome(name: str, state: KeyState) -> KeyState | None:
    """Return the state after a move, or None if the move is not allowed."""
    if (name, state) in REPEATABLE:
        return state
    if (name, state) in DISCARDS:
        return S.DESTROYED
    to = MOVES[name][0]
    if name == "resume" and state is not S.SUSPENDED:
        return None
    return to if to in TRANSITIONS[state] else None


@pytest.mark.parametrize("state", list(KeyState))
def test_key_moved_from_each_state_follows_the_transition_table(
    scene: Scene, state: KeyState, subtests: pytest.Subtests
) -> None:
    """No service performs a transition that the table does not have; a refused move writes nothing."""
    for name, (_, move) in MOVES.items():
        key, _ = in_state(scene, state)
        before = last_ids()
        expected = _outcome(name, state)
        with subtests.test(name):
            if expected is None:
                with pytest.raises(StateConflictError):
                    move(scene, key)
                assert written_since(before) == ([], [])
                assert Key.objects.get(pk=key.pk).state == state
            else:
                move(scene, key)
                assert Key.objects.get(pk=key.pk).state == expected


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (S.PRE_ACTIVATION, ErrorCode.KEY_NOT_ACTIVE),
        (S.ACTIVE, None),
        (S.SUSPENDED, ErrorCode.KEY_NOT_ACTIVE),
        (S.DEACTIVATED, ErrorCode.KEY_REVOKED),
        (S.COMPROMISED, ErrorCode.KEY_REVOKED),
        (S.DESTROYED, ErrorCode.KEY_REVOKED),
    ],
)
def test_key_verifies_only_in_state_active(scene: Scene, state: KeyState, code: ErrorCode | None) -> None:
    """Only `active` verifies, from the commit that enters the state to the commit that leaves it."""
    _, text = in_state(scene, state)
    assert verdict(text) == code


def test_key_expired_is_refused_before_the_expiry_is_recorded(scene: Scene) -> None:
    """The verdict compares the expiry with the clock, so a late sweep never extends a key's life."""
    key, text = issue(scene.sandbox, expires_in_days=1)
    assert key.expires_at is not None
    assert verdict(text, key.expires_at - timedelta(microseconds=1)) is None
    assert verdict(text, key.expires_at) is ErrorCode.KEY_EXPIRED
    lifecycle.expire_key(engine(scene, at=key.expires_at), key)
    assert verdict(text, key.expires_at - timedelta(days=1)) is ErrorCode.KEY_EXPIRED


def test_key_expired_then_reported_compromised_is_denied_as_revoked(scene: Scene) -> None:
    """A compromise report takes precedence over an expiry in the verdict."""
    key, text = issue(scene.sandbox, expires_in_days=1)
    lifecycle.expire_key(engine(scene, at=key.expires_at), key)
    lifecycle.report_compromise(by_admin(scene, P.KEYS_REPORT_COMPROMISE), key)
    assert verdict(text) is ErrorCode.KEY_REVOKED


def test_key_suspended_and_expired_is_not_resumed(scene: Scene) -> None:
    key, _ = issue(scene.sandbox, expires_in_days=1)
    lifecycle.suspend_key(by_admin(scene, P.KEYS_SUSPEND), key)
    with pytest.raises(StateConflictError, match="has expired"):
        lifecycle.resume_key(by_admin(scene, P.KEYS_RESUME, at=key.expires_at), key)


def test_key_expired_before_its_time_is_refused(scene: Scene) -> None:
    """Only the expiry that the key was issued with ends it by the clock."""
    key, _ = issue(scene.sandbox, expires_in_days=1)
    unlimited, _ = issue(scene.sandbox)
    assert key.expires_at is not None
    for one, at in ((key, key.expires_at - timedelta(microseconds=1)), (unlimited, now() + timedelta(days=9999))):
        with pytest.raises(StateConflictError, match="has not expired"):
            lifecycle.expire_key(engine(scene, at=at), one)


@pytest.mark.postgres_once
@pytest.mark.parametrize("reason", list(RevocationReason))
def test_key_revoked_keeps_its_reason_and_loses_its_stored_copy(scene: Scene, reason: RevocationReason) -> None:
    """Each reason of RFC 5280 revokes the key immediately and schedules its stored copy for destruction."""
    key, text = issue(scene.sandbox)
    lifecycle.revoke_key(by_admin(scene, P.KEYS_REVOKE), key, reason)
    assert verdict(text) is ErrorCode.KEY_REVOKED
    stored = Key.objects.get(pk=key.pk)
    assert (stored.reason, stored.material) == (reason, Material.DESTROY_DUE)
    compromised = reason is RevocationReason.KEY_COMPROMISE
    assert stored.state == ("compromised" if compromised else "deactivated")


def test_key_revoked_twice_changes_nothing(scene: Scene) -> None:
    """A repeated revocation succeeds, adds an audit entry, and changes no verdict."""
    key, _ = issue(scene.sandbox)
    first = lifecycle.revoke_key(by_admin(scene, P.KEYS_REVOKE), key, RevocationReason.SUPERSEDED)
    before = last_ids()
    lifecycle.revoke_key(by_admin(scene, P.KEYS_REVOKE), key, RevocationReason.UNSPECIFIED)
    assert written_since(before) == (["key.revoke_repeated"], [])
    assert Key.objects.get(pk=key.pk).reason == "superseded"
    assert lifecycle.last_sequence(key) == first.sequence


def test_key_revoked_then_revoked_as_compromised_becomes_compromised(scene: Scene) -> None:
    key, _ = issue(scene.sandbox)
    lifecycle.revoke_key(by_admin(scene, P.KEYS_REVOKE), key, RevocationReason.SUPERSEDED)
    lifecycle.revoke_key(by_admin(scene, P.KEYS_REVOKE), key, RevocationReason.KEY_COMPROMISE)
    assert Key.objects.get(pk=key.pk).state == "compromised"


def test_key_revoked_by_an_operator_with_a_stale_copy_is_revoked(scene: Scene) -> None:
    """A manual revocation always takes precedence, even if the key was suspended since the operator read it."""
    key, text = issue(scene.sandbox)
    seen = lifecycle.get_key(key.key_id)
    assert seen is not None
    lifecycle.suspend_key(by_admin(scene, P.KEYS_SUSPEND), key)
    lifecycle.revoke_key(by_admin(scene, P.KEYS_REVOKE), seen, RevocationReason.SUPERSEDED)
    assert verdict(text) is ErrorCode.KEY_REVOKED
    assert seen.state == "deactivated"


def test_key_revoked_by_the_engine_with_a_stale_copy_is_refused(scene: Scene) -> None:
    """The engine decided on the row that it read; if the row has changed since, it revokes nothing."""
    key, text = issue(scene.sandbox)
    seen = lifecycle.get_key(key.key_id)
    assert seen is not None
    lifecycle.suspend_key(by_admin(scene, P.KEYS_SUSPEND), key)
    lifecycle.resume_key(by_admin(scene, P.KEYS_RESUME), key)
    allowed = grant(WORKER, P.ROTATIONS_ADVANCE, scene.sandbox)
    with pytest.raises(StateConflictError):
        lifecycle.revoke_key(allowed, seen, RevocationReason.SUPERSEDED)
    assert verdict(text) is None


@pytest.mark.parametrize("reason", [RevocationReason.SUPERSEDED, RevocationReason.KEY_COMPROMISE])
def test_key_revoked_by_one_incident_responder_needs_no_approval(scene: Scene, reason: RevocationReason) -> None:
    """Approval is required to issue keys, never to revoke them, in production too."""
    key, text = issue(scene.production)
    lifecycle.revoke_key(grant(scene.responder, P.KEYS_REVOKE, scene.production), key, reason)
    assert verdict(text, environment=PRODUCTION) is ErrorCode.KEY_REVOKED


def test_key_revoked_with_evidence_cites_it_in_the_audit_entry(scene: Scene) -> None:
    key, _ = issue(scene.sandbox)
    lifecycle.revoke_key(by_admin(scene, P.KEYS_REVOKE), key, RevocationReason.SUPERSEDED, evidence=["evd_1", "evd_2"])
    assert last_body("key.revoked")["details"]["evidence"] == ["evd_1", "evd_2"]


# ------------------------------------------------------------------------------------------------- permissions


@pytest.mark.postgres_once
@pytest.mark.parametrize("name", MOVES)
def test_key_moved_with_a_read_grant_is_refused(scene: Scene, name: str) -> None:
    """Each service requires its own permission."""
    key, _ = in_state(scene, S.SUSPENDED if name == "resume" else S.PRE_ACTIVATION if name == "activate" else S.ACTIVE)
    allowed = grant(scene.admin, P.KEYS_READ, scene.sandbox, at=key.expires_at if name == "expire" else None)
    moves: dict[str, Callable[[], object]] = {
        "activate": lambda: lifecycle.activate_key(allowed, key),
        "suspend": lambda: lifecycle.suspend_key(allowed, key),
        "resume": lambda: lifecycle.resume_key(grant(scene.admin, P.KEYS_READ, scene.sandbox), key),
        "expire": lambda: lifecycle.expire_key(allowed, key),
        "discard": lambda: lifecycle.discard_key(allowed, key),
        "revoke": lambda: lifecycle.revoke_key(allowed, key, RevocationReason.SUPERSEDED),
        "report": lambda: lifecycle.report_compromise(allowed, key),
    }
    state = key.state
    with pytest.raises(PermissionMissingError):
        moves[name]()
    assert Key.objects.get(pk=key.pk).state == state


# --------------------------------------------------------------------------------------------- at most two active keys


def _stage_second_key(scene: Scene, key: Key) -> Key:
    return lifecycle.stage_key(engine(scene), key.credential, expires_in_days=None)[0]


def test_key_activated_as_the_third_of_a_credential_is_refused(scene: Scene) -> None:
    """At most two keys of a credential verify: enough for the overlap of a rotation."""
    key, _ = issue(scene.sandbox)
    second, third = _stage_second_key(scene, key), _stage_second_key(scene, key)
    lifecycle.activate_key(engine(scene), second)
    with pytest.raises(StateConflictError, match="Two keys of the credential are already active"):
        lifecycle.activate_key(engine(scene), third)
    assert key.credential.keys.filter(state="active").count() == 2


def test_key_resumed_as_the_third_of_a_credential_is_refused(scene: Scene) -> None:
    key, _ = issue(scene.sandbox)
    lifecycle.suspend_key(by_admin(scene, P.KEYS_SUSPEND), key)
    for _ in range(2):
        lifecycle.activate_key(engine(scene), _stage_second_key(scene, key))
    with pytest.raises(StateConflictError, match="Two keys of the credential are already active"):
        lifecycle.resume_key(by_admin(scene, P.KEYS_RESUME), key)


def test_key_activated_as_the_third_of_a_credential_is_refused_by_the_database(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trigger refuses what a service failed to count."""
    key, _ = issue(scene.sandbox)
    second, third = _stage_second_key(scene, key), _stage_second_key(scene, key)
    lifecycle.activate_key(engine(scene), second)
    monkeypatch.setattr(lifecycle, "MAX_VERIFYING", 3)
    with pytest.raises(IntegrityError, match="a credential has at most two active keys"), transaction.atomic():
        lifecycle.activate_key(engine(scene), third)


# --------------------------------------------------------------------------------------------------- stored and shown


def test_key_staged_is_stored_as_a_digest_only(scene: Scene) -> None:
    """The database never holds a key string or its secret part."""
    key, text = in_state(scene, S.PRE_ACTIVATION)
    row = Key.objects.get(pk=key.pk)
    assert len(bytes(row.digest)) == 32
    assert text.reveal() not in repr(vars(row))
    assert row.material == Material.NONE


@pytest.mark.parametrize("kind", list(KeyKind))
def test_key_description_names_the_state_and_no_secret(scene: Scene, kind: KeyKind) -> None:
    """A description contains neither the key string, nor its digest, nor where the string is stored."""
    key, text = issue(scene.sandbox, kind=kind, expires_in_days=5)
    described = lifecycle.describe_key(key)
    assert described["kind"] == kind
    assert not {"digest", "pepper_version", "backend_version", "material"} & set(described)
    assert text.reveal() not in repr(described)
    assert bytes(key.digest) not in described.values()
