"""Base model admin of the console: the list, the page of a row and its actions, built from data.

`get_urls` builds every route from an action and its permission, so no route exists without a permission.
Django's history, bulk actions and edit forms have no route.
"""

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import ValidationError
from django.db.models import Model, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern, path, reverse

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.admin.framework.actions import ActionResult, CreateAction, RowAction, SecretView, Tone, require_seen
from keyvault.admin.framework.enforcement import Guarded, grant_for, may, operator_of
from keyvault.admin.framework.pages import form_page, page, secret_page
from keyvault.admin.framework.widgets import Detail, Extras, FactTable, Line, Link, Waiting
from keyvault.domain.errors import (
    KeyvaultError,
    NotFoundError,
    RequestInvalidError,
    StateConflictError,
)
from keyvault.models import Account

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Any]
else:
    _ModelAdmin = admin.ModelAdmin

_GET = ("GET", "HEAD")
_GET_AND_POST = (*_GET, "POST")

_MAX_LINES = 5
"""Maximum lines that the front page shows per attention item."""

_MAX_ATTENTION_ROWS = 200
"""Maximum rows that the front page counts per attention item."""


class ConsoleList(ChangeList):
    """List whose rows link to their own pages."""

    def url_for_result(self, result: Model) -> str:
        noun = self.model_admin
        if not isinstance(noun, ConsoleModelAdmin):
            raise TypeError(f"{noun} is no guarded admin")
        return noun.url_of(result)


