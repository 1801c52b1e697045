"""New pepper versions and the end of old ones: no key is ever without its pepper, whoever dies on the way."""

import base64
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

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
from keyvault.models import AuditEntry, Key, PepperVersion
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
from tests.factories import grant, have_peppers, issue, make_token, now, own_keystore
from tests.services.conftest import Scene, make_scene
from tests.services.keys.test_lifecycle import verdict
from tests.services.peppering import destroy, rehash, retire, rotate, skip_propagation
from tests.services.racing import race
from tests.services.rows import disable_triggers
from tests.services.tokens.test_customer_tokens import holder_of

pytestmark = [pytest.mark.database, pytest.mark.django_db]

SANDBOX, PRODUCTION, SERVICE = PepperSet.SANDBOX, PepperSet.PRODUCTION, PepperSet.SERVICE


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    """A keystore of the test's own, which holds the first peppers."""
    with own_keystore(tmp_path):
        yield tmp_path


@pytest.fixture
def scene(folder: Path, db: None, monkeypatch: pytest.MonkeyPatch) -> Scene:
    skip_propagation(monkeypatch)
    return make_scene()


def stored_versions(pepper_set: PepperSet = SANDBOX) -> list[StoredVersion]:
    return list(secret_backend().versions(Mount.PEPPERS, pepper_set))


# ----------------------------------------------------------------------------------------------- a new version


def test_rotated_pepper_proves_at_once_and_hashes_after_the_propagation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody makes a digest that another process could not prove: for a while the new version is only loaded."""
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


def test_rotated_pepper_makes_the_digests_once_its_time_has_come(scene: Scene) -> None:
    rotate()
    key, text = issue(scene.sandbox)
    assert key.pepper_version == load_peppers(SANDBOX).current_version == 2
    assert verdict(text) is None


def test_pepper_rotated_again_while_it_is_on_its_way_is_refused() -> None:
    have_peppers()
    rotate()
    with pytest.raises(StateConflictError, match="not in use by every process yet"):
        rotate()
    assert len(stored_versions()) == 2


def test_pepper_rotation_killed_before_its_row_is_gone_on_with(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between backend and row: the next run adopts the version that is there, and makes no other."""

    def die(**_: object) -> None:
        raise OSError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(transaction, "append_entry", die)
        with pytest.raises(OSError, match="power cut"):
            rotate()
    assert PepperVersion.objects.filter(pepper_set=SANDBOX).count() == 1
    left = secret_backend().read(Mount.PEPPERS, SANDBOX, 2).secret.reveal()
    assert rotate().number == 2
    assert load_peppers(SANDBOX).versions[2] == base64.b64decode(left)
    assert len(stored_versions()) == 2


def test_pepper_rotation_over_a_stranger_s_version_is_refused(scene: Scene) -> None:
    """What somebody else wrote is never hashed with: they know it."""
    theirs = Plaintext(base64.b64encode(bytes(32)).decode())
    secret_backend().put(Mount.PEPPERS, SANDBOX, theirs, {"pepper_set": "production"}, expected_version=1)
    with pytest.raises(IntegrityError, match="Another program has written"):
        rotate()
    secret_backend().destroy(Mount.PEPPERS, SANDBOX, 2)
    assert rotate().number == 3


def test_pepper_rotation_of_a_set_that_is_not_served_is_refused() -> None:
    """A process pinned to one environment never touches the other's peppers."""
    have_peppers()
    with override_settings(ENVIRONMENTS=("sandbox",)), pytest.raises(NotFoundError):
        rotate_pepper(grant(HOST, Permission.PEPPERS_WRITE), PRODUCTION)


