"""Keys in the console: viewed, suspended, resumed and revoked; never edited."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from django import forms
from django.db.models import OuterRef, QuerySet, Subquery
from django.db.models.functions import Substr
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.admin.framework.accounts import account_crumbs, account_link
from keyvault.admin.framework.actions import (
    ActionForm,
    ActionResult,
    Cleaned,
    RowAction,
    SecretView,
    Tone,
    pause_action,
    resume_action,
    run_service,
)
from keyvault.admin.framework.activity import activity_cards
from keyvault.admin.framework.attention import Attention
from keyvault.admin.framework.columns import badge_column, moment_column
from keyvault.admin.framework.components import Columns
from keyvault.admin.framework.enforcement import may
from keyvault.admin.framework.model_admin import ConsoleModelAdmin
from keyvault.admin.framework.pages import live_page
from keyvault.admin.framework.widgets import (
    Detail,
    FactTable,
    Line,
    Link,
    badge,
    duration,
    identifier,
    link,
    moment,
    mono,
)
from keyvault.admin.keys.exposures import EXPOSED_FILTER, exposure_tables, exposures
from keyvault.admin.keys.receipts import receipt_cell, receipt_detail, receipt_url
from keyvault.admin.keys.traffic import EVERY_TRACE, day_card, day_traffic
from keyvault.admin.keys.usage import use_facts, use_tables
from keyvault.domain.errors import NotFoundError
from keyvault.domain.ids import KEY_ID_DIGITS
from keyvault.domain.keys import DEAD_STATES, KeyKind, KeyState, can_transition
from keyvault.domain.revocation import RevocationReason
from keyvault.models import Account, Key, KeyUse
from keyvault.models.keys import KEY_TAIL
from keyvault.models.usage import EXPOSURES
from keyvault.services.change_feed.receipts import find_receipt
from keyvault.services.keys.lifecycle import report_compromise, resume_key, revoke_key, suspend_key, usable_keys
from keyvault.services.secrets.stored_copies import read_public_string

REASONS = {
    RevocationReason.SUPERSEDED: "superseded: replaced by another key",
    RevocationReason.CESSATION_OF_OPERATION: "cessation of operation: no longer needed",
    RevocationReason.AFFILIATION_CHANGED: "affiliation changed: the holder changed employer",
    RevocationReason.PRIVILEGE_WITHDRAWN: "privilege withdrawn: the holder lost the permission",
    RevocationReason.KEY_COMPROMISE: "key compromise: known or suspected exposure",
    RevocationReason.UNSPECIFIED: "unspecified",
}
"""Labels of the revocation reasons of RFC 5280, section 5.3.1."""


REPORT_EXPLANATION = (
    "For keys that are known or suspected to be exposed. Every verifier refuses them immediately and permanently, even "
    "while the secret backend and the broker are down. This cannot be undone, not even by a rotation. "
    "No approval is required."
)


class RevokeForm(ActionForm):
    reason = forms.ChoiceField(
        label="Reason (RFC 5280)",
        choices=[("", "Choose one"), *((reason.value, label) for reason, label in REASONS.items())],
    )


def _revoke(grant: Grant, key: Key, cleaned: Cleaned) -> ActionResult:
    record = revoke_key(grant, key, RevocationReason(cleaned["reason"]))
    return ActionResult(f"Key {key} is revoked and permanently refused.", url=receipt_url(key, record.sequence))


def _report(grant: Grant, key: Key, cleaned: Cleaned) -> ActionResult:
    record = report_compromise(grant, key)
    return ActionResult(
        f"Key {key} is reported compromised and permanently refused.", url=receipt_url(key, record.sequence)
    )


def _can_become(state: KeyState) -> Any:
    return lambda key: can_transition(KeyState(key.state), state)


def is_last(key: Key) -> bool:
    """Whether the key is the only usable key of its credential."""
    usable = set(usable_keys(key.credential_id, datetime.now(UTC)).values_list("pk", flat=True))
    return usable == {key.pk}


def warn_if_last_key(key: Key) -> str:
    """Warn if the key is the only usable key of its credential; empty otherwise."""
    if not is_last(key):
        return ""
    return "This is the only active key of the credential. Its users are refused immediately."


def _warn_before_revocation(key: Key) -> str:
    warning = warn_if_last_key(key)
    return f"{warning} Rotate it instead to have a replacement in use first." if warning else ""


def _explain_revocation(key: Key) -> str:
    at = use_of(key, "last_at")
    used = "The key was never used." if at is None else f"The key was last used at {at:%Y-%m-%d %H:%M} UTC."
    return (
        "Every verifier refuses the key immediately and permanently, even while the secret backend and the broker are "
        "down; the copy in the backend is destroyed later. This cannot be undone, but a new key can be issued. "
        f"The merchant is notified. {used}"
    )


class KeyAdmin(ConsoleModelAdmin):
    view_permissions = (P.KEYS_READ,)
    menu, singular, plural = "Credentials", "Key", "Keys"
    id_pattern = r"[0-9A-Za-z]{16}"
    account_lookup = "credential__account"
    environment_lookup = "account_environment"
    secret_views = (
        SecretView(
            "show",
            "Show",
            P.KEYS_READ,
            read_public_string,
            "A public key is visible in browsers and apps, so it can be shown again at any time.",
            is_available=lambda key: key.credential.kind == KeyKind.PUBLIC and key.state not in DEAD_STATES,
        ),
    )
    row_actions: tuple[RowAction, ...] = (
        pause_action(
            "suspend",
            "Suspend",
            P.KEYS_SUSPEND,
            run_service(suspend_key, lambda key: f"Key {key} is suspended and refused until it is resumed."),
            "The key is refused until an operator resumes it. An open rotation stalls.",
            is_available=_can_become(KeyState.SUSPENDED),
            warn=warn_if_last_key,
            tone=Tone.PLAIN,
        ),
        resume_action(
            "resume",
            "Resume",
            P.KEYS_RESUME,
            run_service(resume_key, lambda key: f"Key {key} is active again."),
            "The key works again for everyone who holds it.",
            is_available=lambda key: key.state == KeyState.SUSPENDED,
        ),
        RowAction(
            "revoke",
            "Revoke",
            P.KEYS_REVOKE,
            _revoke,
            _explain_revocation,
            form=RevokeForm,
            is_available=lambda key: key.state not in DEAD_STATES,
            warn=_warn_before_revocation,
            tone=Tone.DANGER,
            step_up=True,
        ),
        RowAction(
            "report-compromise",
            "Report compromise",
            P.KEYS_REPORT_COMPROMISE,
            _report,
            lambda key: REPORT_EXPLANATION,
            is_available=_can_become(KeyState.COMPROMISED),
            tone=Tone.DANGER,
            step_up=True,
        ),
    )

    list_display = ("label", "state_badge", "account", "kind", "key_id", "last_used", "expires")
    list_filter = ("state", "account_environment", "credential__kind", EXPOSED_FILTER)
    search_fields = (
        "=key_id",
        "=credential__credential_id",
        "=credential__account__merchant__merchant_id",
        "^credential__label",
    )
    search_help_text = (
        "By key id (the 16 characters after the third underscore), credential id, merchant id or the beginning of a "
        "label. Times are UTC."
    )
    sortable_by = ()
    ordering = ("-created_at",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).select_related("credential__account__merchant", "use")

    def get_urls(self) -> list[URLPattern]:
        show = self.guarded(self.view_permissions, ("GET", "HEAD"), self._receipt_view)
        return [
            *super().get_urls(),
            path("<str:object_id>/receipt/<int:sequence>/", show, name="keyvault_key_receipt"),
        ]

    def _receipt_view(self, request: HttpRequest, object_id: str, sequence: int) -> HttpResponse:
        """Show which verifiers confirmed a change of the key.

        Raises:
            NotFoundError: the change concerns something else.
        """
        key = self.find_row(request, object_id)
        receipt = find_receipt(sequence)
        if receipt is None or receipt.subject != key.alters():
            raise NotFoundError("The key has no change with this sequence number.")
        detail = receipt_detail(receipt, key_link(key), str(key.credential.account))
        crumbs = [*self._crumbs(), Link(self.name_of(key), self.url_of(key))]
        context = {"title": detail.title, "detail": detail, "sections": detail.sections, "crumbs": crumbs}
        context["page_environment"] = self.environment_of_row(key)
        return live_page(self.admin_site, request, "detail", context, seconds=detail.refresh_seconds)

    def label(self, key: Key) -> str:
        return key.credential.label or key.credential.credential_id

    def account(self, key: Key) -> str:
        return str(key.credential.account)

    def kind(self, key: Key) -> str:
        return str(key.credential.kind)

    state_badge = badge_column("state", "state")
    last_used = moment_column("last used", lambda key: use_of(key, "last_at"), missing="never")
    expires = moment_column("expires", "expires_at", missing="never")

    def account_of(self, row: Key) -> Account:
        return row.credential.account

    def attention_items(self, request: HttpRequest) -> Iterable[Attention]:
        """Return usable and suspended keys with a suspected exposure, for operators who may revoke keys."""
        if not may(request, P.KEYS_REVOKE):
            return
        living = self.get_queryset(request).exclude(state__in=DEAD_STATES)
        last = exposures().filter(context__key=OuterRef("pk"))
        exposed = living.filter(pk__in=exposures().values("context__key")).annotate(
            exposed_at=Subquery(last.values("last_at")[:1]), exposed_by=Subquery(last.values("context__outcome")[:1])
        )
        yield self.attention(
            "Suspected exposures", exposed, "?exposed=lately", "alarm", one="Suspected exposure", button="Open key"
        )

    def line_of(self, row: Any) -> Line:
        """Return the line of a row of `attention_items`, with its last exposure."""
        name = f"{row.credential.account} · {self.label(row)}"
        about = f"key …{row.key_id[-KEY_TAIL:]}, {row.exposed_by.replace('_', ' ')}"
        return Line(self.url_of(row), name, about, row.exposed_at)

    def find_by_word(self, request: HttpRequest, word: str) -> Iterable[QuerySet[Any]]:
        """Find a key also by the end of its id, of which an index has the last characters."""
        yield from super().find_by_word(request, word)
        if KEY_TAIL <= len(word) < KEY_ID_DIGITS and word.isalnum():
            rows = self.get_queryset(request).order_by().annotate(tail=Substr("key_id", KEY_ID_DIGITS - KEY_TAIL + 1))
            yield rows.filter(tail=word[-KEY_TAIL:], key_id__endswith=word)

    def hit_of(self, row: Key) -> Line:
        return Line(self.url_of(row), row.key_id, f"{row.credential.account} · {row.credential.label} · {row.state}")

    def summary(self, row: Key) -> FactTable:
        return FactTable(
            "Key",
            [
                ("Key id", mono(row)),
                ("State", badge(row.state)),
                ("Account", row.credential.account),
                ("Kind", row.credential.kind),
                ("Label", row.credential.label),
                ("Last used", moment(use_of(row, "last_at"), missing="never")),
            ],
        )

    def detail(self, request: HttpRequest, row: Key) -> Detail:
        credential = row.credential
        traffic = day_traffic([row], EVERY_TRACE)
        chart, timeline = day_card([row], traffic), activity_cards(request, credential.account, [row.key_id])
        facts = FactTable(
            "Key",
            [
                ("Account", account_link(credential.account)),
                ("Kind", f"{credential.kind} API key"),
                ("Label", credential.label),
                ("Copy in the secret backend", row.get_material_display()),
                *_life(row),
            ],
        )
        page = reverse("admin:keyvault_credential_change", args=[credential])
        found = traffic.users[row.key_id]
        exposed = [user for user in found if user.outcome in EXPOSURES]
        users = [user for user in found if user.outcome not in EXPOSURES]
        return Detail(
            title=f"Key …{row.key_id[-6:]}",
            state=row.state,
            lead=format_html("{} · credential {}", identifier(row), link(page, credential)),
            crumbs=[*account_crumbs(credential.account), Link(credential.label or str(credential), page)],
            notes=list(_notes(row)),
            sections=[
                Columns([chart, facts] if chart else [facts, *timeline]),
                *exposure_tables(exposed),
                *use_tables(row, users, has_more=traffic.has_more_users),
                *(timeline if chart else []),
            ],
        )


def key_link(key: Key | str) -> SafeString:
    """Return a link to the page of a key, which may be given by its id."""
    return link(reverse("admin:keyvault_key_change", args=[str(key)]), mono(key))


def _life(key: Key) -> Iterable[tuple[str, Any]]:
    """Yield the times that NIST SP 800-57 requires to be recorded, and the times of use."""
    yield "Created", moment(key.created_at)
    for label, at in (
        ("Activated", key.activated_at),
        ("Last suspended", key.suspended_at),
        ("Last resumed by an operator", key.resumed_at),
        ("Deactivated", key.deactivated_at),
        ("Compromised", key.compromised_at),
        ("Destroyed", key.destroyed_at),
    ):
        if at is not None:
            yield label, moment(at)
    if key.retirement:
        yield "Ended by", key.get_retirement_display()
    if key.reason:
        yield "Reason", REASONS[RevocationReason(key.reason)]
    if key.state in DEAD_STATES:
        yield "Revocation confirmed by", receipt_cell(key)
    yield "Expires", moment(key.expires_at, missing="never")
    yield from use_facts(key)


def _notes(key: Key) -> Iterable[str]:
    account = key.credential.account
    if key.state == KeyState.ACTIVE and key.expires_at is not None and key.expires_at <= datetime.now(UTC):
        yield "The key has expired and is refused. Its state is updated shortly."
    if key.state == KeyState.ACTIVE and account.status != "active":
        yield "The account is suspended, so the key is refused."
    elif key.state == KeyState.ACTIVE and account.merchant.status != "active":
        yield "The merchant is suspended, so the key is refused."


def format_usage(key: Key) -> SafeString:
    """Describe a key before it is replaced: its end, its age and its last use."""
    age = "never active" if key.activated_at is None else f"{duration(datetime.now(UTC) - key.activated_at)} old"
    used = moment(use_of(key, "last_at"), missing="never")
    return format_html("{}, {}, last used {}", mono(f"…{key.key_id[-6:]}"), age, used)


def use_of(key: Key, name: str) -> Any:
    """Return a field of the key's use row, or None if the key was never used."""
    use: KeyUse | None = getattr(key, "use", None)
    return None if use is None else getattr(use, name)
