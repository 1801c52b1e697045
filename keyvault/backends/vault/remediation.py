"""Texts of a diagnosis: the description and remedy of each problem of the server or a login."""

from dataclasses import dataclass
from typing import Final

from keyvault.backends.base import BackendError, BackendInvalidError, BackendUnavailableError
from keyvault.backends.vault.logins import InterceptedLoginError

BOOTSTRAP: Final = "manage.py bootstrap_vault --environment ENVIRONMENT --token-file FILE"

RESTORE: Final = (
    "Do not run setup again. Check that VAULT_ADDR and KEYVAULT_VAULT_PREFIX are this installation's. If they are, "
    "restore the server's storage that belongs to this database."
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem: where it is, what it is, and how to fix it."""

    subject: str
    problem: str
    remedy: str


def repair_advice(what: str) -> str:
    return f"Repair {what}: {BOOTSTRAP}. It prints its changes; --dry-run changes nothing."


def login_advice(options: str) -> str:
    return f"Create one and copy it to this host: {BOOTSTRAP} --logins-folder FOLDER {options}"


def renewal_advice(role: str) -> str:
    """Advise how to replace the secret ids of one role. No other role loses its own."""
    return (
        f"{BOOTSTRAP} --logins-folder FOLDER --role {role} --renew-logins. This destroys the role's secret ids on "
        "all hosts: copy the new files to every host that needs the role."
    )


def read_unreachable(error: BackendError) -> tuple[str, str]:
    """Return the problem of, and the remedy for, a server that cannot be reached."""
    reason = error.internal or error.detail
    if reason.startswith("TLS"):
        return (
            f"The server's certificate is not trusted ({reason}).",
            "Set VAULT_CACERT to the file of the CA that signed it; the certificate must have the name in VAULT_ADDR.",
        )
    if error.status is not None and 300 <= error.status < 400:
        return (
            f"The address redirects ({error.status}).",
            "Set VAULT_ADDR to the active node or a load balancer; a token is never sent to the target of a redirect.",
        )
    if isinstance(error, BackendUnavailableError):
        return (
            f"The server does not answer ({reason}).",
            "Check that the server is up, that VAULT_ADDR is right, and that no firewall blocks the connection.",
        )
    return f"The server at this address is not a Vault ({reason}).", "Set VAULT_ADDR to the address without /v1."


def read_unready(status: int) -> tuple[str, str]:
    """Return the problem and the remedy for the status of the health check."""
    known = {
        429: ("The node is a standby.", "Set VAULT_ADDR to the active node; a balancer finds it by /v1/sys/health."),
        472: ("The node is a recovery standby.", "Set VAULT_ADDR to the active node of the primary cluster."),
        473: ("The node is a performance standby.", "Set VAULT_ADDR to the active node."),
        501: ("The server is not initialized.", "Run bao operator init and bao operator unseal; see deploy/vault."),
        503: ("The server is sealed.", "The key holders run bao operator unseal. Verification continues meanwhile."),
    }
    return known.get(status, (f"Its health check answers {status}.", "Check the server's log, and that it is a Vault."))


def read_refused(name: str, error: BackendError) -> tuple[str, str]:
    """Return the problem of, and the remedy for, a login that failed."""
    reason, role = error.internal or error.detail, name.rpartition("-")[0].rpartition("-")[2]
    if isinstance(error, InterceptedLoginError):
        return reason, (
            "Find out in the server's audit log who unwrapped it. Then destroy every secret id of the role and create "
            f"a new one: {renewal_advice(role)}"
        )
    if "CIDR" in reason:
        return "The login is not allowed from this host's address.", f"Run {BOOTSTRAP} --cidr … for each network."
    if isinstance(error, BackendUnavailableError):
        return (
            f"The server cannot answer ({reason}).",
            "Check the server's log, its quotas and the disk of its audit log.",
        )
    if isinstance(error, BackendInvalidError) or error.status == 400:
        return (
            "The login is not accepted: the role is missing, or its secret id is wrong, has expired or was destroyed.",
            f"{BOOTSTRAP} repairs the role. Create a new login: {renewal_advice(role)}",
        )
    if error.status == 404:
        return f"The auth method is not set up ({reason}).", repair_advice("it")
    if error.status == 403 and "/login:" in reason:
        return (
            f"The server refuses the login ({reason}).",
            "With Kubernetes: the pod's service account or namespace is not the role's, or its token has expired.",
        )
    if error.status == 403:
        return (
            f"The server denies access ({reason}): its policy is missing or foreign, or an agent's token has expired.",
            repair_advice("the policy") + " With an agent: check that it runs.",
        )
    return reason, login_advice(f"--role {role}")
