"""The events of the audit log."""

from django.db import connection

# One index lookup for each event: DISTINCT would read every entry.
_EVENTS = """
    WITH RECURSIVE found (event) AS (
        SELECT min(event) FROM keyvault_auditentry
        UNION ALL
        SELECT (SELECT min(event) FROM keyvault_auditentry WHERE event > found.event) FROM found
        WHERE found.event IS NOT NULL
    )
    SELECT event FROM found WHERE event IS NOT NULL
"""


def list_events() -> list[str]:
    """Return each event that was recorded, in alphabetical order."""
    with connection.cursor() as cursor:
        cursor.execute(_EVENTS)
        return [event for (event,) in cursor.fetchall()]
