"""Pages of the console without its frame, which need no query: errors, and forms whose session has expired."""

from collections.abc import Mapping

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse

from keyvault.access.verification import find_exposed

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "font-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types keyvault-fragments",
    )
)

_NOT_KEPT = ("csrfmiddlewaretoken", "password", "second_factor", "secret")
"""Parts of the names of fields whose values no page shows again. A test compares them with all forms."""


_NOT_SHOWN = frozenset({"version", "form_token"})
"""Hidden fields, which the operator does not type."""


def error_page(request: HttpRequest, title: str, detail: str, status: int, request_id: str) -> HttpResponse:
    """Return an error page."""
    context = {"title": title, "detail": detail, "request_id": request_id}
    return _plain(request, "error", context, status)


def is_of_this_site(request: HttpRequest) -> bool:
    """Whether the browser names this site as the origin of the form."""
    return request.headers.get("Origin") == f"{request.scheme}://{request.get_host()}"


def late_form_page(request: HttpRequest, status: int) -> HttpResponse:
    """Return the page for a form whose session or CSRF token has expired: it keeps what was typed, except secrets.

    A form of another site keeps nothing: an operator could send it by mistake.
    """
    is_ours = is_of_this_site(request)
    fields = _kept_fields(request) if is_ours else []
    names = {name for name, _ in fields}
    context = {
        "title": "Your session has expired" if not request.user.is_authenticated else "The form has expired",
        "is_signed_in": request.user.is_authenticated,
        "fields": fields,
        "shown": [(name.replace("_", " "), value) for name, value in fields if value and name not in _NOT_SHOWN],
        "is_incomplete": any(name not in names and name != "csrfmiddlewaretoken" for name in request.POST),
        "action": request.get_full_path() if is_ours and find_exposed(request.get_full_path()) is None else "",
        "sign_in_url": reverse("admin:login"),
    }
    return _plain(request, "late_form", context, status)


def _kept_fields(request: HttpRequest) -> list[tuple[str, str]]:
    return [
        (name, str(value))
        for name, values in request.POST.lists()
        if not any(part in name for part in _NOT_KEPT)
        for value in values
        if find_exposed(str(value)) is None
    ]


def _plain(request: HttpRequest, name: str, context: Mapping[str, object], status: int) -> HttpResponse:
    response = render(request, f"console/{name}.html", context, status=status)
    response["Cache-Control"] = "no-store"
    response["Content-Security-Policy"] = CONTENT_SECURITY_POLICY
    return response
