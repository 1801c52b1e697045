"""Authenticated principals: immutable values that an entry point creates after proof, never from a mere claim.

`actor` is the name in the audit log. `person` is the human behind it, whom four-eyes checks compare.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from keyvault.access.permissions import Permission
from keyvault.access.roles import Role, permissions_of
from keyvault.access.scopes import AccessScope
from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind
from keyvault.domain.networks import IPNetwork


class Channel(StrEnum):
    """The entry point that a principal used."""

    CONSOLE = "console"
    REST = "rest"
    COMMAND_LINE = "command_line"
    WORKER = "worker"


@dataclass(frozen=True, slots=True)
class OperatorPrincipal:
    """A person with a console session, or named on the command line by `host_user`, a user of the host."""

    username: str
    person: str
    roles: frozenset[Role]
    scope: AccessScope
    channel: Channel = Channel.CONSOLE
    host_user: str | None = None

    @property
    def actor(self) -> str:
        return f"operator:{self.username}"

    @property
    def permissions(self) -> frozenset[Permission]:
        return permissions_of(self.roles)


@dataclass(frozen=True, slots=True)
class Service:
    """A backend service or gateway authenticated by a service token.

    `lineage`: id of the first token in a series of rotations, so that a successor may continue what a predecessor
    began. `is_probe`: its verifications are the service's own test calls and do not count as use of a key.
    """

    token_id: str
    name: str
    person: str
    permissions: frozenset[Permission]
    scope: AccessScope
    lineage: str = ""
    is_probe: bool = False
    channel: Channel = field(default=Channel.REST, init=False)

    @property
    def actor(self) -> str:
        return f"service:{self.token_id}"


@dataclass(frozen=True, slots=True)
class KeyHolder:
    """The caller that proved possession of an API key. `networks` empty: valid from any address."""

    key_id: str
    credential_id: str
    kind: KeyKind
    environment: Environment
    merchant_id: str
    merchant_active: bool = True
    account_active: bool = True
    reports_origin: bool = False
    networks: tuple[IPNetwork, ...] = ()
    channel: Channel = field(default=Channel.REST, init=False)

    @property
    def actor(self) -> str:
        return f"key:{self.key_id}"


SYSTEM_PREFIX = "system:"
"""Prefix of the actor of a part of the service; no person's id begins with it."""


@dataclass(frozen=True, slots=True)
class System:
    """A part of the service itself, such as its jobs or the host's command line, with its minimal permissions."""

    name: str
    permissions: frozenset[Permission]
    channel: Channel = Channel.WORKER

    @property
    def actor(self) -> str:
        return f"{SYSTEM_PREFIX}{self.name}"


WORKER = System(
    "worker",
    frozenset({Permission.ISSUANCE_EXECUTE, Permission.ROTATIONS_ADVANCE, Permission.ROTATIONS_BEGIN})
    | {Permission.WEBHOOKS_DELIVER, Permission.AUDIT_SIGN, Permission.KEYS_REHASH, Permission.BACKEND_RECONCILE}
    | {Permission.REVOCATION_LOG_APPEND, Permission.REVOCATIONS_REPLAY, Permission.PROCESSES_WATCH},
)
CONSOLE = System("console", frozenset({Permission.SESSIONS_WRITE}), Channel.CONSOLE)
"""The console's sign-in page, which records unauthenticated attempts."""
SINGLE_SIGN_ON = System(
    "single_sign_on", frozenset({Permission.OPERATORS_WRITE, Permission.OPERATORS_ENROLL}), Channel.CONSOLE
)
"""Single sign-on, which creates operators and sets their roles as the identity provider states."""
HOST = System(
    "host",
    frozenset({Permission.OPERATORS_WRITE, Permission.OPERATORS_ENROLL})
    | {Permission.MERCHANTS_WRITE, Permission.TOKENS_WRITE}
    | {Permission.PEPPERS_READ, Permission.PEPPERS_WRITE, Permission.REVOCATIONS_REPLAY}
    | {Permission.INSTALLATION_MAINTAIN},
    Channel.COMMAND_LINE,
)
"""The host's command line, for setup. It can neither approve requests nor read keys."""

Principal = OperatorPrincipal | Service | KeyHolder | System


def is_claimed(principal: Principal) -> bool:
    """Whether the principal is only claimed: it acts on a command line, which proves no identity."""
    return principal.channel is Channel.COMMAND_LINE
