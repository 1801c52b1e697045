"""Single sign-on with OpenBao as the identity provider: a provider that was not written for these tests."""

import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import hvac
import pytest
import requests
from django.conf import settings
from django.test import Client, override_settings

from keyvault.access.roles import Role
from keyvault.access.single_sign_on import IdentityProvider
from keyvault.backends.vault.client import VaultServer, open_client
from keyvault.domain.plaintext import Plaintext
from keyvault.models import Operator
from keyvault.services.sessions.refusals import sign_in_refusals
from keyvault.services.sessions.single_sign_on import identity_provider_client
from keyvault.services.sessions.step_up import is_fresh
from tests.admin.desk import Desk
from tests.factories import PASSWORD
from tests.servers.openbao import RunningVault

from .test_single_sign_on import CALLBACK, assert_refused, begin, is_signed_in

OIDC = "identity/oidc"
MEMBER, OUTSIDER = "jane", "mallory"
"""Both are in the group with the role. Only the member is in the client's assignment."""

SIGN_INS = 5
"""Maximum sign-ins at OpenBao until one is young enough for `max_age`. Each takes milliseconds."""

pytestmark = pytest.mark.django_db


@dataclass
class OpenBao:
    """OpenBao's provider under a name of the test's own. `admin` may do everything on the server."""

    address: str
    admin: hvac.Client
    algorithm: str
    name: str = field(default_factory=lambda: f"t{secrets.token_hex(4)}")

    @property
    def issuer(self) -> str:
        return f"{self.address}/v1/{OIDC}/provider/{self.name}"

    def name_of(self, person: str) -> str:
        return f"{self.name}-{person}"

    def set_up(self, stack: ExitStack) -> IdentityProvider:
        """Create people, client and provider, for removal with the stack. Return our configuration."""
        name = self.name
        self.admin.sys.enable_auth_method("userpass", path=name)
        stack.callback(self.admin.sys.disable_auth_method, name)
        self.admin.sys.create_or_update_policy(
            name, f'path "{OIDC}/provider/{name}/authorize" {{ capabilities = ["read"] }}'
        )
        stack.callback(self.admin.sys.delete_policy, name)
        member, outsider = self._add_person(MEMBER, stack), self._add_person(OUTSIDER, stack)
        self._create(stack, f"identity/group/name/{name}", member_entity_ids=[member, outsider])
        self._create(stack, f"{OIDC}/key/{name}", algorithm=self.algorithm, allowed_client_ids=["*"])
        self._create(stack, f"{OIDC}/assignment/{name}", entity_ids=[member], group_ids=[])
        callback = f"{settings.CONSOLE_ORIGIN}{CALLBACK}"
        self._create(stack, f"{OIDC}/client/{name}", key=name, assignments=[name], redirect_uris=[callback])
        client = self._read(f"{OIDC}/client/{name}")
        profile = '{"preferred_username": {{identity.entity.name}}, "amr": ["mfa"]}'
        self._create(stack, f"{OIDC}/scope/profile", template=profile)
        self._create(stack, f"{OIDC}/scope/groups", template='{"groups": {{identity.entity.groups.names}}}')
        scopes = ["profile", "groups"]
        self._create(
            stack,
            f"{OIDC}/provider/{name}",
            allowed_client_ids=[client["client_id"]],
            scopes_supported=scopes,
            issuer=self.address,
        )
        roles = {name: frozenset({Role.AUDITOR})}
        secret, second_factors = Plaintext(client["client_secret"]), frozenset({("amr", "mfa")})
        return IdentityProvider(self.issuer, client["client_id"], secret, "groups", roles, second_factors)

    def agree(self, url: str, person: str = MEMBER) -> str:
        """Sign the person in at OpenBao, as its user interface does; return path and query of the URL back to us."""
        pages = f"{self.address}/ui/vault/{OIDC}/provider/{self.name}/authorize"
        asked = urlsplit(url)
        assert url.startswith(f"{pages}?")
        for _ in range(SIGN_INS):
            signed_in = requests.post(
                f"{self.address}/v1/auth/{self.name}/login/{person}", json={"password": PASSWORD}, timeout=10
            )
            token = {"X-Vault-Token": signed_in.json()["auth"]["client_token"]}
            reply = requests.get(f"{self.issuer}/authorize?{asked.query}", headers=token, timeout=10).json()
            if reply.get("error") != "max_age_violation":
                break
        back = urlsplit(parse_qs(asked.query)["redirect_uri"][0])
        answer = {name: reply[name] for name in ("code", "state", "error") if name in reply}
        return f"{back.path}?{urlencode(answer)}"

    def rotate_keys(self) -> None:
        """Sign with a key that was not published before: the next one always is."""
        for _ in range(2):
            self.admin.write_data(f"{OIDC}/key/{self.name}/rotate")

    def _add_person(self, person: str, stack: ExitStack) -> str:
        """Create a person with a password, and return the id of its entity."""
        self._create(stack, f"auth/{self.name}/users/{person}", password=PASSWORD, token_policies=[self.name])
        path = f"identity/entity/name/{self.name_of(person)}"
        self._create(stack, path)
        entity = str(self._read(path)["id"])
        mount = self._read(f"sys/auth/{self.name}")["accessor"]
        self.admin.write_data(
            "identity/entity-alias", data={"name": person, "canonical_id": entity, "mount_accessor": mount}
        )
        return entity

    def _create(self, stack: ExitStack, path: str, **body: Any) -> None:
        self.admin.write_data(path, data=body)
        stack.callback(self.admin.delete, path)

    def _read(self, path: str) -> dict[str, Any]:
        reply = self.admin.read(path)
        assert isinstance(reply, dict)
        found: dict[str, Any] = reply["data"]
        return found


