"""Schedules and blackout calendars in the console: saved, edited, disabled, and the resulting calendar."""

import html
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import OperatorPrincipal
from keyvault.access.roles import Role
from keyvault.access.scopes import AccessScope
from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind
from rotation.admin import blackouts, schedule_calendar
from rotation.domain.plan_fields import Proof
from rotation.domain.windows import Window
from rotation.models import BlackoutCalendar, Rotation, RotationSchedule
from rotation.services.schedules.schedules import disable_schedule, draft_of
from rotation.services.schedules.starting import begin_due
from tests.admin.desk import Desk, address, browser, hidden, set_up_desk, text_of
from tests.factories import account, grant, issue, make_merchant, make_operator
from tests.rotation.services.schedules.test_schedules import UNREADABLE, calendar, damage, save

DAY = timedelta(days=1)
NEW, LIST = "rotation_rotationschedule_save", "rotation_rotationschedule_changelist"
TERMS: dict[str, Any] = {"cryptoperiod_days": 90, "jitter_days": 0, "lead_days": 0, "environment": "sandbox"}
NIGHTS: dict[str, Any] = {"weekdays": [0, 4], "opens": "22:00", "closes": "04:00", "time_zone": "Europe/Berlin"}


@pytest.fixture
def desk(db: None) -> Desk:
    return set_up_desk()


def now() -> datetime:
    return datetime.now(UTC)


def test_schedule_saved_has_the_terms_of_the_form(desk: Desk) -> None:
    frozen = calendar("freeze", now())
    client = browser(desk.tam)
    fields = {**TERMS, **NIGHTS, "merchant": "acme", "jitter_days": 9, "lead_days": 7, "calendar": "freeze"}
    plan = {"proof": "ack", "quiet_seconds": "2h", "quarantine_seconds": "90", "expires_in_days": 200, "reason": "yes"}
    answer = client.post(address(NEW), {**fields, **plan})
    row = RotationSchedule.objects.get()
    assert answer["Location"] == address("rotation_rotationschedule_change", row.pk)
    assert (row.account, row.credential, row.calendar, row.author_person) == (
        desk.sandbox,
        None,
        frozen,
        desk.tam.person,
    )
    saved = draft_of(row)
    assert (saved.cryptoperiod_days, saved.jitter_days, saved.lead_days) == (90, 9, 7)
    assert saved.window == Window("Europe/Berlin", (0, 4), 1_320, 240)
    overrides = saved.overrides
    assert (overrides.proof, overrides.quiet_seconds, overrides.quarantine_seconds) == (Proof.ACK, 7_200, 90)
    assert (overrides.expires_in_days, overrides.reason) == (200, "yes")
    text = text_of(client.get(answer["Location"]))
    assert "Mon, Fri 22:00 to 04:00 Europe/Berlin" in text
    assert "all of acme/sandbox" in text_of(client.get(address(LIST)))


