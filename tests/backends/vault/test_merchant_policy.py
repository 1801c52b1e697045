"""What a merchant's own backend reads on a real server: its keys and connections of one environment, nothing else.

The merchant is an identity entity with `account_id`, logs in by its own AppRole and has the merchant policy of that
environment. The platform's payment service reads in the same way on behalf of an account.
"""

from collections.abc import Callable, Iterator
from typing import Any

import hvac
import pytest

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER
from keyvault.access.roles import Role
from keyvault.backends.base import BackendDeniedError, BackendMissingError
from keyvault.backends.vault.client import open_client
from keyvault.backends.vault.layout import MERCHANT_POLICY, SecretsEngine
from keyvault.domain.environments import Environment
from keyvault.domain.issuance import Delivery
from keyvault.domain.plaintext import Plaintext
from keyvault.management.json_command import call
from keyvault.models import Account, Key, ProviderConnection
from keyvault.services.keys.credentials import find_delivery_location
from keyvault.services.secrets.provider_connections import (
    describe_connection,
    forget_connection,
    remove_connection,
    set_connection,
    settle_connection,
)
from tests.admin.desk import address, browser, text_of
from tests.factories import PRODUCTION, SANDBOX, account, grant, issue, make_merchant, now, the_operator
from tests.servers.openbao import VaultOnDisk

from .installation import InstalledVault, installed, serving_from

pytestmark = [pytest.mark.database, pytest.mark.django_db(transaction=True)]

Enrol = Callable[..., hvac.Client]


@pytest.fixture
def enrol(vault_service: InstalledVault) -> Iterator[Enrol]:
    """Return a function that registers a merchant's backend on the server, as an administrator does, and logs it in."""
    entities: list[str] = []

    def enrol_backend(name: str, *environments: Environment, **metadata: str) -> hvac.Client:
        return _enrol(vault_service, entities, name, environments, metadata)

    yield enrol_backend
    for entity in entities:
        vault_service.admin.secrets.identity.delete_entity(entity)


def _enrol(
    made: InstalledVault,
    entities: list[str],
    name: str,
    environments: tuple[Environment, ...],
    metadata: dict[str, str],
) -> hvac.Client:
    admin: Any = made.admin
    role = f"{made.layout.prefix}-backend-{name}"
    policies = [made.layout.policy(MERCHANT_POLICY, environment) for environment in environments]
    admin.auth.approle.create_or_update_approle(role, token_policies=policies, token_no_default_policy=True)
    role_id = admin.auth.approle.read_role_id(role)["data"]["role_id"]
    entity = admin.secrets.identity.create_or_update_entity(name=role, metadata=metadata)["data"]["id"]
    entities.append(entity)
    accessor = admin.sys.list_auth_methods()["data"]["approle/"]["accessor"]
    admin.secrets.identity.create_or_update_entity_alias(name=role_id, canonical_id=entity, mount_accessor=accessor)
    secret_id = admin.auth.approle.generate_secret_id(role)["data"]["secret_id"]
    answer = open_client(made.server).auth.approle.login(role_id, secret_id, use_token=False)
    return open_client(made.server, Plaintext(answer["auth"]["client_token"]))


def read(client: hvac.Client, mount: str, path: str) -> dict[str, Any]:
    answer = client.secrets.kv.v2.read_secret_version(path, mount_point=mount, raise_on_deleted_version=True)
    body: dict[str, Any] = answer["data"]["data"]
    return body


def connect(place: Account, text: str) -> ProviderConnection:
    admin = the_operator("admin")
    return set_connection(grant(admin, P.CONNECTIONS_WRITE, place), place, "stripe", Plaintext(text))


def issue_and_connect(merchant_id: str, environment: Environment) -> tuple[Account, Key, str, ProviderConnection]:
    place = account(merchant_id, environment)
    key, text = issue(place)
    return place, key, text.reveal(), connect(place, f"secret of {place}")


def mounts(made: InstalledVault) -> dict[Environment, str]:
    return {each: made.layout.mount(SecretsEngine.KEYS, each) for each in Environment}


