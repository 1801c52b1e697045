"""What the page of a rotation shows first."""

import html
import re
from datetime import datetime, timedelta
from typing import Any

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.domain.keys import KeyKind
from keyvault.domain.sources import name_source
from keyvault.models import Key
from keyvault.models.recording import collect_subjects
from keyvault.models.usage import UseOutcome
from keyvault.services.keys.lifecycle import suspend_key
from keyvault.services.usage.recorder import UsageLog
from rotation.admin.rotation_progress import banner_of, evidence_card, read_rotation_traffic, users_table
from rotation.domain.events import RotationState
from rotation.domain.plan_fields import PlanOverrides, Proof, Reinstatement
from rotation.domain.silence import AwaitedSource, SourceFacts
from rotation.models import Evidence, EvidenceKind, Rotation
from rotation.services.rotations.engine import advance_rotation
from rotation.services.rotations.facts import note_evidence
from rotation.services.rotations.reports import Waits
from rotation.services.rotations.requests import request_rotation
from tests.admin.desk import Desk, address, browser, set_up_desk, text_of
from tests.factories import grant, issue, now

pytestmark = pytest.mark.django_db

S = RotationState


@pytest.fixture
def desk() -> Desk:
    return set_up_desk()


def rotated(desk: Desk, **overrides: Any) -> Rotation:
    key, _ = issue(desk.sandbox)
    allowed = grant(desk.tam, P.ROTATIONS_WRITE, desk.sandbox)
    row = request_rotation(allowed, key.credential, PlanOverrides(reason="yearly", **overrides))
    advance_rotation(row.pk)
    return row


def page_of(desk: Desk, row: Rotation) -> str:
    return text_of(browser(desk.tam).get(address("rotation_rotation_change", row.pk)))


def note(row: Rotation, user_agent: str, outcome: UseOutcome = UseOutcome.ALLOWED) -> None:
    log = UsageLog()
    log.note(
        row.predecessor_id,
        source="192.0.2.7",
        user_agent=user_agent,
        endpoint="orders.retrieve",
        outcome=outcome,
    )
    log.flush()


def test_users_are_copied_as_csv_without_formulas(desk: Desk) -> None:
    """Guarantee: a user agent that a client chose is no formula in a spreadsheet."""
    row = rotated(desk)
    note(row, "=HYPERLINK(1)")
    (text,) = re.findall(r'data-copy="(source,[^"]*)"', page_of(desk, row))
    header, line, _ = html.unescape(text).split("\n")
    assert header == "source,network,user_agent,endpoint,requests,first_seen,last_seen"
    assert line.startswith("192.0.2.7,192.0.2.0/24,'=HYPERLINK(1),orders.retrieve,1,")


def test_chart_appears_once_a_key_was_used(desk: Desk) -> None:
    row = rotated(desk)
    assert "Requests per" not in page_of(desk, row)
    note(row, "shop/1")
    assert "Requests per 2 min (UTC)" in page_of(desk, row)


def test_plan_marks_what_deviates_from_the_defaults(desk: Desk) -> None:
    plan = page_of(desk, rotated(desk, quiet_seconds=7_200)).partition("<h2>Plan</h2>")[2].partition("</section>")[0]
    marked = re.findall(r"<dt>([^<]*)</dt><dd>[^<]*<span[^>]*>not the default", plan)
    assert marked == ["Quiet period"]


def test_approver_in_production_sees_each_value_that_weakens_the_default(desk: Desk) -> None:
    """Guarantee: a shorter quiet period and another proof than traffic are marked on the page of the approval."""
    key, _ = issue(desk.production)
    allowed = grant(desk.tam, P.ROTATIONS_WRITE, desk.production)
    chosen = PlanOverrides(reason="yearly", quiet_seconds=3_600, quarantine_seconds=600, proof=Proof.ACK)
    row = request_rotation(allowed, key.credential, chosen)
    text = text_of(browser(desk.approver).get(address("rotation_rotation_approve", row.pk)))
    table = text.partition("<h2>What changes</h2>")[2].partition("</table>")[0]
    marked = re.findall(r"<tr>\s*<td[^>]*>([^<]*)</td>(?:(?!</tr>).)*not the default", table, re.DOTALL)
    assert marked == ["Proof", "Quiet period", "Quarantine"]
    assert "7 days, or twice the longest gap of each source, if that is longer" in table