def test_schedule_of_one_credential_or_all_of_an_environment(desk: Desk) -> None:
    key, _ = issue(desk.production)
    client = browser(desk.admin)
    fields = {**TERMS, "environment": "production"}
    assert client.post(address(NEW), {**fields, "credential": key.credential_id}).status_code == 302
    assert client.post(address(NEW), fields).status_code == 302
    scopes = {(row.environment, row.account_id, row.credential_id) for row in RotationSchedule.objects.all()}
    assert scopes == {("production", None, key.credential_id), ("production", None, None)}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cryptoperiod_days": 0}, "greater than or equal to 1"),
        ({"cryptoperiod_days": ""}, "required"),
        ({"jitter_days": 90}, "less than the cryptoperiod"),
        ({"lead_days": 90}, "less than the cryptoperiod minus the jitter"),
        ({"weekdays": ["7"]}, "not one of the available choices"),
        ({"opens": "25:00"}, "Invalid time of day"),
        ({"opens": "22:00"}, "the weekdays on which these hours apply"),
        ({**NIGHTS, "time_zone": "Europe/Atlantis"}, "IANA time zone"),
        ({**NIGHTS, "closes": "22:00"}, "a time other than opens"),
        ({**NIGHTS, "cryptoperiod_days": 1}, "longer than the cryptoperiod"),
        ({"calendar": "nothing"}, "not one of the available choices"),
        ({"quiet_seconds": "30d"}, "soak and quiet period need 30 days, which is past the deadline"),
        ({"quarantine_seconds": "367d"}, "367 days is out of range. Use 1 second to 366 days in sandbox."),
        ({"quiet_seconds": "soon"}, "30m or 7d"),
        ({"proof": "confirmation"}, "not one of the available choices"),
        ({"expires_in_days": 90}, "91 or more"),
        ({"environment": "staging"}, "not one of the available choices"),
        ({"credential": "crd_nothing"}, "id"),
        ({"credential": "crd_\0"}, "Null characters are not allowed"),
        ({"merchant": "nobody"}, "There is no merchant nobody"),
    ],
)
def test_schedule_that_is_infeasible_shows_the_error_on_the_form(
    desk: Desk, fields: dict[str, Any], message: str
) -> None:
    answer = browser(desk.tam).post(address(NEW), {**TERMS, **fields})
    assert answer.status_code in {400, 404, 409, 422}
    assert message in text_of(answer)
    assert not RotationSchedule.objects.exists()


def test_schedule_of_a_public_or_foreign_credential_is_refused(desk: Desk) -> None:
    public, _ = issue(desk.sandbox, kind=KeyKind.PUBLIC)
    private, _ = issue(desk.production)
    client = browser(desk.tam)
    for fields in (
        {"credential": public.credential_id},
        {"credential": private.credential_id},
        {"credential": private.credential_id, "merchant": "acme"},
    ):
        assert client.post(address(NEW), {**TERMS, **fields}).status_code in {400, 422}
    assert not RotationSchedule.objects.exists()


@pytest.mark.parametrize("who", ["approver", "auditor", "responder"])
def test_schedule_is_readable_by_every_role_and_changed_by_permission(desk: Desk, who: str) -> None:
    row = save(Environment.SANDBOX, now())
    client = browser(getattr(desk, who))
    assert "all of sandbox" in text_of(client.get(address("rotation_rotationschedule_change", row.pk)))
    assert client.get(address("rotation_rotationschedule_calendar")).status_code == 200


def test_schedule_edited_keeps_other_fields_and_gets_the_editor_as_owner(desk: Desk) -> None:
    client = browser(desk.tam)
    client.post(address(NEW), {**TERMS, **NIGHTS, "merchant": "acme", "quiet_seconds": "2h", "reason": "yes"})
    row = RotationSchedule.objects.get()
    where = address("rotation_rotationschedule_edit", row.pk)
    form = text_of(browser(desk.admin).get(where))
    for shown in ('value="22:00"', 'value="Europe/Berlin"', 'value="90"', 'value="7200"', 'value="yes"'):
        assert shown in form
    assert len(re.findall(r'name="weekdays" value="[04]"[^>]* checked', form)) == 2
    fields = {**TERMS, **NIGHTS, "quiet_seconds": "7200", "reason": "yes", "cryptoperiod_days": 60}
    stale = {**fields, "version": row.version}
    assert browser(desk.admin).post(where, stale).status_code == 302
    row.refresh_from_db()
    assert (row.cryptoperiod_days, row.author_person, row.account) == (60, desk.admin.person, desk.sandbox)
    assert draft_of(row).overrides.quiet_seconds == 7_200
    assert client.post(where, stale).status_code == 409


