"""Issuance with a second person's approval: every transition of a request, and every refused one."""

from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import pytest
from django.db import IntegrityError, transaction
from django.db.models import QuerySet
from django.test import override_settings

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER, Channel, OperatorPrincipal
from keyvault.access.roles import Role
from keyvault.backends.base import (
    BackendConflictError,
    BackendMissingError,
    BackendUnavailableError,
    Mount,
    VersionState,
)
from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode, PermissionMissingError, RequestInvalidError, StateConflictError
from keyvault.domain.issuance import COLLECT_WITHIN, REQUEST_LIFETIME, Delivery, IssuanceState, can_transition_issuance
from keyvault.domain.keys import KeyKind
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.revocation import RevocationReason
from keyvault.models import Account, BreakGlass, Credential, IssuanceApproval, IssuanceRequest, Key, WorkLease
from keyvault.models.keys import Material
from keyvault.services import maintenance
from keyvault.services.issuance import collection, requests
from keyvault.services.keys.lifecycle import revoke_key
from keyvault.services.secrets import stored_copies
from keyvault.services.secrets.backend import secret_backend
from keyvault.services.secrets.stored_copies import ForeignWriterError, read_string
from keyvault.services.work import leases
from tests.domain.minting import mint
from tests.factories import (
    PRODUCTION,
    SANDBOX,
    account,
    approve,
    grant,
    issue,
    issue_request,
    make_merchant,
    make_operator,
    now,
    request_key,
)
from tests.killing import KilledError
from tests.services.conftest import Scene, make_scene
from tests.services.keys.test_lifecycle import verdict
from tests.services.racing import race
from tests.services.rows import changed_tables, disable_triggers, dump_tables, events_of, last_body

pytestmark = pytest.mark.django_db

S = IssuanceState


def fresh(request: IssuanceRequest) -> IssuanceRequest:
    found = requests.get_request(request.pk)
    assert found is not None
    return found


def versions_of(credential: Credential) -> list[tuple[int, str]]:
    """Return version and state of each stored copy of a credential's key, oldest first."""
    mount = Mount(credential.account.environment)
    return [(v.version, v.state.value) for v in secret_backend().versions(mount, credential.backend_path)]


def collect(scene: Scene, request: IssuanceRequest) -> Plaintext:
    return requests.collect_key(grant(scene.tam, P.ISSUANCE_COLLECT, request.account), request)


# ---------------------------------------------------------------------------------------------------- lifecycle


@pytest.mark.database
@pytest.mark.parametrize("kind", list(KeyKind))
def test_issuance_in_production_needs_a_second_person_and_ends_with_one_collection(scene: Scene, kind: KeyKind) -> None:
    """Requested, approved by another person, issued, collected once; the key verifies from its issuance."""
    request = request_key(scene.production, kind=kind)
    assert (request.state, request.approvals_needed) == (S.PENDING, 1)
    approve(request)
    assert request.state == S.APPROVED
    key = issue_request(request)
    assert (request.state, key.state, key.material) == (S.ISSUED, "active", Material.HELD)
    text = collect(scene, request)
    assert request.state == S.COLLECTED
    assert text.reveal().split("_")[1] == {KeyKind.PUBLIC: "pub", KeyKind.PRIVATE: "prv"}[kind]
    assert Key.objects.filter(credential=key.credential).count() == 1
    if kind is KeyKind.PRIVATE:
        assert verdict(text, environment=PRODUCTION) is None
    events = events_of("account:acme/production")
    assert [event for event in events if event.startswith("issuance.")] == [
        "issuance.requested",
        "issuance.approved",
        "issuance.staged",
        "issuance.issued",
        "issuance.collected",
    ]


def test_issuance_in_sandbox_is_approved_on_request(scene: Scene) -> None:
    """Sandbox requires no second person; the request records when it was decided."""
    request = request_key(scene.sandbox)
    assert (request.state, request.approvals_needed, request.decided_at) == (S.APPROVED, 0, request.created_at)
    issue_request(request)
    assert verdict(collect(scene, request)) is None


def test_issuance_creates_the_requested_key(scene: Scene) -> None:
    request = request_key(
        scene.sandbox, kind=KeyKind.PUBLIC, label="app 3", delivery=Delivery.SHOW_ONCE, expires_in_days=30
    )
    key = issue_request(request)
    credential = Credential.objects.get(pk=key.credential_id)
    assert (credential.kind, credential.label, credential.delivery) == ("public", "app 3", "show_once")
    assert credential.account == scene.sandbox
    assert key.expires_at == key.created_at + timedelta(days=30)


