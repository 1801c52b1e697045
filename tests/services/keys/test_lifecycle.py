"""The life of a key: every way of the transition table, and no other."""

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
    """None: allowed."""
    presented = VerificationRequest(text.reveal(), environment, find_endpoint("orders.create"))
    judged = judge_presented(presented, at or now()).verdict
    return judged.code if isinstance(judged, Denial) else None


def engine(scene: Scene, at: datetime | None = None) -> Grant:
    return grant(WORKER, P.ISSUANCE_EXECUTE, scene.sandbox, at=at)


def by_admin(scene: Scene, permission: P, at: datetime | None = None) -> Grant:
    return grant(scene.admin, permission, scene.sandbox, at=at)


def in_state(scene: Scene, state: KeyState) -> tuple[Key, Plaintext]:
    """A key brought to that state by the services."""
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
    "burn": (S.DEACTIVATED, lambda scene, key: lifecycle.discard_key(engine(scene), key)),
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
"""Ending what has ended answers the same and changes nothing."""

BURNS = {("burn", S.PRE_ACTIVATION), ("revoke", S.PRE_ACTIVATION)}
"""A key that nobody held is destroyed outright."""


def _outcome(name: str, state: KeyState) -> KeyState | None:
    """Where a move leads from a state; None: nowhere."""
    if (name, state) in REPEATABLE:
        return state
    if (name, state) in BURNS:
        return S.DESTROYED
    to = MOVES[name][0]
    if name == "resume" and state is not S.SUSPENDED:
        return None
    return to if to in TRANSITIONS[state] else None


@pytest.mark.parametrize("state", list(KeyState))
def test_keys_every_move_from_a_state_goes_by_the_table(
    scene: Scene, state: KeyState, subtests: pytest.Subtests
) -> None:
    """No service takes a key a way that the transition table does not have; what is refused writes nothing."""
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
def test_keys_only_an_active_key_verifies(scene: Scene, state: KeyState, code: ErrorCode | None) -> None:
    """Of all states `active` alone verifies, from the moment of the commit that leads there or away."""
    _, text = in_state(scene, state)
    assert verdict(text) == code


def test_keys_expired_key_is_refused_before_anybody_recorded_it(scene: Scene) -> None:
    """A late sweep never leaves a key alive: expiry is judged from the clock."""
    key, text = issue(scene.sandbox, expires_in_days=1)
    assert key.expires_at is not None
    assert verdict(text, key.expires_at - timedelta(microseconds=1)) is None
    assert verdict(text, key.expires_at) is ErrorCode.KEY_EXPIRED
    lifecycle.expire_key(engine(scene, at=key.expires_at), key)
    assert verdict(text, key.expires_at - timedelta(days=1)) is ErrorCode.KEY_EXPIRED


def test_keys_expired_key_reported_compromised_is_told_as_revoked(scene: Scene) -> None:
    """A compromise report wins over an expiry, also in what the verdict says of the key."""
    key, text = issue(scene.sandbox, expires_in_days=1)
    lifecycle.expire_key(engine(scene, at=key.expires_at), key)
    lifecycle.report_compromise(by_admin(scene, P.KEYS_REPORT_COMPROMISE), key)
    assert verdict(text) is ErrorCode.KEY_REVOKED


def test_keys_suspended_key_that_expired_is_not_resumed(scene: Scene) -> None:
    key, _ = issue(scene.sandbox, expires_in_days=1)
    lifecycle.suspend_key(by_admin(scene, P.KEYS_SUSPEND), key)
    with pytest.raises(StateConflictError, match="has expired"):
        lifecycle.resume_key(by_admin(scene, P.KEYS_RESUME, at=key.expires_at), key)


def test_keys_key_is_not_expired_before_its_time(scene: Scene) -> None:
    """Nothing but the expiry that the key was issued with ends it by the clock."""
    key, _ = issue(scene.sandbox, expires_in_days=1)
    unlimited, _ = issue(scene.sandbox)
    assert key.expires_at is not None
    for one, at in ((key, key.expires_at - timedelta(microseconds=1)), (unlimited, now() + timedelta(days=9999))):
        with pytest.raises(StateConflictError, match="has not expired"):
            lifecycle.expire_key(engine(scene, at=at), one)


