"""Database models with their constraints, without business decisions."""

from keyvault.models.audit import AuditChain, AuditCheckpoint, AuditEntry, BreakGlass, Change
from keyvault.models.catalog import CatalogEndpoint, LimitOverride
from keyvault.models.customers import CustomerToken
from keyvault.models.idempotency import IdempotentRequest
from keyvault.models.issuance import IssuanceApproval, IssuanceRequest
from keyvault.models.keys import Credential, Key, Material
from keyvault.models.leases import WorkLease
from keyvault.models.merchants import Account, Merchant, MerchantStatus, ProviderConnection, WebhookEndpoint
from keyvault.models.notifications import (
    AlarmChannel,
    AlarmDelivery,
    DeliveryState,
    Notice,
    WebhookBreaker,
    WebhookDelivery,
)
from keyvault.models.operator_changes import (
    OperatorChange,
    OperatorChangeApproval,
    OperatorChangeKind,
    OperatorChangeState,
)
from keyvault.models.operators import Operator, RoleUse
from keyvault.models.orders import Order
from keyvault.models.peppers import Installation, PepperVersion
from keyvault.models.processes import ServiceProcess
from keyvault.models.recipient_keys import RecipientKey, RecipientKeyApproval
from keyvault.models.refusals import Refusal
from keyvault.models.sessions import ConsoleSession
from keyvault.models.tokens import ServiceToken
from keyvault.models.usage import KeyAttempt, KeySource, KeyUse, UsageReporter, UsageTotal, UseBucket, UseContext
from keyvault.models.verifiers import Confirmation, FeedReader, Verifier

__all__ = [
    "Account",
    "AlarmChannel",
    "AlarmDelivery",
    "AuditChain",
    "AuditCheckpoint",
    "AuditEntry",
    "BreakGlass",
    "CatalogEndpoint",
    "Change",
    "Confirmation",
    "ConsoleSession",
    "Credential",
    "CustomerToken",
    "DeliveryState",
    "FeedReader",
    "IdempotentRequest",
    "Installation",
    "IssuanceApproval",
    "IssuanceRequest",
    "Key",
    "KeyAttempt",
    "KeySource",
    "KeyUse",
    "LimitOverride",
    "Material",
    "Merchant",
    "MerchantStatus",
    "Notice",
    "Operator",
    "OperatorChange",
    "OperatorChangeApproval",
    "OperatorChangeKind",
    "OperatorChangeState",
    "Order",
    "PepperVersion",
    "ProviderConnection",
    "RecipientKey",
    "RecipientKeyApproval",
    "Refusal",
    "RoleUse",
    "ServiceProcess",
    "ServiceToken",
    "UsageReporter",
    "UsageTotal",
    "UseBucket",
    "UseContext",
    "Verifier",
    "WebhookBreaker",
    "WebhookDelivery",
    "WebhookEndpoint",
    "WorkLease",
]
