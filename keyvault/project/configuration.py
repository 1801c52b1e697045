"""Every setting of the service: its environment variable, its default, its effect.

This is the only list: `settings` reads its values here, and a test compares docs/settings.md with it. An invalid
value stops the process at start with the variable's name and the accepted values.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from django.core.exceptions import ImproperlyConfigured

from keyvault.access.limits import DEFAULT_LIMITS, MAX_COUNT, MAX_SECONDS, find_limit_fault
from keyvault.access.roles import Role
from keyvault.access.single_sign_on import MAX_ISSUER_LENGTH, IdentityProvider
from keyvault.backends.private_files import read_private_file
from keyvault.domain.environments import Environment
from keyvault.domain.keystring import KEY_PREFIX_PATTERN
from keyvault.domain.networks import IPNetwork, parse_network
from keyvault.domain.plaintext import Plaintext
from keyvault.wire.destinations import is_protected_url, parse_url
from keyvault.wire.planes import Plane
from keyvault.wire.webhooks import SecretInvalidError, require_secret

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting. `read` converts the text; its ValueError states what is accepted.

    A secret can be in a file instead, which `<name>_FILE` names.
    """

    name: str
    unset: str
    doc: str
    read: Callable[[str], Any] = str
    is_secret: bool = False

    def names(self) -> tuple[str, ...]:
        """Return the variables that set it."""
        return (self.name, f"{self.name}_FILE") if self.is_secret else (self.name,)


def _count(minimum: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < minimum:
            raise ValueError(f"a whole number, {minimum} or more")
        return int(text)

    return read


def _days_of_use(text: str) -> int:
    """Return the retention of key use in days, long enough to remember a use that recurs once a year."""
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) < 366:
        raise ValueError("days, 366 or more")
    return int(text)