class ConsoleModelAdmin(Guarded, _ModelAdmin):
    """Model admin of one model. Subclasses define the view permissions, the page contents and the actions."""

    section = ""
    singular = ""
    plural = ""
    acts: tuple[RowAction, ...] = ()
    looks: tuple[SecretView, ...] = ()
    asks: tuple[CreateAction, ...] = ()

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
        """Return the facts that an action page shows about the row."""
        raise NotImplementedError

    def name_of(self, row: Any) -> str:
        """Return the name of the row in titles."""
        return str(row)

    def account_of(self, row: Any) -> Account | None:
        """Return the account that a grant for the row applies to; None for the platform."""
        return None

    def requester_person_of(self, row: Any) -> str | None:
        """Return the person who requested the row, if a second person must approve it."""
        return None

    def waiting(self, request: HttpRequest) -> Iterable[Waiting]:
        """Return the items of this model that the front page shows to the operator."""
        return ()

    def count_of_waiting(self, request: HttpRequest) -> int:
        """Return the number of unseen rows, for the sidebar."""
        return 0

    def line_of(self, row: Any) -> Line:
        """Return the line of a row on the front page."""
        return Line(self.url_of(row), self.name_of(row), "")

    def extras_for(self, request: HttpRequest, row: Model) -> Extras | None:
        """Return what this model admin adds to the page of another model's row."""
        return None

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return ConsoleList

    # --- routes -------------------------------------------------------------------------------------------

    def get_urls(self) -> list[URLPattern]:
        base = f"{self.opts.app_label}_{self.opts.model_name}"
        view, look, act, ask = self._detail_view, self._look_view, self._act_view, self._ask_view
        return [
            path("", self.guarded(self.view_permissions, _GET, self._list_view), name=f"{base}_changelist"),
            *(
                path(
                    f"new/{item.name}/",
                    self.guarded((item.permission,), _GET_AND_POST, partial(ask, item)),
                    name=f"{base}_{item.name}",
                )
                for item in self.asks
            ),
            path("<str:object_id>/", self.guarded(self.view_permissions, _GET, view), name=f"{base}_change"),
            *(
                path(
                    f"<str:object_id>/{item.name}/",
                    self.guarded((item.permission,), _GET, partial(look, item)),
                    name=f"{base}_{item.name}",
                )
                for item in self.looks
            ),
            *(
                path(
                    f"<str:object_id>/{item.name}/",
                    self.guarded((item.permission,), _GET_AND_POST, partial(act, item)),
                    name=f"{base}_{item.name}",
                )
                for item in self.acts
            ),
        ]

    # --- views --------------------------------------------------------------------------------------------

    def _list_view(self, request: HttpRequest) -> HttpResponse:
        asks = [self._ask_link(ask) for ask in self.asks if may(request, ask.permission)]
        context = {"title": self.plural, "plural": self.plural, "create_links": asks, "section": self.section}
        return self.changelist_view(request, extra_context=context)

    def _detail_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        row = self.fresh(request, object_id)
        detail = self.detail(request, row)
        others = [other for other in self.admin_site._registry.values() if isinstance(other, ConsoleModelAdmin)]
        extras = [extra for other in others if (extra := other.extras_for(request, row)) is not None]
        context = {
            "title": detail.title,
            "singular": self.singular,
            "detail": detail,
            "sections": [*detail.sections, *(section for extra in extras for section in extra.sections)],
            "links": [
                *(self._link(row, look.name, look.label) for look in self.looks if look.fits(row)),
                *(link for extra in extras for link in extra.links),
            ],
            "actions": [
                {"action": act, "url": self.url_of(row, act.name)} for act in self.acts if self._offers(request, act, row)
            ],
            "crumbs": self._crumbs(),
        }
        return page(self.admin_site, request, "detail", context)

    def _look_view(self, look: SecretView, request: HttpRequest, object_id: str) -> HttpResponse:
        row = self.fresh(request, object_id)
        self._grant(request, look.permission, row)
        back = Link(self.name_of(row), self.url_of(row))
        return secret_page(
            self.admin_site,
            request,
            look.reads(row),
            title=f"{look.label}: {self.name_of(row)}",
            note=look.note,
            once=False,
            summary=self.summary(row),
            crumbs=[*self._crumbs(), back],
            back=back,
        )

    def _act_view(self, act: RowAction, request: HttpRequest, object_id: str) -> HttpResponse:
        row = self.fresh(request, object_id)
        grant = self._grant(request, act.permission, row)
        answer = partial(form_page, self.admin_site, request, context=self._act_context(act, row))
        if request.method != "POST":
            if not self._is_open(request, act, row):
                return answer(None, error=StateConflictError("This is not possible now, or not for you."))
            return answer(act.form(initial=act.form.initial_for(row)))
        form = act.form(request.POST)
        if not form.is_valid():
            return answer(form, status=400)
        try:
            require_seen(row, form.cleaned_data)
            done = act.does(grant, row, form.cleaned_data)
        except RequestInvalidError as error:
            form.show_faults(error)
            return answer(form, error=error)
        except StateConflictError as error:
            return self._look_again(act, request, object_id, error)
        except KeyvaultError as error:
            return answer(form, error=error)
        return self._done(request, done, done.row or row)

    def _look_again(
        self, act: RowAction, request: HttpRequest, object_id: str, error: StateConflictError
    ) -> HttpResponse:
        """Show the page of the action again for the current row, with the conflict."""
        row = self.fresh(request, object_id)
        form = act.form(initial=act.form.initial_for(row)) if self._is_open(request, act, row) else None
        return form_page(self.admin_site, request, form, self._act_context(act, row), error=error)

    def _ask_view(self, ask: CreateAction, request: HttpRequest) -> HttpResponse:
        answer = partial(form_page, self.admin_site, request, context=self._ask_context(ask))
        if request.method != "POST":
            return answer(ask.form(initial=ask.preset(request.GET)))
        form = ask.form(request.POST)
        if not form.is_valid():
            return answer(form, status=400)
        try:
            grant = grant_for(request, ask.permission, ask.account_of(form.cleaned_data))
            done = ask.does(grant, form.cleaned_data)
        except RequestInvalidError as error:
            form.show_faults(error)
            return answer(form, error=error)
        except KeyvaultError as error:
            return answer(form, error=error)
        return self._done(request, done, done.row)

    def _done(self, request: HttpRequest, done: ActionResult, row: Model | None) -> HttpResponse:
        """Redirect with a message; a result with a secret shows the secret instead of redirecting."""
        url = self.url_of(row) if row is not None else self.list_url()
        if done.secret is not None:
            back = Link(self.plural if row is None else self.name_of(row), url)
            return secret_page(
                self.admin_site,
                request,
                done.secret,
                title=done.message,
                note="This is the only time it is shown. Reloading this page does not bring it back.",
                once=True,
                summary=None if row is None else self.summary(row),
                crumbs=self._crumbs(),
                back=back,
                beside=done.beside,
                then=[self._link(row, act.name, act.label) for act in self.acts if row and act.name in done.then],
            )
        add_message = messages.warning if done.is_partial else messages.success
        add_message(request, done.message)
        return HttpResponseRedirect(done.url or url)

    # --- shared by the views ------------------------------------------------------------------------------

    def fresh(self, request: HttpRequest, object_id: str) -> Any:
        """Load the row. Raises NotFoundError."""
        rows: QuerySet[Any] = self.get_queryset(request)
        try:
            row = rows.filter(pk=object_id).first()
        except (ValueError, ValidationError):
            row = None
        if row is None:
            raise NotFoundError(f"There is no such {self.singular.lower()}.")
        return row

    def _is_open(self, request: HttpRequest, act: RowAction, row: Any) -> bool:
        """Whether the state of the row and the operator allow the action; the service checks both again."""
        return act.fits(row) and (not act.for_requester or self.requester_person_of(row) == operator_of(request).person)

    def _offers(self, request: HttpRequest, act: RowAction, row: Any) -> bool:
        account, requester_person = self.account_of(row), self.requester_person_of(row)
        return self._is_open(request, act, row) and may(
            request, act.permission, account, requester_person=requester_person
        )

    def _grant(self, request: HttpRequest, permission: Permission, row: Any) -> Grant:
        return grant_for(request, permission, self.account_of(row), requester_person=self.requester_person_of(row))

    def url_of(self, row: Model, name: str = "change") -> str:
        return reverse(f"admin:{self.opts.app_label}_{self.opts.model_name}_{name}", args=[row.pk])

    def list_url(self, query: str = "") -> str:
        return reverse(f"admin:{self.opts.app_label}_{self.opts.model_name}_changelist") + query

    def _ask_link(self, ask: CreateAction) -> Link:
        return Link(ask.label, reverse(f"admin:{self.opts.app_label}_{self.opts.model_name}_{ask.name}"))

    def for_me(self, request: HttpRequest, permission: Permission, rows: QuerySet[Any]) -> list[Any]:
        """Return the first rows that the operator may decide on, as second person where one is required."""
        return [
            row
            for row in rows[:_MAX_ATTENTION_ROWS]
            if may(request, permission, self.account_of(row), requester_person=self.requester_person_of(row))
        ]

    def waits(self, title: str, rows: QuerySet[Any] | list[Any], query: str, tone: str = "plain") -> Waiting:
        """Build the attention item for these rows; `query` filters the list that it links to."""
        found = list(rows[:_MAX_ATTENTION_ROWS])
        lines = [self.line_of(row) for row in found[:_MAX_LINES]]
        return Waiting(title, self.list_url(query), len(found), lines, tone)

    def ask_links(self, request: HttpRequest) -> list[Link]:
        """Return links to the create actions that the operator may use, for the front page."""
        return [self._ask_link(ask) for ask in self.asks if may(request, ask.permission)]

    def _link(self, row: Model, name: str, label: str) -> Link:
        return Link(label, self.url_of(row, name))

    def _crumbs(self) -> list[Link]:
        return [Link(self.plural, self.list_url())]

    def _act_context(self, act: RowAction, row: Any) -> dict[str, Any]:
        back = Link(self.name_of(row), self.url_of(row))
        warning = act.warn(row)
        return {
            "title": f"{act.label}: {self.name_of(row)}",
            "summary": self.summary(row),
            "explain": act.explain(row),
            "warning": warning,
            "button": act.label,
            "tone": Tone.DANGER if warning else act.tone,
            "crumbs": [*self._crumbs(), back],
            "back": back,
        }

    def _ask_context(self, ask: CreateAction) -> dict[str, Any]:
        return {
            "title": ask.label,
            "explain": ask.explain,
            "button": ask.button,
            "tone": "plain",
            "crumbs": self._crumbs(),
            "back": Link(self.plural, self.list_url()),
        }
