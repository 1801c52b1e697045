"""Console sign-in: failures are counted before a hash is computed, and separately for known devices."""

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from unittest import mock

import pytest
from django.contrib.auth import authenticate, hashers
from django.contrib.auth.hashers import PBKDF2PasswordHasher
from django.db import DatabaseError
from django.test import Client, override_settings

from keyvault.access.limits import SIGN_IN_FAILURES, SIGN_IN_FAILURES_KEPT_SECONDS, SIGN_IN_LOCK_SECONDS
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST
from keyvault.domain.plaintext import Plaintext
from keyvault.models import AuditEntry, ConsoleSession, Notice, Operator
from keyvault.services.limits.sign_in_attempts import attempts
from keyvault.services.operators.operators import disable_operator, reset_password
from keyvault.services.sessions import refusals
from keyvault.services.sessions.devices import write_device
from keyvault.services.sessions.refusals import MAX_PAIRS, sign_in_refusals
from tests.admin.desk import Desk, browser, dump, text_of
from tests.clocks import MonotonicClock
from tests.factories import PASSWORD, grant, make_operator

LOGIN = "/admin/login/"
WRONG = "something else entirely"


@pytest.fixture
def clock() -> Iterator[MonotonicClock]:
    clock = MonotonicClock()
    with mock.patch.object(attempts().local, "_monotonic", clock):
        yield clock


