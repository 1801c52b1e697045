"""The contract of every secret backend (`keyvault.backends.base`), run against each backend."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from keyvault.backends.base import (
    EVIDENCE_VERSIONS,
    BackendConflictError,
    BackendInvalidError,
    BackendMissingError,
    Mount,
    SecretBackend,
    StoredVersion,
    VersionState,
)
from keyvault.domain.errors import KeyvaultError
from keyvault.domain.plaintext import Plaintext

from .stores import BACKENDS, read_line, send_cue, start_process

BOX = Mount.SANDBOX
KEPT_VERSIONS = 10
"""Number of versions that a Vault keeps before it erases the oldest."""

MOUNTS = (Mount.SANDBOX, Mount.PRODUCTION, Mount.PEPPERS)
"""The mounts of every backend."""

LIVE, DELETED, DESTROYED = VersionState.LIVE, VersionState.DELETED, VersionState.DESTROYED


def put(backend: SecretBackend, text: str, after: int, path: str = "a", mount: Mount = BOX) -> int:
    return backend.put(mount, path, Plaintext(text), {"text": text}, expected_version=after)


def filled(backend: SecretBackend, count: int = 3) -> SecretBackend:
    """Put versions 1 to `count` at one path: one, two, three."""
    for version in range(count):
        put(backend, ("one", "two", "three")[version], version)
    return backend


def text_at(backend: SecretBackend, version: int | None = None, path: str = "a", mount: Mount = BOX) -> str:
    stored = backend.read(mount, path, version)
    assert stored.labels == {"text": stored.secret.reveal()}
    assert version in {None, stored.version}
    return stored.secret.reveal()


def states(backend: SecretBackend, path: str = "a") -> dict[int, VersionState]:
    return {each.version: each.state for each in backend.versions(BOX, path)}


def test_evidence_of_a_scope_keeps_its_newest_versions(backend: SecretBackend) -> None:
    """Evidence is written every few minutes without end, so each path keeps a bounded number of versions."""
    for version in range(EVIDENCE_VERSIONS + 2):
        put(backend, str(version), version, "service/checkpoint", Mount.EVIDENCE)
    for erased in (1, 2):
        with pytest.raises(BackendMissingError):
            backend.read(Mount.EVIDENCE, "service/checkpoint", erased)
    assert text_at(backend, 3, "service/checkpoint", Mount.EVIDENCE) == "2"
    assert text_at(backend, path="service/checkpoint", mount=Mount.EVIDENCE) == str(EVIDENCE_VERSIONS + 1)


def test_encrypt_is_reversed_by_decrypt_only(backend: SecretBackend) -> None:
    ciphertext = backend.encrypt(Plaintext("a seed"))
    assert "a seed" not in ciphertext
    assert backend.decrypt(ciphertext).reveal() == "a seed"
    for altered in (f"x{ciphertext}", "", "AAAA"):
        with pytest.raises(BackendInvalidError):
            backend.decrypt(altered)


# --- put and read -----------------------------------------------------------------------------------------


def test_put_numbers_versions_from_one(backend: SecretBackend) -> None:
    assert [put(backend, text, after) for after, text in enumerate("abc")] == [1, 2, 3]
    assert backend.versions(BOX, "a") == [StoredVersion(version, LIVE) for version in (1, 2, 3)]


def test_read_returns_the_newest_or_the_given_version(backend: SecretBackend) -> None:
    filled(backend)
    assert text_at(backend) == "three"
    assert [text_at(backend, version) for version in (1, 2, 3)] == ["one", "two", "three"]
    assert backend.read(BOX, "a").version == 3


def test_read_returns_a_masked_secret(backend: SecretBackend) -> None:
    """Secrets from a backend are masked in every representation."""
    filled(backend)
    stored = backend.read(BOX, "a")
    assert isinstance(stored.secret, Plaintext)
    assert stored.secret.reveal() not in repr(stored.secret)


@pytest.mark.parametrize("expected", [0, 1, 2, 4, 5, -1, 10**6])
def test_put_after_an_outdated_version_conflicts(backend: SecretBackend, expected: int) -> None:
    """Check-and-set: a version that the writer has not seen is never overwritten."""
    filled(backend)
    with pytest.raises(BackendConflictError):
        put(backend, "mine", expected)
    assert states(backend) == {1: LIVE, 2: LIVE, 3: LIVE}
    assert text_at(backend) == "three"


@pytest.mark.parametrize("expected", [1, 2, -1])
def test_put_after_a_nonexistent_version_conflicts(backend: SecretBackend, expected: int) -> None:
    with pytest.raises(BackendConflictError):
        put(backend, "mine", expected)
    assert backend.versions(BOX, "a") == []


def test_put_repeated_after_a_lost_reply_is_recognized_by_its_labels(backend: SecretBackend) -> None:
    """The retry conflicts, and the stored labels show that the first attempt succeeded."""
    filled(backend, 1)
    with pytest.raises(BackendConflictError):
        put(backend, "one", 0)
    assert backend.read(BOX, "a").labels == {"text": "one"}


@pytest.mark.parametrize("version", [None, 1, 0, 7])
def test_read_of_an_empty_path_is_missing(backend: SecretBackend, version: int | None) -> None:
    with pytest.raises(BackendMissingError):
        backend.read(BOX, "a", version)


@pytest.mark.parametrize("version", [0, 4, -1])
def test_read_of_a_nonexistent_version_is_missing(backend: SecretBackend, version: int) -> None:
    filled(backend)
    with pytest.raises(BackendMissingError):
        backend.read(BOX, "a", version)


def test_versions_of_an_empty_path_are_none(backend: SecretBackend) -> None:
    assert backend.versions(BOX, "a") == []


def test_mounts_are_separate(backend: SecretBackend) -> None:
    """The same path in sandbox, production and peppers holds different secrets."""
    # A path that a pepper may have.
    path = "service"
    for mount in MOUNTS:
        assert put(backend, f"in {mount}", 0, path, mount) == 1
    assert [text_at(backend, path=path, mount=mount) for mount in MOUNTS] == [f"in {mount}" for mount in MOUNTS]
    backend.destroy(BOX, path, 1)
    assert text_at(backend, path=path, mount=Mount.PRODUCTION) == "in production"
    assert text_at(backend, path=path, mount=Mount.PEPPERS) == "in peppers"
    backend.destroy(Mount.PEPPERS, path, 1)
    assert [each.state for each in backend.versions(Mount.PEPPERS, path)] == [DESTROYED]
    assert text_at(backend, path=path, mount=Mount.PRODUCTION) == "in production"


def test_paths_are_separate(backend: SecretBackend) -> None:
    """No path is a prefix, a pattern or another spelling of another path."""
    paths = ["a", "a/b", "a/b/c", "A", "a%", "a_", "%", "a ", "ab"]
    for path in paths:
        assert put(backend, f"at {path}", 0, path=path) == 1
    assert [text_at(backend, path=path) for path in paths] == [f"at {path}" for path in paths]
    backend.destroy(BOX, "a", 1)
    backend.soft_delete(BOX, "a%", 1)
    assert [states(backend, path) for path in paths[1:4]] == [{1: LIVE}] * 3


# --- soft delete, undelete, destroy -----------------------------------------------------------------------


def test_soft_delete_hides_a_version_until_undelete(backend: SecretBackend) -> None:
    filled(backend)
    backend.soft_delete(BOX, "a", 2)
    with pytest.raises(BackendMissingError):
        backend.read(BOX, "a", 2)
    assert states(backend) == {1: LIVE, 2: DELETED, 3: LIVE}
    backend.undelete(BOX, "a", 2)
    assert text_at(backend, 2) == "two"
    assert states(backend) == {1: LIVE, 2: LIVE, 3: LIVE}


@pytest.mark.parametrize("act", ["soft_delete", "destroy"])
def test_read_newest_never_falls_back_to_an_older_version(backend: SecretBackend, act: str) -> None:
    """A deleted newest version never exposes a superseded secret."""
    filled(backend)
    getattr(backend, act)(BOX, "a", 3)
    with pytest.raises(BackendMissingError):
        backend.read(BOX, "a")
    assert text_at(backend, 2) == "two"


def test_destroy_is_permanent(backend: SecretBackend) -> None:
    """A destroyed version is never readable again, by any sequence of calls."""
    filled(backend)
    backend.destroy(BOX, "a", 2)
    for _ in range(2):
        with pytest.raises(BackendMissingError):
            backend.undelete(BOX, "a", 2)
        backend.soft_delete(BOX, "a", 2)
    with pytest.raises(BackendMissingError):
        backend.read(BOX, "a", 2)
    assert states(backend) == {1: LIVE, 2: DESTROYED, 3: LIVE}


def test_destroy_of_a_deleted_version_is_permanent(backend: SecretBackend) -> None:
    filled(backend)
    backend.soft_delete(BOX, "a", 1)
    backend.destroy(BOX, "a", 1)
    with pytest.raises(BackendMissingError):
        backend.undelete(BOX, "a", 1)
    assert states(backend)[1] is DESTROYED


@pytest.mark.parametrize("act", ["soft_delete", "destroy"])
def test_calls_are_repeatable(backend: SecretBackend, act: str) -> None:
    """A worker that died after the call repeats it: same result, no error."""
    filled(backend)
    for _ in range(3):
        getattr(backend, act)(BOX, "a", 2)
    assert states(backend) == {1: LIVE, 2: DELETED if act == "soft_delete" else DESTROYED, 3: LIVE}


@pytest.mark.parametrize("act", ["soft_delete", "destroy"])
@pytest.mark.parametrize(("path", "version"), [("a", 4), ("a", 0), ("nowhere", 1)])
def test_calls_on_a_missing_version_succeed_and_create_none(
    backend: SecretBackend, act: str, path: str, version: int
) -> None:
    filled(backend)
    getattr(backend, act)(BOX, path, version)
    assert states(backend) == {1: LIVE, 2: LIVE, 3: LIVE}
    assert states(backend, "nowhere") == {}


@pytest.mark.parametrize(("path", "version"), [("a", 4), ("a", 0), ("nowhere", 1)])
def test_undelete_of_a_nonexistent_version_is_missing(backend: SecretBackend, path: str, version: int) -> None:
    filled(backend)
    with pytest.raises(BackendMissingError):
        backend.undelete(BOX, path, version)


def test_undelete_of_a_living_version_changes_nothing(backend: SecretBackend) -> None:
    filled(backend)
    backend.undelete(BOX, "a", 2)
    assert states(backend) == {1: LIVE, 2: LIVE, 3: LIVE}


@pytest.mark.parametrize("act", ["soft_delete", "destroy"])
def test_put_after_the_newest_was_removed_continues_the_numbering(backend: SecretBackend, act: str) -> None:
    """A version number is never reused for another secret."""
    filled(backend)
    getattr(backend, act)(BOX, "a", 3)
    with pytest.raises(BackendConflictError):
        put(backend, "four", 2)
    assert put(backend, "four", 3) == 4
    assert text_at(backend) == "four"


# --- forget and list --------------------------------------------------------------------------------------


def test_forget_removes_a_path_completely(backend: SecretBackend) -> None:
    """Neither the secrets nor their metadata remain."""
    filled(backend).destroy(BOX, "a", 2)
    put(backend, "beside", 0, "a/b")
    for _ in range(2):
        backend.forget(BOX, "a")
        with pytest.raises(BackendMissingError):
            backend.read(BOX, "a")
        with pytest.raises(BackendMissingError):
            backend.undelete(BOX, "a", 1)
        assert backend.versions(BOX, "a") == []
    assert list(backend.list_paths(BOX)) == ["a/b"]
    assert text_at(backend, path="a/b") == "beside"


def test_forgotten_path_starts_at_version_one(backend: SecretBackend) -> None:
    filled(backend).forget(BOX, "a")
    assert put(backend, "one", 0) == 1
    assert states(backend) == {1: LIVE}


def test_list_paths_names_every_path_of_one_mount(backend: SecretBackend) -> None:
    """Paths whose versions are all destroyed are listed too, for reconciliation."""
    assert list(backend.list_paths(BOX)) == []
    paths = {"a", "a/b", "a/b/c", "b/c/d/e", "A", "a b/c d", "ä/%41"}
    for path in paths:
        put(backend, f"at {path}", 0, path)
    put(backend, "elsewhere", 0, "z", Mount.PRODUCTION)
    backend.soft_delete(BOX, "a", 1)
    backend.destroy(BOX, "a/b", 1)
    assert sorted(backend.list_paths(BOX)) == sorted(paths)


@pytest.mark.parametrize("path", ["", "/", "a//b", "/a", "a/", ".", "..", "a/../b", "../production/a", "a/./b"])
def test_path_with_traversal_reaches_no_other_path(backend: SecretBackend, path: str) -> None:
    """No spelling of a path reads, writes or destroys what another path holds."""
    others = ["a", "b", "a/b", "production/a"]
    for other in others:
        put(backend, f"at {other}", 0, other)
    acts: list[Callable[[], object]] = [
        lambda: put(backend, "stray", 0, path),
        lambda: backend.read(BOX, path),
        lambda: backend.versions(BOX, path),
        lambda: backend.soft_delete(BOX, path, 1),
        lambda: backend.undelete(BOX, path, 1),
        lambda: backend.destroy(BOX, path, 1),
        lambda: backend.forget(BOX, path),
    ]
    for act in acts:
        with suppress(BackendInvalidError, BackendMissingError):
            act()
        assert [text_at(backend, path=other) for other in others] == [f"at {other}" for other in others]
    assert set(backend.list_paths(BOX)) <= {*others, path}
    assert list(backend.list_paths(Mount.PRODUCTION)) == []


# --- whole backend ----------------------------------------------------------------------------------------


def test_health_of_a_working_backend_is_ready(backend: SecretBackend) -> None:
    assert backend.health().ready
    assert backend.health().detail


def test_store_reopened_holds_what_was_put(backend: SecretBackend, backend_name: str, tmp_path: Path) -> None:
    filled(backend).soft_delete(BOX, "a", 1)
    backend.destroy(BOX, "a", 2)
    again = BACKENDS[backend_name](tmp_path)
    assert text_at(again) == "three"
    assert states(again) == {1: DELETED, 2: DESTROYED, 3: LIVE}
    assert put(again, "four", 3) == 4


def test_errors_show_no_secret(backend: SecretBackend) -> None:
    """Errors carry no secret, neither to the caller nor to the log."""
    put(backend, "hunter2", 0)
    failing: list[Callable[[], object]] = [
        lambda: put(backend, "hunter2", 0),
        lambda: backend.read(BOX, "a", 9),
        lambda: backend.undelete(BOX, "a", 9),
    ]
    for fail in failing:
        with pytest.raises(KeyvaultError) as raised:
            fail()
        assert "hunter2" not in f"{raised.value} {raised.value.detail} {raised.value.internal} {raised.value!r}"


LABEL = st.text(max_size=10).filter(lambda name: name not in {"secret", "schema"})

SHARED = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
"""The backend is emptied once per test; each example uses its own path."""


@SHARED
@given(
    text=st.text(max_size=200) | st.just("x" * 100_000),
    labels=st.dictionaries(LABEL, st.text(max_size=10), max_size=4),
    path=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40),
)
def test_put_and_read_any_text_round_trips_or_is_refused(
    backend: SecretBackend, text: str, labels: dict[str, str], path: str
) -> None:
    """A path that the backend cannot store is refused, and nothing is written elsewhere."""
    place = f"{uuid4()}/{path}"
    try:
        version = backend.put(BOX, place, Plaintext(text), labels, expected_version=0)
    except BackendInvalidError:
        assert [path for path in backend.list_paths(BOX) if path.startswith(place[:36])] == []
        return
    stored = backend.read(BOX, place)
    assert (stored.version, stored.secret.reveal(), stored.labels) == (version, text, labels)
    assert place in backend.list_paths(BOX)
    backend.forget(BOX, place)


class BackendModel(RuleBasedStateMachine):
    """Random call sequences, compared with a dictionary of expected results."""

    backend: SecretBackend

    def __init__(self) -> None:
        super().__init__()
        self.path = f"{uuid4()}"
        self.expected: dict[int, tuple[VersionState, str]] = {}

    @precondition(lambda self: len(self.expected) < KEPT_VERSIONS)
    @rule(offset=st.sampled_from([0, 0, 0, 1, -1]), text=st.text(max_size=5))
    def put(self, offset: int, text: str) -> None:
        after = len(self.expected) + offset
        if offset:
            with pytest.raises(BackendConflictError):
                put(self.backend, text, after, self.path)
        else:
            assert put(self.backend, text, after, self.path) == after + 1
            self.expected[after + 1] = (LIVE, text)

    @rule(version=st.integers(0, 4), state=st.sampled_from([DELETED, DESTROYED]))
    def end(self, version: int, state: VersionState) -> None:
        act = self.backend.soft_delete if state is DELETED else self.backend.destroy
        act(BOX, self.path, version)
        before, text = self.expected.get(version, (None, ""))
        if before is not None and before is not DESTROYED:
            self.expected[version] = (state, text)

    @rule(version=st.integers(0, 4))
    def undelete(self, version: int) -> None:
        before, text = self.expected.get(version, (None, ""))
        if before in {None, DESTROYED}:
            with pytest.raises(BackendMissingError):
                self.backend.undelete(BOX, self.path, version)
        else:
            self.backend.undelete(BOX, self.path, version)
            self.expected[version] = (LIVE, text)

    @rule(version=st.none() | st.integers(0, 4))
    def read(self, version: int | None) -> None:
        state, text = self.expected.get(len(self.expected) if version is None else version, (None, ""))
        if state is LIVE:
            assert text_at(self.backend, version, self.path) == text
        else:
            with pytest.raises(BackendMissingError):
                self.backend.read(BOX, self.path, version)

    @rule()
    def forget(self) -> None:
        self.backend.forget(BOX, self.path)
        self.expected.clear()

    @invariant()
    def versions_are_as_expected(self) -> None:
        found = states(self.backend, self.path)
        assert found == {number: state for number, (state, _) in self.expected.items()}


def test_any_sequence_of_calls_matches_the_model(backend: SecretBackend) -> None:
    class Machine(BackendModel):
        pass

    Machine.backend = backend
    run_state_machine_as_test(Machine, settings=settings(max_examples=15, stateful_step_count=15, deadline=None))


# --- concurrency ------------------------------------------------------------------------------------------


def test_put_by_several_processes_succeeds_for_exactly_one(
    backend: SecretBackend, backend_name: str, tmp_path: Path
) -> None:
    """Two workers that publish at the same moment: one writes, the others get a conflict, and nothing is lost."""
    rounds = KEPT_VERSIONS
    processes = [start_process(backend_name, tmp_path, "race", str(who)) for who in range(4)]
    with ExitStack() as stack:
        for process in processes:
            stack.enter_context(process)
            stack.callback(process.kill)
        assert [(read_line(process), read_line(process)) for process in processes] == [("ready", "opened")] * 4
        for version in range(1, rounds + 1):
            for process in processes:
                send_cue(process)
            answers = [read_line(process) for process in processes]
            assert sorted(answers) == ["conflict"] * 3 + ["won"], version
            assert backend.read(BOX, "raced", version).labels == {"who": str(answers.index("won"))}
    assert states(backend, "raced") == dict.fromkeys(range(1, rounds + 1), LIVE)


def test_put_by_several_threads_succeeds_for_exactly_one(backend: SecretBackend) -> None:
    def attempt(number: int) -> bool:
        try:
            put(backend, str(number), 0)
        except BackendConflictError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = [number for number, wins in enumerate(pool.map(attempt, range(16))) if wins]
    assert len(won) == 1
    assert text_at(backend) == str(won[0])


def test_calls_by_several_threads_all_succeed(backend: SecretBackend) -> None:
    """Writers of different paths do not lose each other's work and do not fail."""

    def work(number: int) -> None:
        path = f"path {number}"
        for after, text in enumerate(("one", "two")):
            put(backend, text, after, path=path)
        backend.destroy(BOX, path, 1)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(12)))
    for number in range(12):
        assert states(backend, f"path {number}") == {1: DESTROYED, 2: LIVE}
        assert text_at(backend, path=f"path {number}") == "two"


