"""Who asks. Frozen values that a door makes after proof; nothing here was merely claimed.

`actor` is the name in the audit log; `person` the human being behind it, which four eyes compare.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from keyvault.access.permissions import Permission
from keyvault.access.roles import Role, permissions_of
from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind
from keyvault.domain.networks import IPNetwork


class Channel(StrEnum):
    """The door a principal came through."""

    CONSOLE = "console"
    REST = "rest"
    COMMAND_LINE = "command_line"
    WORKER = "worker"


@dataclass(frozen=True, slots=True)
class Operator:
    """A person with an admin session, or one named on a command line by a user of the host."""

    username: str
    person: str
    roles: frozenset[Role]
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
    """A backend service or gateway that proved a service token. `merchants` None: all of them.

    `lineage` is the first token of a row of rotated ones: what one of them began, its successor may go on with.
    What one that `is_probe` verifies is a test call of our own, and no use of a key.
    """

    token_id: str
    name: str
    person: str
    permissions: frozenset[Permission]
    environments: frozenset[Environment]
    merchants: frozenset[str] | None = None
    lineage: str = ""
    is_probe: bool = False
    channel: Channel = field(default=Channel.REST, init=False)

    @property
    def actor(self) -> str:
        return f"service:{self.token_id}"


@dataclass(frozen=True, slots=True)
class KeyHolder:
    """Whoever proved possession of an API key's secret. `networks` empty: good from everywhere."""

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


@dataclass(frozen=True, slots=True)
class System:
    """Our own scheduled work, and the host's owner at its command line; each with its own few rights."""

    name: str
    permissions: frozenset[Permission]
    channel: Channel = Channel.WORKER

    @property
    def actor(self) -> str:
        return f"system:{self.name}"


WORKER = System(
    "worker",
    frozenset({Permission.ISSUANCE_EXECUTE, Permission.ROTATIONS_ADVANCE, Permission.ROTATIONS_BEGIN})
    | {Permission.WEBHOOKS_DELIVER, Permission.AUDIT_SIGN, Permission.KEYS_REHASH, Permission.BACKEND_RECONCILE}
    | {Permission.JOURNAL_KEEP},
)
CONSOLE = System("console", frozenset({Permission.SESSIONS_WRITE}), Channel.CONSOLE)
"""The console's sign-in page: records attempts that proved no identity."""
HOST = System(
    "host",
    frozenset({Permission.OPERATORS_WRITE, Permission.MERCHANTS_WRITE, Permission.TOKENS_WRITE})
    | {Permission.PEPPERS_READ, Permission.PEPPERS_WRITE, Permission.REVOCATIONS_REPLAY},
    Channel.COMMAND_LINE,
)
"""Whoever has a shell on the host has the database too; it sets up, but approves and reads nothing."""

Principal = Operator | Service | KeyHolder | System