def test_issuance_stores_the_string_under_internal_ids(scene: Scene) -> None:
    """Listing the backend's paths reveals no merchant name; labels name the key of each version."""
    key, text = issue(scene.sandbox)
    path = key.credential.backend_path
    assert path == f"{scene.sandbox.pk}/{key.credential_id}"
    stored = secret_backend().read(Mount.SANDBOX, path)
    assert stored.secret.reveal() == text.reveal()
    assert stored.labels["key_id"] == key.key_id
    assert "acme" not in path + repr(dict(stored.labels))


def test_issuance_stores_each_environment_in_its_own_mount(scene: Scene) -> None:
    key, _ = issue(scene.production)
    with pytest.raises(BackendMissingError):
        secret_backend().read(Mount.SANDBOX, key.credential.backend_path)


# --------------------------------------------------------------------------------------------- every refused transition


def _reject(scene: Scene, request: IssuanceRequest) -> object:
    return requests.reject_issuance(grant(scene.approver, P.ISSUANCE_REJECT, request.account), request, "no")


def _withdraw(scene: Scene, request: IssuanceRequest) -> object:
    return requests.withdraw_issuance(grant(scene.tam, P.ISSUANCE_WITHDRAW, request.account), request)


def _expire(scene: Scene, request: IssuanceRequest) -> object:
    allowed = grant(WORKER, P.ISSUANCE_EXECUTE, request.account, at=request.expires_at)
    return requests.expire_issuance(allowed, request)


def _discard(scene: Scene, request: IssuanceRequest) -> None:
    at = (request.issued_at or now()) + COLLECT_WITHIN
    collection.discard_uncollected(grant(WORKER, P.ISSUANCE_EXECUTE, request.account, at=at), request)


TRANSITIONS: dict[str, tuple[IssuanceState, Callable[[Scene, IssuanceRequest], object]]] = {
    "approve": (S.APPROVED, lambda scene, request: approve(request, by=scene.approver)),
    "reject": (S.REJECTED, _reject),
    "withdraw": (S.WITHDRAWN, _withdraw),
    "expire": (S.EXPIRED, _expire),
    "issue": (S.ISSUED, lambda _, request: issue_request(request)),
    "collect": (S.COLLECTED, collect),
    "discard": (S.BURNED, _discard),
}


def in_state(scene: Scene, state: IssuanceState) -> IssuanceRequest:
    request = request_key(scene.production, delivery=Delivery.SHOW_ONCE)
    before = {
        S.PENDING: [],
        S.APPROVED: ["approve"],
        S.REJECTED: ["reject"],
        S.WITHDRAWN: ["withdraw"],
        S.EXPIRED: ["expire"],
        S.ISSUED: ["approve", "issue"],
        S.COLLECTED: ["approve", "issue", "collect"],
        S.BURNED: ["approve", "issue", "discard"],
    }
    for transition in before[state]:
        TRANSITIONS[transition][1](scene, request)
    assert request.state == state
    return request


@pytest.mark.parametrize("state", list(IssuanceState))
def test_issuance_from_each_state_follows_the_transition_table(
    scene: Scene, state: IssuanceState, subtests: pytest.Subtests
) -> None:
    """A refused transition changes no row."""
    for name, (to, transition) in TRANSITIONS.items():
        request = in_state(scene, state)
        with subtests.test(name):
            # Back to approved only when the key is created again, which no caller requests.
            if can_transition_issuance(state, to) and (state, to) != (S.ISSUED, S.APPROVED):
                transition(scene, request)
                assert fresh(request).state == to
            else:
                assert_refused_without_change(partial(transition, scene, request))


def assert_refused_without_change(transition: Callable[[], object]) -> None:
    before = dump_tables()
    with pytest.raises(StateConflictError):
        transition()
    assert changed_tables(before, dump_tables()) <= {"keyvault_worklease"}


def test_issuance_expired_request_is_not_approved_before_the_sweep(scene: Scene) -> None:
    """The clock decides, not the sweep."""
    request = request_key(scene.production)
    with pytest.raises(StateConflictError, match="has expired"):
        approve(request, at=request.expires_at)
    assert fresh(request).state == S.PENDING


