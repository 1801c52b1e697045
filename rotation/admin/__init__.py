"""The console pages of rotations, registered when Django looks for admin modules."""

from typing import cast

from django.contrib import admin

from keyvault.admin.framework.subject_pages import register_pages
from keyvault.admin.site import ConsoleSite
from rotation.admin import (
    blackouts,
    campaigns,
    emergency,
    incidents,
    overview,
    retirements,
    rotations,
    schedules,
    standing_approvals,
)

__all__ = [
    "blackouts",
    "campaigns",
    "emergency",
    "incidents",
    "overview",
    "retirements",
    "rotations",
    "schedules",
    "standing_approvals",
]

emergency.extend_console(cast(ConsoleSite, admin.site))
for console_page in incidents.PAGES:
    cast(ConsoleSite, admin.site).add_page(console_page)
cast(ConsoleSite, admin.site).add_overview_part(overview.PART)
cast(ConsoleSite, admin.site).add_page(blackouts.CALENDAR_CHOICES)
register_pages(
    by_prefix={"rot_": "rotation_rotation", "cmp_": "rotation_campaign", "sta_": "rotation_standingapproval"},
    by_kind={"schedule": ("schedule", "rotation_rotationschedule")},
    by_field={"rotation_id": "rotation_rotation", "standing_approval_id": "rotation_standingapproval"},
)
