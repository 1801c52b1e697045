"""Races on PostgreSQL between revocation or offboarding and keys that become good at that moment.

SQLite has a single writer, so there one of the two simply comes first.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER, OperatorPrincipal
from keyvault.domain.errors import StateConflictError
from keyvault.domain.keys import DEAD_STATES
from keyvault.domain.revocation import RevocationReason
from keyvault.models import Credential, IssuanceRequest, Key, Merchant, Notice
from keyvault.services.issuance import requests
from keyvault.services.keys import lifecycle
from keyvault.services.offboarding import Offboarding, count_assets, offboard_merchant
from keyvault.services.recording.audit_chain import verify_audit
from rotation.domain.states import CLOSED
from rotation.models import Rotation
from rotation.services.rotations.emergency import CompromiseResponse, respond_to_compromise
from rotation.services.rotations.engine import advance_rotation
from rotation.services.rotations.reports import get_rotation
from rotation.services.rotations.requests import reissue_key
from tests.factories import account, grant, issue, issue_request, make_merchant, request_key
from tests.rotation import scene
from tests.rotation.services.rotations.test_emergency import responder
from tests.services.racing import held_open, race, start, wait_until_blocked

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]

ROUNDS = 10


def utc() -> datetime:
    return datetime.now(UTC)


def offboard(merchant_id: str) -> Offboarding:
    merchant = Merchant.objects.get(pk=merchant_id)
    return offboard_merchant(grant(responder(), P.MERCHANTS_OFFBOARD), merchant, "contract ended")


def has_nothing_left(merchant_id: str) -> bool:
    living = Key.objects.filter(credential__account__merchant=merchant_id).exclude(state__in=DEAD_STATES)
    return not living.exclude(state="pre_activation").exists() and not count_assets(
        Merchant.objects.get(pk=merchant_id), utc()
    )


def in_turns(number: int, *calls: Callable[[], object]) -> list[object]:
    """Start the calls simultaneously, a different one first in each round; return their outcomes in the given order."""
    step = 1 if number % 2 else -1
    return race(*calls[::step])[::step]


def revoke(by: OperatorPrincipal, key: Key) -> object:
    """Revoke the key as an operator who has just read it."""
    found = lifecycle.get_key(key.pk)
    assert found is not None
    return lifecycle.revoke_key(grant(by, P.KEYS_REVOKE, found.credential.account), found, RevocationReason.SUPERSEDED)


def report(by: OperatorPrincipal, key: Key) -> CompromiseResponse:
    found = lifecycle.get_key(key.pk)
    assert found is not None
    allowed = grant(by, P.KEYS_REPORT_COMPROMISE, found.credential.account)
    return respond_to_compromise(allowed, found, replace=True)


def settle() -> None:
    """Run the workers' turns."""
    for _ in range(3):
        for rotation in Rotation.objects.exclude(state__in=CLOSED).order_by("entered_at"):
            advance_rotation(rotation.rotation_id)


def test_race_of_offboarding_against_an_issuance_leaves_no_good_key() -> None:
    """The worker's key is either found and revoked, or never becomes good."""
    for number in range(ROUNDS):
        merchant_id = f"m{number}"
        make_merchant(merchant_id)
        request = request_key(account(merchant_id))
        copy = IssuanceRequest.objects.select_related("account__merchant").get(pk=request.pk)
        issued, done = in_turns(number, partial(issue_request, copy), partial(offboard, merchant_id))
        assert isinstance(issued, Key | StateConflictError), issued
        assert isinstance(done, Offboarding), done
        assert has_nothing_left(merchant_id)
    assert verify_audit().first_broken is None


def test_race_of_offboarding_against_a_request_leaves_none_open() -> None:
    for number in range(ROUNDS):
        merchant_id = f"m{number}"
        make_merchant(merchant_id)
        place = account(merchant_id)
        asked, done = in_turns(number, partial(request_key, place, by=scene.tam()), partial(offboard, merchant_id))
        assert isinstance(asked, IssuanceRequest | StateConflictError), asked
        assert isinstance(done, Offboarding), done
        assert has_nothing_left(merchant_id)


def test_race_of_offboarding_against_a_rotation_leaves_no_good_key_and_no_open_rotation() -> None:
    """The replacement is either found and revoked, or never becomes good; the rotation ends by itself."""
    for number in range(ROUNDS):
        merchant_id = f"m{number}"
        key, _ = scene.issue(scene.account(merchant_id), utc())
        rotation = scene.rotate(key.credential, utc())
        advanced, done = in_turns(
            number, partial(advance_rotation, rotation.rotation_id), partial(offboard, merchant_id)
        )
        assert not isinstance(advanced, BaseException), advanced
        assert isinstance(done, Offboarding), done
        assert has_nothing_left(merchant_id)
        settle()
        assert has_nothing_left(merchant_id)


