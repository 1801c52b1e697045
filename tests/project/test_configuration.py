"""Settings of single sign-on, alarms and secrets in files: read, or refused with one line that names the variable."""

from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured

from keyvault.access.roles import Role
from keyvault.access.single_sign_on import IdentityProvider
from keyvault.project.configuration import (
    SETTINGS,
    SmtpServer,
    find_alarm_channels,
    find_identity_provider,
    read_settings,
)

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


SECRETS = {
    "KEYVAULT_DATABASE_URL": "postgres://keyvault:pass@db.example/keyvault",
    "KEYVAULT_REDIS_URL": "redis://:pass@redis.example/0",
    "KEYVAULT_BROKER_URL": "amqp://keyvault:pass@broker.example",
    "KEYVAULT_MASTER_KEY": "A" * 43 + "=",
    "KEYVAULT_SECRET_KEY": "s" * 50,
    "KEYVAULT_SECRET_KEY_FALLBACK": "f" * 50,
    "KEYVAULT_OIDC_CLIENT_SECRET": "the client's",
    "KEYVAULT_SMTP_URL": "smtps://keyvault:pass@mail.example.com",
    "KEYVAULT_ALARM_WEBHOOK_SECRET": "whsec_" + "A" * 43 + "=",
    "KEYVAULT_REGION_TOKEN": "kv_svc_all_region",
}


def test_every_secret_setting_is_read_from_a_file(tmp_path: Path) -> None:
    assert {setting.name for setting in SETTINGS if setting.is_secret} == set(SECRETS)
    environ = {}
    for name, text in SECRETS.items():
        file = tmp_path / name
        file.write_text(f"{text}\n")
        file.chmod(0o440)
        environ[f"{name}_FILE"] = str(file)
    values = read_settings(environ)
    assert values["KEYVAULT_SMTP_URL"].password.reveal() == "pass"
    assert {name: values[name] for name in SECRETS if name != "KEYVAULT_SMTP_URL"} == {
        name: text for name, text in SECRETS.items() if name != "KEYVAULT_SMTP_URL"
    }


