"""Provider connections in the console: set, replaced and removed. Stored credentials are never shown."""

from collections.abc import Mapping
from typing import Any

from django import forms
from django.db.models import Model, Q
from django.http import HttpRequest
from django.urls import reverse

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.admin.framework.account_lists import AccountList, text
from keyvault.admin.framework.accounts import (
    AccountForm,
    AccountRowAdmin,
    account_from,
    account_link,
    account_query,
    environment_field,
)
from keyvault.admin.framework.actions import (
    ActionForm,
    ActionResult,
    Cleaned,
    CreateAction,
    RowAction,
    Tone,
    VersionedForm,
    from_query,
    run_service,
)
from keyvault.admin.framework.columns import badge_column, moment_column
from keyvault.admin.framework.enforcement import may
from keyvault.admin.framework.filters import state_filter
from keyvault.admin.framework.widgets import (
    NOTHING,
    Detail,
    Extras,
    FactTable,
    Link,
    Table,
    badge,
    link,
    moment,
    mono,
)
from keyvault.domain.environments import Environment
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.provider_connections import MAX_BYTES
from keyvault.models import Account, ProviderConnection
from keyvault.services.secrets.backend import find_backend_location
from keyvault.services.secrets.provider_connections import (
    connection_id,
    list_connections,
    remove_connection,
    replace_connection,
    set_connection,
)


class ConcealedText(forms.Textarea):
    """Text area that masks input and is empty when the form is shown again with an error."""

    def __init__(self) -> None:
        attrs = {"rows": 5, "class": "mono concealed", "autocomplete": "off", "spellcheck": "false"}
        super().__init__({**attrs, "autocapitalize": "off"})

    def format_value(self, value: Any) -> str:
        return ""


class SecretField(forms.CharField):
    """Text field whose cleaned value is a `Plaintext`. Its name contains `secret`, so that no page shows it again."""

    widget = ConcealedText

    def clean(self, value: Any) -> Plaintext:
        return Plaintext(super().clean(value))


class CredentialsForm(ActionForm):
    secret = SecretField(
        label="Credentials",
        max_length=2 * MAX_BYTES,
        help_text=f"A secret string or a flat JSON object of strings; at most {MAX_BYTES} bytes. Never shown again.",
    )


class ConnectionForm(CredentialsForm, AccountForm):
    environment = environment_field("Sandbox uses test mode, production uses live mode.")
    provider = forms.CharField(max_length=64, help_text="a-z, 0-9 and inner hyphens, such as stripe.")

    field_order = ("merchant", "environment", "provider", "secret")


class ReplaceForm(VersionedForm, CredentialsForm):
    """Form with the version of the row and the new credentials."""


def _set(grant: Grant, cleaned: Cleaned) -> ActionResult:
    account = account_from(cleaned)
    connection = set_connection(grant, account, cleaned["provider"], cleaned["secret"])
    return ActionResult(f"Stored {connection} of {account}.", row=connection)


def _replace(grant: Grant, connection: ProviderConnection, cleaned: Cleaned) -> ActionResult:
    replace_connection(grant, connection, cleaned["secret"])
    return ActionResult("Credentials replaced. A worker destroys the previous ones.")


def _is_present(connection: ProviderConnection) -> bool:
    return connection.removed_at is None


def _state(connection: ProviderConnection) -> str:
    if not _is_present(connection):
        return "removed"
    return "pending" if connection.stored_at is None else "enabled"


