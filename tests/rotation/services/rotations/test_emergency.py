"""A leaked key is revoked immediately, by one person, during any outage; its replacement is a separate concern."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, transaction

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER, OperatorPrincipal
from keyvault.access.roles import Role
from keyvault.backends.local import LocalKeystore
from keyvault.domain.environments import Environment
from keyvault.domain.errors import PermissionMissingError, RequestInvalidError
from keyvault.domain.keys import KeyState
from keyvault.models import AuditEntry, Credential, Key, Notice
from keyvault.services.keys import lifecycle
from keyvault.services.keys.lifecycle import suspend_key
from keyvault.services.recording.authorization import authorize
from keyvault.services.usage.recorder import UsageLog
from rotation.domain.events import RotationState as S
from rotation.models import Rotation
from rotation.services.rotations import emergency
from rotation.services.rotations.emergency import CompromiseResponse, respond_to_compromise, respond_to_leak
from rotation.services.rotations.interventions import hold_quarantine
from rotation.services.rotations.reports import get_rotation
from rotation.services.rotations.requests import approve_rotation
from tests.clocks import Clock
from tests.domain.minting import mint
from tests.factories import make_operator, the_operator
from tests.rotation import scene
from tests.rotation.steps import advance, begun, key_states, overlapping, quarantined

pytestmark = pytest.mark.django_db

PRODUCTION = Environment.PRODUCTION


def responder() -> OperatorPrincipal:
    return the_operator("responder", Role.INCIDENT_RESPONDER)


def report(key: Key, clock: Clock, *, replace: bool = True, by: OperatorPrincipal | None = None) -> CompromiseResponse:
    grant = authorize(by or responder(), P.KEYS_REPORT_COMPROMISE, key.credential.account, now=clock())
    return respond_to_compromise(grant, key, reason="seen in a\npublic gist", replace=replace)


def leaked(
    clock: Clock, *presented: str, replace: bool = False, by: OperatorPrincipal | None = None
) -> list[CompromiseResponse]:
    return respond_to_leak(by or responder(), presented, reason="a dump", replace=replace, now=clock())


def state_of(key: Key) -> str:
    return str(Key.objects.get(pk=key.pk).state)


@contextmanager
def all_dependencies_down() -> Iterator[None]:
    """Make the secret backend unavailable, and fail the test when a message is sent to the broker."""

    def send(*_: object, **__: object) -> None:
        raise AssertionError("a message was sent")

    with pytest.MonkeyPatch.context() as outage:
        for name in ("put", "read", "versions", "destroy"):
            outage.setattr(LocalKeystore, name, scene.unavailable)
        outage.setattr("celery.app.task.Task.apply_async", send)
        outage.setattr("celery.app.base.Celery.send_task", send)
        yield


# ------------------------------------------------------------------------------------------------------ one key


@pytest.mark.database
def test_compromise_revokes_and_requests_the_replacement_of_the_last_key(clock: Clock, verifier: UsageLog) -> None:
    key, _ = scene.first_key(clock())
    response = report(key, clock)
    assert (response.state, response.fault, response.no_replacement) == (KeyState.COMPROMISED, "", "")
    assert response.sequence == lifecycle.last_sequence(Key.objects.get(pk=key.pk))
    assert response.rotation_id is not None
    rotation = get_rotation(response.rotation_id)
    assert (rotation.state, rotation.approved_plan.reason) == (S.EMERGENCY, "seen in a public gist")
    rotation = advance(rotation, clock, 3)
    assert (rotation.state, key_states(rotation)) == (S.COMPLETED, ("compromised", "active"))


@pytest.mark.database
@pytest.mark.parametrize("environment", Environment)
def test_compromise_during_an_outage_revokes_and_the_new_key_follows(
    clock: Clock, verifier: UsageLog, environment: Environment
) -> None:
    """One responder suffices with the secret backend and the broker down; the new key waits for both."""
    key, _ = scene.first_key(clock(), environment=environment)
    with all_dependencies_down():
        response = report(key, clock)
        assert state_of(key) == "compromised"
        assert response.rotation_id is not None
        rotation = get_rotation(response.rotation_id)
        assert (rotation.state, rotation.replacement) == (S.EMERGENCY, None)
        assert advance(rotation, clock, 3).state == S.EMERGENCY
    if environment is PRODUCTION:
        allowed = authorize(scene.approver(), P.ROTATIONS_APPROVE, key.credential.account, now=clock())
        assert advance(rotation, clock, 60).replacement is None
        approve_rotation(allowed, get_rotation(rotation.rotation_id), rotation.plan_digest)
    assert key_states(advance(rotation, clock, 60)) == ("compromised", "active")


def test_compromise_without_replace_requests_nothing(clock: Clock) -> None:
    key, _ = scene.first_key(clock())
    response = report(key, clock, replace=False)
    assert (response.rotation_id, response.no_replacement) == (None, "")
    assert not Rotation.objects.exists()


def test_compromise_repeated_answers_the_same(clock: Clock) -> None:
    """The answer and the rotation are the same: nothing is requested twice."""
    key, _ = scene.first_key(clock())
    assert report(key, clock) == report(key, clock)
    assert Rotation.objects.count() == 1


def test_compromise_without_permission_for_rotations_still_revokes(clock: Clock) -> None:
    """Requesting a replacement takes its own permission; the revocation does not."""
    key, _ = scene.first_key(clock())
    grant = authorize(responder(), P.KEYS_REPORT_COMPROMISE, key.credential.account, now=clock())
    with pytest.MonkeyPatch.context() as lesser:
        lesser.setattr(emergency, "authorize", _refusing)
        response = respond_to_compromise(grant, key, replace=True)
    assert state_of(key) == "compromised"
    assert (response.rotation_id, response.no_replacement) == (None, "This requires the permission rotations:write.")


def _refusing(*_: object, **__: object) -> None:
    raise PermissionMissingError("This requires the permission rotations:write.")


@pytest.mark.parametrize("fault", [OperationalError("disk full"), RuntimeError("a bug"), ConnectionError("away")])
def test_compromise_whose_replacement_request_fails_stands(
    clock: Clock, fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key is revoked whatever happens to the replacement, and the reporter learns both."""
    key, _ = scene.first_key(clock())

    def fail(*_: object) -> None:
        raise fault

    monkeypatch.setattr(emergency, "reissue_key", fail)
    response = report(key, clock)
    assert (state_of(key), response.state) == ("compromised", KeyState.COMPROMISED)
    assert "The request failed" in response.no_replacement


