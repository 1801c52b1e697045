"""Audit chains in the console: filter and search entries, and show the newest signed checkpoint of each scope.

Read-only.
"""

import json
from collections.abc import Sequence
from datetime import datetime, timedelta
from heapq import nlargest
from itertools import chain
from typing import Any

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import EmptyResultSet
from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import F, Model, QuerySet, Value
from django.db.models.expressions import Func
from django.db.models.sql.compiler import SQLCompiler
from django.http import HttpRequest
from django.urls import NoReverseMatch, reverse
from django.utils.html import format_html
from django.utils.http import urlencode
from django.utils.safestring import SafeString

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import CONSOLE, HOST, SINGLE_SIGN_ON, WORKER
from keyvault.access.scopes import EVERYWHERE, AccessScope
from keyvault.admin.framework.activity import name_event, sentence_of
from keyvault.admin.framework.choices import Choice, choices_page
from keyvault.admin.framework.columns import moment_column
from keyvault.admin.framework.components import Banner, Fold
from keyvault.admin.framework.enforcement import operator_of
from keyvault.admin.framework.filters import TextFilter
from keyvault.admin.framework.model_admin import ConsoleList, ConsoleModelAdmin
from keyvault.admin.framework.subject_pages import pages_by_field
from keyvault.admin.framework.widgets import (
    NOTHING,
    Detail,
    Extras,
    FactTable,
    Link,
    Table,
    badge,
    link,
    moment,
    mono,
)
from keyvault.admin.oversight.audit_export import exported_scopes
from keyvault.domain.audit import PLATFORM_CHAIN, account_chain, chains_with
from keyvault.domain.digests import PEPPER_SET
from keyvault.domain.environments import Environment
from keyvault.models import (
    Account,
    AuditChain,
    AuditEntry,
    ConsoleSession,
    LimitOverride,
    Merchant,
    Operator,
    PepperVersion,
)
from keyvault.services.audit.checkpoints import CheckpointStatus, list_checkpoint_status
from keyvault.services.audit.events import list_events

_MAX_SEARCHED = 5_000
"""Maximum entries that one search reads, the newest of those that match the filters."""

_ACCOUNT = "account:"

_PARTS = {each.name: each.actor for each in (WORKER, HOST, CONSOLE, SINGLE_SIGN_ON)}
"""Actors of the parts of the service, by their names."""


class BytesPosition(Func):
    """One-based position of bytes in other bytes; 0 if absent. Uses no collation and no index."""

    output_field = models.IntegerField()
    function = "INSTR"

    def as_postgresql(
        self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, **more: Any
    ) -> tuple[str, list[Any]]:
        within, sought = self.get_source_expressions()
        position = Func(sought, within, function="POSITION", arg_joiner=" IN ", output_field=models.IntegerField())
        sql, params = position.as_sql(compiler, connection, **more)
        return sql, list(params)


class MerchantFilter(TextFilter):
    """Filter by merchant: the chains of its accounts, and their chains for customer tokens."""

    title = "merchant"
    parameter_name = "merchant"
    help_text = "Merchant id"
    choices_name = "merchants"

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(chain_id__in=_chains_of_merchant(self.text)) if self.text else queryset


class ActorFilter(TextFilter):
    """Filter by who did it: an operator's name, a part of the service, or any actor as an entry names it."""

    title = "actor"
    parameter_name = "actor"
    help_text = "Name of an operator, service:ID or key:ID"
    choices_name = "actors"

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(actor=_read_actor(self.text)) if self.text else queryset


class ChainFilter(admin.SimpleListFilter):
    """Filter by chain: the platform's, and that of an account, to which the account's page leads."""

    title = "chain"
    parameter_name = "chain"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        names = [PLATFORM_CHAIN] if operator_of(request).scope == EVERYWHERE else []
        chosen = request.GET.get(self.parameter_name)
        if chosen and chosen not in names:
            names.append(chosen[:96])
        return [(name, name.removeprefix(_ACCOUNT)) for name in names]

    def has_output(self) -> bool:
        return bool(self.lookup_choices)

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        value = self.value()
        return queryset.filter(chain_id__in=chains_with(value)) if value else queryset