class ProviderConnectionAdmin(AccountRowAdmin):
    view_permissions = (P.CONNECTIONS_READ,)
    menu, singular, plural = "Provider connections", "Provider connection", "Provider connections"
    create_actions = (
        CreateAction(
            "set",
            "Set provider connection",
            P.CONNECTIONS_WRITE,
            ConnectionForm,
            _set,
            "Stores the credentials in the secret backend, where the merchant's backend reads them like its private "
            "keys. They replace the account's credentials for this provider and are never shown again.",
            "Store credentials",
            account_of=account_from,
            preset=from_query("merchant", "environment"),
        ),
    )
    row_actions = (
        RowAction(
            "replace",
            "Replace credentials",
            P.CONNECTIONS_WRITE,
            _replace,
            lambda connection: (
                "Readers of the connection get the new credentials immediately; the stored ones are destroyed. "
                f"The environment requires credentials in {connection.mode} mode."
            ),
            form=ReplaceForm,
            is_available=_is_present,
        ),
        RowAction(
            "remove",
            "Remove",
            P.CONNECTIONS_WRITE,
            run_service(remove_connection, "Connection removed. A worker erases the credentials."),
            (
                "The credentials are permanently erased from the secret backend. Stop using them first. "
                "At the provider they stay valid until they are revoked there."
            ),
            is_available=_is_present,
            tone=Tone.DANGER,
        ),
    )

    list_display = ("provider", "merchant", "environment_badge", "mode", "state_badge", "stored")
    list_filter = (
        state_filter({"enabled": Q(removed_at__isnull=True), "removed": Q(removed_at__isnull=False)}),
        "account__environment",
        "mode",
    )
    search_fields = ("=account__merchant__merchant_id",)
    search_help_text = "By merchant id."
    sortable_by = ()
    ordering = ("-id",)

    state_badge = badge_column("state", _state, ordering="removed_at")
    stored = moment_column("stored", "stored_at", missing="not yet")

    def summary(self, row: ProviderConnection) -> FactTable:
        return FactTable(
            "Provider connection",
            [
                ("Provider", row.provider),
                ("Account", account_link(row.account)),
                ("Environment", badge(row.account.environment)),
                ("Mode", row.mode),
            ],
        )

    def detail(self, request: HttpRequest, row: ProviderConnection) -> Detail:
        place = find_backend_location(Environment(row.account.environment), row.backend_path)
        stored: list[tuple[str, Any]] = [
            ("Connection id", mono(connection_id(row))),
            ("Stored", moment(row.stored_at, missing="not yet")),
            ("By", row.stored_by or NOTHING),
            ("Version", row.backend_version or NOTHING),
            *place_rows(place),
            ("Created", moment(row.created_at)),
        ]
        if row.removed_at is not None:
            stored += [("Removed", moment(row.removed_at)), ("Erased", moment(row.forgotten_at, missing="not yet"))]
        return Detail(
            title=f"{row.account} · {row.provider}",
            state=_state(row),
            sections=[self.summary(row), FactTable("Credentials", stored)],
        )

    def account_list(self, request: HttpRequest) -> AccountList | None:
        if not self.has_view_permission(request):
            return None
        return AccountList(
            "Provider connections",
            ["provider", "mode", "stored"],
            lambda account: list_connections(account).order_by("-created_at"),
            label="provider",
            state="mode",
            detail=text(""),
            at="stored_at",
            cells=lambda row: [
                link(self.url_of(ProviderConnection(pk=row.pk)), row.label),
                row.state,
                moment(row.at, missing="not yet"),
            ],
            list_url=lambda account: self.list_url(
                f"?q={account.merchant_id}&account__environment__exact={account.environment}"
            ),
            empty="No provider connections yet. Set one to store the merchant's credentials of a provider.",
        )

    def extras_for(self, request: HttpRequest, row: Model) -> Extras | None:
        """Add the provider connections of an account to its page."""
        if not isinstance(row, Account) or not self.has_view_permission(request):
            return None
        links = []
        if may(request, P.CONNECTIONS_WRITE, row):
            url = reverse("admin:keyvault_providerconnection_set") + account_query(row)
            links.append(Link("Set provider connection", url))
        table = Table(
            "Provider connections",
            ["provider", "mode", "state", "stored"],
            [
                [link(self.url_of(each), each.provider), each.mode, badge(_state(each)), self.stored(each)]
                for each in list_connections(row)
            ],
        )
        return Extras(links=links, sections=[table])


def place_rows(place: Mapping[str, str]) -> list[tuple[str, Any]]:
    """Return rows that state where the merchant's backend reads the secret; empty if it reads none."""
    labels = {"backend_mount": "Mount that the merchant reads", "backend_path": "Path that the merchant reads"}
    return [(labels[name], mono(text)) for name, text in place.items()]
