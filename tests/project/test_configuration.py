"""Settings of single sign-on: complete or refused, each with one line that names the variable."""

from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured

from keyvault.access.roles import Role
from keyvault.access.single_sign_on import IdentityProvider
from keyvault.project.configuration import find_identity_provider, read_settings

OIDC = {
    "KEYVAULT_OIDC_ISSUER": "https://id.example.com/realms/staff",
    "KEYVAULT_OIDC_CLIENT_ID": "console",
    "KEYVAULT_OIDC_CLIENT_SECRET": "the client's",
    "KEYVAULT_OIDC_ROLE_MAP": "admins=key_administrator, admins=auditor,cn=audit=auditor",
}


def read(folder: Path, **changes: str) -> IdentityProvider | None:
    environ = {name: value for name, value in {**OIDC, **changes}.items() if value}
    return find_identity_provider(read_settings(environ), folder)


def test_single_sign_on_is_off_by_default(tmp_path: Path) -> None:
    assert find_identity_provider(read_settings({}), tmp_path) is None


def test_single_sign_on_settings_are_read(tmp_path: Path) -> None:
    provider = read(tmp_path, KEYVAULT_OIDC_SECOND_FACTOR="amr=mfa, acr=urn:a=b")
    assert provider is not None
    assert (provider.issuer, provider.client_id, provider.groups_claim) == (
        OIDC["KEYVAULT_OIDC_ISSUER"],
        "console",
        "groups",
    )
    assert provider.client_secret.reveal() == "the client's"
    assert provider.group_roles == {
        "admins": {Role.KEY_ADMINISTRATOR, Role.AUDITOR},
        "cn=audit": {Role.AUDITOR},
    }
    assert provider.second_factors == {("amr", "mfa"), ("acr", "urn:a=b")}
    assert provider.requested_acr == ("urn:a=b",)


def test_single_sign_on_secret_is_read_from_a_private_file(tmp_path: Path) -> None:
    file = tmp_path / "oidc_client.secret"
    file.write_text("from the file\n")
    file.chmod(0o644)
    with pytest.raises(ImproperlyConfigured, match="can be read by others"):
        read(tmp_path, KEYVAULT_OIDC_CLIENT_SECRET="")
    file.chmod(0o600)
    provider = read(tmp_path, KEYVAULT_OIDC_CLIENT_SECRET="")
    assert provider is not None
    assert provider.client_secret.reveal() == "from the file"


@pytest.mark.parametrize(
    ("changes", "variable"),
    [
        ({"KEYVAULT_OIDC_ISSUER": "http://id.example.com"}, "KEYVAULT_OIDC_ISSUER"),
        ({"KEYVAULT_OIDC_ISSUER": "id.example.com"}, "KEYVAULT_OIDC_ISSUER"),
        ({"KEYVAULT_OIDC_ISSUER": "https://"}, "KEYVAULT_OIDC_ISSUER"),
        ({"KEYVAULT_OIDC_ISSUER": "https://id.example.com/?a=b"}, "KEYVAULT_OIDC_ISSUER"),
        ({"KEYVAULT_OIDC_ISSUER": "https://user@id.example.com"}, "KEYVAULT_OIDC_ISSUER"),
        ({"KEYVAULT_OIDC_ISSUER": "https://id.example.com/" + "a" * 200}, "KEYVAULT_OIDC_ISSUER"),
        ({"KEYVAULT_OIDC_ISSUER": ""}, "KEYVAULT_OIDC_CLIENT_ID"),
        ({"KEYVAULT_OIDC_CLIENT_ID": ""}, "KEYVAULT_OIDC_CLIENT_ID"),
        ({"KEYVAULT_OIDC_CLIENT_SECRET": ""}, "KEYVAULT_OIDC_CLIENT_SECRET"),
        ({"KEYVAULT_OIDC_ROLE_MAP": ""}, "KEYVAULT_OIDC_ROLE_MAP"),
        ({"KEYVAULT_OIDC_ROLE_MAP": "admins"}, "KEYVAULT_OIDC_ROLE_MAP"),
        ({"KEYVAULT_OIDC_ROLE_MAP": "=auditor"}, "KEYVAULT_OIDC_ROLE_MAP"),
        ({"KEYVAULT_OIDC_ROLE_MAP": "admins=root"}, "KEYVAULT_OIDC_ROLE_MAP"),
        ({"KEYVAULT_OIDC_SECOND_FACTOR": "mfa"}, "KEYVAULT_OIDC_SECOND_FACTOR"),
        ({"KEYVAULT_OIDC_SECOND_FACTOR": "amr="}, "KEYVAULT_OIDC_SECOND_FACTOR"),
        ({"KEYVAULT_OIDC_SECOND_FACTOR": "sub=mfa"}, "KEYVAULT_OIDC_SECOND_FACTOR"),
    ],
)
def test_single_sign_on_settings_that_are_wrong_are_refused(
    tmp_path: Path, changes: dict[str, str], variable: str
) -> None:
    """Each refusal is one line that begins with the variable."""
    with pytest.raises(ImproperlyConfigured) as refused:
        read(tmp_path, **changes)
    assert str(refused.value).startswith(f"{variable}: ")
    assert "\n" not in str(refused.value)
    assert OIDC["KEYVAULT_OIDC_CLIENT_SECRET"] not in str(refused.value)
