"""Processes of the installation that must run, and when each was last seen."""

from django.db import models

from keyvault.models.columns import at


class ServiceProcess(models.Model):
    """A worker or a beat, identified by its node name, which it keeps when it is restarted.

    `seen_at`: when it last reported. `lost_at`: when another process found that it no longer reports. A process that
    shuts down normally deletes its row.
    """

    name = models.CharField(primary_key=True, max_length=64)
    kind = models.CharField(max_length=16)
    seen_at = models.DateTimeField(db_index=True)
    lost_at = at()

    def __str__(self) -> str:
        return self.name
