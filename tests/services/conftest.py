"""Fixtures: a merchant with an account in each environment, and the operators who manage it."""

from dataclasses import dataclass

import pytest

from keyvault.access.principals import OperatorPrincipal
from keyvault.access.roles import Role
from keyvault.models import Account, Merchant
from tests.factories import PRODUCTION, SANDBOX, account, have_peppers, make_merchant, make_operator
from tests.starting_rows import start_with


@dataclass(frozen=True)
class Scene:
    """One merchant, its two accounts, and one operator per role."""

    merchant: Merchant
    sandbox: Account
    production: Account
    tam: OperatorPrincipal
    approver: OperatorPrincipal
    admin: OperatorPrincipal
    responder: OperatorPrincipal


@pytest.fixture
def scene(db: None) -> Scene:
    return make_scene()


def make_scene(merchant_id: str = "acme") -> Scene:
    return start_with(_make_scene, merchant_id)


def _make_scene(merchant_id: str) -> Scene:
    have_peppers()
    return Scene(
        merchant=make_merchant(merchant_id),
        sandbox=account(merchant_id, SANDBOX),
        production=account(merchant_id, PRODUCTION),
        tam=make_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER),
        approver=make_operator("approver", Role.APPROVER),
        admin=make_operator("admin", Role.KEY_ADMINISTRATOR),
        responder=make_operator("responder", Role.INCIDENT_RESPONDER),
    )
