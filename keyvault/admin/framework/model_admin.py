"""A noun of the console: its list, the page of one row, and the acts on it, built from data.

The routes come from the noun's lists of acts, each behind its permission, so that none can exist without one;
histories, bulk actions and the forms that Django's admin would edit rows with have no route here.
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

_FIRST_LINES = 5
_MOST_WAITING = 200
"""As many rows of one kind does the front page look at, and as many lines does it show of them."""


class ConsoleList(ChangeList):
    """A list whose rows lead to their own pages."""

    def url_for_result(self, result: Model) -> str:
        noun = self.model_admin
        if not isinstance(noun, ConsoleModelAdmin):
            raise TypeError(f"{noun} is no guarded admin")
        return noun.url_of(result)


class ConsoleModelAdmin(Guarded, _ModelAdmin):
    """One noun. A subclass says who may see it, what its pages show, and which acts there are."""

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

    # --- what a noun says of its rows ---------------------------------------------------------------------

    def detail(self, request: HttpRequest, row: Any) -> Detail:
        """What the page of one row shows."""
        raise NotImplementedError

    def summary(self, row: Any) -> FactTable:
        """What a page that asks for a decision about the row shows of it."""
        raise NotImplementedError

    def name_of(self, row: Any) -> str:
        """What a title calls it."""
        return str(row)

    def account_of(self, row: Any) -> Account | None:
        """Whose it is: what a grant for an act on it is about. None: the platform's."""
        return None

    def requester_person_of(self, row: Any) -> str | None:
        """Who asked for what a second person decides about."""
        return None

    def waiting(self, request: HttpRequest) -> Iterable[Waiting]:
        """What of this noun waits for whoever looks, for the front page."""
        return ()

    def count_of_waiting(self, request: HttpRequest) -> int:
        """How many of it nobody has looked at yet, for the side bar."""
        return 0

    def line_of(self, row: Any) -> Line:
        """One row of it on the front page."""
        return Line(self.url_of(row), self.name_of(row), "")

    def extras_for(self, request: HttpRequest, row: Model) -> Extras | None:
        """What this noun adds to the page of another one's row."""
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
        context = {"title": self.plural, "plural": self.plural, "asks": asks, "section": self.section}
        return self.changelist_view(request, extra_context=context)

    def _detail_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        row = self.fresh(request, object_id)
        detail = self.detail(request, row)
        others = [door for door in self.admin_site._registry.values() if isinstance(door, ConsoleModelAdmin)]
        extras = [extra for door in others if (extra := door.extras_for(request, row)) is not None]
        context = {
            "title": detail.title,
            "singular": self.singular,
            "detail": detail,
            "sections": [*detail.sections, *(section for extra in extras for section in extra.sections)],
            "links": [
                *(self._link(row, look.name, look.label) for look in self.looks if look.fits(row)),
                *(link for extra in extras for link in extra.links),
            ],
            "acts": [
                {"act": act, "url": self.url_of(row, act.name)} for act in self.acts if self._offers(request, act, row)
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
        """The page was made from what is no longer true: the same page of the row as it is now, and why."""
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
        """To the row or what else shows it, with a word; where there is a secret, the page with it and no redirect."""
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
        tell = messages.warning if done.is_partial else messages.success
        tell(request, done.message)
        return HttpResponseRedirect(done.url or url)

    # --- what the views share -----------------------------------------------------------------------------

    def fresh(self, request: HttpRequest, object_id: str) -> Any:
        """The row as it is now. Raises NotFoundError."""
        rows: QuerySet[Any] = self.get_queryset(request)
        try:
            row = rows.filter(pk=object_id).first()
        except (ValueError, ValidationError):
            row = None
        if row is None:
            raise NotFoundError(f"There is no such {self.singular.lower()}.")
        return row

    def _is_open(self, request: HttpRequest, act: RowAction, row: Any) -> bool:
        """Whether it is the moment, and the operator the one, for the act: what the service will want too."""
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
        """The first of the rows that the operator may decide about, as a second person where it takes one."""
        return [
            row
            for row in rows[:_MOST_WAITING]
            if may(request, permission, self.account_of(row), requester_person=self.requester_person_of(row))
        ]

    def waits(self, title: str, rows: QuerySet[Any] | list[Any], query: str, tone: str = "plain") -> Waiting:
        """These rows as one thing that waits; `query` is what the list is to be filtered by."""
        found = list(rows[:_MOST_WAITING])
        lines = [self.line_of(row) for row in found[:_FIRST_LINES]]
        return Waiting(title, self.list_url(query), len(found), lines, tone)

    def ask_links(self, request: HttpRequest) -> list[Link]:
        """What the operator may ask for, for the front page."""
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
