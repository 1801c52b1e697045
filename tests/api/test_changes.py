"""The change feed over HTTP: what readers see, what they hold back, and what a token may read."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest import mock

import pytest
from django.db.models import F, QuerySet
from django.test import Client

from keyvault.access.permissions import Permission as P
from keyvault.access.roles import Role
from keyvault.domain.environments import Environment
from keyvault.domain.keystring import StringScope
from keyvault.domain.revocation import RevocationReason
from keyvault.models import Change, FeedReader, Key, KeyUse, ServiceToken, UsageReporter, UseContext, Verifier
from keyvault.models.usage import UseOutcome
from keyvault.services.change_feed import readers
from keyvault.services.change_feed.readers import forget_old_readers
from keyvault.services.change_feed.receipts import find_receipt
from keyvault.services.keys.lifecycle import get_key, last_sequence, revoke_key
from keyvault.services.recording.changes import poll_feed
from keyvault.services.usage.recorder import note_lost, observe
from rotation.domain.events import RotationState
from rotation.services.rotations.engine import advance_rotation
from rotation.services.rotations.reports import get_rotation
from tests.factories import account, grant, issue, make_merchant, make_token, the_operator
from tests.rotation import scene
from tests.services.racing import TIMEOUT_SECONDS, held_open, start, wait_until_blocked

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.database]
"""On PostgreSQL the transaction around an ordinary test would be one that may still reveal a change."""

Send = Callable[..., Any]


@pytest.fixture(autouse=True)
def merchants(db: None) -> None:
    make_merchant("acme")
    make_merchant("globex")


def sender(*permissions: P, **options: Any) -> Send:
    """Return a function that sends JSON with a new service token."""
    text = make_token(*(permissions or (P.KEYS_REPLICATE,)), **options)[1].reveal()
    client = Client(raise_request_exception=False)

    def send(method: str, path: str, body: Mapping[str, Any] | None = None, **query: Any) -> Any:
        headers = {"Authorization": f"Bearer {text}"}
        if method == "GET":
            response: Any = client.get(path, query, headers=headers)
        else:
            response = client.post(path, body, content_type="application/json", headers=headers)
        response.body = response.json()
        return response

    return send


@pytest.fixture
def send() -> Send:
    return sender()


def read(send: Send, after: int | None = None, reader: str = "r1", **query: Any) -> Any:
    query |= {} if after is None else {"after": after}
    return send("GET", "/v1/changes", reader=reader, **query)


def begin(send: Send, reader: str = "r1") -> int:
    response = read(send, reader=reader)
    assert response.status_code == 200, response.content
    assert response.body["changes"] == []
    return int(response.body["sequence"])


def confirm(send: Send, sequence: int, reader: str = "r1") -> Any:
    return send("POST", "/v1/changes/confirmations", {"reader": reader, "sequence": sequence})


def report(send: Send, number: int, uses: list[dict[str, Any]] | None = None, **fields: Any) -> Any:
    body = {"reader": "r1", "number": number, "flushed_through": now().isoformat(), "uses": uses or [], **fields}
    return send("POST", "/v1/usage-reports", body)


def use(key_id: str, **fields: Any) -> dict[str, Any]:
    at = now().isoformat()
    plain = {"endpoint": "orders.create", "source": "192.0.2.1", "user_agent": "shop/1", "outcome": "allowed"}
    return {"key_id": key_id, **plain, "count": 3, "first_at": at, "last_at": at, **fields}


def now() -> datetime:
    return datetime.now(UTC)


def revoke(key: Key) -> int:
    admin = the_operator("admin", Role.KEY_ADMINISTRATOR)
    row = get_key(key.key_id)
    assert row is not None
    sequence = revoke_key(
        grant(admin, P.KEYS_REVOKE, row.credential.account), row, RevocationReason.SUPERSEDED
    ).sequence
    assert sequence is not None
    return sequence


def progress(sequence: int, name: str = "r1") -> list[str]:
    receipt = find_receipt(sequence)
    assert receipt is not None
    return [each.progress.value for each in receipt.verifiers if each.verifier_id.endswith(f".{name}")]


def test_reader_sees_a_change_with_its_record_and_holds_the_receipt_until_it_confirms(send: Send) -> None:
    """Guarantee: the receipt of a revocation waits for a reader until it has confirmed the revocation."""
    key, _ = issue(account())
    after = begin(send)
    sequence = revoke(key)
    assert progress(sequence) == ["waiting"]
    response = read(send, after)
    assert response.body["sequence"] >= sequence
    changes = {each["sequence"]: each for each in response.body["changes"]}
    change = changes[sequence]
    assert (change["kind"], change["id"]) == ("key", key.key_id)
    assert (change["record"]["state"], change["record"]["merchant_id"]) == ("deactivated", "acme")
    assert progress(sequence) == ["waiting"]
    assert confirm(send, response.body["sequence"]).status_code == 200
    assert progress(sequence) == ["confirmed"]
    assert confirm(send, response.body["sequence"]).status_code == 200
    assert read(send, response.body["sequence"]).body["changes"] == []


def test_late_copy_of_a_registration_completes_no_receipt_for_a_memory_in_use(send: Send) -> None:
    """Guarantee: a repeated request without `after` may arrive when the reader has filled its memory again.

    Otherwise the receipt would be complete while the reader still answers by the state before the revocation.
    """
    key = issue(account("acme"))[0]
    first = begin(send)
    sequence = revoke(key)
    assert progress(sequence) == ["waiting"]
    begin(send)
    assert progress(sequence) == ["waiting"]
    response = read(send, first)
    assert [change["id"] for change in response.body["changes"]][-1] == key.key_id
    assert confirm(send, response.body["sequence"]).status_code == 200
    assert progress(sequence) == ["confirmed"]


def test_changes_come_again_until_a_later_sequence_is_read_from(send: Send) -> None:
    """Guarantee: a response that never arrived loses no change."""
    key, _ = issue(account())
    after = begin(send)
    revoke(key)
    first, second = read(send, after), read(send, after)
    assert first.body["changes"] == second.body["changes"] != []


def test_neither_digests_nor_peppers_leave_the_service(send: Send) -> None:
    """Guarantee: what a reader without the other permission receives verifies no key."""
    key, _ = issue(account())
    after = begin(send)
    revoke(key)
    for response in (
        read(send, after),
        send("GET", "/v1/snapshot/keys", key_ids=key.key_id),
        send("GET", "/v1/snapshot"),
    ):
        assert response.status_code == 200
        assert b"digest" not in response.content
        assert b"pepper" not in response.content
    digests = sender(P.KEYS_REPLICATE, P.KEYS_REPLICATE_DIGESTS, name="region")
    assert "digest" in digests("GET", "/v1/snapshot/keys", key_ids=key.key_id).body["keys"][0]


def test_silent_reader_holds_the_receipt_for_its_staleness_bound_only(send: Send) -> None:
    key, _ = issue(account())
    begin(send)
    sequence = revoke(key)
    row = Verifier.objects.get(pk__endswith=".r1")
    assert row.staleness_ms == 15_000
    Verifier.objects.filter(pk=row.pk).update(seen_at=row.seen_at + timedelta(minutes=5))
    assert progress(sequence) == ["waiting"]
    Verifier.objects.filter(pk=row.pk).update(seen_at=row.seen_at - timedelta(seconds=16))
    assert progress(sequence) == ["expired"]


def test_read_extends_the_wait_of_receipts_before_it_answers(send: Send) -> None:
    """Guarantee: a response lets a reader use its memory no longer than receipts wait for it."""
    after = begin(send)
    row = Verifier.objects.get(pk__endswith=".r1")
    Verifier.objects.filter(pk=row.pk).update(seen_at=row.seen_at - timedelta(seconds=20))
    order: list[str] = []
    real_poll, real_renew = poll_feed, readers._renew

    def poll(*given: Any) -> Any:
        order.append("poll")
        return real_poll(*given)

    def renew(*given: Any) -> Any:
        order.append("renew")
        return real_renew(*given)

    with mock.patch.object(readers, "poll_feed", poll), mock.patch.object(readers, "_renew", renew):
        assert read(send, after).status_code == 200
    assert order == ["renew", "poll"]
    assert Verifier.objects.get(pk=row.pk).seen_at >= row.seen_at


@pytest.mark.parametrize("after", [0, 10**15])
def test_position_that_was_never_offered_starts_again(send: Send, after: int) -> None:
    """Guarantee: a reader that knows changes which a restored database lacks drops its memory."""
    assert confirm(send, begin(send)).status_code == 200
    if after == 0:
        issue(account())
        confirm(send, read(send, Verifier.objects.get(pk__endswith=".r1").confirmed_sequence).body["sequence"])
    response = read(send, after)
    assert (response.status_code, response.body["code"]) == (410, "cursor_expired")


def test_unknown_reader_starts_again(send: Send) -> None:
    for response in (read(send, 0), confirm(send, 0), report(send, 1)):
        assert (response.status_code, response.body["code"]) == (410, "cursor_expired")


def test_sequence_that_was_never_offered_cannot_be_confirmed(send: Send) -> None:
    """Guarantee: no reader completes receipts of changes that it has not been sent."""
    key, _ = issue(account())
    begin(send)
    sequence = revoke(key)
    response = confirm(send, sequence)
    assert (response.status_code, response.body["code"]) == (409, "state_conflict")
    assert progress(sequence) == ["waiting"]


def test_reader_that_is_far_behind_starts_again(send: Send, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MAX_CHANGES", 1)
    after = begin(send)
    for _ in range(2):
        revoke(issue(account())[0])
    assert read(send, after).status_code == 410
    assert read(send, begin(send)).status_code == 200


def pass_time(seconds: float) -> None:
    """Make older when the readers were seen, and since when they owe a confirmation."""
    passed = timedelta(seconds=seconds)
    Verifier.objects.update(seen_at=F("seen_at") - passed)
    FeedReader.objects.update(awaited_since=F("awaited_since") - passed)


@pytest.mark.parametrize("registers", [False, True])
def test_reader_that_never_confirms_delays_no_receipt_forever(send: Send, registers: bool) -> None:
    """Guarantee: receipts wait within the token's bounds for a reader that goes on reading or registering."""
    after = begin(send)
    revoke(issue(account())[0])
    after = read(send, after).body["sequence"]
    assert confirm(send, after).status_code == 200
    sequence = revoke(issue(account())[0])
    statuses = []
    for _ in range(12):
        statuses.append(read(send, None if registers else after).status_code)
        pass_time(3)
    assert statuses[0] == 200
    assert 410 in statuses
    receipt = find_receipt(sequence)
    assert receipt is not None
    assert receipt.is_complete
    begin(send)
    assert progress(sequence) == ["confirmed"]


