"""Merchants and accounts: created together, suspended and resumed for all their keys."""

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST
from keyvault.domain.errors import (
    ErrorCode,
    NotFoundError,
    PermissionMissingError,
    RequestInvalidError,
    StateConflictError,
)
from keyvault.models import Account, AuditChain, Merchant
from keyvault.services.merchants import merchants
from keyvault.services.merchants.merchants import create_merchant, find_account
from tests.domain.minting import mint
from tests.factories import PRODUCTION, grant, issue, make_merchant
from tests.services.conftest import Scene
from tests.services.keys.test_lifecycle import verdict

pytestmark = pytest.mark.django_db


@pytest.mark.database
def test_merchant_created_has_an_account_and_a_chain_in_each_environment(scene: Scene) -> None:
    make_merchant("globex")
    environments = set(Account.objects.filter(merchant="globex").values_list("environment", flat=True))
    assert environments == {"sandbox", "production"}
    chains = set(AuditChain.objects.filter(name__contains=":globex/").values_list("name", flat=True))
    assert chains == {
        f"{prefix}:globex/{environment}"
        for environment in ("sandbox", "production")
        for prefix in ("account", *(f"customer_tokens.{slot}" for slot in range(4)))
    }


def test_merchant_created_twice_is_refused(scene: Scene) -> None:
    with pytest.raises(StateConflictError):
        make_merchant("acme")
    assert Merchant.objects.count() == 1


@pytest.mark.parametrize("merchant_id", ["", "Acme", "-acme", "acme-", "a/b", "../x", "a" * 65, "acme\n", "ácme"])
def test_merchant_id_that_is_not_a_slug_is_refused(db: None, merchant_id: str) -> None:
    """An id appears unescaped in URLs, chain names and labels."""
    with pytest.raises(RequestInvalidError):
        create_merchant(grant(HOST, P.MERCHANTS_WRITE), merchant_id=merchant_id, name="x")
    assert not Merchant.objects.exists()


@pytest.mark.parametrize("name", ["", "x" * 201, "a\x00b", f"shop {mint()}"])
def test_merchant_name_that_is_invalid_is_refused(db: None, name: str) -> None:
    """The service checks it, so both databases refuse the same names."""
    with pytest.raises(RequestInvalidError):
        create_merchant(grant(HOST, P.MERCHANTS_WRITE), merchant_id="acme", name=name)


def test_merchant_suspended_denies_all_its_keys_until_resumed(scene: Scene) -> None:
    """Suspension takes effect with its commit, in both environments, and changes no key's state."""
    (_, sandbox), (_, production) = issue(scene.sandbox), issue(scene.production)
    merchants.suspend_merchant(grant(HOST, P.MERCHANTS_WRITE), scene.merchant)
    assert verdict(sandbox) is verdict(production, environment=PRODUCTION) is ErrorCode.MERCHANT_SUSPENDED
    merchants.resume_merchant(grant(HOST, P.MERCHANTS_WRITE), scene.merchant)
    assert verdict(sandbox) is verdict(production, environment=PRODUCTION) is None


def test_account_suspended_denies_its_own_environment_only(scene: Scene) -> None:
    (_, sandbox), (_, production) = issue(scene.sandbox), issue(scene.production)
    merchants.suspend_account(grant(HOST, P.MERCHANTS_WRITE, scene.sandbox), scene.sandbox)
    assert verdict(sandbox) is ErrorCode.MERCHANT_SUSPENDED
    assert verdict(production, environment=PRODUCTION) is None
    merchants.resume_account(grant(HOST, P.MERCHANTS_WRITE, scene.sandbox), scene.sandbox)
    assert verdict(sandbox) is None


def test_merchant_suspended_does_not_affect_other_merchants(scene: Scene) -> None:
    make_merchant("globex")
    _, text = issue(find_account("globex", "sandbox"))
    merchants.suspend_merchant(grant(HOST, P.MERCHANTS_WRITE), scene.merchant)
    assert verdict(text) is None


def test_merchant_and_account_suspended_or_resumed_twice_are_refused(scene: Scene) -> None:
    platform, place = grant(HOST, P.MERCHANTS_WRITE), grant(HOST, P.MERCHANTS_WRITE, scene.sandbox)
    with pytest.raises(StateConflictError, match="already active"):
        merchants.resume_merchant(platform, scene.merchant)
    with pytest.raises(StateConflictError, match="already active"):
        merchants.resume_account(place, scene.sandbox)
    merchants.suspend_merchant(platform, scene.merchant)
    merchants.suspend_account(place, scene.sandbox)
    with pytest.raises(StateConflictError, match="already suspended"):
        merchants.suspend_merchant(platform, scene.merchant)
    with pytest.raises(StateConflictError, match="already suspended"):
        merchants.suspend_account(place, scene.sandbox)


def test_merchant_suspended_without_the_permission_is_refused(scene: Scene) -> None:
    for operator in (scene.tam, scene.approver, scene.responder):
        with pytest.raises(PermissionMissingError):
            grant(operator, P.MERCHANTS_WRITE)


def test_account_of_an_unknown_merchant_or_environment_is_not_found(scene: Scene) -> None:
    for merchant_id, environment in (("unknown", "sandbox"), ("acme", "staging")):
        with pytest.raises(NotFoundError):
            find_account(merchant_id, environment)
