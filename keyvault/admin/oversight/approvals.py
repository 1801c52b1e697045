"""Approvals in the console: everything that waits for the operator's approval, approved one by one or together.

Each row is approved by its own action, bound to the digest or version that the page showed, in its own transaction and
with its own audit entry. Rows that cannot be approved are named, and stop no other.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from django.contrib.admin import AdminSite
from django.db import IntegrityError
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.safestring import SafeString

from keyvault.access.permissions import Permission as P
from keyvault.admin.framework.actions import ActionForm
from keyvault.admin.framework.attention import MAX_DECIDABLE, MAX_ROWS, Attention
from keyvault.admin.framework.four_eyes import OWN_REQUEST_NOTE, changes_table
from keyvault.admin.framework.menu import ConsolePage
from keyvault.admin.framework.model_admin import ConsoleModelAdmin
from keyvault.admin.framework.pages import page, status_of
from keyvault.admin.framework.row_search import find_ids
from keyvault.admin.framework.step_up import answer_locked, refuse_step_up, step_up_context
from keyvault.admin.framework.widgets import Difference, Link, Table, badge, counted, link
from keyvault.domain.errors import KeyvaultError, NotFoundError, RequestInvalidError, StateConflictError
from keyvault.wire.problems import PROBLEM_TYPES

MAX_TOGETHER = 50
"""Maximum rows that one form approves."""

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
    """Rows of one kind. `name`: selects all of them by the query string. `count`: exact, or `200+`."""

    name: str
    title: str
    list_url: str
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


def _find_groups(site: AdminSite, request: HttpRequest) -> Iterator[WaitingGroup]:
    """Yield the groups that have rows. One query counts all, and one more reads each group's first rows."""
    items = [item for each in _model_admins(site, request) for item in each.approval_items(request)]
    selected = request.GET.getlist("select")
    found = find_ids([item.limited_rows(request) for item in items], MAX_ROWS + 1)
    for item, ids in zip(items, found, strict=True):
        rows = item.read_decidable(request, item.limited_rows(request).filter(pk__in=ids)) if ids else []
        if not rows:
            continue
        shown = [_waiting_row(item, row) for row in rows[:MAX_DECIDABLE]]
        name = item.title.lower().replace(" ", "-")
        yield WaitingGroup(
            name, item.title, item.model_admin.list_url(item.query), _format_count(ids, rows), shown, name in selected
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
    """A row on the page that approves it. `fault`: why the operator cannot approve it; empty: the operator can."""

    model_admin: ConsoleModelAdmin
    row: Any
    name: str
    environment: str
    changes: Table
    form: ActionForm
    fault: str

    @property
    def url(self) -> str:
        return self.model_admin.url_of(self.row)

    @property
    def choice(self) -> str:
        return f"{self.model_admin.opts.label_lower}:{self.row.pk}"

    @property
    def reject_url(self) -> str:
        """Address of the page that rejects the row; empty: it cannot be rejected."""
        names = {action.name for action in self.model_admin.row_actions}
        return self.model_admin.url_of(self.row, "reject") if "reject" in names else ""


def review_view(site: AdminSite, request: HttpRequest) -> HttpResponse:
    """Show what the approval of the chosen rows changes; approve them by POST."""
    chosen = list(dict.fromkeys((request.POST if request.method == "POST" else request.GET).getlist("item")))
    if not chosen:
        note = "Nothing is chosen. Choose at least one request."
        return approvals_view(site, request, note=note, status=400 if request.method == "POST" else 200)
    if len(chosen) > MAX_TOGETHER:
        fault = f"You chose {len(chosen)} requests. Approve at most {MAX_TOGETHER} together."
        return _review_page(site, request, [], error=RequestInvalidError(fault, []))
    reviewed = [_review(request, *each) for each in _find_rows(site, request, chosen)]
    reviewed.sort(key=lambda each: chosen.index(each.choice) if each.choice in chosen else 0)
    if len(reviewed) < len(chosen):
        return _review_page(site, request, [], error=NotFoundError("One of these requests does not exist."))
    if request.method != "POST":
        return _review_page(site, request, reviewed)
    if refused := refuse_step_up(request):
        return _review_page(site, request, reviewed, error=refused)
    return _outcome_page(site, request, [(each, *_approve(request, each)) for each in reviewed])


def _find_rows(site: AdminSite, request: HttpRequest, chosen: Sequence[str]) -> Iterator[tuple[ConsoleModelAdmin, Any]]:
    """Yield the chosen rows in the operator's scope, by one query for each kind."""
    by_label = {each.opts.label_lower: each for each in _model_admins(site, request)}
    for label, model_admin in by_label.items():
        ids = [pk for name, _, pk in (choice.partition(":") for choice in chosen) if name == label and "\0" not in pk]
        if not ids or not any(action.name == "approve" for action in model_admin.row_actions):
            continue
        try:
            yield from ((model_admin, row) for row in model_admin.get_queryset(request).filter(pk__in=ids))
        except ValueError:
            raise NotFoundError("One of these requests does not exist.") from None


def _review(request: HttpRequest, model_admin: ConsoleModelAdmin, row: Any) -> ReviewedRow:
    account = model_admin.account_of(row)
    return ReviewedRow(
        model_admin,
        row,
        model_admin.name_of(row),
        str(getattr(row, "environment", "")) if account is None else str(account.environment),
        changes_table(model_admin.changes(row), title=""),
        model_admin.approval_form(row),
        _find_fault(request, model_admin, row),
    )


def _find_fault(request: HttpRequest, model_admin: ConsoleModelAdmin, row: Any) -> str:
    action = model_admin.row_action("approve")
    if not model_admin.may_run(request, action, row):
        is_own = action.is_available(row) and model_admin.requester_person_of(row) is not None
        return OWN_REQUEST_NOTE if is_own else "This does not await an approval, or you may not give it."
    return ""


def _approve(request: HttpRequest, reviewed: ReviewedRow) -> tuple[bool, str]:
    """Approve one row as it was shown. Return whether it is approved, and what happened or why not."""
    model_admin, row = reviewed.model_admin, reviewed.row
    form = model_admin.approval_form(row, request.POST)
    if not form.is_valid():
        return False, "The form is incomplete. Open the request and approve it there."
    try:
        return True, model_admin.approve(request, row, form.cleaned_data).message
    except KeyvaultError as error:
        _log.info("refused", extra={"code": error.code, "internal": error.internal, "path": request.path})
        return False, error.detail
    except IntegrityError:
        # Two concurrent changes: a constraint or trigger refused what a rule had allowed.
        _log.warning("refused by the database", exc_info=True, extra={"path": request.path})
        return False, "This was changed by another operator. Review the current version and try again."


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


def _outcome_page(
    site: AdminSite, request: HttpRequest, outcomes: Sequence[tuple[ReviewedRow, bool, str]]
) -> HttpResponse:
    """Name every row with its outcome."""
    approved = sum(is_approved for _, is_approved, _ in outcomes)
    rows = [[link(each.url, each.name), _outcome(is_approved), message] for each, is_approved, message in outcomes]
    missing = len(outcomes) - approved
    context = {
        "title": f"{approved} of {counted(len(outcomes), 'request')} approved",
        "crumbs": [_back()],
        "missing": f"{counted(missing, 'request')} not approved: see the table." if missing else "",
        "section": Table("Outcome", ["request", "outcome", "what happens next"], rows),
        "back": _back(),
    }
    status = 200 if approved else PROBLEM_TYPES[StateConflictError.code].status
    return page(site, request, "approvals_outcome", context, status=status)


def _outcome(is_approved: bool) -> SafeString:
    return badge("approved", "good") if is_approved else badge("not_approved", "bad")


def _back() -> Link:
    return Link("Approvals", reverse("admin:approvals"))


_PERMISSIONS = (P.ISSUANCE_APPROVE, P.ROTATIONS_APPROVE, P.OPERATORS_APPROVE, P.RECIPIENTS_APPROVE)

PAGES = (
    ConsolePage("approvals", "approvals/", "Awaiting approval", "Approvals", _PERMISSIONS, approvals_view),
    ConsolePage(
        "approvals_review", "approvals/review/", "Review", "", _PERMISSIONS, review_view, ("GET", "HEAD", "POST")
    ),
)