@pytest.fixture(autouse=True)
def cheap_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use hashers as cheap as those of `make_operator`, because many hashes are computed here."""
    monkeypatch.setattr(PBKDF2PasswordHasher, "iterations", 1)


@pytest.fixture(autouse=True)
def fresh_refusals() -> None:
    sign_in_refusals.forget()


def sign_in(
    username: str = "tam", password: str = PASSWORD, *, client: Client | None = None, address: str = "192.0.2.1"
) -> Any:
    return (client or Client()).post(LOGIN, {"username": username, "password": password}, REMOTE_ADDR=address)


def fail(times: int = SIGN_IN_FAILURES, **asked: Any) -> list[Any]:
    return [sign_in(**{"password": WRONG, **asked}) for _ in range(times)]


def on_known_device(username: str = "tam") -> Client:
    """Return a client with the cookie of a device on which the operator has signed in."""
    client = Client()
    client.cookies["device"] = write_device(Operator.objects.get(username=username), None, "192.0.2.1")
    return client


def is_in(answer: Any) -> bool:
    """Whether the password was right, and the second factor is next."""
    return bool(answer.status_code == 302)


def events(*names: str) -> list[dict[str, Any]]:
    rows = AuditEntry.objects.filter(event__in=names).order_by("pk")
    return [json.loads(bytes(row.body)) for row in rows]


def flush_refusals() -> list[dict[str, Any]]:
    sign_in_refusals.flush()
    return [entry["details"] for entry in events("operator.sign_in_refused")]


# ------------------------------------------------------------------------------------------------- counting


def test_sign_in_after_ten_failures_refuses_the_right_password(desk: Desk, clock: MonotonicClock) -> None:
    """Ten wrong passwords lock a name for 30 minutes, for all addresses."""
    statuses = [sign_in(password=WRONG, address=f"192.0.2.{host}").status_code for host in range(10)]
    assert statuses == [200] * 9 + [429]
    answer = sign_in(address="198.51.100.9")
    assert (answer.status_code, int(answer["Retry-After"])) == (429, SIGN_IN_LOCK_SECONDS)
    clock.seconds += SIGN_IN_LOCK_SECONDS - 1
    assert int(sign_in(address="198.51.100.9")["Retry-After"]) == 1
    clock.seconds += 1
    assert is_in(sign_in(address="198.51.100.9"))


def test_sign_in_after_ten_failures_from_an_address_refuses_every_name_there(desk: Desk, clock: MonotonicClock) -> None:
    """An address that guessed at ten names once each is locked for all names; other addresses are not."""
    for number in range(10):
        sign_in(f"guessed-{number}", WRONG)
    assert sign_in("tam").status_code == 429
    assert is_in(sign_in("tam", address="192.0.2.2"))


def test_sign_in_locked_computes_no_hash(desk: Desk) -> None:
    """A locked attempt costs no password hash, so further guesses cannot exhaust the processors."""
    fail()
    with mock.patch.object(hashers, "get_hasher", side_effect=AssertionError("a hash was computed")):
        assert sign_in().status_code == 429
        assert sign_in("nobody-at-all").status_code == 429


def test_sign_in_concurrent_attempts_are_counted_before_any_is_checked(desk: Desk) -> None:
    """Concurrent guesses do not bypass the count: each is counted before its hash is computed."""
    seen: list[int] = []

    def verify(compute: object, *asked: Any) -> tuple[bool, bool]:
        if len(seen) < 10:
            seen.append(sign_in(password=WRONG, address="198.51.100.1").status_code)
        return False, False

    # In the caller's thread: the threads for hashes are too few for nested attempts.
    with mock.patch("keyvault.services.sessions.sign_in.run_at_low_priority", verify):
        sign_in(password=WRONG)
    assert 429 in seen
    assert len(seen) == 10


@pytest.mark.parametrize("known", [True, False])
def test_sign_in_answers_alike_for_existing_and_unknown_names(desk: Desk, known: bool) -> None:
    """No answer, status or lock reveals whether an operator of that name exists."""
    name = "tam" if known else "tim"
    answers = fail(12, username=name)
    assert [answer.status_code for answer in answers] == [200] * 9 + [429] * 3
    texts = {re.sub(r"csrfmiddlewaretoken[^>]*>|\bt[ai]m\b", "", text_of(answer)) for answer in answers[:9]}
    assert len(texts) == 1
    assert "Wrong user name or password" in texts.pop()
    assert "Too many failed sign-ins" in text_of(answers[-1])


@pytest.mark.parametrize("known", [True, False])
def test_sign_in_computes_one_hash_for_any_name(desk: Desk, known: bool) -> None:
    """One hash is computed for any name, so the response time reveals nothing."""
    with mock.patch.object(
        PBKDF2PasswordHasher, "encode", autospec=True, side_effect=PBKDF2PasswordHasher.encode
    ) as encode:
        sign_in("tam" if known else "tim", WRONG)
    assert encode.call_count == 1


@pytest.mark.parametrize("how", ["disabled", "no role"])
def test_sign_in_of_an_unauthorized_operator_counts_as_a_failure(desk: Desk, how: str) -> None:
    """The right password of a disabled operator, or of one without a role, gets the answer of a wrong password."""
    if how == "disabled":
        disable_operator(grant(HOST, P.OPERATORS_WRITE), Operator.objects.get(username="tam"))
    name = "tam" if how == "disabled" else make_operator("nobody").username
    answers = [sign_in(name) for _ in range(10)]
    assert [answer.status_code for answer in answers] == [200] * 9 + [429]
    assert "Wrong user name or password" in text_of(answers[0])
    assert not ConsoleSession.objects.exists()


def test_sign_in_success_refunds_its_own_attempt_only(desk: Desk) -> None:
    """A success uses up nothing of its address's allowance and clears no failure there."""
    fail(9, username="guessed")
    for _ in range(3):
        assert is_in(sign_in())
    assert fail(1, username="guessed-again")[0].status_code == 429


def test_sign_in_failures_of_a_name_count_for_a_day(desk: Desk, clock: MonotonicClock) -> None:
    """Nine guesses in every half an hour would never lock the name, and would be hundreds in a day."""
    fail(9)
    clock.seconds += SIGN_IN_LOCK_SECONDS
    assert fail(1)[0].status_code == 429
    clock.seconds += SIGN_IN_LOCK_SECONDS
    fail(9)
    clock.seconds += SIGN_IN_FAILURES_KEPT_SECONDS
    assert fail(9)[-1].status_code == 200


def test_sign_in_failures_of_an_address_count_for_thirty_minutes(desk: Desk, clock: MonotonicClock) -> None:
    """The typing errors of a day do not lock an office."""
    for number in range(9):
        fail(1, username=f"guessed-{number}")
    clock.seconds += SIGN_IN_LOCK_SECONDS
    assert fail(1, username="guessed-again")[0].status_code == 200


def test_sign_in_success_ends_the_failures_of_its_name(desk: Desk) -> None:
    """Typing errors of many days do not add up to a lock."""
    for _ in range(3):
        for host in range(9):
            fail(1, address=f"192.0.2.{host}")
        assert is_in(sign_in(address="198.51.100.1"))