@pytest.mark.database
def test_issuance_request_expired_before_its_time_is_refused(scene: Scene) -> None:
    request = request_key(scene.production)
    at = request.created_at + REQUEST_LIFETIME - timedelta(microseconds=1)
    with pytest.raises(StateConflictError, match="has not expired"):
        requests.expire_issuance(grant(WORKER, P.ISSUANCE_EXECUTE, scene.production, at=at), request)


@pytest.mark.parametrize(
    ("options", "pointer"),
    [
        ({"label": ""}, "/label"),
        ({"label": "x" * 101}, "/label"),
        ({"label": "a\nb"}, "/label"),
        ({"label": "a\x00b"}, "/label"),
        ({"label": f"checkout {mint()}"}, "/label"),
        ({"expires_in_days": 0}, "/expires_in_days"),
        ({"expires_in_days": 3651}, "/expires_in_days"),
        ({"delivery": Delivery.SEALED}, "/delivery"),
    ],
)
def test_issuance_with_invalid_options_is_refused(scene: Scene, options: dict[str, Any], pointer: str) -> None:
    with pytest.raises(RequestInvalidError) as caught:
        request_key(scene.sandbox, **options)
    assert [fault.pointer for fault in caught.value.faults] == [pointer]


# ------------------------------------------------------------------------------------------------------ second person


def test_issuance_requester_gets_no_grant_to_approve(scene: Scene) -> None:
    """The requester's roles do not matter."""
    request = request_key(scene.production, by=scene.admin)
    with pytest.raises(StateConflictError, match="second person"):
        grant(scene.admin, P.ISSUANCE_APPROVE, scene.production, request.requester_person)


def test_issuance_second_login_of_the_requester_gets_no_grant_to_approve(scene: Scene) -> None:
    """The comparison is by person, not by login."""
    second_login = make_operator("admin-second-login", Role.KEY_ADMINISTRATOR, person=scene.admin.person)
    request = request_key(scene.production, by=scene.admin)
    with pytest.raises(StateConflictError, match="second person"):
        grant(second_login, P.ISSUANCE_APPROVE, scene.production, request.requester_person)


@pytest.mark.parametrize("granted_for", ["no requester", "another requester"])
def test_issuance_approved_by_the_requester_with_a_grant_for_another_is_refused(scene: Scene, granted_for: str) -> None:
    """A grant for another requester, or for none, does not allow a requester to approve their own request."""
    request = request_key(scene.production, by=scene.admin)
    person = None if granted_for == "no requester" else scene.tam.person
    misplaced = grant(scene.admin, P.ISSUANCE_APPROVE, scene.production, person)
    assert_refused_without_change(lambda: requests.approve_issuance(misplaced, request, request.plan_digest))