def _choice(*choices: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return text

    return read


def _key_prefix(text: str) -> str:
    if KEY_PREFIX_PATTERN.fullmatch(text) is None:
        raise ValueError("1 to 16 of a-z and 0-9, beginning with a letter")
    return text


def _origin(text: str) -> str:
    """Return the origin. Plain HTTP is for this machine only: elsewhere it would expose keys and sessions."""
    if text == "":
        return text
    parts = urlsplit(text)
    loopback = parts.hostname in {"127.0.0.1", "localhost", "::1"}
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment:
        raise ValueError("a URL such as https://keys.example.com")
    if parts.scheme == "http" and not loopback:
        raise ValueError("https; plain http is for 127.0.0.1, localhost and ::1 only")
    return text.rstrip("/")


def _vault_prefix(text: str) -> str:
    if re.fullmatch(r"[a-z](?:[a-z0-9-]{0,30}[a-z0-9])?", text) is None:
        raise ValueError("1 to 32 of a-z, 0-9 and inner hyphens, beginning with a letter")
    return text


def _secret_key(text: str) -> str:
    """Reject a short key: an attacker who guesses it can sign sessions."""
    if text and len(text) < 50:
        raise ValueError("50 characters or more, generated at random")
    return text


def _some_of(known: type[StrEnum]) -> Callable[[str], tuple[str, ...]]:
    def read(text: str) -> tuple[str, ...]:
        names = _split_list(text)
        if not names or not set(names) <= set(known):
            raise ValueError(f"one or more of {', '.join(known)}, separated by commas")
        return tuple(member.value for member in known if member in names)

    return read


def _metrics(text: str) -> str | tuple[str, int]:
    """Return `on`, `off`, or the host and port of `HOST:PORT`."""
    if text in {"on", "off"}:
        return text
    host, _, port = text.rpartition(":")
    if not re.fullmatch(r"[0-9A-Za-z.-]+|\[[0-9A-Fa-f:.]+\]", host) or not re.fullmatch(r"[0-9]{1,5}", port):
        raise ValueError("on, off, or an address such as 127.0.0.1:9100")
    if not 1 <= int(port) <= 65535:
        raise ValueError("a port from 1 to 65535")
    return host.strip("[]"), int(port)


def _limit(text: str) -> tuple[int, int]:
    """Return the two numbers of `<requests>/<seconds>`."""
    count, slash, seconds = text.partition("/")
    if not slash or not count.isdecimal() or not seconds.isdecimal() or find_limit_fault(int(count), int(seconds)):
        raise ValueError(f"requests/seconds such as 25/1, up to {MAX_COUNT} in up to {MAX_SECONDS} seconds")
    return int(count), int(seconds)


def _url(*schemes: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        scheme, _, rest = text.partition("://")  # the text contains a password: never quote it
        if text and (not rest or scheme.lower() not in schemes):
            raise ValueError(f"a URL that begins with {' or '.join(f'{scheme}://' for scheme in schemes)}")
        return text

    return read


def _percent(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 100:
        raise ValueError("1 to 100")
    return int(text)


def _networks(text: str) -> tuple[IPNetwork, ...]:
    try:
        return tuple(parse_network(word) for word in _split_list(text))
    except ValueError as error:
        raise ValueError(f"networks such as 10.0.0.0/8,fd00::/8, separated by commas ({error})") from error


def _staleness(text: str) -> float:
    """Return the staleness bound. Below the feed's interval no verifier would ever be fresh."""
    if not re.fullmatch(r"[0-9]{1,2}(\.[0-9]{1,3})?", text) or not 0.5 <= float(text) <= 60:
        raise ValueError("seconds, 0.5 to 60")
    return float(text)


def _issuer(text: str) -> str:
    """Return the issuer exactly as given: tokens must repeat each character of it."""
    if text and (not is_protected_url(text) or len(text) > MAX_ISSUER_LENGTH or re.search(r"[?#@\s]", text)):
        raise ValueError(
            f"an https URL without query, such as https://id.example.com/realms/staff, of at most {MAX_ISSUER_LENGTH} "
            "characters; plain http is for 127.0.0.1, localhost and ::1 only"
        )
    return text


def _role_map(text: str) -> dict[str, frozenset[Role]]:
    """Return the roles of each group. A group's name may contain the equals sign, but no comma."""
    found: dict[str, frozenset[Role]] = {}
    for pair in _split_list(text):
        group, _, role = pair.rpartition("=")
        if not group or role not in set(Role):
            raise ValueError(f"group=role pairs, separated by commas; roles: {', '.join(Role)}")
        found[group] = found.get(group, frozenset()) | {Role(role)}
    return found


def _second_factors(text: str) -> frozenset[tuple[str, str]]:
    pairs = {(claim, value) for claim, _, value in (word.partition("=") for word in _split_list(text))}
    if not all(claim in {"amr", "acr"} and value for claim, value in pairs):
        raise ValueError("amr=value or acr=value, separated by commas, such as amr=mfa,amr=hwk")
    return frozenset(pairs)


def _address(text: str) -> str:
    if text and re.fullmatch(r"[!-?A-~]{1,64}@[0-9A-Za-z.-]{1,190}", text) is None:
        raise ValueError("an e-mail address such as keyvault@example.com")
    return text


def _addresses(text: str) -> tuple[str, ...]:
    return tuple(_address(word) for word in _split_list(text))


@dataclass(frozen=True, slots=True)
class SmtpServer:
    """The mail server. `is_tls`: TLS from the first byte; `is_starttls`: TLS by STARTTLS, else the mail is not sent."""

    host: str
    port: int
    user: str
    password: Plaintext
    is_tls: bool
    is_starttls: bool


def _smtp(text: str) -> SmtpServer | None:
    """Return the server of the URL. Plain SMTP is for this machine only."""
    if not text:
        return None
    # The text contains a password. SMTP authentication takes ASCII only.
    wrong = ValueError("a URL such as smtps://user:password@mail.example.com, with a user and a password in ASCII")
    try:
        parts = urlsplit(text)
        port, user, password = parts.port, unquote(parts.username or ""), unquote(parts.password or "")
    except ValueError:
        raise wrong from None
    if parts.scheme not in {"smtp", "smtps"} or not parts.hostname or parts.path.strip("/") or parts.query:
        raise wrong
    if not (user + password).isascii():
        raise wrong
    is_tls = parts.scheme == "smtps"
    is_local = parts.hostname in {"127.0.0.1", "localhost", "::1"}
    return SmtpServer(
        parts.hostname,
        port or (465 if is_tls else 587),
        user,
        Plaintext(password),
        is_tls,
        is_starttls=not is_tls and not is_local,
    )


def _webhook_secret(text: str) -> str:
    if text:
        try:
            require_secret(text)
        except SecretInvalidError:
            raise ValueError("whsec_ and the base64 of 24 to 64 bytes") from None
    return text


def _split_list(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "KEYVAULT_DATA_DIR",
        ".keyvault",
        "Folder of the embedded default: database, keystore, master key, broker. Relative to the checkout.",
    ),
    Setting(
        "KEYVAULT_DATABASE_URL",
        "",
        "`postgres://…` for PostgreSQL. Unset: SQLite in the data folder.",
        _url("postgres", "postgresql", "sqlite"),
        is_secret=True,
    ),
    Setting(
        "KEYVAULT_REGION_SOURCE",
        "",
        "URL of the central service, for a regional verifier: `manage.py verifier` then needs no database, and reads "
        "records and changes from there. `https://…`; `http://…` on this machine only.",
        _origin,
    ),
    Setting(
        "KEYVAULT_REGION_TOKEN",
        "",
        "Service token of a regional verifier, with the permissions `keys:replicate` and `keys:replicate_digests`.",
        is_secret=True,
    ),
    Setting(
        "KEYVAULT_REGION_CACERT",
        "",
        "CA file that a regional verifier checks the central service's certificate with. Unset: the system's.",
    ),
    Setting(
        "KEYVAULT_REDIS_URL",
        "",
        "`redis://…`: rate limits shared by several server processes, and the broker unless that is set separately. "
        "Unset: each process counts separately; the ordinary server is one, and each worker of `verifier` is another.",
        _url("redis", "rediss"),
        is_secret=True,
    ),
    Setting(
        "KEYVAULT_BROKER_URL",
        "",
        "Celery's broker. Unset: Redis if set, else files in the data folder, where the worker runs beat, too.",
        is_secret=True,
    ),
    Setting(
        "KEYVAULT_BACKEND",
        "local",
        "Storage of readable secrets: `local`, the encrypted keystore in the data folder, or `vault`, a HashiCorp "
        "Vault or an OpenBao.",
        _choice("local", "vault"),
    ),
    Setting(
        "VAULT_ADDR",
        "",
        "URL of the Vault: its active node, or a load balancer in front of it; redirects are not followed. Plain http "
        "on this machine only. `VAULT_TOKEN` is never read.",
    ),
    Setting("VAULT_CACERT", "", "CA file that verifies the Vault's certificate. Unset: this machine's CAs."),
    Setting(
        "KEYVAULT_VAULT_PREFIX",
        "keyvault",
        "Prefix of every mount, policy and role of this service in the Vault, so that several services can share one.",
        _vault_prefix,
    ),
    Setting(
        "KEYVAULT_VAULT_AUTH",
        "approle",
        "How a process logs in to the Vault: `approle`, `kubernetes`, or `token_file` (renewed by an agent).",
        _choice("approle", "kubernetes", "token_file"),
    ),
    Setting(
        "KEYVAULT_VAULT_CREDENTIALS_DIR",
        "vault",
        "Folder of this host's logins, one or two files for each: `<role>.role_id` with `<role>.secret_id` or "
        "`<role>.wrapped_secret_id`, or `<role>.token`. Relative to the data folder.",
    ),
    Setting(
        "KEYVAULT_VAULT_JWT_FILE",
        "/var/run/secrets/kubernetes.io/serviceaccount/token",
        "File of the service account's token for `kubernetes`.",
    ),
    Setting(
        "KEYVAULT_MASTER_KEY",
        "",
        "Master key of the local keystore: 32 bytes in base64, or such a key wrapped by the Vault's Transit engine, "
        "`vault:v…`. Unset: `master.key` in the data folder, created at the first run and readable by its owner only.",
        is_secret=True,
    ),
    Setting(
        "KEYVAULT_SECRET_KEY",
        "",
        "Signs admin sessions, 50 characters or more. Unset: `django.key` in the data folder, created likewise.",
        _secret_key,
        is_secret=True,
    ),
    Setting(
        "KEYVAULT_SECRET_KEY_FALLBACK",
        "",
        "With `KEYVAULT_SECRET_KEY`: its former value, which still verifies sessions. Remove it after 8 hours.",
        _secret_key,
        is_secret=True,
    ),
    Setting(
        "KEYVAULT_ORIGIN",
        "http://127.0.0.1:8000",
        "Scheme and host of the service's public URL. Plain http on this machine only.",
        _origin,
    ),
    Setting(
        "KEYVAULT_CONSOLE_ORIGIN",
        "",
        "Scheme and host of the operators' console, for links in alarms and invitations. Unset: `KEYVAULT_ORIGIN`. "
        "Set it for all processes if the console has a host name of its own.",
        _origin,
    ),
    Setting(
        "KEYVAULT_SANDBOX_BASE_URL",
        "",
        "Base URL of the sandbox. Unset: `<origin>/sandbox`. A host other than the origin's serves nothing else.",
        _origin,
    ),
    Setting(
        "KEYVAULT_PRODUCTION_BASE_URL",
        "",
        "Base URL of production. Unset: `<origin>/production`. A host other than the origin's serves nothing else.",
        _origin,
    ),
    Setting(
        "KEYVAULT_ALLOWED_HOSTS",
        "",
        "Additional host names, separated by commas; those of the origin and the base URLs are always allowed.",
        _split_list,
    ),
    Setting(
        "KEYVAULT_ENVIRONMENTS",
        "sandbox,production",
        "The environments that this process serves. It never loads the peppers of another, and answers 404 on its "
        "base URL.",
        _some_of(Environment),
    ),
    Setting(
        "KEYVAULT_PLANES",
        ",".join(Plane),
        "The planes that this process serves: the integration plane, the service plane (`/v1/`) and the console "
        "(`/admin/`). The paths of others are 404.",
        _some_of(Plane),
    ),
    Setting(
        "KEYVAULT_METRICS",
        "on",
        "Where a process answers `/metrics`: `HOST:PORT`, at this address only; `on`, a server or verifier with its "
        "other paths; or `off`. Workers and beat need an address. Processes of one program share it; different "
        "programs need different ones, unless they share PROMETHEUS_MULTIPROC_DIR.",
        _metrics,
    ),
    Setting(
        "KEYVAULT_DOCS",
        "on",
        "`off`: `/v1/docs` and `/v1/openapi.json` are 404. They belong to no plane.",
        _choice("on", "off"),
    ),
    Setting(
        "KEYVAULT_TRUSTED_PROXIES",
        "0",
        "Number of proxies before the integration plane and the console: the client's address is at that position from "
        "the right of X-Forwarded-For. 0: the address of the connection.",
        _count(0),
    ),
    Setting(
        "KEYVAULT_SANDBOX_LIMIT",
        str(DEFAULT_LIMITS[Environment.SANDBOX]),
        "Default limit of an account in the sandbox: requests/seconds.",
        _limit,
    ),
    Setting(
        "KEYVAULT_PRODUCTION_LIMIT", str(DEFAULT_LIMITS[Environment.PRODUCTION]), "The same in production.", _limit
    ),
    Setting(
        "KEYVAULT_LIMIT_FALLBACK_PERCENT",
        "25",
        "While Redis is unavailable, each server process counts separately, up to this share of every limit: 100 "
        "divided by the number of processes keeps the sum.",
        _percent,
    ),
    Setting(
        "KEYVAULT_LIMIT_MODE",
        "leased",
        "How verifiers share limits in Redis: `leased`, each leases a small budget at a time and spends it in memory, "
        "or `strict`, Redis counts each request exactly.",
        _choice("leased", "strict"),
    ),
    Setting(
        "KEYVAULT_MAX_STALENESS",
        "2",
        "Maximum age of cached data, in seconds, 0.5 to 60. A process that has not confirmed the change feed for "
        "longer reads the database, and answers 503 `verifier_stale` if that is unavailable.",
        _staleness,
    ),
    Setting(
        "KEYVAULT_VERIFIER_KEYS",
        "100000",
        "Maximum number of keys, customer tokens and service tokens, each, that a verifying process caches. Beyond it, "
        "frequently used ones stay cached, and the others are read each time.",
        _count(1),
    ),
    Setting(
        "KEYVAULT_REVOCATION_LOG",
        "revocation_log",
        "File of the revocation log, outside the database and not restored with it. Relative to the data folder.",
    ),
    Setting(
        "KEYVAULT_USAGE_MINUTE_DAYS",
        "2",
        "Retention of key use by minute, in days; at least 1. Older use is kept by hour.",
        _count(1),
    ),
    Setting(
        "KEYVAULT_USAGE_HOUR_DAYS",
        "35",
        "Retention of key use by hour, with addresses and user agents, in days; at least 1. Older use is kept by day, "
        "network and product.",
        _count(1),
    ),
    Setting(
        "KEYVAULT_USAGE_DAYS",
        "400",
        "Retention of key use, in days; at least 366, because silence is judged by the longest gap between two uses. "
        "The key's total is kept permanently.",
        _days_of_use,
    ),
    Setting(
        "KEYVAULT_WEBHOOK_NETWORKS",
        "",
        "Your own networks that webhooks may be sent to, also over plain http, separated by commas: `10.1.0.0/16`. "
        "Unset: public addresses only, over https. `SSL_CERT_FILE` adds a CA of your own.",
        _networks,
    ),
    Setting(
        "KEYVAULT_ALARM_EMAILS",
        "",
        "Addresses that get the operators' alarms by e-mail, separated by commas. Needs `KEYVAULT_SMTP_URL` and "
        "`KEYVAULT_ALARM_SENDER`. Set these for all processes: each may raise an alarm.",
        _addresses,
    ),
    Setting("KEYVAULT_ALARM_SENDER", "", "Sender of these e-mails, such as `keyvault@example.com`.", _address),
    Setting(
        "KEYVAULT_SMTP_URL",
        "",
        "The mail server: `smtps://USER:PASSWORD@HOST` (TLS), or `smtp://USER:PASSWORD@HOST:587` (STARTTLS, required "
        "except on this machine). Write special characters of the password as %XX.",
        _smtp,
        is_secret=True,
    ),
    Setting(
        "KEYVAULT_ALARM_WEBHOOK",
        "",
        "URL that gets the operators' alarms, signed like the merchants' webhooks. Allowed addresses: see "
        "`KEYVAULT_WEBHOOK_NETWORKS`. Needs `KEYVAULT_ALARM_WEBHOOK_SECRET`.",
    ),
    Setting(
        "KEYVAULT_ALARM_WEBHOOK_SECRET",
        "",
        "Signs these messages: `whsec_` and the base64 of 24 to 64 random bytes.",
        _webhook_secret,
        is_secret=True,
    ),
    Setting(
        "KEYVAULT_ALARM_REPEAT_MINUTES",
        "60",
        "Interval in which alarms are sent again until an operator marks them as seen, in minutes.",
        _count(1),
    ),
    Setting(
        "KEYVAULT_REFUSAL_DAYS",
        "30",
        "Retention of refused requests with a proved key, in days. Those without one are kept for a day.",
        _count(1),
    ),
    Setting(
        "KEYVAULT_CUSTOMER_TOKEN_DAYS",
        "30",
        "Retention of customer tokens after their expiry, in days.",
        _count(1),
    ),
    Setting(
        "KEYVAULT_DELIVERY_DAYS",
        "30",
        "Retention of webhook deliveries after their last attempt, in days; at least 8.",
        _count(8),
    ),
    Setting(
        "KEYVAULT_NOTICE_DAYS",
        "400",
        "Retention of notices in the console, in days; at least 30. Alarms that no operator has seen are kept.",
        _count(30),
    ),
    Setting(
        "KEYVAULT_LEASE_DAYS",
        "7",
        "Retention of the row of work that no worker claims any more, in days; at least 1.",
        _count(1),
    ),
    Setting(
        "KEYVAULT_CHANGE_DAYS",
        "400",
        "Retention of the change feed, in days; at least 30. Receipts keep the times of confirmations for 30 "
        "days; those of a stopped verifier, for 7 days after its last one. A new revocation log or anchor is filled "
        "from the feed, so it does not protect a backup that is older.",
        _count(30),
    ),
    Setting(
        "KEYVAULT_OIDC_ISSUER",
        "",
        "Issuer of the OpenID Connect provider for single sign-on to the console, exactly as in its tokens. Unset: no "
        "single sign-on. Plain http on this machine only. `SSL_CERT_FILE` adds a CA of your own.",
        _issuer,
    ),
    Setting("KEYVAULT_OIDC_CLIENT_ID", "", "Client id of this service at the provider."),
    Setting(
        "KEYVAULT_OIDC_CLIENT_SECRET",
        "",
        "Client secret of this service at the provider. Unset: `oidc_client.secret` in the data folder, which only its "
        "owner may read.",
        is_secret=True,
    ),
    Setting("KEYVAULT_OIDC_GROUPS_CLAIM", "groups", "Claim of the ID token with the list of the person's groups."),
    Setting(
        "KEYVAULT_OIDC_ROLE_MAP",
        "",
        "Roles of the provider's groups: `group=role`, separated by commas. A group may appear with several roles. "
        "Without a mapped group, single sign-on is refused. A new operator also needs a scope (`set_operator_scope`). "
        "Operators with a password are unaffected.",
        _role_map,
    ),
    Setting(
        "KEYVAULT_OIDC_SECOND_FACTOR",
        "",
        "Claims that prove a second factor at the provider: `amr=value` or `acr=value`, separated by commas; one is "
        "enough. Unset, or without such a claim: the operator's second factor here is required.",
        _second_factors,
    ),
    Setting("KEYVAULT_KEY_PREFIX", "kv", "First field of every key string.", _key_prefix),
    Setting(
        "KEYVAULT_SANDBOX_APPROVALS",
        "0",
        "Number of approvals by other operators that an operator's sandbox request needs. A service's request needs at "
        "least one.",
        _count(0),
    ),
    Setting(
        "KEYVAULT_PRODUCTION_APPROVALS",
        "1",
        "The same in production; at least 1. Two or more are given in the console only.",
        _count(1),
    ),
    Setting(
        "KEYVAULT_LOG_LEVEL",
        "INFO",
        "`DEBUG`, `INFO`, `WARNING` or `ERROR`.",
        _choice("DEBUG", "INFO", "WARNING", "ERROR"),
    ),
)


def read_settings(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the value of every setting. Raises ImproperlyConfigured, naming each invalid variable.

    An unknown `KEYVAULT_…` variable is rejected, so that a misspelled one is not ignored. `KEYVAULT_TEST_…` and
    `KEYVAULT_REQUIRE` belong to the test suite.
    """
    known = {name for setting in SETTINGS for name in setting.names()}
    wrong = [
        f"{name}: unknown setting; docs/settings.md lists all settings"
        for name in sorted(environ)
        if name.startswith("KEYVAULT_")
        and name not in known
        and not name.startswith("KEYVAULT_TEST_")
        and name != "KEYVAULT_REQUIRE"
    ]
    values: dict[str, Any] = {}
    for setting in SETTINGS:
        name = setting.name
        try:
            if setting.is_secret and (file := environ.get(f"{name}_FILE", "")):
                if environ.get(name, ""):
                    raise ImproperlyConfigured(f"{name}: set this variable or {name}_FILE, not both")
                name = f"{name}_FILE"
                text = _read_secret_file(name, Path(file))
            else:
                text = environ.get(name, "") or setting.unset
            values[setting.name] = setting.read(text)
        except ValueError as error:
            wrong.append(f"{name}: invalid value, expected {error}")
        except ImproperlyConfigured as error:
            wrong.append(str(error))
    if wrong:
        raise ImproperlyConfigured("; ".join(wrong))
    return values


def _read_secret_file(name: str, path: Path) -> str:
    """Return the text of a file without its line end. Its group may read it, as with Kubernetes' `fsGroup`.

    Raises ImproperlyConfigured with the variable, and never with the text.
    """
    try:
        if path.stat().st_mode & 0o007:
            raise ImproperlyConfigured(f"{name}: {path} can be read or changed by any user; run: chmod o= {path}")
        text = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ImproperlyConfigured(f"{name}: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ImproperlyConfigured(f"{name}: {path} is not a text file in UTF-8") from None
    if not text:
        raise ImproperlyConfigured(f"{name}: {path} is empty; write the value of {name.removesuffix('_FILE')} to it")
    return text


_RESERVED_SEGMENTS = frozenset({"", "v1", "admin", "static", "healthz", "readyz", "metrics"})


def find_base_urls(values: Mapping[str, Any]) -> dict[str, str]:
    """Return every environment's base URL.

    Raises ImproperlyConfigured if a request could belong to two environments, or to one of them and to the service
    plane or the console.
    """
    origin = values["KEYVAULT_ORIGIN"]
    found = {
        environment.value: values[f"KEYVAULT_{environment.name}_BASE_URL"] or f"{origin}/{environment}"
        for environment in Environment
    }
    parts = {name: urlsplit(url) for name, url in found.items()}
    for name, base in parts.items():
        if base.hostname == urlsplit(origin).hostname and base.path.strip("/").partition("/")[0] in _RESERVED_SEGMENTS:
            raise ImproperlyConfigured(
                f"KEYVAULT_{name.upper()}_BASE_URL: invalid value, "
                f"expected its own path on the origin's host, such as /{name}"
            )
        for other, its in parts.items():
            if name != other and base.hostname == its.hostname and f"{its.path}/".startswith(f"{base.path}/"):
                raise ImproperlyConfigured(
                    f"KEYVAULT_{name.upper()}_BASE_URL: invalid value, "
                    f"expected another host or path than that of {other}"
                )
    return found


def find_alarm_channels(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the channels of operators' alarms. Raises ImproperlyConfigured if their settings are incomplete."""
    found = []
    if values["KEYVAULT_ALARM_EMAILS"]:
        for name in ("KEYVAULT_SMTP_URL", "KEYVAULT_ALARM_SENDER"):
            if not values[name]:
                raise ImproperlyConfigured(f"{name}: required by KEYVAULT_ALARM_EMAILS")
        found.append("email")
    if values["KEYVAULT_ALARM_WEBHOOK"]:
        if not values["KEYVAULT_ALARM_WEBHOOK_SECRET"]:
            raise ImproperlyConfigured("KEYVAULT_ALARM_WEBHOOK_SECRET: required by KEYVAULT_ALARM_WEBHOOK")
        try:
            parse_url(values["KEYVAULT_ALARM_WEBHOOK"], values["KEYVAULT_WEBHOOK_NETWORKS"])
        except ValueError as error:
            raise ImproperlyConfigured(f"KEYVAULT_ALARM_WEBHOOK: invalid value, it {error}") from None
        found.append("webhook")
    return tuple(found)


_OIDC_REQUIRED = ("KEYVAULT_OIDC_CLIENT_ID", "KEYVAULT_OIDC_ROLE_MAP")
_OIDC_OPTIONAL = ("KEYVAULT_OIDC_CLIENT_SECRET", "KEYVAULT_OIDC_SECOND_FACTOR")


def find_identity_provider(values: Mapping[str, Any], data_dir: Path) -> IdentityProvider | None:
    """Return the provider for single sign-on. Raises ImproperlyConfigured if its settings are incomplete."""
    issuer = values["KEYVAULT_OIDC_ISSUER"]
    if not issuer:
        for name in (*_OIDC_REQUIRED, *_OIDC_OPTIONAL):
            if values[name]:
                raise ImproperlyConfigured(f"{name}: without effect; set KEYVAULT_OIDC_ISSUER, too, or unset it")
        return None
    for name in _OIDC_REQUIRED:
        if not values[name]:
            raise ImproperlyConfigured(f"{name}: required by KEYVAULT_OIDC_ISSUER")
    secret = values["KEYVAULT_OIDC_CLIENT_SECRET"]
    file = data_dir / "oidc_client.secret"
    if not secret and not file.exists():
        raise ImproperlyConfigured(f"KEYVAULT_OIDC_CLIENT_SECRET: required by KEYVAULT_OIDC_ISSUER, here or in {file}")
    return IdentityProvider(
        issuer,
        values["KEYVAULT_OIDC_CLIENT_ID"],
        Plaintext(secret or read_private_file(file)),
        values["KEYVAULT_OIDC_GROUPS_CLAIM"],
        values["KEYVAULT_OIDC_ROLE_MAP"],
        values["KEYVAULT_OIDC_SECOND_FACTOR"],
    )


def settings_table() -> str:
    """Return the table of docs/settings.md."""
    rows = ["| variable | unset means | what it does |", "|---|---|---|"]
    for setting in SETTINGS:
        unset = f"`{setting.unset}`" if setting.unset else "-"
        file = f" `{setting.name}_FILE` names a file with it instead." if setting.is_secret else ""
        rows.append(f"| `{setting.name}` | {unset} | {setting.doc}{file} |")
    return "\n".join(rows)
