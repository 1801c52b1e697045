"""Schedules, which begin rotations, calendars of periods in which none begins, and when each credential is due."""

from django.conf import settings
from django.db import models
from django.db.models import F, Q

from keyvault.domain.environments import Environment
from keyvault.models.columns import at, choice, choices_check, created_at
from keyvault.models.keys import Credential
from keyvault.models.merchants import Account
from keyvault.models.recording import RecordedModel


class BlackoutCalendar(RecordedModel):
    """A named calendar of periods in which no rotation begins.

    `periods`: [{"begins_at", "ends_at", "why"}], times in ISO 8601 with an offset.
    """

    name = models.CharField(primary_key=True, max_length=64)
    periods = models.JSONField(default=list)
    created_at = created_at()

    def __str__(self) -> str:
        return self.name

    def alters(self) -> None:
        return None


class RotationSchedule(RecordedModel):
    """A rotation schedule of an environment, an account or one credential; the narrowest schedule applies.

    `window`: as `windows.Window.as_json` writes it, without blackouts, which come from the `calendar`; None: any time.
    A key falls due `cryptoperiod_days` after its activation, less up to `jitter_days` derived from the credential's
    id. The rotation is requested `lead_days` before, so that it can be approved in time. `overrides`: plan values that
    replace the environment's defaults. `author`: the requester of its rotations. `is_author_claimed`: the author was
    named on a command line, which proves no identity.
    """

    environment = choice(Environment)
    account = models.ForeignKey(Account, models.PROTECT, null=True, blank=True, related_name="rotation_schedules")
    credential = models.ForeignKey(Credential, models.PROTECT, null=True, blank=True, related_name="rotation_schedules")
    cryptoperiod_days = models.PositiveIntegerField()
    jitter_days = models.PositiveIntegerField(default=0)
    lead_days = models.PositiveIntegerField(default=0)
    window = models.JSONField(null=True, blank=True)
    calendar = models.ForeignKey(BlackoutCalendar, models.PROTECT, null=True, blank=True, related_name="schedules")
    overrides = models.JSONField(default=dict, blank=True)
    is_enabled = models.BooleanField(default=True)
    author = models.ForeignKey(settings.AUTH_USER_MODEL, models.PROTECT, related_name="rotation_schedules")
    author_person = models.CharField(max_length=32)
    is_author_claimed = models.BooleanField()
    created_at = created_at()

    class Meta:
        constraints = [
            choices_check("schedule_environment", "environment", Environment),
            models.CheckConstraint(name="schedule_cryptoperiod", condition=Q(cryptoperiod_days__range=(1, 3650))),
            models.CheckConstraint(name="schedule_jitter", condition=Q(jitter_days__lt=F("cryptoperiod_days"))),
            models.CheckConstraint(
                name="schedule_scope", condition=Q(account__isnull=True) | Q(credential__isnull=True)
            ),
            models.UniqueConstraint(
                fields=["environment"],
                name="schedule_one_of_environment",
                condition=Q(account__isnull=True, credential__isnull=True),
            ),
            models.UniqueConstraint(
                fields=["account"], name="schedule_one_of_account", condition=Q(account__isnull=False)
            ),
            models.UniqueConstraint(
                fields=["credential"], name="schedule_one_of_credential", condition=Q(credential__isnull=False)
            ),
        ]

    def __str__(self) -> str:
        return f"every {self.cryptoperiod_days} days in {self.credential_id or self.account or self.environment}"

    def alters(self) -> None:
        return None


class ScheduledCredential(models.Model):
    """When a worker requests the next rotation of a private credential. No verdict reads it, so it is not recorded.

    `ask_at`: when the rotation is requested, or an earlier time at which a worker computes that; None: no schedule
    applies, a person must act, or the open rotation must end. `refusals`, `why`: the number of consecutive refused
    requests, and the latest refusal. `revision`: incremented by each write, so that a worker overwrites only what it
    has read.
    """

    credential = models.OneToOneField(Credential, models.PROTECT, primary_key=True, related_name="+")
    # Copies of the credential's account and environment, which never change. The index serves the foreign key.
    account = models.ForeignKey(Account, models.PROTECT, related_name="+", db_index=False)
    environment = choice(Environment)
    ask_at = at()
    refusals = models.PositiveSmallIntegerField(default=0)
    why = models.CharField(max_length=300, blank=True)
    revision = models.PositiveIntegerField(default=0)

    class Meta:
        indexes = [
            models.Index(fields=["environment", "ask_at", "credential"], name="scheduled_by_ask_at"),
            models.Index(fields=["account", "ask_at", "credential"], name="scheduled_of_account"),
        ]

    def __str__(self) -> str:
        return f"{self.credential_id} at {self.ask_at}"


class ScheduleSweep(models.Model):
    """A pending computation of `ask_at` for all private credentials of an account, or of an environment.

    Workers run it in batches. `after`: the last credential processed; empty: none.
    """

    environment = choice(Environment)
    account = models.ForeignKey(Account, models.PROTECT, null=True, blank=True, related_name="+")
    after = models.CharField(max_length=32, blank=True)

    def __str__(self) -> str:
        return f"{self.account or self.environment} after {self.after or 'none'}"


class ScheduleCheck(models.Model):
    """When a worker next verifies that this release can read an enabled schedule.

    `fault`: why the release could not read it at the last check; an alarm was raised for it.
    """

    schedule = models.OneToOneField(RotationSchedule, models.CASCADE, primary_key=True, related_name="+")
    check_at = models.DateTimeField(db_index=True)
    fault = models.CharField(max_length=300, blank=True)

    def __str__(self) -> str:
        return f"{self.schedule_id}: {self.fault or 'readable'}"
