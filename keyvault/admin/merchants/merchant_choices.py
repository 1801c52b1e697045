"""Merchants that a text field offers, by the beginning of their id or name."""

from keyvault.access.permissions import Permission as P
from keyvault.access.scopes import AccessScope
from keyvault.admin.framework.choices import Choice, choices_page
from keyvault.models import Merchant


def find_merchants(scope: AccessScope, words: str, limit: int) -> list[Choice]:
    """Find merchants of the scope whose id or name begins with the words, by an index each."""
    rows = Merchant.objects.order_by("merchant_id")
    if scope.merchants is not None:
        rows = rows.filter(pk__in=scope.merchants)
    if words:
        # Each is read by itself: one condition over both columns would read all rows. Only the ids are sorted.
        by_id = rows.filter(merchant_id__startswith=words)[:limit]
        by_name = rows.order_by().filter(name__startswith=words)[:limit]
        found = {row.pk: row for row in [*by_id, *by_name]}
    else:
        found = {row.pk: row for row in rows[:limit]}
    return [Choice(row.pk, row.name, row.pk) for row in list(found.values())[:limit]]


MERCHANT_CHOICES = choices_page("merchants", (P.MERCHANTS_READ,), find_merchants)
