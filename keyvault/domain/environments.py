"""The two environments, sandbox and production, which share only code: no keys, peppers or configuration."""

from enum import StrEnum


class Environment(StrEnum):
    SANDBOX = "sandbox"
    PRODUCTION = "production"


class ConnectionMode(StrEnum):
    """The mode of a payment provider's API that a connection uses."""

    TEST = "test"
    LIVE = "live"


CONNECTION_MODE = {
    Environment.SANDBOX: ConnectionMode.TEST,
    Environment.PRODUCTION: ConnectionMode.LIVE,
}