@pytest.fixture
def openbao(request: pytest.FixtureRequest, vault: RunningVault, desk: Desk) -> Iterator[OpenBao]:
    """OpenBao with our client. A test may choose the algorithm of its signatures."""
    admin = open_client(VaultServer(vault.address), Plaintext(vault.root_token))
    made = OpenBao(vault.address, admin, getattr(request, "param", "ES256"))
    sign_in_refusals.forget()
    with ExitStack() as stack:
        configured = made.set_up(stack)
        identity_provider_client.cache_clear()
        stack.callback(identity_provider_client.cache_clear)
        stack.enter_context(override_settings(IDENTITY_PROVIDER=configured))
        yield made


def sign_in(openbao: OpenBao, client: Client) -> Any:
    return client.get(openbao.agree(begin(client)))


@pytest.mark.parametrize("openbao", ["RS256", "ES256", "EdDSA"], indirect=True)
def test_single_sign_on_with_openbao_gives_the_role_of_the_group(openbao: OpenBao) -> None:
    client = Client()
    answer = sign_in(openbao, client)
    assert (answer.status_code, answer["Location"]) == (302, "/admin/")
    assert Operator.objects.get(username=openbao.name_of(MEMBER)).roles == {Role.AUDITOR}
    assert client.get("/admin/keyvault/auditentry/").status_code == 200
    assert client.get("/admin/keyvault/servicetoken/new/create/").status_code == 403


def test_single_sign_on_with_openbao_confirms_a_signed_in_operator(openbao: OpenBao) -> None:
    """The step-up of an action: OpenBao accepts the requested age, and states when the person authenticated."""
    client = Client()
    sign_in(openbao, client)
    before = client.session.session_key
    sign_in(openbao, client)
    assert client.session.session_key != before
    assert is_fresh(client.session, datetime.now(UTC))


def test_single_sign_on_with_openbao_redeems_a_code_once(openbao: OpenBao) -> None:
    victim, thief = Client(), Client()
    callback = openbao.agree(begin(victim))
    victim.get(callback)
    assert is_signed_in(victim)
    state = parse_qs(urlsplit(begin(thief)).query)["state"][0]
    code = parse_qs(urlsplit(callback).query)["code"][0]
    assert_refused(thief.get(CALLBACK, {"code": code, "state": state}), thief, "code_refused")


def test_single_sign_on_with_openbao_binds_a_code_to_the_browser_that_began(openbao: OpenBao) -> None:
    """A thief cannot redeem a stolen code, because it belongs to the PKCE verifier of another browser."""
    thief = Client()
    code = parse_qs(urlsplit(openbao.agree(begin(Client()))).query)["code"][0]
    state = parse_qs(urlsplit(begin(thief)).query)["state"][0]
    assert_refused(thief.get(CALLBACK, {"code": code, "state": state}), thief, "code_refused")


def test_single_sign_on_with_openbao_refuses_a_person_outside_of_the_assignment(openbao: OpenBao) -> None:
    """The groups alone, which would give a role, are not enough."""
    client = Client()
    callback = openbao.agree(begin(client), OUTSIDER)
    assert parse_qs(urlsplit(callback).query)["error"] == ["access_denied"]
    assert_refused(client.get(callback), client, "provider_refused")
    assert not Operator.objects.filter(username=openbao.name_of(OUTSIDER)).exists()


def test_single_sign_on_with_openbao_after_a_key_rotation_succeeds(
    openbao: OpenBao, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keyvault.backends.identity_provider.REFETCH_SECONDS", 0.0)
    sign_in(openbao, Client())
    openbao.rotate_keys()
    client = Client()
    sign_in(openbao, client)
    assert is_signed_in(client)
