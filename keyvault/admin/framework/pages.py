"""The console's pages but for the stock lists: one row, one act, something to ask for, a secret, a problem.

Nothing here decides. `allowed` links and acts come from whoever asked the decision function.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from django.contrib.admin import AdminSite
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from keyvault.admin.framework.actions import ActForm
from keyvault.admin.framework.widgets import FactTable, Link
from keyvault.domain.errors import ErrorCode, KeyvaultError
from keyvault.domain.plaintext import Plaintext
from keyvault.wire.problems import PROBLEM_TYPES


def status_of(error: KeyvaultError) -> int:
    """What HTTP says about it, in the console as on the service plane."""
    return PROBLEM_TYPES[error.code].status


def page(
    site: AdminSite, request: HttpRequest, name: str, context: Mapping[str, Any], *, status: int = 200
) -> HttpResponse:
    """A page in the console's frame, never to be kept by a cache."""
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
    form: ActForm | None,
    context: Mapping[str, Any],
    *,
    error: KeyvaultError | None = None,
    status: int = 200,
) -> HttpResponse:
    """A form to be sent by POST; without one, why there is none."""
    said = {"form": form, "error": None if error is None else error.detail}
    return page(site, request, "act", {**context, **said}, status=status if error is None else status_of(error))


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
    """The one page that shows a secret: in the answer's body only, so that no reload and no cache has it again."""
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
