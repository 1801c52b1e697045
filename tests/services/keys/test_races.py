"""Races on PostgreSQL: every pair of concurrent actions, many rounds each.

SQLite has one writer at a time; there, tests with stale copies prove the versioned updates that decide these races.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from django.db import connection, transaction
from django.test import override_settings

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER, KeyHolder, OperatorPrincipal
from keyvault.access.roles import Role
from keyvault.backends.base import Mount
from keyvault.domain.audit import CUSTOMER_TOKEN_SLOTS, customer_token_chains
from keyvault.domain.environments import Environment
from keyvault.domain.errors import KeyvaultError, StateConflictError
from keyvault.domain.keys import KeyKind
from keyvault.domain.revocation import RevocationReason
from keyvault.models import (
    Account,
    AuditChain,
    AuditEntry,
    BreakGlass,
    Credential,
    CustomerToken,
    IssuanceApproval,
    IssuanceRequest,
    Key,
    WorkLease,
)
from keyvault.services import maintenance
from keyvault.services.approvals.break_glass import review_break_glass
from keyvault.services.issuance import requests
from keyvault.services.keys import lifecycle
from keyvault.services.recording.audit_chain import AuditReport, verify_audit
from keyvault.services.recording.transaction import recorded
from keyvault.services.secrets.backend import secret_backend
from keyvault.services.secrets.stored_copies import read_string
from keyvault.services.tokens.customer_tokens import issue_customer_token
from keyvault.services.work import leases
from tests.factories import (
    SANDBOX,
    account,
    approve,
    grant,
    issue,
    make_merchant,
    make_operator,
    now,
    on_host,
    request_key,
)
from tests.services.conftest import Scene, make_scene
from tests.services.keys.test_lifecycle import verdict
from tests.services.racing import TIMEOUT_SECONDS, held_open, race, start, wait_until_blocked

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]

ROUNDS = 10


@pytest.fixture
def busy(transactional_db: None) -> Scene:
    return make_scene()


def reload_request(request: IssuanceRequest) -> IssuanceRequest:
    """Return the row as one of several concurrent callers read it."""
    found = requests.get_request(request.pk)
    assert found is not None
    return found


def reload_key(key: Key) -> Key:
    found = lifecycle.get_key(key.key_id)
    assert found is not None
    return found


def events_about(request: IssuanceRequest) -> list[str]:
    about = f'"issuance_request_id":"{request.pk}"'.encode()
    entries = AuditEntry.objects.filter(event__startswith="issuance.").order_by("id")
    return [entry.event for entry in entries if about in bytes(entry.body)]


# ------------------------------------------------------------------------------------------ decisions on a request


def test_race_of_two_approvals_records_one(busy: Scene) -> None:
    """One approval succeeds, the other gets a conflict; the log has one entry."""
    for _ in range(ROUNDS):
        request = request_key(busy.production)
        first, second = reload_request(request), reload_request(request)
        outcomes = race(
            partial(approve, first, by=busy.approver),
            partial(approve, second, by=busy.admin),
        )
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["IssuanceRequest", "StateConflictError"]
        assert reload_request(request).state == "approved"
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
def test_race_of_approval_with_a_terminal_decision_has_one_outcome(
    busy: Scene, against: Callable[[Scene, IssuanceRequest], object], state: str
) -> None:
    """Exactly one of approval and rejection, withdrawal or expiry takes effect: in state, approvals and log."""
    for number in range(ROUNDS):
        request = request_key(busy.production)
        first, second = reload_request(request), reload_request(request)
        calls: list[Callable[[], object]] = [
            partial(approve, first, by=busy.approver),
            partial(against, busy, second),
        ]
        outcomes = race(*calls[:: 1 if number % 2 else -1])
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["IssuanceRequest", "StateConflictError"]
        won = reload_request(request).state
        assert won in {"approved", state}
        assert IssuanceApproval.objects.filter(request=request).count() == (1 if won == "approved" else 0)
        assert events_about(request) == ["issuance.requested", f"issuance.{won}"]


@override_settings(APPROVALS_NEEDED={"sandbox": 0, "production": 2})
def test_race_of_approvals_by_two_logins_of_one_person_counts_once(busy: Scene) -> None:
    """Two logins of one person do not reach a threshold of two approvals."""
    second_login = make_operator("approver-second-login", Role.APPROVER, person=busy.approver.person)
    for _ in range(ROUNDS):
        request = request_key(busy.production)
        race(*[_approval(request, operator) for operator in (busy.approver, second_login)])
        assert IssuanceApproval.objects.filter(request=request).count() == 1
        assert reload_request(request).state == "pending"


def _approval(request: IssuanceRequest, operator: OperatorPrincipal) -> Callable[[], object]:
    copy = reload_request(request)
    return lambda: approve(copy, by=operator)


@override_settings(APPROVALS_NEEDED={"sandbox": 0, "production": 2})
def test_race_of_two_needed_approvals_records_one_and_needs_a_retry(busy: Scene) -> None:
    """One approver gets a conflict; the request is approved only when that approver retries."""
    for _ in range(ROUNDS):
        request = request_key(busy.production)
        outcomes = race(*[_approval(request, operator) for operator in (busy.approver, busy.admin)])
        succeeded = [outcome for outcome in outcomes if isinstance(outcome, IssuanceRequest)]
        assert len(succeeded) == IssuanceApproval.objects.filter(request=request).count() == 1
        assert reload_request(request).state == "pending"
        late = busy.admin if isinstance(outcomes[0], IssuanceRequest) else busy.approver
        assert approve(reload_request(request), by=late).state == "approved"


def test_race_of_reviews_of_a_claimed_approval_by_two_logins_of_one_person_counts_once(busy: Scene) -> None:
    """Two concurrent logins are not the two other persons; the second other person closes the action."""
    third = make_operator("third", Role.APPROVER)
    logins = (busy.admin, make_operator("admin-second-login", Role.APPROVER, person=busy.admin.person))
    for _ in range(ROUNDS):
        request = request_key(busy.production)
        approve(request, by=on_host(busy.approver))
        reviews = [_review(request, operator) for operator in (*logins, *logins)]
        outcomes = race(*reviews)
        assert sorted(str(type(outcome).__name__) for outcome in outcomes) == ["NoneType", *["StateConflictError"] * 3]
        act = BreakGlass.objects.get(subject=request.pk)
        assert (act.first_reviewer_person, act.reviewed_at) == (busy.admin.person, None)
        _review(request, third)()
        assert BreakGlass.objects.get(subject=request.pk).reviewer_person == third.person


def _review(request: IssuanceRequest, operator: OperatorPrincipal) -> Callable[[], object]:
    allowed = grant(operator, P.BREAK_GLASS_REVIEW, requester_person=request.requester_person)
    return partial(review_break_glass, allowed, BreakGlass.objects.get(subject=request.pk))


# ------------------------------------------------------------------------------------------------ issuing and keys


def test_race_of_two_workers_on_one_request_makes_one_active_key(busy: Scene) -> None:
    """One worker claims the request; one key is active."""
    for _ in range(ROUNDS):
        request = request_key(busy.sandbox)
        copies = reload_request(request), reload_request(request)
        outcomes = race(*[partial(maintenance.issue_one, copy) for copy in copies])
        assert sorted(outcomes) == [False, True]
        assert_one_active_key(request)


def test_race_of_a_worker_without_lease_and_its_successor_makes_one_active_key(busy: Scene) -> None:
    """A worker whose lease expired races with its successor: one key is active, and it is the stored one."""
    for _ in range(ROUNDS):
        request = request_key(busy.sandbox)
        subject = f"issuance:{request.pk}"
        expired, successor = leases.claim(subject, now()), leases.claim(subject, now() + leases.LEASE)
        assert expired is not None
        assert successor is not None
        outcomes = race(*[_issuing(request, lease) for lease in (expired, successor)])
        assert all(isinstance(outcome, Key | KeyvaultError) for outcome in outcomes), outcomes
        assert not isinstance(outcomes[0], Key), "the lost lease recorded an outcome"
        if not isinstance(outcomes[1], Key):
            # The string of the first worker was in the way: the next attempt continues with what is stored.
            WorkLease.objects.filter(subject=subject).update(until=None, due_at=None)
            assert maintenance.issue_one(reload_request(request))
        assert_one_active_key(request)


def _issuing(request: IssuanceRequest, lease: leases.Lease) -> Callable[[], object]:
    copy = reload_request(request)
    return lambda: requests.issue_approved(copy, lease, now())


def assert_one_active_key(request: IssuanceRequest) -> None:
    issued = reload_request(request)
    assert (issued.state, issued.credential is not None) == ("issued", True)
    rows = Key.objects.filter(credential=issued.credential)
    assert sorted(set(rows.values_list("state", flat=True))) in (["active"], ["active", "destroyed"])
    active = rows.get(state="active")
    assert issued.key == active
    stored = secret_backend().read(Mount.SANDBOX, active.credential.backend_path)
    assert stored.labels["key_id"] == active.key_id
    assert verdict(read_string(active)) is None


def _engine(place: Account) -> Any:
    return grant(WORKER, P.ISSUANCE_EXECUTE, place)


def test_race_of_revocation_with_activation_revokes_the_key(busy: Scene) -> None:
    """A manual revocation takes precedence: whichever commits first, the key is revoked and the revocation succeeds."""
    key, _ = issue(busy.sandbox)
    for _ in range(ROUNDS):
        staged, text = lifecycle.stage_key(_engine(busy.sandbox), key.credential, expires_in_days=None)
        first, second = reload_key(staged), reload_key(staged)
        allowed = grant(busy.responder, P.KEYS_REVOKE, busy.sandbox)
        revoked, activated = race(
            partial(lifecycle.revoke_key, allowed, second, RevocationReason.SUPERSEDED),
            partial(lifecycle.activate_key, _engine(busy.sandbox), first),
        )
        assert not isinstance(revoked, Exception), revoked
        assert activated is None or isinstance(activated, StateConflictError)
        assert reload_key(staged).state in {"destroyed", "deactivated"}
        assert verdict(text) is not None


def test_race_of_revocation_with_suspension_revokes_the_key(busy: Scene) -> None:
    """A concurrent suspension does not make the revocation fail."""
    for _ in range(ROUNDS):
        key, _ = issue(busy.sandbox)
        first, second = reload_key(key), reload_key(key)
        allowed = grant(busy.responder, P.KEYS_REVOKE, busy.sandbox)
        revoked, _ = race(
            partial(lifecycle.revoke_key, allowed, second, RevocationReason.KEY_COMPROMISE),
            partial(_suspend, busy, first),
        )
        assert not isinstance(revoked, Exception), revoked
        assert reload_key(key).state == "compromised"


def test_race_of_two_activations_leaves_two_active_keys(busy: Scene) -> None:
    """At most two keys of a credential verify, also when two are activated concurrently beside a third."""
    for _ in range(ROUNDS):
        key, _ = issue(busy.sandbox)
        staged = [lifecycle.stage_key(_engine(busy.sandbox), key.credential, expires_in_days=None)[0] for _ in range(2)]
        outcomes = race(*[partial(lifecycle.activate_key, _engine(busy.sandbox), reload_key(one)) for one in staged])
        assert Key.objects.filter(credential=key.credential, state="active").count() == 2
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["NoneType", "StateConflictError"]


# ------------------------------------------------------------------------------------------------- the audit chains


def _suspend(scene: Scene, key: Key) -> object:
    return lifecycle.suspend_key(grant(scene.admin, P.KEYS_SUSPEND, key.credential.account), key)


@pytest.mark.parametrize("place", ["acme/production", "globex/sandbox"])
def test_race_of_writers_on_different_accounts_does_not_block(busy: Scene, place: str) -> None:
    """An open transaction that holds one account's chain blocks no other account, not even of the same merchant."""
    make_merchant("globex")
    busy_key, _ = issue(busy.sandbox)
    merchant_id, environment = place.split("/")
    other_key, _ = issue(account(merchant_id, Environment(environment)))
    for number in range(ROUNDS):
        write = _resume if number % 2 else _suspend
        with held_open(partial(write, busy, reload_key(busy_key))):
            with transaction.atomic():
                with connection.cursor() as cursor:
                    cursor.execute("SET LOCAL lock_timeout = '5s'")
                write(busy, reload_key(other_key))
            assert reload_key(busy_key).state != reload_key(other_key).state, "the held transaction committed early"
    assert verify_audit().first_broken is None


