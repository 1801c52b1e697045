"""Responses to requests that reached no view: problem documents for machines, plain pages in the console."""

import logging
import sys
from typing import cast

from django.contrib import admin
from django.core.exceptions import DisallowedHost
from django.db import InterfaceError, OperationalError
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils.html import format_html

from keyvault.access.verification import find_exposed
from keyvault.admin.framework.middleware import is_console
from keyvault.admin.framework.plain_pages import error_page, late_form_page
from keyvault.admin.site import ConsoleSite
from keyvault.api.middleware import INTEGRATION_ROUTES, problem_response, raw_url, request_id_of
from keyvault.domain.errors import ErrorCode, Fault
from keyvault.services.work.disk_space import is_out_of_space
from keyvault.wire.problems import PROBLEM_TYPES

_log = logging.getLogger(__name__)


def root(request: HttpRequest) -> HttpResponse:
    """Lead a browser to the console. For other clients no resource is at the root."""
    if request.method in {"GET", "HEAD"} and "text/html" in request.headers.get("Accept", ""):
        return HttpResponseRedirect(reverse("admin:index"))
    return problem_response(ErrorCode.NOT_FOUND, "No resource exists at this URL.", request)


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    detail = "The request is malformed."
    if isinstance(exception, DisallowedHost):
        detail = "Unknown host name."  # do not disclose KEYVAULT_ALLOWED_HOSTS
    return problem_response(ErrorCode.REQUEST_INVALID, detail, request, faults=[Fault("", detail)])


def forbidden(request: HttpRequest, exception: Exception) -> HttpResponse:
    if is_console(request):
        return _console_page(request, ErrorCode.PERMISSION_MISSING, "You are not allowed to do this.")
    return problem_response(ErrorCode.PERMISSION_MISSING, "This is not permitted.", request)


def csrf_failure(request: HttpRequest, reason: str = "") -> HttpResponse:
    return late_form_page(request, 403)


def not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    if is_console(request):
        return _console_page(request, ErrorCode.NOT_FOUND, "No page has this address.")
    exposed = find_exposed(raw_url(request))
    if exposed is not None:
        return problem_response(exposed.code, exposed.detail, request)
    if request.path_info.startswith(INTEGRATION_ROUTES):
        return problem_response(ErrorCode.ENDPOINT_UNKNOWN, "The endpoint catalog has no such endpoint.", request)
    return problem_response(ErrorCode.NOT_FOUND, "No resource exists at this URL.", request)


def server_error(request: HttpRequest) -> HttpResponse:
    """Answer an exception that no view has answered; 503 while the database or a disk cannot be used."""
    error = sys.exception()
    is_full = error is not None and is_out_of_space(error)
    if is_full or isinstance(error, OperationalError | InterfaceError):
        why = "A disk of the service is full." if is_full else "The database is unavailable."
        return _unavailable(request, why)
    detail = "Something went wrong on our side."
    if is_console(request):
        detail += " Check whether your last change took effect before you repeat it."
        return _console_page(request, ErrorCode.INTERNAL_ERROR, detail)
    return problem_response(ErrorCode.INTERNAL_ERROR, detail, request)


def _console_page(request: HttpRequest, code: ErrorCode, detail: str) -> HttpResponse:
    """Return the page of an error: in the console's frame, or alone if the operator or the menu cannot be read."""
    try:
        if admin.site.has_permission(request):
            return cast(ConsoleSite, admin.site).problem(request, code, detail)
    except Exception:  # noqa: BLE001  the page of the first error must not fail
        _log.warning("the page of an error has no frame", exc_info=True)
    kind = PROBLEM_TYPES[code]
    return error_page(request, kind.title, detail, kind.status, request_id_of(request))


def _unavailable(request: HttpRequest, why: str) -> HttpResponse:
    """Answer 503: a page with the reason in the console, a problem document elsewhere."""
    if not is_console(request):
        detail = "The service cannot use its database right now. Try again."
        return problem_response(ErrorCode.DEPENDENCY_UNAVAILABLE, detail, request, retry_after_seconds=1)
    page = format_html(_UNAVAILABLE_PAGE, why, request_id_of(request))
    headers = {"Retry-After": "5", "Content-Security-Policy": "default-src 'none'"}
    return HttpResponse(page, status=503, headers=headers)


_UNAVAILABLE_PAGE = """<!doctype html>
<html lang="en">
<title>Service unavailable</title>
<h1>Service unavailable</h1>
<p>{} Check whether your last change took effect before you repeat it.</p>
<p>Keys are still verified. To revoke one now, run <code>manage.py revoke_key</code> on the host.</p>
<p>Request id: {}</p>
</html>
"""
