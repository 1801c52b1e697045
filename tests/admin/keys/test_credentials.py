"""Where a credential may be used from, and exposed keys, in the console."""

import re
from datetime import timedelta
from typing import Any

import pytest

from keyvault.access.permissions import Permission
from keyvault.access.principals import WORKER
from keyvault.admin.framework.charts import LineChart
from keyvault.admin.keys.traffic import day_card, day_traffic, sparklines_of
from keyvault.domain.keys import DEAD_STATES, KeyKind
from keyvault.domain.revocation import RevocationReason
from keyvault.models import Key, KeyUse, UseBucket, UseContext
from keyvault.models.usage import SIGNS_OF_LIFE, UseOutcome
from keyvault.services.keys.lifecycle import activate_key, discard_key, revoke_key, stage_key
from keyvault.services.keys.records import find_key_record
from tests.admin.desk import Desk, address, browser, hidden, text_of
from tests.factories import grant, issue, now


def post_restrict(desk: Desk, key: Key, **fields: str) -> Any:
    client = browser(desk.admin)
    url = address("keyvault_credential_restrict", key.credential_id)
    seen = hidden(client.get(url), "version")
    return client.post(url, {"version": seen, "networks": "", "origin_header": "refuse", **fields}, follow=True)


def expose(key: Key, outcome: UseOutcome, days_ago: int = 0, source: str = "192.0.2.7") -> None:
    at = now() - timedelta(days=days_ago)
    place = {"source": source, "endpoint": "orders.retrieve", "outcome": outcome}
    context = UseContext.objects.create(key=key, **place)
    UseBucket.objects.create(context=context, is_exposure=True, minute=at, count=3, first_at=at, last_at=at)


def test_credential_restricted_in_the_console_shows_it_on_its_page(desk: Desk) -> None:
    key, _ = issue(desk.sandbox)
    answer = post_restrict(desk, key, networks="192.0.2.0/24\n 2001:db8::/32\n\n", origin_header="report")
    text = text_of(answer)
    assert "<code>192.0.2.0/24</code> <code>2001:db8::/32</code>" in text
    assert "reported only" in text
    record = find_key_record(key.pk)
    assert record is not None
    assert ([str(network) for network in record.networks], record.reports_origin) == (
        ["192.0.2.0/24", "2001:db8::/32"],
        True,
    )
    form = browser(desk.admin).get(address("keyvault_credential_restrict", key.credential_id))
    assert "192.0.2.0/24\n2001:db8::/32" in text_of(form)


def test_credential_restricted_to_an_invalid_network_names_it(desk: Desk) -> None:
    key, _ = issue(desk.sandbox)
    answer = post_restrict(desk, key, networks="192.0.2.0/24\n10.0.0.1/8")
    assert answer.status_code == 400
    assert "10.0.0.1/8: a CIDR block" in text_of(answer)


def test_credential_action_is_offered_by_permission(desk: Desk) -> None:
    key, _ = issue(desk.sandbox)
    url = address("keyvault_credential_restrict", key.credential_id)
    page = address("keyvault_credential_change", key.credential_id)
    assert url in text_of(browser(desk.admin).get(page))
    assert url not in text_of(browser(desk.responder).get(page))


def test_credential_of_a_public_key_shows_no_origin_rule(desk: Desk) -> None:
    key, _ = issue(desk.sandbox, kind=KeyKind.PUBLIC)
    text = text_of(browser(desk.admin).get(address("keyvault_credential_change", key.credential_id)))
    assert "Origin header" not in text
    assert "everywhere" in text