def _resume(scene: Scene, key: Key) -> object:
    return lifecycle.resume_key(grant(scene.admin, P.KEYS_RESUME, key.credential.account), key)


def test_race_of_writers_on_one_account_is_serialized(busy: Scene) -> None:
    """The second writer waits for the first one's commit, and its entry's hash includes the first one's."""
    first, _ = issue(busy.sandbox)
    second, _ = issue(busy.sandbox)
    chain = AuditChain.objects.get(name="account:acme/sandbox")
    with held_open(lambda: _suspend(busy, reload_key(first))):
        waiting = start(lambda: _suspend(busy, reload_key(second)))
        wait_until_blocked(waiting)
        assert AuditChain.objects.get(pk=chain.pk).sequence == chain.sequence
    waiting.result(TIMEOUT_SECONDS)
    assert AuditChain.objects.get(pk=chain.pk).sequence == chain.sequence + 2
    assert verify_audit().first_broken is None


def test_race_of_customer_tokens_of_one_account_does_not_wait(busy: Scene) -> None:
    """Each open transaction holds an audit chain of its own, and only one more than there are chains waits."""
    key, _ = issue(busy.sandbox)
    with ExitStack() as open_transactions:
        for _ in range(CUSTOMER_TOKEN_SLOTS - 1):
            open_transactions.enter_context(held_open(lambda: _issue_token(busy, key)))
        open_transactions.enter_context(held_open(lambda: _suspend(busy, reload_key(key))))
        start(lambda: _issue_token(busy, key)).result(TIMEOUT_SECONDS)
        assert CustomerToken.objects.count() == 1, "a held transaction committed early"
        with held_open(lambda: _issue_token(busy, key)):
            waiting = start(lambda: _issue_token(busy, key))
            wait_until_blocked(waiting)
    waiting.result(TIMEOUT_SECONDS)
    chains = AuditEntry.objects.filter(event="customer_token.issued").values_list("chain_id", flat=True)
    assert set(chains) == set(customer_token_chains("account:acme/sandbox"))
    assert verify_audit() == AuditReport(AuditEntry.objects.count(), None)


