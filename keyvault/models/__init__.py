"""Rows and constraints; no decisions."""

from keyvault.models.audit import AuditChain, AuditEntry, BreakGlass, Change
from keyvault.models.issuance import IssuanceApproval, IssuanceRequest
from keyvault.models.keys import Credential, Key, Material
from keyvault.models.leases import WorkLease
from keyvault.models.merchants import Account, Merchant, MerchantStatus, ProviderConnection, WebhookEndpoint
from keyvault.models.operators import Operator
from keyvault.models.peppers import PepperVersion
from keyvault.models.tokens import ServiceToken
from keyvault.models.usage import KeyUse, UsageReporter, UseBucket

__all__ = [
    "Account",
    "AuditChain",
    "AuditEntry",
    "BreakGlass",
    "Change",
    "Credential",
    "IssuanceApproval",
    "IssuanceRequest",
    "Key",
    "KeyUse",
    "Material",
    "Merchant",
    "MerchantStatus",
    "Operator",
    "PepperVersion",
    "ProviderConnection",
    "ServiceToken",
    "UsageReporter",
    "UseBucket",
    "WebhookEndpoint",
    "WorkLease",
]