@pytest.fixture
def people(db: None) -> None:
    make_merchant("acme")
    make_merchant("globex")
    the_operator("admin", Role.KEY_ADMINISTRATOR)


@pytest.mark.parametrize("environment", Environment)
def test_merchant_reads_its_keys_and_connections_at_the_shown_places(
    people: None, vault_service: InstalledVault, enrol: Enrol, environment: Environment
) -> None:
    """The newest version is one flat object; console and commands show its place."""
    place, key, text, connection = issue_and_connect("acme", environment)
    client = enrol("acme", environment, account_id=str(place.pk))
    mount = mounts(vault_service)[environment]
    assert find_delivery_location(key.credential) == {
        "backend_mount": mount,
        "backend_path": key.credential.backend_path,
    }
    assert read(client, mount, key.credential.backend_path)["secret"] == text
    shown = describe_connection(connection)
    assert shown["backend_mount"] == mount
    body = read(client, shown["backend_mount"], shown["backend_path"])
    assert body.pop("write_id")
    assert body == {
        "schema": "1",
        "secret": f"secret of {place}",
        "connection_id": shown["connection_id"],
        "provider": "stripe",
        "environment": environment.value,
        "mode": {SANDBOX: "test", PRODUCTION: "live"}[environment],
    }


def test_merchant_reads_nothing_of_another_merchant_or_of_the_other_environment(
    people: None, vault_service: InstalledVault, enrol: Enrol
) -> None:
    """This holds with its own environment's policy and when an administrator granted both by mistake."""
    own, _, _, mine = issue_and_connect("acme", SANDBOX)
    others = [
        issue_and_connect("acme", PRODUCTION),
        issue_and_connect("globex", SANDBOX),
        issue_and_connect("globex", PRODUCTION),
    ]
    clients = [
        enrol("acme", SANDBOX, account_id=str(own.pk)),
        enrol("acme-careless", SANDBOX, PRODUCTION, account_id=str(own.pk)),
    ]
    for client in clients:
        assert read(client, mounts(vault_service)[SANDBOX], mine.backend_path)
        for place, key, _, connection in others:
            mount = mounts(vault_service)[Environment(place.environment)]
            for path in (key.credential.backend_path, connection.backend_path):
                with pytest.raises(BackendDeniedError):
                    read(client, mount, path)


def test_merchant_without_an_account_id_reads_nothing(
    people: None, vault_service: InstalledVault, enrol: Enrol
) -> None:
    """A template without a value grants nothing, also not for paths that begin with an empty segment."""
    _, key, _, connection = issue_and_connect("acme", SANDBOX)
    mount = mounts(vault_service)[SANDBOX]
    for number, metadata in enumerate(({}, {"account_id": ""}, {"merchant_id": "acme"}, {"account_id": "*"})):
        client = enrol(f"nobody-{number}", SANDBOX, **metadata)
        for path in (key.credential.backend_path, connection.backend_path):
            with pytest.raises(BackendDeniedError):
                read(client, mount, path)


def test_merchant_cannot_list_write_or_destroy(people: None, vault_service: InstalledVault, enrol: Enrol) -> None:
    """It only reads the places it was given: no list, no metadata, no write, no destroy, nothing of the service's
    own.
    """
    place, _, _, connection = issue_and_connect("acme", SANDBOX)
    client: Any = enrol("acme", SANDBOX, account_id=str(place.pk))
    path, layout = connection.backend_path, vault_service.layout
    kv, mount = client.secrets.kv.v2, layout.mount(SecretsEngine.KEYS, SANDBOX)
    refused: list[Callable[[], Any]] = [
        lambda: kv.list_secrets("", mount_point=mount),
        lambda: kv.list_secrets(f"{place.pk}/", mount_point=mount),
        lambda: kv.read_secret_metadata(path, mount_point=mount),
        lambda: kv.create_or_update_secret(path, {"secret": "x"}, cas=1, mount_point=mount),
        lambda: kv.create_or_update_secret(f"{place.pk}/new", {"secret": "x"}, cas=0, mount_point=mount),
        lambda: kv.delete_latest_version_of_secret(path, mount_point=mount),
        lambda: kv.delete_secret_versions(path, [1], mount_point=mount),
        lambda: kv.undelete_secret_versions(path, [1], mount_point=mount),
        lambda: kv.destroy_secret_versions(path, [1], mount_point=mount),
        lambda: kv.delete_metadata_and_all_versions(path, mount_point=mount),
        lambda: kv.read_configuration(mount_point=mount),
        lambda: read(client, layout.mount(SecretsEngine.PEPPERS, SANDBOX), "hmac"),
        lambda: client.secrets.transit.sign_data(
            "audit", "eA==", mount_point=layout.mount(SecretsEngine.SIGNING, SANDBOX)
        ),
        lambda: client.sys.list_policies(),
    ]
    for attempt in refused:
        with pytest.raises(BackendDeniedError):
            attempt()
    assert read(client, mount, path)["secret"] == f"secret of {place}"


