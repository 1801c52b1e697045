"""Provider connections: written with check-and-set, replaced, removed, and put right after whatever died in between."""

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
from tests.services.conftest import Scene, make_scene
from tests.services.racing import race
from tests.services.rows import dump_tables, events_of, last_body

pytestmark = [pytest.mark.database, pytest.mark.django_db]

CHAIN = "account:acme/sandbox"


def put(scene: Scene, text: str, place: Account | None = None, provider: str = "stripe") -> ProviderConnection:
    into = place or scene.sandbox
    return set_connection(grant(scene.tam, P.CONNECTIONS_WRITE, into), into, provider, Plaintext(text))


def replace(scene: Scene, connection: ProviderConnection, text: str) -> ProviderConnection:
    return replace_connection(grant(scene.tam, P.CONNECTIONS_WRITE, connection.account), connection, Plaintext(text))


def take_away(scene: Scene, connection: ProviderConnection) -> None:
    remove_connection(grant(scene.tam, P.CONNECTIONS_WRITE, connection.account), connection)


def work(later: timedelta = timedelta(0)) -> None:
    """What a worker does that comes by."""
    at = now() + later
    for row in list_unsettled(at):
        settle_connection(grant(WORKER, P.BACKEND_RECONCILE, row.account, at=at), row)
    for row in list_to_forget(at):
        forget_connection(grant(WORKER, P.BACKEND_RECONCILE, row.account, at=at), row)


def stored(connection: ProviderConnection, version: int | None = None) -> str:
    """What a merchant's backend reads."""
    mount = Mount(connection.account.environment)
    return secret_backend().read(mount, connection.backend_path, version).secret.reveal()


def versions(connection: ProviderConnection) -> list[str]:
    mount = Mount(connection.account.environment)
    return [each.state.value for each in secret_backend().versions(mount, connection.backend_path)]


def fresh() -> ProviderConnection:
    """The one row, as it is in the database."""
    row: ProviderConnection = ProviderConnection.objects.select_related("account__merchant").get()
    return row


def write_as_a_stranger(connection: ProviderConnection, expected_version: int) -> None:
    labels = {"connection_id": "con_of_somebody_else"}
    path = connection.backend_path
    secret_backend().put(Mount.SANDBOX, path, Plaintext("theirs"), labels, expected_version=expected_version)


class Killed(BaseException):
    """As a signal would: nothing catches it."""


def dies(*_: Any, **__: Any) -> None:
    raise Killed


def unavailable(*_: Any, **__: Any) -> None:
    raise BackendUnavailableError("The backend is sealed.")


def after(real: Callable[..., Any], then: Callable[[], Any]) -> Callable[..., Any]:
    """The real call, which has its effect, and then something else in the place of its answer."""

    def call(*arguments: Any, **named: Any) -> Any:
        real(*arguments, **named)
        return then()

    return call


def before(real: Callable[..., Any], first: Callable[[], Any]) -> Callable[..., Any]:
    """Something else, once, and then the real call."""
    pending = [first]

    def call(*arguments: Any, **named: Any) -> Any:
        if pending:
            pending.pop()()
        return real(*arguments, **named)

    return call


# ------------------------------------------------------------------------------------------------- set and replaced


def test_connection_set_is_stored_at_its_own_place_with_labels_that_say_whose_it_is(scene: Scene) -> None:
    connection = put(scene, "sk_test_first")
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


@pytest.mark.parametrize(("environment", "mode"), [(SANDBOX, "test"), (PRODUCTION, "live")])
def test_connection_mode_is_that_of_the_environment(scene: Scene, environment: Environment, mode: str) -> None:
    """Test mode in sandbox, live in production (D11): nobody chooses it, and each is in its environment's own mount."""
    connection = put(scene, "secret", account("acme", environment))
    assert connection.mode == mode
    others = {Mount.SANDBOX, Mount.PRODUCTION} - {Mount(environment)}
    for mount in others:
        with pytest.raises(BackendMissingError):
            secret_backend().read(mount, connection.backend_path)


