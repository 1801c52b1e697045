"""Rotation of the local keystore's master key, killed anywhere and run again."""

import base64
import json
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from allauth.mfa.models import Authenticator
from django.core.exceptions import ImproperlyConfigured

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST
from keyvault.access.roles import Role
from keyvault.backends import local_rekeying
from keyvault.backends.base import BackendDeniedError, BackendInvalidError, BackendUnavailableError, Mount
from keyvault.backends.local import LocalKeystore
from keyvault.backends.local_rekeying import Rekeying
from keyvault.backends.private_files import write_private_file
from keyvault.backends.vault.bootstrap import make_logins
from keyvault.backends.vault.layout import WRAPPING_KEY, SecretsEngine, VaultRole
from keyvault.domain.digests import PepperSet
from keyvault.domain.errors import RequestInvalidError, StateConflictError
from keyvault.domain.plaintext import Plaintext
from keyvault.models import AuditEntry, Operator
from keyvault.services.operators.operators import disable_operator
from keyvault.services.recording.transaction import recorded
from keyvault.services.secrets import master_key
from keyvault.services.secrets.backend import (
    make_wrapped_master_key,
    open_keystore,
    secret_backend,
    unwrap_master_key,
    vault_backend,
)
from keyvault.services.secrets.master_key import rotate_master_key
from keyvault.services.sessions.second_factors import decrypt_seed, encrypt_seed
from tests.backends.vault.fake import FakeVault, refused, running_fake
from tests.backends.vault.installation import InstalledVault
from tests.factories import grant, make_operator
from tests.killing import KILLED_MASTER_KEY_ROTATION, KilledError
from tests.management.command_line import run_command_line
from tests.services.revocations.test_restore_drill import CREATE, START, DrillHost, SqliteCopy

pytestmark = pytest.mark.django_db

RECORDS = 8
LOGIN = "keyvault-unwrapper-service"
SEED = Plaintext("JBSWY3DPEHPK3PXP")


@pytest.fixture
def folder(tmp_path: Path, settings: Any) -> Iterator[Path]:
    """A data folder of the test's own, with a keystore of a few records, one of them destroyed."""
    settings.DATA_DIR = tmp_path
    secret_backend.cache_clear()
    store = LocalKeystore(tmp_path)
    for number in range(RECORDS):
        store.put(Mount.SANDBOX, f"path {number}", Plaintext(f"secret {number}"), {"n": "1"}, expected_version=0)
    store.put(Mount.SANDBOX, "path 0", Plaintext("newer"), {"n": "2"}, expected_version=1)
    store.put(Mount.PRODUCTION, "gone", Plaintext("destroyed"), {}, expected_version=0)
    store.destroy(Mount.PRODUCTION, "gone", 1)
    del store  # which holds the lock
    with mock.patch.object(local_rekeying, "BATCH", 3), mock.patch.object(master_key, "BATCH", 2):
        yield tmp_path
    secret_backend.cache_clear()


def add_factors() -> None:
    """Give three operators an authenticator app and recovery codes, and one a passkey, which has no secret."""
    for number in range(3):
        make_operator(f"operator{number}")
        row = Operator.objects.get(username=f"operator{number}")
        with recorded(grant(HOST, P.OPERATORS_ENROLL), P.OPERATORS_ENROLL, "test.enrolled"):
            Authenticator(user=row, type="totp", data={"secret": encrypt_seed(SEED), "last_counter": 7}).save()
            Authenticator(user=row, type="recovery_codes", data={"seed": encrypt_seed(SEED), "used_mask": 5}).save()
            Authenticator(user=row, type="webauthn", data={"credential": {}, "name": "key"}).save()
    secret_backend.cache_clear()


def rotate(new_key_file: Path | None = None, *, should_wrap: bool | None = None) -> Any:
    return rotate_master_key(grant(HOST, P.INSTALLATION_MAINTAIN), new_key_file, should_wrap=should_wrap)