def test_banner_of_an_undecided_rotation_names_when_it_expires(desk: Desk) -> None:
    """Guarantee: the expiry of the request is not announced as the next step, since the approval comes before it."""
    key, _ = issue(desk.production)
    row = request_rotation(grant(desk.tam, P.ROTATIONS_WRITE, desk.production), key.credential, PlanOverrides())
    (banner,) = re.findall(r'<section class="banner[^>]*>(.*?)</section>', page_of(desk, row), re.DOTALL)
    assert "Without approval it expires <time" in banner
    assert "at the earliest" not in banner


def test_page_of_a_request_shows_the_uses_of_the_last_day_to_the_approver(desk: Desk) -> None:
    """Guarantee: who decides on a rotation sees how often the old key was used in the last 24 hours."""
    key, _ = issue(desk.production)
    allowed = grant(desk.tam, P.ROTATIONS_WRITE, desk.production)
    row = request_rotation(allowed, key.credential, PlanOverrides(reason="yearly"))
    note(row, "shop/1")
    url = address("rotation_rotation_change", row.pk)
    shown = text_of(browser(desk.approver).get(url)).partition("<dt>Old key in the last 24 hours</dt>")[2]
    assert shown.startswith("<dd>1 request ")
    assert "Old key in the last 24 hours" not in text_of(browser(desk.tam).get(url))


def test_banner_is_short_and_the_explanation_is_below_it(desk: Desk) -> None:
    """Guarantee: the banner of a waiting rotation has what it waits for; the runbook's text is in its card."""
    text = page_of(desk, rotated(desk))
    (banner,) = re.findall(r'<section class="banner[^>]*>(.*?)</section>', text, re.DOTALL)
    assert "Waiting for traffic on the replacement" in banner
    assert "The replacement is not proved in use." not in banner
    advice = text.partition("<h2>What to do: ")[2].partition("</section>")[0]
    assert "The replacement is not proved in use." in advice


_RETURNS, _BEGINS_AGAIN = (
    "tries it: then it is reinstated.",
    "An attempt by a known source begins the quarantine again.",
)


@pytest.mark.parametrize(
    ("reinstatement", "reinstated", "waived", "quarantined", "evidence", "banner"),
    [
        ("once", False, False, False, "; reinstated once if a known source tries it", _RETURNS),
        ("never", False, False, False, "Suspended for 10 minutes<", _BEGINS_AGAIN),
        ("once", False, True, False, "Suspended for 10 minutes<", "</time>."),
        ("once", True, False, False, "The old key was used in quarantine and reinstated<", _BEGINS_AGAIN),
        ("once", True, False, True, "Now it is suspended again for 10 minutes, without another return", _BEGINS_AGAIN),
    ],
)
def test_page_says_what_an_attempt_in_quarantine_does(
    desk: Desk, reinstatement: str, reinstated: bool, waived: bool, quarantined: bool, evidence: str, banner: str
) -> None:
    """Guarantee: evidence and banner promise the return of the old key only where an attempt reinstates it."""
    row, at = rotated(desk, quarantine_seconds=600, reinstatement=Reinstatement(reinstatement)), now()
    row.reinstated_at, row.quarantined_at = at if reinstated else None, at if quarantined else None
    row.waived_at = at if waived else None
    assert evidence in str(evidence_card(row, [], []))
    row.state = S.QUARANTINE
    shown = banner_of(row, "the quarantine of the predecessor to end", [], at, [], is_advised=False)
    assert shown is not None
    assert shown.text.endswith(banner)