def test_console_and_commands_show_where_the_merchant_reads(people: None, vault_service: InstalledVault) -> None:
    """The console's pages and the commands show mount and path, and no secret."""
    place, key, text, connection = issue_and_connect("acme", SANDBOX)
    shown = {"backend_mount": mounts(vault_service)[SANDBOX], "backend_path": connection.backend_path}
    (listed,) = call("list_connections", "--merchant", "acme", "--environment", "sandbox")["connections"]
    assert shown.items() <= listed.items()
    shown = call("show_key", key.key_id)
    assert shown["backend_path"] == key.credential.backend_path
    client = browser(the_operator("admin"))
    pages = [
        client.get(address("keyvault_providerconnection_change", connection.pk)),
        client.get(address("keyvault_credential_change", key.credential.pk)),
    ]
    for page, path in zip(pages, (connection.backend_path, key.credential.backend_path), strict=True):
        assert path in text_of(page)
        assert shown["backend_mount"] in text_of(page)
        assert text not in text_of(page)
        assert f"secret of {place}" not in text_of(page)


def test_key_without_secret_backend_delivery_has_no_reading_place(people: None, vault_service: InstalledVault) -> None:
    key, _ = issue(account("acme", SANDBOX), delivery=Delivery.SHOW_ONCE)
    assert find_delivery_location(key.credential) == {}


def test_connection_on_a_real_server_is_replaced_and_removed(
    people: None, vault_service: InstalledVault, enrol: Enrol
) -> None:
    """Each step uses its own role: written, replaced, the old version destroyed, the path forgotten."""
    place = account("acme", SANDBOX)
    client, mount = enrol("acme", SANDBOX, account_id=str(place.pk)), mounts(vault_service)[SANDBOX]
    connect(place, "first")
    connection = connect(place, "second")
    path = connection.backend_path
    assert read(client, mount, path)["secret"] == "second"
    work = grant(WORKER, P.BACKEND_RECONCILE, place)
    settle_connection(work, connection)
    kept = vault_service.admin.secrets.kv.v2.read_secret_metadata(path, mount_point=mount)["data"]["versions"]
    assert [each["destroyed"] for _, each in sorted(kept.items())] == [True, False]
    remove_connection(grant(the_operator("admin"), P.CONNECTIONS_WRITE, place), connection)
    forget_connection(work, connection)
    with pytest.raises(BackendMissingError):
        read(client, mount, path)
    with pytest.raises(BackendMissingError):
        vault_service.admin.secrets.kv.v2.read_secret_metadata(path, mount_point=mount)
    assert connection.forgotten_at is not None
    assert connection.forgotten_at <= now()


def test_connection_credentials_are_not_in_the_servers_audit_log(
    people: None, vault_on_disk: VaultOnDisk, tmp_path: Any
) -> None:
    """The server logs a keyed digest of the stored data, never the text."""
    secret, folder = "sk_test_" + "Zq7" * 20, tmp_path / "logins"
    folder.mkdir(mode=0o700)
    with installed(vault_on_disk, folder) as made, serving_from(made):
        connection = connect(account("acme", SANDBOX), secret)
        connect(account("acme", SANDBOX), f"{secret}2")
        settle_connection(grant(WORKER, P.BACKEND_RECONCILE, connection.account), connection)
    log = vault_on_disk.audit_log.read_text()
    assert connection.backend_path in log
    assert secret not in log
