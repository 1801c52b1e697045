"""Service tokens: hashed, scoped, expiring, revocable, and without permissions that require a person."""

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
from keyvault.access.scopes import EVERYWHERE, AccessScope
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

pytestmark = pytest.mark.django_db


def authenticate(text: Plaintext) -> Service:
    service = prove_service_token(text.reveal(), now())
    assert service is not None
    return service


@pytest.mark.database
def test_token_authenticates_as_its_service(scene: Scene) -> None:
    token, text = make_token(P.KEYS_READ, P.KEYS_REVOKE, merchants=["acme"], by=scene.admin)
    service = authenticate(text)
    assert (service.token_id, service.name) == (token.token_id, "gateway")
    assert service.permissions == {P.KEYS_READ, P.KEYS_REVOKE}
    assert service.scope == AccessScope(frozenset({"acme"}), frozenset(Environment))
    assert service.person == scene.admin.person, "the creator is responsible for its requests"


@pytest.mark.database
def test_token_string_is_not_stored(scene: Scene) -> None:
    _, text = make_token()
    assert text.reveal() not in repr(dump_tables())
    assert text.reveal()[-49:-6] not in repr(dump_tables()), "the secret part alone must not be stored either"


@pytest.mark.database
def test_token_is_valid_until_its_expiry(scene: Scene) -> None:
    token, text = make_token(lifetime_days=1)
    assert token.expires_at == token.created_at + timedelta(days=1)
    assert prove_service_token(text.reveal(), token.expires_at - timedelta(microseconds=1)) is not None
    assert prove_service_token(text.reveal(), token.expires_at) is None


def test_token_revoked_is_refused_immediately(scene: Scene) -> None:
    """A second revocation is a conflict."""
    token, text = make_token()
    revoke_service_token(grant(scene.admin, P.TOKENS_WRITE), token)
    assert prove_service_token(text.reveal(), now()) is None
    with pytest.raises(StateConflictError, match="already revoked"):
        revoke_service_token(grant(scene.admin, P.TOKENS_WRITE), ServiceToken.objects.get(pk=token.pk))


def test_token_altered_in_any_part_is_refused(scene: Scene) -> None:
    _, text = make_token()
    _, other = make_token()
    valid = text.reveal()
    mixed = other.reveal()[:27] + valid[27:]
    for wrong in (None, "", valid[:-1], valid + "0", valid.swapcase(), mixed, "kv_svc_all_"):
        assert prove_service_token(wrong, now()) is None


def test_token_replaced_by_an_api_key_is_refused(scene: Scene) -> None:
    _, text = issue(scene.sandbox)
    assert prove_service_token(text.reveal(), now()) is None


@pytest.mark.parametrize(
    ("scope", "allowed"),
    [
        (StringScope.ALL, {SANDBOX, PRODUCTION}),
        (StringScope.SANDBOX, {SANDBOX}),
        (StringScope.PRODUCTION, {PRODUCTION}),
    ],
)
def test_token_is_allowed_in_the_environments_of_its_scope_only(
    scene: Scene, scope: StringScope, allowed: set[Environment]
) -> None:
    _, text = make_token(P.KEYS_READ, scope=scope)
    service = authenticate(text)
    assert service.scope.environments == allowed
    assert text.reveal().split("_")[2] == scope
    for environment in Environment:
        verdict = decide(operation(P.KEYS_READ), service, Target(environment, "acme"), now())
        assert isinstance(verdict, Denial) == (environment not in allowed)


def test_token_for_named_merchants_finds_no_others(scene: Scene) -> None:
    """Other merchants are reported as not found, not as forbidden."""
    make_merchant("globex")
    for merchants, visible in ((["acme"], {"acme"}), ([], set()), (None, {"acme", "globex"})):
        service = authenticate(make_token(P.KEYS_READ, merchants=merchants)[1])
        for merchant_id in ("acme", "globex"):
            verdict = decide(operation(P.KEYS_READ), service, Target(SANDBOX, merchant_id), now())
            if merchant_id in visible:
                assert not isinstance(verdict, Denial)
            else:
                assert isinstance(verdict, Denial)
                assert verdict.code is ErrorCode.NOT_FOUND


@pytest.mark.parametrize("permission", sorted(set(P) - SERVICE_PERMISSIONS))
def test_token_with_a_permission_for_persons_is_refused(scene: Scene, permission: P) -> None:
    """Decisions such as approving, resuming and setting up require a person."""
    with pytest.raises(RequestInvalidError) as caught:
        make_token(P.KEYS_READ, permission)
    assert [fault.pointer for fault in caught.value.faults] == ["/permission"]
    assert not ServiceToken.objects.exists()


