"""Credentials in the console: viewed and restricted to networks; never edited."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from django import forms
from django.contrib import admin
from django.db.models import Model, Prefetch, Q, QuerySet, prefetch_related_objects
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.admin.framework.accounts import account_crumbs, account_link
from keyvault.admin.framework.actions import ActionResult, Cleaned, RowAction, VersionedForm
from keyvault.admin.framework.activity import activity_cards
from keyvault.admin.framework.charts import Sparkline
from keyvault.admin.framework.columns import moment_column
from keyvault.admin.framework.components import Columns, Meter, Stack
from keyvault.admin.framework.model_admin import ConsoleModelAdmin
from keyvault.admin.framework.overview import format_bounded
from keyvault.admin.framework.widgets import (
    NOTHING,
    Detail,
    Extras,
    FactTable,
    KeyDates,
    Line,
    Table,
    badge,
    counted,
    duration,
    identifier,
    link,
    moment,
    mono,
    noted,
)
from keyvault.admin.keys.keys import key_link, use_of
from keyvault.admin.keys.traffic import day_card, day_traffic, sparklines_of
from keyvault.admin.keys.usage import sources_table
from keyvault.admin.merchants.provider_connections import place_rows
from keyvault.domain.errors import Fault, RequestInvalidError
from keyvault.domain.keys import DEAD_STATES, KeyKind, KeyState
from keyvault.domain.networks import MAX_NETWORKS
from keyvault.models import Account, Credential, Key
from keyvault.models.keys import OriginHeader
from keyvault.models.row_count import RowCount
from keyvault.models.union_parts import limit_part
from keyvault.models.usage import SIGNS_OF_LIFE
from keyvault.services.keys.credentials import find_delivery_location, restrict_credential

ORIGIN_HEADER = {
    OriginHeader.REFUSE: "refused: it may come from a browser",
    OriginHeader.REPORT: "reported only: the backend forwards the header",
}


class RestrictForm(VersionedForm):
    networks = forms.CharField(
        required=False,
        max_length=MAX_NETWORKS * 66,
        widget=forms.Textarea(attrs={"rows": 5, "class": "mono"}),
        help_text="One CIDR block per line, such as 192.0.2.0/24 or 2001:db8::/32. Empty: accepted from everywhere.",
    )
    origin_header = forms.ChoiceField(
        label="A private key with an Origin header",
        choices=[(policy.value, label) for policy, label in ORIGIN_HEADER.items()],
    )

    @classmethod
    def initial_for(cls, row: Any) -> dict[str, Any]:
        return {"version": row.version, "networks": "\n".join(row.networks), "origin_header": row.origin_header}


def _restrict(grant: Grant, credential: Credential, cleaned: Cleaned) -> ActionResult:
    networks = cleaned["networks"].split()
    try:
        restrict_credential(grant, credential, networks, OriginHeader(cleaned["origin_header"]))
    except RequestInvalidError as error:
        raise RequestInvalidError(error.detail, [_by_line(fault, networks) for fault in error.faults]) from error
    return ActionResult("Restrictions saved. They apply from the next request.")


def _by_line(fault: Fault, networks: list[str]) -> Fault:
    """Name the network in the fault, because the form has one field for all networks."""
    field, _, place = fault.pointer.removeprefix("/").partition("/")
    return fault if not place else Fault(f"/{field}", f"{networks[int(place)][:64]}: {fault.detail}")


class CredentialAdmin(ConsoleModelAdmin):
    view_permissions = (P.KEYS_READ,)
    menu, singular, plural = "Credentials", "Credential", "Credentials"
    id_pattern = r"crd_[0-9A-Za-z]{20}"
    account_lookup = "account"
    environment_lookup = "account_environment"
    row_actions: tuple[RowAction, ...] = (
        RowAction(
            "restrict",
            "Restrict use",
            P.CREDENTIALS_RESTRICT,
            _restrict,
            lambda credential: (
                "Restricts the networks from which the credential's keys may be used, from the next request. Other "
                "addresses are refused with ip_not_allowed, and so are requests without a client address."
            ),
            form=RestrictForm,
        ),
    )

    list_display = ("name", "account", "kind", "key_states", "credential_id", "created")
    list_filter = ("account_environment", "kind", "delivery")
    search_fields = ("=credential_id", "=keys__key_id", "=account__merchant__merchant_id", "^label")
    search_help_text = "By credential id, key id, merchant id or the beginning of a label. Never paste a whole key."
    sortable_by = ()
    ordering = ("-created_at",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).select_related("account__merchant")

    def rows_shown(self, request: HttpRequest, rows: QuerySet[Any]) -> QuerySet[Any]:
        return super().rows_shown(request, rows).prefetch_related(Prefetch("keys", _list_living_keys()))

    def find_row(self, request: HttpRequest, object_id: str) -> Any:
        """Load the credential with its usable and suspended keys and the newest others. Raises NotFoundError."""
        row = super().find_row(request, object_id)
        newest = Key.objects.filter(credential=row).order_by("-created_at").values("pk")[: _MAX_KEYS + 1]
        shown = Key.objects.filter(~Q(state__in=DEAD_STATES) | Q(pk__in=newest))
        prefetch_related_objects([row], Prefetch("keys", shown.select_related("use").order_by("-created_at")))
        return row

    @admin.display(description="label")
    def name(self, credential: Credential) -> str:
        return credential.label or credential.credential_id

    @admin.display(description="keys")
    def key_states(self, credential: Credential) -> SafeString:
        """Show the state of each key that has not ended. There may be hundreds that have ended."""
        return format_html_join(" ", "{}", ((badge(key.state),) for key in credential.keys.all())) or badge("ended")

    created = moment_column("created", "created_at")

    def account_of(self, row: Credential) -> Account:
        return row.account

    def find_by_word(self, request: HttpRequest, word: str) -> Iterable[QuerySet[Any]]:
        yield from super().find_by_word(request, word)
        yield self.get_queryset(request).order_by().filter(label__startswith=word)

    def hit_of(self, row: Credential) -> Line:
        return Line(self.url_of(row), row.label, f"{row.account} · {row.credential_id}")

    def summary(self, row: Credential) -> FactTable:
        return _facts(row)

    def detail(self, request: HttpRequest, row: Credential) -> Detail:
        keys = list(row.keys.all())
        # An active key may be older than others that have ended.
        living_first = sorted(keys, key=lambda key: key.state in DEAD_STATES)
        traffic = day_traffic(living_first, SIGNS_OF_LIFE)
        chart = day_card(living_first, traffic)
        timeline = activity_cards(request, row.account, [row.pk, *(key.key_id for key in keys[:_MAX_KEYS])])
        where = ", ".join(row.networks) if row.networks else "everywhere"
        return Detail(
            title=row.label or row.credential_id,
            state=f"{row.kind}_key",
            lead=format_html("{} · accepted from {}", identifier(row), where),
            crumbs=account_crumbs(row.account),
            sections=[
                Columns(
                    [
                        Stack([*([chart] if chart else []), _keys_table(keys), sources_table(traffic)]),
                        *(timeline or (_facts(row),)),
                    ]
                ),
                *([_facts(row)] if timeline else []),
            ],
        )

    def extras_for(self, request: HttpRequest, row: Model) -> Extras | None:
        """Add the credentials of an account to its page."""
        if not isinstance(row, Account) or not self.has_view_permission(request):
            return None
        return Extras(sections=list(self.account_cards(request, [row]).values()))

    def account_cards(self, request: HttpRequest, accounts: Sequence[Account]) -> Mapping[int, Table]:
        """Return the newest credentials of each account with the age, uses and next rotation of their keys."""
        if not accounts or not self.has_view_permission(request):
            return {}
        rows = list(_read_newest(accounts))
        found = {account.pk: [row for row in rows if row.account_id == account.pk] for account in accounts}
        shown = [row for each in found.values() for row in each]
        prefetch_related_objects(shown, Prefetch("keys", _list_living_keys().select_related("use")))
        lines = sparklines_of({row.pk: [key.key_id for key in row.keys.all()] for row in shown})
        dates: dict[str, KeyDates] = {}
        for other in self.other_admins():
            dates |= other.find_key_dates(request, shown)
        return {
            account.pk: Table(
                f"Credentials in {account.environment}",
                ["credential", "age", "last use", "next rotation"],
                [_credential_cells(row, lines[row.pk], dates.get(row.pk)) for row in found[account.pk]],
                empty="No credentials yet. Request a key to create one.",
                aside=self._list_link(account, found[account.pk]),
            )
            for account in accounts
        }

    def _list_link(self, account: Account, rows: Sequence[Any]) -> SafeString | str:
        """Return the link to all credentials of an account, with their number. `rows`: the newest."""
        if not rows:
            return ""
        url = self.list_url(f"?q={account.merchant_id}&account_environment__exact={account.environment}")
        return link(url, f"All {format_bounded(rows[0].listed_of, _MAX_COUNTED)}")


def _list_living_keys() -> QuerySet[Key]:
    """Return the keys that have not ended, newest first."""
    rows: QuerySet[Key] = Key.objects.exclude(state__in=DEAD_STATES).order_by("-created_at")
    return rows


def _read_newest(accounts: Sequence[Account]) -> Iterable[Any]:
    """Read the newest credentials of each account, newest first. `listed_of`: the number of all of the account."""
    parts = []
    for account in accounts:
        of_account = Credential.objects.filter(account=account)
        newest = limit_part(of_account.order_by("-created_at"), MAX_CREDENTIALS)
        parts.append(newest.annotate(listed_of=RowCount(of_account.order_by().values("pk")[: _MAX_COUNTED + 1])))
    known = {account.pk: account for account in accounts}
    for row in sorted(parts[0].union(*parts[1:], all=True), key=lambda row: row.created_at, reverse=True):
        row.account = known[row.account_id]
        yield row


def _credential_cells(row: Credential, line: Sparkline, dates: KeyDates | None) -> list[Any]:
    """Return the age of the newest key, and the uses of all usable keys: a rotation's old key may be in use."""
    url, usable = reverse("admin:keyvault_credential_change", args=[row]), row.keys.all()
    others = [badge(key.state) for key in usable if key.state != KeyState.ACTIVE]
    count = len(usable) - len(others)
    kind = row.kind if count == 1 else f"{row.kind}, {counted(count, 'active key')}"
    states = format_html_join("", " {}", ((each,) for each in others))
    name = noted(link(url, row.label or row), format_html("{}{}", kind, states))
    newest = next(iter(usable), None)
    if newest is None:
        return [name, NOTHING, NOTHING, NOTHING]
    used_at = max((at for key in usable if (at := use_of(key, "last_at")) is not None), default=None)
    next_rotation = NOTHING if dates is None else dates.next_rotation
    if newest.expires_at is not None:
        next_rotation = noted(next_rotation, format_html("expires {}", moment(newest.expires_at)))
    return [
        name,
        _age(newest, None if dates is None else dates.cryptoperiod),
        noted(line, moment(used_at, missing="never")),
        next_rotation,
    ]


