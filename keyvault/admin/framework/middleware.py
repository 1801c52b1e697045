"""Django's session, login, message and CSRF middleware, limited to the console.

On all other paths a cookie grants nothing, costs no query, and does not change the response.
"""

from typing import Any

from django.conf import settings
from django.contrib.auth.middleware import AuthenticationMiddleware
from django.contrib.messages.middleware import MessageMiddleware
from django.contrib.sessions.middleware import SessionMiddleware
from django.http import HttpRequest, HttpResponse, HttpResponseForbidden
from django.middleware.csrf import CsrfViewMiddleware
from django.utils.deprecation import MiddlewareMixin

from keyvault.domain.browsers import name_browser
from keyvault.services.sessions.store import SessionStore
from keyvault.wire.headers import address_from_environ

REFRESHED = "refreshed"
"""Parameter of a page that reloads itself. Nobody may sit before it, so it does not extend the session."""


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

    def process_request(self, request: HttpRequest) -> None:
        super().process_request(request)
        if isinstance(request.session, SessionStore):
            request.session.address = address_from_environ(request.META, settings.TRUSTED_PROXIES) or ""
            request.session.browser = name_browser(request.META.get("HTTP_USER_AGENT", ""))

    def process_response(self, request: HttpRequest, response: HttpResponse) -> HttpResponse:
        answer = super().process_response(request, response)
        if isinstance(request.session, SessionStore) and REFRESHED not in request.GET:
            request.session.extend()
        return answer


class ConsoleAuthenticationMiddleware(_ConsoleOnly, AuthenticationMiddleware):
    pass


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