@pytest.mark.parametrize("reason", list(RevocationReason))
def test_keys_revoked_key_keeps_reason_and_loses_its_copy(scene: Scene, reason: RevocationReason) -> None:
    """Each reason of RFC 5280 ends the key at once, is kept, and has the readable copy destroyed."""
    key, text = issue(scene.sandbox)
    lifecycle.revoke_key(by_admin(scene, P.KEYS_REVOKE), key, reason)
    assert verdict(text) is ErrorCode.KEY_REVOKED
    stored = Key.objects.get(pk=key.pk)
    assert (stored.reason, stored.material) == (reason, Material.DESTROY_DUE)
    compromised = reason is RevocationReason.KEY_COMPROMISE
    assert stored.state == ("compromised" if compromised else "deactivated")


def test_keys_revoked_twice_answers_the_same_and_changes_nothing(scene: Scene) -> None:
    """A repeated revocation is no error, leaves its trace in the log, and alters no verdict."""
    key, _ = issue(scene.sandbox)
    first = lifecycle.revoke_key(by_admin(scene, P.KEYS_REVOKE), key, RevocationReason.SUPERSEDED)
    before = last_ids()
    lifecycle.revoke_key(by_admin(scene, P.KEYS_REVOKE), key, RevocationReason.UNSPECIFIED)
    assert written_since(before) == (["key.revoke_repeated"], [])
    assert Key.objects.get(pk=key.pk).reason == "superseded"
    assert lifecycle.last_sequence(key) == first.sequence


def test_keys_revoked_key_reported_compromised_becomes_so(scene: Scene) -> None:
    key, _ = issue(scene.sandbox)
    lifecycle.revoke_key(by_admin(scene, P.KEYS_REVOKE), key, RevocationReason.SUPERSEDED)
    lifecycle.revoke_key(by_admin(scene, P.KEYS_REVOKE), key, RevocationReason.KEY_COMPROMISE)
    assert Key.objects.get(pk=key.pk).state == "compromised"


def test_keys_revoked_by_hand_wins_over_what_was_written_meanwhile(scene: Scene) -> None:
    """A manual revocation always wins: whoever revokes what they saw active ends it though it was suspended since."""
    key, text = issue(scene.sandbox)
    seen = lifecycle.get_key(key.key_id)
    assert seen is not None
    lifecycle.suspend_key(by_admin(scene, P.KEYS_SUSPEND), key)
    lifecycle.revoke_key(by_admin(scene, P.KEYS_REVOKE), seen, RevocationReason.SUPERSEDED)
    assert verdict(text) is ErrorCode.KEY_REVOKED
    assert seen.state == "deactivated"


def test_keys_revoked_by_our_engine_on_what_it_no_longer_sees_is_refused(scene: Scene) -> None:
    """Our own engine decided on what it saw: when somebody wrote since, it ends nothing."""
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
def test_keys_revoked_by_one_incident_responder_alone(scene: Scene, reason: RevocationReason) -> None:
    """Approval gates minting, never revoking: one responder alone ends any key, in production too."""
    key, text = issue(scene.production)
    lifecycle.revoke_key(grant(scene.responder, P.KEYS_REVOKE, scene.production), key, reason)
    assert verdict(text, environment=PRODUCTION) is ErrorCode.KEY_REVOKED


def test_keys_evidence_is_cited_in_the_entry_of_the_revocation(scene: Scene) -> None:
    """Whoever asks why a key was revoked finds the rows that it was decided on."""
    key, _ = issue(scene.sandbox)
    lifecycle.revoke_key(by_admin(scene, P.KEYS_REVOKE), key, RevocationReason.SUPERSEDED, evidence=["evd_1", "evd_2"])
    assert last_body("key.revoked")["details"]["evidence"] == ["evd_1", "evd_2"]


# ------------------------------------------------------------------------------------------------- who may do what