def test_connection_in_the_wrong_mode_is_refused_and_leaves_nothing(scene: Scene) -> None:
    """A live key is never stored where test keys belong."""
    with pytest.raises(RequestInvalidError):
        put(scene, "sk_live_51Hx")
    assert not ProviderConnection.objects.exists()


def test_connection_replaced_is_read_at_once_and_the_old_one_destroyed_by_the_worker(scene: Scene) -> None:
    """The new one stands before the old one goes, and nothing of the old one is left afterwards."""
    first = put(scene, "first")
    second = put(scene, "second")
    assert second.pk == first.pk
    assert stored(second) == "second"
    assert versions(second) == ["live", "live"]
    work()
    assert versions(second) == ["destroyed", "live"]
    assert stored(second) == "second"
    assert (fresh().backend_version, fresh().settle_due_at) == (2, None)
    assert events_of(CHAIN)[-3:] == ["connection.write_began", "connection.stored", "connection.settled"]
    assert last_body("connection.settled")["details"]["destroyed"] == [1]
    assert list_unsettled(now() + timedelta(days=1)) == []


def test_connection_settled_twice_writes_nothing_more(scene: Scene) -> None:
    put(scene, "first")
    work()
    rows = dump_tables()
    settle_connection(grant(WORKER, P.BACKEND_RECONCILE, scene.sandbox), fresh())
    assert dump_tables() == rows


def test_connection_of_another_provider_or_account_is_another_one(scene: Scene) -> None:
    make_merchant("globex")
    made = [
        put(scene, "a"),
        put(scene, "b", provider="adyen"),
        put(scene, "c", scene.production),
        put(scene, "d", account("globex")),
    ]
    assert len({each.backend_path for each in made}) == 4
    assert [stored(each) for each in made] == ["a", "b", "c", "d"]
    assert [each.provider for each in list_connections(scene.sandbox)] == ["adyen", "stripe"]


def test_connection_takes_the_permission_for_that_account(scene: Scene) -> None:
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


def test_connection_of_an_environment_that_another_process_serves_is_not_written_here(scene: Scene) -> None:
    """A process that is for sandbox alone touches nothing of production."""
    put(scene, "secret", scene.production)
    with override_settings(ENVIRONMENTS=(SANDBOX,)):
        with pytest.raises(NotFoundError):
            put(scene, "secret", scene.production)
        assert list_unsettled(now() + timedelta(days=1)) == []
        take_away(scene, fresh())
        assert list_to_forget(now() + timedelta(days=1)) == []


def test_connection_is_not_given_to_a_merchant_that_left(scene: Scene) -> None:
    connection = put(scene, "secret")
    with recorded(grant(scene.admin, P.MERCHANTS_OFFBOARD), P.MERCHANTS_OFFBOARD, "test.left"):
        scene.merchant.compare_and_swap(status="offboarded")
    with pytest.raises(StateConflictError, match="was offboarded"):
        put(scene, "secret", provider="adyen")
    with pytest.raises(StateConflictError, match="was offboarded"):
        replace(scene, connection, "secret")
    assert stored(connection) == "secret"