@pytest.mark.parametrize("outcome", [UseOutcome.EXPOSED_IN_URL, UseOutcome.EXPOSED_IN_BROWSER])
def test_exposure_is_shown_to_operators_who_may_revoke_the_key(desk: Desk, outcome: UseOutcome) -> None:
    """Exposure revokes nothing automatically; an authorized operator is notified with place and time."""
    key, _ = issue(desk.sandbox)
    expose(key, outcome)
    front = text_of(browser(desk.responder).get("/admin/"))
    assert "Suspected exposures" in front
    assert address("keyvault_key_change", key.pk) in front
    assert "Suspected exposures" not in text_of(browser(desk.tam).get("/admin/"))
    page = text_of(browser(desk.tam).get(address("keyvault_key_change", key.pk)))
    assert "Suspected exposures" in page
    assert outcome.replace("_", " ") in page
    assert "192.0.2.7" in page


def test_exposures_of_one_source_are_one_row_of_the_key(desk: Desk) -> None:
    key, _ = issue(desk.sandbox)
    expose(key, UseOutcome.EXPOSED_IN_URL)
    context, earlier = UseContext.objects.get(), now() - timedelta(hours=2)
    UseBucket.objects.create(
        context=context, is_exposure=True, minute=earlier, count=4, first_at=earlier, last_at=earlier
    )
    page = text_of(browser(desk.tam).get(address("keyvault_key_change", key.pk)))
    table, _, users = page.partition("Suspected exposures")[2].partition("Who uses the key")
    assert table.count("192.0.2.7") == 1
    assert "<td>7</td>" in table
    assert "192.0.2.7" not in users


def test_exposures_of_more_sources_than_listed_say_so(desk: Desk) -> None:
    key, _ = issue(desk.sandbox)
    for number in range(20):
        expose(key, UseOutcome.EXPOSED_IN_URL, source=f"192.0.2.{number}")
    url = address("keyvault_key_change", key.pk)
    assert "Suspected exposures: latest 20" not in text_of(browser(desk.tam).get(url))
    expose(key, UseOutcome.EXPOSED_IN_URL, source="192.0.2.20")
    assert "Suspected exposures: latest 20" in text_of(browser(desk.tam).get(url))


def test_exposure_old_or_of_a_revoked_key_is_not_shown(desk: Desk) -> None:
    old, _ = issue(desk.sandbox, label="old")
    expose(old, UseOutcome.EXPOSED_IN_URL, days_ago=31)
    ended, _ = issue(desk.sandbox, label="ended")
    expose(ended, UseOutcome.EXPOSED_IN_URL)
    client = browser(desk.responder)
    client.post(address("keyvault_key_report-compromise", ended.pk))
    front = text_of(client.get("/admin/"))
    for key in (old, ended):
        assert address("keyvault_key_change", key.pk) not in front
    assert "exposed in url" in text_of(client.get(address("keyvault_key_change", old.pk)))


def test_exposure_filter_lists_the_keys_of_the_last_days(desk: Desk) -> None:
    exposed, _ = issue(desk.sandbox)
    other, _ = issue(desk.sandbox, label="other")
    expose(exposed, UseOutcome.EXPOSED_IN_BROWSER)
    text = text_of(browser(desk.auditor).get("/admin/keyvault/key/", {"exposed": "lately"}))
    assert exposed.pk in text
    assert other.pk not in text


def test_list_of_credentials_shows_the_keys_that_have_not_ended(desk: Desk) -> None:
    """Guarantee: a row of the list stays short after years of rotations, and still says that no key is left."""
    key, _ = issue(desk.sandbox)
    by_worker = grant(WORKER, Permission.ROTATIONS_ADVANCE, desk.sandbox)
    for _ in range(3):
        discard_key(by_worker, stage_key(by_worker, key.credential, expires_in_days=None)[0])
    stage_key(by_worker, key.credential, expires_in_days=None)
    client, listed = browser(desk.auditor), address("keyvault_credential_changelist")

    def list_states() -> list[str]:
        (row,) = re.findall(r'<td class="field-key_states">(.*?)</td>', text_of(client.get(listed)), re.DOTALL)
        return re.findall(r">([a-z ]+)</span>", row)

    assert list_states() == ["pre activation", "active"]
    for left in key.credential.keys.exclude(state__in=DEAD_STATES):
        revoke_key(grant(desk.responder, Permission.KEYS_REVOKE, desk.sandbox), left, RevocationReason.SUPERSEDED)
    assert list_states() == ["ended"]


