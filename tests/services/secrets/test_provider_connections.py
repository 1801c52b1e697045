"""Provider connections: stored with check-and-set, replaced, removed, and repaired after any interruption."""

import base64
import re
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.test import override_settings

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER
from keyvault.backends.base import (
    BackendMissingError,
    BackendUnavailableError,
    Mount,
)
from keyvault.backends.local import LocalKeystore
from keyvault.domain.environments import Environment
from keyvault.domain.errors import NotFoundError, PermissionMissingError, RequestInvalidError, StateConflictError
from keyvault.domain.plaintext import Plaintext
from keyvault.models import Account, ProviderConnection
from keyvault.services import maintenance
from keyvault.services.recording.audit_chain import verify_audit
from keyvault.services.recording.transaction import recorded
from keyvault.services.secrets import provider_connections
from keyvault.services.secrets.backend import secret_backend
from keyvault.services.secrets.provider_connections import (
    WRITE_WITHIN,
    describe_connection,
    find_by_path,
    forget_connection,
    list_connections,
    list_to_forget,
    list_unsettled,
    remove_connection,
    replace_connection,
    set_connection,
    settle_connection,
)
from keyvault.services.secrets.stored_copies import ForeignWriterError
from tests.factories import PRODUCTION, SANDBOX, account, grant, make_merchant, now
from tests.killing import KilledError
from tests.services.conftest import Scene, make_scene
from tests.services.racing import race
from tests.services.rows import dump_tables, events_of, last_body

pytestmark = pytest.mark.django_db

CHAIN = "account:acme/sandbox"


def set_credentials(
    scene: Scene, text: str, place: Account | None = None, provider: str = "stripe"
) -> ProviderConnection:
    into = place or scene.sandbox
    return set_connection(grant(scene.tam, P.CONNECTIONS_WRITE, into), into, provider, Plaintext(text))


def replace(scene: Scene, connection: ProviderConnection, text: str) -> ProviderConnection:
    return replace_connection(grant(scene.tam, P.CONNECTIONS_WRITE, connection.account), connection, Plaintext(text))


def remove(scene: Scene, connection: ProviderConnection) -> None:
    remove_connection(grant(scene.tam, P.CONNECTIONS_WRITE, connection.account), connection)


def run_maintenance(later: timedelta = timedelta(0)) -> None:
    """Run the worker's maintenance of connections."""
    at = now() + later
    for row in list_unsettled(at):
        settle_connection(grant(WORKER, P.BACKEND_RECONCILE, row.account, at=at), row)
    for row in list_to_forget(at):
        forget_connection(grant(WORKER, P.BACKEND_RECONCILE, row.account, at=at), row)


def read_credentials(connection: ProviderConnection, version: int | None = None) -> str:
    """Return what a merchant's backend reads."""
    mount = Mount(connection.account.environment)
    return secret_backend().read(mount, connection.backend_path, version).secret.reveal()


def versions(connection: ProviderConnection) -> list[str]:
    mount = Mount(connection.account.environment)
    return [each.state.value for each in secret_backend().versions(mount, connection.backend_path)]


def fresh() -> ProviderConnection:
    """Return the only row."""
    row: ProviderConnection = ProviderConnection.objects.select_related("account__merchant").get()
    return row


def write_foreign_version(connection: ProviderConnection, expected_version: int) -> None:
    labels = {"connection_id": "con_of_another_program"}
    path = connection.backend_path
    secret_backend().put(Mount.SANDBOX, path, Plaintext("theirs"), labels, expected_version=expected_version)


def die(*_: Any, **__: Any) -> None:
    raise KilledError


def unavailable(*_: Any, **__: Any) -> None:
    raise BackendUnavailableError("The backend is sealed.")


def after(real: Callable[..., Any], then: Callable[[], Any]) -> Callable[..., Any]:
    """Make the real call, then do something else in place of its return."""

    def call(*arguments: Any, **options: Any) -> Any:
        real(*arguments, **options)
        return then()

    return call


def before(real: Callable[..., Any], first: Callable[[], Any]) -> Callable[..., Any]:
    """Do something else once before the real call."""
    pending = [first]

    def call(*arguments: Any, **options: Any) -> Any:
        if pending:
            pending.pop()()
        return real(*arguments, **options)

    return call


# ------------------------------------------------------------------------------------------------- set and replaced


