"""Texts of the doctor: the description and remedy of each problem of the server or a login."""

from dataclasses import dataclass
from typing import Final

from keyvault.backends.base import BackendError, BackendInvalidError, BackendUnavailableError
from keyvault.backends.vault.logins import TakenLoginError

BOOTSTRAP: Final = "manage.py vault_bootstrap --environment ENVIRONMENT --token-file FILE"

RESTORE: Final = (
    "Do not run setup again. Does VAULT_ADDR or KEYVAULT_VAULT_PREFIX name another installation's server? Else restore "
    "the server's storage that belongs to this database."
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem: where it is, what it is, and how to fix it."""

    subject: str
    problem: str
    cure: str


def mend(what: str) -> str:
    return f"Mend {what}: {BOOTSTRAP}. It says what it changes; --dry-run only says it."


def hand_over(options: str = "") -> str:
    return f"Make one and bring it here: {BOOTSTRAP} --logins-folder FOLDER {options}".strip()


def read_unreachable(error: BackendError) -> tuple[str, str]:
    """Return the problem and the cure of a server that cannot be reached."""
    reason = error.internal or error.detail
    if reason.startswith("TLS"):
        return (
            f"The server's certificate is not trusted ({reason}).",
            "VAULT_CACERT names the file of the CA that signed it; the name in VAULT_ADDR must be in the certificate.",
        )
    if error.status is not None and 300 <= error.status < 400:
        return (
            f"The address redirects ({error.status}).",
            "VAULT_ADDR names the active node, or a balancer that finds it; a token is not sent after a redirect.",
        )
    if isinstance(error, BackendUnavailableError):
        return (
            f"Nobody answers there ({reason}).",
            "Is the server up, is VAULT_ADDR right, does a firewall let us through?",
        )
    return f"What answers there is no Vault ({reason}).", "VAULT_ADDR is the address alone, without /v1."


def read_unready(status: int) -> tuple[str, str]:
    """Return the problem and the cure for the status of the health check."""
    known = {
        429: ("The node is a standby.", "VAULT_ADDR names the active node: a balancer finds it by /v1/sys/health."),
        472: ("The node is a recovery standby.", "VAULT_ADDR names the active node of the primary cluster."),
        473: ("The node is a performance standby.", "VAULT_ADDR names the active node."),
        501: ("The server was not initialised.", "bao operator init, and bao operator unseal; see deploy/vault."),
        503: ("The server is sealed.", "bao operator unseal, by the holders of the key shares. Verification goes on."),
    }
    return known.get(status, (f"Its health check answers {status}.", "Is it a Vault? Look at the server's log."))


def read_refused(name: str, error: BackendError) -> tuple[str, str]:
    """Return the problem and the cure of a login that failed."""
    reason, role = error.internal or error.detail, name.rpartition("-")[0].rpartition("-")[2]
    if isinstance(error, TakenLoginError):
        return reason, (
            "Find out in the server's audit log who opened it. Then have every secret id of the role destroyed, and "
            f"another one made: {BOOTSTRAP} --logins-folder FOLDER --role {role} --renew-logins."
        )
    if "CIDR" in reason:
        return "This host's address is not one that the login is bound to.", f"{BOOTSTRAP} --cidr … for each network."
    if isinstance(error, BackendUnavailableError):
        return (
            f"The server cannot answer ({reason}).",
            "Look at the server's log: a quota, a full disk under its audit log?",
        )
    if isinstance(error, BackendInvalidError) or error.status == 400:
        return (
            "The login is not accepted: the role is gone, or its secret id is wrong, has expired or was destroyed.",
            f"{BOOTSTRAP} mends the role. " + hand_over(f"--role {role} --renew-logins"),
        )
    if error.status == 404:
        return f"The way of logging in is not set up ({reason}).", mend("it")
    if error.status == 403 and "/login:" in reason:
        return (
            f"The server refuses the login ({reason}).",
            "With Kubernetes: the pod's service account and namespace are not the role's, or its token has ended.",
        )
    if error.status == 403:
        return (
            f"The server refuses it ({reason}): its policy is missing or not ours, or an agent's token has ended.",
            mend("the policy") + " With an agent: see that it runs.",
        )
    return reason, hand_over(f"--role {role}")
