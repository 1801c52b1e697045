"""Use of a key in the console, as evidence for rotation and revocation."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, TypeVar

from django.urls import reverse
from django.utils.html import format_html_join

from keyvault.admin.framework.widgets import NOTHING, Table, badge, moment, mono, noted
from keyvault.domain.keys import KeyKind
from keyvault.models import Key
from keyvault.services.usage.reports import (
    MAX_READ,
    KeyUser,
    describe_use,
    first_of_each_outcome,
    networks_of,
    versions_of,
)
from keyvault.services.usage.series import Traffic

T = TypeVar("T")

_MAX_ROWS = 20

_MAX_SOURCES = 10
"""Maximum sources that the page of a credential lists, the latest."""


def use_facts(key: Key) -> Iterable[tuple[str, Any]]:
    """Yield the total real use, and the times of the last refused, suspended and probe attempts."""
    use = describe_use(key)
    yield "First used", moment(use.first_at, missing="never")
    yield "Last used", moment(use.last_at, missing="never")
    yield "Uses", f"{use.count:,}"
    for label, at in (
        ("Last refused for another reason", use.denied_at),
        ("Last attempt while suspended", use.tried_at),
        ("Last probe", use.probed_at),
    ):
        if at is not None:
            yield label, moment(at)


def use_tables(key: Key, found: Sequence[KeyUser], *, has_more: bool) -> Iterable[Table]:
    """Yield the tables of users and networks; for a public key, shops and app versions come first.

    `found`: of `read_users`. `has_more`: the key has more users.
    """
    if key.credential.kind == KeyKind.PUBLIC:
        yield from _versions(found, has_more)
    users = first_of_each_outcome(found, _MAX_ROWS)
    is_cut = len(users) < len(found)
    title = _title(f"Who uses the key: latest {_MAX_ROWS} of each outcome" if is_cut else "Who uses the key", has_more)
    has_pages = any(user.origin for user in users)
    yield Table(
        title,
        [
            *("source", "user agent", *(["origin"] if has_pages else []), "endpoint", "outcome", "uses"),
            *("first seen", "last seen"),
        ],
        [
            [
                mono(user.source),
                user.user_agent or NOTHING,
                *([user.origin or NOTHING] if has_pages else []),
                user.endpoint or NOTHING,
                badge(user.outcome),
                f"{user.count:,}",
                moment(user.first_at),
                moment(user.last_at),
            ]
            for user in users
        ],
        empty="No use recorded yet. Sources that present the key appear here.",
    )
    yield from _networks(found, has_more)


def sources_table(traffic: Traffic) -> Table:
    """Return the sources that use the keys of a credential, the latest first, with the keys that each uses."""
    found: dict[str, list[tuple[str, KeyUser]]] = {}
    for key_id, users in traffic.users.items():
        for user in users:
            found.setdefault(user.source, []).append((key_id, user))
    latest = sorted(found.items(), key=lambda each: max(user.last_at for _, user in each[1]), reverse=True)
    title = _title("Who uses it", traffic.has_more_users)
    return Table(
        f"{title}: the latest {_MAX_SOURCES}" if len(latest) > _MAX_SOURCES else title,
        ["source and program", "key", "requests", "last used"],
        [_source_cells(source, uses) for source, uses in latest[:_MAX_SOURCES]],
        empty="No use recorded yet. Sources that present a key appear here.",
        aside="the page of a key lists every use",
    )


def _source_cells(source: str, uses: Sequence[tuple[str, KeyUser]]) -> list[Any]:
    newest = max((user for _, user in uses), key=lambda user: user.last_at)
    last: dict[str, datetime] = {}
    for key_id, user in uses:
        last[key_id] = max(user.last_at, last.get(key_id, user.last_at))
    keys = sorted(last, key=lambda key_id: last[key_id], reverse=True)
    return [
        noted(mono(source), newest.user_agent or "no user agent"),
        format_html_join(
            ", ",
            '<a href="{}">{}</a>',
            ((reverse("admin:keyvault_key_change", args=[key_id]), mono(f"…{key_id[-6:]}")) for key_id in keys),
        ),
        f"{sum(user.count for _, user in uses):,}",
        moment(newest.last_at),
    ]


def _latest(title: str, has_more: bool, found: list[T]) -> tuple[str, list[T]]:
    """Truncate the rows, and note it in the title."""
    if len(found) > _MAX_ROWS:
        title = f"{title}: latest {_MAX_ROWS}"
    return _title(title, has_more), found[:_MAX_ROWS]


def _title(title: str, has_more: bool) -> str:
    """Note the users that were not read."""
    return f"{title} (incomplete: {MAX_READ} users of each outcome are read)" if has_more else title


def _versions(users: Sequence[KeyUser], has_more: bool) -> Iterable[Table]:
    title, versions = _latest("Shops and app versions", has_more, versions_of(users, limit=_MAX_ROWS + 1))
    if versions:
        yield Table(
            title,
            ["origin", "user agent", "sources", "uses", "first seen", "last seen"],
            [
                [
                    version.origin or NOTHING,
                    version.user_agent or NOTHING,
                    version.sources,
                    f"{version.count:,}",
                    moment(version.first_at),
                    moment(version.last_at),
                ]
                for version in versions
            ],
        )


def _networks(users: Sequence[KeyUser], has_more: bool) -> Iterable[Table]:
    title, networks = _latest("Networks", has_more, networks_of(users, limit=_MAX_ROWS + 1))
    if networks:
        yield Table(
            title,
            ["network", "sources", "uses", "first seen", "last seen"],
            [
                [
                    mono(network.network),
                    network.sources,
                    f"{network.count:,}",
                    moment(network.first_at),
                    moment(network.last_at),
                ]
                for network in networks
            ],
        )