@pytest.mark.database
@pytest.mark.django_db(transaction=True)
def test_compromise_inside_a_transaction_is_refused(clock: Clock) -> None:
    """A caller cannot wrap the revocation into a transaction that is rolled back."""
    key, _ = scene.first_key(clock())
    with pytest.raises(RuntimeError, match="durable"), transaction.atomic():
        report(key, clock)


def test_compromise_without_permission_to_revoke_is_refused(clock: Clock) -> None:
    key, _ = scene.first_key(clock())
    wrong = authorize(responder(), P.KEYS_READ, key.credential.account, now=clock())
    with pytest.raises(PermissionMissingError):
        respond_to_compromise(wrong, key, replace=True)
    assert state_of(key) == "active"


# ------------------------------------------------------------------------------------- beside another key or rotation


def test_compromise_of_a_key_with_a_waiting_rotation_makes_it_an_emergency(clock: Clock, verifier: UsageLog) -> None:
    rotation = advance(begun(clock, not_before=scene.later(clock(), 86_400)), clock)
    response = report(rotation.predecessor, clock)
    assert (response.rotation_id, response.no_replacement) == (rotation.rotation_id, "")
    assert advance(rotation, clock).replacement is not None, "it was woken, and waits for no window"
    assert Rotation.objects.count() == 1


def test_compromise_of_the_predecessor_beside_a_good_replacement_continues(clock: Clock, verifier: UsageLog) -> None:
    rotation = overlapping(clock, verifier)
    response = report(rotation.predecessor, clock)
    assert (response.rotation_id, response.no_replacement) == (rotation.rotation_id, "")
    assert advance(rotation, clock, 3).state == S.COMPLETED


