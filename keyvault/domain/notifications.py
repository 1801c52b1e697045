"""The events of a credential's life that its merchant and its operators are told of. PURE."""

from enum import StrEnum


class NoticeKind(StrEnum):
    """Stable for ever: merchants switch on these names."""

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
    ROTATION_ENDED = "rotation.ended"
    CAMPAIGN_HALTED = "campaign.halted"
    CREDENTIAL_WITHOUT_KEY = "credential.without_key"
    WEBHOOK_FAILED = "webhook.failed"
    WEBHOOK_TEST = "webhook.test"
    BACKEND_STRANGER = "backend.stranger"
    BACKEND_DENIED = "backend.denied"
    JOURNAL_FAILED = "journal.failed"


ALARMS = frozenset(
    {
        NoticeKind.KEY_COMPROMISED,
        NoticeKind.USED_IN_QUARANTINE,
        NoticeKind.ROTATION_STALLED,
        NoticeKind.ROTATION_BYPASSED,
        NoticeKind.CAMPAIGN_HALTED,
        NoticeKind.CREDENTIAL_WITHOUT_KEY,
        NoticeKind.WEBHOOK_FAILED,
        NoticeKind.BACKEND_STRANGER,
        NoticeKind.BACKEND_DENIED,
        NoticeKind.JOURNAL_FAILED,
    }
)
"""What somebody has to look at."""

INTERNAL = frozenset(
    {NoticeKind.ROTATION_BYPASSED, NoticeKind.CAMPAIGN_HALTED, NoticeKind.WEBHOOK_FAILED}
    | {NoticeKind.BACKEND_STRANGER, NoticeKind.BACKEND_DENIED, NoticeKind.JOURNAL_FAILED}
)
"""What is told to operators alone."""