@override_settings(TRUSTED_PROXIES=1)
def test_sign_in_behind_a_proxy_counts_the_address_added_by_the_proxy(desk: Desk) -> None:
    """The entry added by a trusted proxy counts; entries left of it come from the client."""

    def ask(name: str, forwarded: str) -> Any:
        form = {"username": name, "password": PASSWORD if name == "tam" else WRONG}
        return Client().post(LOGIN, form, headers={"X-Forwarded-For": forwarded}, REMOTE_ADDR="10.0.0.1")

    for number in range(10):
        ask(f"guessed-{number}", f"203.0.113.{number}, 192.0.2.1")
    assert ask("tam", "203.0.113.99, 192.0.2.1").status_code == 429
    assert is_in(ask("tam", "192.0.2.2"))


@override_settings(TRUSTED_PROXIES=2)
def test_sign_in_without_a_trustworthy_address_counts_by_name_alone(desk: Desk) -> None:
    """No address is invented: unrelated clients do not share a counter, and the name's own count still locks."""
    for number in range(10):
        assert sign_in(f"guessed-{number}", WRONG).status_code == 200
    assert fail()[-1].status_code == 429
    assert is_in(sign_in("approver"))


def test_sign_in_password_reset_unlocks_the_name(desk: Desk) -> None:
    """The owner of the host can unlock an operator: a new password resets the count."""
    fail()
    new = Plaintext("another long pass phrase")
    reset_password(grant(HOST, P.OPERATORS_ENROLL), Operator.objects.get(username="tam"), new)
    assert is_in(sign_in(password=new.reveal(), address="192.0.2.2"))


# ------------------------------------------------------------------------------------------------- devices


def test_sign_in_from_a_known_device_is_not_locked_by_other_clients(desk: Desk) -> None:
    """An attacker who locks the name or a shared address does not lock out a known device."""
    known = on_known_device()
    fail()
    assert sign_in().status_code == 429
    assert is_in(sign_in(client=known))


def test_sign_in_failures_of_a_known_device_lock_only_that_device(desk: Desk) -> None:
    """A stolen device gets ten guesses as well; the name stays open to all other devices."""
    known, other = on_known_device(), on_known_device()
    assert fail(client=known)[-1].status_code == 429
    assert sign_in(client=known).status_code == 429
    assert is_in(sign_in(client=other))
    assert is_in(sign_in())


def test_sign_in_device_cookie_is_valid_for_its_own_operator_only(desk: Desk) -> None:
    """An operator's own cookie gives no extra guesses at another operator's password."""
    tams = on_known_device()
    fail(username="approver", client=tams)
    assert sign_in("approver", client=tams).status_code == 429


def test_sign_in_altered_device_cookie_is_ignored(desk: Desk) -> None:
    known = on_known_device()
    known.cookies["device"] = known.cookies["device"].value[:-1] + "~"
    fail()
    assert sign_in(client=known).status_code == 429


def test_sign_in_device_cookie_is_void_after_a_password_reset(desk: Desk) -> None:
    """A password reset ends what the earlier password opened: sessions and known devices."""
    known = on_known_device()
    row = Operator.objects.get(username="tam")
    reset_password(grant(HOST, P.OPERATORS_ENROLL), row, Plaintext("another long pass phrase"))
    fail()
    assert sign_in(password="another long pass phrase", client=known).status_code == 429


@pytest.mark.parametrize(("extra_seconds", "status"), [(0, 302), (1, 429)])
def test_sign_in_device_cookie_expires_ninety_days_after_the_devices_last_sign_in(
    desk: Desk, extra_seconds: int, status: int
) -> None:
    """A cookie stolen long ago gives no extra guesses, whatever lifetime the cookie has in the browser."""
    with mock.patch("django.core.signing.time") as time:
        time.time.return_value = 1_800_000_000
        known = on_known_device()
        fail()
        time.time.return_value += 90 * 24 * 60 * 60 + extra_seconds
        assert sign_in(client=known).status_code == status


def test_sign_in_password_alone_makes_no_known_device(desk: Desk) -> None:
    """An attacker with the password only gets no counter of its own."""
    assert "device" not in sign_in().cookies


# ------------------------------------------------------------------------------------- audit entries and alarms