def test_compromise_of_the_replacement_beside_a_good_predecessor_requests_none(
    clock: Clock, verifier: UsageLog
) -> None:
    rotation = overlapping(clock, verifier)
    assert rotation.replacement is not None
    response = report(rotation.replacement, clock)
    assert (response.rotation_id, response.no_replacement) == (None, "The credential has another usable key.")
    assert advance(rotation, clock, 3).state == S.CANCELLED
    assert state_of(rotation.predecessor) == "active"


def test_compromise_of_the_replacement_in_quarantine_names_the_open_rotation(clock: Clock, verifier: UsageLog) -> None:
    rotation = quarantined(clock, verifier)
    assert rotation.replacement is not None
    response = report(rotation.replacement, clock)
    assert response.rotation_id is None
    assert response.no_replacement.startswith(f"Rotation {rotation.rotation_id} ends by itself first.")
    assert advance(rotation, clock, 3).state == S.CANCELLED
    assert state_of(rotation.predecessor) == "active"


def test_compromise_beside_a_held_key_names_the_release_that_it_needs(clock: Clock, verifier: UsageLog) -> None:
    """A rotation whose key is held does not end by itself."""
    rotation = quarantined(clock, verifier)
    grant = authorize(scene.tam(), P.KEYS_SUSPEND, rotation.credential.account, now=clock())
    hold_quarantine(grant, get_rotation(rotation.rotation_id), "the merchant investigates")
    assert rotation.replacement is not None
    response = report(rotation.replacement, clock)
    assert "Release the held key first." in response.no_replacement
    assert "ends by itself" not in response.no_replacement
    assert advance(rotation, clock, 3).state == S.QUARANTINE


def test_compromise_beside_a_suspended_key_explains_why_none_is_requested(clock: Clock) -> None:
    """An operator may resume the suspended key, so no third key is created."""
    key, _ = scene.first_key(clock())
    engine = authorize(scene.admin(), P.KEYS_SUSPEND, key.credential.account, now=clock())
    other = _second(key, clock)
    suspend_key(engine, other)
    response = report(key, clock)
    assert state_of(key) == "compromised"
    assert "suspended" in response.no_replacement


def _second(key: Key, clock: Clock) -> Key:
    worker = authorize(WORKER, P.ISSUANCE_EXECUTE, key.credential.account, now=clock())
    second, _ = lifecycle.stage_key(worker, key.credential, expires_in_days=None)
    lifecycle.activate_key(worker, second)
    return second


# ------------------------------------------------------------------------------------------------------ many keys


def test_leak_revokes_every_key_and_answers_in_order(clock: Clock) -> None:
    """Key ids and whole keys are accepted; an unknown or malformed entry delays no other."""
    made = [scene.first_key(clock(), environment=place) for place in (*Environment, Environment.SANDBOX)]
    unknown = "0" * 16
    presented = [made[0][0].key_id, unknown, made[1][1].reveal(), "ghp_sekrit", f" {made[2][0].key_id} ", ""]
    responses = leaked(clock, *presented, made[0][0].key_id)
    assert [response.key_id for response in responses] == [
        made[0][0].key_id,
        unknown,
        made[1][0].key_id,
        "no. 4",
        made[2][0].key_id,
    ]
    assert [bool(response.fault) for response in responses] == [False, True, False, True, False]
    assert {state_of(key) for key, _ in made} == {"compromised"}
    assert "sekrit" not in repr(responses)
    assert AuditEntry.objects.filter(event="key.compromised").count() == 3


