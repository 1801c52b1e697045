"""Who uses a key, in the console: what rotation waits for, and what whoever ends a key should have seen."""

from collections.abc import Iterable
from typing import Any

from keyvault.admin.cells import NOTHING, Table, badge, moment, mono, short_moment
from keyvault.domain.keys import KeyKind
from keyvault.models import Key
from keyvault.services.usage_reports import describe_use, find_users, list_networks, list_versions

_MOST_ROWS = 20


def use_facts(key: Key) -> Iterable[tuple[str, Any]]:
    """Real use in total; and when it was last presented otherwise, where it ever was."""
    use = describe_use(key)
    yield "First used", moment(use.first_at, missing="never")
    yield "Last used", moment(use.last_at, missing="never")
    yield "Uses", use.count
    for label, at in (
        ("Last denied for another reason", use.denied_at),
        ("Last tried while suspended", use.tried_at),
        ("Last probed by us", use.probed_at),
    ):
        if at is not None:
            yield label, moment(at)


def use_tables(key: Key) -> Iterable[Table]:
    """Of a public key its shops and app versions come first; where nothing was seen there is one empty table."""
    if key.credential.kind == KeyKind.PUBLIC:
        yield from _versions(key)
    yield Table(
        "Who uses it",
        ["source", "user agent", "endpoint", "outcome", "times", "first seen (UTC)", "last seen (UTC)"],
        [
            [
                mono(user.source),
                user.user_agent or NOTHING,
                user.endpoint or NOTHING,
                badge(user.outcome),
                user.count,
                short_moment(user.first_at),
                short_moment(user.last_at),
            ]
            for user in find_users(key.key_id, limit=_MOST_ROWS)
        ],
        empty="Nobody has used it.",
    )
    yield from _networks(key)


def _versions(key: Key) -> Iterable[Table]:
    versions = list_versions(key.key_id, limit=_MOST_ROWS)
    if versions:
        yield Table(
            "Shops and app versions",
            ["origin", "user agent", "sources", "times", "first seen (UTC)", "last seen (UTC)"],
            [
                [
                    version.origin or NOTHING,
                    version.user_agent or NOTHING,
                    version.sources,
                    version.count,
                    short_moment(version.first_at),
                    short_moment(version.last_at),
                ]
                for version in versions
            ],
        )


def _networks(key: Key) -> Iterable[Table]:
    networks = list_networks(key.key_id, limit=_MOST_ROWS)
    if networks:
        yield Table(
            "From which networks",
            ["network", "sources", "times", "first seen (UTC)", "last seen (UTC)"],
            [
                [
                    mono(network.network),
                    network.sources,
                    network.count,
                    short_moment(network.first_at),
                    short_moment(network.last_at),
                ]
                for network in networks
            ],
        )
