"""Database models of rotations with their constraints, without business decisions."""

from rotation.models.campaigns import Campaign, CampaignApproval, CampaignMember, CampaignState
from rotation.models.evidence import Evidence, EvidenceKind
from rotation.models.ledger import LedgerEntry, LedgerState
from rotation.models.retirements import Retirement
from rotation.models.rotations import Rotation, RotationApproval, explain_unreadable
from rotation.models.schedules import (
    BlackoutCalendar,
    RotationSchedule,
    ScheduleCheck,
    ScheduledCredential,
    ScheduleSweep,
)
from rotation.models.standing_approvals import ScheduleApproval, StandingApproval, StandingApprovalState

__all__ = [
    "BlackoutCalendar",
    "Campaign",
    "CampaignApproval",
    "CampaignMember",
    "CampaignState",
    "Evidence",
    "EvidenceKind",
    "LedgerEntry",
    "LedgerState",
    "Retirement",
    "Rotation",
    "RotationApproval",
    "RotationSchedule",
    "ScheduleApproval",
    "ScheduleCheck",
    "ScheduleSweep",
    "ScheduledCredential",
    "StandingApproval",
    "StandingApprovalState",
    "explain_unreadable",
]