class EventFilter(admin.SimpleListFilter):
    """Filter by event. Lists the recorded events.

    With an actor it selects nothing: no index has both, so AuditList looks for the event in the actor's newest entries.
    """

    title = "event"
    parameter_name = "event"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(event, name_event(event)) for event in list_events()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        value = self.value()
        return queryset.filter(event=value) if value and not _is_of_actor(request) else queryset


def _is_of_actor(request: HttpRequest) -> bool:
    return bool(request.GET.get(ActorFilter.parameter_name, "").strip())


def _read_actor(text: str) -> str:
    """Return the actor that a text names: a part of the service or, without a kind, an operator."""
    return _PARTS.get(text) or (text if ":" in text else f"operator:{text}")


def _chains_of_merchant(merchant_id: str) -> list[str]:
    return [name for env in Environment for name in chains_with(account_chain(merchant_id, env))]


def find_actors(scope: AccessScope, words: str, limit: int) -> list[Choice]:
    """Find the operators whose name begins with the words, for an unlimited scope, and the parts of the service."""
    parts = [Choice(actor, name, "service") for name, actor in _PARTS.items() if name.startswith(words)]
    if scope != EVERYWHERE:
        return parts[:limit]
    names = Operator.objects.filter(username__startswith=words).order_by("username").values_list("username", flat=True)
    return [*(Choice(f"operator:{name}", name, "operator") for name in names[:limit]), *parts][:limit]


ACTOR_CHOICES = choices_page("actors", (P.AUDIT_READ,), find_actors)


class WhenFilter(admin.DateFieldListFilter):
    """Django's date filter with the title `time`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.title = "time"

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Return the entries of the period. Raises IncorrectLookupParameters for a time outside of the calendar."""
        rows: QuerySet[Any] = super().queryset(request, queryset)  # type: ignore[assignment]  # never None here
        try:
            str(rows.query)  # SQLite's times have no offset, and year 1 at +14:00 has no time in UTC.
        except EmptyResultSet:
            return rows  # An operator without a scope has no chains.
        except OverflowError as error:
            raise IncorrectLookupParameters(error) from error
        return rows


class AuditList(ConsoleList):
    """The list of entries. A search reads the newest _MAX_SEARCHED of them, since no index finds text in an entry.

    So does a filter by both actor and event. A search for the id of an existing key reads those of its account.
    `older`: query string of the same search in the entries before these; empty if there are none.
    """

    older = ""

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> QuerySet[Any]:
        entries = super().get_queryset(request, exclude_parameters)
        term, is_of_actor = self.query.strip(), _is_of_actor(request)
        event = request.GET.get(EventFilter.parameter_name, "") if is_of_actor else ""
        if not term and not event:
            return entries
        # An actor's entries have an index of their own.
        newest = _list_newest(entries, [] if is_of_actor else _list_chains(request, term))
        if len(newest) == _MAX_SEARCHED:
            (latest, _), (oldest, _) = newest[0], newest[-1]
            # Others may have the time of the oldest one.
            before = oldest if oldest == latest else oldest + timedelta(microseconds=1)
            self.older = self.get_query_string({"at__lt": before.isoformat()}, remove=["p"])
        matching: QuerySet[Any] = entries.filter(pk__in=[pk for _, pk in newest])
        if event:
            matching = matching.filter(event=event)
        if term:
            sought = Value(term.encode(), output_field=models.BinaryField())
            matching = matching.annotate(found=BytesPosition(F("body"), sought)).filter(found__gt=0)
        return matching


def _list_chains(request: HttpRequest, term: str) -> Sequence[str]:
    """Return the chains that a search for the term reads; none: all."""
    chosen, merchant = (request.GET.get(each.parameter_name, "").strip() for each in (ChainFilter, MerchantFilter))
    if chains := _find_chains(term):
        return chains
    if chosen or merchant:
        return chains_with(chosen) if chosen else _chains_of_merchant(merchant)
    return _list_used(operator_of(request).scope)


def _list_newest(entries: QuerySet[AuditEntry], chains: Sequence[str]) -> list[tuple[datetime, int]]:
    """List the times and ids of the newest _MAX_SEARCHED entries in these chains; no chains: in all.

    No index sorts the entries of several chains by time, so each chain is read by itself.
    """
    each = [entries.filter(chain_id=name).order_by("-sequence") for name in chains] or [entries]
    rows = chain.from_iterable(found.values_list("at", "pk")[:_MAX_SEARCHED] for found in each)
    return nlargest(_MAX_SEARCHED, rows)


