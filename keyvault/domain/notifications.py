"""Notification events of a credential's lifecycle, for merchants and operators."""

from enum import StrEnum


class NoticeKind(StrEnum):
    """Published event names. Merchants branch on them, so they never change."""

    KEY_ISSUED = "key.issued"
    KEY_REVOKED = "key.revoked"
    KEY_COMPROMISED = "key.compromised"
    ROTATION_PLANNED = "rotation.planned"
    REPLACEMENT_AVAILABLE = "rotation.replacement_available"
    PREDECESSOR_AVAILABLE = "rotation.predecessor_available"
    REPLACEMENT_AWAITED = "rotation.replacement_awaited"
    PREDECESSOR_RETIRING = "rotation.predecessor_retiring"
    USED_IN_QUARANTINE = "rotation.used_in_quarantine"
    ROTATION_STALLED = "rotation.stalled"
    ROTATION_BYPASSED = "rotation.bypassed"
    ROTATION_BLOCKED = "rotation.blocked"
    ROTATION_ENDED = "rotation.ended"
    SCHEDULE_STALLED = "schedule.stalled"
    STANDING_APPROVAL_EXPIRING = "standing_approval.expiring"
    STANDING_APPROVAL_EXPIRED = "standing_approval.expired"
    CAMPAIGN_HALTED = "campaign.halted"
    CREDENTIAL_WITHOUT_KEY = "credential.without_key"
    RECIPIENT_KEY_SET = "credential.recipient_key_set"
    WEBHOOK_FAILED = "webhook.failed"
    WEBHOOK_TEST = "webhook.test"
    BACKEND_UNATTRIBUTED = "backend.unattributed"
    BACKEND_DENIED = "backend.denied"
    REVOCATION_LOG_FAILED = "journal.failed"
    OPERATOR_LOCKED = "operator.locked"
    ADDRESS_LOCKED = "address.locked"
    REVOCATION_LOG_LOSS_ACCEPTED = "journal.loss_accepted"
    AUDIT_ROLLBACK_ACCEPTED = "audit.rollback_accepted"
    ANCHOR_LATE = "anchor.late"
    CLOCK_DIFFERS = "clock.differs"
    PROCESS_LOST = "process.lost"
    QUEUE_LATE = "queue.late"
    APPROVAL_DISOWNED = "approval.disowned"
    UNFAMILIAR_SIGN_IN = "operator.unfamiliar_sign_in"
    OPERATOR_INVITED = "operator.invited"


ALARMS = frozenset(
    {
        NoticeKind.KEY_COMPROMISED,
        NoticeKind.USED_IN_QUARANTINE,
        NoticeKind.ROTATION_STALLED,
        NoticeKind.ROTATION_BYPASSED,
        NoticeKind.ROTATION_BLOCKED,
        NoticeKind.SCHEDULE_STALLED,
        NoticeKind.STANDING_APPROVAL_EXPIRED,
        NoticeKind.CAMPAIGN_HALTED,
        NoticeKind.CREDENTIAL_WITHOUT_KEY,
        NoticeKind.RECIPIENT_KEY_SET,
        NoticeKind.WEBHOOK_FAILED,
        NoticeKind.BACKEND_UNATTRIBUTED,
        NoticeKind.BACKEND_DENIED,
        NoticeKind.REVOCATION_LOG_FAILED,
        NoticeKind.OPERATOR_LOCKED,
        NoticeKind.ADDRESS_LOCKED,
        NoticeKind.REVOCATION_LOG_LOSS_ACCEPTED,
        NoticeKind.AUDIT_ROLLBACK_ACCEPTED,
        NoticeKind.ANCHOR_LATE,
        NoticeKind.CLOCK_DIFFERS,
        NoticeKind.PROCESS_LOST,
        NoticeKind.QUEUE_LATE,
        NoticeKind.APPROVAL_DISOWNED,
        NoticeKind.OPERATOR_INVITED,
    }
)
"""Events that require an operator's attention."""

WITHOUT_ACCOUNT = frozenset(
    {NoticeKind.OPERATOR_LOCKED, NoticeKind.ADDRESS_LOCKED, NoticeKind.CLOCK_DIFFERS, NoticeKind.PROCESS_LOST}
    | {NoticeKind.APPROVAL_DISOWNED, NoticeKind.UNFAMILIAR_SIGN_IN, NoticeKind.OPERATOR_INVITED}
    | {NoticeKind.AUDIT_ROLLBACK_ACCEPTED, NoticeKind.ANCHOR_LATE, NoticeKind.QUEUE_LATE}
)
"""Events of the installation, which belong to no merchant's account."""

INTERNAL = frozenset(
    {NoticeKind.ROTATION_BYPASSED, NoticeKind.ROTATION_BLOCKED, NoticeKind.SCHEDULE_STALLED}
    | {NoticeKind.STANDING_APPROVAL_EXPIRING, NoticeKind.STANDING_APPROVAL_EXPIRED}
    | {NoticeKind.CAMPAIGN_HALTED, NoticeKind.WEBHOOK_FAILED}
    | {NoticeKind.BACKEND_UNATTRIBUTED, NoticeKind.BACKEND_DENIED}
    | {NoticeKind.REVOCATION_LOG_FAILED, NoticeKind.REVOCATION_LOG_LOSS_ACCEPTED}
    | WITHOUT_ACCOUNT
)
"""Events that only operators receive."""
