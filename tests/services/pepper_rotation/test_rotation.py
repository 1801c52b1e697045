"""Pepper rotation, retirement and destruction: no key ever lacks its pepper, even after a crash."""

import base64
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import IntegrityError as DatabaseIntegrityError
from django.db.models import QuerySet
from django.test import override_settings

from keyvault.access.permissions import Permission
from keyvault.access.principals import HOST
from keyvault.backends.base import BackendUnavailableError, Mount, StoredSecret, StoredVersion, VersionState
from keyvault.backends.local import LocalKeystore
from keyvault.domain.digests import Peppers, PepperSet
from keyvault.domain.errors import ErrorCode, IntegrityError, NotFoundError, StateConflictError, VerifierStaleError
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.revocation import RevocationReason
from keyvault.models import AuditEntry, Key, PepperVersion, WebhookEndpoint
from keyvault.services.keys.lifecycle import revoke_key, suspend_key
from keyvault.services.keys.records import prove_service_token
from keyvault.services.maintenance import renew_peppers
from keyvault.services.pepper_rotation import rotation
from keyvault.services.pepper_rotation.propagation import PROPAGATION, is_loaded_everywhere
from keyvault.services.pepper_rotation.rotation import (
    KEPT_AFTER_RETIREMENT,
    PepperInUseError,
    destroy_pepper,
    rotate_pepper,
)
from keyvault.services.pepper_rotation.status import list_pepper_states
from keyvault.services.peppers.ring import PepperRing, _arrange, _Loaded, load_peppers, take_pepper
from keyvault.services.recording import transaction
from keyvault.services.secrets.backend import secret_backend
from keyvault.services.tokens.customer_tokens import issue_customer_token
from keyvault.services.tokens.service_tokens import revoke_service_token
from keyvault.services.webhooks.endpoints import add_endpoint, sealed_versions, signing_secrets
from keyvault.services.work import row_turns
from tests.factories import grant, have_peppers, issue, make_token, now, own_keystore
from tests.services.conftest import Scene, make_scene
from tests.services.keys.test_lifecycle import verdict
from tests.services.peppering import destroy, rehash, retire, rotate, skip_propagation
from tests.services.racing import race
from tests.services.rows import disable_triggers
from tests.services.tokens.test_customer_tokens import holder_of

pytestmark = pytest.mark.django_db

SANDBOX, PRODUCTION, SERVICE = PepperSet.SANDBOX, PepperSet.PRODUCTION, PepperSet.SERVICE


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    """A separate keystore that holds the first peppers."""
    with own_keystore(tmp_path):
        yield tmp_path


@pytest.fixture
def scene(folder: Path, db: None, monkeypatch: pytest.MonkeyPatch) -> Scene:
    skip_propagation(monkeypatch)
    return make_scene()


def stored_versions(pepper_set: PepperSet = SANDBOX) -> list[StoredVersion]:
    return list(secret_backend().versions(Mount.PEPPERS, pepper_set))


# ----------------------------------------------------------------------------------------------- rotation