@pytest.mark.long
def test_put_killed_halfway_leaves_a_consistent_store(
    backend: SecretBackend, backend_name: str, tmp_path: Path
) -> None:
    """kill -9 at any moment: acknowledged versions are stored, later ones are stored or not, and none is torn."""
    acknowledged = 0
    for turn in range(6):
        with start_process(backend_name, tmp_path, "write_until_killed", "written") as process:
            try:
                assert (read_line(process), read_line(process)) == ("ready", "opened")
                for _ in range(1 + 3 * turn):
                    acknowledged = int(read_line(process))
            finally:
                process.kill()
            assert process.stdout is not None
            for line in process.stdout:
                if line.strip():
                    acknowledged = int(line)
        newest = put_after_killed(backend, "written")
        assert acknowledged <= newest <= acknowledged + 1
        found = [each.version for each in backend.versions(BOX, "written")]
        assert found == list(range(found[0], newest + 2))
        assert len(found) >= min(acknowledged, KEPT_VERSIONS)
        for version in found:
            stored = backend.read(BOX, "written", version)
            assert stored.labels == {"number": str(version)}
            assert stored.secret.reveal().startswith(f"secret {version} ")


def put_after_killed(backend: SecretBackend, path: str) -> int:
    """Put the next version, and return the one before it.

    A server may still execute the last request of a killed process. After this put that request conflicts.
    """
    while True:
        newest = backend.versions(BOX, path)[-1].version
        secret, labels = Plaintext(f"secret {newest + 1} "), {"number": str(newest + 1)}
        with suppress(BackendConflictError):
            backend.put(BOX, path, secret, labels, expected_version=newest)
            return newest
