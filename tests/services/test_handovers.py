"""Keys inside wrapping tokens: opened by the right one, by a thief, by nobody; asked for again, and by two at once."""

from datetime import datetime, timedelta
from functools import partial
from typing import Any

import pytest
from django.db import IntegrityError, transaction
from django.test import override_settings

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import Operator, Service
from keyvault.backends.base import BackendMissingError, BackendUnavailableError, Wrapped
from keyvault.domain.environments import Environment
from keyvault.domain.errors import NotFoundError, RequestInvalidError, StateConflictError
from keyvault.domain.issuance import COLLECT_WITHIN, MOST_SUSPICIONS, Delivery, IssuanceState
from keyvault.domain.keys import KeyKind
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.plaintext import Plaintext
from keyvault.models import Account, BreakGlass, IssuanceRequest, Key, KeyUse, Material, Notice, WrappedHandover
from keyvault.models.recording import collect_subjects
from keyvault.services import collection, handovers, issuance, recording, upkeep, wrapping
from keyvault.services.handovers import confirm_handover, hand_over_wrapped, suspect_handover
from keyvault.services.keys import report_compromise
from keyvault.services.lookup import prove_service_token
from keyvault.services.wrapping import CONFIRM_WITHIN, WRAP_SECONDS
from tests.factories import account, approve, grant, issue_request, make_token, now, request_key

from .conftest import Scene, make_scene
from .racing import race
from .rows import dump_tables, last_ids, written_since
from .test_keys import verdict
from .wrappings import Wrappings, begin_wrapping

pytestmark = [pytest.mark.database, pytest.mark.django_db]

S = IssuanceState
OVER = timedelta(seconds=WRAP_SECONDS) + CONFIRM_WITHIN + timedelta(seconds=1)


@pytest.fixture
def wraps(db: None, monkeypatch: pytest.MonkeyPatch, settings: Any) -> Wrappings:
    return begin_wrapping(monkeypatch, settings)


def fresh(request: IssuanceRequest) -> IssuanceRequest:
    found = issuance.get_request(request.pk)
    assert found is not None
    return found


def issued(place: Account, *, by: Operator | Service | None = None, at: datetime | None = None) -> IssuanceRequest:
    request = request_key(place, delivery=Delivery.WRAPPED, by=by, at=at)
    if request.state == S.PENDING:
        approve(request, at=at)
    issue_request(request, at=at)
    return fresh(request)


def ask(request: IssuanceRequest, by: Operator | Service, at: datetime | None = None) -> Wrapped:
    return hand_over_wrapped(grant(by, P.ISSUANCE_COLLECT, request.account, at=at), request)


def confirm(request: IssuanceRequest, by: Operator | Service, key_id: str = "") -> IssuanceRequest:
    allowed = grant(by, P.ISSUANCE_COLLECT, request.account)
    return confirm_handover(allowed, request, key_id or request.key_id or "")


def suspect(request: IssuanceRequest, by: Operator | Service, key_id: str = "") -> str:
    allowed = grant(by, P.ISSUANCE_COLLECT, request.account)
    return suspect_handover(allowed, request, key_id or request.key_id or "")


def use(request: IssuanceRequest) -> None:
    KeyUse(key=request.key, first_at=now(), last_at=now(), count=1).save()


def alarms() -> list[dict[str, Any]]:
    found = Notice.objects.filter(kind=NoticeKind.HANDOVER_SUSPECTED, is_alarm=True).order_by("created_at")
    return [notice.payload for notice in found]


def a_service() -> Service:
    _, text = make_token(P.ISSUANCE_REQUEST, P.ISSUANCE_COLLECT)
    service = prove_service_token(text.reveal(), now())
    assert service is not None
    return service


# ---------------------------------------------------------------------------------------------------- asking


def test_handover_without_a_vault_is_not_to_be_had(scene: Scene) -> None:
    with pytest.raises(RequestInvalidError) as caught:
        request_key(scene.sandbox, delivery=Delivery.WRAPPED)
    assert [fault.pointer for fault in caught.value.faults] == ["/delivery"]


def test_handover_of_a_public_key_is_refused(scene: Scene, wraps: Wrappings) -> None:
    with pytest.raises(RequestInvalidError, match="cannot be made"):
        request_key(scene.sandbox, delivery=Delivery.WRAPPED, kind=KeyKind.PUBLIC)


# ----------------------------------------------------------------------------------------------- the right one


