"""The engine's path through a rotation, step by step, on a clock that tests control."""

from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from keyvault.access.permissions import Permission as P
from keyvault.backends.base import BackendUnavailableError, Mount
from keyvault.backends.local import LocalKeystore
from keyvault.domain.errors import StateConflictError
from keyvault.domain.keys import KeyState
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.revocation import RevocationReason
from keyvault.models import AuditEntry, Material, UsageReporter, WorkLease
from keyvault.models.usage import UseOutcome
from keyvault.services.keys.lifecycle import get_key, resume_key, suspend_key
from keyvault.services.recording.authorization import authorize
from keyvault.services.secrets.backend import secret_backend
from keyvault.services.secrets.stored_copies import find_stored
from keyvault.services.usage.recorder import UsageLog
from rotation.domain.events import RotationState as S
from rotation.domain.plan_fields import Proof
from rotation.models import LedgerEntry
from rotation.services.rotations.engine import advance_rotation
from rotation.services.rotations.interventions import abort_rotation, resume_rotation
from rotation.services.rotations.reports import get_rotation
from tests.clocks import Clock
from tests.rotation import scene
from tests.rotation.scene import unavailable
from tests.rotation.steps import advance, begun, key_states, overlapping, quarantined, revoke

pytestmark = [pytest.mark.database, pytest.mark.django_db]


# --- forward path -----------------------------------------------------------------------------------------


def test_rotation_by_acknowledgement_deploys_before_it_revokes(clock: Clock, verifier: UsageLog) -> None:
    """The old key verifies until the new one is delivered and proved and the old one is silent."""
    rotation = advance(begun(clock), clock)
    assert rotation.state == S.AWAITING_PROOF
    assert key_states(rotation) == ("active", "active")
    assert rotation.replacement is not None
    stored = find_stored(rotation.credential)
    assert stored is not None
    assert stored.labels["key_id"] == rotation.replacement_id

    scene.acknowledge_replacement(rotation.rotation_id, clock())
    verifier.flush()
    assert advance(rotation, clock, 3).state == S.OVERLAP
    assert key_states(rotation) == ("active", "active")

    clock.tick(6)
    verifier.flush()
    assert advance(rotation, clock).state == S.QUARANTINE
    assert key_states(rotation) == ("suspended", "active")

    clock.tick(6)
    verifier.flush()
    rotation = advance(rotation, clock)
    assert rotation.state == S.COMPLETED
    assert rotation.quarantined_at == clock() - timedelta(seconds=6)
    assert key_states(rotation) == ("deactivated", "active")
    assert rotation.predecessor.reason == RevocationReason.SUPERSEDED
    assert rotation.predecessor.material == Material.DESTROYED
    assert [evidence.kind for evidence in rotation.evidence.order_by("created_at", "pk")]
    assert None not in (rotation.accepted_at, rotation.delivered_at, rotation.used_at, rotation.silent_at)


MAX_QUERIES = 202
"""Maximum statements of the four turns of a rotation by acknowledgement, with BEGIN, COMMIT and savepoints.

Statements take most of a turn's processor time, so their number bounds the rotations that a worker completes a second.
A step that needs more says here why. A rotation is read by three statements: PostgreSQL took 7 ms to plan the join of
all its tables, more than the three take together. Each look at a rotation in quarantine reads the key's last use, since
a verifier may report it late; two more statements read such uses for the evidence. A dormant rotation that waits for
proof asks whether its old key has traffic.
"""


def test_rotation_from_request_to_completed_stays_within_its_budget_of_queries(
    clock: Clock, verifier: UsageLog
) -> None:
    rotation, made = begun(clock), 0
    for seconds in (0, 3, 6, 6):
        clock.tick(seconds)
        verifier.flush()
        with CaptureQueriesContext(connection) as turn:
            advance_rotation(rotation.rotation_id, clock)
        # A process reads its peppers again every few seconds: no cost of this turn.
        made += sum("keyvault_pepperversion" not in query["sql"] for query in turn.captured_queries)
        if not seconds:
            scene.acknowledge_replacement(rotation.rotation_id, clock())
    assert get_rotation(rotation.rotation_id).state == S.COMPLETED
    assert made <= MAX_QUERIES, made