@pytest.mark.database
def test_pepper_rotated_is_loaded_first_and_used_after_the_propagation(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process computes a digest that another process cannot verify yet."""
    have_peppers()
    old = load_peppers(SANDBOX)
    row = rotate()
    renew_peppers()
    load_peppers.refresh()
    assert PepperVersion.objects.get(pk=row.pk).hashes_from_at is None
    peppers = load_peppers(SANDBOX)
    assert (sorted(peppers.versions), peppers.current_version) == ([1, 2], 1)
    assert peppers.versions[1] == old.versions[1] != peppers.versions[2]
    assert load_peppers(PRODUCTION).current_version == 1
    assert not is_loaded_everywhere(row, row.created_at + PROPAGATION - timedelta(seconds=1))
    assert is_loaded_everywhere(row, row.created_at + PROPAGATION)
    skip_propagation(monkeypatch)
    renew_peppers()
    load_peppers.poll()
    load_peppers.refresh()
    assert load_peppers(SANDBOX).current_version == 2
    assert AuditEntry.objects.filter(event="pepper.in_use").count() == 1


def test_pepper_rotated_hashes_new_keys_after_the_propagation(scene: Scene) -> None:
    rotate()
    key, text = issue(scene.sandbox)
    assert key.pepper_version == load_peppers(SANDBOX).current_version == 2
    assert verdict(text) is None


def test_pepper_rotated_during_a_propagation_is_refused() -> None:
    have_peppers()
    rotate()
    with pytest.raises(StateConflictError, match="not in use by every process yet"):
        rotate()
    assert len(stored_versions()) == 2


@pytest.mark.database
def test_pepper_rotation_killed_before_its_row_is_continued(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between backend and row: the next run adopts the stored version and creates no other."""

    def die(**_: object) -> None:
        raise OSError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(transaction, "append_entries", die)
        with pytest.raises(OSError, match="power cut"):
            rotate()
    assert PepperVersion.objects.filter(pepper_set=SANDBOX).count() == 1
    orphaned = secret_backend().read(Mount.PEPPERS, SANDBOX, 2).secret.reveal()
    assert rotate().number == 2
    assert load_peppers(SANDBOX).versions[2] == base64.b64decode(orphaned)
    assert len(stored_versions()) == 2


@pytest.mark.database
def test_pepper_rotation_over_an_unknown_version_is_refused(scene: Scene) -> None:
    """A pepper written by another program is never used, because that program knows it."""
    foreign = Plaintext(base64.b64encode(bytes(32)).decode())
    secret_backend().put(Mount.PEPPERS, SANDBOX, foreign, {"pepper_set": "production"}, expected_version=1)
    with pytest.raises(IntegrityError, match="Another program has written"):
        rotate()
    secret_backend().destroy(Mount.PEPPERS, SANDBOX, 2)
    assert rotate().number == 3


def test_pepper_rotation_of_an_unserved_set_is_refused() -> None:
    """A process pinned to one environment never touches the other's peppers."""
    have_peppers()
    with override_settings(ENVIRONMENTS=("sandbox",)), pytest.raises(NotFoundError):
        rotate_pepper(grant(HOST, Permission.PEPPERS_WRITE), PRODUCTION)


@pytest.mark.database
@pytest.mark.django_db(transaction=True)
def test_pepper_rotations_run_concurrently_create_one_version(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have_peppers()
    outcomes = race(*[lambda: rotate_pepper(grant(HOST, Permission.PEPPERS_WRITE), SANDBOX)] * 4)
    created = [outcome for outcome in outcomes if isinstance(outcome, PepperVersion)]
    assert len(created) == 1
    assert {type(outcome) for outcome in outcomes} <= {PepperVersion, StateConflictError}
    assert PepperVersion.objects.filter(pepper_set=SANDBOX).count() == 2
    disable_triggers()
    PepperVersion.objects.all()._raw_delete("default")


# ------------------------------------------------------------------------------------- loading


def test_process_loads_a_new_version_when_it_refreshes(scene: Scene) -> None:
    other = PepperRing()
    assert sorted(other(SANDBOX).versions) == [1]
    rotate()
    assert sorted(other(SANDBOX).versions) == [1]
    other.refresh()
    assert sorted(other(SANDBOX).versions) == [1, 2]


def test_process_that_refreshes_reads_only_new_versions(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    other = PepperRing()
    other(SANDBOX)
    reads: list[tuple[str, int | None]] = []
    real = LocalKeystore.read

    def note_and_read(self: LocalKeystore, mount: Mount, path: str, version: int | None = None) -> StoredSecret:
        reads.append((path, version))
        return real(self, mount, path, version)

    monkeypatch.setattr(LocalKeystore, "read", note_and_read)
    other.refresh()
    assert reads == []
    rotate_pepper(grant(HOST, Permission.PEPPERS_WRITE), SANDBOX)
    reads.clear()
    other.refresh()
    other.refresh()
    assert reads == [("sandbox", 2)]


def test_process_without_the_backend_keeps_its_versions(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the backend is sealed, no loaded version is dropped; afterwards the new version is loaded."""
    _, text = issue(scene.sandbox)
    other = PepperRing()
    before = other(SANDBOX)
    rotate_pepper(grant(HOST, Permission.PEPPERS_WRITE), SANDBOX)

    def sealed(*_: object) -> object:
        raise BackendUnavailableError("The secrets manager is sealed.")

    with monkeypatch.context() as patch:
        patch.setattr(LocalKeystore, "read", sealed)
        other.refresh()
        load_peppers.refresh()
        assert other(SANDBOX).versions == before.versions
        assert verdict(text) is None
    other.refresh()
    assert sorted(other(SANDBOX).versions) == [1, 2]


@pytest.mark.database
def test_process_skips_a_version_that_fails_its_check(scene: Scene) -> None:
    """It skips later versions too, and knows which ones it lacks."""
    other = PepperRing()
    other(SANDBOX)
    disable_triggers()
    for _ in range(2):
        rotate()
    QuerySet(PepperVersion).filter(pepper_set=SANDBOX, number=2).update(check_value=b"x" * 16)
    other.refresh()
    assert sorted(other(SANDBOX).versions) == [1]
    assert other(SANDBOX).lacks(2)
    assert other(SANDBOX).lacks(3)


def test_key_of_an_unloaded_version_is_denied_as_stale(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the pepper is loaded, the verdict is 503 and never a wrong 401."""
    _, old = issue(scene.sandbox)
    before = load_peppers(SANDBOX)
    rotate()
    key, text = issue(scene.sandbox)
    refreshes: list[str] = []
    late = PepperRing()
    late._loaded[SANDBOX] = _stale(before)
    monkeypatch.setattr(late, "schedule_refresh", lambda: refreshes.append("scheduled"))
    for module in ("verification.judging", "peppers.ring"):
        monkeypatch.setattr(f"keyvault.services.{module}.load_peppers", late)
    assert verdict(text) is ErrorCode.VERIFIER_STALE
    assert refreshes == ["scheduled"]
    assert verdict(old) is None
    late.refresh()
    assert verdict(text) is None
    assert key.pepper_version == 2


@pytest.mark.database
def test_process_with_missing_peppers_refreshes_at_most_once_a_second(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of requests does not matter."""
    late, clock, attempts = PepperRing(), [1_000.0], list[float]()
    monkeypatch.setattr(late, "refresh", lambda: attempts.append(clock[0]))
    monkeypatch.setattr(late, "_missing", list)
    monkeypatch.setattr("keyvault.services.peppers.ring.time", SimpleNamespace(monotonic=lambda: clock[0]))
    for at in (1_000.0, 1_000.5, 1_000.9, 1_001.0, 1_001.5, 1_002.5):
        clock[0] = at
        with pytest.raises(VerifierStaleError):
            late.loaded(SANDBOX)
        assert late._thread is not None
        late._thread.join()
    assert attempts == [1_000.0, 1_001.0, 1_002.5]


def _stale(peppers: Peppers) -> _Loaded:
    """Return the peppers of a process that has not refreshed since."""
    return _arrange(peppers.pepper_set, peppers.versions, [])


def test_peppers_read_before_a_rotation_are_reloaded_on_demand(scene: Scene) -> None:
    early = load_peppers(SANDBOX)
    rotate()
    assert take_pepper(early, 1) is early
    assert 2 in take_pepper(early, 2).versions
    with pytest.raises(VerifierStaleError):
        take_pepper(load_peppers(SANDBOX), 3)


# ---------------------------------------------------------------------------------------------------- retirement


def test_pepper_without_dependents_is_retired_and_later_destroyed(scene: Scene) -> None:
    rotate()
    row = retire(SANDBOX, 1)
    assert (row.retired_at is None, row.destroyed_at) == (False, None)
    assert stored_versions()[0] == StoredVersion(1, VersionState.LIVE), "retirement must not destroy the material"
    assert sorted(load_peppers(SANDBOX).versions) == [2]
    assert destroy(SANDBOX, 1).destroyed_at is not None
    assert stored_versions()[0] == StoredVersion(1, VersionState.DESTROYED)
    assert sorted(load_peppers(SANDBOX).versions) == [2]
    load_peppers.cache_clear()
    assert sorted(load_peppers(SANDBOX).versions) == [2], "a new process must load without it"
    events = AuditEntry.objects.filter(event__startswith="pepper.").order_by("id").values_list("event", flat=True)
    assert list(events)[-4:] == ["pepper.rotated", "pepper.in_use", "pepper.retired", "pepper.destroyed"]
    assert retire(SANDBOX, 1).retired_at == row.retired_at, "retirement must be repeatable"
    destroy(SANDBOX, 1)
    assert AuditEntry.objects.filter(event="pepper.destroyed").count() == 1


def test_pepper_destroyed_before_its_retention_period_is_refused(scene: Scene) -> None:
    """A database restored from before the retirement needs the material, so it is kept for thirty days."""
    rotate()
    row = retire(SANDBOX, 1)
    assert row.retired_at is not None
    a_day_early = row.retired_at + KEPT_AFTER_RETIREMENT - timedelta(days=1)
    with pytest.raises(StateConflictError, match=f"from {row.retired_at + KEPT_AFTER_RETIREMENT:%Y-%m-%d %H:%M} UTC"):
        destroy_pepper(grant(HOST, Permission.PEPPERS_WRITE, at=a_day_early), SANDBOX, 1)
    renew_peppers()
    assert stored_versions()[0].state is VersionState.LIVE


@pytest.mark.database
def test_database_restored_from_before_a_retirement_verifies_its_keys(scene: Scene) -> None:
    """The material is kept, so the restored rows' digests still verify."""
    key, text = issue(scene.sandbox)
    digest = bytes(key.digest)
    rotate()
    assert verdict(text) is None
    rehash()
    retire(SANDBOX, 1)
    disable_triggers()
    QuerySet(PepperVersion).filter(pepper_set=SANDBOX, number=1).update(retired_at=None)
    QuerySet(Key).filter(pk=key.pk).update(digest=digest, pepper_version=1)
    load_peppers.cache_clear()
    assert not [state.fault for state in list_pepper_states() if state.fault]
    assert sorted(load_peppers(SANDBOX).versions) == [1, 2]
    assert verdict(text) is None


def test_pepper_retired_as_the_newest_is_refused(scene: Scene) -> None:
    with pytest.raises(StateConflictError, match="Create a new one first"):
        retire(SANDBOX, 1)


def test_pepper_retired_while_processes_may_hash_with_it_is_refused() -> None:
    have_peppers()
    rotate()
    with pytest.raises(StateConflictError, match="still makes the digests: version 2 is not in use yet"):
        retire(SANDBOX, 1)


def test_pepper_retired_right_after_its_successor_came_into_use_is_refused(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that has not polled since still hashes with it."""
    rotate()
    monkeypatch.setattr(rotation, "PROPAGATION", timedelta(seconds=30))
    with pytest.raises(StateConflictError, match="Processes may still need it"):
        retire(SANDBOX, 1)


@pytest.mark.parametrize("dependent", ["key", "suspended key", "customer token", "webhook secret"])
def test_pepper_retired_in_use_is_refused(scene: Scene, dependent: str) -> None:
    """A key, token or sealed secret may still depend on it."""
    if dependent == "webhook secret":
        add_endpoint(grant(scene.admin, Permission.WEBHOOKS_WRITE, scene.sandbox), scene.sandbox, "https://a.example/x")
        rotate()
    else:
        key, text = issue(scene.sandbox)
        if dependent == "suspended key":
            suspend_key(grant(scene.admin, Permission.KEYS_SUSPEND, scene.sandbox), key)
        elif dependent == "customer token":
            allowed = grant(holder_of(key), Permission.CUSTOMER_TOKENS_WRITE, scene.sandbox)
            issue_customer_token(allowed, scene.sandbox, key, customer_id="alice")
        rotate()
        if dependent == "customer token":
            assert verdict(text) is None
            rehash()
    reasons = {"webhook secret": "1 sealed webhook secret", "customer token": "1 customer access token"}
    with pytest.raises(PepperInUseError, match=rf"{reasons.get(dependent, '1 key')}\b"):
        retire(SANDBOX, 1)
    assert PepperVersion.objects.get(pepper_set=SANDBOX, number=1).retired_at is None


def test_pepper_of_service_tokens_is_retired_once_none_is_valid(scene: Scene) -> None:
    token, text = make_token()
    rotate(SERVICE)
    with pytest.raises(PepperInUseError, match=r"1 service token\b"):
        retire(SERVICE, 1)
    revoke_service_token(grant(HOST, Permission.TOKENS_WRITE), token)
    retire(SERVICE, 1)
    assert prove_service_token(text.reveal(), now()) is None


def test_revoked_key_of_a_retired_pepper_is_denied_as_invalid(scene: Scene) -> None:
    """Its digest can no longer be verified, so the verdict reveals nothing about the key."""
    key, text = issue(scene.sandbox)
    allowed = grant(scene.admin, Permission.KEYS_REVOKE, scene.sandbox)
    revoke_key(allowed, key, RevocationReason.SUPERSEDED)
    rotate()
    assert verdict(text) is ErrorCode.KEY_REVOKED
    retire(SANDBOX, 1)
    assert verdict(text) is ErrorCode.CREDENTIAL_INVALID


def test_pepper_destruction_that_failed_is_repeated(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The retirement stands; the material is destroyed once the backend is available."""
    rotate()
    retire(SANDBOX, 1)

    def unavailable(*_: object) -> None:
        raise BackendUnavailableError("The secrets manager does not answer.")

    with monkeypatch.context() as patch:
        patch.setattr(LocalKeystore, "destroy", unavailable)
        with pytest.raises(BackendUnavailableError):
            destroy(SANDBOX, 1)
    row = PepperVersion.objects.get(pepper_set=SANDBOX, number=1)
    assert (row.retired_at is None, row.destroyed_at) == (False, None)
    assert destroy(SANDBOX, 1).destroyed_at is not None


def test_pepper_destroyed_before_its_retirement_is_refused(scene: Scene) -> None:
    with pytest.raises(StateConflictError, match="Retire it first"):
        destroy(SANDBOX, 1)
    with pytest.raises(NotFoundError):
        destroy(SANDBOX, 9)


def test_sealed_webhook_secrets_move_to_the_newest_pepper(scene: Scene) -> None:
    """The worker re-seals them, so that the previous version can be retired; the secret itself is unchanged."""
    allowed = grant(scene.admin, Permission.WEBHOOKS_WRITE, scene.sandbox)
    endpoint, secret = add_endpoint(allowed, scene.sandbox, "https://a.example/x")
    rotate()
    renew_peppers()
    endpoint.refresh_from_db()
    assert sealed_versions(endpoint) == {2}
    assert [each.reveal() for each in signing_secrets(endpoint, now())] == [secret.reveal()]
    entries = AuditEntry.objects.count()
    renew_peppers()
    assert AuditEntry.objects.count() == entries, "a second run has nothing to do"
    retire(SANDBOX, 1)
    assert [each.reveal() for each in signing_secrets(endpoint, now())] == [secret.reveal()]


def test_webhook_secrets_are_resealed_a_batch_in_each_run(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of a run does not grow with the endpoints, however long two versions exist."""
    allowed = grant(scene.admin, Permission.WEBHOOKS_WRITE, scene.sandbox)
    for number in range(3):
        add_endpoint(allowed, scene.sandbox, f"https://a.example/{number}")
    rotate()
    load_peppers.refresh()
    monkeypatch.setattr(row_turns, "BATCH", 1)
    resealed = []
    for _ in range(4):
        renew_peppers()
        resealed.append(sum(sealed_versions(each) == {2} for each in WebhookEndpoint.objects.all()))
    assert resealed == [1, 2, 3, 3]


def test_webhook_secrets_of_an_environment_not_served_here_stay_as_they_are(scene: Scene, settings: Any) -> None:
    allowed = grant(scene.admin, Permission.WEBHOOKS_WRITE, scene.production)
    endpoint, _ = add_endpoint(allowed, scene.production, "https://a.example/x")
    rotate()
    rotate(PRODUCTION)
    settings.ENVIRONMENTS = ("sandbox",)
    renew_peppers()
    endpoint.refresh_from_db()
    assert sealed_versions(endpoint) == {1}


@pytest.mark.database
def test_key_staged_by_a_stale_process_with_a_retired_pepper_is_refused(scene: Scene) -> None:
    """A database trigger refuses the row, because its digest could never be verified."""
    before = load_peppers(SANDBOX)
    rotate()
    retire(SANDBOX, 1)
    load_peppers._loaded[SANDBOX] = _stale(before)
    load_peppers._refreshed_at = float("inf")
    try:
        with pytest.raises(DatabaseIntegrityError, match="retired pepper"):
            issue(scene.sandbox)
    finally:
        load_peppers.cache_clear()
    assert not Key.objects.exists()
