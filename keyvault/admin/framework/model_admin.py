"""Base model admin of the console: the list, the page of a row and its actions, built from data.

`get_urls` builds every route from an action and its permission, so no route exists without a permission.
Django's history, bulk actions and edit forms have no route.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.contrib.admin.views.main import PAGE_VAR, ChangeList
from django.core.exceptions import ValidationError
from django.core.paginator import Paginator
from django.db.models import Model, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern, path, reverse
from django.utils.functional import cached_property
from django.utils.text import smart_split, unescape_string_literal

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.access.scopes import EVERYWHERE, AccessScope
from keyvault.admin.framework.account_lists import AccountList
from keyvault.admin.framework.actions import (
    ActionForm,
    ActionResult,
    Cleaned,
    CreateAction,
    RowAction,
    SecretView,
    Tone,
    format_text,
    run_action,
)
from keyvault.admin.framework.attention import Attention
from keyvault.admin.framework.components import Stepper
from keyvault.admin.framework.enforcement import Guarded, View, grant_for, may, operator_of
from keyvault.admin.framework.form_tokens import create_once, token_of
from keyvault.admin.framework.four_eyes import changes_table, requester_name
from keyvault.admin.framework.keyset import Keyset
from keyvault.admin.framework.menu import Tab
from keyvault.admin.framework.pages import form_page, live_page, secret_page
from keyvault.admin.framework.scoping import in_scope
from keyvault.admin.framework.shown_environment import environment_of, shown_scope
from keyvault.admin.framework.sign_in import second_factor_url
from keyvault.admin.framework.step_up import answer_locked, is_step_up_due, refuse_step_up, step_up_context
from keyvault.admin.framework.widgets import (
    Detail,
    Difference,
    Extras,
    FactTable,
    KeyDates,
    Line,
    Link,
    Table,
    moment,
)
from keyvault.domain.environments import Environment
from keyvault.domain.errors import (
    KeyvaultError,
    NotFoundError,
    RequestInvalidError,
    StateConflictError,
)
from keyvault.models import Account, Credential

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Any]
    _Paginator = Paginator[Any]
else:
    _ModelAdmin = admin.ModelAdmin
    _Paginator = Paginator

_GET = ("GET", "HEAD")
_GET_AND_POST = (*_GET, "POST")

_DECISIONS = ("approve", "reject")
"""Actions whose forms are on the page of the row, for an operator who may approve it."""

_MAX_COUNTED = 10_000
"""Maximum rows that are counted, and that are sorted for an operator whose scope names merchants."""


_MAX_FOUND = 1_000
"""Maximum rows that a search finds by each field and word.

