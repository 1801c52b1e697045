"""Admin site of the console: access, registered model admins and problem pages."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any, TypeVar, cast

from django.conf import settings
from django.contrib.admin import AdminSite
from django.contrib.admin.models import LogEntry
from django.contrib.auth import REDIRECT_FIELD_NAME
from django.core.exceptions import ImproperlyConfigured, PermissionDenied, SuspiciousOperation
from django.db import IntegrityError
from django.db.models import Model, QuerySet
from django.http import (
    Http404,
    HttpRequest,
    HttpResponse,
    HttpResponseBase,
    HttpResponseNotAllowed,
    HttpResponseRedirect,
)
from django.urls import URLPattern, URLResolver, include, path, re_path, reverse
from django.utils.html import format_html_join
from django.views.decorators.cache import never_cache

from keyvault.access.permissions import Permission
from keyvault.access.verification import find_exposed
from keyvault.admin.account.invitation import invitation_page
from keyvault.admin.account.second_factor import second_factor_page
from keyvault.admin.account.second_factors import (
    add_passkey_page,
    add_totp_page,
    factors_page,
    recovery_codes_page,
    remove_page,
)
from keyvault.admin.account.single_sign_on import begin, finish
from keyvault.admin.catalog.catalog import CatalogEndpointAdmin
from keyvault.admin.catalog.limits import LimitOverrideAdmin
from keyvault.admin.framework.actions import RowAction
from keyvault.admin.framework.attention import (
    URGENT_TONES,
    Attention,
    AttentionQuery,
    KeptQueries,
    attention_context,
    count_by_entry,
    menu_counts,
    select_rows,
)
from keyvault.admin.framework.components import Tile, Tiles
from keyvault.admin.framework.enforcement import grant_for, operator_of
from keyvault.admin.framework.menu import ENTRIES, ConsolePage, Section, build_menu, page_route
from keyvault.admin.framework.middleware import ViewT, open_before_sign_in
from keyvault.admin.framework.model_admin import ConsoleModelAdmin
from keyvault.admin.framework.overview import OverviewPart, PartFinder
from keyvault.admin.framework.pages import live_page, page, problem_page
from keyvault.admin.framework.plain_pages import CONTENT_SECURITY_POLICY
from keyvault.admin.framework.row_search import find_ids
from keyvault.admin.framework.shown_environment import choose_environment, environment_of
from keyvault.admin.framework.sign_in import SignInView, find_next, second_factor_url
from keyvault.admin.keys.credential_choices import CREDENTIAL_CHOICES
from keyvault.admin.keys.credentials import CredentialAdmin
from keyvault.admin.keys.issuance import IssuanceRequestAdmin
from keyvault.admin.keys.keys import KeyAdmin
from keyvault.admin.keys.overview import REFRESH_SECONDS, overview_context
from keyvault.admin.keys.peppers import PepperVersionAdmin
from keyvault.admin.keys.recipient_keys import RecipientKeyAdmin
from keyvault.admin.keys.service_tokens import ServiceTokenAdmin
from keyvault.admin.merchants.merchant_choices import MERCHANT_CHOICES
from keyvault.admin.merchants.merchants import AccountAdmin, MerchantAdmin
from keyvault.admin.merchants.provider_connections import ProviderConnectionAdmin
from keyvault.admin.merchants.webhooks import WebhookEndpointAdmin
from keyvault.admin.operators.operator_changes import OperatorChangeAdmin
from keyvault.admin.operators.operators import OperatorAdmin
from keyvault.admin.operators.sessions import ConsoleSessionAdmin
from keyvault.admin.oversight import approvals, audit_export, health, refusals
from keyvault.admin.oversight.audit import ACTOR_CHOICES, AuditEntryAdmin
from keyvault.admin.oversight.break_glass import BreakGlassAdmin
from keyvault.admin.oversight.inbox import NoticeAdmin
from keyvault.admin.oversight.refusals import RefusalAdmin
from keyvault.backends import meters
from keyvault.domain.errors import ErrorCode, KeyvaultError
from keyvault.models import (
    Account,
    AuditEntry,
    BreakGlass,
    CatalogEndpoint,
    ConsoleSession,
    Credential,
    IssuanceRequest,
    Key,
    LimitOverride,
    Merchant,
    Notice,
    Operator,
    OperatorChange,
    PepperVersion,
    ProviderConnection,
    RecipientKey,
    Refusal,
    ServiceToken,
    WebhookEndpoint,
)
from keyvault.services.sessions.sign_in import sign_out
from keyvault.services.sessions.step_up import has_passed_second_factor
from keyvault.wire.planes import Plane

MODEL_ADMINS: tuple[tuple[type[Model], type[ConsoleModelAdmin]], ...] = (
    (IssuanceRequest, IssuanceRequestAdmin),
    (Credential, CredentialAdmin),
    (Key, KeyAdmin),
    (RecipientKey, RecipientKeyAdmin),
    (Merchant, MerchantAdmin),
    (Account, AccountAdmin),
    (ProviderConnection, ProviderConnectionAdmin),
    (WebhookEndpoint, WebhookEndpointAdmin),
    (CatalogEndpoint, CatalogEndpointAdmin),
    (LimitOverride, LimitOverrideAdmin),
    (ServiceToken, ServiceTokenAdmin),
    (Operator, OperatorAdmin),
    (OperatorChange, OperatorChangeAdmin),
    (ConsoleSession, ConsoleSessionAdmin),
    (Notice, NoticeAdmin),
    (AuditEntry, AuditEntryAdmin),
    (BreakGlass, BreakGlassAdmin),
    (PepperVersion, PepperVersionAdmin),
    (Refusal, RefusalAdmin),
)
"""Model admins of keyvault; rotation registers its own."""

MAX_WORD = 200
"""Maximum length of the search's text."""