def test_offboarding_waits_for_an_uncommitted_activation_and_revokes_it() -> None:
    """Offboarding waits for the row that the activation locks, so it finds the activated key."""
    make_merchant("acme")
    key, _ = issue(account("acme"))
    worker = grant(WORKER, P.ISSUANCE_EXECUTE, account("acme"))
    staged, _ = lifecycle.stage_key(worker, key.credential, expires_in_days=None)
    with held_open(lambda: lifecycle.activate_key(worker, staged)):
        leaving = start(lambda: offboard("acme"))
        wait_until_blocked(leaving)
    assert not leaving.result(30).left
    assert Key.objects.get(pk=staged.pk).state == "deactivated"


def test_activation_waits_for_an_uncommitted_offboarding_and_is_refused() -> None:
    make_merchant("acme")
    key, _ = issue(account("acme"))
    worker = grant(WORKER, P.ISSUANCE_EXECUTE, account("acme"))
    staged, _ = lifecycle.stage_key(worker, key.credential, expires_in_days=None)
    with held_open(lambda: offboard("acme")):
        activation = start(lambda: lifecycle.activate_key(worker, staged))
        wait_until_blocked(activation)
    with pytest.raises(StateConflictError, match="was offboarded"):
        activation.result(30)
    assert has_nothing_left("acme")


def test_race_of_two_revocations_of_a_credential_raises_the_alarm() -> None:
    """Neither revocation relies on the key that the other one revokes."""
    make_merchant("acme")
    place = account("acme")
    for number in range(ROUNDS):
        first, _ = issue(place, label=f"n{number}")
        worker = grant(WORKER, P.ISSUANCE_EXECUTE, place)
        second, _ = lifecycle.stage_key(worker, first.credential, expires_in_days=None)
        lifecycle.activate_key(worker, second)
        by = responder()
        outcomes = race(partial(revoke, by, first), partial(revoke, by, second))
        assert not any(isinstance(outcome, BaseException) for outcome in outcomes), outcomes
        alarms = Notice.objects.filter(kind="credential.without_key", subject=first.credential_id)
        assert alarms.count() in {1, 2}


def test_race_of_compromise_against_an_activation_never_fails_the_report() -> None:
    """The report succeeds whatever the engine does with the key, without a deadlock."""
    for number in range(ROUNDS):
        key, _ = scene.issue(scene.account(f"m{number}"), utc())
        rotation = scene.rotate(key.credential, utc())
        by = responder()
        response, advanced = in_turns(
            number,
            partial(report, by, key),
            partial(advance_rotation, rotation.rotation_id),
        )
        assert not isinstance(response, BaseException), response
        assert not isinstance(advanced, BaseException), advanced
        assert Key.objects.get(pk=key.pk).state == "compromised"
        settle()
        fresh = get_rotation(rotation.rotation_id)
        assert fresh.replacement is not None
        assert fresh.replacement.state == "active"


def test_race_of_two_reports_requests_one_replacement() -> None:
    """The key is revoked once, and one rotation is open."""
    for number in range(ROUNDS):
        key, _ = scene.issue(scene.account(f"m{number}"), utc())
        by = responder()
        outcomes = race(partial(report, by, key), partial(report, by, key))
        assert not any(isinstance(outcome, BaseException) for outcome in outcomes), outcomes
        assert Rotation.objects.filter(credential=key.credential).count() == 1


def test_race_of_offboarding_against_a_reissue_leaves_no_open_rotation() -> None:
    """A credential under reissue gets no key once its merchant is offboarded."""
    for number in range(ROUNDS):
        merchant_id = f"m{number}"
        key, _ = scene.issue(scene.account(merchant_id), utc())
        place = key.credential.account
        lifecycle.revoke_key(grant(responder(), P.KEYS_REVOKE, place), key, RevocationReason.SUPERSEDED)
        credential = Credential.objects.select_related("account__merchant").get(pk=key.credential_id)
        by = scene.tam()
        asked, done = in_turns(
            number,
            partial(reissue_key, grant(by, P.ROTATIONS_WRITE, place), credential, "it leaked"),
            partial(offboard, merchant_id),
        )
        assert isinstance(asked, Rotation | StateConflictError), asked
        assert isinstance(done, Offboarding), done
        settle()
        assert has_nothing_left(merchant_id)


def test_issuance_for_an_offboarded_merchant_is_not_retried() -> None:
    make_merchant("acme")
    request_key(account("acme"))
    offboard("acme")
    assert requests.list_approved() == []