@pytest.mark.parametrize("environment", list(Environment))
def test_handover_opened_by_the_right_one_and_confirmed_is_collected(
    scene: Scene, wraps: Wrappings, environment: Environment
) -> None:
    """The key never passes through our answer, and our copy of it goes once its receiver has it."""
    request = issued(account("acme", environment))
    wrapped = ask(request, scene.tam)
    assert str(request.account.pk) in wrapped.creation_path
    assert fresh(request).state == S.ISSUED, "that it was handed over is no word of its receiver"
    text = wraps.open(wrapped.token)
    assert verdict(text, environment=environment) is None
    for _ in range(2):
        assert confirm(request, scene.tam).state == S.COLLECTED
    upkeep.destroy_due()
    assert Key.objects.get().material == Material.DESTROYED
    assert alarms() == []
    acts = BreakGlass.objects.filter(event="handover.wrapped", subject=request.pk, reviewed_at=None)
    assert acts.count() == (environment is Environment.PRODUCTION), "whoever has the token can open it"
    for secret in (text, wrapped.token):
        assert secret.reveal() not in repr(dump_tables())


def test_handover_leaves_one_entry_for_each_thing_that_happened(scene: Scene, wraps: Wrappings) -> None:
    request = issued(scene.sandbox)
    before = last_ids()
    ask(request, scene.tam)
    assert written_since(before)[0] == ["handover.wrapped"]
    before = last_ids()
    with pytest.raises(StateConflictError):
        ask(request, scene.tam)
    assert written_since(before) == (["issuance.handover_taken_back", "key.burned"], [("key", request.key_id)])
    again = remade(request)
    ask(again, scene.tam)
    before = last_ids()
    confirm(again, scene.tam)
    assert written_since(before)[0] == ["issuance.collected", "handover.confirmed"]


def test_handover_key_in_use_is_collected_without_a_word(scene: Scene, wraps: Wrappings) -> None:
    """Somebody has it; that it is the right one is still for them to say."""
    request = issued(scene.sandbox)
    wraps.open(ask(request, scene.tam).token)
    upkeep.suspect_due()
    assert fresh(request).state == S.ISSUED
    use(request)
    upkeep.suspect_due()
    assert (fresh(request).state, Key.objects.get().material) == (S.COLLECTED, Material.DESTROY_DUE)
    handover = WrappedHandover.objects.get()
    assert (handover.used_at is None, handover.confirmed_at) == (False, None)
    before = last_ids()
    upkeep.suspect_due()
    assert written_since(before) == ([], [])
    for _ in range(2):
        assert confirm(request, scene.tam).state == S.COLLECTED
    assert WrappedHandover.objects.get().confirmed_at is not None
    with pytest.raises(StateConflictError, match="No wrapping token"):
        suspect(request, scene.tam)
    assert alarms() == []


def test_handover_to_a_service_is_for_the_token_that_asked(scene: Scene, wraps: Wrappings) -> None:
    """Another service, and even the person behind the token, gets, confirms and ends nothing."""
    service, other = a_service(), a_service()
    request = issued(scene.sandbox, by=service)
    for stranger, refusal in ((other, NotFoundError), (scene.admin, StateConflictError)):
        for act in (ask, confirm, suspect):
            with pytest.raises(refusal):
                act(request, stranger)
    assert wraps.open(ask(request, service).token).reveal().startswith("kv_prv_")
    assert confirm(request, service).state == S.COLLECTED


def test_handover_of_a_production_key_to_a_service_is_no_break_glass(scene: Scene, wraps: Wrappings) -> None:
    service = a_service()
    ask(issued(scene.production, by=service), service)
    assert not BreakGlass.objects.filter(event="handover.wrapped").exists()


def test_handover_never_shows_the_key_itself(scene: Scene, wraps: Wrappings) -> None:
    """What was asked for wrapped is not collected in clear by another door."""
    request = issued(scene.sandbox)
    with pytest.raises(StateConflictError, match="wrapping token"):
        issuance.collect_key(grant(scene.tam, P.ISSUANCE_COLLECT, scene.sandbox), request)
    service = a_service()
    asked = issued(scene.sandbox, by=service)
    with pytest.raises(StateConflictError, match="wrapping token"):
        collection.read_handover(grant(service, P.ISSUANCE_COLLECT, scene.sandbox), asked)
    plain = request_key(scene.sandbox, delivery=Delivery.SHOW_ONCE)
    issue_request(plain)
    with pytest.raises(StateConflictError, match="not handed over"):
        ask(fresh(plain), scene.tam)


