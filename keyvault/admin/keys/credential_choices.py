"""Credentials that a text field offers: by id, by the beginning of the label, or those of a merchant."""

from keyvault.access.permissions import Permission as P
from keyvault.access.scopes import AccessScope
from keyvault.admin.framework.choices import Choice, choices_page
from keyvault.admin.framework.scoping import in_scope
from keyvault.models import Account, Credential


def find_credentials(scope: AccessScope, words: str, limit: int) -> list[Choice]:
    """Find credentials of the scope, each selection by its index. Without words there are too many to offer."""
    if not words:
        return []
    rows = Credential.objects.filter(in_scope(scope, "account")).select_related("account").order_by()
    accounts = list(Account.objects.filter(merchant=words).values_list("pk", flat=True))
    selections = (
        rows.filter(pk=words),
        rows.filter(label__startswith=words),
        rows.filter(account__in=accounts).order_by("-created_at"),
    )
    found = {row.pk: row for selected in selections for row in selected[:limit]}
    return [Choice(row.pk, row.label or row.pk, f"{row.account}, {row.kind}") for row in list(found.values())[:limit]]


CREDENTIAL_CHOICES = choices_page("credentials", (P.KEYS_READ,), find_credentials)
