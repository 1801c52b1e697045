"""The permissions of each operator role. A migration mirrors this table in the console's Django groups.

No role lets a person approve their own requests, not even by creating a service token: `access.decision` compares
persons. No role has `operators:enroll`: an operator who could create another one could act as two persons. Only the
host and single sign-on create operators.
"""

from enum import StrEnum

from keyvault.access.permissions import Permission as P


class Role(StrEnum):
    KEY_ADMINISTRATOR = "key_administrator"
    TECHNICAL_ACCOUNT_MANAGER = "technical_account_manager"
    APPROVER = "approver"
    AUDITOR = "auditor"
    INCIDENT_RESPONDER = "incident_responder"


_READ = frozenset(
    {P.MERCHANTS_READ, P.KEYS_READ, P.ISSUANCE_READ, P.ROTATIONS_READ, P.CATALOG_READ, P.VERDICTS_EXPLAIN}
    | {P.NOTICES_READ, P.CONNECTIONS_READ}
)
_ALL = _READ | {P.SESSIONS_WRITE}
"""Permissions of every operator: read, and start and end their own session."""

_REQUEST = frozenset({P.ISSUANCE_REQUEST, P.ISSUANCE_WITHDRAW, P.ISSUANCE_COLLECT, P.ROTATIONS_WRITE})
_APPROVE = frozenset(
    {P.ISSUANCE_APPROVE, P.ISSUANCE_REJECT, P.ROTATIONS_APPROVE, P.BREAK_GLASS_REVIEW}
    | {P.OPERATORS_READ, P.OPERATORS_APPROVE, P.RECIPIENTS_APPROVE}
)
_STOP = frozenset({P.KEYS_SUSPEND, P.KEYS_REVOKE, P.KEYS_REPORT_COMPROMISE, P.RECIPIENTS_WITHDRAW})

ROLE_PERMISSIONS: dict[Role, frozenset[P]] = {
    Role.KEY_ADMINISTRATOR: _ALL
    | _REQUEST
    | _APPROVE
    | _STOP
    | {P.KEYS_RESUME, P.MERCHANTS_WRITE, P.TOKENS_READ, P.TOKENS_WRITE, P.AUDIT_READ}
    | {P.CATALOG_WRITE, P.LIMITS_WRITE, P.CREDENTIALS_RESTRICT, P.WEBHOOKS_WRITE, P.SCHEDULES_WRITE}
    | {P.NOTICES_MARK, P.ROTATIONS_BYPASS, P.MERCHANTS_OFFBOARD}
    | {P.CONNECTIONS_WRITE, P.PEPPERS_READ, P.OPERATORS_WRITE},
    Role.TECHNICAL_ACCOUNT_MANAGER: _ALL
    | _REQUEST
    | {P.KEYS_SUSPEND, P.LIMITS_WRITE, P.WEBHOOKS_WRITE, P.SCHEDULES_WRITE, P.NOTICES_MARK, P.CONNECTIONS_WRITE},
    Role.APPROVER: _ALL | _APPROVE | {P.NOTICES_MARK},
    Role.AUDITOR: _ALL | {P.TOKENS_READ, P.AUDIT_READ, P.PEPPERS_READ, P.OPERATORS_READ},
    Role.INCIDENT_RESPONDER: _ALL
    | _STOP
    | {P.TOKENS_READ, P.AUDIT_READ, P.NOTICES_MARK, P.ROTATIONS_WRITE, P.ROTATIONS_BYPASS, P.MERCHANTS_OFFBOARD},
}

FOUR_EYES_ROLES = frozenset({Role.APPROVER, Role.KEY_ADMINISTRATOR})
"""Roles that an operator gets only with the approval of a second person."""


def permissions_of(roles: frozenset[Role]) -> frozenset[P]:
    return frozenset().union(*(ROLE_PERMISSIONS[role] for role in roles))


def roles_with(permission: P, roles: frozenset[Role]) -> frozenset[Role]:
    """Return the roles that have the permission; none if every operator has it."""
    if permission in _ALL:
        return frozenset()
    return frozenset(role for role in roles if permission in ROLE_PERMISSIONS[role])