@pytest.mark.database
def test_connection_set_is_stored_at_its_own_path_with_labels(scene: Scene) -> None:
    connection = set_credentials(scene, "sk_test_first")
    assert re.fullmatch(rf"{scene.sandbox.pk}/con_[0-9A-Za-z]{{20}}", connection.backend_path)
    read = secret_backend().read(Mount.SANDBOX, connection.backend_path)
    assert read.secret.reveal() == "sk_test_first"
    labels = dict(read.labels)
    assert labels.pop("write_id")
    assert labels == {
        "connection_id": connection.backend_path.partition("/")[2],
        "provider": "stripe",
        "environment": "sandbox",
        "mode": "test",
    }
    row = fresh()
    assert (row.mode, row.backend_version, row.stored_by) == ("test", 1, "operator:tam")
    assert row.stored_at is not None
    assert events_of(CHAIN)[-2:] == ["connection.added", "connection.stored"]


@pytest.mark.database
@pytest.mark.parametrize(("environment", "mode"), [(SANDBOX, "test"), (PRODUCTION, "live")])
def test_connection_mode_follows_the_environment(scene: Scene, environment: Environment, mode: str) -> None:
    """Test mode in sandbox and live mode in production, each in its environment's own mount."""
    connection = set_credentials(scene, "secret", account("acme", environment))
    assert connection.mode == mode
    others = {Mount.SANDBOX, Mount.PRODUCTION} - {Mount(environment)}
    for mount in others:
        with pytest.raises(BackendMissingError):
            secret_backend().read(mount, connection.backend_path)


def test_connection_set_in_the_wrong_mode_is_refused(scene: Scene) -> None:
    """A live key is never stored where test keys belong."""
    with pytest.raises(RequestInvalidError):
        set_credentials(scene, "sk_live_51Hx")
    assert not ProviderConnection.objects.exists()


@pytest.mark.database
def test_connection_replaced_is_readable_immediately_and_the_old_version_destroyed_later(scene: Scene) -> None:
    """The new version is stored before the worker destroys the old one."""
    first = set_credentials(scene, "first")
    second = set_credentials(scene, "second")
    assert second.pk == first.pk
    assert read_credentials(second) == "second"
    assert versions(second) == ["live", "live"]
    run_maintenance()
    assert versions(second) == ["destroyed", "live"]
    assert read_credentials(second) == "second"
    assert (fresh().backend_version, fresh().settle_due_at) == (2, None)
    assert events_of(CHAIN)[-3:] == ["connection.write_began", "connection.stored", "connection.settled"]
    assert last_body("connection.settled")["details"]["destroyed"] == [1]
    assert list_unsettled(now() + timedelta(days=1)) == []


@pytest.mark.database
def test_connection_settled_twice_writes_nothing(scene: Scene) -> None:
    set_credentials(scene, "first")
    run_maintenance()
    rows = dump_tables()
    settle_connection(grant(WORKER, P.BACKEND_RECONCILE, scene.sandbox), fresh())
    assert dump_tables() == rows


@pytest.mark.database
def test_connection_of_another_provider_or_account_has_its_own_path(scene: Scene) -> None:
    make_merchant("globex")
    connections = [
        set_credentials(scene, "a"),
        set_credentials(scene, "b", provider="adyen"),
        set_credentials(scene, "c", scene.production),
        set_credentials(scene, "d", account("globex")),
    ]
    assert len({each.backend_path for each in connections}) == 4
    assert [read_credentials(each) for each in connections] == ["a", "b", "c", "d"]
    assert [each.provider for each in list_connections(scene.sandbox)] == ["adyen", "stripe"]


def test_connection_set_without_the_permission_for_its_account_is_refused(scene: Scene) -> None:
    for who in (scene.approver, scene.responder):
        with pytest.raises(PermissionMissingError):
            grant(who, P.CONNECTIONS_WRITE, scene.sandbox)
    for wrong in (
        grant(scene.admin, P.CONNECTIONS_WRITE, scene.production),
        grant(scene.admin, P.CONNECTIONS_READ, scene.sandbox),
    ):
        with pytest.raises(PermissionMissingError):
            set_connection(wrong, scene.sandbox, "stripe", Plaintext("secret"))
    assert not ProviderConnection.objects.exists()


def test_connection_of_an_unserved_environment_is_not_written(scene: Scene) -> None:
    """A process of the sandbox touches nothing of production."""
    set_credentials(scene, "secret", scene.production)
    with override_settings(ENVIRONMENTS=(SANDBOX,)):
        with pytest.raises(NotFoundError):
            set_credentials(scene, "secret", scene.production)
        assert list_unsettled(now() + timedelta(days=1)) == []
        remove(scene, fresh())
        assert list_to_forget(now() + timedelta(days=1)) == []


