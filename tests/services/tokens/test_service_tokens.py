"""Service tokens: hashed like keys, scoped, expiring, ended at once; and good for nothing that people decide."""

from datetime import datetime, timedelta
from functools import partial

import pytest
from django.db import DatabaseError, transaction
from django.db.models import QuerySet

from keyvault.access.decision import Denial, decide
from keyvault.access.permissions import SERVICE_PERMISSIONS
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import Service
from keyvault.access.rules import Target, operation
from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode, PermissionMissingError, RequestInvalidError, StateConflictError
from keyvault.domain.keystring import StringScope
from keyvault.domain.plaintext import Plaintext
from keyvault.models import ServiceToken
from keyvault.services.keys.records import prove_service_token
from keyvault.services.tokens.service_tokens import (
    MAX_DAYS,
    MAX_OVERLAP_HOURS,
    create_service_token,
    revoke_service_token,
    rotate_service_token,
)
from tests.domain.minting import mint
from tests.factories import PRODUCTION, SANDBOX, grant, issue, make_merchant, make_token, now
from tests.services.conftest import Scene, make_scene
from tests.services.racing import race
from tests.services.rows import dump_tables, last_body, last_ids, written_since

pytestmark = [pytest.mark.database, pytest.mark.django_db]


def proved(text: Plaintext) -> Service:
    service = prove_service_token(text.reveal(), now())
    assert service is not None
    return service


def test_token_proved_is_the_service_that_was_made(scene: Scene) -> None:
    token, text = make_token(P.KEYS_READ, P.KEYS_REVOKE, merchants=["acme"], by=scene.admin)
    service = proved(text)
    assert (service.token_id, service.name) == (token.token_id, "gateway")
    assert service.permissions == {P.KEYS_READ, P.KEYS_REVOKE}
    assert (service.environments, service.merchants) == (frozenset(Environment), frozenset({"acme"}))
    assert service.person == scene.admin.person, "its creator answers for what it asks"


def test_token_string_is_nowhere_in_the_database(scene: Scene) -> None:
    """A token is shown once: what is kept cannot be turned back into it."""
    _, text = make_token()
    assert text.reveal() not in repr(dump_tables())
    assert text.reveal()[-49:-6] not in repr(dump_tables()), "nor its secret part alone"


def test_token_is_good_until_its_expiry_and_not_a_moment_longer(scene: Scene) -> None:
    """A service token ends by itself, at the second that it was made with."""
    token, text = make_token(lifetime_days=1)
    assert token.expires_at == token.created_at + timedelta(days=1)
    assert prove_service_token(text.reveal(), token.expires_at - timedelta(microseconds=1)) is not None
    assert prove_service_token(text.reveal(), token.expires_at) is None


def test_token_revoked_is_refused_at_once(scene: Scene) -> None:
    """A revoked token proves nothing any more, and revoking it again says so."""
    token, text = make_token()
    revoke_service_token(grant(scene.admin, P.TOKENS_WRITE), token)
    assert prove_service_token(text.reveal(), now()) is None
    with pytest.raises(StateConflictError, match="already revoked"):
        revoke_service_token(grant(scene.admin, P.TOKENS_WRITE), ServiceToken.objects.get(pk=token.pk))


def test_token_altered_in_any_part_proves_nothing(scene: Scene) -> None:
    """Only the very string that was made proves the token; every other answers the same."""
    _, text = make_token()
    _, other = make_token()
    good = text.reveal()
    mixed = other.reveal()[:27] + good[27:]
    for wrong in (None, "", good[:-1], good + "0", good.swapcase(), mixed, "kv_svc_all_"):
        assert prove_service_token(wrong, now()) is None


def test_token_of_another_plane_proves_nothing(scene: Scene) -> None:
    """An API key never opens the service plane."""
    _, text = issue(scene.sandbox)
    assert prove_service_token(text.reveal(), now()) is None


@pytest.mark.parametrize(
    ("scope", "serves"),
    [
        (StringScope.ALL, {SANDBOX, PRODUCTION}),
        (StringScope.SANDBOX, {SANDBOX}),
        (StringScope.PRODUCTION, {PRODUCTION}),
    ],
)
def test_token_serves_the_environments_of_its_scope_only(
    scene: Scene, scope: StringScope, serves: set[Environment]
) -> None:
    """Outside its environments a token is refused, whatever it holds."""
    _, text = make_token(P.KEYS_READ, scope=scope)
    service = proved(text)
    assert service.environments == serves
    assert text.reveal().split("_")[2] == scope
    for environment in Environment:
        verdict = decide(operation(P.KEYS_READ), service, Target(environment, "acme"), now())
        assert isinstance(verdict, Denial) == (environment not in serves)


def test_token_for_named_merchants_finds_no_others(scene: Scene) -> None:
    """Somebody else's merchant is not found, rather than forbidden; a token for none finds none."""
    make_merchant("globex")
    for merchants, sees in ((["acme"], {"acme"}), ([], set()), (None, {"acme", "globex"})):
        service = proved(make_token(P.KEYS_READ, merchants=merchants)[1])
        for merchant_id in ("acme", "globex"):
            verdict = decide(operation(P.KEYS_READ), service, Target(SANDBOX, merchant_id), now())
            if merchant_id in sees:
                assert not isinstance(verdict, Denial)
            else:
                assert isinstance(verdict, Denial)
                assert verdict.code is ErrorCode.NOT_FOUND