def test_handover_by_a_process_of_another_environment_is_refused(scene: Scene, wraps: Wrappings) -> None:
    request = issued(scene.sandbox)
    with override_settings(ENVIRONMENTS=("production",)), pytest.raises(NotFoundError):
        ask(request, scene.tam)


# ------------------------------------------------------------------------------------------------- asked again


def remade(request: IssuanceRequest) -> IssuanceRequest:
    """With the key that the worker makes in the place of one that was ended."""
    issue_request(fresh(request))
    return fresh(request)


@pytest.mark.parametrize("environment", list(Environment))
def test_handover_asked_again_ends_the_unopened_token_with_its_key(
    scene: Scene, wraps: Wrappings, environment: Environment
) -> None:
    """A lost token is no alarm. Its key is not handed over again: somebody may open the token that very moment."""
    request = issued(account("acme", environment))
    first = ask(request, scene.tam)
    text = wraps.unopened[first.accessor]
    with pytest.raises(StateConflictError, match="collect that one in a moment"):
        ask(request, scene.tam)
    with pytest.raises(BackendMissingError):
        wraps.open(first.token)
    assert verdict(text, environment=environment) is not None
    again = remade(request)
    assert again.key_id != request.key_id
    second = wraps.open(ask(again, scene.tam).token)
    assert second.reveal() != text.reveal()
    assert verdict(second, environment=environment) is None
    assert alarms() == []
    assert [row.revoked_at is None for row in WrappedHandover.objects.order_by("pk")] == [False, True]