An exact field finds the first rows in the order of the list, a prefix any rows. The id of a row always finds that row.
"""

_CUT_NOTE = (
    f"A word of the search matches more than {_MAX_FOUND:,} rows, so some rows are missing. "
    "Search for the id of one row"
)


def _split(search_term: str) -> Iterator[str]:
    """Yield the words of a search; a phrase in quotes is one word."""
    for word in smart_split(search_term):
        is_quoted = len(word) > 2 and word[0] == word[-1] and word[0] in "\"'"
        yield unescape_string_literal(word) if is_quoted else word


def _search(rows: QuerySet[Any], name: str, word: str) -> QuerySet[Any]:
    """Select the rows of which one search field matches the word."""
    if name.startswith("^"):
        return rows.order_by().filter(**{f"{name[1:]}__startswith": word})  # sorting would read all of a short prefix
    lookup = f"{name[1:]}__exact" if name.startswith("=") else f"{name}__icontains"
    return rows.filter(**{lookup: word})


class BoundedPaginator(_Paginator):
    """Paginator of the first _MAX_COUNTED rows, so that the count does not read a whole table."""

    @cached_property
    def count(self) -> int:
        # In the list's order: the database would read a table from its start to find rows of one environment.
        rows: QuerySet[Any] = self.object_list  # type: ignore[assignment]  # Django's admin passes a query set
        return rows.values("pk")[:_MAX_COUNTED].count()

    @property
    def has_more(self) -> bool:
        return self.count == _MAX_COUNTED


class ConsoleList(ChangeList):
    """List whose rows link to their own pages, and which is sorted only by the columns of `sortable_by`.

    Its pages follow one another by the sort keys of the last row. No list counts its rows.
    """

    next_url, first_url = "", ""
    """Query strings of the next page and, on a later page, of the first one; empty: there is none."""

    production_rows: frozenset[int] = frozenset()
    """Places of the shown rows of production, which are marked."""

    def get_results(self, request: HttpRequest) -> None:
        cursor = request.GET.get(PAGE_VAR, "")
        keyset = Keyset(self.queryset)
        found = _read_first(request, keyset.rows_after(cursor), self.list_per_page + 1)
        self.result_list = found[: self.list_per_page]
        self.result_count = len(self.result_list)
        self.production_rows = frozenset(
            number for number, row in enumerate(self.result_list) if self._environment_of(row) == Environment.PRODUCTION
        )
        if len(found) > self.list_per_page and (after := keyset.cursor_of(found[self.list_per_page - 1])):
            self.next_url = self.get_query_string({PAGE_VAR: after})
        if cursor:
            self.first_url = self.get_query_string()
        self.full_result_count, self.show_full_result_count, self.show_admin_actions = None, False, False
        self.can_show_all, self.multi_page = False, False

    def _environment_of(self, row: Model) -> str:
        model_admin = self.model_admin
        return model_admin.environment_of_row(row) if isinstance(model_admin, ConsoleModelAdmin) else ""

    def url_for_result(self, result: Model) -> str:
        model_admin = self.model_admin
        if not isinstance(model_admin, ConsoleModelAdmin):
            raise TypeError(f"{model_admin} is not a ConsoleModelAdmin")
        return model_admin.url_of(result)

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> QuerySet[Any]:
        rows = super().get_queryset(request, exclude_parameters)
        model_admin = self.model_admin
        return model_admin.rows_shown(request, rows) if isinstance(model_admin, ConsoleModelAdmin) else rows

    def get_ordering_field(self, field_name: Any) -> Any:
        is_sortable = self.sortable_by is None or field_name in self.sortable_by
        return super().get_ordering_field(field_name) if is_sortable else None


def _read_first(request: HttpRequest, rows: QuerySet[Any], limit: int) -> list[Any]:
    """Read the first rows of a list.

    If the operator's scope names merchants, the ids of few rows are read without a limit, by the index of their
    accounts. With a limit, the database may scan the rows of all merchants until a page of the scope is full.
    """
    if operator_of(request).scope.merchants is None:
        return list(rows[:limit])
    if rows.order_by().values("pk")[: _MAX_COUNTED + 1].count() > _MAX_COUNTED:
        return list(rows[:limit])
    ids = list(rows.values_list("pk", flat=True))[:limit]
    return list(rows.filter(pk__in=ids))


class ConsoleModelAdmin(Guarded, _ModelAdmin):
    """Model admin of one model. Subclasses define the view permissions, the page contents and the actions.

    Models with a row for each key or request set `sortable_by = ()`, since sorting by a column reads all rows, and
    search by `=` and `^` fields only, each of which has an index.
    """

    menu = ""
    """Entry of the menu under which the list is found. Model admins of one entry are its tabs."""

    singular = ""
    plural = ""
    account_lookup: str | None = None
    """Lookup of a row's account. None: the rows concern the installation."""

    environment_lookup: str | None = None
    """Column with a copy of the account's environment, with which an index of the list begins. None: there is none."""

    id_pattern = ""
    """Form of the ids by which the console's search finds a row; empty: it finds none by id."""

    has_environments = True
    """Whether the switch of the environment limits the list. A model of the installation has none."""

    row_actions: tuple[RowAction, ...] = ()  # not `actions`, which are the bulk actions of Django's admin
    secret_views: tuple[SecretView, ...] = ()
    create_actions: tuple[CreateAction, ...] = ()

    list_per_page = 50
    show_full_result_count = False
    preserve_filters = False
    show_facets = admin.ShowFacets.NEVER
    change_list_template = "console/change_list.html"

    # --- hooks for subclasses -----------------------------------------------------------------------------

    def detail(self, request: HttpRequest, row: Any) -> Detail:
        """Return the contents of the page of a row."""
        raise NotImplementedError

    def summary(self, row: Any) -> FactTable:
        """Return the facts that an action page shows about the row.

        If the row needs an approval, these are all that the approval covers, see `fetch_summaries`.
        """
        raise NotImplementedError

    def name_of(self, row: Any) -> str:
        """Return the name of the row in titles."""
        return str(row)

    def rows_in_scope(self, rows: QuerySet[Any], scope: AccessScope) -> QuerySet[Any]:
        """Return the rows that an operator with this scope may see: by default, those of its accounts."""
        if scope == EVERYWHERE:
            return rows
        if scope.merchants is None and self.environment_lookup is not None:
            return rows.filter(**{f"{self.environment_lookup}__in": scope.environments})
        return rows.none() if self.account_lookup is None else rows.filter(in_scope(scope, self.account_lookup))

    def menu_tab(self, request: HttpRequest) -> Tab | None:
        """Return the tab of the list in the menu, if the operator may view it."""
        if not self.has_module_permission(request):
            return None
        return Tab(self.plural, self.list_url(), request.path)

    @property
    def no_rows(self) -> str:
        """What an empty list says."""
        return f"No {self.rows_name} yet"

    @property
    def rows_name(self) -> str:
        """What the rows are called in a sentence, such as `denied requests`."""
        return self.plural.lower()

    def account_of(self, row: Any) -> Account | None:
        """Return the account that a grant for the row applies to; None for the platform."""
        return None

    def scope_of(self, row: Any) -> AccessScope:
        """Return the accounts that a row of no particular account concerns."""
        return EVERYWHERE

    def requester_person_of(self, row: Any) -> str | None:
        """Return the person who requested the row, if a second person must approve it."""
        return None

    def attention_items(self, request: HttpRequest) -> Iterable[Attention]:
        """Return the items of this model that the overview shows to the operator; the menu counts the urgent ones.

        Their queries are kept, see `KeptQueries`: use `Now()` for the time, and read nothing.
        """
        return ()

    def approval_items(self, request: HttpRequest) -> Iterable[Attention]:
        """Return the items whose rows wait for this operator's approval, see `approval`."""
        return ()

    def changes(self, row: Any) -> Iterable[Difference]:
        """Return what the approval of the row would change, without queries of its own."""
        return ()

    def decision_facts(self, row: Any) -> Iterable[tuple[str, Any]]:
        """Return what the operator who decides on the row sees beside its changes; queries are allowed."""
        return ()

    def line_of(self, row: Any) -> Line:
        """Return the line of a row on the overview."""
        return Line(self.url_of(row), self.name_of(row), "")

    def list_context(self, request: HttpRequest) -> dict[str, Any]:
        """Return what the template of the list shows beside the rows."""
        return {"title": self.plural, "plural": self.plural, "create_links": self._offered_links(request)}

    def find_by_word(self, request: HttpRequest, word: str) -> Iterable[QuerySet[Any]]:
        """Return the rows that the console's search finds, each selection by an index: by default the row of an id."""
        if self.id_pattern and re.fullmatch(self.id_pattern, word):
            yield self.get_queryset(request).order_by().filter(pk=word)

    def find_hits(self, request: HttpRequest, ids: list[str]) -> list[Any]:
        return list(self.get_queryset(request).filter(pk__in=ids))

    def hit_of(self, row: Any) -> Line:
        """Return a row as the search shows it."""
        return Line(self.url_of(row), self.name_of(row), "")

    def extras_for(self, request: HttpRequest, row: Model) -> Extras | None:
        """Return what this model admin adds to the page of another model's row."""
        return None

    def account_list(self, request: HttpRequest) -> AccountList | None:
        """Return the list of an account's rows that the page of its merchant shows, if the operator may view them."""
        return None

    def account_cards(self, request: HttpRequest, accounts: Sequence[Account]) -> Mapping[int, Any]:
        """Return the card of each account, by its id, that the page of its merchant shows before the lists."""
        return {}

    def find_key_dates(self, request: HttpRequest, credentials: Sequence[Credential]) -> Mapping[str, KeyDates]:
        """Return the dates of the keys of these credentials, by the credential's id, by few queries for all.

        `credentials`: with their accounts and all active keys.
        """
        return {}

    def other_admins(self) -> list["ConsoleModelAdmin"]:
        """Return the model admins of the site, which add to each other's pages."""
        return [other for other in self.admin_site._registry.values() if isinstance(other, ConsoleModelAdmin)]

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Return the rows that have each of the words in a field of `search_fields`; the second value is for Django.

        A field with `=` equals the word, with `^` it begins with the word, others contain it. Quotes make one word of
        several. Each field is searched by itself, with its own index: one condition over the columns of several tables
        would read all rows. Tells the operator if there are more rows than the search reads.
        """
        everything: QuerySet[Any] = self.model._base_manager.order_by(*self.get_ordering(request))
        rows = self.rows_in_scope(everything, operator_of(request).scope)
        is_cut = False
        for word in _split(search_term):
            ids: set[object] = set()
            for name in self.search_fields:
                found = list(_search(rows, name, word).values_list("pk", flat=True)[: _MAX_FOUND + 1])
                is_cut = is_cut or len(found) > _MAX_FOUND
                ids.update(found[:_MAX_FOUND])
            queryset = queryset.filter(pk__in=ids)
        if is_cut:
            has_prefix = any(name.startswith("^") for name in self.search_fields)
            messages.info(request, f"{_CUT_NOTE}{', or for a longer beginning of the name' if has_prefix else ''}.")
        return queryset, False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the rows in the operator's scope, which every list and page of the model reads."""
        return self.rows_in_scope(super().get_queryset(request), operator_of(request).scope)

    def rows_to_open(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the same rows with what the page of one row shows besides."""
        return self.get_queryset(request)

    def fetch_changes(self, rows: list[Any]) -> None:
        """Read what `changes` shows of these rows of `get_queryset`, by few queries for all."""

    def fetch_summaries(self, rows: list[Any]) -> None:
        """Read what `summary` shows of these rows of `rows_to_open`, by few queries for all."""

    def rows_shown(self, request: HttpRequest, rows: QuerySet[Any]) -> QuerySet[Any]:
        """Return the rows of the environment that the operator has chosen; all, where rows have no environment."""
        is_limited = self.has_environments and environment_of(request) is not None
        return self.rows_in_scope(rows, shown_scope(request)) if is_limited else rows

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return ConsoleList

    # --- routes -------------------------------------------------------------------------------------------

    def get_urls(self) -> list[URLPattern]:
        base = f"{self.opts.app_label}_{self.opts.model_name}"

        def route(
            place: str, item: CreateAction | RowAction | SecretView, methods: tuple[str, ...], view: View
        ) -> URLPattern:
            guarded = self.guarded((item.permission,), methods, partial(view, item))
            return path(f"{place}/{item.name}/", guarded, name=f"{base}_{item.name}")

        detail = self.guarded(self.view_permissions, _GET, self._detail_view)
        return [
            path("", self.guarded(self.view_permissions, _GET, self._list_view), name=f"{base}_changelist"),
            *(route("new", item, _GET_AND_POST, self._create_view) for item in self.create_actions),
            path("<str:object_id>/", detail, name=f"{base}_change"),
            *(route("<str:object_id>", item, _GET, self._secret_view) for item in self.secret_views),
            *(route("<str:object_id>", item, _GET_AND_POST, self._action_view) for item in self.row_actions),
        ]

    # --- views --------------------------------------------------------------------------------------------

    def _list_view(self, request: HttpRequest) -> HttpResponse:
        return self.changelist_view(request, extra_context=self.list_context(request))

    def _detail_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        row = self.find_row(request, object_id)
        detail = self.detail(request, row)
        offered = self.offered_actions(request, row) if detail.offered is None else detail.offered
        decisions = self._decision_forms(request, row, offered)
        listed = {each["form_url"] for each in decisions}
        if detail.banner is not None:
            buttons = [button for button in detail.banner.buttons if button.url not in listed]
            detail = replace(detail, banner=replace(detail.banner, buttons=buttons))
            listed |= {button.url for button in buttons}
        extras = [extra for other in self.other_admins() if (extra := other.extras_for(request, row)) is not None]
        context = {
            "title": detail.title,
            "detail": detail,
            "stepper": Stepper(detail.steps) if detail.steps else None,
            "page_environment": self.environment_of_row(row),
            "badges": [badge for extra in extras for badge in extra.badges],
            "changes": self._changes(row),
            "decisions": decisions,
            "decision_facts": self._decision_facts(row) if decisions else None,
            "sections": [
                *detail.sections,
                *(section for extra in extras for section in extra.sections),
            ],
            "links": [
                *(self._link(row, view.name, view.label) for view in self.secret_views if view.is_available(row)),
                *(link for extra in extras for link in extra.links),
            ],
            "actions": [
                {"action": action, "url": self.url_of(row, action.name)}
                for action in offered
                if self.url_of(row, action.name) not in listed
            ],
            "crumbs": [*self._crumbs(), *detail.crumbs],
        }
        # A page with a form is not live: without scripts it would reload while the operator types.
        seconds = None if decisions else detail.refresh_seconds
        return live_page(self.admin_site, request, "detail", context, seconds=seconds)

    def _secret_view(self, view: SecretView, request: HttpRequest, object_id: str) -> HttpResponse:
        row = self.find_row(request, object_id)
        grant = self._grant(request, view.permission, row)
        if is_step_up_due(request):
            return HttpResponseRedirect(second_factor_url(request.get_full_path()))
        back = Link(self.name_of(row), self.url_of(row))
        return secret_page(
            self.admin_site,
            request,
            view.read(grant, row),
            title=f"{view.label}: {self.name_of(row)}",
            note=view.note,
            once=False,
            summary=self.summary(row),
            crumbs=[*self._crumbs(), back],
            back=back,
            environment=self.environment_of_row(row),
        )

    def _action_view(self, action: RowAction, request: HttpRequest, object_id: str) -> HttpResponse:
        row = self.find_row(request, object_id)
        grant = self._grant(request, action.permission, row)
        answer = partial(self._form_page, request, action, self._action_context(action, row))
        if request.method != "POST":
            if not self._is_available(request, action, row):
                return answer(
                    None, error=StateConflictError("This action is not available for the current state, or not to you.")
                )
            return answer(_form(request, action, initial=action.form.initial_for(row)))
        form = _form(request, action, request.POST)
        if refused := self._refuse_step_up(request, action):
            return answer(form, error=refused)
        if not form.is_valid():
            return answer(form, status=400)
        try:
            result = run_action(action, grant, row, form.cleaned_data)
        except RequestInvalidError as error:
            form.show_faults(error)
            return answer(form, error=error)
        except StateConflictError as error:
            return self._show_conflict(action, request, object_id, form, error)
        except KeyvaultError as error:
            return answer(form, error=error)
        return self._respond(request, result, result.row or row)

    def _show_conflict(
        self, action: RowAction, request: HttpRequest, object_id: str, posted: ActionForm, error: StateConflictError
    ) -> HttpResponse:
        """Show the page of the action again for the current row, with the conflict.

        The form keeps what the operator typed, unless the row is not the one that the page showed.
        """
        row = self.find_row(request, object_id)
        form: ActionForm | None = None
        if self._is_available(request, action, row):
            initial = action.form.initial_for(row)
            shown = [each.name for each in posted.hidden_fields()]  # the version or the digest of the row
            is_as_shown = all(posted.cleaned_data[name] == initial.get(name) for name in shown)
            form = posted if is_as_shown else _form(request, action, initial=initial)
        return self._form_page(request, action, self._action_context(action, row), form, error=error)

    def _create_view(self, action: CreateAction, request: HttpRequest) -> HttpResponse:
        scope = operator_of(request).scope
        within = EVERYWHERE if action.is_of_installation else scope
        grant_for(request, action.permission, within=within)
        answer = partial(self._form_page, request, action, self._create_context(action))
        if request.method != "POST":
            return answer(_form(request, action, initial=action.preset(request.GET)))
        form = _form(request, action, request.POST)
        if refused := self._refuse_step_up(request, action):
            return answer(form, error=refused)
        if not form.is_valid():
            return answer(form, status=400)
        try:
            account = action.account_of(form.cleaned_data)
            grant = grant_for(request, action.permission, account, within=within)
            result = self._create(action, request, partial(action.run, grant, form.cleaned_data))
        except RequestInvalidError as error:
            form.show_faults(error)
            return answer(form, error=error)
        except NotFoundError as error:
            # Outside of the scope and absent are the same to an operator with a scope.
            return answer(form, error=error if scope == EVERYWHERE else NotFoundError(internal=error.internal))
        except KeyvaultError as error:
            return answer(form, error=error)
        return self._respond(request, result, result.row)

    def _create(self, action: CreateAction, request: HttpRequest, create: Callable[[], ActionResult]) -> ActionResult:
        if not action.is_once:
            return create()
        return create_once(request, f"{self.opts.label_lower}.{action.name}", create, self._url_of_result)

    def _url_of_result(self, result: ActionResult) -> str:
        return result.url or (self.list_url() if result.row is None else self.url_of(result.row))

    def _refuse_step_up(self, request: HttpRequest, action: RowAction | CreateAction) -> KeyvaultError | None:
        """Check the second factor of the form if the action requires one now. Return why it is refused."""
        return refuse_step_up(request) if action.step_up else None

    def _form_page(
        self,
        request: HttpRequest,
        action: RowAction | CreateAction,
        context: dict[str, Any],
        form: ActionForm | None,
        *,
        error: KeyvaultError | None = None,
        status: int = 200,
    ) -> HttpResponse:
        """Render the form, which also asks for a second factor if the action requires one now."""
        if form is not None and isinstance(action, CreateAction):
            context = {**context, "page_environment": form.find_environment()}
        if isinstance(action, CreateAction) and action.is_once:
            context = {**context, "form_token": token_of(request)}
        if form is not None and action.step_up:
            context = {**context, "step_up": step_up_context(request)}
        return answer_locked(form_page(self.admin_site, request, form, context, error=error, status=status), error)

    def _respond(self, request: HttpRequest, result: ActionResult, row: Model | None) -> HttpResponse:
        """Redirect with a message; a result with a secret shows the secret instead of redirecting."""
        url = self.url_of(row) if row is not None else self.list_url()
        if result.secret is not None:
            back = Link(self.plural if row is None else self.name_of(row), url)
            return secret_page(
                self.admin_site,
                request,
                result.secret,
                title=result.message,
                note="This value is shown only once. Reloading the page does not show it again.",
                once=True,
                summary=None if row is None else self.summary(row),
                crumbs=self._crumbs(),
                back=back,
                environment="" if row is None else self.environment_of_row(row),
                beside=result.beside,
                then=[
                    self._link(row, action.name, action.label)
                    for action in self.row_actions
                    if row and action.name in result.then
                ],
            )
        add_message = messages.warning if result.is_partial else messages.success
        add_message(request, result.message)
        return HttpResponseRedirect(result.url or url)

    # --- shared by the views ------------------------------------------------------------------------------

    def find_row(self, request: HttpRequest, object_id: str) -> Any:
        """Load the row. Raises NotFoundError."""
        try:
            row = self.rows_to_open(request).filter(pk=object_id).first()
        except (ValueError, ValidationError):
            row = None
        if row is None:
            raise NotFoundError(f"{self.singular} not found.")
        return row

    def approval_form(self, row: Any, posted: Any = None) -> ActionForm:
        """Return the form of the approval of one row among others, bound to what was posted."""
        form = self.row_action("approve").form
        return form(posted, initial=form.initial_for(row), prefix=f"{self.opts.label_lower}:{row.pk}")

    def approve(self, request: HttpRequest, row: Any, cleaned: Cleaned) -> ActionResult:
        """Approve what the page showed of the row. Raises the errors of `authorize` and of the service."""
        action = self.row_action("approve")
        grant = self._grant(request, action.permission, row)
        if not self._is_available(request, action, row):
            raise StateConflictError("This no longer awaits an approval, or not yours.")
        return run_action(action, grant, row, cleaned)

    def _changes(self, row: Any) -> list[Table]:
        """Return what an approval would change, while the row waits for one."""
        if not any(action.name == "approve" and action.is_available(row) for action in self.row_actions):
            return []
        return [changes_table(listed)] if (listed := list(self.changes(row))) else []

    def _decision_forms(self, request: HttpRequest, row: Any, offered: Sequence[RowAction]) -> list[dict[str, Any]]:
        """Return the forms that approve and reject the row, if the operator may approve it. They post to their routes.

        `offered`: the actions that the operator may run.
        """
        if not any(action.name == "approve" for action in offered):
            return []
        return [
            {
                **self.form_context(action, row),
                "form_url": self.url_of(row, action.name),
                "form": _form(request, action, initial=action.form.initial_for(row)),
                "step_up": step_up_context(request) if action.step_up else None,
            }
            for action in offered
            if action.name in _DECISIONS
        ]

    def _decision_facts(self, row: Any) -> FactTable:
        is_requested = self.requester_person_of(row) is not None
        return FactTable(
            "Decide",
            [
                *([("Requested by", requester_name(row))] if is_requested else []),
                ("Requested", moment(row.created_at)),
                *self.decision_facts(row),
            ],
        )

    def environment_of_row(self, row: Any) -> str:
        """Return the environment of the row or of its account; empty: it has none."""
        account = self.account_of(row)
        return str(getattr(row, "environment", None) or "") if account is None else str(account.environment)

    def _is_available(self, request: HttpRequest, action: RowAction, row: Any) -> bool:
        """Whether the state of the row and the operator allow the action; the service checks both again."""
        return action.is_available(row) and (
            not action.for_requester or self.requester_person_of(row) == operator_of(request).person
        )

    def offered_actions(self, request: HttpRequest, row: Any) -> list[RowAction]:
        """Return the actions that the row's state allows and the operator may run."""
        return [action for action in self.row_actions if self.may_run(request, action, row)]

    def may_run(self, request: HttpRequest, action: RowAction, row: Any) -> bool:
        """Whether the row's state allows the action and the operator may run it."""
        return self._is_available(request, action, row) and self.may_on(request, action.permission, row)

    def may_on(self, request: HttpRequest, permission: Permission, row: Any) -> bool:
        return may(
            request,
            permission,
            self.account_of(row),
            requester_person=self.requester_person_of(row),
            within=self.scope_of(row),
        )

    def _grant(self, request: HttpRequest, permission: Permission, row: Any) -> Grant:
        return grant_for(
            request,
            permission,
            self.account_of(row),
            requester_person=self.requester_person_of(row),
            within=self.scope_of(row),
        )

    def url_of(self, row: Model, name: str = "change") -> str:
        return reverse(f"admin:{self.opts.app_label}_{self.opts.model_name}_{name}", args=[row.pk])

    def list_url(self, query: str = "") -> str:
        return reverse(f"admin:{self.opts.app_label}_{self.opts.model_name}_changelist") + query

    def _create_link(self, action: CreateAction) -> Link:
        return Link(action.label, reverse(f"admin:{self.opts.app_label}_{self.opts.model_name}_{action.name}"))

    def attention(self, title: str, rows: QuerySet[Any], query: str, tone: str = "plain", **options: Any) -> Attention:
        """Return an attention item of these rows; `query` filters the list that it links to. `options`: more fields."""
        return Attention(self, title, rows, query, tone, **options)

    def approval(self, title: str, rows: QuerySet[Any], query: str, tone: str = "action", **options: Any) -> Attention:
        """Return the item of rows that wait for the operator's approval. The menu counts them as approvals."""
        decide = self.row_action("approve").permission
        return self.attention(title, rows, query, tone, decide=decide, entry="Approvals", **options)

    def row_action(self, name: str) -> RowAction:
        """Return the action of this name. Raises NotFoundError."""
        for action in self.row_actions:
            if action.name == name:
                return action
        raise NotFoundError(f"{self.singular} has no action {name!r}.")

    def create_links(self, request: HttpRequest) -> list[Link]:
        """Return links to the create actions that the operator may use, for the overview."""
        return self._offered_links(request)

    def _offered_links(self, request: HttpRequest) -> list[Link]:
        offered = (action for action in self.create_actions if self._may_create(request, action))
        return [self._create_link(action) for action in offered]

    def _may_create(self, request: HttpRequest, action: CreateAction) -> bool:
        return may(request, action.permission, within=EVERYWHERE if action.is_of_installation else None)

    def _link(self, row: Model, name: str, label: str) -> Link:
        return Link(label, self.url_of(row, name))

    def _crumbs(self) -> list[Link]:
        return [Link(self.plural, self.list_url())]

    def _action_context(self, action: RowAction, row: Any) -> dict[str, Any]:
        back = Link(self.name_of(row), self.url_of(row))
        is_decided = action.name == "approve" and action.is_available(row)
        return {
            **self.form_context(action, row),
            "title": f"{action.label}: {self.name_of(row)}",
            "changes": self._changes(row) if is_decided else [],
            "summary": self.summary(row),
            "decision_facts": self._decision_facts(row) if is_decided else None,
            "crumbs": [*self._crumbs(), back],
            "back": back,
            "page_environment": self.environment_of_row(row),
        }

    def form_context(self, action: RowAction, row: Any) -> dict[str, Any]:
        """Return the explanation, the warning and the button of the action's form."""
        warning = action.warn(row)
        return {
            "explain": format_text(action.explain, row),
            "warning": warning,
            "button": action.label,
            "tone": Tone.DANGER if warning else action.tone,
        }

    def _create_context(self, action: CreateAction) -> dict[str, Any]:
        return {
            "title": action.label,
            "explain": action.explain,
            "button": action.button,
            "tone": "plain",
            "crumbs": self._crumbs(),
            "back": Link(self.plural, self.list_url()),
        }


def _form(request: HttpRequest, action: RowAction | CreateAction, *args: Any, **options: Any) -> ActionForm:
    form = action.form(*args, **options)
    form.limit_to(operator_of(request).scope)
    return form
