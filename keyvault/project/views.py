"""Responses to requests that reached no view: problem documents for machines, plain pages in the console."""

from django.core.exceptions import DisallowedHost
from django.http import HttpRequest, HttpResponse
from django.views import defaults

from keyvault.access.verification import find_exposed
from keyvault.admin.framework.middleware import is_console
from keyvault.api.middleware import INTEGRATION_ROUTES, problem_response, raw_url
from keyvault.domain.errors import ErrorCode, Fault


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    detail = "The request is malformed."
    if isinstance(exception, DisallowedHost):
        detail = "Unknown host name."  # do not disclose KEYVAULT_ALLOWED_HOSTS
    return problem_response(ErrorCode.REQUEST_INVALID, detail, request, faults=[Fault("", detail)])


def forbidden(request: HttpRequest, exception: Exception) -> HttpResponse:
    if is_console(request):
        return defaults.permission_denied(request, exception)
    return problem_response(ErrorCode.PERMISSION_MISSING, "This is not permitted.", request)


def csrf_failure(request: HttpRequest, reason: str = "") -> HttpResponse:
    return HttpResponse("The form has expired. Go back, reload the page, and submit it again.", status=403)


def not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    if is_console(request):
        return defaults.page_not_found(request, exception)
    exposed = find_exposed(raw_url(request))
    if exposed is not None:
        return problem_response(exposed.code, exposed.detail, request)
    if request.path_info.startswith(INTEGRATION_ROUTES):
        return problem_response(ErrorCode.ENDPOINT_UNKNOWN, "The endpoint catalog has no such endpoint.", request)
    return problem_response(ErrorCode.NOT_FOUND, "No resource exists at this URL.", request)


def server_error(request: HttpRequest) -> HttpResponse:
    return problem_response(ErrorCode.INTERNAL_ERROR, "Something went wrong on our side.", request)
