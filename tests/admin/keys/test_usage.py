"""The users of a key on its page, for an operator who is about to revoke it."""

from datetime import UTC, datetime

import pytest

from keyvault.domain.keys import KeyKind
from keyvault.models import Key, UsageTotal
from keyvault.models.usage import UseOutcome
from keyvault.services.usage.recorder import UsageLog
from keyvault.services.usage.totals import SLOT, start_of_slot
from tests.admin.desk import Desk, address, browser, text_of
from tests.factories import issue

NOON = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


def use(key: Key, source: str, outcome: UseOutcome, *, user_agent: str = "shop/1", origin: str = "") -> None:
    log = UsageLog(now=lambda: NOON)
    log.note(key.key_id, source=source, user_agent=user_agent, endpoint="orders.create", origin=origin, outcome=outcome)
    log.flush()


def page(desk: Desk, key: Key) -> str:
    return text_of(browser(desk.auditor).get(address("keyvault_key_change", key.pk)))


@pytest.mark.database
def test_key_page_names_its_users_and_marks_probes(desk: Desk) -> None:
    key, _ = issue(desk.sandbox)
    use(key, "192.0.2.1", UseOutcome.ALLOWED)
    use(key, "198.51.100.7", UseOutcome.PROBED)
    text = page(desk, key)
    assert "192.0.2.1" in text
    assert "198.51.100.7" in text
    assert ">probed<" in text
    assert "192.0.2.0/24" in text
    assert "198.51.100.0/24" not in text, "a probe is not a user of the key"
    assert "Shops and app versions" not in text
    assert "Last probe" in text
    assert "Last refused" not in text


def test_key_page_of_a_public_key_shows_shops_and_app_versions(desk: Desk) -> None:
    key, _ = issue(desk.sandbox, kind=KeyKind.PUBLIC)
    use(key, "192.0.2.1", UseOutcome.ALLOWED, user_agent="app/1.2", origin="https://shop.example")
    text = page(desk, key)
    assert text.index("Shops and app versions") < text.index("Who uses the key")
    assert "https://shop.example" in text
    assert "app/1.2" in text


def test_key_page_shows_that_the_list_of_users_is_truncated(desk: Desk) -> None:
    key, _ = issue(desk.sandbox)
    for number in range(20):
        use(key, f"10.0.{number}.1", UseOutcome.ALLOWED)
    text = page(desk, key)
    assert "latest 20" not in text
    use(key, "10.0.99.1", UseOutcome.ALLOWED)
    text = page(desk, key)
    assert "Who uses the key: latest 20" in text
    assert "Networks: latest 20" in text
    assert "10.0.99.1" not in text, "among equals the last by name is omitted"
    use(key, "203.0.113.1", UseOutcome.DENIED)
    assert "203.0.113.1" in page(desk, key), "users of one outcome do not displace those of another"


@pytest.mark.database
def test_overview_says_up_to_when_uses_are_counted(desk: Desk) -> None:
    """Guarantee: the chart has complete quarters of an hour only, and does not call the end of the last one now."""
    client = browser(desk.auditor)
    assert "Uses of keys are added at the end of each quarter of an hour." in text_of(client.get("/admin/"))
    begin = start_of_slot(datetime.now(UTC)) - SLOT
    UsageTotal.objects.create(at=begin, environment="sandbox", outcome=UseOutcome.ALLOWED, count=7)
    chart = text_of(client.get("/admin/")).partition("<h2>Verifications</h2>")[2].partition("<table")[0]
    assert f">{begin + SLOT:%H:%M}</text>" in chart or f">{begin + 2 * SLOT:%H:%M}</text>" in chart
    assert ">now<" not in chart


@pytest.mark.parametrize("origin", ["", "https://shop.example"])
def test_key_page_shows_each_users_origin_if_known(desk: Desk, origin: str) -> None:
    key, _ = issue(desk.sandbox, kind=KeyKind.PUBLIC)
    use(key, "192.0.2.1", UseOutcome.ALLOWED, origin=origin)
    users = page(desk, key).partition("Who uses the key")[2].partition("Networks")[0]
    assert (">origin<" in users.lower(), "https://shop.example" in users) == (bool(origin), bool(origin))


def test_key_page_of_an_unused_key_shows_no_use(desk: Desk) -> None:
    key, _ = issue(desk.sandbox)
    text = page(desk, key)
    assert "No use recorded yet." in text
    assert "Networks" not in text


def test_key_page_escapes_the_user_agent(desk: Desk) -> None:
    """A user agent is foreign text and never markup in the console."""
    key, _ = issue(desk.sandbox, kind=KeyKind.PUBLIC)
    use(key, "192.0.2.1", UseOutcome.ALLOWED, user_agent="<script>alert(1)</script>", origin="<b>")
    text = page(desk, key)
    assert "<script>alert(1)" not in text
    assert "<b>" not in text