def _name_chains(scope: AccessScope) -> list[str]:
    """Return the names of the chains of the accounts of a scope that names merchants."""
    accounts = [account_chain(merchant, env) for merchant in scope.merchants or () for env in scope.environments]
    return [name for account in accounts for name in chains_with(account)]


def _list_used(scope: AccessScope) -> list[str]:
    """Return the chains with entries if the scope names merchants, else none: `_list_newest` reads each by itself."""
    used = AuditChain.objects.filter(name__in=_name_chains(scope), sequence__gt=0)
    return list(used.values_list("name", flat=True)) if scope.merchants is not None else []


def _find_chains(term: str) -> tuple[str, ...]:
    """Return the chains of the account whose key has this id; none if there is no such key."""
    account = Account.objects.filter(credentials__keys=term).first()
    return () if account is None else chains_with(_chain_of(account))


class AuditEntryAdmin(ConsoleModelAdmin):
    view_permissions = (P.AUDIT_READ,)
    menu, singular, plural = "Audit log", "Audit entry", "Audit entries"
    change_list_template = "console/audit_list.html"

    list_display = ("sentence", "when", "account", "about", "event", "sequence_number")
    list_display_links = ("sentence",)
    list_filter = (ActorFilter, MerchantFilter, EventFilter, ("at", WhenFilter), ChainFilter)
    search_fields = ("event",)  # shows the search box; AuditList defines the search
    search_help_text = (
        "By any id or name in an entry: key id, credential id, request id, operator. Reads the newest "
        f"{_MAX_SEARCHED:,} entries that match the filters, and those of a key's account for the id of a key."
    )
    sortable_by = ()
    ordering = ("-at", "-id")

    def rows_in_scope(self, rows: QuerySet[Any], scope: AccessScope) -> QuerySet[Any]:
        """Return the entries of the accounts' chains; an unlimited scope has the platform's too."""
        if scope == EVERYWHERE:
            return rows
        if scope.merchants is None:
            return rows.filter(scope__in=[PEPPER_SET[environment] for environment in scope.environments])
        return rows.filter(chain_id__in=_name_chains(scope))

    def list_context(self, request: HttpRequest) -> dict[str, Any]:
        """Add the checkpoints, which are of the whole installation."""
        scope = operator_of(request).scope
        context = super().list_context(request)
        if exported_scopes(scope):
            context["page_links"] = [Link("Export", reverse("admin:audit_export"))]
        if scope == EVERYWHERE:
            found = list_checkpoint_status()
            context["chain_state"] = _chain_state(found)
            context["checkpoints"] = Fold("Signed checkpoints", [_checkpoints(found)], "of each scope")
        return context

    @admin.display(description="#")
    def sequence_number(self, entry: AuditEntry) -> int:
        return entry.sequence

    @admin.display(description="what happened")
    def sentence(self, entry: AuditEntry) -> str:
        return sentence_of(entry.event, entry.actor)

    @admin.display(description="account")
    def account(self, entry: AuditEntry) -> str:
        return entry.chain_id.removeprefix(_ACCOUNT)

    def environment_of_row(self, row: AuditEntry) -> str:
        """Return the environment of the account that the chain is of; empty: it is of none."""
        name = row.chain_id.rpartition("/")[2]
        return name if name in set(Environment) else ""

    when = moment_column("when", "at")

    @admin.display(description="about")
    def about(self, entry: AuditEntry) -> str:
        details = _body(entry).get("details", {})
        shown = (str(details[name]) for name in (*pages_by_field(), "username") if name in details)
        return next(shown, NOTHING)

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Return the entries that match the filters; AuditList searches them."""
        return queryset, False

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return AuditList

    def summary(self, row: AuditEntry) -> FactTable:
        return FactTable("Audit entry", [("Chain", row.chain_id), ("Sequence", row.sequence), ("Event", row.event)])

    def detail(self, request: HttpRequest, row: AuditEntry) -> Detail:
        body = _body(row)
        return Detail(
            title=sentence_of(row.event, row.actor),
            lead=format_html("{} · {}", f"{row.chain_id.removeprefix(_ACCOUNT)} #{row.sequence}", moment(row.at)),
            state="",
            sections=[
                FactTable(
                    "Entry",
                    [
                        ("Event", mono(row.event)),
                        ("When", moment(row.at)),
                        ("Actor", row.actor),
                        ("Channel", body.get("channel", NOTHING)),
                    ],
                ),
                FactTable("Details", [(name, _detail_cell(name, value)) for name, value in body["details"].items()]),
                FactTable(
                    "Position in the chain",
                    [
                        ("Chain", mono(row.chain_id)),
                        ("Sequence", row.sequence),
                        ("Hash of the previous entry", mono(bytes(row.previous).hex())),
                        ("Hash of this entry", mono(bytes(row.hash).hex())),
                        ("Stored bytes", mono(bytes(row.body).decode())),
                    ],
                ),
            ],
            notes=["manage.py audit_verify verifies every chain and checkpoint and reports the first invalid one."],
        )

    def extras_for(self, request: HttpRequest, row: Model) -> Extras | None:
        """Add a link to the audit entries of a row to its page."""
        if isinstance(row, AuditEntry | ConsoleSession) or not self.has_view_permission(request):
            return None
        if isinstance(row, Account):
            query = {"chain": _chain_of(row)}
        elif isinstance(row, Merchant):
            query = {"merchant": row.pk}
        elif isinstance(row, PepperVersion):
            query = {"q": "pepper."}
        elif isinstance(row, Operator):
            query = {"q": row.username}
        else:
            owner = self.admin_site._registry.get(type(row))
            account = owner.account_of(row) if isinstance(owner, ConsoleModelAdmin) else None
            query = {} if account is None else {"chain": _chain_of(account)}
            query["q"] = row.endpoint if isinstance(row, LimitOverride) else str(row.pk)
        return Extras(links=[Link("Audit entries", self.list_url(f"?{urlencode(query)}"))])


def _chain_state(found: Sequence[CheckpointStatus]) -> Banner:
    """Return the state of the chains in one line: the worst of all scopes."""
    for status in found:
        if status.fault is not None:
            return Banner("The audit log does not match its checkpoints.", f"{status.scope}: {status.fault}", "bad")
    for status in found:
        if status.unchecked is not None:
            return Banner("Signatures are not checked now.", f"{status.scope}: {status.unchecked}", "wait")
    signed = [status.newest.at for status in found if status.newest is not None and status.newest.at is not None]
    if not signed:
        return Banner("No checkpoint is signed yet.", "The worker signs one within minutes.", "wait")
    unsigned = sum(status.unsigned for status in found)
    text = format_html("Last signed {}. {} waiting for the next signature.", moment(max(signed)), _entries(unsigned))
    return Banner("The audit log matches its newest signed checkpoints.", text, "good")


def _entries(count: int) -> str:
    return "1 entry is" if count == 1 else f"{count:,} entries are" if count else "No entries are"


def _checkpoints(found: Sequence[CheckpointStatus]) -> Table:
    columns = ("scope", "newest", "signed", "signer", "unsigned entries", "verification")
    rows = [
        (
            badge(status.scope),
            "none yet" if status.newest is None else status.newest.number,
            NOTHING if status.newest is None else moment(status.newest.at),
            NOTHING if status.newest is None else _signer(status),
            status.unsigned,
            _holds(status),
        )
        for status in found
    ]
    return Table("Newest checkpoints", columns, rows)


def _signer(status: CheckpointStatus) -> SafeString:
    signed = status.newest
    return format_html("{} version {}", mono(signed.signer), signed.key_version) if signed else mono(NOTHING)


def _holds(status: CheckpointStatus) -> SafeString:
    """Render whether the newest checkpoint's signature and entries verify."""
    if status.fault is not None:
        return format_html("{} {}", badge("broken"), status.fault)
    if status.newest is None:
        return badge("pending")
    if status.unchecked is not None:
        return format_html("{} {}", badge("not_checked"), status.unchecked)
    return badge("holds")


def _chain_of(account: Account) -> str:
    return account_chain(account.merchant_id, account.environment)


def _body(entry: AuditEntry) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(bytes(entry.body))
    return body


def _detail_cell(name: str, value: Any) -> Any:
    page = pages_by_field().get(name)
    if isinstance(value, str) and page is not None:
        try:
            return link(reverse(f"admin:{page}_change", args=[value]), mono(value))
        except NoReverseMatch:
            return mono(value)
    if isinstance(value, dict | list):
        return mono(json.dumps(value, sort_keys=True, ensure_ascii=False))
    return mono("null") if value is None else value
