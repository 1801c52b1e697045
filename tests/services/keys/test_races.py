"""Real concurrency on PostgreSQL: every pair of acts that may meet, let go at the same moment, many times over.

SQLite has one writer at a time; there the versioned updates that decide these races are proved by stale copies
(`test_issuance`, `test_keys`, `models/test_recording`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from django.db import connection, transaction
from django.test import override_settings

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER, OperatorPrincipal
from keyvault.access.roles import Role
from keyvault.backends.base import Mount
from keyvault.domain.environments import Environment
from keyvault.domain.errors import KeyvaultError, StateConflictError
from keyvault.domain.revocation import RevocationReason
from keyvault.models import (
    Account,
    AuditChain,
    AuditEntry,
    Credential,
    IssuanceApproval,
    IssuanceRequest,
    Key,
    WorkLease,
)
from keyvault.services import maintenance
from keyvault.services.issuance import requests
from keyvault.services.keys import lifecycle
from keyvault.services.recording.audit_chain import verify_audit
from keyvault.services.recording.transaction import recorded
from keyvault.services.secrets.backend import secret_backend
from keyvault.services.secrets.stored_copies import read_string
from keyvault.services.work import leases
from tests.factories import account, approve, grant, issue, make_merchant, make_operator, now, request_key
from tests.services.conftest import Scene, make_scene
from tests.services.keys.test_lifecycle import verdict
from tests.services.racing import PATIENCE_SECONDS, held_open, race, start, wait_until_blocked

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]

ROUNDS = 20


@pytest.fixture
def busy(transactional_db: None) -> Scene:
    return make_scene()


def copy_of(request: IssuanceRequest) -> IssuanceRequest:
    """What each of those who decide at once has on the screen."""
    found = requests.get_request(request.pk)
    assert found is not None
    return found


def key_copy(key: Key) -> Key:
    found = lifecycle.get_key(key.key_id)
    assert found is not None
    return found


def events_about(request: IssuanceRequest) -> list[str]:
    about = f'"request_id":"{request.pk}"'.encode()
    entries = AuditEntry.objects.filter(event__startswith="issuance.").order_by("id")
    return [entry.event for entry in entries if about in bytes(entry.body)]


# ------------------------------------------------------------------------------------------ deciding about a request


def test_race_of_two_approvals_has_one_effect(busy: Scene) -> None:
    """Two approvers at once: one approves, the other is told to look again; one approval, one entry."""
    for _ in range(ROUNDS):
        request = request_key(busy.production)
        first, second = copy_of(request), copy_of(request)
        outcomes = race(
            partial(approve, first, by=busy.approver),
            partial(approve, second, by=busy.admin),
        )
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["IssuanceRequest", "StateConflictError"]
        assert copy_of(request).state == "approved"
        assert IssuanceApproval.objects.filter(request=request).count() == 1
        assert events_about(request) == ["issuance.requested", "issuance.approved"]


def _reject(scene: Scene, request: IssuanceRequest) -> object:
    return requests.reject_issuance(grant(scene.admin, P.ISSUANCE_REJECT, request.account), request, "no")


def _withdraw(scene: Scene, request: IssuanceRequest) -> object:
    return requests.withdraw_issuance(grant(scene.tam, P.ISSUANCE_WITHDRAW, request.account), request)


def _expire(scene: Scene, request: IssuanceRequest) -> object:
    allowed = grant(WORKER, P.ISSUANCE_EXECUTE, request.account, at=request.expires_at)
    return requests.expire_issuance(allowed, request)


@pytest.mark.parametrize(("against", "state"), [(_reject, "rejected"), (_withdraw, "withdrawn"), (_expire, "expired")])
def test_race_of_approval_against_an_end_has_one_effect(
    busy: Scene, against: Callable[[Scene, IssuanceRequest], object], state: str
) -> None:
    """Approve meets reject, withdraw or expire: exactly one of the two happens, in state, approvals and log alike."""
    for number in range(ROUNDS):
        request = request_key(busy.production)
        first, second = copy_of(request), copy_of(request)
        calls: list[Callable[[], object]] = [
            partial(approve, first, by=busy.approver),
            partial(against, busy, second),
        ]
        outcomes = race(*calls[:: 1 if number % 2 else -1])
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["IssuanceRequest", "StateConflictError"]
        won = copy_of(request).state
        assert won in {"approved", state}
        assert IssuanceApproval.objects.filter(request=request).count() == (1 if won == "approved" else 0)
        assert events_about(request) == ["issuance.requested", f"issuance.{won}"]


@override_settings(APPROVALS_NEEDED={"sandbox": 0, "production": 2})
def test_race_of_one_person_s_two_log_ins_counts_once(busy: Scene) -> None:
    """The same person approving by two log-ins at once is one person, and not enough where two are needed."""
    too = make_operator("approver-too", Role.APPROVER, person=busy.approver.person)
    for _ in range(ROUNDS):
        request = request_key(busy.production)
        race(*[_approval(request, operator) for operator in (busy.approver, too)])
        assert IssuanceApproval.objects.filter(request=request).count() == 1
        assert copy_of(request).state == "pending"


def _approval(request: IssuanceRequest, operator: OperatorPrincipal) -> Callable[[], object]:
    copy = copy_of(request)
    return lambda: approve(copy, by=operator)


@override_settings(APPROVALS_NEEDED={"sandbox": 0, "production": 2})
def test_race_of_the_two_approvals_needed_loses_none_and_passes_none_early(busy: Scene) -> None:
    """Where two are needed, one of two at once is told to look again; only its second try makes it approved."""
    for _ in range(ROUNDS):
        request = request_key(busy.production)
        outcomes = race(*[_approval(request, operator) for operator in (busy.approver, busy.admin)])
        done = [outcome for outcome in outcomes if isinstance(outcome, IssuanceRequest)]
        assert len(done) == IssuanceApproval.objects.filter(request=request).count() == 1
        assert copy_of(request).state == "pending"
        late = busy.admin if isinstance(outcomes[0], IssuanceRequest) else busy.approver
        assert approve(copy_of(request), by=late).state == "approved"


# ------------------------------------------------------------------------------------------------ issuing and keys


def test_race_of_two_workers_on_one_request_makes_one_good_key(busy: Scene) -> None:
    """Two workers that were woken for the same request: one works, and one key is good."""
    for _ in range(ROUNDS):
        request = request_key(busy.sandbox)
        copies = copy_of(request), copy_of(request)
        outcomes = race(*[partial(maintenance.issue_one, copy) for copy in copies])
        assert sorted(outcomes) == [False, True]
        expect_one_good_key(request)


def test_race_of_an_overtaken_worker_with_its_successor_makes_one_good_key(busy: Scene) -> None:
    """A worker whose lease ran out and its successor, both at full speed: one key is good, and is the one stored."""
    for _ in range(ROUNDS):
        request = request_key(busy.sandbox)
        subject = f"issuance:{request.pk}"
        overtaken, successor = leases.claim(subject, now()), leases.claim(subject, now() + leases.LEASE)
        assert overtaken is not None
        assert successor is not None
        outcomes = race(*[_issuing(request, lease) for lease in (overtaken, successor)])
        assert all(isinstance(outcome, Key | KeyvaultError) for outcome in outcomes), outcomes
        assert not isinstance(outcomes[0], Key), "the lost lease recorded an outcome"
        if not isinstance(outcomes[1], Key):
            # The overtaken one's string was in the way: the next try goes on from what is stored.
            WorkLease.objects.filter(subject=subject).update(until=None, due_at=None)
            assert maintenance.issue_one(copy_of(request))
        expect_one_good_key(request)


def _issuing(request: IssuanceRequest, lease: leases.Lease) -> Callable[[], object]:
    copy = copy_of(request)
    return lambda: requests.issue_approved(copy, lease, now())


def expect_one_good_key(request: IssuanceRequest) -> None:
    issued = copy_of(request)
    assert (issued.state, issued.credential is not None) == ("issued", True)
    rows = Key.objects.filter(credential=issued.credential)
    assert sorted(set(rows.values_list("state", flat=True))) in (["active"], ["active", "destroyed"])
    good = rows.get(state="active")
    assert issued.key == good
    stored = secret_backend().read(Mount.SANDBOX, good.credential.backend_path)
    assert stored.labels["key_id"] == good.key_id
    assert verdict(read_string(good)) is None


def _engine(place: Account) -> Any:
    return grant(WORKER, P.ISSUANCE_EXECUTE, place)


def test_race_of_revocation_with_activation_ends_the_key(busy: Scene) -> None:
    """A manual revocation always wins: whichever comes first, the key is dead afterwards and the revoker is told so."""
    key, _ = issue(busy.sandbox)
    for _ in range(ROUNDS):
        staged, text = lifecycle.stage_key(_engine(busy.sandbox), key.credential, expires_in_days=None)
        first, second = key_copy(staged), key_copy(staged)
        allowed = grant(busy.responder, P.KEYS_REVOKE, busy.sandbox)
        revoked, activated = race(
            partial(lifecycle.revoke_key, allowed, second, RevocationReason.SUPERSEDED),
            partial(lifecycle.activate_key, _engine(busy.sandbox), first),
        )
        assert not isinstance(revoked, Exception), revoked
        assert activated is None or isinstance(activated, StateConflictError)
        assert key_copy(staged).state in {"destroyed", "deactivated"}
        assert verdict(text) is not None


def test_race_of_revocation_with_suspension_ends_the_key(busy: Scene) -> None:
    """Nor does it fail because somebody suspended or resumed the key in the same moment."""
    for _ in range(ROUNDS):
        key, _ = issue(busy.sandbox)
        first, second = key_copy(key), key_copy(key)
        allowed = grant(busy.responder, P.KEYS_REVOKE, busy.sandbox)
        revoked, _ = race(
            partial(lifecycle.revoke_key, allowed, second, RevocationReason.KEY_COMPROMISE),
            partial(_suspend, busy, first),
        )
        assert not isinstance(revoked, Exception), revoked
        assert key_copy(key).state == "compromised"


def test_race_of_two_activations_leaves_two_verifying(busy: Scene) -> None:
    """At most two keys of a credential verify, also when two are activated beside one in the same moment."""
    for _ in range(ROUNDS):
        key, _ = issue(busy.sandbox)
        staged = [lifecycle.stage_key(_engine(busy.sandbox), key.credential, expires_in_days=None)[0] for _ in range(2)]
        outcomes = race(*[partial(lifecycle.activate_key, _engine(busy.sandbox), key_copy(one)) for one in staged])
        assert Key.objects.filter(credential=key.credential, state="active").count() == 2
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["NoneType", "StateConflictError"]


# ------------------------------------------------------------------------------------------------- the audit chains


def _suspend(scene: Scene, key: Key) -> object:
    return lifecycle.suspend_key(grant(scene.admin, P.KEYS_SUSPEND, key.credential.account), key)


@pytest.mark.parametrize("place", ["acme/production", "globex/sandbox"])
def test_race_of_writers_on_different_accounts_do_not_wait(busy: Scene, place: str) -> None:
    """One account's open transaction, its chain locked, holds up no other account, not even of the same merchant."""
    make_merchant("globex")
    busy_key, _ = issue(busy.sandbox)
    merchant_id, environment = place.split("/")
    other_key, _ = issue(account(merchant_id, Environment(environment)))
    for number in range(ROUNDS):
        act = _resume if number % 2 else _suspend
        with held_open(partial(act, busy, key_copy(busy_key))):
            with transaction.atomic():
                with connection.cursor() as cursor:
                    cursor.execute("SET LOCAL lock_timeout = '5s'")
                act(busy, key_copy(other_key))
            assert key_copy(busy_key).state != key_copy(other_key).state, "the other one had not committed"
    assert verify_audit().first_broken is None