def test_credential_in_rotation_is_listed_with_the_uses_of_both_keys(desk: Desk) -> None:
    """Guarantee: a credential whose replacement is not used yet does not look unused."""
    old, _ = issue(desk.sandbox)
    by_worker = grant(WORKER, Permission.ROTATIONS_ADVANCE, desk.sandbox)
    replacement, _ = stage_key(by_worker, old.credential, expires_in_days=None)
    activate_key(by_worker, replacement)
    at = now() - timedelta(days=1) / 2
    KeyUse.objects.create(key=old, first_at=at, last_at=at, count=3)
    context = UseContext.objects.create(key=old, source="192.0.2.7", outcome=UseOutcome.ALLOWED)
    UseBucket.objects.create(context=context, minute=at, count=3, first_at=at, last_at=at)
    page = text_of(browser(desk.admin).get(address("keyvault_account_change", desk.sandbox.pk)))
    assert "requests of each hour in the last 24 hours: 3 in total" in page
    assert f'datetime="{at:%Y-%m-%dT%H:%M:%S}' in page


def test_chart_leaves_out_the_step_that_is_not_complete(desk: Desk) -> None:
    """Guarantee: a line does not fall at its end while a key is in use; a key's first uses are shown immediately."""
    key, _ = issue(desk.sandbox)
    context = UseContext.objects.create(key=key, source="192.0.2.7", outcome=UseOutcome.ALLOWED)
    at = now()
    UseBucket.objects.create(context=context, minute=at, count=1, first_at=at, last_at=at)
    assert _counts_of(key)[-1] == 1
    before = at - timedelta(hours=2)
    UseBucket.objects.create(context=context, minute=before, count=3, first_at=before, last_at=before)
    assert sum(_counts_of(key)) == 3


def test_chart_marks_what_happened_to_the_key(desk: Desk) -> None:
    """Guarantee: labels of events near each other are in different lines."""
    key, _ = issue(desk.sandbox)
    at = now()
    context = UseContext.objects.create(key=key, source="192.0.2.7", outcome=UseOutcome.ALLOWED)
    UseBucket.objects.create(context=context, minute=at, count=1, first_at=at, last_at=at)
    key.created_at, key.activated_at = at - timedelta(days=3), at - timedelta(hours=3)
    key.suspended_at, key.compromised_at = at - timedelta(hours=2), at - timedelta(days=2)
    card = day_card([key], day_traffic([key], SIGNS_OF_LIFE))
    assert card is not None
    name = f"…{key.key_id[-6:]}"
    placed = card.body.context()["markers"]
    assert [marker.label for marker, _ in placed] == [f"{name} issued", f"{name} suspended"]
    assert len({top for _, top in placed}) == 2


def test_small_line_leaves_out_the_hour_that_is_not_complete(desk: Desk) -> None:
    """Guarantee: the number has every use; only the line ends with the last complete hour."""
    key, _ = issue(desk.sandbox)
    context = UseContext.objects.create(key=key, source="192.0.2.7", outcome=UseOutcome.ALLOWED)
    at = now()
    UseBucket.objects.create(context=context, minute=at, count=1, first_at=at, last_at=at)
    assert sparklines_of({"all": [key.pk]})["all"].values[-1] == 1
    before = at - timedelta(hours=2)
    UseBucket.objects.create(context=context, minute=before, count=3, first_at=before, last_at=before)
    line = sparklines_of({"all": [key.pk]})["all"]
    assert sum(line.values) == 3
    assert line.label.endswith("4 in total")


def _counts_of(key: Key) -> list[float]:
    card = day_card([key], day_traffic([key], SIGNS_OF_LIFE))
    assert card is not None
    assert isinstance(card.body, LineChart)
    return list(card.body.series[0].values)