@pytest.mark.parametrize("name", MOVES)
def test_keys_moved_with_a_grant_to_read_is_refused(scene: Scene, name: str) -> None:
    """Each service asks for its own permission; a grant for anything else moves nothing."""
    key, _ = in_state(scene, S.SUSPENDED if name == "resume" else S.PRE_ACTIVATION if name == "activate" else S.ACTIVE)
    allowed = grant(scene.admin, P.KEYS_READ, scene.sandbox, at=key.expires_at if name == "expire" else None)
    acts: dict[str, Callable[[], object]] = {
        "activate": lambda: lifecycle.activate_key(allowed, key),
        "suspend": lambda: lifecycle.suspend_key(allowed, key),
        "resume": lambda: lifecycle.resume_key(grant(scene.admin, P.KEYS_READ, scene.sandbox), key),
        "expire": lambda: lifecycle.expire_key(allowed, key),
        "burn": lambda: lifecycle.discard_key(allowed, key),
        "revoke": lambda: lifecycle.revoke_key(allowed, key, RevocationReason.SUPERSEDED),
        "report": lambda: lifecycle.report_compromise(allowed, key),
    }
    state = key.state
    with pytest.raises(PermissionMissingError):
        acts[name]()
    assert Key.objects.get(pk=key.pk).state == state


# --------------------------------------------------------------------------------------------- at most two verify


def _staged_beside(scene: Scene, key: Key) -> Key:
    return lifecycle.stage_key(engine(scene), key.credential, expires_in_days=None)[0]


def test_keys_third_key_of_a_credential_activated_is_refused(scene: Scene) -> None:
    """At most two keys of a credential verify at once: the overlap of a rotation, and no more."""
    key, _ = issue(scene.sandbox)
    second, third = _staged_beside(scene, key), _staged_beside(scene, key)
    lifecycle.activate_key(engine(scene), second)
    with pytest.raises(StateConflictError, match="Two keys of the credential are already active"):
        lifecycle.activate_key(engine(scene), third)
    assert key.credential.keys.filter(state="active").count() == 2


def test_keys_suspended_key_resumed_as_a_third_is_refused(scene: Scene) -> None:
    """Nor does a suspended key come back beside two others."""
    key, _ = issue(scene.sandbox)
    lifecycle.suspend_key(by_admin(scene, P.KEYS_SUSPEND), key)
    for _ in range(2):
        lifecycle.activate_key(engine(scene), _staged_beside(scene, key))
    with pytest.raises(StateConflictError, match="Two keys of the credential are already active"):
        lifecycle.resume_key(by_admin(scene, P.KEYS_RESUME), key)


def test_keys_third_key_is_refused_by_the_database_as_well(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that forgot to count would be stopped by the trigger."""
    key, _ = issue(scene.sandbox)
    second, third = _staged_beside(scene, key), _staged_beside(scene, key)
    lifecycle.activate_key(engine(scene), second)
    monkeypatch.setattr(lifecycle, "MAX_VERIFYING", 3)
    with pytest.raises(IntegrityError, match="at most two keys of a credential verify"), transaction.atomic():
        lifecycle.activate_key(engine(scene), third)


# --------------------------------------------------------------------------------------------------- what is told


def test_keys_staged_key_is_held_as_a_digest_only(scene: Scene) -> None:
    """The database never holds a key string, nor its secret part, from the first moment on."""
    key, text = in_state(scene, S.PRE_ACTIVATION)
    row = Key.objects.get(pk=key.pk)
    assert len(bytes(row.digest)) == 32
    assert text.reveal() not in repr(vars(row))
    assert row.material == Material.NONE


@pytest.mark.parametrize("kind", list(KeyKind))
def test_keys_description_tells_state_and_never_material(scene: Scene, kind: KeyKind) -> None:
    """What every door tells of a key has neither its string, nor its digest, nor where its string is kept."""
    key, text = issue(scene.sandbox, kind=kind, expires_in_days=5)
    told = lifecycle.describe_key(key)
    assert told["kind"] == kind
    assert not {"digest", "pepper_version", "backend_version", "material"} & set(told)
    assert text.reveal() not in repr(told)
    assert bytes(key.digest) not in told.values()