def _resume(scene: Scene, key: Key) -> object:
    return lifecycle.resume_key(grant(scene.admin, P.KEYS_RESUME, key.credential.account), key)


def test_race_of_writers_on_one_account_take_turns(busy: Scene) -> None:
    """Two writers of one chain: the second waits for the first's commit, and its entry leans on the first's."""
    first, _ = issue(busy.sandbox)
    second, _ = issue(busy.sandbox)
    chain = AuditChain.objects.get(name="account:acme/sandbox")
    with held_open(lambda: _suspend(busy, key_copy(first))):
        waiting = start(lambda: _suspend(busy, key_copy(second)))
        wait_until_blocked(waiting)
        assert AuditChain.objects.get(pk=chain.pk).sequence == chain.sequence
    waiting.result(PATIENCE_SECONDS)
    assert AuditChain.objects.get(pk=chain.pk).sequence == chain.sequence + 2
    assert verify_audit().first_broken is None


def test_race_of_nested_blocks_over_several_chains_never_deadlocks(busy: Scene) -> None:
    """Chains are locked last and in the order of their names, whatever order the blocks were opened in."""
    make_merchant("globex")
    places = [account("acme"), account("globex"), None]
    before = AuditEntry.objects.count()

    def write(order: int) -> None:
        turned = places[order % 3 :] + places[: order % 3]
        for _ in range(ROUNDS):
            _nested(busy, turned[:: 1 if order % 2 else -1])

    outcomes = race(*[partial(write, order) for order in range(6)])
    assert outcomes == [None] * 6
    assert AuditEntry.objects.count() == before + 6 * ROUNDS * len(places)
    assert verify_audit().first_broken is None


def _nested(scene: Scene, places: list[Account | None]) -> None:
    """A block on the first place, and inside it one on each of the others."""
    allowed = grant(scene.admin, P.MERCHANTS_WRITE, places[0])
    with recorded(allowed, P.MERCHANTS_WRITE, "test.nested", account=places[0]):
        if places[1:]:
            _nested(scene, places[1:])


def test_race_of_many_requests_on_one_account_keeps_the_chain_whole(busy: Scene) -> None:
    """Everything at once on one account: nothing is lost, nothing waits for ever, the chain is whole."""
    before = AuditEntry.objects.count()

    def ask() -> None:
        for _ in range(ROUNDS):
            request_key(busy.production, by=busy.tam)

    assert race(*[ask] * 4) == [None] * 4
    assert IssuanceRequest.objects.count() == 4 * ROUNDS
    assert AuditEntry.objects.count() == before + 4 * ROUNDS
    assert Credential.objects.count() == 0
    assert verify_audit().first_broken is None