@pytest.mark.parametrize(
    ("seen", "shown"),
    [
        ({"acknowledged_at": None}, "120 requests from 2 sources in 12 minutes<"),
        ({"acknowledged_at": "2026-11-22T09:00:00Z"}, "12 minutes; acknowledged by the merchant<"),
        ({"acknowledged_at": "2026-11-22T09:00:00Z", "authentications": 0}, "Acknowledged by the merchant with"),
    ],
    ids=["traffic", "both", "acknowledgement"],
)
def test_evidence_of_use_names_the_traffic_and_the_acknowledgement(desk: Desk, seen: Any, shown: str) -> None:
    used = {"authentications": 120, "sources": 2, "minutes": 12, **seen}
    assert shown in str(evidence_card(rotated(desk), [Evidence(kind=EvidenceKind.USED, seen=used)], []))


@pytest.mark.parametrize(
    ("tried_seconds", "status", "title"),
    [
        (None, "current", "Old key not tried in quarantine"),
        (-5, "current", "Old key not tried in quarantine"),
        (5, "done", "Old key not tried by a known source in quarantine"),
    ],
    ids=["never", "before it was reinstated", "by an unknown source"],
)
def test_evidence_names_who_was_refused_in_quarantine(
    desk: Desk, tried_seconds: int | None, status: str, title: str
) -> None:
    """Guarantee: an attempt by an unknown source is shown, and leaves no requirement of the revocation open."""
    row, at = rotated(desk), now()
    row.state, row.quarantined_at = RotationState.QUARANTINE, at
    recorded = []
    if tried_seconds is not None:
        seen = {"attempts": [{"source": "192.0.2.0/24", "is_known": False}]}
        tried_at = at + timedelta(seconds=tried_seconds)
        recorded.append(Evidence(kind=EvidenceKind.TRIED, seen=seen, created_at=tried_at))
    card = evidence_card(row, recorded, [])
    item = card.body.checks[-1]
    assert (item.title, item.state) == (title, status)
    assert ("Refused: 192.0.2.0/24" in str(item.detail)) is (status == "done")


def test_users_who_were_refused_in_quarantine_are_marked(desk: Desk) -> None:
    """Guarantee: the page that an alarm about an attempt leads to shows who tried the key."""
    row = rotated(desk)
    note(row, "shop/1")
    note(row, "intruder/1", UseOutcome.REFUSED)
    row.state, row.quarantined_at = RotationState.QUARANTINE, now()
    table = users_table(row, row.predecessor, read_rotation_traffic(row, row.predecessor, now()), Waits("its end"))
    status = {"intruder" in str(who): str(shown) for who, *_, shown in table.rows}
    assert ">refused<" in status[True]
    assert ">refused<" not in status[False]
    assert "intruder" not in table.aside


def test_users_who_have_not_switched_are_marked(desk: Desk) -> None:
    row = rotated(desk)
    note(row, "shop/1")
    users = page_of(desk, row).partition("<h2>Who still uses the old key")[2].partition("</table>")[0]
    assert ">not switched</span>" in users


@pytest.mark.parametrize("state", sorted(RotationState))
def test_users_are_called_silent_only_where_the_rotation_judges_it(desk: Desk, state: RotationState) -> None:
    """Guarantee: no page says of a source that it is silent unless the rotation observed that."""
    row = rotated(desk)
    note(row, "shop/1")
    row.state = state
    traffic = read_rotation_traffic(row, row.predecessor, now())
    source = SourceFacts(name_source("192.0.2.7", "shop/1"), used_at=now())
    unjudged, judged = (
        str(users_table(row, row.predecessor, traffic, Waits("its next turn", sources=sources)))
        for sources in ((), (source,))
    )
    assert "192.0.2.7" in unjudged
    assert ">silent<" not in unjudged
    assert ">silent<" in judged