def _issue_token(scene: Scene, key: Key) -> object:
    holder = KeyHolder(key.key_id, key.credential_id, KeyKind.PRIVATE, SANDBOX, "acme")
    allowed = grant(holder, P.CUSTOMER_TOKENS_WRITE, scene.sandbox)
    return issue_customer_token(allowed, scene.sandbox, key, customer_id="alice")


def test_race_of_nested_blocks_over_several_chains_does_not_deadlock(busy: Scene) -> None:
    """Chains are locked last and in the order of their names, in whichever order the blocks were opened."""
    make_merchant("globex")
    places = [account("acme"), account("globex"), None]
    before = AuditEntry.objects.count()

    def write(order: int) -> None:
        rotated = places[order % 3 :] + places[: order % 3]
        for _ in range(ROUNDS):
            _nested(busy, rotated[:: 1 if order % 2 else -1])

    outcomes = race(*[partial(write, order) for order in range(6)])
    assert outcomes == [None] * 6
    assert AuditEntry.objects.count() == before + 6 * ROUNDS * len(places)
    assert verify_audit().first_broken is None


def _nested(scene: Scene, places: list[Account | None]) -> None:
    """Open a block on the first account, and inside it one on each of the others."""
    allowed = grant(scene.admin, P.MERCHANTS_WRITE, places[0])
    with recorded(allowed, P.MERCHANTS_WRITE, "test.nested", account=places[0]):
        if places[1:]:
            _nested(scene, places[1:])


def test_race_of_many_requests_on_one_account_keeps_the_chain_intact(busy: Scene) -> None:
    """No request is lost, no thread blocks forever, and the chain verifies."""
    before = AuditEntry.objects.count()

    def request_keys() -> None:
        for _ in range(ROUNDS):
            request_key(busy.production, by=busy.tam)

    assert race(*[request_keys] * 4) == [None] * 4
    assert IssuanceRequest.objects.count() == 4 * ROUNDS
    assert AuditEntry.objects.count() == before + 4 * ROUNDS
    assert Credential.objects.count() == 0
    assert verify_audit().first_broken is None