@pytest.mark.parametrize("permission", sorted(set(P) - SERVICE_PERMISSIONS))
def test_token_with_a_permission_for_people_is_not_made(scene: Scene, permission: P) -> None:
    """What people decide (approving, resuming, setting up) no token can hold."""
    with pytest.raises(RequestInvalidError) as caught:
        make_token(P.KEYS_READ, permission)
    assert [fault.pointer for fault in caught.value.faults] == ["/permission"]
    assert not ServiceToken.objects.exists()


def test_token_whose_permission_was_written_past_the_service_still_approves_nothing(scene: Scene) -> None:
    """Four eyes are people's: a token that holds the permission by tampering is refused by the rule itself."""
    service = Service("t", "t", "per_t", frozenset({P.ISSUANCE_APPROVE}), frozenset(Environment))
    verdict = decide(operation(P.ISSUANCE_APPROVE), service, Target(SANDBOX, "acme", "per_other"), now())
    assert isinstance(verdict, Denial)


@pytest.mark.parametrize(
    ("asked", "pointer"),
    [
        ({"permissions": []}, "/permission"),
        ({"lifetime_days": 0}, "/lifetime_days"),
        ({"lifetime_days": MAX_DAYS + 1}, "/lifetime_days"),
        ({"merchants": ["acme", "nobody"]}, "/merchant"),
        ({"name": ""}, "/name"),
        ({"name": "x" * 101}, "/name"),
        ({"name": "a\x00b"}, "/name"),
        ({"name": mint()}, "/name"),
    ],
)
def test_token_that_does_not_fit_is_not_made(scene: Scene, asked: dict[str, object], pointer: str) -> None:
    """The same on both databases, whatever the column would take."""
    good: dict[str, object] = {"name": "x", "scope": StringScope.ALL, "permissions": [P.KEYS_READ]}
    with pytest.raises(RequestInvalidError) as caught:
        create_service_token(grant(scene.admin, P.TOKENS_WRITE), **(good | asked))  # type: ignore[arg-type]  # by case
    assert [fault.pointer for fault in caught.value.faults] == [pointer]


def test_token_is_made_by_those_who_may(scene: Scene) -> None:
    """Neither asking nor approving keys gives the right to make tokens."""
    for operator in (scene.tam, scene.approver, scene.responder):
        with pytest.raises(PermissionMissingError):
            make_token(by=operator)


def test_token_repr_and_row_name_it_without_its_digest(scene: Scene) -> None:
    token, text = make_token()
    assert repr(token) == f"ServiceToken({token.token_id})"
    assert text.reveal() not in f"{token} {token!r} {text} {text!r}"


# ----------------------------------------------------------------------------------------------------- rotation


def rotate(
    scene: Scene, token: ServiceToken, overlap_hours: int = 24, at: datetime | None = None
) -> tuple[ServiceToken, Plaintext]:
    return rotate_service_token(grant(scene.admin, P.TOKENS_WRITE, at=at), token, overlap_hours)


@pytest.mark.parametrize("is_probe", [True, False])
def test_token_is_a_probe_when_it_was_made_as_one_and_so_is_its_successor(scene: Scene, is_probe: bool) -> None:
    """No rotation turns a token for test calls into one whose calls count, nor the other way."""
    token, text = make_token(is_probe=is_probe, by=scene.admin)
    assert last_body("service_token.created")["details"]["is_probe"] is is_probe
    assert proved(text).is_probe is is_probe
    successor, text = rotate(scene, token)
    assert (successor.is_probe, proved(text).is_probe) == (is_probe, is_probe)


def test_token_rotated_has_a_successor_with_the_same_rights_and_a_life_of_its_own(scene: Scene) -> None:
    token, _ = make_token(P.KEYS_READ, merchants=["acme"], scope=StringScope.SANDBOX, lifetime_days=30, by=scene.admin)
    at = token.created_at + timedelta(days=20)
    successor, text = rotate(scene, token, at=at)
    service = proved(text)
    assert (service.token_id, service.name, service.lineage) == (successor.token_id, "gateway", token.token_id)
    assert (service.permissions, service.merchants) == (frozenset({P.KEYS_READ}), frozenset({"acme"}))
    assert service.environments == {SANDBOX}
    assert successor.expires_at == at + timedelta(days=30)
    assert last_body("service_token.rotated")["details"]["successor_id"] == successor.token_id
    third, _ = rotate(scene, successor, at=at + timedelta(days=1))
    assert third.lineage == token.token_id, "the first of them all"


