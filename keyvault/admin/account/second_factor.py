"""The page of the second factor: the second step of signing in, and a repeated one before sensitive pages."""

from datetime import UTC, datetime

from django.contrib.admin import AdminSite
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.urls import reverse

from keyvault.admin.framework.pages import page, status_of
from keyvault.admin.framework.sign_in import factor_attempt, find_next, set_device_cookie, set_locked, show_last_sign_in
from keyvault.admin.framework.step_up import check_factor, factor_context
from keyvault.domain.errors import KeyvaultError
from keyvault.models import Operator
from keyvault.services.sessions.lockout import SignInLockedError
from keyvault.services.sessions.sign_in import may_sign_in
from keyvault.services.sessions.step_up import note_second_factor


def second_factor_page(site: AdminSite, request: HttpRequest) -> HttpResponse:
    """Ask for a second factor; the right one continues to the page that was requested."""
    operator = request.user
    if not isinstance(operator, Operator) or not may_sign_in(operator):
        return HttpResponseRedirect(reverse("admin:login"))
    if request.method in {"GET", "HEAD"}:
        return _render(site, request, operator)
    if request.method != "POST":
        return HttpResponseNotAllowed(("GET", "HEAD", "POST"))
    now, previous = datetime.now(UTC), operator.last_login
    attempt = factor_attempt(request, operator)
    try:
        device = check_factor(attempt, request.POST, now)
    except KeyvaultError as error:
        response = _render(site, request, operator, error=error.detail, status=status_of(error))
        if isinstance(error, SignInLockedError):
            set_locked(response, error.retry_after_seconds)
        return response
    note_second_factor(request.session, now)
    if not attempt.is_step_up:
        show_last_sign_in(request, previous)
    response = HttpResponseRedirect(find_next(request))
    set_device_cookie(response, device)
    return response


def _render(
    site: AdminSite, request: HttpRequest, operator: Operator, *, error: str = "", status: int = 200
) -> HttpResponse:
    context = {
        "title": "Second factor",
        "error": error,
        "next": find_next(request),
        "username": operator.username,
        **factor_context(request, operator),
    }
    return page(site, request, "second_factor", context, status=status)