@pytest.mark.database
def test_issuance_approved_by_the_requester_is_refused_by_the_database(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trigger refuses what a service failed to compare."""
    request = request_key(scene.production, by=scene.admin)
    misplaced = grant(scene.admin, P.ISSUANCE_APPROVE, scene.production)
    monkeypatch.setattr(request, "requester_person", "per_somebody")
    with pytest.raises(IntegrityError, match="the requester cannot approve the request"), transaction.atomic():
        requests.approve_issuance(misplaced, request, request.plan_digest)
    assert not IssuanceApproval.objects.exists()


@override_settings(APPROVALS_NEEDED={"sandbox": 0, "production": 2})
def test_issuance_that_needs_two_approvals_counts_each_person_once(scene: Scene) -> None:
    """A second approval by the same person is refused, under any login."""
    second_login = make_operator("approver-second-login", Role.APPROVER, person=scene.approver.person)
    request = request_key(scene.production)
    approve(request, by=scene.approver)
    assert request.state == S.PENDING
    for again in (scene.approver, second_login):
        with pytest.raises(StateConflictError, match="Another person"):
            approve(fresh(request), by=again)
    assert fresh(request).state == S.PENDING
    assert approve(fresh(request), by=scene.admin).state == S.APPROVED


@override_settings(APPROVALS_NEEDED={"sandbox": 0, "production": 0})
def test_issuance_in_production_needs_an_approval_whatever_the_setting(scene: Scene) -> None:
    assert request_key(scene.production).state == S.PENDING


@override_settings(APPROVALS_NEEDED={"sandbox": 1, "production": 1})
def test_issuance_in_sandbox_needs_an_approval_if_configured(scene: Scene) -> None:
    assert request_key(scene.sandbox).state == S.PENDING


def test_issuance_approved_with_another_digest_is_refused(scene: Scene) -> None:
    """An approval is bound to the plan that the approver saw."""
    request, other = request_key(scene.production), request_key(scene.production, label="other")
    allowed = grant(scene.approver, P.ISSUANCE_APPROVE, scene.production, request.requester_person)
    for digest in (other.plan_digest, "", "0" * 64):
        with pytest.raises(StateConflictError, match="not what you were shown"):
            requests.approve_issuance(allowed, request, digest)
    assert fresh(request).state == S.PENDING


@pytest.mark.database
@pytest.mark.postgres_once
@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "public"},
        {"label": "more"},
        {"delivery": "secret_backend"},
        {"delivery": "sealed", "recipient_public_key": "A" * 43},
        {"expires_in_days": 3650},
    ],
    ids=lambda changes: " and ".join(changes),
)
@pytest.mark.parametrize("state", [S.PENDING, S.APPROVED])
def test_issuance_altered_without_triggers_is_neither_approved_nor_issued(
    scene: Scene, state: IssuanceState, changes: dict[str, object]
) -> None:
    """An attacker who drops the triggers and alters the request is stopped by the plan digest."""
    request = in_state(scene, state)
    disable_triggers()
    update_without_guard(request, **changes)
    with pytest.raises(StateConflictError):
        approve(fresh(request)) if state is S.PENDING else issue_request(fresh(request))
    assert fresh(request).state == state
    assert not Key.objects.exists()


def update_without_guard(request: IssuanceRequest, **changes: object) -> None:
    QuerySet(IssuanceRequest).filter(pk=request.pk).update(**changes)


def test_issuance_collected_by_the_approver_is_refused(scene: Scene) -> None:
    """Only the requester collects, with the permission to collect."""
    request = in_state(scene, S.ISSUED)
    with pytest.raises(PermissionMissingError):
        grant(scene.approver, P.ISSUANCE_COLLECT, scene.production)
    with pytest.raises(StateConflictError, match="Only the person who"):
        requests.collect_key(grant(scene.admin, P.ISSUANCE_COLLECT, scene.production), request)
    assert fresh(request).state == S.ISSUED


def test_issuance_withdrawn_by_another_person_is_refused(scene: Scene) -> None:
    """Others may reject; only the requester withdraws."""
    request = request_key(scene.production)
    with pytest.raises(StateConflictError, match="Only the person who"):
        requests.withdraw_issuance(grant(scene.admin, P.ISSUANCE_WITHDRAW, scene.production), request)


@pytest.mark.parametrize(
    ("role", "allowed"),
    [
        (Role.KEY_ADMINISTRATOR, {P.ISSUANCE_REQUEST, P.ISSUANCE_APPROVE, P.ISSUANCE_REJECT, P.ISSUANCE_COLLECT}),
        (Role.TECHNICAL_ACCOUNT_MANAGER, {P.ISSUANCE_REQUEST, P.ISSUANCE_COLLECT}),
        (Role.APPROVER, {P.ISSUANCE_APPROVE, P.ISSUANCE_REJECT}),
        (Role.AUDITOR, set()),
        (Role.INCIDENT_RESPONDER, set()),
    ],
)
def test_issuance_grants_follow_the_role(scene: Scene, role: Role, allowed: set[P]) -> None:
    operator = make_operator("operator", role)
    checked = {P.ISSUANCE_REQUEST, P.ISSUANCE_APPROVE, P.ISSUANCE_REJECT, P.ISSUANCE_COLLECT, P.ISSUANCE_EXECUTE}
    assert {permission for permission in checked if is_granted(operator, permission, scene.production)} == allowed


def is_granted(operator: OperatorPrincipal, permission: P, place: Account) -> bool:
    try:
        grant(operator, permission, place, "per_other")
    except PermissionMissingError:
        return False
    return True


# ------------------------------------------------------------------------------------------------------ collecting


def test_issuance_collected_twice_is_refused(scene: Scene) -> None:
    request = in_state(scene, S.COLLECTED)
    with pytest.raises(StateConflictError, match="collected already"):
        collect(scene, fresh(request))


def test_issuance_shown_once_destroys_the_stored_copy(scene: Scene) -> None:
    """After the sweep the backend holds nothing readable."""
    request = request_key(scene.sandbox, delivery=Delivery.SHOW_ONCE)
    key = issue_request(request)
    text = collect(scene, request)
    maintenance.destroy_due()
    key = Key.objects.get(pk=key.pk)
    assert key.material == Material.DESTROYED
    assert versions_of(key.credential) == [(1, VersionState.DESTROYED.value)]
    assert verdict(text) is None, "destroying the copy must not revoke the key"


@pytest.mark.parametrize(
    ("delivery", "kind"), [(Delivery.SECRET_BACKEND, KeyKind.PRIVATE), (Delivery.SHOW_ONCE, KeyKind.PUBLIC)]
)
def test_issuance_copy_that_can_be_read_again_is_kept(scene: Scene, delivery: Delivery, kind: KeyKind) -> None:
    request = request_key(scene.sandbox, delivery=delivery, kind=kind)
    key = issue_request(request)
    text = collect(scene, request)
    maintenance.destroy_due()
    assert read_string(Key.objects.get(pk=key.pk)).reveal() == text.reveal()


def test_issuance_collected_in_production_is_recorded_as_break_glass(scene: Scene) -> None:
    """A production key shown to a person stays listed until it is reviewed; in sandbox it does not."""
    request = in_state(scene, S.COLLECTED)
    bypass = BreakGlass.objects.get()
    assert (bypass.event, bypass.subject, bypass.person) == ("issuance.collected", request.pk, scene.tam.person)
    sandbox = request_key(scene.sandbox)
    issue_request(sandbox)
    collect(scene, sandbox)
    assert BreakGlass.objects.count() == 1


@pytest.mark.parametrize("environment", list(Environment))
def test_issuance_approved_on_the_command_line_is_break_glass_in_production(
    scene: Scene, environment: Environment
) -> None:
    """The command line proves no identity."""
    shell = make_operator("shell", Role.APPROVER, channel=Channel.COMMAND_LINE, host_user="root")
    with override_settings(APPROVALS_NEEDED={"sandbox": 1, "production": 1}):
        request = request_key(account("acme", environment))
    approve(request, by=shell)
    noted = list(BreakGlass.objects.values_list("event", "subject", "host_user"))
    expected = [("issuance.approved", request.pk, "root")] if environment is PRODUCTION else []
    assert noted == expected
    assert last_body("issuance.approved")["details"]["host_user"] == "root"


def test_issuance_collected_after_the_key_was_revoked_is_refused(scene: Scene) -> None:
    request = in_state(scene, S.ISSUED)
    assert request.key is not None
    allowed = grant(scene.responder, P.KEYS_REVOKE, scene.production)
    revoke_key(allowed, request.key, RevocationReason.SUPERSEDED)
    with pytest.raises(BackendMissingError):
        collect(scene, fresh(request))


@pytest.mark.database
@pytest.mark.django_db(transaction=True)
def test_issuance_collected_by_eight_concurrent_callers_succeeds_once() -> None:
    scene = make_scene()
    for _ in range(3):
        request = request_key(scene.sandbox)
        issue_request(request)
        copies = [fresh(request) for _ in range(8)]
        outcomes = race(*[partial(collect, scene, copy) for copy in copies])
        collected = [outcome for outcome in outcomes if isinstance(outcome, Plaintext)]
        others = [outcome for outcome in outcomes if not isinstance(outcome, Plaintext)]
        assert len(collected) == 1
        assert {type(outcome) for outcome in others} == {StateConflictError}


# ---------------------------------------------------------------------------------------------- killed in process


def _lease_of(request: IssuanceRequest, at: datetime) -> leases.Lease:
    lease = leases.claim(f"issuance:{request.pk}", at)
    assert lease is not None
    return lease


def _run_killed(request: IssuanceRequest, kill_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a worker that is killed midway and keeps its lease."""
    real = getattr(requests, kill_at.split(" ")[1])

    def killed(*args: Any, **kwargs: Any) -> Any:
        if kill_at.startswith("after"):
            real(*args, **kwargs)
        raise KilledError

    lease = _lease_of(request, now())
    with monkeypatch.context() as patch:
        patch.setattr(requests, kill_at.split(" ")[1], killed)
        with pytest.raises(KilledError):
            requests.issue_approved(request, lease, now())


KILLS = {
    "before _stage": 0,
    "after _stage": 1,
    "after store_string": 0,
    "before note_stored": 0,
    "before activate_key": 0,
    "after activate_key": 0,
}
"""Where the worker is killed, and the number of staged keys discarded for it."""


@pytest.mark.database
@pytest.mark.parametrize("kill_at", KILLS)
def test_issuance_killed_midway_is_completed_with_one_active_key(
    scene: Scene, kill_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next worker leaves exactly one active key; staged ones are destroyed."""
    request = request_key(scene.sandbox)
    _run_killed(request, kill_at, monkeypatch)
    key = issue_request(fresh(request), at=now() + leases.LEASE)
    assert key.credential.requests.get().state == S.ISSUED
    states = sorted(Key.objects.filter(credential=key.credential).values_list("state", flat=True))
    assert states == ["active"] + ["destroyed"] * KILLS[kill_at]
    assert Credential.objects.count() == 1
    assert versions_of(key.credential) == [(1, "live")]
    assert secret_backend().read(Mount.SANDBOX, key.credential.backend_path).labels["key_id"] == key.key_id
    assert verdict(read_string(key)) is None


@pytest.mark.database
@pytest.mark.parametrize(
    "kills",
    [
        ("after _stage", "after _stage"),
        ("after _stage", "after store_string"),
        ("after store_string", "before note_stored"),
    ],
    ids=" then ".join,
)
def test_issuance_killed_twice_is_completed_with_one_active_key(
    scene: Scene, kills: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_key(scene.sandbox)
    for kill_at in kills:
        _run_killed(fresh(request), kill_at, monkeypatch)
        expire_leases()
    key = issue_request(fresh(request))
    assert [row.key_id for row in Key.objects.filter(state="active")] == [key.key_id]
    assert not Key.objects.filter(state="pre_activation").exists()
    assert secret_backend().read(Mount.SANDBOX, key.credential.backend_path).labels["key_id"] == key.key_id
    assert versions_of(key.credential) == [(1, "live")]


def expire_leases() -> None:
    """Expire every lease."""
    WorkLease.objects.update(until=None, due_at=None)


@pytest.mark.database
@pytest.mark.parametrize("step", ["_stage", "store_string"])
def test_issuance_by_a_worker_without_its_lease_records_nothing(
    scene: Scene, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose lease moved to another cannot commit, even before the other has done anything."""
    request = request_key(scene.sandbox)
    lease = _lease_of(request, now())
    real = getattr(requests, step)

    def losing_the_lease(*args: Any, **options: Any) -> Any:
        _lease_of(request, now() + leases.LEASE)
        return real(*args, **options)

    monkeypatch.setattr(requests, step, losing_the_lease)
    with pytest.raises(StateConflictError, match="Another worker took this over"):
        requests.issue_approved(fresh(request), lease, now())
    assert fresh(request).state == S.APPROVED
    assert Key.objects.filter(state="pre_activation").count() == Key.objects.count() == (step == "store_string")


@pytest.mark.database
def test_issuance_by_a_worker_without_its_lease_does_not_overwrite_the_active_key(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stored string stays that of the active key, although the slow worker's call was under way already."""
    request = request_key(scene.sandbox)
    slow = _lease_of(request, now())
    backend = secret_backend()
    real = backend.put
    issued: list[Key] = []

    def put_after_successor(*args: Any, **options: Any) -> int:
        monkeypatch.setattr(backend, "put", real)
        issued.append(issue_request(fresh(request), at=now() + 2 * leases.LEASE))
        return real(*args, **options)

    monkeypatch.setattr(backend, "put", put_after_successor)
    with pytest.raises(BackendConflictError):
        requests.issue_approved(fresh(request), slow, now())
    stored = secret_backend().read(Mount.SANDBOX, issued[0].credential.backend_path)
    assert stored.labels["key_id"] == issued[0].key_id
    assert verdict(stored.secret) is None


def test_issuance_by_a_worker_that_slept_past_its_lease_stores_no_discarded_key(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: no string of a discarded key reaches the backend, where nothing but the reconciler would find it."""
    request = request_key(scene.sandbox)
    slow = _lease_of(request, now())
    real = stored_copies.store_string

    def store_after_withdrawal(key: Key, text: Plaintext, **options: Any) -> int:
        _withdraw(scene, fresh(request))
        expire_leases()
        maintenance.destroy_due()
        return real(key, text, **options)

    monkeypatch.setattr(requests, "store_string", store_after_withdrawal)
    with pytest.raises(StateConflictError, match="Another worker took this over"):
        requests.issue_approved(fresh(request), slow, now())
    key = Key.objects.get()
    assert key.state == "destroyed"
    assert versions_of(key.credential) == []


def test_issuance_with_a_lost_reply_of_the_backend_reads_the_stored_version(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key id on the stored version resolves the ambiguity: it is adopted, not written twice."""
    backend = secret_backend()
    real = backend.put

    def lost(*args: Any, **kwargs: Any) -> int:
        real(*args, **kwargs)
        raise BackendUnavailableError("no answer")

    monkeypatch.setattr(backend, "put", lost)
    key, text = issue(scene.sandbox)
    assert versions_of(key.credential) == [(1, "live")]
    assert verdict(text) is None


def test_issuance_with_the_backend_down_completes_later(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request stays approved, and the staged key of the failed attempt is destroyed."""
    request = request_key(scene.sandbox)
    backend = secret_backend()

    def down(*args: Any, **kwargs: Any) -> int:
        raise BackendUnavailableError("sealed", internal="sealed")

    with monkeypatch.context() as patch:
        patch.setattr(backend, "put", down)
        assert maintenance.issue_one(request) is False
    assert fresh(request).state == S.APPROVED
    assert maintenance.issue_one(request) is False, "retried before the pause ended"
    key = issue_request(fresh(request), at=now() + timedelta(seconds=10))
    assert sorted(Key.objects.filter(credential=key.credential).values_list("state", flat=True)) == [
        "active",
        "destroyed",
    ]


@pytest.mark.database
def test_issuance_over_a_foreign_version_stops_and_overwrites_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version that Keyvault did not write stays as it is."""
    request = request_key(scene.sandbox)
    _run_killed(request, "after _stage", monkeypatch)
    credential = fresh(request).credential
    assert credential is not None
    foreign = Plaintext("theirs")
    secret_backend().put(Mount.SANDBOX, credential.backend_path, foreign, {}, expected_version=0)
    with pytest.raises(ForeignWriterError):
        issue_request(fresh(request), at=now() + leases.LEASE)
    assert secret_backend().read(Mount.SANDBOX, credential.backend_path).secret.reveal() == "theirs"
    assert not Key.objects.filter(state="active").exists()


@pytest.mark.database
@pytest.mark.parametrize("kill_at", ["after _stage", "after store_string"])
def test_issuance_withdrawn_after_a_killed_worker_leaves_no_key(
    scene: Scene, kill_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No staged key and no readable string remains."""
    request = request_key(scene.sandbox)
    _run_killed(request, kill_at, monkeypatch)
    _withdraw(scene, fresh(request))
    maintenance.destroy_due()
    assert Key.objects.get().state == "pre_activation", "destroyed while a worker may still hold the lease"
    expire_leases()
    maintenance.destroy_due()
    key = Key.objects.get()
    assert key.state == "destroyed"
    assert [state for _, state in versions_of(key.credential)] in ([], ["destroyed"])


def test_issuance_withdrawn_during_a_run_activates_nothing(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    request = request_key(scene.sandbox)
    real = stored_copies.store_string

    def withdrawn(key: Key, text: Plaintext, **options: Any) -> int:
        _withdraw(scene, fresh(request))
        return real(key, text, **options)

    monkeypatch.setattr(requests, "store_string", withdrawn)
    assert maintenance.issue_one(request) is False
    assert fresh(request).state == S.WITHDRAWN
    maintenance.destroy_due()
    key = Key.objects.get()
    assert key.state == "destroyed"
    assert versions_of(key.credential) == [(1, "destroyed")]


def test_issuance_writes_to_its_own_account_chain_only(scene: Scene) -> None:
    make_merchant("globex")
    issue(account("globex", SANDBOX))
    assert events_of("account:acme/sandbox") == []
    assert "issuance.issued" in events_of("account:globex/sandbox")


@pytest.mark.database
def test_issuance_without_the_grant_writes_nothing(scene: Scene) -> None:
    wrong: Grant = grant(scene.admin, P.ISSUANCE_REQUEST, scene.production)
    before = dump_tables()
    with pytest.raises(PermissionMissingError) as caught:
        requests.request_issuance(wrong, scene.sandbox, kind=KeyKind.PRIVATE, label="x", delivery=Delivery.SHOW_ONCE)
    assert caught.value.code is ErrorCode.PERMISSION_MISSING
    assert changed_tables(before, dump_tables()) == set()