@pytest.mark.parametrize("changes", UNREADABLE.values(), ids=UNREADABLE)
def test_schedule_unreadable_by_this_release_is_shown_as_stalled_and_editable(
    desk: Desk, changes: dict[str, Any]
) -> None:
    """Guarantee: one unreadable row breaks no page, in particular not the page that repairs it."""
    row = save(desk.sandbox, now())
    damage(row, **changes)
    begin_due(now())
    client = browser(desk.tam)
    where = address("rotation_rotationschedule_edit", row.pk)
    shown = address("rotation_rotationschedule_change", row.pk)
    listed = text_of(client.get(address(LIST)))
    assert shown in listed
    assert "stalled" in listed
    assert "The schedule cannot be read by this release" in text_of(client.get(shown))
    assert shown in text_of(client.get(address("keyvault_notice_changelist")))
    refused = client.post(address("rotation_rotationschedule_disable", row.pk))
    assert refused.status_code == 302
    enable = address("rotation_rotationschedule_enable", row.pk)
    assert client.post(enable, {"version": hidden(client.get(enable), "version")}).status_code == 409
    fields = {**TERMS, **NIGHTS, "version": hidden(client.get(where), "version")}
    assert client.post(where, fields).status_code == 302
    row.refresh_from_db()
    assert draft_of(row).window == Window("Europe/Berlin", (0, 4), 1_320, 240)


def test_schedule_disabled_and_enabled(desk: Desk) -> None:
    row = save(Environment.SANDBOX, now())
    client = browser(desk.tam)
    assert client.post(address("rotation_rotationschedule_disable", row.pk)).status_code == 302
    row.refresh_from_db()
    assert not row.is_enabled
    where = address("rotation_rotationschedule_enable", row.pk)
    assert client.post(where, {"version": hidden(client.get(where), "version")}).status_code == 302
    row.refresh_from_db()
    assert row.is_enabled


def test_blackouts_are_entered_one_per_line(desk: Desk) -> None:
    client = browser(desk.tam)
    lines = "2026-12-20 2027-01-07 Christmas and New Year\n\n2026-11-27T18:00+01:00 2026-11-28T06:00Z\n"
    answer = client.post(address("rotation_blackoutcalendar_save"), {"name": "shops", "periods": lines})
    assert answer.status_code == 302
    row = BlackoutCalendar.objects.get()
    assert [(each["begins_at"], each["ends_at"], each["why"]) for each in row.periods] == [
        ("2026-11-27T17:00:00Z", "2026-11-28T06:00:00Z", ""),
        ("2026-12-20T00:00:00Z", "2027-01-07T00:00:00Z", "Christmas and New Year"),
    ]
    assert "Christmas and New Year" in text_of(client.get(answer["Location"]))
    assert "shops" in text_of(client.get(address("rotation_blackoutcalendar_changelist")))
    where = address("rotation_blackoutcalendar_edit", "shops")
    form = client.get(where)
    assert "2026-12-20T00:00:00Z 2027-01-07T00:00:00Z Christmas and New Year" in text_of(form)
    assert client.post(where, {"version": hidden(form, "version"), "periods": ""}).status_code == 302
    row.refresh_from_db()
    assert row.periods == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "Shops"}, "a-z, 0-9"),
        ({"name": "x", "periods": "2026-12-20"}, "Period 1: "),
        ({"name": "x", "periods": "2026-12-20 2026-12-24\nsoon later"}, "Period 2: a time"),
        ({"name": "x", "periods": "2026-12-20 2026-12-19"}, "Period 1: later than begins_at"),
        ({"name": "x", "periods": "0001-01-01T00:00+14:00 9999-12-31T23:00-14:00"}, "Period 1: "),
        ({"name": "x", "periods": "2026-12-20 2026-12-21 a\0b"}, "Null characters"),
    ],
)
def test_blackouts_with_invalid_values_are_reported_by_line(desk: Desk, fields: dict[str, str], message: str) -> None:
    answer = browser(desk.tam).post(address("rotation_blackoutcalendar_save"), fields)
    assert answer.status_code in {400, 422}
    assert message in text_of(answer)
    assert not BlackoutCalendar.objects.exists()