def test_handover_taken_back_without_an_answer_is_no_alarm(
    scene: Scene, wraps: Wrappings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key is ended first: whether the server was told does not matter then, and nobody is suspected for it."""
    request = issued(scene.sandbox)
    first = ask(request, scene.tam)

    def unheard(*_: object) -> bool:
        raise BackendUnavailableError("The secrets manager does not answer.")

    with monkeypatch.context() as patch:
        patch.setattr(wraps, "revoke_wrapping", unheard)
        with pytest.raises(StateConflictError, match="in a moment"):
            ask(request, scene.tam)
    assert verdict(wraps.open(first.token)) is not None
    assert verdict(wraps.open(ask(remade(request), scene.tam).token)) is None
    assert alarms() == []


@pytest.mark.django_db(transaction=True)
def test_handover_asked_by_two_at_once_gives_one_token(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    """However many collect at once: at most one open handover, one token that opens, and no false alarm."""
    scene = make_scene()
    wraps = begin_wrapping(monkeypatch, settings)
    request = issued(scene.sandbox)

    def attempt() -> Wrapped | None:
        try:
            return ask(request, scene.tam)
        except StateConflictError:
            return None

    for _ in range(3):
        race(*[attempt] * 4)
        is_out = fresh(request).state == S.ISSUED and len(wraps.unopened) == 1
        assert WrappedHandover.objects.filter(wrapping._OPEN).count() == len(wraps.unopened) == is_out
        if fresh(request).state == S.APPROVED:
            issue_request(fresh(request))
    assert alarms() == []


def test_handover_has_one_open_token_by_the_database(scene: Scene, wraps: Wrappings) -> None:
    request = issued(scene.sandbox)
    ask(request, scene.tam)
    row = WrappedHandover.objects.get()
    with pytest.raises(IntegrityError), transaction.atomic(), collect_subjects():
        WrappedHandover(
            subject=row.subject,
            key=row.key,
            accessor="another",
            creation_path="",
            created_at=now(),
            expires_at=now() + timedelta(seconds=1),
        ).save()


def test_handover_killed_between_token_and_row_harms_nobody(
    scene: Scene, wraps: Wrappings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token that nobody was told opens nothing and expires by itself; the next try gives another one."""
    request = issued(scene.sandbox)

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(wrapping, "note_wrapped", die)
        with pytest.raises(KeyboardInterrupt):
            ask(request, scene.tam)
    assert not WrappedHandover.objects.exists()
    assert verdict(wraps.open(ask(request, scene.tam).token)) is None
    assert alarms() == []


# --------------------------------------------------------------------------------------------------- a thief


def stolen(request: IssuanceRequest, by: Operator, wraps: Wrappings) -> Plaintext:
    return wraps.open(ask(request, by).token)


@pytest.mark.parametrize("environment", list(Environment))
@pytest.mark.parametrize("noticed_by", ["asking again", "a word", "the sweep"])
def test_handover_opened_by_a_thief_is_an_alarm_and_the_key_is_made_anew(
    scene: Scene, wraps: Wrappings, environment: Environment, noticed_by: str
) -> None:
    """What somebody else may have is dead at once; the approval, given for the credential, makes another key."""
    at = now() - OVER if noticed_by == "the sweep" else now()
    request = issued(account("acme", environment), at=at)
    text = stolen(request, scene.tam, wraps)
    if noticed_by == "asking again":
        with pytest.raises(StateConflictError, match="interception"):
            ask(request, scene.tam)
    elif noticed_by == "a word":
        assert suspect(request, scene.tam) == handovers.SUSPECTED
    else:
        handover = WrappedHandover.objects.get()
        upkeep.suspect_due()
        assert fresh(request).state == S.ISSUED, "its time is not over yet"
        handovers.settle_handover(handover, handover.expires_at + CONFIRM_WITHIN)
    assert verdict(text, environment=environment) is not None
    again = fresh(request)
    assert (again.state, again.key, again.issued_at) == (S.APPROVED, None, None)
    (alarm,) = alarms()
    assert (alarm["is_burned"], alarm["is_minted_again"], alarm["key_id"]) == (True, True, request.key_id)
    issue_request(again)
    renewed = fresh(request)
    assert (renewed.state, renewed.credential_id) == (S.ISSUED, request.credential_id)
    assert renewed.key_id != request.key_id
    assert verdict(wraps.open(ask(renewed, scene.tam).token), environment=environment) is None
    assert confirm(renewed, scene.tam).state == S.COLLECTED
    assert len(alarms()) == 1


def test_handover_that_expired_unopened_counts_as_intercepted_too(scene: Scene, wraps: Wrappings) -> None:
    """Nobody can tell an expired token from an opened one."""
    request = issued(scene.sandbox)
    ask(request, scene.tam)
    wraps.expire()
    with pytest.raises(StateConflictError, match="interception"):
        ask(request, scene.tam)
    assert fresh(request).state == S.APPROVED


def test_handover_word_against_an_unopened_token_ends_nothing(scene: Scene, wraps: Wrappings) -> None:
    """A mistyped token is no interception: nobody has the key."""
    request = issued(scene.sandbox)
    wrapped = ask(request, scene.tam)
    with pytest.raises(StateConflictError, match="Nobody has opened"):
        suspect(request, scene.tam)
    assert verdict(wraps.open(wrapped.token)) is None


def test_handover_word_about_another_key_ends_nothing(scene: Scene, wraps: Wrappings) -> None:
    request = issued(scene.sandbox)
    stolen(request, scene.tam, wraps)
    for act in (confirm, suspect):
        with pytest.raises(StateConflictError, match="No wrapping token"):
            act(request, scene.tam, "A" * 16)
    assert fresh(request).state == S.ISSUED
    suspect(request, scene.tam)
    with pytest.raises(StateConflictError, match="No wrapping token"):
        confirm(request, scene.tam)


def test_handover_suspected_while_the_key_is_in_use_is_for_a_person(scene: Scene, wraps: Wrappings) -> None:
    """It may be the merchant: an alarm, and nobody is cut off."""
    request = issued(scene.sandbox)
    text = stolen(request, scene.tam, wraps)
    use(request)
    assert suspect(request, scene.tam) == handovers.SUSPECTED_IN_USE
    assert (fresh(request).state, verdict(text)) == (S.ISSUED, None)
    (alarm,) = alarms()
    assert (alarm["is_burned"], alarm["is_minted_again"]) == (False, False)
    with pytest.raises(StateConflictError, match="in use already"):
        ask(request, scene.tam)


@pytest.mark.parametrize("noticed_by", ["asking again", "a word"])
def test_handover_thief_who_uses_the_key_does_not_silence_the_alarm(
    scene: Scene, wraps: Wrappings, noticed_by: str
) -> None:
    """Use comes first, and may be a thief's: whoever finds the token gone is heard all the same, however late."""
    request = issued(scene.sandbox)
    stolen(request, scene.tam, wraps)
    use(request)
    upkeep.suspect_due()
    assert fresh(request).state == S.COLLECTED
    if noticed_by == "a word":
        assert suspect(request, scene.tam) == handovers.SUSPECTED_IN_USE
    else:
        with pytest.raises(StateConflictError, match="until a person decides"):
            ask(request, scene.tam)
    (alarm,) = alarms()
    assert (alarm["is_burned"], alarm["key_id"]) == (False, request.key_id)
    with pytest.raises(StateConflictError, match="collected already"):
        ask(request, scene.tam)
    assert len(alarms()) == 1


def test_handover_intercepted_again_and_again_is_given_up(scene: Scene, wraps: Wrappings) -> None:
    """Three keys are made anew; whoever takes the fourth as well is for people to find."""
    request = issued(scene.sandbox)
    for _ in range(MOST_SUSPICIONS):
        stolen(fresh(request), scene.tam, wraps)
        suspect(fresh(request), scene.tam)
        issue_request(fresh(request))
    stolen(fresh(request), scene.tam, wraps)
    assert suspect(fresh(request), scene.tam) == handovers.SUSPECTED_AGAIN
    assert fresh(request).state == S.BURNED
    assert [alarm["is_minted_again"] for alarm in alarms()] == [True] * 3 + [False]
    assert set(Key.objects.values_list("state", flat=True)) == {"deactivated"}


def test_handover_suspicion_killed_in_the_middle_is_found_again(
    scene: Scene, wraps: Wrappings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alarm, end and new beginning are one: a death in the middle leaves the request as it was."""
    request = issued(scene.sandbox)
    stolen(request, scene.tam, wraps)
    before = last_ids()

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(wrapping, "burn_key", die)
        with pytest.raises(KeyboardInterrupt):
            suspect(request, scene.tam)
    assert (written_since(before), alarms()) == (([], []), [])
    assert suspect(fresh(request), scene.tam) == handovers.SUSPECTED


@pytest.mark.parametrize("what", ["asking", "asking again", "confirming", "suspecting", "closing"])
def test_handover_whose_entry_cannot_be_written_changes_nothing(
    scene: Scene, wraps: Wrappings, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """As of every act: no audit entry, no change."""
    request = issued(scene.sandbox)
    if what != "asking":
        wrapped = ask(request, scene.tam)
    if what == "suspecting":
        wraps.open(wrapped.token)
    if what == "closing":
        report_compromise(grant(scene.admin, P.KEYS_REPORT_COMPROMISE, scene.sandbox), Key.objects.get())
    act = {"confirming": confirm, "suspecting": suspect}.get(what, ask)
    before = dump_tables()

    def fail(**_: object) -> None:
        raise OSError("the log is full")

    monkeypatch.setattr(recording, "append_entry", fail)
    with pytest.raises(OSError, match="the log is full"):
        upkeep.suspect_due() if what == "closing" else act(request, scene.tam)
    assert dump_tables() == before


# ---------------------------------------------------------------------------------------------- ended otherwise


def test_handover_never_asked_for_is_burned_after_three_days(scene: Scene, wraps: Wrappings) -> None:
    request = issued(scene.sandbox, at=now() - COLLECT_WITHIN)
    upkeep.burn_due()
    assert fresh(request).state == S.BURNED
    with pytest.raises(StateConflictError, match="not collected in time"):
        ask(fresh(request), scene.tam)


def test_handover_of_a_key_that_was_ended_is_closed_without_an_alarm(scene: Scene, wraps: Wrappings) -> None:
    request = issued(scene.sandbox)
    ask(request, scene.tam)
    assert request.key is not None
    report_compromise(grant(scene.admin, P.KEYS_REPORT_COMPROMISE, scene.sandbox), Key.objects.get())
    with pytest.raises(StateConflictError, match="gone"):
        ask(request, scene.tam)
    for _ in range(2):
        upkeep.suspect_due()
    assert WrappedHandover.objects.get().revoked_at is not None
    assert alarms() == []


@pytest.mark.django_db(transaction=True)
def test_handover_suspected_by_two_at_once_is_one_alarm(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    scene = make_scene()
    wraps = begin_wrapping(monkeypatch, settings)
    request = issued(scene.sandbox)
    stolen(request, scene.tam, wraps)

    def attempt() -> str:
        try:
            return suspect(request, scene.tam)
        except StateConflictError as error:
            return error.detail

    said = race(*[partial(attempt)] * 4)
    assert said.count(handovers.SUSPECTED) == 1
    assert len(alarms()) == 1
