"""The operators' inbox: an alarm stays unseen until an operator marks it."""

from collections.abc import Iterable
from datetime import datetime

from django.db.models import OuterRef, QuerySet, Subquery
from django.db.models.fields.json import KT
from django.db.models.functions import Coalesce

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.access.principals import OperatorPrincipal
from keyvault.domain.errors import PermissionMissingError, StateConflictError
from keyvault.domain.ids import is_key_id
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.timestamps import format_timestamp
from keyvault.models import Credential, Notice
from keyvault.models.keys import KEY_TAIL
from keyvault.models.notifications import IS_UNSEEN, UNSEEN_NOTICE
from keyvault.services.operators.operators import operator_row
from keyvault.services.recording.transaction import recorded

MAX_MARKED = 500
"""Maximum alarms that one action marks as seen."""

INBOX_ORDER = (IS_UNSEEN.desc(), "-created_at", "-pk")
"""Order of notices: unseen alarms first, then the newest."""

_NAMED_BY = {
    NoticeKind.WEBHOOK_FAILED: "host",
    NoticeKind.SCHEDULE_STALLED: "scope",
    NoticeKind.STANDING_APPROVAL_EXPIRING: "scope",
    NoticeKind.STANDING_APPROVAL_EXPIRED: "scope",
    NoticeKind.CAMPAIGN_HALTED: "why",
    NoticeKind.BACKEND_UNATTRIBUTED: "why",
}
"""The field of the payload that tells a person what the notice is about, where the subject is an id."""


def with_label(notices: QuerySet[Notice]) -> QuerySet[Notice]:
    """Add the label of the credential that the notice concerns, if there is one, for `find_name`."""
    concerned = Coalesce(KT("payload__credential_id"), KT("payload__scope"))
    labels = Credential.objects.filter(pk=OuterRef("concerned")).values("label")
    return notices.alias(concerned=concerned).annotate(credential_label=Subquery(labels))


def find_name(notice: Notice) -> str:
    """Return the name of a notice's subject, such as a label; "" if it has an id only. Needs a row of `with_label`."""
    known = getattr(notice, "credential_label", None) or notice.payload.get(_NAMED_BY.get(notice.kind, ""))
    if not known:
        return ""
    return f"{known}, key …{notice.subject[-KEY_TAIL:]}" if is_key_id(notice.subject) else str(known)


def list_unseen() -> QuerySet[Notice]:
    """Return the unseen alarms, oldest first."""
    rows: QuerySet[Notice] = Notice.objects.filter(UNSEEN_NOTICE)
    return rows.order_by("created_at", "pk")


def mark_seen(grant: Grant, notice: Notice) -> None:
    """Mark one alarm as seen. Raises StateConflictError when it is not an unseen alarm."""
    if not notice.is_alarm or notice.seen_at is not None:
        raise StateConflictError("This notice is not an unseen alarm.")
    details = {"notice_id": notice.notice_id, "kind": notice.kind, "subject": notice.subject}
    with recorded(grant, Permission.NOTICES_MARK, "notice.seen", account=notice.account, **details):
        _mark(grant, [notice])


def mark_all_seen(grant: Grant, until: datetime) -> int:
    """Mark the oldest alarms up to a time, at most MAX_MARKED of them; return how many.

    `until`: when the operator loaded the list. Raises StateConflictError when there is none.
    """
    with recorded(grant, Permission.NOTICES_MARK, "notice.all_seen", until=format_timestamp(until)) as record:
        notices = list(list_unseen().filter(created_at__lte=until).select_for_update()[:MAX_MARKED])
        if not notices:
            raise StateConflictError("There are no unseen alarms.")
        record.details["count"] = len(notices)
        _mark(grant, notices)
    return len(notices)


def _mark(grant: Grant, notices: Iterable[Notice]) -> None:
    if not isinstance(grant.principal, OperatorPrincipal):
        raise PermissionMissingError("Only an operator can mark an alarm as seen.")
    seen_by = operator_row(grant.principal)
    for notice in notices:
        notice.compare_and_swap(seen_at=grant.at, seen_by=seen_by)