@pytest.mark.parametrize("overlap_hours", [0, 1, MAX_OVERLAP_HOURS])
def test_token_rotated_is_good_for_the_overlap_and_no_longer(scene: Scene, overlap_hours: int) -> None:
    """Both tokens work while the new one is put in place; then the old one ends by itself."""
    token, old = make_token(lifetime_days=90)
    at = now()
    _, new = rotate(scene, token, overlap_hours, at)
    end = at + timedelta(hours=overlap_hours)
    assert ServiceToken.objects.get(pk=token.pk).expires_at == end
    assert prove_service_token(old.reveal(), end - timedelta(microseconds=1)) is not None
    assert prove_service_token(old.reveal(), end) is None
    assert prove_service_token(new.reveal(), end) is not None


def test_token_rotated_late_does_not_live_longer_for_it(scene: Scene) -> None:
    """An overlap never lengthens the old token's life; nor could any other write, past the service."""
    token, _ = make_token(lifetime_days=1)
    end = token.expires_at
    rotate(scene, token, MAX_OVERLAP_HOURS)
    assert ServiceToken.objects.get(pk=token.pk).expires_at == end
    with pytest.raises(DatabaseError, match="never lives longer"), transaction.atomic():
        QuerySet(ServiceToken).filter(pk=token.pk).update(expires_at=end + timedelta(seconds=1))


@pytest.mark.parametrize("overlap_hours", [-1, MAX_OVERLAP_HOURS + 1])
def test_token_rotated_with_an_overlap_out_of_bounds_is_refused(scene: Scene, overlap_hours: int) -> None:
    token, _ = make_token()
    with pytest.raises(RequestInvalidError) as caught:
        rotate(scene, token, overlap_hours)
    assert [fault.pointer for fault in caught.value.faults] == ["/overlap_hours"]


def test_token_that_is_revoked_or_expired_is_not_rotated(scene: Scene) -> None:
    """What has ended is not brought back by rotating it."""
    revoked, _ = make_token()
    revoke_service_token(grant(scene.admin, P.TOKENS_WRITE), revoked)
    expired, _ = make_token(lifetime_days=1)
    for token, at in ((revoked, now()), (expired, expired.expires_at)):
        with pytest.raises(StateConflictError, match="revoked or expired"):
            rotate(scene, token, at=at)
    assert ServiceToken.objects.count() == 2


def test_token_with_a_living_successor_is_not_rotated_again(scene: Scene) -> None:
    """Its life is down to the overlap, and a second successor would have that for its own."""
    token, _ = make_token(lifetime_days=30)
    successor, _ = rotate(scene, token)
    with pytest.raises(StateConflictError, match=f"already rotated. Rotate its successor {successor.token_id}"):
        rotate(scene, ServiceToken.objects.get(pk=token.pk))
    assert ServiceToken.objects.count() == 2
    rotate(scene, successor)


def test_token_whose_successor_was_revoked_is_rotated_for_the_whole_life_again(scene: Scene) -> None:
    """A successor that leaked is revoked, and the old token, still good for the overlap, gets another one."""
    token, _ = make_token(lifetime_days=30)
    successor, _ = rotate(scene, token)
    revoke_service_token(grant(scene.admin, P.TOKENS_WRITE), successor)
    at = now()
    another, _ = rotate(scene, ServiceToken.objects.get(pk=token.pk), at=at)
    assert another.expires_at == at + timedelta(days=30)


def test_token_revoked_leaves_its_successor_alone(scene: Scene) -> None:
    token, old = make_token()
    _, new = rotate(scene, token)
    revoke_service_token(grant(scene.admin, P.TOKENS_WRITE), token)
    assert prove_service_token(old.reveal(), now()) is None
    assert prove_service_token(new.reveal(), now()) is not None


def test_token_rotated_by_another_person_is_answered_for_by_them(scene: Scene) -> None:
    """Only whoever rotated has seen the new token, so it is they who cannot approve what is asked with it."""
    token, _ = make_token()
    successor, text = rotate(scene, token)
    assert proved(text).person == scene.admin.person
    assert ServiceToken.objects.get(pk=token.pk).creator_person == "system:host"
    assert successor.creator is not None
    with pytest.raises(PermissionMissingError):
        rotate_service_token(grant(scene.tam, P.TOKENS_WRITE), token, 1)


def test_token_rotation_is_one_entry_and_both_subjects_change(scene: Scene) -> None:
    token, text = make_token()
    before = last_ids()
    successor, new = rotate(scene, token)
    events, changes = written_since(before)
    assert events == ["service_token.rotated"]
    assert changes == [("service_token", token.token_id), ("service_token", successor.token_id)]
    assert not [string for string in (text, new) if string.reveal() in repr(dump_tables())]


@pytest.mark.django_db(transaction=True)
def test_token_rotated_twice_at_once_has_one_successor() -> None:
    """Two who rotate the same token in the same moment: one is told to look again."""
    scene = make_scene()
    for _ in range(5):
        token, _ = make_token()
        copies = [ServiceToken.objects.get(pk=token.pk) for _ in range(4)]
        outcomes = race(*[partial(rotate, scene, copy) for copy in copies])
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["StateConflictError"] * 3 + ["tuple"]
        assert ServiceToken.objects.filter(lineage=token.token_id).count() == 2
