"""Sessions of the console, which `services.sessions.store` reads and writes."""

from django.conf import settings
from django.contrib.sessions.base_session import AbstractBaseSession
from django.db import models

from keyvault.domain.browsers import MAX_BROWSER_LENGTH


class ConsoleSession(AbstractBaseSession):
    """A session. `session_key` is a digest of the key in the cookie, and `expire_date` the time when it ends.

    `operator`: None before the sign-in. `address`, `browser`: of the last recorded use; empty if unknown.
    """

    # The index `session_by_operator` begins with the operator.
    operator = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.PROTECT, null=True, related_name="sessions", db_index=False
    )
    started_at = models.DateTimeField()
    last_used_at = models.DateTimeField()
    address = models.CharField(max_length=64, blank=True)
    browser = models.CharField(max_length=MAX_BROWSER_LENGTH, blank=True)

    class Meta:
        indexes = [models.Index(fields=["operator", "-last_used_at"], name="session_by_operator")]
