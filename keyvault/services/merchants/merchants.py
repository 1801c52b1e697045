"""Merchants and their accounts."""

from collections.abc import Collection
from datetime import datetime

from django.db.models import Q, QuerySet

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.access.scopes import AccessScope
from keyvault.domain.audit import account_chain, chains_with
from keyvault.domain.environments import Environment
from keyvault.domain.errors import Fault, NotFoundError, RequestInvalidError, StateConflictError
from keyvault.domain.free_text import find_text_fault
from keyvault.domain.ids import is_merchant_id
from keyvault.models import Account, Merchant, MerchantStatus
from keyvault.services.recording.audit_chain import open_chain
from keyvault.services.recording.transaction import recorded


def create_merchant(grant: Grant, *, merchant_id: str, name: str) -> Merchant:
    """Create a merchant with an account and an audit chain in each environment.

    Raises RequestInvalidError with faults, StateConflictError when the merchant id is taken.
    """
    faults = []
    if not is_merchant_id(merchant_id):
        faults.append(Fault("/merchant_id", "1 to 64 of a-z, 0-9 and inner hyphens"))
    if (fault := find_text_fault(name, 200)) is not None:
        faults.append(Fault("/name", fault))
    if faults:
        raise RequestInvalidError("The merchant cannot be created.", faults)
    if Merchant.objects.filter(merchant_id=merchant_id).exists():
        raise StateConflictError(f"Merchant {merchant_id} already exists. Choose another id.")
    with recorded(grant, Permission.MERCHANTS_WRITE, "merchant.created", merchant_id=merchant_id, name=name):
        merchant = Merchant(merchant_id=merchant_id, name=name, created_at=grant.at)
        merchant.save()
        for environment in Environment:
            Account(merchant=merchant, environment=environment, created_at=grant.at).save()
            for chain in chains_with(account_chain(merchant_id, environment)):
                open_chain(chain)
    return merchant


def suspend_merchant(grant: Grant, merchant: Merchant) -> None:
    """Deny all keys of the merchant in every environment until it is resumed."""
    _set_merchant_status(grant, merchant, MerchantStatus.SUSPENDED, "merchant.suspended")


def resume_merchant(grant: Grant, merchant: Merchant) -> None:
    _set_merchant_status(grant, merchant, MerchantStatus.ACTIVE, "merchant.resumed")


def suspend_account(grant: Grant, account: Account) -> None:
    """Deny all keys of the merchant in this environment until it is resumed."""
    _set_account_status(grant, account, MerchantStatus.SUSPENDED, "account.suspended")


def resume_account(grant: Grant, account: Account) -> None:
    _set_account_status(grant, account, MerchantStatus.ACTIVE, "account.resumed")


def scope_of_merchant(merchant: Merchant) -> AccessScope:
    """Return the merchant's accounts in both environments."""
    return AccessScope(frozenset({merchant.merchant_id}))


def find_account(merchant_id: str, environment: str) -> Account:
    """Return the account with its merchant. Raises NotFoundError."""
    account: Account | None = (
        Account.objects.select_related("merchant").filter(merchant=merchant_id, environment=environment).first()
    )
    if account is None:
        raise NotFoundError(f"There is no merchant {merchant_id} in {environment}.")
    return account


def select_accounts(merchants: Collection[str], accounts: Collection[str]) -> QuerySet[Account]:
    """Select all accounts of merchants, by merchant id, and single accounts, by `merchant/environment`."""
    named = Q(merchant__in=merchants)
    for name in accounts:
        merchant_id, _slash, environment = name.rpartition("/")
        named |= Q(merchant=merchant_id, environment=environment)
    return Account.objects.filter(named)


def require_not_offboarded(account: Account) -> None:
    """Require a merchant that is not offboarded, inside the transaction that adds something to its account.

    Locks the account's row, so that an offboarding either precedes the addition (this raises StateConflictError) or
    finds it. Other accounts do not wait.
    """
    Account.objects.select_for_update(no_key=True).get(pk=account.pk)
    _refuse_offboarded(Merchant.objects.get(pk=account.merchant_id))


def _refuse_offboarded(merchant: Merchant) -> None:
    if merchant.status == MerchantStatus.OFFBOARDED:
        raise StateConflictError("The merchant was offboarded, permanently. Create a new one.")


def _set_merchant_status(grant: Grant, merchant: Merchant, status: MerchantStatus, event: str) -> None:
    _refuse_offboarded(merchant)
    if merchant.status == status:
        raise StateConflictError(f"The merchant is already {status}.")
    with recorded(
        grant, Permission.MERCHANTS_WRITE, event, account=scope_of_merchant(merchant), merchant_id=merchant.merchant_id
    ):
        merchant.compare_and_swap(status=status, **_resumption(grant, status))


def _set_account_status(grant: Grant, account: Account, status: MerchantStatus, event: str) -> None:
    _refuse_offboarded(account.merchant)
    if account.status == status:
        raise StateConflictError(f"The account is already {status}.")
    with recorded(grant, Permission.MERCHANTS_WRITE, event, account=account):
        account.compare_and_swap(status=status, **_resumption(grant, status))


def _resumption(grant: Grant, status: MerchantStatus) -> dict[str, datetime]:
    return {"resumed_at": grant.at} if status is MerchantStatus.ACTIVE else {}