def test_users_have_a_status_that_is_true_in_every_stage(desk: Desk) -> None:
    """Guarantee: after the silence the page says why a source no longer needs the old key, or that it used it since."""
    row = rotated(desk)
    note(row, "shop/1")
    at, traffic = now(), read_rotation_traffic(row, row.predecessor, now())
    source = SourceFacts(name_source("192.0.2.7", "shop/1"), used_at=at)

    def status(sources: list[SourceFacts]) -> Any:
        ((*_, shown),) = users_table(row, row.predecessor, traffic, Waits("its end", sources=sources)).rows
        return re.findall(r"<span[^>]*>([^<]*)<", str(shown))[0]

    before = at - timedelta(hours=1)
    table: list[tuple[RotationState, datetime | None, datetime | None, list[SourceFacts], str, str]] = [
        (S.AWAITING_PROOF, None, None, [], "not switched", "not switched"),
        (S.OVERLAP, None, None, [source], "silent", "waived"),
        (S.OVERLAP, None, None, [], "unknown", "unknown"),
        (S.QUARANTINE, at, None, [], "silent", "waived"),
        (S.QUARANTINE, before, None, [], "not switched", "waived"),
        (S.QUARANTINE, None, before, [], "waived", "waived"),
        (S.COMPLETED, at, None, [], "silent", "waived"),
        (S.COMPLETED, None, None, [], "not switched", "waived"),
        (S.ROLLED_BACK, at, None, [], "not switched", "not switched"),
    ]
    found = []
    for _ in range(2):
        for row.state, row.silent_at, row.waived_at, sources, *_expected in table:
            found.append(status(sources))
        with collect_subjects():
            seen: dict[str, Any] = {"source": source.name, "key_id": row.predecessor_id, "by": "tam", "why": "moved"}
            note_evidence(row, EvidenceKind.SOURCE_WAIVED, seen, at)
    assert found == [each[-2] for each in table] + [each[-1] for each in table]
    row.credential.kind = KeyKind.PUBLIC
    assert status([]) == "unknown"


@pytest.mark.parametrize(
    ("moved_seconds", "badge"), [(None, "awaited"), (-5, "awaited"), (5, "switched")], ids=["never", "and back", "yes"]
)
def test_users_whose_silence_is_awaited_are_marked_as_switched_if_they_are(
    desk: Desk, moved_seconds: int | None, badge: str
) -> None:
    """Guarantee: an operator does not ask a merchant to switch a client that has switched."""
    row = rotated(desk)
    note(row, "shop/1")
    at, row.state = now(), RotationState.OVERLAP
    moved_at = None if moved_seconds is None else at + timedelta(seconds=moved_seconds)
    source = SourceFacts(name_source("192.0.2.7", "shop/1"), used_at=at, moved_at=moved_at)
    awaited = AwaitedSource(source.name, at, at + timedelta(hours=1))
    waits = Waits("silence", sources=(source,), awaited=[awaited])
    traffic = read_rotation_traffic(row, row.predecessor, at)
    ((*_, status),) = users_table(row, row.predecessor, traffic, waits).rows
    assert re.findall(r"badge-wait[^>]*>([^<]*)<", status) == [badge]
    assert "silence is proved" in status


def test_a_stalled_rotation_is_one_line_of_the_overview(desk: Desk) -> None:
    """Guarantee: the alarm about a rotation that is listed itself takes no line of its own."""
    row = rotated(desk, quiet_seconds=5)
    suspend_key(
        grant(desk.responder, P.KEYS_SUSPEND, desk.sandbox),
        Key.objects.select_related("credential__account").get(pk=row.predecessor_id),
    )
    advance_rotation(row.pk)
    shown = text_of(browser(desk.tam).get("/admin/"))
    assert f'href="{address("rotation_rotation_change", row.pk)}">Review' in shown
    assert "Unseen alarms" in shown
    assert "Open alarm" not in shown