def test_blackouts_that_block_a_schedule_are_refused_with_its_name(desk: Desk) -> None:
    save(desk.sandbox, now(), cryptoperiod_days=30, calendar=calendar("freeze", now()))
    client = browser(desk.tam)
    where = address("rotation_blackoutcalendar_edit", "freeze")
    begins, ends = now() + 10 * DAY, now() + 70 * DAY
    fields = {"version": hidden(client.get(where), "version"), "periods": f"{begins:%Y-%m-%d} {ends:%Y-%m-%d}"}
    answer = client.post(where, fields)
    assert answer.status_code in {400, 422}
    assert "acme/sandbox" in text_of(answer)
    assert BlackoutCalendar.objects.get().periods == []


def count_users(operator: OperatorPrincipal) -> dict[str, str]:
    """Return how many schedules the list says that use each calendar, by its name."""
    shown = text_of(browser(operator).get(address("rotation_blackoutcalendar_changelist")))
    found = re.findall(r'class="field-name">.*?>([a-z]+)</a>.*?class="field-used_by[^"]*">([^<]*)<', shown, re.DOTALL)
    return dict(found)


@pytest.mark.database
def test_blackouts_count_the_enabled_schedules_in_the_scope(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: an operator of one merchant does not learn how many schedules other merchants have."""
    make_merchant("globex")
    freeze = calendar("freeze", now())
    for place in (desk.sandbox, desk.production, account("globex")):
        save(place, now(), calendar=freeze)
    key, _ = issue(account("globex"))
    save(key.credential, now(), calendar=freeze)
    disabled = save(account("globex", Environment.PRODUCTION), now(), calendar=freeze)
    disable_schedule(grant(desk.tam, P.SCHEDULES_WRITE, disabled.account), disabled)
    limited = make_operator("limited", Role.TECHNICAL_ACCOUNT_MANAGER, scope=AccessScope(frozenset({"globex"})))
    assert count_users(desk.tam) == {"freeze": "4"}
    assert count_users(limited) == {"freeze": "2"}
    monkeypatch.setattr(blackouts, "_MAX_SCHEDULES", 3)
    assert count_users(desk.tam) == {"freeze": "more than 3"}


def test_blackouts_are_listed_without_a_query_for_each(desk: Desk) -> None:
    client, url = browser(desk.tam), address("rotation_blackoutcalendar_changelist")
    calendar("freeze", now())
    client.get(url)
    made = []
    for name in ("shops", "stocktaking"):
        calendar(name, now())
        with CaptureQueriesContext(connection) as captured:
            client.get(url)
        made.append(len(captured))
    assert made[0] == made[1]


def test_calendar_page_shows_months_with_working_links(desk: Desk) -> None:
    key, _ = issue(desk.sandbox, at=now() - 80 * DAY, label="till")
    issue(desk.production, at=now() - 91 * DAY, label="backend")
    save(Environment.SANDBOX, now())
    save(Environment.PRODUCTION, now())
    begin_due(now())
    client = browser(desk.auditor)
    where = address("rotation_rotationschedule_calendar")
    page = text_of(client.get(where))
    due_at = now() + 10 * DAY
    assert f"<h2>{due_at:%B %Y}</h2>" in page
    assert address("keyvault_credential_change", key.credential_id) in page
    assert address("rotation_rotation_change", Rotation.objects.get().pk) in page
    assert "awaiting approval" in page
    assert "backend" not in text_of(client.get(where, {"environment": "sandbox"}))
    assert "No scheduled rotations in this period" in text_of(client.get(where, {"merchant": "<unknown>"}))
    assert where in text_of(client.get(address(LIST)))
    policy = client.get(where)["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert not re.search(
        r"<style|\sstyle=|\son[a-z]+=|<unknown>", text_of(client.get(where, {"merchant": "<unknown>"}))
    )
    assert client.post(where).status_code == 405


def test_page_of_a_merchant_leads_to_its_calendar(desk: Desk) -> None:
    issue(desk.sandbox, at=now() - 80 * DAY, label="till")
    save(Environment.SANDBOX, now())
    begin_due(now())
    client, url = browser(desk.auditor), f"{address('rotation_rotationschedule_calendar')}?merchant=acme"
    assert f'href="{url}"' in text_of(client.get(address("keyvault_merchant_change", "acme")))
    assert ">till<" in text_of(client.get(url))


def test_calendar_page_links_later_dates(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_calendar, "MAX_DATES", 1)
    for label in ("first", "second"):
        issue(desk.sandbox, at=now() - 80 * DAY, label=label)
        issue(desk.production, at=now() - 70 * DAY, label=f"production {label}")
    save(Environment.SANDBOX, now())
    begin_due(now())
    client = browser(desk.auditor)
    pages = [text_of(client.get(address("rotation_rotationschedule_calendar"), {"environment": "sandbox"}))]
    (link,) = re.findall(r'href="([^"]+)">Later dates</a>', pages[0])
    pages.append(text_of(client.get(html.unescape(link))))
    assert sorted(label for page in pages for label in ("first", "second") if f">{label}<" in page) == [
        "first",
        "second",
    ]
    assert "Later dates" not in pages[1]


def test_calendar_page_counts_the_rotations_of_each_day_and_links_to_them(desk: Desk) -> None:
    """Guarantee: the month shows the load of each day with its blackouts; a day lists exactly its rotations."""
    for label, age in (("first", 80), ("second", 80), ("third", 79)):
        issue(desk.sandbox, at=now() - age * DAY, label=label)
    save(Environment.SANDBOX, now())
    begin_due(now())
    day = (now() + 10 * DAY).date()
    calendar("freeze", now(), (now() + 9 * DAY, now() + 12 * DAY))
    client, where = browser(desk.auditor), address("rotation_rotationschedule_calendar")
    page = text_of(client.get(where, {"month": f"{day:%Y-%m}"}))
    (label,) = re.findall(rf'href="[^"]*day={day}".*?<span class="visually-hidden">([^<]+)</span>', page)
    assert label == f"{day:%B}: 2 rotations; blackout freeze"
    listed = text_of(client.get(where, {"day": str(day)}))
    assert [name for name in ("first", "second", "third") if f">{name}<" in listed] == ["first", "second"]
    assert "No rotations" in text_of(client.get(where, {"day": str(day - 3 * DAY)}))
    assert f"{day:%B}: 2 rotations" not in text_of(client.get(where, {"month": f"{day:%Y-%m}", "merchant": "globex"}))


INVALID = [
    {"environment": "x"},
    {"month": "9" * 400},
    {"month": "9999-12"},
    {"day": "0001-01-01"},
    {"merchant": "\0"},
    {"day": "-1"},
    {"after": "soon"},
]
INVALID += [{"after": "0001-01-01T00:00:00+23:00 crd"}, {"after": "2026-01-01 \0"}, {"after": " "}]


@pytest.mark.parametrize("query", INVALID)
def test_calendar_page_with_an_invalid_query_is_no_fault(desk: Desk, query: dict[str, str]) -> None:
    save(Environment.SANDBOX, now())
    assert browser(desk.tam).get(address("rotation_rotationschedule_calendar"), query).status_code in {200, 400}


def test_credential_page_shows_the_next_rotation(desk: Desk) -> None:
    key, _ = issue(desk.sandbox, at=now() - 80 * DAY)
    client = browser(desk.tam)
    where = address("keyvault_credential_change", key.credential_id)
    assert "not on a schedule" in text_of(client.get(where))
    save(Environment.SANDBOX, now())
    page = text_of(client.get(where))
    assert "Next scheduled rotation" in page
    assert "planned" in page
    offer = re.search(rf'href="({address(NEW)}[^"]*)"', page)
    assert offer is not None
    assert 'value="acme"' in text_of(client.get(offer[1].replace("&amp;", "&")))
