"""Render the console's own pages: row, action, secret and problem.

This module makes no authorization decision; callers pass only the links and actions that are allowed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from django.contrib.admin import AdminSite
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.http import parse_etags, quote_etag

from keyvault.admin.framework.actions import ActionForm
from keyvault.admin.framework.middleware import REFRESHED
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


_FRAGMENT_HEADER = "X-Keyvault-Fragment"
"""Request header of the script that updates a live page: the response is the live part only."""

_ENDED_HEADER = "X-Keyvault-Ended"
"""Response header of an update after which the page is no longer live."""

_MIN_RELOAD_SECONDS = 5
"""Minimum interval between two reloads of a live page in a browser without scripts, in seconds."""


@dataclass(frozen=True, slots=True)
class Live:
    """What the template of a live page declares: its address for updates, and the interval in seconds."""

    url: str
    seconds: int

    @property
    def reload_seconds(self) -> int:
        """Interval in a browser without scripts."""
        return max(self.seconds, _MIN_RELOAD_SECONDS)


def live_page(
    site: AdminSite, request: HttpRequest, name: str, context: Mapping[str, Any], *, seconds: int | None
) -> HttpResponse:
    """Render a page whose template extends `frame` and has its contents in the block `live`.

    With scripts the block is replaced in place; without them the page reloads itself. Updates do not extend the
    session. A request for an update with the current ETag is answered by status 304.

    Args:
        seconds: interval between two updates; None: the page is not live now.
    """
    if request.headers.get(_FRAGMENT_HEADER) is None:
        frame = "console/still.html" if seconds is None else "console/live.html"
        live = None if seconds is None else Live(_refresh_url(request), seconds)
        return page(site, request, name, {**context, "frame": frame, "live": live})
    response = render(request, f"console/{name}.html", {**context, "frame": "console/fragment.html"})
    etag = quote_etag(sha256(response.content).hexdigest()[:32])
    if etag in parse_etags(request.headers.get("If-None-Match", "")):
        response = HttpResponse(status=304)
    if seconds is None:
        response[_ENDED_HEADER] = "1"
    response["ETag"] = etag
    response["Cache-Control"] = "no-store"
    return response


def _refresh_url(request: HttpRequest) -> str:
    query = request.GET.copy()
    query[REFRESHED] = ""
    return f"?{query.urlencode()}"


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
    environment: str,
    beside: FactTable | None = None,
    then: Sequence[Link] = (),
) -> HttpResponse:
    """Render the only page that shows a secret. `environment`: where it is valid; empty: in more than one.

    The secret is in the response body only, so neither a reload nor a cache can show it again.
    """
    context = {
        "page_environment": environment,
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
