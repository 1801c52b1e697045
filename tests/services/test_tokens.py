"""Service tokens: hashed like keys, scoped, expiring, ended at once; and good for nothing that people decide."""

from datetime import timedelta

import pytest

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
from keyvault.services.lookup import prove_service_token
from keyvault.services.tokens import LONGEST_DAYS, create_service_token, revoke_service_token
from tests.domain.minting import mint
from tests.factories import PRODUCTION, SANDBOX, grant, issue, make_merchant, make_token, now

from .conftest import Scene
from .rows import dump_tables

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
    with pytest.raises(StateConflictError, match="revoked already"):
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
        ({"lifetime_days": LONGEST_DAYS + 1}, "/lifetime_days"),
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
