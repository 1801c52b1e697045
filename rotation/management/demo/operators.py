"""The operators of the demo; they use the same services as the console."""

from collections.abc import Callable
from datetime import UTC, datetime

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.domain.environments import Environment
from keyvault.domain.errors import KeyvaultError
from keyvault.domain.issuance import Delivery
from keyvault.domain.keys import KeyKind
from keyvault.domain.plaintext import Plaintext
from keyvault.models import Account, IssuanceRequest
from keyvault.services.issuance import requests
from keyvault.services.merchants.merchants import find_account
from keyvault.services.operators.operators import find_operator
from keyvault.services.recording.authorization import authorize, find_host_user

MERCHANT = "acme"


def request_key(username: str) -> IssuanceRequest:
    """Request a private sandbox key for the merchant, delivered to the secret backend."""
    account = find_account(MERCHANT, Environment.SANDBOX)
    return requests.request_issuance(
        _grant(username, Permission.ISSUANCE_REQUEST, account),
        account,
        kind=KeyKind.PRIVATE,
        label="demo",
        delivery=Delivery.SECRET_BACKEND,
    )


def approve(username: str, request: IssuanceRequest) -> None:
    grant = _grant(username, Permission.ISSUANCE_APPROVE, request.account, request.requester_person)
    requests.approve_issuance(grant, request, request.plan_digest)


def withdraw(username: str, request: IssuanceRequest) -> None:
    requests.withdraw_issuance(_grant(username, Permission.ISSUANCE_WITHDRAW, request.account), request)


def collect(username: str, request: IssuanceRequest) -> Plaintext:
    return requests.collect_key(_grant(username, Permission.ISSUANCE_COLLECT, request.account), request)


def refusal_of(act: Callable[[], object]) -> str | None:
    """Return the error detail with which the action was refused; None when it was not."""
    try:
        act()
    except KeyvaultError as error:
        return error.detail
    return None


def _grant(username: str, permission: Permission, account: Account, requester_person: str | None = None) -> Grant:
    operator = find_operator(username, host_user=find_host_user())
    return authorize(operator, permission, account, now=datetime.now(UTC), requester_person=requester_person)