def test_sign_in_password_and_sign_out_are_audited(desk: Desk) -> None:
    client = Client()
    sign_in(client=client, address="192.0.2.7")
    assert client.post("/admin/logout/").status_code == 200
    came, went = events("operator.password_accepted", "operator.signed_out")
    assert (came["actor"], came["channel"]) == ("operator:tam", "console")
    assert came["details"] == {"address": "192.0.2.7", "device": "new"}
    assert (went["actor"], went["event"]) == ("operator:tam", "operator.signed_out")
    sign_in(client=on_known_device())
    assert events("operator.password_accepted")[-1]["details"]["device"] == "known"
    assert Operator.objects.get(username="tam").last_login is None


def test_sign_in_without_its_audit_entry_creates_no_session(desk: Desk) -> None:
    """No session exists without its entry in the audit log."""
    client = Client(raise_request_exception=False)
    with mock.patch(
        "keyvault.services.recording.transaction.append_entries", side_effect=RuntimeError("the log is full")
    ):
        assert sign_in(client=client).status_code == 500
    assert client.get("/admin/").status_code == 302
    assert not ConsoleSession.objects.exists()


def test_sign_in_refusals_are_one_entry_for_each_name_and_address(desk: Desk) -> None:
    fail(3)
    fail(2, address="192.0.2.2")
    refusals = flush_refusals()
    assert [(each["operator"], each["address"], each["count"], each["locked"]) for each in refusals] == [
        ("tam", "192.0.2.1", 3, 0),
        ("tam", "192.0.2.2", 2, 0),
    ]
    assert events("operator.sign_in_refused")[0]["actor"] == "system:console"
    assert len(flush_refusals()) == 2


def test_sign_in_refusals_store_no_unknown_name(desk: Desk) -> None:
    """A password typed into the name field is stored nowhere."""
    fail(11, username="hunter2-my-real-password")
    (refusals,) = flush_refusals()
    assert (refusals["operator"], refusals["count"], refusals["locked"]) == ("unknown", 11, 1)
    assert "hunter2" not in dump()


def test_sign_in_refusals_of_many_names_and_addresses_are_bounded(desk: Desk) -> None:
    """An attack from many addresses creates a bounded number of entries a minute and keeps the attacked names."""
    for number in range(3 * MAX_PAIRS):
        sign_in_refusals.note(None, f"192.0.2.{number}", datetime.now(UTC), is_locked=False)
    fail(1, address="198.51.100.1")
    refusals = flush_refusals()
    assert len(refusals) == MAX_PAIRS + 2
    assert sum(each["count"] for each in refusals) == 3 * MAX_PAIRS + 1
    assert [(each["operator"], each["address"]) for each in refusals[-2:]] == [
        ("unknown", "others"),
        ("tam", "others"),
    ]


def test_sign_in_lock_is_audited_and_raises_one_alarm(desk: Desk, clock: MonotonicClock) -> None:
    """A lock raises one alarm per name in the inbox until an operator has seen it."""
    for _ in range(2):
        for host in range(10):
            sign_in(password=WRONG, address=f"192.0.2.{host}")
        clock.seconds += SIGN_IN_LOCK_SECONDS
    locked = [entry["details"] for entry in events("operator.locked")]
    assert [(each["username"], each["by"], each["address"]) for each in locked] == [
        ("tam", "name", "192.0.2.9"),
        ("tam", "name", "192.0.2.9"),
    ]
    alarm = Notice.objects.get()
    assert (alarm.kind, alarm.subject, alarm.is_alarm, alarm.account) == ("operator.locked", "tam", True, None)


def lock_addresses(*addresses: str) -> None:
    for address in addresses:
        for number in range(SIGN_IN_FAILURES):
            sign_in(f"guessed-{number}-at-{address}", WRONG, address=address)


def test_sign_in_lock_of_an_address_is_audited_each_time_and_raises_one_alarm(desk: Desk) -> None:
    """An unseen alarm suppresses further alarms, but no audit entry."""
    lock_addresses("192.0.2.1", "198.51.100.1")
    alarm = Notice.objects.get()
    assert (alarm.kind, alarm.payload["address"]) == ("address.locked", "192.0.2.1")
    assert [entry["details"]["address"] for entry in events("address.locked")] == ["192.0.2.1", "198.51.100.1"]