def test_connection_is_settled_and_forgotten_by_the_upkeep(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker comes by for it, one connection's trouble is not the next one's, and what failed is tried again."""
    for provider in ("adyen", "stripe"):
        for text in ("first", "second"):
            put(scene, text, provider=provider)
    gone = put(scene, "gone", provider="gone")
    take_away(scene, gone)
    adyen, stripe = list_connections(scene.sandbox)
    with monkeypatch.context() as outage:
        outage.setattr(LocalKeystore, "versions", unavailable)
        maintenance.settle_connections_due()
    assert (versions(adyen), versions(stripe), versions(gone)) == (["live", "live"], ["live", "live"], ["live"])
    write_as_a_stranger(adyen, expected_version=2)
    maintenance.settle_connections_due()
    assert (versions(adyen), versions(stripe), versions(gone)) == (["live"] * 3, ["destroyed", "live"], [])


# ---------------------------------------------------------------------------------------------------------- removed


def test_connection_removed_is_erased_by_the_worker_and_its_row_stays(scene: Scene) -> None:
    """Every version goes, and that there ever was one; who set and removed it is still known."""
    connection = put(scene, "first")
    put(scene, "second")
    take_away(scene, fresh())
    assert list(list_connections(scene.sandbox)) == []
    work()
    assert versions(connection) == []
    assert fresh().forgotten_at is not None
    assert events_of(CHAIN)[-2:] == ["connection.removed", "connection.forgotten"]
    assert list_to_forget(now() + timedelta(days=1)) == []


def test_connection_removed_cannot_be_removed_or_replaced_again(scene: Scene) -> None:
    connection = put(scene, "first")
    take_away(scene, connection)
    with pytest.raises(StateConflictError, match="already removed"):
        take_away(scene, fresh())
    with pytest.raises(StateConflictError, match="is removed"):
        replace(scene, fresh(), "second")
    assert stored(connection) == "first"


def test_connection_set_after_a_removal_is_a_new_one_at_another_place(scene: Scene) -> None:
    first = put(scene, "first")
    take_away(scene, first)
    second = put(scene, "second")
    assert second.backend_path != first.backend_path
    work()
    assert (versions(first), stored(second)) == ([], "second")


def test_connection_that_stands_is_never_forgotten(scene: Scene) -> None:
    connection = put(scene, "first")
    with pytest.raises(StateConflictError, match="Only a removed"):
        forget_connection(grant(WORKER, P.BACKEND_RECONCILE, scene.sandbox), connection)
    assert stored(connection) == "first"


def test_connection_forgotten_while_the_backend_is_away_is_forgotten_later(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = put(scene, "first")
    take_away(scene, connection)
    with monkeypatch.context() as outage:
        outage.setattr(LocalKeystore, "forget", unavailable)
        with pytest.raises(BackendUnavailableError):
            work()
    assert fresh().forgotten_at is None
    work()
    assert versions(connection) == []


def test_connection_removed_in_the_middle_of_a_write_is_erased_once_that_is_over(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever writes is told so, the worker waits until no write can come any more, and nothing is left."""

    def meanwhile() -> None:
        take_away(scene, fresh())
        work()

    with monkeypatch.context() as raced:
        raced.setattr(LocalKeystore, "put", before(LocalKeystore.put, meanwhile))
        with pytest.raises(StateConflictError, match="removed in the meantime"):
            put(scene, "late")
    assert versions(fresh()) == ["live"]
    assert fresh().forgotten_at is None
    work(later=WRITE_WITHIN)
    assert versions(fresh()) == []


# --------------------------------------------------------------------------------------------- killed, lost, overtaken


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize(("where", "is_written"), [("put", False), ("answer", True), ("_note_stored", True)])
def test_connection_killed_in_the_middle_is_put_right_by_the_worker(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, is_there: bool, where: str, is_written: bool
) -> None:
    """Killed before or after the write: row and backend tell the same in the end, and one version lives."""
    if is_there:
        put(scene, "old")
    with monkeypatch.context() as killed:
        if where == "_note_stored":
            killed.setattr(provider_connections, where, dies)
        else:
            killed.setattr(LocalKeystore, "put", dies if where == "put" else after(LocalKeystore.put, dies))
        with pytest.raises(Killed):
            put(scene, "new")
    assert list_unsettled(now()) == [], "whoever writes has a while for it"
    work(later=WRITE_WITHIN)
    row = fresh()
    assert row.settle_due_at is None
    if not (is_there or is_written):
        assert (row.backend_version, row.stored_at, versions(row)) == (None, None, [])
        return
    assert stored(row) == ("new" if is_written else "old")
    assert row.backend_version == len(versions(row))
    assert versions(row).count("live") == 1
    assert row.stored_by == ("system:worker" if is_written else "operator:tam")


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("where", ["versions", "put", "answer", "_note_stored"])
def test_connection_killed_in_the_middle_and_set_again_is_whole(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, is_there: bool, where: str
) -> None:
    """Run again it goes on: at the same place, over its own write, and with one live version in the end."""
    if is_there:
        put(scene, "old")
    with monkeypatch.context() as killed:
        if where == "_note_stored":
            killed.setattr(provider_connections, where, dies)
        elif where == "answer":
            killed.setattr(LocalKeystore, "put", after(LocalKeystore.put, dies))
        else:
            killed.setattr(LocalKeystore, where, dies)
        with pytest.raises(Killed):
            put(scene, "new")
    put(scene, "new")
    work()
    row = fresh()
    assert (stored(row), versions(row).count("live")) == ("new", 1)
    assert row.backend_version == len(versions(row))
    assert verify_audit().first_broken is None


def test_connection_whose_write_s_reply_was_lost_is_found_by_reading_back(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No answer does not mean no write: what is stored says whose write it was."""
    with monkeypatch.context() as lossy:
        lossy.setattr(LocalKeystore, "put", after(LocalKeystore.put, unavailable))
        connection = put(scene, "first")
    assert (stored(connection), versions(connection), fresh().backend_version) == ("first", ["live"], 1)


def test_connection_not_written_because_the_backend_is_away_is_told_and_the_old_one_stands(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(scene, "old")
    for method in ("versions", "put"):
        with monkeypatch.context() as outage:
            outage.setattr(LocalKeystore, method, unavailable)
            with pytest.raises(BackendUnavailableError):
                put(scene, "new")
    assert (stored(fresh()), fresh().backend_version) == ("old", 1)
    work(later=WRITE_WITHIN)
    assert (versions(fresh()), fresh().settle_due_at) == (["live"], None)


def test_connection_written_by_two_at_once_keeps_the_first_and_tells_the_other(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check-and-set: the second never overwrites what it did not see, and learns that it came too late."""
    put(scene, "old")
    with monkeypatch.context() as raced:
        raced.setattr(LocalKeystore, "put", before(LocalKeystore.put, lambda: put(scene, "first")))
        with pytest.raises(StateConflictError, match="at the same time"):
            put(scene, "second")
    assert (stored(fresh()), fresh().backend_version) == ("first", 2)
    work(later=WRITE_WITHIN)
    assert versions(fresh()) == ["destroyed", "live"]


def test_connection_replaced_between_write_and_row_is_not_noted_backwards(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is late with the news of an older version does not write it over the newer one's."""
    put(scene, "old")
    with monkeypatch.context() as raced:
        raced.setattr(
            provider_connections, "_note_stored", before(provider_connections._note_stored, lambda: put(scene, "newer"))
        )
        with pytest.raises(StateConflictError, match="replaced"):
            put(scene, "overtaken")
    assert (stored(fresh()), fresh().backend_version) == ("newer", 3)
    work(later=WRITE_WITHIN)
    assert versions(fresh()) == ["destroyed", "destroyed", "live"]


def test_connection_row_written_meanwhile_takes_the_news_all_the_same(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that settles between write and row costs nobody the write."""
    put(scene, "old")

    def settle() -> None:
        settle_connection(grant(WORKER, P.BACKEND_RECONCILE, scene.sandbox), fresh())

    with monkeypatch.context() as raced:
        raced.setattr(provider_connections, "_note_stored", before(provider_connections._note_stored, settle))
        put(scene, "new")
    assert (fresh().backend_version, fresh().stored_by) == (2, "operator:tam")


# ----------------------------------------------------------------------------------------------------- foreign writers


def test_connection_s_place_that_a_stranger_wrote_to_is_never_overwritten(scene: Scene) -> None:
    """What cannot be attributed stays as it is, and a person is told."""
    connection = put(scene, "ours")
    write_as_a_stranger(connection, expected_version=1)
    with pytest.raises(ForeignWriterError):
        put(scene, "new")
    with pytest.raises(ForeignWriterError):
        settle_connection(grant(WORKER, P.BACKEND_RECONCILE, scene.sandbox), fresh())
    assert (stored(connection, 1), stored(connection, 2)) == ("ours", "theirs")
    assert (versions(connection), fresh().backend_version) == (["live", "live"], 1)


def test_connection_whose_write_met_a_stranger_s_is_told_so(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    put(scene, "ours")
    real = LocalKeystore.put
    with monkeypatch.context() as raced:

        def meanwhile() -> None:
            raced.setattr(LocalKeystore, "put", real)
            write_as_a_stranger(fresh(), expected_version=1)

        raced.setattr(LocalKeystore, "put", before(real, meanwhile))
        with pytest.raises(ForeignWriterError):
            put(scene, "new")
    assert stored(fresh()) == "theirs"


def test_connection_older_version_of_a_stranger_is_not_destroyed(scene: Scene) -> None:
    """One that somehow lies beneath ours is reported, not erased."""
    connection = put(scene, "ours")
    write_as_a_stranger(connection, expected_version=1)
    path = connection.backend_path
    labels = secret_backend().read(Mount.SANDBOX, path, 1).labels
    secret_backend().put(Mount.SANDBOX, path, Plaintext("ours again"), labels, expected_version=2)
    with pytest.raises(ForeignWriterError):
        settle_connection(grant(WORKER, P.BACKEND_RECONCILE, scene.sandbox), fresh())
    assert versions(connection) == ["destroyed", "live", "live"]
    assert stored(connection, 2) == "theirs"


def test_connection_of_a_backend_that_was_set_back_is_reported_and_not_taken_for_new(scene: Scene) -> None:
    """A restored Vault brings last year's credentials back: a person looks at that, and nobody notes them as stored."""
    connection = put(scene, "of last year")
    labels = secret_backend().read(Mount.SANDBOX, connection.backend_path, 1).labels
    replace(scene, fresh(), "of today")
    secret_backend().forget(Mount.SANDBOX, connection.backend_path)
    secret_backend().put(Mount.SANDBOX, connection.backend_path, Plaintext("of last year"), labels, expected_version=0)
    with pytest.raises(ForeignWriterError):
        settle_connection(grant(WORKER, P.BACKEND_RECONCILE, scene.sandbox), fresh())
    assert fresh().backend_version == 2


def test_connection_removed_is_not_forgotten_where_a_stranger_wrote(scene: Scene) -> None:
    """Erasing the path would erase what is not ours."""
    connection = put(scene, "ours")
    write_as_a_stranger(connection, expected_version=1)
    take_away(scene, fresh())
    with pytest.raises(ForeignWriterError):
        work()
    assert (stored(connection, 2), fresh().forgotten_at) == ("theirs", None)
    assert versions(connection) == ["destroyed", "live"], "what is ours goes all the same"


# -------------------------------------------------------------------------------------------------- never shown again


def test_connection_described_holds_what_is_known_and_nothing_that_is_stored(scene: Scene) -> None:
    connection = put(scene, "sk_test_never_shown")
    told = describe_connection(fresh())
    assert told == {
        "connection_id": connection.backend_path.partition("/")[2],
        "provider": "stripe",
        "mode": "test",
        "stored_at": connection.stored_at,
        "stored_by": "operator:tam",
        "backend_version": 1,
    }


def test_connection_s_credentials_are_in_no_row_no_file_and_no_log(
    scene: Scene, data_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dump of the database, the keystore's files and whatever was logged on all these ways hold none of it."""
    secret = "verysecret" + "Zq7" * 20
    with caplog.at_level("DEBUG"):
        connection = put(scene, secret)
        put(scene, f'{{"key": "{secret}"}}')
        with pytest.raises(RequestInvalidError):
            put(scene, f'{{"key": "{secret}"')
        with monkeypatch.context() as outage:
            outage.setattr(LocalKeystore, "put", unavailable)
            with pytest.raises(BackendUnavailableError):
                put(scene, secret)
        work(later=WRITE_WITHIN)
        take_away(scene, fresh())
    found = repr(dump_tables()).encode() + caplog.text.encode()
    found += b"".join(path.read_bytes() for path in sorted(data_dir.rglob("*")) if path.is_file())
    assert connection.backend_path.encode() in found, "the dump is the right one"
    for form in (secret.encode(), base64.b64encode(secret.encode())):
        assert form not in found


def test_connection_is_found_by_its_place_removed_or_not(scene: Scene) -> None:
    """What the reconciler asks of a path that is no credential's."""
    connection = put(scene, "first")
    assert find_by_path(SANDBOX, connection.backend_path) == connection
    assert find_by_path(PRODUCTION, connection.backend_path) is None
    take_away(scene, connection)
    assert find_by_path(SANDBOX, connection.backend_path) == connection
    assert find_by_path(SANDBOX, f"{scene.sandbox.pk}/con_{'0' * 20}") is None


def test_connection_settle_adopts_what_was_written_late(scene: Scene) -> None:
    """The nightly reconciler asks whatever the row says is owed: a write that nobody told of is found all the same."""
    connection = put(scene, "first")
    work()
    labels = secret_backend().read(Mount.SANDBOX, connection.backend_path).labels
    path = connection.backend_path
    secret_backend().put(Mount.SANDBOX, path, Plaintext("late"), labels, expected_version=1)
    settle_connection(grant(WORKER, P.BACKEND_RECONCILE, scene.sandbox), fresh())
    assert (fresh().backend_version, versions(connection), fresh().settle_due_at) == (2, ["destroyed", "live"], None)


# --------------------------------------------------------------------------------------------------------- real races


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("is_there", [False, True])
def test_race_of_two_operators_ends_with_one_s_credentials_and_a_row_that_says_so(is_there: bool) -> None:
    """Both at once, many times: at least one is told it is stored; whoever was told so last is what is read."""
    scene = make_scene()
    for number in range(10):
        provider = f"provider-{number}"
        if is_there:
            put(scene, "old", provider=provider)
        outcomes = race(
            partial(put, scene, "first", provider=provider), partial(put, scene, "second", provider=provider)
        )
        stood = [each for each in outcomes if isinstance(each, ProviderConnection)]
        assert stood, outcomes
        assert all(isinstance(each, StateConflictError) for each in outcomes if each not in stood), outcomes
        work(later=WRITE_WITHIN)
        (row,) = list_connections(scene.sandbox).filter(provider=provider)
        newest = max(stood, key=lambda each: each.backend_version or 0)
        assert (row.backend_version, stored(row)) == (newest.backend_version, stored(newest))
        assert versions(row).count("live") == 1
    assert verify_audit().first_broken is None


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_race_of_replacing_and_removing_leaves_nothing_that_nobody_knows() -> None:
    """Whichever comes first: a removed connection's place is empty in the end."""
    scene = make_scene()
    for number in range(10):
        made = put(scene, "old", provider=f"provider-{number}")
        mine, theirs = (ProviderConnection.objects.select_related("account__merchant").get(pk=made.pk) for _ in "12")
        race(partial(replace, scene, mine, "new"), partial(take_away, scene, theirs))
        work(later=WRITE_WITHIN)
        row = ProviderConnection.objects.select_related("account__merchant").get(pk=made.pk)
        assert (row.removed_at is None) == (versions(row).count("live") == 1)
        assert (row.removed_at is None) or versions(row) == []
