"""Django's session, login, message and CSRF middleware, limited to the console.

On all other paths a cookie grants nothing, costs no query, and does not change the response.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlencode

from django.conf import settings
from django.contrib import admin
from django.contrib.auth import REDIRECT_FIELD_NAME
from django.contrib.auth.middleware import AuthenticationMiddleware, get_user
from django.contrib.messages.middleware import MessageMiddleware
from django.contrib.sessions.middleware import SessionMiddleware
from django.http import HttpRequest, HttpResponse, HttpResponseForbidden, HttpResponseRedirect
from django.middleware.csrf import CsrfViewMiddleware
from django.urls import reverse
from django.utils.deprecation import MiddlewareMixin
from django.utils.functional import SimpleLazyObject

from keyvault.admin.framework.plain_pages import is_of_this_site, late_form_page
from keyvault.domain.browsers import name_browser
from keyvault.services.sessions.store import SessionStore, read_with_session
from keyvault.wire.headers import address_from_environ

ViewT = TypeVar("ViewT", bound=Callable[..., Any])

REFRESHED = "refreshed"
"""Parameter of a page that reloads itself. It does not extend the session, because the operator may be absent."""

_OPEN = "is_open_before_sign_in"


def open_before_sign_in(view: ViewT) -> ViewT:
    """Mark a view of the console that answers without a complete sign-in. Every other one is closed."""
    setattr(view, _OPEN, True)
    return view


def is_console_path(path: str) -> bool:
    """Whether Django routes the percent-decoded path to the console."""
    return path.startswith("/admin/")


def is_console(request: HttpRequest) -> bool:
    return is_console_path(request.path_info)


class _ConsoleOnly(MiddlewareMixin):
    """Base that skips a Django middleware outside the console."""

    def __call__(self, request: HttpRequest) -> Any:
        if is_console(request):
            return super().__call__(request)
        return self.get_response(request)


class ConsoleSessionMiddleware(_ConsoleOnly, SessionMiddleware):
    """Django's middleware, which also records the use of a session, and from where."""

    def process_response(self, request: HttpRequest, response: HttpResponse) -> HttpResponse:
        session = request.session
        if not isinstance(session, SessionStore):
            return super().process_response(request, response)
        # Not at the request: allauth replaces the object, without its attributes, during a single sign-on.
        session.address = address_from_environ(request.META, settings.TRUSTED_PROXIES) or ""
        session.browser = name_browser(request.META.get("HTTP_USER_AGENT", ""))
        answer = super().process_response(request, response)
        if REFRESHED not in request.GET:
            session.extend()
        return answer


class ConsoleAuthenticationMiddleware(_ConsoleOnly, AuthenticationMiddleware):
    """Django's middleware, which verifies the session. The operator was read with it."""

    def process_request(self, request: HttpRequest) -> None:
        super().process_request(request)
        request.user = SimpleLazyObject(partial(_load_operator, request))  # type: ignore[assignment]  # as Django does


def _load_operator(request: HttpRequest) -> Any:
    session = request.session
    token = read_with_session.set(session.operator if isinstance(session, SessionStore) else None)
    try:
        return get_user(request)
    finally:
        read_with_session.reset(token)


class ConsoleMessageMiddleware(_ConsoleOnly, MessageMiddleware):
    pass


class ConsoleCsrfMiddleware(_ConsoleOnly, CsrfViewMiddleware):
    def process_view(
        self, request: HttpRequest, callback: Any, callback_args: Any, callback_kwargs: Any
    ) -> HttpResponseForbidden | None:
        """Skip the check outside the console, where no session can be abused by a forged form."""
        if not is_console(request):
            return None
        return super().process_view(request, callback, callback_args, callback_kwargs)


class ConsoleAccessMiddleware(MiddlewareMixin):
    """Deny every view of the console without a complete sign-in: password and second factor, of an active operator.

    This is the only place of the rule. A view is open only if it is marked by `open_before_sign_in`.
    """

    def process_view(
        self, request: HttpRequest, callback: Any, callback_args: Any, callback_kwargs: Any
    ) -> HttpResponse | None:
        if not is_console(request) or getattr(callback, _OPEN, False) or admin.site.has_permission(request):
            return None
        if request.method == "POST" and not request.user.is_authenticated and is_of_this_site(request):
            return late_form_page(request, 403)
        page = "admin:second_factor" if request.user.is_authenticated else "admin:login"
        return HttpResponseRedirect(f"{reverse(page)}?{urlencode({REDIRECT_FIELD_NAME: request.get_full_path()})}")