def test_token_with_a_forged_approval_permission_is_denied(scene: Scene) -> None:
    """The authorization rule itself denies a service, whatever its row contains."""
    service = Service("t", "t", "per_t", frozenset({P.ISSUANCE_APPROVE}), EVERYWHERE)
    verdict = decide(operation(P.ISSUANCE_APPROVE), service, Target(SANDBOX, "acme", "per_other"), now())
    assert isinstance(verdict, Denial)


@pytest.mark.parametrize(
    ("options", "pointer"),
    [
        ({"permissions": []}, "/permission"),
        ({"lifetime_days": 0}, "/lifetime_days"),
        ({"lifetime_days": MAX_DAYS + 1}, "/lifetime_days"),
        ({"merchants": ["acme", "unknown"]}, "/merchant"),
        ({"name": ""}, "/name"),
        ({"name": "x" * 101}, "/name"),
        ({"name": "a\x00b"}, "/name"),
        ({"name": mint()}, "/name"),
    ],
)
def test_token_with_invalid_options_is_refused(scene: Scene, options: dict[str, object], pointer: str) -> None:
    """The service checks them, so both databases refuse the same values."""
    valid: dict[str, object] = {"name": "x", "scope": StringScope.ALL, "permissions": [P.KEYS_READ]}
    with pytest.raises(RequestInvalidError) as caught:
        create_service_token(grant(scene.admin, P.TOKENS_WRITE), **(valid | options))  # type: ignore[arg-type]  # varies by case
    assert [fault.pointer for fault in caught.value.faults] == [pointer]


def test_token_created_without_the_permission_is_refused(scene: Scene) -> None:
    """Requesting or approving keys does not include the right to create tokens."""
    for operator in (scene.tam, scene.approver, scene.responder):
        with pytest.raises(PermissionMissingError):
            make_token(by=operator)


def test_token_repr_names_it_without_its_digest(scene: Scene) -> None:
    token, text = make_token()
    assert repr(token) == f"ServiceToken({token.token_id})"
    assert text.reveal() not in f"{token} {token!r} {text} {text!r}"


# ----------------------------------------------------------------------------------------------------- rotation


def rotate(
    scene: Scene, token: ServiceToken, overlap_hours: int = 24, at: datetime | None = None
) -> tuple[ServiceToken, Plaintext]:
    return rotate_service_token(grant(scene.admin, P.TOKENS_WRITE, at=at), token, overlap_hours)


@pytest.mark.parametrize("is_probe", [True, False])
def test_token_rotated_keeps_whether_it_is_a_probe(scene: Scene, is_probe: bool) -> None:
    """A rotation never turns a probe token into one whose calls count, or the reverse."""
    token, text = make_token(is_probe=is_probe, by=scene.admin)
    assert last_body("service_token.created")["details"]["is_probe"] is is_probe
    assert authenticate(text).is_probe is is_probe
    successor, text = rotate(scene, token)
    assert (successor.is_probe, authenticate(text).is_probe) == (is_probe, is_probe)


def test_token_rotated_has_a_successor_with_the_same_permissions_and_a_new_lifetime(scene: Scene) -> None:
    token, _ = make_token(P.KEYS_READ, merchants=["acme"], scope=StringScope.SANDBOX, lifetime_days=30, by=scene.admin)
    at = token.created_at + timedelta(days=20)
    successor, text = rotate(scene, token, at=at)
    service = authenticate(text)
    assert (service.token_id, service.name, service.lineage) == (successor.token_id, "gateway", token.token_id)
    assert (service.permissions, service.scope.merchants) == (frozenset({P.KEYS_READ}), frozenset({"acme"}))
    assert service.scope.environments == {SANDBOX}
    assert successor.expires_at == at + timedelta(days=30)
    assert last_body("service_token.rotated")["details"]["successor_id"] == successor.token_id
    third, _ = rotate(scene, successor, at=at + timedelta(days=1))
    assert third.lineage == token.token_id, "the lineage is the first token"


@pytest.mark.database
@pytest.mark.parametrize("overlap_hours", [0, 1, MAX_OVERLAP_HOURS])
def test_token_rotated_is_valid_for_the_overlap_only(scene: Scene, overlap_hours: int) -> None:
    """Both tokens are valid during the overlap."""
    token, old = make_token(lifetime_days=90)
    at = now()
    _, new = rotate(scene, token, overlap_hours, at)
    end = at + timedelta(hours=overlap_hours)
    assert ServiceToken.objects.get(pk=token.pk).expires_at == end
    assert prove_service_token(old.reveal(), end - timedelta(microseconds=1)) is not None
    assert prove_service_token(old.reveal(), end) is None
    assert prove_service_token(new.reveal(), end) is not None


