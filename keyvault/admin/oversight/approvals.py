"""Approvals in the console: everything that waits for the operator's approval, approved one by one or together.

Rows are approved together or not at all, under one digest over the ids and digests that the page showed. Each is
approved by its own action and has its own audit entry, which names the combined digest.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlencode

from django.contrib.admin import AdminSite
from django.db import IntegrityError
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils.html import format_html

from keyvault.access.permissions import Permission as P
from keyvault.admin.framework.actions import ActionForm, ActionResult
from keyvault.admin.framework.attention import (
    MAX_DECIDABLE,
    MAX_ROWS,
    Attention,
    AttentionQuery,
    KeptQueries,
    select_rows,
)
from keyvault.admin.framework.form_tokens import create_once, token_of
from keyvault.admin.framework.four_eyes import OWN_REQUEST_NOTE, changes_table, requester_name
from keyvault.admin.framework.menu import ConsolePage
from keyvault.admin.framework.model_admin import ConsoleModelAdmin
from keyvault.admin.framework.pages import page, status_of
from keyvault.admin.framework.step_up import answer_locked, refuse_step_up, step_up_context
from keyvault.admin.framework.widgets import Difference, FactTable, Link, Table, counted, link, mono
from keyvault.domain.errors import KeyvaultError, NotFoundError, RequestInvalidError, StateConflictError
from keyvault.services.approvals.batch_approval import approved_together, combine_digests

MAX_TOGETHER = 50
"""Maximum rows that one form approves."""

_COMBINED = "combined_digest"
"""Field of the form with the digest over all that it approves."""

_SESSION_OUTCOME = "approved_together"
"""Member of the session's data: the rows of the operator's last approval, each with its page, name and next step."""

_queries = KeptQueries()

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WaitingRow:
    """A row in the list. `choice`: value of its box."""

    choice: str
    url: str
    name: str
    detail: str
    at: Any
    change: Difference | None
    unusual: Sequence[str]


@dataclass(frozen=True, slots=True)
class WaitingGroup:
    """Rows of one kind. `name`: selects all of them by the query string. `count`: exact, or `200+`.

    `review_url`: page that approves all of `rows` together.
    """

    name: str
    title: str
    list_url: str
    review_url: str
    count: str
    rows: Sequence[WaitingRow]
    is_selected: bool


def approvals_view(site: AdminSite, request: HttpRequest, *, note: str = "", status: int = 200) -> HttpResponse:
    """List what waits for the operator's approval, by kind. `note`: what was wrong with the choice."""
    groups = list(_find_groups(site, request))
    context = {
        "title": "Approvals",
        "groups": groups,
        "note": note,
        "review_url": reverse("admin:approvals_review"),
    }
    return page(site, request, "approvals", context, status=status)


def _model_admins(site: AdminSite, request: HttpRequest) -> Iterator[ConsoleModelAdmin]:
    for each in site._registry.values():
        if isinstance(each, ConsoleModelAdmin) and each.has_view_permission(request):
            yield each


def _select(site: AdminSite, request: HttpRequest) -> AttentionQuery:
    items = [item for each in _model_admins(site, request) for item in each.approval_items(request)]
    return select_rows(request, items)


def _find_groups(site: AdminSite, request: HttpRequest) -> Iterator[WaitingGroup]:
    """Yield the groups that have rows. One query counts all, and one more reads each group's first rows."""
    selected = request.GET.getlist("select")
    found, _ = _queries.find("approvals", request, partial(_select, site, request)).find()
    decidable = [(item, ids, item.read_decidable(request, ids, MAX_DECIDABLE + 1)) for item, ids in found if ids]
    for model_admin in {item.model_admin for item, _, _ in decidable}:
        model_admin.fetch_changes(
            [row for item, _, rows in decidable if item.model_admin is model_admin for row in rows]
        )
    for item, ids, rows in decidable:
        if not rows:
            continue
        shown = [_waiting_row(item, row) for row in rows[:MAX_DECIDABLE]]
        name = item.title.lower().replace(" ", "-")
        review_url = f"{reverse('admin:approvals_review')}?{urlencode([('item', row.choice) for row in shown])}"
        yield WaitingGroup(
            name,
            item.title,
            item.model_admin.list_url(item.query),
            review_url,
            _format_count(ids, rows),
            shown,
            name in selected,
        )


def _format_count(ids: Sequence[str], rows: Sequence[Any]) -> str:
    """Return the number of rows that the operator may decide; of more than are read, the number of all."""
    if len(ids) <= MAX_DECIDABLE:
        return str(len(rows))
    return f"{MAX_ROWS}+" if len(ids) > MAX_ROWS else f"{len(ids)}, the first {MAX_DECIDABLE} are listed"


def _waiting_row(item: Attention, row: Any) -> WaitingRow:
    model_admin = item.model_admin
    line, changes = model_admin.line_of(row), list(model_admin.changes(row))
    return WaitingRow(
        f"{model_admin.opts.label_lower}:{row.pk}",
        line.url,
        line.label,
        line.detail,
        row.created_at,
        changes[0] if changes else None,
        [change.label for change in changes if change.is_unusual],
    )


