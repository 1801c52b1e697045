"""The retention of the tables of rotations; see `keyvault.services.retention`."""

from keyvault.services.retention import RetentionRule
from rotation.models import (
    BlackoutCalendar,
    Campaign,
    CampaignApproval,
    CampaignMember,
    Evidence,
    LedgerEntry,
    Retirement,
    Rotation,
    RotationApproval,
    RotationSchedule,
    ScheduleApproval,
    ScheduleCheck,
    ScheduledCredential,
    ScheduleSweep,
    StandingApproval,
)

RULES = (
    *(
        RetentionRule(table, "permanently: history of a key")
        for table in (
            *(Rotation, RotationApproval, Retirement, Campaign, CampaignApproval, CampaignMember),
            *(StandingApproval, ScheduleApproval),
        )
    ),
    *(RetentionRule(table, "with its rotation") for table in (Evidence, LedgerEntry)),
    *(RetentionRule(table, "permanently: configuration") for table in (RotationSchedule, BlackoutCalendar)),
    RetentionRule(ScheduledCredential, "with its credential"),
    RetentionRule(ScheduleSweep, "until the dates are computed"),
    RetentionRule(ScheduleCheck, "with its schedule"),
)