@pytest.mark.database
def test_token_rotated_late_keeps_its_expiry(scene: Scene) -> None:
    """An overlap never extends the old token's life; a trigger refuses any other write that would."""
    token, _ = make_token(lifetime_days=1)
    end = token.expires_at
    rotate(scene, token, MAX_OVERLAP_HOURS)
    assert ServiceToken.objects.get(pk=token.pk).expires_at == end
    with pytest.raises(DatabaseError, match="its expiry is never extended"), transaction.atomic():
        QuerySet(ServiceToken).filter(pk=token.pk).update(expires_at=end + timedelta(seconds=1))


@pytest.mark.parametrize("overlap_hours", [-1, MAX_OVERLAP_HOURS + 1])
def test_token_rotated_with_an_overlap_out_of_bounds_is_refused(scene: Scene, overlap_hours: int) -> None:
    token, _ = make_token()
    with pytest.raises(RequestInvalidError) as caught:
        rotate(scene, token, overlap_hours)
    assert [fault.pointer for fault in caught.value.faults] == ["/overlap_hours"]


def test_token_rotated_after_its_revocation_or_expiry_is_refused(scene: Scene) -> None:
    revoked, _ = make_token()
    revoke_service_token(grant(scene.admin, P.TOKENS_WRITE), revoked)
    expired, _ = make_token(lifetime_days=1)
    for token, at in ((revoked, now()), (expired, expired.expires_at)):
        with pytest.raises(StateConflictError, match="revoked or expired"):
            rotate(scene, token, at=at)
    assert ServiceToken.objects.count() == 2


def test_token_rotated_twice_with_a_live_successor_is_refused(scene: Scene) -> None:
    """The token's remaining life is the overlap, which a second successor would inherit."""
    token, _ = make_token(lifetime_days=30)
    successor, _ = rotate(scene, token)
    with pytest.raises(StateConflictError, match=f"already rotated. Rotate its successor {successor.token_id}"):
        rotate(scene, ServiceToken.objects.get(pk=token.pk))
    assert ServiceToken.objects.count() == 2
    rotate(scene, successor)


def test_token_rotated_again_after_its_successor_was_revoked_gets_a_full_lifetime(scene: Scene) -> None:
    """A leaked successor is revoked; the old token, valid for the overlap, gets another successor."""
    token, _ = make_token(lifetime_days=30)
    successor, _ = rotate(scene, token)
    revoke_service_token(grant(scene.admin, P.TOKENS_WRITE), successor)
    at = now()
    another, _ = rotate(scene, ServiceToken.objects.get(pk=token.pk), at=at)
    assert another.expires_at == at + timedelta(days=30)


def test_token_revoked_keeps_its_successor_valid(scene: Scene) -> None:
    token, old = make_token()
    _, new = rotate(scene, token)
    revoke_service_token(grant(scene.admin, P.TOKENS_WRITE), token)
    assert prove_service_token(old.reveal(), now()) is None
    assert prove_service_token(new.reveal(), now()) is not None


def test_token_rotated_by_another_person_makes_that_person_responsible(scene: Scene) -> None:
    """That person has seen the new token, and therefore cannot approve its requests."""
    token, _ = make_token()
    successor, text = rotate(scene, token)
    assert authenticate(text).person == scene.admin.person
    assert ServiceToken.objects.get(pk=token.pk).creator_person == "system:host"
    assert successor.creator is not None
    with pytest.raises(PermissionMissingError):
        rotate_service_token(grant(scene.tam, P.TOKENS_WRITE), token, 1)


@pytest.mark.database
def test_token_rotated_writes_one_entry_and_two_changes(scene: Scene) -> None:
    token, text = make_token()
    before = last_ids()
    successor, new = rotate(scene, token)
    events, changes = written_since(before)
    assert events == ["service_token.rotated"]
    assert changes == [("service_token", token.token_id), ("service_token", successor.token_id)]
    assert not [string for string in (text, new) if string.reveal() in repr(dump_tables())]


@pytest.mark.database
@pytest.mark.django_db(transaction=True)
def test_token_rotated_concurrently_has_one_successor() -> None:
    """The second rotation gets a conflict."""
    scene = make_scene()
    for _ in range(5):
        token, _ = make_token()
        copies = [ServiceToken.objects.get(pk=token.pk) for _ in range(4)]
        outcomes = race(*[partial(rotate, scene, copy) for copy in copies])
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["StateConflictError"] * 3 + ["tuple"]
        assert ServiceToken.objects.filter(lineage=token.token_id).count() == 2