def test_sign_in_locks_of_many_addresses_are_bounded(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit of one minute, the locks of addresses share one audit entry. The next minute starts anew."""
    monkeypatch.setattr(refusals, "MAX_ADDRESS_LOCKS", 2)
    lock_addresses(*(f"192.0.2.{host}" for host in range(5)))
    assert len(events("address.locked")) == 3  # the one that raised the alarm, and two more
    sign_in_refusals.flush()
    *_, others = [entry["details"] for entry in events("address.locked")]
    assert (others["address"], others["count"]) == ("others", 2)
    sign_in_refusals.flush()
    assert len(events("address.locked")) == 4
    lock_addresses("192.0.2.9")
    assert events("address.locked")[-1]["details"]["address"] == "192.0.2.9"
    assert Notice.objects.count() == 1


def test_sign_in_lock_of_an_address_above_the_limit_still_raises_an_alarm(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit on audit entries does not suppress an alarm after an operator has seen the previous one."""
    monkeypatch.setattr(refusals, "MAX_ADDRESS_LOCKS", 0)
    lock_addresses("192.0.2.1", "192.0.2.2")
    assert browser(desk.admin).post(f"/admin/keyvault/notice/{Notice.objects.get().pk}/seen/").status_code == 302
    lock_addresses("192.0.2.3")
    assert sorted(alarm.payload["address"] for alarm in Notice.objects.all()) == ["192.0.2.1", "192.0.2.3"]
    assert [entry["details"]["address"] for entry in events("address.locked")] == ["192.0.2.1", "192.0.2.3"]


def test_sign_in_locks_of_addresses_are_kept_after_a_database_failure(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "MAX_ADDRESS_LOCKS", 0)
    lock_addresses("192.0.2.1", "192.0.2.2", "192.0.2.3")
    with (
        mock.patch("keyvault.services.sessions.refusals.recorded", side_effect=DatabaseError),
        pytest.raises(DatabaseError),
    ):
        sign_in_refusals.flush()
    lock_addresses("192.0.2.4")
    sign_in_refusals.flush()
    others = events("address.locked")[-1]["details"]
    assert (others["address"], others["count"]) == ("others", 3)


def test_sign_in_alarm_is_shown_and_marked_in_the_inbox(desk: Desk) -> None:
    """An alarm without a merchant has its page and leaves the list like any other."""
    fail(address="192.0.2.8")
    client = browser(desk.admin)
    assert "Operator locked" in text_of(client.get("/admin/"))
    listed = text_of(client.get("/admin/keyvault/notice/"))
    assert "operator.locked" in listed
    alarm = Notice.objects.get(kind="operator.locked")
    assert "tam" in text_of(client.get(f"/admin/keyvault/notice/{alarm.pk}/"))
    assert client.post(f"/admin/keyvault/notice/{alarm.pk}/seen/").status_code == 302
    alarm.refresh_from_db()
    assert alarm.seen_at is not None


# ---------------------------------------------------------------------------------------------------- no bypass


def test_sign_in_page_stores_nothing_for_anonymous_requests(desk: Desk) -> None:
    """Anonymous requests for the page, and guesses, write no row."""
    before = dump()
    client = Client()
    assert client.get(LOGIN).status_code == 200
    assert sign_in(password=WRONG, client=client).status_code == 200
    assert dump() == before


def test_sign_in_without_counting_is_impossible(desk: Desk) -> None:
    """Django's own `authenticate` always fails here, so no code can check passwords without counting."""
    assert authenticate(username="tam", password=PASSWORD) is None


def test_sign_in_upgrades_an_older_password_hash(desk: Desk) -> None:
    """The next sign-in after a stronger hash setting stores a new hash, within its entry's transaction.

    The operator's other sessions end, as with each change of the operator.
    """
    browser(desk.tam)
    older = hashers.make_password(PASSWORD, hasher=hashers.get_hasher("default"))
    with mock.patch.object(type(hashers.get_hasher()), "must_update", return_value=True):
        assert is_in(sign_in())
    stored = Operator.objects.get(username="tam").password
    assert stored != older
    assert ConsoleSession.objects.count() == 1
    assert events("operator.password_accepted")[-1]["details"]["sessions_ended"] == 1
    assert hashers.check_password(PASSWORD, stored)
