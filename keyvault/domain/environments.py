"""Sandbox and production: two worlds that share nothing but this code (D11, D12)."""

from enum import StrEnum


class Environment(StrEnum):
    SANDBOX = "sandbox"
    PRODUCTION = "production"


class ConnectionMode(StrEnum):
    """Which side of a payment provider a connection talks to."""

    TEST = "test"
    LIVE = "live"


CONNECTION_MODE = {
    Environment.SANDBOX: ConnectionMode.TEST,
    Environment.PRODUCTION: ConnectionMode.LIVE,
}
