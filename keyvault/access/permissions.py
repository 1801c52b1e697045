"""The permissions of the service, `<resource>:<action>`, and the subset that service tokens may hold."""

from enum import StrEnum


class Permission(StrEnum):
    MERCHANTS_READ = "merchants:read"
    MERCHANTS_WRITE = "merchants:write"
    MERCHANTS_OFFBOARD = "merchants:offboard"
    WEBHOOKS_WRITE = "webhooks:write"
    WEBHOOKS_DELIVER = "webhooks:deliver"
    NOTICES_READ = "notices:read"
    NOTICES_MARK = "notices:mark"
    KEYS_READ = "keys:read"
    KEYS_VERIFY = "keys:verify"
    KEYS_REPLICATE = "keys:replicate"
    KEYS_REPLICATE_DIGESTS = "keys:replicate_digests"
    KEYS_SUSPEND = "keys:suspend"
    KEYS_RESUME = "keys:resume"
    KEYS_REVOKE = "keys:revoke"
    KEYS_REVOKE_SELF = "keys:revoke_self"
    KEYS_REPORT_COMPROMISE = "keys:report_compromise"
    CREDENTIALS_RESTRICT = "credentials:restrict"
    RECIPIENTS_WRITE = "recipients:write"
    RECIPIENTS_APPROVE = "recipients:approve"
    RECIPIENTS_WITHDRAW = "recipients:withdraw"
    CATALOG_READ = "catalog:read"
    CATALOG_WRITE = "catalog:write"
    LIMITS_WRITE = "limits:write"
    ORDERS_CREATE = "orders:create"
    CUSTOMER_TOKENS_WRITE = "customer_tokens:write"
    VERDICTS_EXPLAIN = "verdicts:explain"
    ISSUANCE_READ = "issuance:read"
    ISSUANCE_REQUEST = "issuance:request"
    ISSUANCE_APPROVE = "issuance:approve"
    ISSUANCE_REJECT = "issuance:reject"
    ISSUANCE_WITHDRAW = "issuance:withdraw"
    ISSUANCE_COLLECT = "issuance:collect"
    ISSUANCE_EXECUTE = "issuance:execute"
    ROTATIONS_READ = "rotations:read"
    ROTATIONS_WRITE = "rotations:write"
    ROTATIONS_APPROVE = "rotations:approve"
    ROTATIONS_BYPASS = "rotations:bypass"
    ROTATIONS_BEGIN = "rotations:begin"
    SCHEDULES_WRITE = "schedules:write"
    ROTATIONS_ADVANCE = "rotations:advance"
    ROTATIONS_ACKNOWLEDGE = "rotations:acknowledge"
    TOKENS_READ = "tokens:read"
    TOKENS_WRITE = "tokens:write"
    OPERATORS_READ = "operators:read"
    OPERATORS_WRITE = "operators:write"
    OPERATORS_APPROVE = "operators:approve"
    OPERATORS_ENROLL = "operators:enroll"
    SESSIONS_WRITE = "sessions:write"
    AUDIT_READ = "audit:read"
    AUDIT_SIGN = "audit:sign"
    CONNECTIONS_READ = "connections:read"
    CONNECTIONS_WRITE = "connections:write"
    PEPPERS_READ = "peppers:read"
    PEPPERS_WRITE = "peppers:write"
    KEYS_REHASH = "keys:rehash"
    BACKEND_RECONCILE = "backend:reconcile"
    REVOCATION_LOG_APPEND = "revocation_log:append"
    PROCESSES_WATCH = "processes:watch"
    REVOCATIONS_REPLAY = "revocations:replay"
    INSTALLATION_MAINTAIN = "installation:maintain"
    BREAK_GLASS_REVIEW = "break_glass:review"


SERVICE_PERMISSIONS = frozenset(
    {
        Permission.KEYS_READ,
        Permission.KEYS_VERIFY,
        Permission.KEYS_REVOKE,
        Permission.KEYS_REPLICATE,
        Permission.KEYS_REPLICATE_DIGESTS,
        Permission.ISSUANCE_REQUEST,
        Permission.ISSUANCE_COLLECT,
        Permission.ROTATIONS_READ,
        Permission.ROTATIONS_WRITE,
    }
)
"""Permissions that a service token may hold. Approvals are reserved for people."""