@pytest.mark.parametrize("name", SECRETS)
@pytest.mark.parametrize(
    ("mode", "text", "said"),
    [
        (0o644, "SECRET-TEXT", "chmod o= "),
        (0o640, " \n", "is empty"),
        (0o640, None, "No such file"),
        (0o640, b"\xff", "not a text file"),
    ],
)
def test_secret_file_that_cannot_be_used_is_refused_by_its_variable(
    name: str, mode: int, text: str | bytes | None, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "secret"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        file.chmod(mode)
    with pytest.raises(ImproperlyConfigured) as refused:
        read_settings({f"{name}_FILE": str(file)})
    assert str(refused.value).startswith(f"{name}_FILE: ")
    assert said in str(refused.value)
    assert "SECRET-TEXT" not in str(refused.value)


def test_secret_in_a_variable_and_in_a_file_is_refused_without_its_text(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("x" * 50)
    file.chmod(0o600)
    both = {"KEYVAULT_SECRET_KEY": "SECRET-TEXT" * 5, "KEYVAULT_SECRET_KEY_FILE": str(file)}
    with pytest.raises(ImproperlyConfigured, match=r"^KEYVAULT_SECRET_KEY: set this variable or .*, not both$"):
        read_settings(both)


def test_invalid_secret_in_a_file_is_refused_by_the_variable_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("SECRET-TEXT")
    file.chmod(0o600)
    with pytest.raises(ImproperlyConfigured) as refused:
        read_settings({"KEYVAULT_SECRET_KEY_FILE": str(file)})
    assert (
        str(refused.value)
        == "KEYVAULT_SECRET_KEY_FILE: invalid value, expected 50 characters or more, generated at random"
    )


def test_file_of_a_setting_that_is_no_secret_is_an_unknown_setting() -> None:
    with pytest.raises(ImproperlyConfigured, match="KEYVAULT_ORIGIN_FILE: unknown setting"):
        read_settings({"KEYVAULT_ORIGIN_FILE": "/run/origin"})


SECRET = "whsec_" + "A" * 43 + "="
ALARMS = {
    "KEYVAULT_ALARM_EMAILS": "oncall@example.com, security@example.com",
    "KEYVAULT_ALARM_SENDER": "keyvault@example.com",
    "KEYVAULT_SMTP_URL": "smtps://keyvault:hunter%232@mail.example.com",
    "KEYVAULT_ALARM_WEBHOOK": "https://alerts.example.com/keyvault",
    "KEYVAULT_ALARM_WEBHOOK_SECRET": SECRET,
}


def read_smtp(url: str) -> SmtpServer:
    found = read_settings({"KEYVAULT_SMTP_URL": url})["KEYVAULT_SMTP_URL"]
    assert isinstance(found, SmtpServer)
    return found


def test_alarms_stay_in_the_console_by_default() -> None:
    assert find_alarm_channels(read_settings({})) == ()


def test_alarm_channels_are_read() -> None:
    values = read_settings(ALARMS)
    assert find_alarm_channels(values) == ("email", "webhook")
    assert values["KEYVAULT_ALARM_EMAILS"] == ("oncall@example.com", "security@example.com")
    assert "hunter" not in repr(values)


@pytest.mark.parametrize(
    ("url", "port", "is_tls", "is_starttls"),
    [
        ("smtps://keyvault:hunter%232@mail.example.com", 465, True, False),
        ("smtp://keyvault:hunter%232@mail.example.com:2525", 2525, False, True),
        ("smtp://keyvault:hunter%232@127.0.0.1", 587, False, False),
    ],
)
def test_mail_leaves_this_machine_encrypted_only(url: str, port: int, is_tls: bool, is_starttls: bool) -> None:
    """Guarantee: neither the password nor an alarm is sent in plain text to another machine."""
    server = read_smtp(url)
    assert (server.port, server.is_tls, server.is_starttls) == (port, is_tls, is_starttls)
    assert (server.user, server.password.reveal()) == ("keyvault", "hunter#2")


@pytest.mark.parametrize(
    ("changes", "variable"),
    [
        ({"KEYVAULT_SMTP_URL": ""}, "KEYVAULT_SMTP_URL"),
        ({"KEYVAULT_SMTP_URL": "http://mail.example.com:hunter2"}, "KEYVAULT_SMTP_URL"),
        ({"KEYVAULT_SMTP_URL": "smtp://:hunter2@"}, "KEYVAULT_SMTP_URL"),
        ({"KEYVAULT_SMTP_URL": "smtp://a:hunter2@mail:99999"}, "KEYVAULT_SMTP_URL"),
        ({"KEYVAULT_SMTP_URL": "smtps://a:hunter2%C3%BC@mail.example.com"}, "KEYVAULT_SMTP_URL"),
        ({"KEYVAULT_ALARM_SENDER": ""}, "KEYVAULT_ALARM_SENDER"),
        ({"KEYVAULT_ALARM_SENDER": "Keyvault <keyvault@example.com>"}, "KEYVAULT_ALARM_SENDER"),
        ({"KEYVAULT_ALARM_EMAILS": "oncall"}, "KEYVAULT_ALARM_EMAILS"),
        ({"KEYVAULT_ALARM_EMAILS": "a@b\nBcc: c@d"}, "KEYVAULT_ALARM_EMAILS"),
        ({"KEYVAULT_ALARM_WEBHOOK_SECRET": ""}, "KEYVAULT_ALARM_WEBHOOK_SECRET"),
        ({"KEYVAULT_ALARM_WEBHOOK_SECRET": "whsec_hunter2"}, "KEYVAULT_ALARM_WEBHOOK_SECRET"),
        ({"KEYVAULT_ALARM_WEBHOOK": "http://alerts.example.com/"}, "KEYVAULT_ALARM_WEBHOOK"),
        ({"KEYVAULT_ALARM_WEBHOOK": "https://127.0.0.1/"}, "KEYVAULT_ALARM_WEBHOOK"),
        ({"KEYVAULT_ALARM_REPEAT_MINUTES": "0"}, "KEYVAULT_ALARM_REPEAT_MINUTES"),
    ],
)
def test_incomplete_alarm_settings_are_refused(changes: dict[str, str], variable: str) -> None:
    environ = {name: value for name, value in {**ALARMS, **changes}.items() if value}
    with pytest.raises(ImproperlyConfigured) as refused:
        find_alarm_channels(read_settings(environ))
    assert str(refused.value).startswith(f"{variable}: ")
    assert "hunter" not in str(refused.value)


def test_alarm_webhook_in_an_own_network_is_accepted() -> None:
    changes = {"KEYVAULT_ALARM_WEBHOOK": "http://10.1.2.3/", "KEYVAULT_WEBHOOK_NETWORKS": "10.1.0.0/16"}
    assert "webhook" in find_alarm_channels(read_settings({**ALARMS, **changes}))