def test_leak_requests_replacements_after_all_revocations(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step of a replacement precedes the last revocation."""
    made = [scene.first_key(clock())[0] for _ in range(3)]
    order: list[str] = []
    for name in ("report_compromise", "reissue_key"):
        monkeypatch.setattr(emergency, name, _noting(order, name, getattr(emergency, name)))
    responses = leaked(clock, *(key.key_id for key in made), replace=True)
    assert order == ["report_compromise"] * 3 + ["reissue_key"] * 3
    assert len({response.rotation_id for response in responses}) == 3


def _noting(order: list[str], name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*arguments: Any, **options: Any) -> Any:
        order.append(name)
        return real(*arguments, **options)

    return noted


def test_leak_of_both_keys_of_a_credential_requests_one_replacement(clock: Clock) -> None:
    key, _ = scene.first_key(clock())
    second = _second(key, clock)
    responses = leaked(clock, key.key_id, second.key_id, replace=True)
    assert len({response.rotation_id for response in responses}) == 1
    assert None not in {response.rotation_id for response in responses}
    assert Rotation.objects.get().state == S.EMERGENCY
    assert Notice.objects.filter(kind="credential.without_key").count() == 1


@pytest.mark.database
def test_leak_during_an_outage_revokes_every_key(clock: Clock) -> None:
    made = [scene.first_key(clock(), environment=PRODUCTION)[0] for _ in range(2)]
    with all_dependencies_down():
        responses = leaked(clock, *(key.key_id for key in made), replace=True)
    assert {state_of(key) for key in made} == {"compromised"}
    assert None not in {response.rotation_id for response in responses}


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_leak_in_which_one_key_fails_revokes_the_others(
    clock: Clock, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each key has its own transaction: a database error affects that key only and is reported."""
    made = [scene.first_key(clock())[0] for _ in range(3)]
    real = lifecycle.report_compromise

    def report_or_fail(grant: Any, key: Key, **options: Any) -> Any:
        if key.pk == made[failing].pk:
            raise OperationalError("deadlock detected")
        return real(grant, key, **options)

    monkeypatch.setattr(emergency, "report_compromise", report_or_fail)
    responses = leaked(clock, *(key.key_id for key in made))
    assert [bool(response.fault) for response in responses] == [number == failing for number in range(3)]
    assert [state_of(key) for key in made].count("compromised") == 2


@pytest.mark.database
def test_leak_interrupted_keeps_its_revocations_and_is_repeatable(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after the k-th key, k keys stay revoked, and the same report revokes the rest."""
    made = [scene.first_key(clock())[0] for _ in range(3)]
    real, calls = lifecycle.report_compromise, iter(range(2))

    def report_or_die(*arguments: Any, **options: Any) -> Any:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    with monkeypatch.context() as killed:
        killed.setattr(emergency, "report_compromise", report_or_die)
        with pytest.raises(KeyboardInterrupt):
            leaked(clock, *(key.key_id for key in made))
    assert [state_of(key) for key in made] == ["compromised", "compromised", "active"]
    leaked(clock, *(key.key_id for key in made))
    assert {state_of(key) for key in made} == {"compromised"}


@pytest.mark.parametrize("count", [0, 501])
def test_leak_of_none_or_too_many_is_refused(clock: Clock, count: int) -> None:
    with pytest.raises(RequestInvalidError) as refused:
        leaked(clock, *(f"{number:016}" for number in range(count)))
    assert refused.value.faults[0].detail == "1 to 500 keys"


def test_leak_reported_without_permission_revokes_nothing(clock: Clock) -> None:
    key, _ = scene.first_key(clock())
    auditor = make_operator("auditor", Role.AUDITOR)
    (response,) = leaked(clock, key.key_id, by=auditor)
    assert response.fault == (
        "This requires the permission keys:report_compromise."
        " Roles that have it: incident_responder, key_administrator."
    )
    assert state_of(key) == "active"


def test_leak_of_a_key_string_with_a_wrong_checksum_is_not_looked_up(clock: Clock) -> None:
    """A text that is not one of the service's keys is neither looked up nor repeated."""
    (response,) = leaked(clock, mint()[:-1] + "?")
    assert response == CompromiseResponse("no. 1", fault="This is neither a key id nor a whole key.")


def test_leak_leaves_the_credential_itself(clock: Clock) -> None:
    key, _ = scene.first_key(clock())
    leaked(clock, key.key_id)
    clock.now += timedelta(days=1)
    assert Credential.objects.get().keys.count() == 1