def test_rotation_revoking_transaction_cites_its_evidence(clock: Clock, verifier: UsageLog) -> None:
    """The revocation's own audit entry names the rows on which it was decided."""
    rotation = quarantined(clock, verifier)
    clock.tick(6)
    verifier.flush()
    advance(rotation, clock)
    revoked = AuditEntry.objects.get(event="key.revoked")
    cited = set(rotation.evidence.values_list("evidence_id", flat=True))
    assert len(cited) == 5
    assert all(evidence_id.encode() in bytes(revoked.body) for evidence_id in cited)


def test_rotation_by_traffic_waits_for_count_and_sources(clock: Clock, verifier: UsageLog) -> None:
    rotation = advance(begun(clock, proof=Proof.TRAFFIC, proof_count=3, proof_sources=2), clock)
    new = rotation.replacement_id or ""
    scene.use(verifier, new, 5, source="192.0.2.1")
    assert advance(rotation, clock, 3).state == S.AWAITING_PROOF
    scene.use(verifier, new, 1, source="192.0.2.2")
    assert advance(rotation, clock, 3).state == S.AWAITING_PROOF, "another address of the same source"
    scene.use(verifier, new, 1, source="198.51.100.2")
    assert advance(rotation, clock, 3).state == S.OVERLAP
    used = rotation.evidence.get(kind="used")
    assert (used.seen["authentications"], used.seen["sources"], used.seen["minutes"]) == (7, 2, 1)
    assert {each["source"]: each["count"] for each in used.seen["by_source"]} == {
        "192.0.2.0/24 test": 6,
        "198.51.100.0/24 test": 1,
    }
    assert used.seen["has_more_sources"] is False
    assert "192.0.2.1" not in str(list(rotation.evidence.values_list("seen", flat=True))), "evidence is permanent"