def require_whole(folder: Path, former_key: str) -> None:
    """Every secret can be read under a key that is not the former one, and nothing under the former one."""
    key = (folder / "master.key").read_text()
    assert key.strip() != former_key
    assert not (folder / "master.key.new").exists()
    store = open_keystore(folder, "")
    for number in range(1, RECORDS):
        assert store.read(Mount.SANDBOX, f"path {number}").secret.reveal() == f"secret {number}"
    assert store.read(Mount.SANDBOX, "path 0").labels == {"n": "2"}
    assert store.read(Mount.SANDBOX, "path 0", 1).secret.reveal() == "secret 0"
    for row in Authenticator.objects.filter(user__is_active=True).exclude(type="webauthn"):
        assert decrypt_seed(row.data.get("secret") or row.data["seed"]).reveal() == SEED.reveal()
    assert {row.data["last_counter"] for row in Authenticator.objects.filter(type="totp")} <= {7}
    secret_backend.cache_clear()
    with pytest.raises(ImproperlyConfigured, match="master key is not the one"):
        open_keystore(folder, former_key)


def read_key(folder: Path) -> str:
    return (folder / "master.key").read_text().strip()


def test_master_key_rotation_encrypts_everything_again(folder: Path) -> None:
    """Guarantee: afterwards the former key opens nothing: no record, no seed of a second factor."""
    add_factors()
    former = read_key(folder)
    sealed = dict(read_sealed(folder))
    done = rotate()
    assert (done.records, done.second_factors, done.is_installed) == (RECORDS + 2, 6, True)
    require_whole(folder, former)
    now_sealed = dict(read_sealed(folder))
    assert sealed.keys() == now_sealed.keys()
    assert [place for place in sealed if sealed[place] == now_sealed[place] is not None] == []
    content = (folder / "keystore.sqlite3").read_bytes()
    assert [place for place, text in sealed.items() if text and text in content] == [], "old pages are overwritten"
    events = AuditEntry.objects.filter(event__in=["master_key.rotated", "second_factors.encrypted_again"])
    assert events.filter(event="master_key.rotated").count() == 1
    assert events.count() == 1 + 4, "one entry for each batch of two rows that has a seed"


def read_sealed(folder: Path) -> list[tuple[tuple[str, str, int], bytes | None]]:
    with closing(sqlite3.connect(folder / "keystore.sqlite3")) as connection:
        rows = connection.execute("SELECT mount, path, version, sealed FROM records").fetchall()
    return [((mount, path, version), sealed) for mount, path, version, sealed in rows]


@contextmanager
def killed_at(target: Any, name: str, call: int, *, after: bool) -> Iterator[None]:
    """Kill the run before or after this call of a function."""
    real, count = getattr(target, name), iter(range(1, 1000))

    def act(*arguments: Any, **options: Any) -> Any:
        is_it = next(count) == call
        if is_it and not after:
            raise KilledError
        result = real(*arguments, **options)
        if is_it:
            raise KilledError
        return result

    with mock.patch.object(target, name, act):
        yield


KILLS: list[tuple[Any, str, int]] = [
    (Rekeying, "begin", 1),
    *((Rekeying, "encrypt_batch", number) for number in (1, 2, 3, 4)),
    *((Rekeying, "_encrypt_record", number) for number in (1, 5, 9)),
    *((Rekeying, "encrypt_text", number) for number in (1, 7, 10, 12)),  # six of them check only
    (master_key, "recorded", 2),
    (Rekeying, "finish", 1),
    (master_key, "write_private_file", 1),
    (master_key, "remove_private_file", 1),
]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kill", KILLS, ids=lambda kill: f"{kill[1]} {kill[2]}")
def test_master_key_rotation_killed_anywhere_is_continued(kill: Any, after: bool, folder: Path) -> None:
    """Guarantee: a killed run loses nothing. Until it is continued no process opens the half-encrypted keystore."""
    add_factors()
    former = read_key(folder)
    with killed_at(*kill, after=after), pytest.raises(KilledError):
        rotate()
    with closing(sqlite3.connect(folder / "keystore.sqlite3")) as connection:
        try:
            is_begun = connection.execute("SELECT 1 FROM master_key_rotation").fetchone() is not None
        except sqlite3.OperationalError:
            is_begun = False
    if is_begun or (kill[1], after) == ("finish", True):
        with pytest.raises(ImproperlyConfigured, match=r"unfinished.*rotate_master_key"):
            LocalKeystore(folder)
    rotate()
    require_whole(folder, former)


