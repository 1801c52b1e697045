"""The experiments by name: what each one breaks, on which database, and which servers it needs."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Experiment:
    """An experiment: the function `run(options: Options) -> Result` of `module`.

    `minutes`: approximate duration on two cores. `is_beside`: it runs beside the others, with the processor time
    that they leave. `group`: neighbors of one group run at the same time; they wait more than they work.
    """

    name: str
    module: str
    what: str
    minutes: float
    database: str = "postgres"
    servers: frozenset[str] = frozenset({"postgres", "redis"})
    choice: str = ""
    is_beside: bool = False
    group: str = ""


_ON_SQLITE = frozenset[str]()
_WATCHED = frozenset({"postgres", "redis", "prometheus"})

EXPERIMENTS = (
    Experiment(
        "crash-sqlite",
        "crash_points",
        "kill -9 of a worker before and after every side effect, under traffic",
        3,
        database="sqlite",
        servers=_ON_SQLITE,
    ),
    Experiment("crash-postgres", "crash_points", "the same on PostgreSQL and Redis", 3),
    Experiment("broker-redis", "broker", "Redis is gone for the middle of a campaign", 1.5, choice="redis"),
    Experiment(
        "broker-rabbitmq",
        "broker",
        "RabbitMQ is gone for the middle of a campaign",
        1.5,
        servers=frozenset({"postgres", "rabbitmq"}),
        choice="rabbitmq",
    ),
    Experiment("deliveries", "deliveries", "20 % of the messages lost and 20 % delivered twice", 1),
    Experiment("beats", "beats", "two beats and two workers", 1),
    Experiment("database", "database", "PostgreSQL restarted under load, fast and immediate", 1.5),
    Experiment(
        "failover",
        "failover",
        "PostgreSQL's primary lost permanently, and a standby that lags promoted",
        1.5,
        servers=frozenset({"postgres"}),
    ),
    Experiment(
        "clock",
        "clock",
        "workers whose clock is an hour ahead, and an hour behind",
        1,
        servers=frozenset({"postgres"}),
    ),
    Experiment(
        "disk",
        "disk",
        "the disk of the data folder full, and keys revoked on it",
        1,
        database="sqlite",
        servers=frozenset({"mount"}),
    ),
    Experiment(
        "master-key",
        "master_key",
        "the master key rotated, killed again and again on the way, and the session key",
        1.5,
        database="sqlite",
        servers=_ON_SQLITE,
    ),
    Experiment("traffic", "under_traffic", "200 credentials rotated by a campaign under constant traffic", 2.5),
    Experiment(
        "feed",
        "feed",
        "verifiers cut off from the change feed in a dozen ways, and never a stale yes",
        2.5,
        servers=frozenset({"postgres"}),
    ),
    Experiment(
        "region",
        "region",
        "a regional verifier over a line with delays, losses and partitions, and never a grant after a receipt",
        4,
        servers=frozenset({"postgres"}),
    ),
    Experiment(
        "alerts-hosts",
        "alerts",
        "each fault of hosts and servers fires exactly its alerts within a minute, in a real Prometheus",
        13,
        servers=_WATCHED,
        choice="hosts",
        group="alerts",
    ),
    Experiment(
        "alerts-work",
        "alerts",
        "the same for faults of the work: keystore, tables, webhooks, sign-ins, a rotation",
        10,
        servers=_WATCHED,
        choice="work",
        group="alerts",
    ),
    Experiment(
        "alerts-vault",
        "alerts",
        "the same for a sealed OpenBao or Vault",
        5,
        servers=_WATCHED | {"openbao"},
        choice="vault",
        group="alerts",
    ),
    Experiment(
        "restore",
        "restore",
        "a database set back under every kind of revocation log, with and without the revocation anchor",
        3,
        database="sqlite",
        servers=_ON_SQLITE,
    ),
    Experiment(
        "vault",
        "vault",
        "an OpenBao or Vault sealed, killed, full, slow, … at every call of a rotation",
        15,
        database="sqlite",
        servers=frozenset({"openbao"}),
        is_beside=True,
    ),
    Experiment(
        "machine",
        "machine",
        "10,000 random histories of the state machine",
        12,
        database="sqlite",
        servers=_ON_SQLITE,
        is_beside=True,
    ),
)


def choose(names: list[str]) -> list[Experiment]:
    """Return the experiments of these names or prefixes (before a dash); without names, all. Raises LookupError."""
    if not names:
        return list(EXPERIMENTS)
    for name in names:
        if not any(_is_meant(name, each) for each in EXPERIMENTS):
            raise LookupError(name)
    return [each for each in EXPERIMENTS if any(_is_meant(name, each) for name in names)]


def _is_meant(name: str, experiment: Experiment) -> bool:
    return experiment.name == name or experiment.name.startswith(f"{name}-")
