"""The console pages of rotations, registered when Django looks for admin modules."""

from typing import cast

from django.contrib import admin

from keyvault.admin.site import ConsoleSite
from rotation.admin import blackouts, campaigns, emergency, retirements, rotations, schedules

__all__ = ["blackouts", "campaigns", "emergency", "retirements", "rotations", "schedules"]

emergency.extend_console(cast(ConsoleSite, admin.site))