# --- review and approve -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReviewedRow:
    """A row on the page that approves it.

    `requester`: empty if the row has no requester. `explain`, `warning`: what the approval does, and a reason against
    it. `summary`: all that the digest covers. `fault`: why the operator cannot approve it; empty: the operator can.
    """

    model_admin: ConsoleModelAdmin
    row: Any
    url: str
    name: str
    environment: str
    requester: str
    explain: str
    warning: str
    changes: Table
    summary: FactTable
    form: ActionForm
    fault: str

    @property
    def choice(self) -> str:
        return f"{self.model_admin.opts.label_lower}:{self.row.pk}"


def review_view(site: AdminSite, request: HttpRequest) -> HttpResponse:
    """Show what the approval of the chosen rows changes; approve them by POST."""
    chosen = list(dict.fromkeys((request.POST if request.method == "POST" else request.GET).getlist("item")))
    if not chosen:
        note = "Nothing is chosen. Choose at least one request."
        return approvals_view(site, request, note=note, status=400 if request.method == "POST" else 200)
    if len(chosen) > MAX_TOGETHER:
        fault = f"You chose {len(chosen)} requests. Approve at most {MAX_TOGETHER} together."
        return _review_page(site, request, [], error=RequestInvalidError(fault, []))
    reviewed = _review_rows(site, request, chosen)
    if len(reviewed) < len(chosen):
        return _review_page(site, request, [], error=NotFoundError("One of these requests does not exist."))
    if request.method != "POST":
        return _review_page(site, request, reviewed)
    if error := refuse_step_up(request):
        return _review_page(site, request, reviewed, error=error)
    # The digest that the form sent: the rows have changed when the form is sent again.
    combined_digest, done = request.POST.get(_COMBINED, ""), list[str]()

    def approve() -> ActionResult:
        if error := _find_change(request, reviewed):
            raise error
        done.extend(_approve_together(request, reviewed))
        return ActionResult(_title_outcome(len(done)))

    outcome_url = f"{reverse('admin:approvals_outcome')}?{urlencode({'digest': combined_digest})}"
    try:
        create_once(request, "approvals", approve, lambda _: outcome_url)
    except KeyvaultError as refused:
        return _review_page(site, request, _review_rows(site, request, chosen), error=refused)
    if done:
        rows = [[each.url, each.name, message] for each, message in zip(reviewed, done, strict=True)]
        request.session[_SESSION_OUTCOME] = {"combined_digest": combined_digest, "rows": rows}
    return HttpResponseRedirect(outcome_url)


def _review_rows(site: AdminSite, request: HttpRequest, chosen: Sequence[str]) -> list[ReviewedRow]:
    """Return the chosen rows, in the order of their ids: two operators who approve the same rows never deadlock."""
    reviewed = [_review(request, *each) for each in _find_rows(site, request, chosen)]
    return sorted(reviewed, key=lambda each: each.choice)


def _find_rows(site: AdminSite, request: HttpRequest, chosen: Sequence[str]) -> Iterator[tuple[ConsoleModelAdmin, Any]]:
    """Yield the chosen rows in the operator's scope, by one query for each kind."""
    by_label = {each.opts.label_lower: each for each in _model_admins(site, request)}
    for label, model_admin in by_label.items():
        ids = [pk for name, _, pk in (choice.partition(":") for choice in chosen) if name == label and "\0" not in pk]
        if not ids or not any(action.name == "approve" for action in model_admin.row_actions):
            continue
        try:
            rows = list(model_admin.rows_to_open(request).filter(pk__in=ids))
        except (ValueError, OverflowError):  # SQLite reads no number above its largest.
            raise NotFoundError("One of these requests does not exist.") from None
        model_admin.fetch_summaries(rows)
        yield from ((model_admin, row) for row in rows)


def _review(request: HttpRequest, model_admin: ConsoleModelAdmin, row: Any) -> ReviewedRow:
    about = model_admin.form_context(model_admin.row_action("approve"), row)
    return ReviewedRow(
        model_admin,
        row,
        model_admin.url_of(row),
        model_admin.name_of(row),
        model_admin.environment_of_row(row),
        "" if model_admin.requester_person_of(row) is None else requester_name(row),
        about["explain"],
        about["warning"],
        changes_table(model_admin.changes(row), title=""),
        model_admin.summary(row),
        model_admin.approval_form(row),
        _find_fault(request, model_admin, row),
    )


def _find_fault(request: HttpRequest, model_admin: ConsoleModelAdmin, row: Any) -> str:
    action = model_admin.row_action("approve")
    if not model_admin.may_run(request, action, row):
        is_own = action.is_available(row) and model_admin.requester_person_of(row) is not None
        return OWN_REQUEST_NOTE if is_own else "This does not await an approval, or you may not give it."
    return ""


