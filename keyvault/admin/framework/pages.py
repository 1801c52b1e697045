"""Render the console's own pages: row, action, secret and problem.

This module makes no authorization decision; callers pass only the links and actions that are allowed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from django.contrib.admin import AdminSite
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from keyvault.admin.framework.actions import ActionForm
from keyvault.admin.framework.widgets import FactTable, Link
from keyvault.domain.errors import ErrorCode, KeyvaultError
from keyvault.domain.plaintext import Plaintext
from keyvault.wire.problems import PROBLEM_TYPES


def status_of(error: KeyvaultError) -> int:
    """Return the HTTP status of an error, the same as on the service plane."""
    return PROBLEM_TYPES[error.code].status


def page(
    site: AdminSite, request: HttpRequest, name: str, context: Mapping[str, Any], *, status: int = 200
) -> HttpResponse:
    """Render a page in the console's frame, with `Cache-Control: no-store`."""
    response = render(request, f"console/{name}.html", {**site.each_context(request), **context}, status=status)
    response["Cache-Control"] = "no-store"
    return response


def problem_page(site: AdminSite, request: HttpRequest, code: ErrorCode, detail: str) -> HttpResponse:
    kind = PROBLEM_TYPES[code]
    context = {"title": kind.title, "detail": detail, "request_id": getattr(request, "request_id", "")}
    return page(site, request, "problem", context, status=kind.status)


def form_page(
    site: AdminSite,
    request: HttpRequest,
    form: ActionForm | None,
    context: Mapping[str, Any],
    *,
    error: KeyvaultError | None = None,
    status: int = 200,
) -> HttpResponse:
    """Render an action form, or only the error if there is no form."""
    outcome = {"form": form, "error": None if error is None else error.detail}
    return page(site, request, "action", {**context, **outcome}, status=status if error is None else status_of(error))


def secret_page(
    site: AdminSite,
    request: HttpRequest,
    secret: Plaintext,
    *,
    title: str,
    note: str,
    once: bool,
    summary: FactTable | None,
    crumbs: Sequence[Link],
    back: Link,
    beside: FactTable | None = None,
    then: Sequence[Link] = (),
) -> HttpResponse:
    """Render the only page that shows a secret.

    The secret is in the response body only, so neither a reload nor a cache can show it again.
    """
    context = {
        "title": title,
        "secret": secret.reveal(),
        "note": note,
        "once": once,
        "summary": summary,
        "crumbs": crumbs,
        "back": back,
        "beside": beside,
        "then": then,
    }
    response = page(site, request, "secret", context)
    response["Referrer-Policy"] = "no-referrer"
    return response
