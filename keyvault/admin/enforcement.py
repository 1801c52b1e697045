"""How the console asks: every page and every act of it goes through the one decision function.

A noun of the console is a `GuardedAdmin`. It says which permission opens it and lists its acts as data; the
routes are built from that list here, each behind its permission, so that none can exist without one. What
Django's admin would offer besides (adding, changing and deleting rows, histories, bulk actions, lists that
can be edited) is neither routed nor permitted, and Django's own model permissions are never consulted.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import ValidationError
from django.db.models import Model, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.urls import URLPattern, path, reverse

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.access.principals import Operator
from keyvault.admin.acts import Act, Ask, Done, Look, require_seen
from keyvault.admin.cells import Detail, Extras, Facts, Link, Waiting
from keyvault.admin.pages import form_page, page, secret_page
from keyvault.domain.errors import (
    KeyvaultError,
    NotFoundError,
    PermissionMissingError,
    RequestInvalidError,
    StateConflictError,
)
from keyvault.models import Account
from keyvault.models import Operator as OperatorRow
from keyvault.services.authorization import authorize, is_allowed, operator_principal

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Any]
else:
    _ModelAdmin = admin.ModelAdmin

View = Callable[..., HttpResponse]

_GET = ("GET", "HEAD")
_GET_AND_POST = (*_GET, "POST")


def operator_of(request: HttpRequest) -> Operator:
    """Who asks, read once for each request. Raises PermissionMissingError for nobody."""
    known: Operator | None = getattr(request, "console_operator", None)
    if known is None:
        if not isinstance(request.user, OperatorRow):
            raise PermissionMissingError("Log in first.")
        known = operator_principal(request.user)
        request.console_operator = known  # type: ignore[attr-defined]  # read back two lines above
    return known


def may(
    request: HttpRequest,
    permission: Permission,
    account: Account | None = None,
    *,
    requester_person: str | None = None,
) -> bool:
    """Whether the operator would be granted it: for showing or hiding, and for opening a page at all."""
    return is_allowed(
        operator_of(request), permission, account, now=datetime.now(UTC), requester_person=requester_person
    )


def grant_for(
    request: HttpRequest,
    permission: Permission,
    account: Account | None = None,
    *,
    requester_person: str | None = None,
) -> Grant:
    """The grant for the service that does it. Raises what `authorize` raises."""
    return authorize(
        operator_of(request), permission, account, now=datetime.now(UTC), requester_person=requester_person
    )


class ConsoleList(ChangeList):
    """A list whose rows lead to their own pages."""

    def url_for_result(self, result: Model) -> str:
        url: str = self.model_admin.url_of(result)
        return url


class GuardedAdmin(_ModelAdmin):
    """One noun of the console. Nobody sees it until `view_permissions` names who may; any one of them opens it."""

    view_permissions: tuple[Permission, ...] = ()
    section = ""
    singular = ""
    plural = ""
    acts: tuple[Act, ...] = ()
    looks: tuple[Look, ...] = ()
    asks: tuple[Ask, ...] = ()

    actions = None
    list_editable = ()
    list_per_page = 50
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    change_list_template = "console/change_list.html"

    # --- what a noun says of its rows ---------------------------------------------------------------------

    def detail(self, request: HttpRequest, row: Any) -> Detail:
        """What the page of one row shows."""
        raise NotImplementedError

    def summary(self, row: Any) -> Facts:
        """What a page that asks for a decision about the row shows of it."""
        raise NotImplementedError

    def account_of(self, row: Any) -> Account | None:
        """Whose it is: what a grant for an act on it is about. None: the platform's."""
        return None

    def requester_person_of(self, row: Any) -> str | None:
        """Who asked for what a second person decides about."""
        return None

    def waiting(self, request: HttpRequest) -> Iterable[Waiting]:
        """What of this noun waits for whoever looks, for the front page."""
        return ()

    def extras_for(self, request: HttpRequest, row: Model) -> Extras | None:
        """What this noun adds to the page of another one's row."""
        return None

    # --- what Django's admin asks -------------------------------------------------------------------------

    def has_view_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return any(may(request, permission) for permission in self.view_permissions)

    def has_module_permission(self, request: HttpRequest) -> bool:
        return self.has_view_permission(request)

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Rows are made by services."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """Rows are changed by services."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest) -> bool:
        """Only the filters that the list shows: no other column can be probed through the address."""
        shown = {item[0] if isinstance(item, tuple) else item for item in self.get_list_filter(request)}
        return any(lookup == name or lookup.startswith(f"{name}__") for name in shown if isinstance(name, str))

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return ConsoleList

    # --- routes -------------------------------------------------------------------------------------------

    def get_urls(self) -> list[URLPattern]:
        base = f"{self.opts.app_label}_{self.opts.model_name}"
        view, look, act, ask = self._detail_view, self._look_view, self._act_view, self._ask_view
        return [
            path("", self._guarded(self.view_permissions, _GET, self._list_view), name=f"{base}_changelist"),
            *(
                path(
                    f"new/{item.name}/",
                    self._guarded((item.permission,), _GET_AND_POST, partial(ask, item)),
                    name=f"{base}_{item.name}",
                )
                for item in self.asks
            ),
            path("<str:object_id>/", self._guarded(self.view_permissions, _GET, view), name=f"{base}_change"),
            *(
                path(
                    f"<str:object_id>/{item.name}/",
                    self._guarded((item.permission,), _GET, partial(look, item)),
                    name=f"{base}_{item.name}",
                )
                for item in self.looks
            ),
            *(
                path(
                    f"<str:object_id>/{item.name}/",
                    self._guarded((item.permission,), _GET_AND_POST, partial(act, item)),
                    name=f"{base}_{item.name}",
                )
                for item in self.acts
            ),
        ]

    def _guarded(self, permissions: tuple[Permission, ...], methods: Sequence[str], view: View) -> View:
        """The view, for operators with one of the permissions only; it asks again once it knows its row."""

        @wraps(view)
        def guarded(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
            if not any(may(request, permission) for permission in permissions):
                raise PermissionMissingError(f"This needs the permission {' or '.join(permissions)}.")
            if request.method not in methods:
                return HttpResponseNotAllowed(methods)
            return view(request, *args, **kwargs)

        return self.admin_site.admin_view(guarded)

    # --- views --------------------------------------------------------------------------------------------

    def _list_view(self, request: HttpRequest) -> HttpResponse:
        asks = [self._ask_link(ask) for ask in self.asks if may(request, ask.permission)]
        context = {"title": self.plural, "plural": self.plural, "asks": asks, "section": self.section}
        return self.changelist_view(request, extra_context=context)

    def _detail_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        row = self.fresh(request, object_id)
        detail = self.detail(request, row)
        others = [door for door in self.admin_site._registry.values() if isinstance(door, GuardedAdmin)]
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
                {"act": act, "url": self.url_of(row, act.name)}
                for act in self.acts
                if act.fits(row)
                and may(
                    request, act.permission, self.account_of(row), requester_person=self.requester_person_of(row)
                )
            ],
            "crumbs": self._crumbs(),
        }
        return page(self.admin_site, request, "detail", context)

    def _look_view(self, look: Look, request: HttpRequest, object_id: str) -> HttpResponse:
        row = self.fresh(request, object_id)
        self._grant(request, look.permission, row)
        back = Link(str(row), self.url_of(row))
        return secret_page(
            self.admin_site,
            request,
            look.reads(row),
            title=f"{look.label} {row}",
            note=look.note,
            once=False,
            crumbs=[*self._crumbs(), back],
            back=back,
        )

    def _act_view(self, act: Act, request: HttpRequest, object_id: str) -> HttpResponse:
        row = self.fresh(request, object_id)
        grant = self._grant(request, act.permission, row)
        answer = partial(form_page, self.admin_site, request, context=self._act_context(act, row))
        if request.method != "POST":
            if not act.fits(row):
                return answer(None, error=StateConflictError(f"That is not possible now: look at {row} again."))
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

    def _look_again(self, act: Act, request: HttpRequest, object_id: str, error: StateConflictError) -> HttpResponse:
        """The page was made from what is no longer true: the same page of the row as it is now, and why."""
        row = self.fresh(request, object_id)
        form = act.form(initial=act.form.initial_for(row)) if act.fits(row) else None
        return form_page(self.admin_site, request, form, self._act_context(act, row), error=error)

    def _ask_view(self, ask: Ask, request: HttpRequest) -> HttpResponse:
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

    def _done(self, request: HttpRequest, done: Done, row: Model | None) -> HttpResponse:
        """To the row, with a word; or, where there is a secret, the page that shows it and no redirect."""
        url = self.url_of(row) if row is not None else self.list_url()
        if done.secret is not None:
            back = Link(self.plural if row is None else str(row), url)
            return secret_page(
                self.admin_site,
                request,
                done.secret,
                title=done.message,
                note="This is the only time it is shown. Reloading this page does not bring it back.",
                once=True,
                crumbs=self._crumbs(),
                back=back,
            )
        messages.success(request, done.message)
        return HttpResponseRedirect(url)

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

    def _grant(self, request: HttpRequest, permission: Permission, row: Any) -> Grant:
        return grant_for(
            request, permission, self.account_of(row), requester_person=self.requester_person_of(row)
        )

    def url_of(self, row: Model, name: str = "change") -> str:
        return reverse(f"admin:{self.opts.app_label}_{self.opts.model_name}_{name}", args=[row.pk])

    def list_url(self, query: str = "") -> str:
        return reverse(f"admin:{self.opts.app_label}_{self.opts.model_name}_changelist") + query

    def _ask_link(self, ask: Ask) -> Link:
        return Link(ask.label, reverse(f"admin:{self.opts.app_label}_{self.opts.model_name}_{ask.name}"))

    def ask_links(self, request: HttpRequest) -> list[Link]:
        """What the operator may ask for, for the front page."""
        return [self._ask_link(ask) for ask in self.asks if may(request, ask.permission)]

    def _link(self, row: Model, name: str, label: str) -> Link:
        return Link(label, self.url_of(row, name))

    def _crumbs(self) -> list[Link]:
        return [Link(self.plural, self.list_url())]

    def _act_context(self, act: Act, row: Any) -> dict[str, Any]:
        back = Link(str(row), self.url_of(row))
        return {
            "title": f"{act.label}: {row}",
            "summary": self.summary(row),
            "explain": act.explain(row),
            "warning": act.warn(row),
            "button": act.label,
            "tone": act.tone,
            "crumbs": [*self._crumbs(), back],
            "back": back,
        }

    def _ask_context(self, ask: Ask) -> dict[str, Any]:
        return {
            "title": ask.label,
            "explain": ask.explain,
            "button": ask.button,
            "tone": "plain",
            "crumbs": self._crumbs(),
            "back": Link(self.plural, self.list_url()),
        }