def test_reader_that_confirms_a_part_only_delays_no_receipt_forever(send: Send) -> None:
    after = begin(send)
    first, last = (revoke(issue(account())[0]) for _ in range(2))
    for _ in range(12):
        if read(send, after).status_code == 200 and confirm(send, first).status_code == 200:
            after = first
        pass_time(3)
    assert progress(last) == ["expired"]


def test_reader_that_is_far_behind_delays_no_receipt_forever(send: Send, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MAX_CHANGES", 1)
    after = begin(send)
    sequences = [revoke(issue(account())[0]) for _ in range(2)]
    for _ in range(12):
        assert read(send, after).status_code == 410
        pass_time(3)
    assert progress(sequences[0]) == ["expired"]


def test_reader_that_confirms_while_it_reads_on_stays_live(send: Send) -> None:
    """Under constant changes a later sequence is offered before the confirmation of the earlier one arrives."""
    after = begin(send)
    for _ in range(6):
        sequence = revoke(issue(account())[0])
        response = read(send, after)
        assert response.status_code == 200
        assert confirm(send, after).status_code == 200
        after = response.body["sequence"]
        pass_time(6)
    assert progress(sequence) == ["waiting"]
    assert confirm(send, after).status_code == 200
    assert progress(sequence) == ["confirmed"]


def test_late_confirmation_lets_a_reader_read_on(send: Send) -> None:
    """An outage between the read and the confirmation costs a reader at most its memory."""
    after = begin(send)
    revoke(issue(account())[0])
    sequence = read(send, after).body["sequence"]
    pass_time(11)
    for position in (sequence, None):
        assert read(send, position).body["code"] == "cursor_expired"
    assert confirm(send, sequence).status_code == 200
    assert read(send, sequence).status_code == 200


def test_token_caps_its_readers(send: Send) -> None:
    for name in ("a", "b"):
        begin(send, name)
    QuerySet(ServiceToken).update(max_readers=2)
    response = read(send, reader="c")
    assert (response.status_code, response.body["code"]) == (409, "state_conflict")
    begin(send, "a")  # one that is known may start again
    after = begin(send, "b")
    Verifier.objects.filter(pk__endswith=".b").update(seen_at=now() - timedelta(minutes=1))
    begin(send, "c")
    for position in (after, None):  # its place is taken
        assert read(send, position, reader="b").body["code"] == "state_conflict"


def test_staged_replacement_waits_for_a_reader(send: Send) -> None:
    """Guarantee: no replacement is delivered before each reader has confirmed it."""
    key, _ = issue(account())
    after = begin(send)
    rotation = scene.rotate(key.credential, now())
    advance_rotation(rotation.pk)
    staged = get_rotation(rotation.pk)
    assert (staged.state, staged.delivered_at) == (RotationState.STAGED, None)
    assert staged.replacement is not None
    sequence = read(send, after).body["sequence"]
    assert sequence >= last_sequence(staged.replacement)
    assert confirm(send, sequence).status_code == 200
    advance_rotation(rotation.pk)
    assert get_rotation(rotation.pk).state == RotationState.AWAITING_PROOF


@pytest.mark.postgres
def test_race_of_two_readers_for_the_last_place_registers_one(send: Send) -> None:
    """Guarantee: readers that come at the same time do not exceed what the token may have."""
    QuerySet(ServiceToken).update(max_readers=1)
    with held_open(lambda: begin(send, "a")):
        second = start(lambda: read(send, reader="b"))
        wait_until_blocked(second)
    assert second.result(TIMEOUT_SECONDS).body["code"] == "state_conflict"
    assert [row.pk.rpartition(".")[2] for row in FeedReader.objects.all()] == ["a"]


@pytest.mark.postgres
def test_race_of_a_reader_with_a_revocation_holds_its_receipt(send: Send) -> None:
    """Guarantee: a reader whose read does not show a revocation is one that the receipt waits for.

    The revocation commits after the reader has polled, and the reader was silent for longer than its bound.
    """
    key, _ = issue(account())
    after = begin(send)
    Verifier.objects.update(seen_at=now() - timedelta(minutes=1))
    with held_open(lambda: revoke(key)):
        shown = read(send, after)
        assert (shown.status_code, shown.body["changes"], shown.body["sequence"]) == (200, [], after)
    sequence = Change.objects.latest("sequence").sequence
    assert progress(sequence) == ["waiting"]
    assert {each["sequence"] for each in read(send, after).body["changes"]} >= {sequence}


def test_token_of_one_merchant_sees_only_its_changes() -> None:
    """Guarantee: a token learns nothing of merchants and environments outside its scope."""
    narrow = sender(P.KEYS_REPLICATE, scope=StringScope.SANDBOX, merchants=["acme"])
    own, _ = issue(account())
    others = [issue(account("globex"))[0], issue(account("acme", Environment.PRODUCTION))[0]]
    after = begin(narrow)
    for key in (own, *others):
        revoke(key)
    response = read(narrow, after)
    assert {each["id"] for each in response.body["changes"] if each["kind"] == "key"} == {own.key_id}
    for key in others:
        assert key.key_id not in response.content.decode()
        assert key.credential_id not in response.content.decode()
    found = narrow("GET", "/v1/snapshot/keys", key_ids=",".join([own.key_id, *(key.key_id for key in others)]))
    assert [each["key_id"] for each in found.body["keys"]] == [own.key_id]
    refused = [narrow("POST", "/v1/usage-reports", _uses_of(key.key_id)) for key in others]
    assert {(each.status_code, each.body["errors"][0]["pointer"]) for each in refused} == {(400, "/uses/0/key_id")}


def _uses_of(key_id: str) -> dict[str, Any]:
    return {"reader": "r1", "number": 1, "flushed_through": now().isoformat(), "uses": [use(key_id)]}


@pytest.mark.parametrize("path", ["/v1/changes?reader=r", "/v1/snapshot", "/v1/snapshot/keys?key_ids=0123456789abcdef"])
def test_feed_needs_its_own_permission(path: str) -> None:
    other = sender(P.KEYS_VERIFY, P.KEYS_READ)
    assert other("GET", path).body["code"] == "permission_missing"


def test_report_counts_once_however_often_it_arrives(send: Send) -> None:
    """Guarantee: a repeated usage report adds nothing, and a rotation sees each use."""
    key, _ = issue(account())
    begin(send)
    for _ in range(2):
        assert report(send, 1, [use(key.key_id)]).status_code == 200
    assert KeyUse.objects.get(key_id=key.key_id).count == 3
    assert report(send, 2, [use(key.key_id)]).status_code == 200
    assert KeyUse.objects.get(key_id=key.key_id).count == 6


def test_late_copy_of_an_earlier_report_lets_no_later_one_count_again(send: Send) -> None:
    """Guarantee: a repeated usage report adds nothing, also after a late copy of an earlier one."""
    key, _ = issue(account())
    begin(send)
    early = now().isoformat()
    for number in (1, 2, 1, 2):
        assert report(send, number, [use(key.key_id)], flushed_through=early).status_code == 200
    assert KeyUse.objects.get(key_id=key.key_id).count == 6


def test_regional_verifier_reports_every_outcome_that_it_can_note() -> None:
    """Guarantee: no outcome that a regional verifier notes stops its reports, and exposures are stored as on the host.

    Readers without digests prove no possession: `test_invalid_report_is_refused`.
    """
    key, _ = issue(account())
    region = sender(P.KEYS_REPLICATE, P.KEYS_REPLICATE_DIGESTS)
    begin(region)
    assert report(region, 1, [use(key.key_id, outcome=outcome) for outcome in UseOutcome]).status_code == 200
    assert set(UseContext.objects.filter(key=key).values_list("outcome", flat=True)) == set(UseOutcome)


def test_new_uses_under_an_old_number_are_refused(send: Send) -> None:
    """Guarantee: no uses are dropped as repeated, so that silence would cover them."""
    begin(send)
    assert report(send, 7).status_code == 200
    assert report(send, 1).body["code"] == "state_conflict"


@pytest.mark.parametrize("lost_at", [None, timedelta(seconds=1)])
def test_reader_that_starts_again_holds_back_silence_until_it_reports(send: Send, lost_at: timedelta | None) -> None:
    """Guarantee: silence never covers uses that a reader had before it started again, and reports later."""
    begin(send)
    old = now() - timedelta(seconds=5)
    UsageReporter.objects.update(flushed_through_at=old, lost_at=None if lost_at is None else now() - lost_at)
    begin(send)
    assert observe(now(), "acme", Environment.SANDBOX).through == old


def test_reader_without_reports_holds_back_silence_until_it_reports_or_is_lost(send: Send) -> None:
    """Guarantee: silence never covers time for which a reader has not reported its uses."""
    begin(send)
    old = now() - timedelta(seconds=5)
    UsageReporter.objects.update(flushed_through_at=old)
    assert observe(now(), "acme", Environment.SANDBOX).through == old
    assert report(send, 1).status_code == 200
    through = observe(now(), "acme", Environment.SANDBOX).through
    assert through is not None
    assert through > old


def test_lost_reader_restarts_the_silence_of_its_merchants_only() -> None:
    """Guarantee: a token that is limited to one merchant does not delay the rotations of another."""
    begin(sender(P.KEYS_REPLICATE, scope=StringScope.SANDBOX, merchants=["acme"]))
    UsageReporter.objects.update(flushed_through_at=now() - timedelta(minutes=1))
    assert observe(now(), "globex", Environment.SANDBOX).through is None
    note_lost(now())
    losses = [observe(now(), merchant, Environment.SANDBOX).lost_at for merchant in ("acme", "globex")]
    assert [lost_at is not None for lost_at in losses] == [True, False]


def test_final_report_deregisters_the_reader(send: Send) -> None:
    key, _ = issue(account())
    begin(send)
    sequence = revoke(key)
    assert report(send, 1, is_final=True).status_code == 200
    assert progress(sequence) == []
    assert UsageReporter.objects.get(pk__endswith=".r1").stopped_at is not None
    assert read(send, 0).status_code == 410


@pytest.mark.parametrize(
    ("fields", "pointer"),
    [
        ({"flushed_through": "2999-01-01T00:00:00Z"}, "/flushed_through"),
        ({"number": 0}, "/number"),
        ({"uses": [{"key_id": "x"}]}, "/uses/0/endpoint"),
        ({"uses": 7}, "/uses"),
        ({"peppers": {"sandbox": "1"}}, "/peppers/sandbox"),
        ({"reader": "a/b"}, "/reader"),
        ({"uses": [use("0" * 16, count=0)]}, "/uses/0/count"),
        ({"uses": [use("0" * 16, outcome="exposed_in_url")]}, "/uses/0/outcome"),
        ({"uses": [use("0" * 16, last_at="1999-01-01T00:00:00Z")]}, "/uses/0"),
        ({"uses": [use("0" * 16, first_at="0001-01-01T00:00:00Z")]}, "/uses/0"),
    ],
)
def test_invalid_report_is_refused(send: Send, fields: dict[str, Any], pointer: str) -> None:
    begin(send)
    response = report(send, **{"number": 1, **fields})
    assert (response.status_code, response.body["code"]) == (400, "request_invalid")
    assert pointer in {fault["pointer"] for fault in response.body["errors"]}


@pytest.mark.parametrize(
    "query",
    [{}, {"reader": ""}, {"reader": "r", "after": "-1"}, {"reader": "r", "wait": "99"}, {"reader": "r", "x": "1"}],
)
def test_invalid_query_is_refused(send: Send, query: dict[str, str]) -> None:
    assert send("GET", "/v1/changes", **query).body["code"] == "request_invalid"


def test_invalid_text_of_a_query_is_refused_with_what_is_accepted(send: Send) -> None:
    ids = "Use 1 to 100 key ids, of 16 letters and digits each, separated by commas."
    for path, query, detail in (
        ("changes", {"reader": "my reader"}, "Use 1 to 40 characters of A-Z, a-z, 0-9, '.', '_' and '-'."),
        ("changes", {"reader": "r", "after": "-1"}, "Use the `sequence` of the previous response, or omit it."),
        ("snapshot/keys", {"key_ids": "a b"}, ids),
    ):
        errors = send("GET", f"/v1/{path}", **query).body["errors"]
        assert errors == [{"pointer": f"/{list(query)[-1]}", "detail": detail}]


def test_secrets_in_reported_texts_are_redacted(send: Send) -> None:
    """Guarantee: a key in a reported user agent is not stored."""
    key, text = issue(account())
    begin(send)
    assert report(send, 1, [use(key.key_id, user_agent=f"shop {text.reveal()}")]).status_code == 200
    assert text.reveal() not in UseContext.objects.get(key_id=key.key_id).user_agent


def test_snapshot_has_rules_and_limits(send: Send) -> None:
    body = send("GET", "/v1/snapshot").body
    assert {"orders.create", "credentials.replacement"} <= {each["name"] for each in body["endpoints"]}
    assert body["limits"]["default"]["sandbox"] == {"count": 25, "seconds": 1}


def test_silent_readers_are_forgotten_after_an_hour(send: Send) -> None:
    for name in ("a", "b"):
        begin(send, name)
    FeedReader.objects.update(created_at=now() - timedelta(hours=2))
    Verifier.objects.filter(pk__endswith=".b").update(seen_at=now() - timedelta(hours=2))
    forget_old_readers(now())
    assert [row.pk.rpartition(".")[2] for row in FeedReader.objects.all()] == ["a"]
    assert [row.pk.rpartition(".")[2] for row in Verifier.objects.filter(stopped_at__isnull=True)] == ["a"]
    assert Change.objects.exists()


def test_reader_that_is_forgotten_while_it_reads_starts_again(send: Send, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: no reader that receipts no longer wait for goes on answering from memory."""
    after = begin(send)
    Verifier.objects.update(seen_at=now() - timedelta(hours=2))
    require_room = readers._require_room

    def forget(*arguments: Any) -> None:
        require_room(*arguments)
        forget_old_readers(now())

    monkeypatch.setattr(readers, "_require_room", forget)
    assert read(send, after).body["code"] == "cursor_expired"
