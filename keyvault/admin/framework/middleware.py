"""Sessions, forms and log-ins are the console's alone: on the other planes they are not even looked at (D4).

There a cookie opens nothing, costs no query, and no answer varies by it.
"""

from typing import Any

from django.contrib.auth.middleware import AuthenticationMiddleware
from django.contrib.messages.middleware import MessageMiddleware
from django.contrib.sessions.middleware import SessionMiddleware
from django.http import HttpRequest, HttpResponseForbidden
from django.middleware.csrf import CsrfViewMiddleware
from django.utils.deprecation import MiddlewareMixin


def is_console_path(path: str) -> bool:
    """Whether Django routes the path, its escapes undone, to the console."""
    return path.startswith("/admin/")


def is_console(request: HttpRequest) -> bool:
    return is_console_path(request.path_info)


class _ConsoleOnly(MiddlewareMixin):
    """Goes before one of Django's own middlewares, and skips it elsewhere."""

    def __call__(self, request: HttpRequest) -> Any:
        if is_console(request):
            return super().__call__(request)
        return self.get_response(request)


class ConsoleSessionMiddleware(_ConsoleOnly, SessionMiddleware):
    pass


class ConsoleAuthenticationMiddleware(_ConsoleOnly, AuthenticationMiddleware):
    pass


class ConsoleMessageMiddleware(_ConsoleOnly, MessageMiddleware):
    pass


class ConsoleCsrfMiddleware(_ConsoleOnly, CsrfViewMiddleware):
    def process_view(
        self, request: HttpRequest, callback: Any, callback_args: Any, callback_kwargs: Any
    ) -> HttpResponseForbidden | None:
        """Elsewhere no form proves anything, so that none could be forged."""
        if not is_console(request):
            return None
        return super().process_view(request, callback, callback_args, callback_kwargs)
