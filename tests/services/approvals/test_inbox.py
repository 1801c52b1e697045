"""The inbox: an alarm stays unseen until a person marks it, and the row records that person."""

import json
from datetime import datetime, timedelta

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER
from keyvault.domain.errors import PermissionMissingError, StateConflictError
from keyvault.domain.notifications import NoticeKind
from keyvault.models import Account, AuditEntry, Notice, Operator
from keyvault.services.approvals import inbox
from keyvault.services.approvals.inbox import INBOX_ORDER, list_unseen, mark_all_seen, mark_seen
from keyvault.services.recording.notifications import announce
from keyvault.services.recording.transaction import recorded
from tests.factories import grant, now
from tests.services.conftest import Scene, make_scene
from tests.services.racing import race

pytestmark = pytest.mark.django_db

ALARM, INFO = NoticeKind.ROTATION_STALLED, NoticeKind.KEY_ISSUED


def send_notice(
    scene: Scene, kind: NoticeKind = ALARM, account: Account | None = None, at: datetime | None = None
) -> Notice:
    place = account or scene.sandbox
    allowed = grant(scene.admin, P.KEYS_REVOKE, place, at=at)
    with recorded(allowed, P.KEYS_REVOKE, "key.revoked", account=place):
        return announce(allowed, kind, place, "k" * 16)


def last_entry() -> tuple[str, str, dict[str, object]]:
    entry = AuditEntry.objects.latest("id")
    return entry.event, entry.chain_id, json.loads(bytes(entry.body))["details"]


@pytest.mark.database
def test_inbox_shows_unseen_alarms_first_then_the_newest(scene: Scene) -> None:
    at = now()
    old, info, seen, new = (
        send_notice(scene, kind, at=at + timedelta(seconds=number))
        for number, kind in enumerate((ALARM, INFO, ALARM, ALARM))
    )
    mark_seen(grant(scene.approver, P.NOTICES_MARK, scene.sandbox), seen)
    assert [notice.pk for notice in Notice.objects.order_by(*INBOX_ORDER)] == [new.pk, old.pk, seen.pk, info.pk]
    assert [notice.pk for notice in list_unseen()] == [old.pk, new.pk]
    assert list_unseen().count() == 2


def test_alarm_marked_records_the_operator(scene: Scene) -> None:
    notice = send_notice(scene)
    mark_seen(grant(scene.approver, P.NOTICES_MARK, scene.sandbox), notice)
    notice.refresh_from_db()
    assert notice.seen_at is not None
    assert notice.seen_by == Operator.objects.get(username="approver")
    event, chain, details = last_entry()
    assert (event, chain, details["notice_id"]) == ("notice.seen", "account:acme/sandbox", notice.pk)
    assert list_unseen().count() == 0


def test_alarm_marked_twice_and_other_notices_marked_are_refused(scene: Scene) -> None:
    notice = send_notice(scene)
    allowed = grant(scene.approver, P.NOTICES_MARK, scene.sandbox)
    mark_seen(allowed, notice)
    for again in (notice, send_notice(scene, INFO)):
        with pytest.raises(StateConflictError):
            mark_seen(allowed, again)


def test_alarm_marked_without_the_permission_for_its_account_is_refused(scene: Scene) -> None:
    notice = send_notice(scene)
    for wrong in (
        grant(scene.approver, P.NOTICES_MARK, scene.production),
        grant(scene.admin, P.KEYS_READ, scene.sandbox),
    ):
        with pytest.raises(PermissionMissingError):
            mark_seen(wrong, notice)
    with pytest.raises(PermissionMissingError):
        mark_seen(grant(WORKER, P.ISSUANCE_EXECUTE, scene.sandbox), notice)
    assert list_unseen().count() == 1


def test_alarms_all_marked_leaves_later_ones_unseen(scene: Scene) -> None:
    """An alarm that arrived after the page was opened stays unseen."""
    at = now()
    send_notice(scene, at=at)
    send_notice(scene, account=scene.production, at=at)
    late = send_notice(scene, at=at + timedelta(seconds=1))
    assert mark_all_seen(grant(scene.approver, P.NOTICES_MARK), at) == 2
    assert [notice.pk for notice in list_unseen()] == [late.pk]
    event, chain, details = last_entry()
    assert (event, chain, details["count"]) == ("notice.all_seen", "platform", 2)


def test_alarms_all_marked_takes_a_limited_number_per_transaction(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "MAX_MARKED", 2)
    at = now()
    for _ in range(3):
        send_notice(scene, at=at)
    allowed = grant(scene.approver, P.NOTICES_MARK)
    assert [mark_all_seen(allowed, at), mark_all_seen(allowed, at)] == [2, 1]
    with pytest.raises(StateConflictError, match="no unseen alarms"):
        mark_all_seen(allowed, at)


@pytest.mark.database
@pytest.mark.django_db(transaction=True)
def test_alarms_marked_by_two_operators_concurrently_are_marked_once() -> None:
    """The second operator gets a conflict and does not overwrite the first one's name."""
    scene = make_scene()
    notice = send_notice(scene)
    allowed = [grant(person, P.NOTICES_MARK) for person in (scene.approver, scene.tam)]
    results = race(*(lambda one=one: mark_all_seen(one, now()) for one in allowed))
    assert sorted(map(str, results)) == ["1", "There are no unseen alarms."]
    notice.refresh_from_db()
    assert notice.version == 2