def _combine(reviewed: Sequence[ReviewedRow]) -> str:
    """Return the digest over the ids of the rows that the page approves and the digest or version of each."""
    return combine_digests({each.choice: each.form.initial for each in reviewed if not each.fault})


def _find_change(request: HttpRequest, reviewed: Sequence[ReviewedRow]) -> StateConflictError | None:
    """Return which rows are not what the page showed, or can no longer be approved; None: the form covers all."""
    changed = [each.name for each in reviewed if each.fault or not _is_as_shown(request, each)]
    if changed:
        return StateConflictError(f"Nothing is approved. Changed since you opened the page: {', '.join(changed)}.")
    if request.POST.get(_COMBINED) != _combine(reviewed):
        return StateConflictError("Nothing is approved: the form is incomplete. Review the requests again.")
    return None


def _is_as_shown(request: HttpRequest, reviewed: ReviewedRow) -> bool:
    form = reviewed.model_admin.approval_form(reviewed.row, request.POST)
    return form.is_valid() and form.cleaned_data == form.initial


def _approve_together(request: HttpRequest, reviewed: Sequence[ReviewedRow]) -> list[str]:
    """Approve all rows, or none. Return what happens next with each. Raises the error of the first that is refused."""
    messages: list[str] = []
    try:
        with approved_together(_combine(reviewed)):
            for each in reviewed:
                result = each.model_admin.approve(request, each.row, dict(each.form.initial))
                messages.append(result.message)
    except KeyvaultError as error:
        _log.info("refused", extra={"code": error.code, "internal": error.internal, "path": request.path})
        raise _refusal(reviewed[min(len(messages), len(reviewed) - 1)], error.detail) from error
    except IntegrityError as error:
        # Two concurrent changes: a constraint or trigger refused what a rule had allowed.
        _log.warning("refused by the database", exc_info=True, extra={"path": request.path})
        raise _refusal(reviewed[min(len(messages), len(reviewed) - 1)], "Another operator changed it.") from error
    return messages


def _refusal(reviewed: ReviewedRow, detail: str) -> StateConflictError:
    return StateConflictError(f"Nothing is approved. {reviewed.name}: {detail}")


def _review_page(
    site: AdminSite, request: HttpRequest, reviewed: Sequence[ReviewedRow], *, error: KeyvaultError | None = None
) -> HttpResponse:
    to_approve = [each for each in reviewed if not each.fault]
    environments = {each.environment for each in to_approve}
    context = {
        "title": f"Approve {counted(len(to_approve), 'request')}" if to_approve else "Nothing to approve",
        "crumbs": [_back()],
        "error": None if error is None else error.detail,
        "to_approve": to_approve,
        "form_token": token_of(request),
        "combined_name": _COMBINED,
        "combined_digest": _combine(reviewed),
        "refused": _refused_table(reviewed) if len(to_approve) < len(reviewed) else None,
        "button": f"Approve {counted(len(to_approve), 'request')}",
        "back": _back(),
        "step_up": step_up_context(request) if to_approve else None,
        "page_environment": "production" if "production" in environments else "",
    }
    response = page(site, request, "approvals_review", context, status=200 if error is None else status_of(error))
    return answer_locked(response, error)


def _refused_table(reviewed: Sequence[ReviewedRow]) -> Table:
    rows = [[link(each.url, each.name), each.model_admin.singular, each.fault] for each in reviewed if each.fault]
    return Table("Not approved here", ["request", "what", "why"], rows)


def outcome_view(site: AdminSite, request: HttpRequest) -> HttpResponse:
    """Name every row of the approval with what happens next, if it is the last one of this session."""
    outcome = request.session.get(_SESSION_OUTCOME, {})
    is_this = outcome.get("combined_digest") == request.GET.get("digest")
    rows = [[link(url, name), message] for url, name, message in outcome["rows"]] if is_this and outcome else []
    digest = format_html("combined digest {}", mono(outcome["combined_digest"])) if rows else ""
    empty = "This is not the last approval of this session. The page of each request says whether it is approved."
    context = {
        "title": _title_outcome(len(rows)) if rows else "Approved together",
        "crumbs": [_back()],
        "section": Table("Approved", ["request", "what happens next"], rows, empty, digest),
        "back": _back(),
    }
    return page(site, request, "approvals_outcome", context)


def _title_outcome(count: int) -> str:
    return f"{counted(count, 'request')} approved"


def _back() -> Link:
    return Link("Approvals", reverse("admin:approvals"))


_PERMISSIONS = (P.ISSUANCE_APPROVE, P.ROTATIONS_APPROVE, P.OPERATORS_APPROVE, P.RECIPIENTS_APPROVE)

PAGES = (
    ConsolePage("approvals", "approvals/", "Awaiting approval", "Approvals", _PERMISSIONS, approvals_view),
    ConsolePage(
        "approvals_review", "approvals/review/", "Review", "", _PERMISSIONS, review_view, ("GET", "HEAD", "POST")
    ),
    ConsolePage("approvals_outcome", "approvals/approved/", "Approved", "", _PERMISSIONS, outcome_view),
)