def test_connection_of_an_offboarded_merchant_is_refused(scene: Scene) -> None:
    connection = set_credentials(scene, "secret")
    with recorded(grant(scene.admin, P.MERCHANTS_OFFBOARD), P.MERCHANTS_OFFBOARD, "test.offboarded"):
        scene.merchant.compare_and_swap(status="offboarded")
    with pytest.raises(StateConflictError, match="was offboarded"):
        set_credentials(scene, "secret", provider="adyen")
    with pytest.raises(StateConflictError, match="was offboarded"):
        replace(scene, connection, "secret")
    assert read_credentials(connection) == "secret"


@pytest.mark.database
def test_connection_maintenance_settles_and_forgets_with_errors_isolated(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failing connection does not affect the next one and is retried on the next run."""
    for provider in ("adyen", "stripe"):
        for text in ("first", "second"):
            set_credentials(scene, text, provider=provider)
    removed_one = set_credentials(scene, "gone", provider="gone")
    remove(scene, removed_one)
    adyen, stripe = list_connections(scene.sandbox)
    with monkeypatch.context() as outage:
        outage.setattr(LocalKeystore, "versions", unavailable)
        maintenance.settle_connections_due()
    assert (versions(adyen), versions(stripe), versions(removed_one)) == (["live", "live"], ["live", "live"], ["live"])
    write_foreign_version(adyen, expected_version=2)
    maintenance.settle_connections_due()
    assert (versions(adyen), versions(stripe), versions(removed_one)) == (["live"] * 3, ["destroyed", "live"], [])


# ---------------------------------------------------------------------------------------------------------- removed


@pytest.mark.database
def test_connection_removed_is_erased_by_the_worker_and_keeps_its_row(scene: Scene) -> None:
    """Every stored version and the path are erased; the row still names who set and removed it."""
    connection = set_credentials(scene, "first")
    set_credentials(scene, "second")
    remove(scene, fresh())
    assert list(list_connections(scene.sandbox)) == []
    run_maintenance()
    assert versions(connection) == []
    assert fresh().forgotten_at is not None
    assert events_of(CHAIN)[-2:] == ["connection.removed", "connection.forgotten"]
    assert list_to_forget(now() + timedelta(days=1)) == []


def test_connection_removed_twice_or_replaced_after_removal_is_refused(scene: Scene) -> None:
    connection = set_credentials(scene, "first")
    remove(scene, connection)
    with pytest.raises(StateConflictError, match="already removed"):
        remove(scene, fresh())
    with pytest.raises(StateConflictError, match="is removed"):
        replace(scene, fresh(), "second")
    assert read_credentials(connection) == "first"


def test_connection_set_after_a_removal_gets_another_path(scene: Scene) -> None:
    first = set_credentials(scene, "first")
    remove(scene, first)
    second = set_credentials(scene, "second")
    assert second.backend_path != first.backend_path
    run_maintenance()
    assert (versions(first), read_credentials(second)) == ([], "second")


def test_connection_forgotten_before_its_removal_is_refused(scene: Scene) -> None:
    connection = set_credentials(scene, "first")
    with pytest.raises(StateConflictError, match="Only a removed"):
        forget_connection(grant(WORKER, P.BACKEND_RECONCILE, scene.sandbox), connection)
    assert read_credentials(connection) == "first"


@pytest.mark.database
def test_connection_forgotten_while_the_backend_is_unavailable_is_retried(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = set_credentials(scene, "first")
    remove(scene, connection)
    with monkeypatch.context() as outage:
        outage.setattr(LocalKeystore, "forget", unavailable)
        with pytest.raises(BackendUnavailableError):
            run_maintenance()
    assert fresh().forgotten_at is None
    run_maintenance()
    assert versions(connection) == []


@pytest.mark.database
def test_connection_removed_during_a_write_is_erased_afterwards(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer gets a conflict, and the worker waits until no write can arrive."""

    def remove_and_maintain() -> None:
        remove(scene, fresh())
        run_maintenance()

    with monkeypatch.context() as raced:
        raced.setattr(LocalKeystore, "put", before(LocalKeystore.put, remove_and_maintain))
        with pytest.raises(StateConflictError, match="removed in the meantime"):
            set_credentials(scene, "late")
    assert versions(fresh()) == ["live"]
    assert fresh().forgotten_at is None
    run_maintenance(later=WRITE_WITHIN)
    assert versions(fresh()) == []


# --------------------------------------------------------------------------------------------- interruptions


@pytest.mark.database
@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize(("point", "is_written"), [("put", False), ("answer", True), ("_note_stored", True)])
def test_connection_write_killed_midway_is_settled_by_the_worker(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, exists: bool, point: str, is_written: bool
) -> None:
    """Afterwards row and backend agree, and one version is live."""
    if exists:
        set_credentials(scene, "old")
    with monkeypatch.context() as killed:
        if point == "_note_stored":
            killed.setattr(provider_connections, point, die)
        else:
            killed.setattr(LocalKeystore, "put", die if point == "put" else after(LocalKeystore.put, die))
        with pytest.raises(KilledError):
            set_credentials(scene, "new")
    assert list_unsettled(now()) == [], "the writer must have time to finish"
    run_maintenance(later=WRITE_WITHIN)
    row = fresh()
    assert row.settle_due_at is None
    if not (exists or is_written):
        assert (row.backend_version, row.stored_at, versions(row)) == (None, None, [])
        return
    assert read_credentials(row) == ("new" if is_written else "old")
    assert row.backend_version == len(versions(row))
    assert versions(row).count("live") == 1
    assert row.stored_by == ("system:worker" if is_written else "operator:tam")


@pytest.mark.database
@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("point", ["versions", "put", "answer", "_note_stored"])
def test_connection_write_killed_midway_and_repeated_succeeds(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, exists: bool, point: str
) -> None:
    """The repetition uses the same path, replaces its own write, and leaves one live version."""
    if exists:
        set_credentials(scene, "old")
    with monkeypatch.context() as killed:
        if point == "_note_stored":
            killed.setattr(provider_connections, point, die)
        elif point == "answer":
            killed.setattr(LocalKeystore, "put", after(LocalKeystore.put, die))
        else:
            killed.setattr(LocalKeystore, point, die)
        with pytest.raises(KilledError):
            set_credentials(scene, "new")
    set_credentials(scene, "new")
    run_maintenance()
    row = fresh()
    assert (read_credentials(row), versions(row).count("live")) == ("new", 1)
    assert row.backend_version == len(versions(row))
    assert verify_audit().first_broken is None


def test_connection_write_with_a_lost_reply_is_found_by_reading_back(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write id on the stored version identifies the writer."""
    with monkeypatch.context() as lossy:
        lossy.setattr(LocalKeystore, "put", after(LocalKeystore.put, unavailable))
        connection = set_credentials(scene, "first")
    assert (read_credentials(connection), versions(connection), fresh().backend_version) == ("first", ["live"], 1)


@pytest.mark.database
def test_connection_write_with_the_backend_unavailable_fails_and_keeps_the_old_version(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_credentials(scene, "old")
    for method in ("versions", "put"):
        with monkeypatch.context() as outage:
            outage.setattr(LocalKeystore, method, unavailable)
            with pytest.raises(BackendUnavailableError):
                set_credentials(scene, "new")
    assert (read_credentials(fresh()), fresh().backend_version) == ("old", 1)
    run_maintenance(later=WRITE_WITHIN)
    assert (versions(fresh()), fresh().settle_due_at) == (["live"], None)


@pytest.mark.database
def test_connection_written_concurrently_keeps_the_first_and_refuses_the_second(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check-and-set: the second writer never overwrites what it did not see."""
    set_credentials(scene, "old")
    with monkeypatch.context() as raced:
        raced.setattr(LocalKeystore, "put", before(LocalKeystore.put, lambda: set_credentials(scene, "first")))
        with pytest.raises(StateConflictError, match="at the same time"):
            set_credentials(scene, "second")
    assert (read_credentials(fresh()), fresh().backend_version) == ("first", 2)
    run_maintenance(later=WRITE_WITHIN)
    assert versions(fresh()) == ["destroyed", "live"]


@pytest.mark.database
def test_connection_replaced_between_write_and_row_is_not_recorded_backwards(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late report of an older version does not replace the newer one."""
    set_credentials(scene, "old")
    with monkeypatch.context() as raced:
        raced.setattr(
            provider_connections,
            "_note_stored",
            before(provider_connections._note_stored, lambda: set_credentials(scene, "newer")),
        )
        with pytest.raises(StateConflictError, match="replaced"):
            set_credentials(scene, "outdated")
    assert (read_credentials(fresh()), fresh().backend_version) == ("newer", 3)
    run_maintenance(later=WRITE_WITHIN)
    assert versions(fresh()) == ["destroyed", "destroyed", "live"]


@pytest.mark.database
def test_connection_row_changed_between_write_and_row_is_recorded(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that settles in between does not make the write fail."""
    set_credentials(scene, "old")

    def settle() -> None:
        settle_connection(grant(WORKER, P.BACKEND_RECONCILE, scene.sandbox), fresh())

    with monkeypatch.context() as raced:
        raced.setattr(provider_connections, "_note_stored", before(provider_connections._note_stored, settle))
        set_credentials(scene, "new")
    assert (fresh().backend_version, fresh().stored_by) == (2, "operator:tam")


# ----------------------------------------------------------------------------------------------------- foreign writers


def test_connection_path_with_a_foreign_version_is_never_overwritten(scene: Scene) -> None:
    """The foreign version stays, and the caller gets an error."""
    connection = set_credentials(scene, "ours")
    write_foreign_version(connection, expected_version=1)
    with pytest.raises(ForeignWriterError):
        set_credentials(scene, "new")
    with pytest.raises(ForeignWriterError):
        settle_connection(grant(WORKER, P.BACKEND_RECONCILE, scene.sandbox), fresh())
    assert (read_credentials(connection, 1), read_credentials(connection, 2)) == ("ours", "theirs")
    assert (versions(connection), fresh().backend_version) == (["live", "live"], 1)


@pytest.mark.database
def test_connection_write_concurrent_with_a_foreign_one_is_refused(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_credentials(scene, "ours")
    real = LocalKeystore.put
    with monkeypatch.context() as raced:

        def write_first() -> None:
            raced.setattr(LocalKeystore, "put", real)
            write_foreign_version(fresh(), expected_version=1)

        raced.setattr(LocalKeystore, "put", before(real, write_first))
        with pytest.raises(ForeignWriterError):
            set_credentials(scene, "new")
    assert read_credentials(fresh()) == "theirs"


@pytest.mark.database
def test_connection_older_foreign_version_is_not_destroyed(scene: Scene) -> None:
    """A foreign version below an own one is reported, not erased."""
    connection = set_credentials(scene, "ours")
    write_foreign_version(connection, expected_version=1)
    path = connection.backend_path
    labels = secret_backend().read(Mount.SANDBOX, path, 1).labels
    secret_backend().put(Mount.SANDBOX, path, Plaintext("ours again"), labels, expected_version=2)
    with pytest.raises(ForeignWriterError):
        settle_connection(grant(WORKER, P.BACKEND_RECONCILE, scene.sandbox), fresh())
    assert versions(connection) == ["destroyed", "live", "live"]
    assert read_credentials(connection, 2) == "theirs"


@pytest.mark.database
def test_connection_of_a_rolled_back_backend_is_reported_and_not_adopted(scene: Scene) -> None:
    """A restored Vault brings old credentials back; they must not be recorded as newly stored."""
    connection = set_credentials(scene, "old")
    labels = secret_backend().read(Mount.SANDBOX, connection.backend_path, 1).labels
    replace(scene, fresh(), "new")
    secret_backend().forget(Mount.SANDBOX, connection.backend_path)
    secret_backend().put(Mount.SANDBOX, connection.backend_path, Plaintext("old"), labels, expected_version=0)
    with pytest.raises(ForeignWriterError) as refused:
        settle_connection(grant(WORKER, P.BACKEND_RECONCILE, scene.sandbox), fresh())
    assert f" at sandbox/{connection.backend_path} " in refused.value.internal
    assert fresh().backend_version == 2


def test_connection_removed_with_a_foreign_version_is_not_forgotten(scene: Scene) -> None:
    """Erasing the path would erase the foreign version."""
    connection = set_credentials(scene, "ours")
    write_foreign_version(connection, expected_version=1)
    remove(scene, fresh())
    with pytest.raises(ForeignWriterError):
        run_maintenance()
    assert (read_credentials(connection, 2), fresh().forgotten_at) == ("theirs", None)
    assert versions(connection) == ["destroyed", "live"], "own versions must be destroyed"


# -------------------------------------------------------------------------------------------------- secrecy


@pytest.mark.database
def test_connection_description_holds_no_credentials(scene: Scene) -> None:
    connection = set_credentials(scene, "sk_test_never_shown")
    description = describe_connection(fresh())
    assert description == {
        "connection_id": connection.backend_path.partition("/")[2],
        "provider": "stripe",
        "mode": "test",
        "stored_at": connection.stored_at,
        "stored_by": "operator:tam",
        "backend_version": 1,
    }


@pytest.mark.database
def test_connection_credentials_are_in_no_row_no_file_and_no_log(
    scene: Scene, data_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers the database, the keystore's files and the log of every operation."""
    secret = "verysecret" + "Zq7" * 20
    with caplog.at_level("DEBUG"):
        connection = set_credentials(scene, secret)
        set_credentials(scene, f'{{"key": "{secret}"}}')
        with pytest.raises(RequestInvalidError):
            set_credentials(scene, f'{{"key": "{secret}"')
        with monkeypatch.context() as outage:
            outage.setattr(LocalKeystore, "put", unavailable)
            with pytest.raises(BackendUnavailableError):
                set_credentials(scene, secret)
        run_maintenance(later=WRITE_WITHIN)
        remove(scene, fresh())
    found = repr(dump_tables()).encode() + caplog.text.encode()
    found += b"".join(path.read_bytes() for path in sorted(data_dir.rglob("*")) if path.is_file())
    assert connection.backend_path.encode() in found, "the dump lacks the connection's path"
    for form in (secret.encode(), base64.b64encode(secret.encode())):
        assert form not in found


@pytest.mark.database
def test_connection_is_found_by_its_path_even_if_removed(scene: Scene) -> None:
    """The reconciler asks this for a path that belongs to no credential."""
    connection = set_credentials(scene, "first")
    assert find_by_path(SANDBOX, connection.backend_path) == connection
    assert find_by_path(PRODUCTION, connection.backend_path) is None
    remove(scene, connection)
    assert find_by_path(SANDBOX, connection.backend_path) == connection
    assert find_by_path(SANDBOX, f"{scene.sandbox.pk}/con_{'0' * 20}") is None
    assert find_by_path(SANDBOX, "written-by-another-program") is None


@pytest.mark.database
def test_connection_settle_adopts_a_late_write(scene: Scene) -> None:
    """The nightly run settles every row, so an unreported write is found."""
    connection = set_credentials(scene, "first")
    run_maintenance()
    labels = secret_backend().read(Mount.SANDBOX, connection.backend_path).labels
    path = connection.backend_path
    secret_backend().put(Mount.SANDBOX, path, Plaintext("late"), labels, expected_version=1)
    settle_connection(grant(WORKER, P.BACKEND_RECONCILE, scene.sandbox), fresh())
    assert (fresh().backend_version, versions(connection), fresh().settle_due_at) == (2, ["destroyed", "live"], None)


# --------------------------------------------------------------------------------------------------------- races


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("exists", [False, True])
def test_race_of_two_operators_ends_with_one_set_of_credentials(exists: bool) -> None:
    """At least one operator succeeds, and the row and the backend agree on the last success."""
    scene = make_scene()
    for number in range(10):
        provider = f"provider-{number}"
        if exists:
            set_credentials(scene, "old", provider=provider)
        outcomes = race(
            partial(set_credentials, scene, "first", provider=provider),
            partial(set_credentials, scene, "second", provider=provider),
        )
        successful = [each for each in outcomes if isinstance(each, ProviderConnection)]
        assert successful, outcomes
        assert all(isinstance(each, StateConflictError) for each in outcomes if each not in successful), outcomes
        run_maintenance(later=WRITE_WITHIN)
        (row,) = list_connections(scene.sandbox).filter(provider=provider)
        newest = max(successful, key=lambda each: each.backend_version or 0)
        assert (row.backend_version, read_credentials(row)) == (newest.backend_version, read_credentials(newest))
        assert versions(row).count("live") == 1
    assert verify_audit().first_broken is None


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_race_of_replacing_and_removing_leaves_no_unknown_version() -> None:
    """In either order, a removed connection's path is empty in the end."""
    scene = make_scene()
    for number in range(10):
        connection = set_credentials(scene, "old", provider=f"provider-{number}")
        first, second = (
            ProviderConnection.objects.select_related("account__merchant").get(pk=connection.pk) for _ in "12"
        )
        race(partial(replace, scene, first, "new"), partial(remove, scene, second))
        run_maintenance(later=WRITE_WITHIN)
        row = ProviderConnection.objects.select_related("account__merchant").get(pk=connection.pk)
        assert (row.removed_at is None) == (versions(row).count("live") == 1)
        assert (row.removed_at is None) or versions(row) == []
