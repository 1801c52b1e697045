"""The retention of every table, in one list: what is deleted, when, and which setting decides.

Each deletion removes a bounded batch by an index, so that a backlog is worked off over several runs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from allauth.mfa.models import Authenticator
from allauth.socialaccount.models import SocialAccount
from django.db.models import Model

from keyvault.access.limits import SESSION_IDLE_SECONDS, SESSION_SECONDS
from keyvault.models import (
    Account,
    AlarmDelivery,
    AuditChain,
    AuditCheckpoint,
    AuditEntry,
    BreakGlass,
    CatalogEndpoint,
    Change,
    Confirmation,
    ConsoleSession,
    Credential,
    CustomerToken,
    FeedReader,
    IdempotentRequest,
    Installation,
    IssuanceApproval,
    IssuanceRequest,
    Key,
    KeyAttempt,
    KeySource,
    KeyUse,
    LimitOverride,
    Merchant,
    Notice,
    Operator,
    OperatorChange,
    OperatorChangeApproval,
    Order,
    PepperVersion,
    ProviderConnection,
    RecipientKey,
    RecipientKeyApproval,
    Refusal,
    RoleUse,
    ServiceProcess,
    ServiceToken,
    UsageReporter,
    UsageTotal,
    UseBucket,
    UseContext,
    Verifier,
    WebhookBreaker,
    WebhookDelivery,
    WebhookEndpoint,
    WorkLease,
)
from keyvault.services import alarm_messages, idempotency
from keyvault.services.change_feed import follower, readers
from keyvault.services.sessions import sessions
from keyvault.services.tokens import customer_tokens
from keyvault.services.usage import retention as usage
from keyvault.services.usage import totals
from keyvault.services.verification import refusals
from keyvault.services.webhooks import deliveries
from keyvault.services.work import leases


@dataclass(frozen=True, slots=True)
class RetentionRule:
    """The retention of a table's rows.

    `kept`: text for the documentation, in which `{days}` stands for the default of `setting`. `forget`: deletes a batch
    of expired rows and returns how many; None: the rows are permanent, or deleted with the row that `kept` names.
    """

    table: type[Model]
    kept: str
    setting: str = ""
    forget: Callable[[datetime], int] | None = None


def _days(period: timedelta) -> str:
    return f"{period.days} days"


RULES = (
    RetentionRule(
        IdempotentRequest,
        f"{idempotency.KEEP // timedelta(hours=1)} hours; a sealed secret "
        f"{idempotency.SEALED_FOR // timedelta(minutes=1)} minutes",
        forget=idempotency.forget_expired,
    ),
    RetentionRule(
        Refusal,
        f"{{days}} days; {refusals.UNPROVED_KEPT_FOR // timedelta(hours=1)} hours without a proved key",
        "KEYVAULT_REFUSAL_DAYS",
        refusals.forget_old,
    ),
    RetentionRule(
        WebhookDelivery,
        "{days} days after the last attempt",
        "KEYVAULT_DELIVERY_DAYS",
        deliveries.forget_old_deliveries,
    ),
    RetentionRule(
        AlarmDelivery,
        f"until it is delivered; at most {_days(alarm_messages.GIVE_UP_AFTER)}",
        forget=alarm_messages.forget_old,
    ),
    RetentionRule(
        Notice,
        "{days} days; an alarm at least until an operator has seen it",
        "KEYVAULT_NOTICE_DAYS",
        deliveries.forget_old_notices,
    ),
    RetentionRule(
        CustomerToken,
        "{days} days after its expiry",
        "KEYVAULT_CUSTOMER_TOKEN_DAYS",
        customer_tokens.forget_expired_tokens,
    ),
    RetentionRule(
        UseBucket,
        "{days} days; by minute for `KEYVAULT_USAGE_MINUTE_DAYS`, and by hour for `KEYVAULT_USAGE_HOUR_DAYS`",
        "KEYVAULT_USAGE_DAYS",
        usage.forget_old,
    ),
    RetentionRule(UsageTotal, _days(totals.KEPT_FOR), forget=totals.forget_old),
    RetentionRule(UseContext, "with its last bucket; addresses and user agents for `KEYVAULT_USAGE_HOUR_DAYS`"),
    RetentionRule(KeySource, "with the last minute in which the source was seen"),
    RetentionRule(
        UsageReporter,
        "7 days after the process ended; the row of the last lost process of each environment and set of merchants "
        "permanently",
    ),
    RetentionRule(
        Change,
        "{days} days; the newest changes, and those that a live verifier has yet to confirm, longer",
        "KEYVAULT_CHANGE_DAYS",
        follower.forget_old_changes,
    ),
    RetentionRule(FeedReader, "1 hour after its last read", forget=readers.forget_old_readers),
    RetentionRule(
        Confirmation,
        f"{_days(follower.CONFIRMATIONS_KEPT_FOR)}; of a verifier that stopped, {_days(follower.GONE_KEPT_FOR)} after "
        "its last confirmation",
        forget=follower.forget_old,
    ),
    RetentionRule(Verifier, f"{_days(follower.GONE_KEPT_FOR)} after its last confirmation"),
    RetentionRule(Authenticator, "until its operator or a reset removes it"),
    RetentionRule(
        ConsoleSession,
        f"until it ends, {SESSION_IDLE_SECONDS // 60} minutes after its last use or {SESSION_SECONDS // 3600} hours "
        "after its start",
        forget=sessions.forget_expired_sessions,
    ),
    RetentionRule(
        WorkLease,
        "until the work is done; {days} days if no worker claims it any more",
        "KEYVAULT_LEASE_DAYS",
        leases.forget_abandoned,
    ),
    RetentionRule(WebhookBreaker, "until the endpoint responds"),
    RetentionRule(ServiceProcess, "until the process shuts down normally; 7 days after it was lost"),
    RetentionRule(RoleUse, "while the operator has the role"),
    *(
        RetentionRule(table, "permanently: evidence")
        for table in (
            AuditChain,
            AuditEntry,
            AuditCheckpoint,
            BreakGlass,
            Order,
            OperatorChange,
            OperatorChangeApproval,
        )
    ),
    *(
        RetentionRule(table, "permanently: history of a key")
        for table in (
            Credential,
            Key,
            KeyUse,
            KeyAttempt,
            IssuanceRequest,
            IssuanceApproval,
            RecipientKey,
            RecipientKeyApproval,
        )
    ),
    *(
        RetentionRule(table, "permanently: configuration")
        for table in (
            Merchant,
            Account,
            ProviderConnection,
            WebhookEndpoint,
            LimitOverride,
            CatalogEndpoint,
            ServiceToken,
            Operator,
            SocialAccount,
            PepperVersion,
            Installation,
        )
    ),
)


def list_deletions() -> dict[str, Callable[[datetime], int]]:
    """Return, by table, the function that deletes one batch of expired rows and returns their number."""
    return {rule.table._meta.db_table: rule.forget for rule in RULES if rule.forget is not None}