MAX_HITS = 10
"""Maximum rows that the search finds of each kind and field."""

_EXCLUDED_PACKAGES = ("django.contrib.auth.", "allauth.")

_log = logging.getLogger(__name__)

ResponseT = TypeVar("ResponseT", bound=HttpResponseBase)


class ConsoleSite(AdminSite):
    """Admin site for active operators with a role; every view checks its own permission."""

    site_header = "Keyvault"
    site_title = "Keyvault"
    index_title = "Overview"
    site_url = None
    logout_template = "console/logged_out.html"

    def __init__(self, name: str = "admin") -> None:
        super().__init__(name)
        self._pages: list[ConsolePage] = [
            *(MERCHANT_CHOICES, CREDENTIAL_CHOICES, ACTOR_CHOICES),
            *approvals.PAGES,
            *refusals.PAGES,
            *health.PAGES,
            *audit_export.PAGES,
        ]
        self._overview_parts: list[PartFinder] = []
        self._queries = KeptQueries()
        for model, model_admin in MODEL_ADMINS:
            self.register(model, model_admin)

    def register(
        self,
        model_or_iterable: Any,
        admin_class: type[Any] | None = None,
        **options: Any,
    ) -> None:
        """Register a `ConsoleModelAdmin`; reject any other model admin.

        Django's groups are ignored because roles are defined in code, and allauth's rows because services write them.
        """
        if admin_class is not None and admin_class.__module__.startswith(_EXCLUDED_PACKAGES):
            return
        if admin_class is None or not issubclass(admin_class, ConsoleModelAdmin):
            raise ImproperlyConfigured(f"{model_or_iterable} is not registered with a ConsoleModelAdmin")
        super().register(model_or_iterable, admin_class, **options)

    def extend(self, model: type[Model], actions: Sequence[RowAction]) -> None:
        """Add another app's actions to the pages of a registered model.

        Args:
            actions: for one row; an action replaces the one of the same name.
        """
        registered = self._registry[model]
        if not isinstance(registered, ConsoleModelAdmin):
            raise ImproperlyConfigured(f"{model} is not registered with a ConsoleModelAdmin")
        names = {action.name for action in registered.row_actions}
        replacements = {action.name: action for action in actions if action.name in names}
        registered.row_actions = (
            *(replacements.get(action.name, action) for action in registered.row_actions),
            *(action for action in actions if action.name not in names),
        )

    def add_page(self, console_page: ConsolePage) -> None:
        """Add a page that is no model admin. Call it before the routes are read, such as in an app's admin modules."""
        if console_page.menu and console_page.menu not in ENTRIES:
            raise ImproperlyConfigured(f"{console_page.name}: the menu has no entry {console_page.menu!r}")
        self._pages.append(console_page)

    def add_overview_part(self, finder: PartFinder) -> None:
        """Add another app's numbers and card to the overview."""
        self._overview_parts.append(finder)

    # --- access -------------------------------------------------------------------------------------------

    def has_permission(self, request: HttpRequest) -> bool:
        """Whether the sign-in is complete. `ConsoleAccessMiddleware` closes all pages without it."""
        return self.has_passed_password(request) and has_passed_second_factor(request.session)

    def has_passed_password(self, request: HttpRequest) -> bool:
        user = request.user
        return isinstance(user, Operator) and user.is_active and user.is_staff and bool(operator_of(request).roles)

    def admin_view(self, view: ViewT, cacheable: bool = False) -> ViewT:
        return super().admin_view(self._with_problem_pages(view), cacheable)

    def login(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Django's login with a view that counts failures."""
        if request.method == "GET" and self.has_permission(request):
            return HttpResponseRedirect(reverse("admin:index"))
        if request.method == "GET" and self.has_passed_password(request):
            return HttpResponseRedirect(second_factor_url(find_next(request)))
        context = {
            **self.each_context(request),
            "title": "Sign in",
            "subtitle": None,
            "app_path": request.get_full_path(),
            "username": request.user.get_username(),
            "lacks_role": request.user.is_authenticated and not self.has_passed_password(request),
            "has_single_sign_on": settings.IDENTITY_PROVIDER is not None,
            **(extra_context or {}),
        }
        if REDIRECT_FIELD_NAME not in request.GET and REDIRECT_FIELD_NAME not in request.POST:
            context[REDIRECT_FIELD_NAME] = reverse("admin:index")
        request.current_app = self.name  # read by Django's templates
        return _with_csp(cast(HttpResponse, SignInView.as_view(extra_context=context)(request)))

    def logout(  # type: ignore[override]  # Django's base class returns a response, too, for a redirect
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Record the sign-out before the session ends, while the operator is known."""
        if not self.has_passed_password(request):
            return HttpResponseRedirect(reverse("admin:login"))
        if request.method == "POST":
            sign_out(grant_for(request, Permission.SESSIONS_WRITE))
        return super().logout(request, extra_context)

    def problem(self, request: HttpRequest, code: ErrorCode, detail: str) -> HttpResponse:
        """Return the page of an error that no view has answered."""
        return _with_csp(problem_page(self, request, code, detail))

    def _open_view(self, view: ViewT) -> ViewT:
        """Wrap a view that answers before the sign-in is complete."""
        return open_before_sign_in(never_cache(self._with_problem_pages(view)))

    def _with_problem_pages(self, view: ViewT) -> ViewT:
        """Turn expected errors into problem pages; unexpected errors propagate to the log."""

        @wraps(view)
        def handle(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
            response: HttpResponseBase
            try:
                if "%00" in request.get_full_path():
                    raise SuspiciousOperation("NUL in the URL, which PostgreSQL cannot store")
                if find_exposed(request.get_full_path()) is not None:
                    detail = "The URL contains a whole key, and URLs are logged. Rotate the key, and search by key id."
                    response = problem_page(self, request, ErrorCode.CREDENTIAL_IN_URL, detail)
                else:
                    response = view(request, *args, **kwargs)
                    if request.method == "POST" and self.has_permission(request):
                        menu_counts.forget(request)
            except KeyvaultError as error:
                meters.note_denial(Plane.CONSOLE, error.code)
                _log.info("refused", extra={"code": error.code, "internal": error.internal, "path": request.path})
                response = problem_page(self, request, error.code, error.detail)
            except IntegrityError:
                # Two concurrent changes: a constraint or trigger refused what a rule had allowed.
                _log.warning("refused by the database", exc_info=True, extra={"path": request.path})
                detail = "This was changed by another operator. Review the current version and try again."
                response = problem_page(self, request, ErrorCode.STATE_CONFLICT, detail)
            except Http404:
                response = problem_page(self, request, ErrorCode.NOT_FOUND, "Page not found.")
            except PermissionDenied:
                response = problem_page(self, request, ErrorCode.PERMISSION_MISSING, "You are not allowed to do this.")
            except SuspiciousOperation:
                response = problem_page(self, request, ErrorCode.REQUEST_INVALID, "Invalid URL.")
            return _with_csp(response)

        return cast(ViewT, handle)

    # --- routes -------------------------------------------------------------------------------------------

    def get_urls(self) -> list[URLPattern | URLResolver]:
        """Route the overview, login, logout and the model admins; none of Django's other admin views."""
        return [
            path("", self.admin_view(self.front_page), name="index"),
            path("search/", self.admin_view(self.search_page), name="search"),
            path("environment/", self.admin_view(self.choose_environment), name="environment"),
            *(page_route(self, each) for each in self._pages),
            path("login/", open_before_sign_in(never_cache(self.login)), name="login"),
            path("login/sso/", self._open_view(partial(begin, self)), name="single_sign_on"),
            path("login/sso/callback/", self._open_view(finish), name="single_sign_on_callback"),
            path("logout/", self._open_view(self.logout), name="logout"),
            path("second-factor/", self._open_view(partial(second_factor_page, self)), name="second_factor"),
            path("invitation/", self._open_view(partial(invitation_page, self)), name="invitation"),
            *(
                path(f"account/second-factors/{route}", self.admin_view(partial(view, self)), name=name)
                for route, view, name in (
                    ("", factors_page, "second_factors"),
                    ("totp/", add_totp_page, "add_totp"),
                    ("passkey/", add_passkey_page, "add_passkey"),
                    ("recovery-codes/", recovery_codes_page, "recovery_codes"),
                    ("<int:factor_id>/remove/", remove_page, "remove_second_factor"),
                )
            ),
            *(
                path(f"{model._meta.app_label}/{model._meta.model_name}/", include(model_admin.urls))
                for model, model_admin in self._registry.items()
            ),
            re_path(r"(?P<url>.*)$", self.admin_view(self.catch_all_view)),
        ]

    # --- the overview and the frame ---------------------------------------------------------------------

    def front_page(self, request: HttpRequest) -> HttpResponse:
        found, others = self._queries.find("overview", request, partial(self._select_overview, request)).find()
        menu_counts.store(request, count_by_entry(found))
        context: dict[str, Any] = {
            "title": self.index_title,
            "create_links": [
                link
                for model_admin in sorted(self._model_admins(), key=lambda each: ENTRIES.index(each.menu))
                for link in model_admin.create_links(request)
            ],
            **attention_context(request, found),
            **overview_context(request),
        }
        finders = zip(self._overview_parts, others, strict=True)
        parts = [part for finder, values in finders if (part := finder.find(request, values)) is not None]
        tiles = [_with_notes(tile, parts) for tile in context.get("tiles", ())]
        tiles += [tile for part in parts for tile in part.tiles]
        context["tiles"] = Tiles(tiles) if tiles else ""
        context["sections"] = [part.section for part in parts if part.section is not None]
        return live_page(self, request, "index", context, seconds=REFRESH_SECONDS)

    def _select_overview(self, request: HttpRequest) -> AttentionQuery:
        others = [finder.select(request) for finder in self._overview_parts]
        return select_rows(request, self._attention_items(request), others)

    def _select_menu(self, request: HttpRequest) -> AttentionQuery:
        return select_rows(request, [each for each in self._attention_items(request) if each.tone in URGENT_TONES])

    def _attention_items(self, request: HttpRequest) -> list[Attention]:
        """Return what may need the attention of the operator, and of others."""
        viewable = (each for each in self._model_admins() if each.has_view_permission(request))
        return [
            item
            for model_admin in viewable
            for item in (*model_admin.approval_items(request), *model_admin.attention_items(request))
        ]

    def search_page(self, request: HttpRequest) -> HttpResponse:
        """Show the rows that a word names: an id, the end of a key id, or the beginning of a name or a label.

        One hit is opened directly. Only rows that the operator may view are found.
        """
        word = request.GET.get("q", "").strip()[:MAX_WORD]
        viewable = [each for each in self._model_admins() if word and each.has_view_permission(request)]
        selections = [(each, rows) for each in viewable for rows in each.find_by_word(request, word)]
        found: dict[ConsoleModelAdmin, set[str]] = {}
        for (model_admin, _), ids in zip(selections, find_ids([rows for _, rows in selections], MAX_HITS), strict=True):
            found.setdefault(model_admin, set()).update(ids)
        groups = [
            (model_admin.plural, [model_admin.hit_of(row) for row in model_admin.find_hits(request, sorted(ids))])
            for model_admin, ids in found.items()
            if ids
        ]
        hits = [hit for _, listed in groups for hit in listed]
        if len(hits) == 1:
            return HttpResponseRedirect(hits[0].url)
        context = {"title": "Search", "search_words": word, "groups": groups, "max_hits": MAX_HITS}
        return page(self, request, "search", context)

    def choose_environment(self, request: HttpRequest) -> HttpResponse:
        """Keep the environment that lists show, and return to the page."""
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        choose_environment(request, request.POST.get("environment", ""))
        return HttpResponseRedirect(find_next(request))

    def each_context(self, request: HttpRequest) -> dict[str, Any]:
        """Return what the frame of every page shows."""
        if not self.has_permission(request):
            return {"menu": []}
        operator = operator_of(request)
        return {
            "menu": partial(self._menu, request),
            "environment": environment_of(request),
            "environments": sorted(operator.scope.environments, reverse=True),
            "roles": sorted(role.value.replace("_", " ") for role in operator.roles),
            "scope": operator.scope,
            # Without the query: a page does not repeat what was pasted into its address.
            "here": "" if find_exposed(request.path) else request.path,
        }

    def _menu(self, request: HttpRequest) -> list[Section]:
        """Return the menu of what the operator may view. Pages are the first tabs of their entry."""
        tabs = [(each.menu, each.tab_for(request)) for each in self._pages]
        tabs += [(model_admin.menu, model_admin.menu_tab(request)) for model_admin in self._model_admins()]
        counts = menu_counts.find(request)
        if counts is None:
            found, _ = self._queries.find("menu", request, partial(self._select_menu, request)).find()
            counts = count_by_entry(found)
            menu_counts.store(request, counts)
        return build_menu([(entry, tab) for entry, tab in tabs if tab is not None], counts)

    def get_log_entries(self, request: HttpRequest) -> QuerySet[LogEntry]:
        """Return nothing: the audit chains replace Django's change log."""
        return LogEntry.objects.none()

    def _model_admins(self) -> list[ConsoleModelAdmin]:
        return [model_admin for model_admin in self._registry.values() if isinstance(model_admin, ConsoleModelAdmin)]


def _with_notes(tile: Tile, parts: Sequence[OverviewPart]) -> Tile:
    notes = [part.notes[tile.label] for part in parts if tile.label in part.notes]
    return replace(tile, note=format_html_join(" · ", "{}", ((note,) for note in (tile.note, *notes))))


def _with_csp(response: ResponseT) -> ResponseT:
    response["Content-Security-Policy"] = CONTENT_SECURITY_POLICY
    return response