def test_master_key_rotation_on_a_full_disk_names_the_cause_and_is_continued(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guarantee: no traceback. As on a full disk, SQLite ends the transaction itself."""
    former = read_key(folder)
    with closing(sqlite3.connect(folder / "keystore.sqlite3", isolation_level=None)) as connection:
        connection.execute(
            "CREATE TRIGGER full BEFORE UPDATE ON records WHEN OLD.path = 'path 4' "
            "BEGIN SELECT RAISE(ROLLBACK, 'disk is full'); END"
        )
        assert run_command_line("rotate_master_key") == 1
        refusal = capsys.readouterr().err
        assert "Run the command again" in refusal
        assert "disk is full" in refusal
        connection.execute("DROP TRIGGER full")
    rotate()
    require_whole(folder, former)


def test_master_key_rotation_is_refused_while_a_process_has_the_keystore_open(folder: Path) -> None:
    """Guarantee: no process writes with the former key during the rotation."""
    store = LocalKeystore(folder)
    former, sealed = read_key(folder), read_sealed(folder)
    with pytest.raises(StateConflictError, match="Stop every server"):
        rotate()
    assert (read_key(folder), read_sealed(folder)) == (former, sealed)
    assert not (folder / "master.key.new").exists(), "a later --wrap would take it for that of an unfinished rotation"
    del store
    rotate()
    require_whole(folder, former)


def test_keystore_is_not_opened_during_a_rotation(folder: Path) -> None:
    new_key = base64.b64encode(bytes(32)).decode()
    with (
        local_rekeying.rekeying(folder, read_key(folder), lambda: new_key),
        pytest.raises(ImproperlyConfigured, match="is being rotated"),
    ):
        LocalKeystore(folder)


@pytest.fixture
def new_key_file(tmp_path: Path) -> Path:
    path = tmp_path / "new-key"
    path.touch(mode=0o600)
    path.write_text(base64.b64encode(bytes(range(32))).decode())
    return path


def test_master_key_of_the_environment_is_rotated_with_a_key_file(
    folder: Path, new_key_file: Path, settings: Any
) -> None:
    add_factors()
    former = read_key(folder)
    (folder / "master.key").unlink()
    settings.MASTER_KEY = former
    with pytest.raises(RequestInvalidError, match="--new-key-file"):
        rotate()
    with killed_at(Rekeying, "encrypt_text", 9, after=True), pytest.raises(KilledError):
        rotate(new_key_file)
    other = folder / "other-key"
    other.touch(mode=0o600)
    other.write_text(base64.b64encode(b"o" * 32).decode())
    with pytest.raises(StateConflictError, match="another new master key"):
        rotate(other)
    done = rotate(new_key_file)
    assert not done.is_installed
    assert not (folder / "master.key").exists()
    with pytest.raises(ImproperlyConfigured, match="master key is not the one"):
        LocalKeystore(folder, former)
    new_key = new_key_file.read_text()
    assert LocalKeystore(folder, new_key).read(Mount.SANDBOX, "path 1").secret.reveal() == "secret 1"
    assert not rotate(new_key_file).records, "run again before the setting was changed: nothing is left"
    settings.MASTER_KEY = new_key
    with pytest.raises(StateConflictError, match="present one"):
        rotate(new_key_file)


def test_master_key_rotation_refuses_wrong_keys(folder: Path, new_key_file: Path, settings: Any) -> None:
    with pytest.raises(RequestInvalidError, match="Omit --new-key-file"):
        rotate(new_key_file)
    settings.MASTER_KEY = base64.b64encode(b"x" * 32).decode()
    with pytest.raises(StateConflictError, match="under neither"):
        rotate(new_key_file)
    settings.MASTER_KEY, settings.IS_VAULT = "", True
    with pytest.raises(RequestInvalidError, match="Vault"):
        rotate()
    settings.IS_VAULT = False
    former = read_key(folder)
    rotate()
    require_whole(folder, former)


def require_untouched(folder: Path, key: str, sealed: Any) -> None:
    """The service can still be started with the present key."""
    assert (read_key(folder), read_sealed(folder)) == (key, sealed)
    assert not (folder / "master.key.new").exists()
    assert LocalKeystore(folder).read(Mount.SANDBOX, "path 1").secret.reveal() == "secret 1"


def test_master_key_rotation_does_not_begin_with_an_altered_record(folder: Path) -> None:
    """Guarantee: a rotation that cannot end does not begin, because no process starts before it has ended."""
    with closing(sqlite3.connect(folder / "keystore.sqlite3", isolation_level=None)) as connection:
        connection.execute("UPDATE records SET sealed = zeroblob(40) WHERE path = 'path 4'")
    key, sealed = read_key(folder), read_sealed(folder)
    with pytest.raises(BackendInvalidError, match="from a backup") as refused:
        rotate()
    assert "sandbox/path 4@1" in refused.value.internal
    require_untouched(folder, key, sealed)


def alter_seed(username: str, text: str) -> None:
    Authenticator.objects.filter(user__username=username, type="totp").update(data={"secret": text, "last_counter": 7})


def test_master_key_rotation_does_not_begin_with_unreadable_second_factors(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guarantee: an operator's seed of another store or key ends no service; killed or not, a reset lets it go on."""
    add_factors()
    make_operator("admin", Role.KEY_ADMINISTRATOR)
    make_operator("approver", Role.APPROVER)
    alter_seed("operator0", "vault:v1:c2VlZA==")
    alter_seed("operator1", base64.b64encode(bytes(60)).decode())
    alter_seed("operator2", "vault:v1:c2VlZA==")
    disable_operator(grant(HOST, P.OPERATORS_WRITE), Operator.objects.get(username="operator2"))
    key, sealed = read_key(folder), read_sealed(folder)
    assert run_command_line("rotate_master_key") == 1
    refusal = capsys.readouterr().err
    assert "decrypted: operator0, operator1." in refusal
    assert "manage.py reset_operator_factors" in refusal
    require_untouched(folder, key, sealed)
    by_two = ("--requested-by", "admin", "--approved-by", "approver", "--reason", "other key")
    assert run_command_line("reset_operator_factors", "operator0", *by_two) == 0
    alter_seed("operator1", encrypt_seed(SEED))
    secret_backend.cache_clear()
    with killed_at(Rekeying, "encrypt_batch", 2, after=True), pytest.raises(KilledError):
        rotate()
    alter_seed("operator1", "vault:v1:c2VlZA==")
    with pytest.raises(StateConflictError, match=r"decrypted: operator1\."):
        rotate()
    assert run_command_line("reset_operator_factors", "operator1", *by_two) == 0
    rotate()
    require_whole(folder, key)


def test_rotate_master_key_command_says_what_to_do_next(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    former = read_key(folder)
    assert run_command_line("rotate_master_key", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["records"] == RECORDS + 2
    assert answer["next"][0] == "start the service"
    require_whole(folder, former)
    store = LocalKeystore(folder)
    assert run_command_line("rotate_master_key") == 1
    assert "Stop every server" in capsys.readouterr().err
    assert store.read(Mount.SANDBOX, "path 1").secret.reveal() == "secret 1"


# --- a wrapped master key ---------------------------------------------------------------------------------------


@pytest.fixture
def fake(folder: Path, settings: Any) -> Iterator[FakeVault]:
    """A Vault of which this host has the login of `keystore` only."""
    with running_fake() as made:
        settings.VAULT_ADDRESS = made.address
        settings.VAULT_CREDENTIALS_DIR = folder / "vault"
        settings.VAULT_CREDENTIALS_DIR.mkdir(mode=0o700)
        for ending, text in zip(("role_id", "secret_id"), made.make_role(LOGIN), strict=True):
            write_private_file(settings.VAULT_CREDENTIALS_DIR / f"{LOGIN}.{ending}", text)
        vault_backend.cache_clear()
        yield made
        vault_backend.cache_clear()


def test_master_key_is_wrapped_and_stays_so_until_it_is_to_be_readable_again(folder: Path, fake: FakeVault) -> None:
    """Guarantee: no file has the wrapped key in readable form; without the Vault nothing opens the keystore."""
    add_factors()
    former = read_key(folder)
    rotate(should_wrap=True)
    require_whole(folder, former)
    wrapped = read_key(folder)
    assert wrapped.startswith("vault:v1:")
    plain = unwrap_master_key(wrapped)
    assert len(base64.b64decode(plain)) == 32
    assert [file.name for file in folder.iterdir() if file.is_file() and plain.encode() in file.read_bytes()] == []
    with pytest.raises(ImproperlyConfigured, match="32 bytes in base64"):
        LocalKeystore(folder)
    rotate()
    require_whole(folder, wrapped)
    assert read_key(folder).startswith("vault:v1:")
    second = read_key(folder)
    rotate(should_wrap=False)
    require_whole(folder, second)
    fake.is_sealed = True
    vault_backend.cache_clear()
    assert LocalKeystore(folder, read_key(folder)).read(Mount.SANDBOX, "path 1").secret.reveal() == "secret 1"


WRAPPED_KILLS = [
    kill
    for kill in KILLS
    if (kill[1], kill[2]) in {("begin", 1), ("encrypt_batch", 2), ("finish", 1)} or "private_file" in kill[1]
]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kill", WRAPPED_KILLS, ids=lambda kill: f"{kill[1]} {kill[2]}")
def test_wrapping_killed_anywhere_is_continued(kill: Any, after: bool, folder: Path, fake: FakeVault) -> None:
    former = read_key(folder)
    with killed_at(*kill, after=after), pytest.raises(KilledError):
        rotate(should_wrap=True)
    rotate()
    require_whole(folder, former)
    assert read_key(folder).startswith("vault:v1:")


def test_wrapping_does_not_continue_a_rotation_to_a_readable_key(folder: Path, fake: FakeVault) -> None:
    former = read_key(folder)
    with killed_at(Rekeying, "encrypt_batch", 2, after=True), pytest.raises(KilledError):
        rotate()
    with pytest.raises(StateConflictError, match="is not wrapped"):
        rotate(should_wrap=True)
    rotate()
    require_whole(folder, former)


def test_keystore_with_a_wrapped_key_opens_once_the_vault_answers(folder: Path, fake: FakeVault) -> None:
    """Guarantee: an outage of the Vault stops no process that has the keystore open, and loses nothing of others."""
    rotate(should_wrap=True)
    store = open_keystore(folder, "")
    fake.is_sealed = True
    vault_backend.cache_clear()
    with pytest.raises(BackendUnavailableError):
        secret_backend()
    assert store.read(Mount.SANDBOX, "path 1").secret.reveal() == "secret 1"
    fake.is_sealed = False
    vault_backend.cache_clear()
    assert secret_backend().read(Mount.SANDBOX, "path 1").secret.reveal() == "secret 1"
    secret_backend.cache_clear()


def test_wrapped_key_of_another_vault_names_what_to_check(folder: Path, fake: FakeVault) -> None:
    rotate(should_wrap=True)
    fake.fail(refused(400, "cipher: message authentication failed"), "/decrypt/")
    with pytest.raises(ImproperlyConfigured, match=r"KEYVAULT_VAULT_PREFIX.*check_vault --host keystore"):
        open_keystore(folder, "")
    fake.delete_role(LOGIN)
    fake.revoke_all()
    with pytest.raises(BackendDeniedError):
        open_keystore(folder, "")


def test_wrapped_master_key_of_the_environment(folder: Path, fake: FakeVault, settings: Any, tmp_path: Path) -> None:
    """The Vault's own command line makes the new key, and its readable form is on no disk."""
    settings.MASTER_KEY = read_key(folder)
    (folder / "master.key").unlink()
    with pytest.raises(RequestInvalidError, match="Omit --wrap"):
        rotate(should_wrap=True)
    path = tmp_path / "wrapped-key"
    write_private_file(path, make_wrapped_master_key())
    rotate(path)
    settings.MASTER_KEY = path.read_text()
    assert secret_backend().read(Mount.SANDBOX, "path 1").secret.reveal() == "secret 1"
    secret_backend.cache_clear()


def test_master_key_is_wrapped_by_a_real_server(
    folder: Path, installed_vault: InstalledVault, settings: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guarantee: an older version of the wrapping key still unwraps, and the host's one login suffices."""
    made, former = installed_vault, read_key(folder)
    name = made.layout.login(VaultRole.UNWRAPPER, PepperSet.SERVICE)
    settings.VAULT_CREDENTIALS_DIR = folder / "vault"
    make_logins(made.admin, made.layout, [name], settings.VAULT_CREDENTIALS_DIR, wrap_seconds=None)
    settings.VAULT_ADDRESS, settings.VAULT_PREFIX = made.server.address, made.layout.prefix
    vault_backend.cache_clear()
    assert run_command_line("rotate_master_key", "--wrap") == 0
    require_whole(folder, former)
    mount = made.layout.mount(SecretsEngine.WRAPPING, PepperSet.SERVICE)
    made.admin.write_data(f"{mount}/keys/{WRAPPING_KEY}/rotate", data={})
    wrapped = read_key(folder)
    rotate()
    require_whole(folder, wrapped)
    assert (wrapped[:9], read_key(folder)[:9]) == ("vault:v1:", "vault:v2:")
    assert run_command_line("check_vault", "--host", "keystore") == 0
    made.admin.write_data(f"{mount}/keys/{WRAPPING_KEY}/config", data={"min_decryption_version": 2})
    open_keystore(folder, "")
    with pytest.raises(ImproperlyConfigured, match="has lost the wrapping key"):
        unwrap_master_key(wrapped)
    write_private_file(folder / "master.key", wrapped)
    capsys.readouterr()
    assert run_command_line("check_vault", "--host", "keystore") == 1
    assert "master key: It cannot be used" in capsys.readouterr().out
    made.admin.delete(f"sys/mounts/{mount}")
    capsys.readouterr()
    assert run_command_line("check_vault", "--host", "keystore") == 1
    assert "The mount is missing" in capsys.readouterr().out
    vault_backend.cache_clear()


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize("number", [1, 6])
def test_master_key_rotation_of_an_installation_killed_by_the_kernel_is_continued(number: int, tmp_path: Path) -> None:
    """Guarantee: kill -9 inside a transaction leaves a keystore that the next run finishes, and the service starts."""
    host = DrillHost(tmp_path, SqliteCopy(tmp_path))
    created = host.run_json("-c", CREATE)
    killed = host.run("-c", KILLED_MASTER_KEY_ROTATION, str(number))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    refused = host.run("-c", START)
    assert (refused.returncode, "manage.py rotate_master_key" in refused.stderr) == (1, True)
    assert "Traceback" not in refused.stderr
    done = host.run_json("manage.py", "rotate_master_key", "--json")
    assert done["records"] > 0
    assert host.run("-c", START).returncode == 0
    shown = host.run_json("manage.py", "show_key", created["kept"], "--json")
    assert shown["state"] == "active"