@pytest.mark.django_db(transaction=True)
def test_pepper_rotations_at_once_make_one_version(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have_peppers()
    outcomes = race(*[lambda: rotate_pepper(grant(HOST, Permission.PEPPERS_WRITE), SANDBOX)] * 4)
    made = [outcome for outcome in outcomes if isinstance(outcome, PepperVersion)]
    assert len(made) == 1
    assert {type(outcome) for outcome in outcomes} <= {PepperVersion, StateConflictError}
    assert PepperVersion.objects.filter(pepper_set=SANDBOX).count() == 2
    disable_triggers()
    PepperVersion.objects.all()._raw_delete("default")


# ------------------------------------------------------------------------------------- what a process makes of it


def test_process_that_was_idle_learns_of_the_version_when_it_looks(scene: Scene) -> None:
    """Two processes: what one makes, the other knows at its next look."""
    other = PepperRing()
    assert sorted(other(SANDBOX).versions) == [1]
    rotate()
    assert sorted(other(SANDBOX).versions) == [1]
    other.refresh()
    assert sorted(other(SANDBOX).versions) == [1, 2]


def test_process_that_looks_asks_the_backend_for_what_is_new_only(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = PepperRing()
    other(SANDBOX)
    asked: list[tuple[str, int | None]] = []
    real = LocalKeystore.read

    def note_and_read(self: LocalKeystore, mount: Mount, path: str, version: int | None = None) -> StoredSecret:
        asked.append((path, version))
        return real(self, mount, path, version)

    monkeypatch.setattr(LocalKeystore, "read", note_and_read)
    other.refresh()
    assert asked == []
    rotate_pepper(grant(HOST, Permission.PEPPERS_WRITE), SANDBOX)
    asked.clear()
    other.refresh()
    other.refresh()
    assert asked == [("sandbox", 2)]


def test_process_keeps_what_it_has_while_the_backend_is_away(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sealed backend hides the new version for a while, and takes nothing away; afterwards it is taken in."""
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


def test_process_does_not_take_in_a_version_that_fails_its_check(scene: Scene) -> None:
    """Nor any after it: what it lacks it must know that it lacks."""
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


def test_key_of_a_version_that_is_not_loaded_is_no_wrong_key(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its pepper is loaded nothing can be said of a key: 503 for that one, and never a wrong 401."""
    _, old = issue(scene.sandbox)
    before = load_peppers(SANDBOX)
    rotate()
    key, text = issue(scene.sandbox)
    asked: list[str] = []
    late = PepperRing()
    late._loaded[SANDBOX] = _as_before(before)
    monkeypatch.setattr(late, "schedule_refresh", lambda: asked.append("soon"))
    for module in ("verification.judging", "peppers.ring"):
        monkeypatch.setattr(f"keyvault.services.{module}.load_peppers", late)
    assert verdict(text) is ErrorCode.VERIFIER_STALE
    assert asked == ["soon"]
    assert verdict(old) is None
    late.refresh()
    assert verdict(text) is None
    assert key.pepper_version == 2


def test_peppers_that_are_missing_are_tried_for_once_in_a_while(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests miss them: a backend that is away is not asked at their rate."""
    late, clock, tries = PepperRing(), [1_000.0], list[float]()
    monkeypatch.setattr(late, "refresh", lambda: tries.append(clock[0]))
    monkeypatch.setattr(late, "_missing", list)
    monkeypatch.setattr("keyvault.services.peppers.ring.time", SimpleNamespace(monotonic=lambda: clock[0]))
    for at in (1_000.0, 1_000.5, 1_000.9, 1_001.0, 1_001.5, 1_002.5):
        clock[0] = at
        with pytest.raises(VerifierStaleError):
            late.loaded(SANDBOX)
        assert late._thread is not None
        late._thread.join()
    assert tries == [1_000.0, 1_001.0, 1_002.5]


def _as_before(peppers: Peppers) -> _Loaded:
    """What a process has loaded that has not looked since."""
    return _arrange(peppers.pepper_set, peppers.versions, [])


def test_peppers_taken_a_moment_too_early_are_taken_again(scene: Scene) -> None:
    early = load_peppers(SANDBOX)
    rotate()
    assert take_pepper(early, 1) is early
    assert 2 in take_pepper(early, 2).versions
    with pytest.raises(VerifierStaleError):
        take_pepper(load_peppers(SANDBOX), 3)


# ---------------------------------------------------------------------------------------------------- retirement


def test_pepper_that_nothing_leans_on_is_retired_and_later_destroyed(scene: Scene) -> None:
    rotate()
    row = retire(SANDBOX, 1)
    assert (row.retired_at is None, row.destroyed_at) == (False, None)
    assert stored_versions()[0] == StoredVersion(1, VersionState.LIVE), "retirement alone destroys nothing"
    assert sorted(load_peppers(SANDBOX).versions) == [2]
    assert destroy(SANDBOX, 1).destroyed_at is not None
    assert stored_versions()[0] == StoredVersion(1, VersionState.DESTROYED)
    assert sorted(load_peppers(SANDBOX).versions) == [2]
    load_peppers.cache_clear()
    assert sorted(load_peppers(SANDBOX).versions) == [2], "a new process does not miss it"
    events = AuditEntry.objects.filter(event__startswith="pepper.").order_by("id").values_list("event", flat=True)
    assert list(events)[-4:] == ["pepper.rotated", "pepper.in_use", "pepper.retired", "pepper.destroyed"]
    assert retire(SANDBOX, 1).retired_at == row.retired_at, "repeatable"
    destroy(SANDBOX, 1)
    assert AuditEntry.objects.filter(event="pepper.destroyed").count() == 1


def test_pepper_retired_lately_is_not_destroyed(scene: Scene) -> None:
    """A database restored from before the retirement needs its material: it stays for thirty days."""
    rotate()
    row = retire(SANDBOX, 1)
    assert row.retired_at is not None
    a_day_early = row.retired_at + KEPT_AFTER_RETIREMENT - timedelta(days=1)
    with pytest.raises(StateConflictError, match=f"from {row.retired_at + KEPT_AFTER_RETIREMENT:%Y-%m-%d %H:%M} UTC"):
        destroy_pepper(grant(HOST, Permission.PEPPERS_WRITE, at=a_day_early), SANDBOX, 1)
    renew_peppers()
    assert stored_versions()[0].state is VersionState.LIVE


def test_database_restored_from_before_a_retirement_starts_and_verifies(scene: Scene) -> None:
    """Retiring ends no backup: the material is there, for the keys that the restored rows are hashed with."""
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
    assert not [state.fault for state in list_pepper_states(now()) if state.fault]
    assert sorted(load_peppers(SANDBOX).versions) == [1, 2]
    assert verdict(text) is None


def test_newest_pepper_is_not_retired(scene: Scene) -> None:
    with pytest.raises(StateConflictError, match="Create a new one first"):
        retire(SANDBOX, 1)


def test_pepper_is_not_retired_while_processes_may_still_hash_with_it() -> None:
    have_peppers()
    rotate()
    with pytest.raises(StateConflictError, match="still makes the digests: version 2 is not in use yet"):
        retire(SANDBOX, 1)


def test_pepper_is_not_retired_right_after_its_successor_came_into_use(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some process may not have looked since, and goes on hashing with it."""
    rotate()
    monkeypatch.setattr(rotation, "PROPAGATION", timedelta(seconds=30))
    with pytest.raises(StateConflictError, match="Processes may still need it"):
        retire(SANDBOX, 1)


@pytest.mark.parametrize("leaning", ["key", "suspended key", "customer token", "webhook secret"])
def test_pepper_in_use_is_not_retired(scene: Scene, leaning: str) -> None:
    """Whatever may still prove something by it, or is sealed under it, keeps it."""
    if leaning == "webhook secret":
        add_endpoint(grant(scene.admin, Permission.WEBHOOKS_WRITE, scene.sandbox), scene.sandbox, "https://a.example/x")
        rotate()
    else:
        key, text = issue(scene.sandbox)
        if leaning == "suspended key":
            suspend_key(grant(scene.admin, Permission.KEYS_SUSPEND, scene.sandbox), key)
        elif leaning == "customer token":
            allowed = grant(holder_of(key), Permission.CUSTOMER_TOKENS_WRITE, scene.sandbox)
            issue_customer_token(allowed, scene.sandbox, key, customer_id="alice")
        rotate()
        if leaning == "customer token":
            assert verdict(text) is None
            rehash()
    words = {"webhook secret": "1 sealed webhook secrets", "customer token": "1 customer access tokens"}
    with pytest.raises(PepperInUseError, match=words.get(leaning, "1 keys")):
        retire(SANDBOX, 1)
    assert PepperVersion.objects.get(pepper_set=SANDBOX, number=1).retired_at is None


def test_pepper_of_service_tokens_is_retired_when_none_is_good(scene: Scene) -> None:
    token, text = make_token()
    rotate(SERVICE)
    with pytest.raises(PepperInUseError, match="1 service tokens"):
        retire(SERVICE, 1)
    revoke_service_token(grant(HOST, Permission.TOKENS_WRITE), token)
    retire(SERVICE, 1)
    assert prove_service_token(text.reveal(), now()) is None


def test_dead_key_of_a_retired_pepper_is_invalid_and_not_revoked(scene: Scene) -> None:
    """Nothing proves it any more, so that nothing is told of it."""
    key, text = issue(scene.sandbox)
    allowed = grant(scene.admin, Permission.KEYS_REVOKE, scene.sandbox)
    revoke_key(allowed, key, RevocationReason.SUPERSEDED)
    rotate()
    assert verdict(text) is ErrorCode.KEY_REVOKED
    retire(SANDBOX, 1)
    assert verdict(text) is ErrorCode.CREDENTIAL_INVALID


def test_destruction_that_failed_is_run_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retired is retired: the material goes whenever the backend is there."""
    rotate()
    retire(SANDBOX, 1)

    def away(*_: object) -> None:
        raise BackendUnavailableError("The secrets manager does not answer.")

    with monkeypatch.context() as patch:
        patch.setattr(LocalKeystore, "destroy", away)
        with pytest.raises(BackendUnavailableError):
            destroy(SANDBOX, 1)
    row = PepperVersion.objects.get(pepper_set=SANDBOX, number=1)
    assert (row.retired_at is None, row.destroyed_at) == (False, None)
    assert destroy(SANDBOX, 1).destroyed_at is not None


def test_pepper_that_is_not_retired_is_not_destroyed(scene: Scene) -> None:
    with pytest.raises(StateConflictError, match="Retire it first"):
        destroy(SANDBOX, 1)
    with pytest.raises(NotFoundError):
        destroy(SANDBOX, 9)


def test_sealed_webhook_secrets_move_to_the_newest_pepper(scene: Scene) -> None:
    """The worker's upkeep does it, so that the version before can be retired; the secret itself stays."""
    allowed = grant(scene.admin, Permission.WEBHOOKS_WRITE, scene.sandbox)
    endpoint, secret = add_endpoint(allowed, scene.sandbox, "https://a.example/x")
    rotate()
    renew_peppers()
    endpoint.refresh_from_db()
    assert sealed_versions(endpoint) == {2}
    assert [each.reveal() for each in signing_secrets(endpoint, now())] == [secret.reveal()]
    entries = AuditEntry.objects.count()
    renew_peppers()
    assert AuditEntry.objects.count() == entries, "nothing is left to do"
    retire(SANDBOX, 1)
    assert [each.reveal() for each in signing_secrets(endpoint, now())] == [secret.reveal()]


def test_key_staged_by_a_process_that_slept_is_not_hashed_with_a_retired_pepper(scene: Scene) -> None:
    """The database refuses the row: the digest could never be proved."""
    before = load_peppers(SANDBOX)
    rotate()
    retire(SANDBOX, 1)
    load_peppers._loaded[SANDBOX] = _as_before(before)
    load_peppers._refreshed_at = float("inf")
    try:
        with pytest.raises(DatabaseIntegrityError, match="retired pepper"):
            issue(scene.sandbox)
    finally:
        load_peppers.cache_clear()
    assert not Key.objects.exists()