@pytest.mark.sqlite
def test_evidence_of_proof_states_that_it_lacks_sources(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keyvault.services.usage.reports.MAX_READ", 2)
    rotation = advance(begun(clock, proof=Proof.TRAFFIC, proof_count=3, proof_sources=3), clock)
    for source in ("192.0.2.1", "198.51.100.2", "203.0.113.3"):
        scene.use(verifier, rotation.replacement_id or "", 1, source=source)
    assert advance(rotation, clock, 3).state == S.OVERLAP
    seen = rotation.evidence.get(kind="used").seen
    assert (seen["sources"], len(seen["by_source"]), seen["has_more_sources"]) == (3, 2, True)


@pytest.mark.sqlite
def test_rotation_by_traffic_waits_for_the_soak_time(clock: Clock, verifier: UsageLog) -> None:
    rotation = advance(begun(clock, proof=Proof.TRAFFIC, proof_count=1, proof_sources=1, soak_seconds=60), clock)
    scene.use(verifier, rotation.replacement_id or "")
    assert advance(rotation, clock, 30).state == S.AWAITING_PROOF
    assert advance(rotation, clock, 31).state == S.OVERLAP


def test_rotation_by_traffic_waits_for_distinct_minutes(clock: Clock, verifier: UsageLog) -> None:
    """A burst at the first start of a client, which then fell back to the old key, is no proof."""
    rotation = advance(begun(clock, proof=Proof.TRAFFIC, proof_count=2, proof_sources=1, soak_seconds=180), clock)
    scene.use(verifier, rotation.replacement_id or "", 100)
    assert advance(rotation, clock, 7 * 3600).state == S.AWAITING_PROOF
    for expected in (S.AWAITING_PROOF, S.OVERLAP):
        scene.use(verifier, rotation.replacement_id or "")
        assert advance(rotation, clock, 60).state == expected


def test_rotation_advanced_by_two_workers_changes_once(clock: Clock, verifier: UsageLog) -> None:
    rotation = begun(clock)
    for _ in range(3):
        advance_rotation(rotation.rotation_id, clock)
    assert AuditEntry.objects.filter(event="rotation.staged").count() == 1
    assert rotation.credential.keys.count() == 2


# --- observed silence -------------------------------------------------------------------------------------


def test_silence_restarts_at_each_use_of_the_predecessor(clock: Clock, verifier: UsageLog) -> None:
    """A key in use is never retired, however long the rotation takes."""
    rotation = overlapping(clock, verifier)
    for _ in range(5):
        clock.tick(4)
        scene.use(verifier, rotation.predecessor_id)
        assert advance(rotation, clock).state == S.OVERLAP
    scene.use(verifier, rotation.replacement_id or "")
    clock.tick(6)
    verifier.flush()
    assert advance(rotation, clock).state == S.QUARANTINE


@pytest.mark.sqlite
def test_silence_of_both_keys_proves_nothing(clock: Clock, verifier: UsageLog) -> None:
    """An outage or a weekend is no silence: the replacement must be used after the predecessor."""
    rotation = overlapping(clock, verifier)
    clock.tick(4)
    scene.use(verifier, rotation.predecessor_id, 1000)
    clock.tick(4 * 86_400)
    verifier.flush()
    assert advance(rotation, clock).state == S.OVERLAP
    scene.use(verifier, rotation.replacement_id or "")
    assert advance(rotation, clock, 3).state == S.QUARANTINE


@pytest.mark.sqlite
def test_silence_that_no_verifier_reports_is_none(clock: Clock, verifier: UsageLog) -> None:
    """Silence counts only as far as every live verifier has reported."""
    rotation = overlapping(clock, verifier)
    assert advance(rotation, clock, 9).state == S.OVERLAP
    clock.tick(3600)
    assert advance(rotation, clock).state == S.OVERLAP


def test_silence_restarts_when_a_verifier_is_lost(clock: Clock, verifier: UsageLog) -> None:
    """A lost verifier may have lost uses, so the quiet period restarts when the loss is noticed."""
    rotation = overlapping(clock, verifier, quiet_seconds=20)
    UsageReporter.objects.create(reporter_id="another", started_at=clock(), flushed_through_at=clock(), peppers={})
    clock.tick(15)
    verifier.flush()
    assert advance(rotation, clock).state == S.OVERLAP  # the other verifier is marked lost here
    clock.tick(10)
    verifier.flush()
    assert advance(rotation, clock).state == S.OVERLAP  # 25 s of silence, 10 s since the loss
    clock.tick(11)
    verifier.flush()
    assert advance(rotation, clock).state == S.QUARANTINE


def test_quarantine_restarts_at_each_attempt(clock: Clock, verifier: UsageLog) -> None:
    rotation = quarantined(clock, verifier)
    clock.tick(4)
    scene.use(verifier, rotation.predecessor_id, outcome=UseOutcome.REFUSED)
    assert advance(rotation, clock, 2).state == S.QUARANTINE
    clock.tick(6)
    verifier.flush()
    assert advance(rotation, clock).state == S.COMPLETED


@pytest.mark.sqlite
def test_time_alone_never_revokes(clock: Clock, verifier: UsageLog) -> None:
    """At the deadline a rotation stalls and both keys stay good."""
    rotation = advance(begun(clock), clock)
    clock.tick(400 * 86_400)
    verifier.flush()
    assert advance(rotation, clock).state == S.STALLED
    assert key_states(rotation) == ("active", "active")


# --- events -----------------------------------------------------------------------------------------------


def test_replacement_revoked_in_quarantine_reinstates_the_predecessor(clock: Clock, verifier: UsageLog) -> None:
    """No transition of the engine leaves a credential without a good key."""
    rotation = quarantined(clock, verifier)
    assert rotation.replacement is not None
    revoke(rotation.replacement, clock)
    assert advance(rotation, clock, 3).state == S.CANCELLED
    assert key_states(rotation) == ("active", "deactivated")


@pytest.mark.sqlite
def test_replacement_revoked_before_proof_cancels(clock: Clock, verifier: UsageLog) -> None:
    rotation = advance(begun(clock), clock)
    assert rotation.replacement is not None
    revoke(rotation.replacement, clock, RevocationReason.KEY_COMPROMISE)
    assert advance(rotation, clock, 3).state == S.CANCELLED
    assert key_states(rotation) == ("active", "compromised")


def test_predecessor_revoked_by_an_operator_ends_the_rotation_early(clock: Clock, verifier: UsageLog) -> None:
    """A manual revocation takes precedence, and the replacement stays."""
    rotation = advance(begun(clock), clock)
    revoke(rotation.predecessor, clock, RevocationReason.KEY_COMPROMISE)
    assert advance(rotation, clock, 3).state == S.COMPLETED
    assert key_states(rotation) == ("compromised", "active")
    assert rotation.evidence.filter(kind="silent").count() == 0


@pytest.mark.sqlite
def test_predecessor_expiring_during_the_rotation_completes_without_silence(clock: Clock, verifier: UsageLog) -> None:
    key, _ = scene.issue(scene.account(), clock(), expires_in_days=1)
    rotation = scene.rotate(key.credential, clock(), predecessor_may_expire=True)
    rotation = advance(rotation, clock)
    clock.tick(86_401)
    rotation = advance(rotation, clock)
    assert rotation.state == S.COMPLETED
    assert rotation.silent_at is None


@pytest.mark.sqlite
@pytest.mark.parametrize("which", ["predecessor", "replacement"])
def test_key_suspended_by_an_operator_stalls_and_resumes(clock: Clock, verifier: UsageLog, which: str) -> None:
    rotation = advance(begun(clock), clock)
    key = get_key(getattr(rotation, which).key_id)
    assert key is not None
    place = key.credential.account
    suspend_key(authorize(scene.admin(), P.KEYS_SUSPEND, place, now=clock()), key)
    rotation = advance(rotation, clock, 3)
    assert (rotation.state, rotation.stalled_from) == (S.STALLED, S.AWAITING_PROOF)
    resume_key(authorize(scene.admin(), P.KEYS_RESUME, place, now=clock()), key)
    resume_rotation(authorize(scene.admin(), P.ROTATIONS_WRITE, place, now=clock()), rotation)
    scene.acknowledge_replacement(rotation.rotation_id, clock())
    assert advance(rotation, clock, 3).state == S.OVERLAP


@pytest.mark.sqlite
def test_predecessor_resumed_in_quarantine_stalls_instead_of_revoking(clock: Clock, verifier: UsageLog) -> None:
    rotation = quarantined(clock, verifier)
    key = get_key(rotation.predecessor_id)
    assert key is not None
    resume_key(authorize(scene.admin(), P.KEYS_RESUME, key.credential.account, now=clock()), key)
    clock.tick(60)
    verifier.flush()
    assert advance(rotation, clock).state == S.STALLED
    assert key_states(rotation) == ("active", "active")


def test_replacement_suspended_in_quarantine_reinstates_the_predecessor_and_stalls(
    clock: Clock, verifier: UsageLog
) -> None:
    """A quarantine that cannot continue is undone, so the merchant is not left with two refused keys."""
    rotation = quarantined(clock, verifier)
    key = get_key(rotation.replacement_id or "")
    assert key is not None
    place = key.credential.account
    suspend_key(authorize(scene.admin(), P.KEYS_SUSPEND, place, now=clock()), key)
    rotation = advance(rotation, clock, 3)
    assert (rotation.state, rotation.stalled_from) == (S.STALLED, S.OVERLAP)
    assert key_states(rotation) == ("active", "suspended")


@pytest.mark.sqlite
def test_replacement_compromised_while_stalled_cancels(clock: Clock, verifier: UsageLog) -> None:
    """A stalled rotation still reacts to the end of a key."""
    rotation = quarantined(clock, verifier)
    key = get_key(rotation.replacement_id or "")
    assert key is not None
    suspend_key(authorize(scene.admin(), P.KEYS_SUSPEND, key.credential.account, now=clock()), key)
    rotation = advance(rotation, clock, 3)
    revoke(key, clock, RevocationReason.KEY_COMPROMISE)
    assert advance(rotation, clock, 3).state == S.CANCELLED
    assert key_states(rotation) == ("active", "compromised")


def test_rotation_canceled_after_delivery_makes_the_predecessor_readable(clock: Clock, verifier: UsageLog) -> None:
    """After a cancellation the newest backend version is never a dead key's."""
    rotation = advance(begun(clock), clock)
    assert rotation.replacement is not None
    revoke(rotation.replacement, clock, RevocationReason.KEY_COMPROMISE)
    assert advance(rotation, clock, 3).state == S.CANCELLED
    stored = find_stored(rotation.credential)
    assert stored is not None
    assert stored.labels["key_id"] == rotation.predecessor_id
    kept = get_key(rotation.predecessor_id)
    assert kept is not None
    assert (kept.state, kept.backend_version) == (KeyState.ACTIVE, stored.version)
    versions = secret_backend().versions(Mount.SANDBOX, rotation.credential.backend_path)
    assert [version.state for version in versions] == ["destroyed", "live", "live"]
    assert get_rotation(rotation.rotation_id).replacement.material == Material.DESTROY_DUE  # type: ignore[union-attr]  # it exists


@pytest.mark.parametrize("how", ["abort", "revoke"])
def test_rotation_ended_between_write_and_record_leaves_no_dead_key_readable(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A worker died right after its backend write, so ending the rotation first reads the backend."""
    rotation = begun(clock)
    put = LocalKeystore.put

    def put_and_die(*args: object, **kwargs: object) -> int:
        put(*args, **kwargs)  # type: ignore[arg-type]  # forwarded arguments
        raise KeyboardInterrupt

    with monkeypatch.context() as death:
        death.setattr(LocalKeystore, "put", put_and_die)
        with pytest.raises(KeyboardInterrupt):
            advance_rotation(rotation.rotation_id, clock)
    rotation = get_rotation(rotation.rotation_id)
    assert (rotation.state, rotation.delivered_at) == (S.PUBLISHING, None)
    assert rotation.replacement is not None
    clock.tick(60)
    if how == "abort":
        grant = authorize(scene.tam(), P.ROTATIONS_WRITE, rotation.credential.account, now=clock())
        abort_rotation(grant, rotation, "changed our mind")
        # The merchant may have read it meanwhile, so the rotation is rolled back in full.
        assert advance(rotation, clock, 3).state == S.ROLLING_BACK
        stored = find_stored(rotation.credential)
        assert stored is not None
        assert stored.labels["key_id"] == rotation.predecessor_id
        return
    revoke(rotation.replacement, clock)
    assert advance(rotation, clock, 60).state == S.CANCELLED
    stored = find_stored(rotation.credential)
    assert stored is not None
    assert stored.labels["key_id"] == rotation.predecessor_id
    assert get_rotation(rotation.rotation_id).replacement.material == Material.DESTROY_DUE  # type: ignore[union-attr]  # it exists


@pytest.mark.sqlite
def test_step_refused_repeatedly_stalls_with_the_reason(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a bounded number of attempts an operator is asked."""
    rotation = begun(clock)

    def refuse(*args: object, **kwargs: object) -> int:
        raise StateConflictError("always", internal="always the same")

    monkeypatch.setattr(LocalKeystore, "put", refuse)
    for _ in range(13):
        rotation = advance(rotation, clock, 80)
    assert rotation.state == S.STALLED
    assert rotation.why == "a step kept failing: always"


@pytest.mark.sqlite
def test_outage_uses_up_no_attempts(clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """After hours of a sealed backend, the first real failure still counts as the first."""
    rotation = begun(clock)
    with monkeypatch.context() as outage:
        outage.setattr(LocalKeystore, "put", unavailable)
        for _ in range(30):
            advance(rotation, clock, 80)

    def refuse(*args: object, **kwargs: object) -> int:
        raise StateConflictError("once")

    with monkeypatch.context() as failure:
        failure.setattr(LocalKeystore, "put", refuse)
        assert advance(rotation, clock, 80).state == S.PUBLISHING
    assert advance(rotation, clock, 80).state == S.AWAITING_PROOF


# --- the secret backend -----------------------------------------------------------------------------------


@pytest.mark.sqlite
def test_backend_outage_pauses_and_resumes(clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """An outage of the backend uses up no attempts; the old key is untouched and the rotation continues afterwards."""
    rotation = begun(clock)
    with monkeypatch.context() as outage:
        outage.setattr(LocalKeystore, "put", unavailable)
        for _ in range(20):
            clock.tick(61 * 1.25)
            verifier.flush()
            advance(rotation, clock)
    assert get_rotation(rotation.rotation_id).state == S.PUBLISHING
    assert LedgerEntry.objects.filter(rotation=rotation, state="failed").count() >= 10
    clock.tick(61 * 1.25)
    assert advance(rotation, clock).state == S.AWAITING_PROOF
    assert rotation.credential.keys.filter(state=KeyState.ACTIVE).count() == 2


@pytest.mark.sqlite
def test_write_with_a_lost_reply_is_read_back_and_adopted(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reply lost after the write is resolved by reading: no second version and no discarded key."""
    rotation = begun(clock)
    put = LocalKeystore.put

    def put_and_lose_the_reply(*args: object, **kwargs: object) -> int:
        put(*args, **kwargs)  # type: ignore[arg-type]  # forwarded arguments
        raise BackendUnavailableError("lost")

    monkeypatch.setattr(LocalKeystore, "put", put_and_lose_the_reply)
    rotation = advance(rotation, clock)
    assert rotation.state == S.AWAITING_PROOF
    path = rotation.credential.backend_path
    assert len(secret_backend().versions(Mount.SANDBOX, path)) == 2
    assert AuditEntry.objects.filter(event="key.burned").count() == 0


@pytest.mark.sqlite
def test_foreign_writer_stalls_and_is_not_overwritten(clock: Clock, verifier: UsageLog) -> None:
    """A foreign version at the credential's path is left for an operator to inspect."""
    rotation = begun(clock)
    path = rotation.credential.backend_path
    secret_backend().put(Mount.SANDBOX, path, Plaintext("theirs"), {"who": "somebody"}, expected_version=1)
    rotation = advance(rotation, clock)
    assert rotation.state == S.STALLED
    assert secret_backend().read(Mount.SANDBOX, path).secret.reveal() == "theirs"
    assert rotation.predecessor.state == KeyState.ACTIVE


def test_worker_that_lost_its_lease_cannot_commit(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease's token fences: a worker that slept past its lease changes nothing."""
    rotation = begun(clock)
    put = LocalKeystore.put

    def put_while_another_takes_over(*args: object, **kwargs: object) -> int:
        WorkLease.objects.filter(subject=f"rotation:{rotation.rotation_id}").update(token="another's")
        return put(*args, **kwargs)  # type: ignore[arg-type]  # forwarded arguments

    with monkeypatch.context() as patch:
        patch.setattr(LocalKeystore, "put", put_while_another_takes_over)
        advance_rotation(rotation.rotation_id, clock)
    assert get_rotation(rotation.rotation_id).delivered_at is None
    assert advance(rotation, clock, 60).state == S.AWAITING_PROOF
    assert AuditEntry.objects.filter(event="rotation.delivered").count() == 1


def test_transition_without_its_audit_entry_does_not_happen(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the audit entry cannot be written, nothing changes."""
    rotation = overlapping(clock, verifier)
    clock.tick(6)
    verifier.flush()

    def refuse(**_: object) -> None:
        raise StateConflictError("no audit")

    with monkeypatch.context() as patch:
        patch.setattr("keyvault.services.recording.transaction.append_entries", refuse)
        advance_rotation(rotation.rotation_id, clock)
    assert get_rotation(rotation.rotation_id).state == S.OVERLAP
    assert key_states(rotation) == ("active", "active")