def _age(key: Key, cryptoperiod: timedelta | None) -> SafeString | str:
    """Return the age of a key, and which part of its cryptoperiod that is."""
    if key.activated_at is None:
        return "not active yet"
    age = datetime.now(UTC) - key.activated_at
    if cryptoperiod is None:
        return duration(age)
    tone = "bad" if age > cryptoperiod else "wait" if age > _LATE * cryptoperiod else ""
    label = f"{age.days} of {cryptoperiod.days} days of the cryptoperiod"
    meter = Meter(age.total_seconds(), cryptoperiod.total_seconds(), label, tone)
    return noted(meter, f"{duration(age)} of {cryptoperiod.days} d")


_LATE = 0.9
"""Part of the cryptoperiod after which the age of a key is marked."""

_MAX_COUNTED = 1_000
"""Maximum credentials of an account that are counted."""

MAX_CREDENTIALS = 10
"""Maximum credentials that the page of an account or merchant lists, the newest."""

_MAX_KEYS = 20
"""Maximum keys that the page of a credential lists, the newest."""


def _keys_table(keys: Sequence[Key]) -> Table:
    title = "Keys" if len(keys) <= _MAX_KEYS else f"Keys: the newest {_MAX_KEYS}"
    usable = sum(key.state == KeyState.ACTIVE for key in keys)
    return Table(
        title,
        ["key id", "state", "issued", "last used", "expires"],
        [
            [
                key_link(key),
                badge(key.state),
                moment(key.activated_at),
                moment(use_of(key, "last_at"), missing="never"),
                moment(key.expires_at, missing="never"),
            ]
            for key in keys[:_MAX_KEYS]
        ],
        empty="No keys yet. Keys appear here when they are issued.",
        aside=f"{usable} are valid" if usable > 1 else "",
    )


def _facts(credential: Credential) -> FactTable:
    return FactTable(
        "Credential",
        [
            ("Credential id", mono(credential)),
            ("Account", account_link(credential.account)),
            ("Kind", f"{credential.kind} API key"),
            ("Label", credential.label),
            ("Delivery", credential.get_delivery_display()),
            *place_rows(find_delivery_location(credential)),
            *_restrictions(credential),
            ("Created", moment(credential.created_at)),
        ],
    )


def _restrictions(credential: Credential) -> Iterable[tuple[str, Any]]:
    yield "Accepted from", format_html_join(" ", "{}", ((mono(text),) for text in credential.networks)) or "everywhere"
    if credential.kind == KeyKind.PRIVATE:
        yield "A private key with an Origin header", ORIGIN_HEADER[OriginHeader(credential.origin_header)]
