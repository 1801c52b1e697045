"""Credentials and their keys in the console: looked at, suspended, resumed, ended. Never edited."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from django import forms
from django.contrib import admin
from django.db.models import Model, QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html_join
from django.utils.safestring import SafeString

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.admin.acts import Act, ActForm, Cleaned, Done, Look, SeenForm, Tone
from keyvault.admin.cells import NOTHING, Detail, Extras, Facts, Table, badge, link, moment, mono, short_moment
from keyvault.admin.noun import NounAdmin
from keyvault.domain.keys import DEAD_STATES, KeyKind, KeyState, may_become
from keyvault.domain.revocation import RevocationReason
from keyvault.models import Account, Credential, Key, KeyUse, UseBucket
from keyvault.services.keys import report_compromise, resume_key, revoke_key, suspend_key
from keyvault.services.material import read_public_string

REASONS = {
    RevocationReason.SUPERSEDED: "superseded: another key took its place",
    RevocationReason.CESSATION_OF_OPERATION: "cessation of operation: it is no longer needed",
    RevocationReason.AFFILIATION_CHANGED: "affiliation changed: its holder works for somebody else now",
    RevocationReason.PRIVILEGE_WITHDRAWN: "privilege withdrawn: its holder may no longer do this",
    RevocationReason.KEY_COMPROMISE: "key compromise: known or suspected to be in wrong hands",
    RevocationReason.UNSPECIFIED: "unspecified",
}
"""The reasons of RFC 5280, section 5.3.1, in words."""


class RevokeForm(ActForm):
    reason = forms.ChoiceField(
        label="Reason (RFC 5280)",
        choices=[("", "Choose one"), *((reason.value, words) for reason, words in REASONS.items())],
    )


def _suspend(grant: Grant, key: Key, cleaned: Cleaned) -> Done:
    suspend_key(grant, key)
    return Done(f"Key {key} is suspended: refused until it is resumed.")


def _resume(grant: Grant, key: Key, cleaned: Cleaned) -> Done:
    resume_key(grant, key)
    return Done(f"Key {key} is active again.")


def _revoke(grant: Grant, key: Key, cleaned: Cleaned) -> Done:
    revoke_key(grant, key, RevocationReason(cleaned["reason"]))
    return Done(f"Key {key} is revoked: refused for ever.")


def _report(grant: Grant, key: Key, cleaned: Cleaned) -> Done:
    report_compromise(grant, key)
    return Done(f"Key {key} is reported compromised: refused for ever.")


def _can_become(state: KeyState) -> Any:
    return lambda key: may_become(KeyState(key.state), state)


def _is_last(key: Key) -> str:
    """What taking this key away would mean for its holder."""
    if key.state != KeyState.ACTIVE or key.credential.keys.filter(state=KeyState.ACTIVE).count() > 1:
        return ""
    return "This is the credential's only active key. Whoever uses it is refused from this moment on."


class CredentialAdmin(NounAdmin):
    view_permissions = (P.KEYS_READ,)
    section, singular, plural = "Keys", "Credential", "Credentials"

    list_display = ("credential_id", "account", "kind", "label", "key_states", "created")
    list_filter = ("account__environment", "kind", "delivery")
    search_fields = ("=credential_id", "=keys__key_id", "account__merchant__merchant_id", "label")
    search_help_text = "By credential id, key id, merchant or label. Never paste a whole key."
    ordering = ("-created_at",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).select_related("account__merchant").prefetch_related("keys")

    @admin.display(description="keys")
    def key_states(self, credential: Credential) -> SafeString | str:
        return format_html_join(" ", "{}", ((badge(key.state),) for key in credential.keys.all())) or NOTHING

    @admin.display(description="created (UTC)", ordering="created_at")
    def created(self, credential: Credential) -> SafeString:
        return short_moment(credential.created_at)

    def account_of(self, row: Credential) -> Account:
        return row.account

    def summary(self, row: Credential) -> Facts:
        return credential_facts(row)

    def detail(self, request: HttpRequest, row: Credential) -> Detail:
        keys = row.keys.select_related("use").order_by("-created_at")
        return Detail(
            title=f"{row.account} · {row.label}",
            state=row.kind,
            sections=[
                credential_facts(row),
                Table(
                    "Keys",
                    ["key id", "state", "activated (UTC)", "first used (UTC)", "last used (UTC)", "expires (UTC)"],
                    [
                        [
                            key_link(key),
                            badge(key.state),
                            short_moment(key.activated_at),
                            short_moment(_use(key, "first_at"), missing="never"),
                            short_moment(_use(key, "last_at"), missing="never"),
                            short_moment(key.expires_at, missing="never"),
                        ]
                        for key in keys
                    ],
                    empty="No key was issued yet.",
                ),
            ],
        )

    def extras_for(self, request: HttpRequest, row: Model) -> Extras | None:
        """An account's page lists its credentials."""
        if not isinstance(row, Account) or not self.has_view_permission(request):
            return None
        rows = self.get_queryset(request).filter(account=row).order_by("-created_at")[:50]
        table = Table(
            "Credentials",
            ["credential", "kind", "label", "keys"],
            [[link(self.url_of(item), item), item.kind, item.label, self.key_states(item)] for item in rows],
            empty="None was issued yet.",
        )
        return Extras(sections=[table])


class KeyAdmin(NounAdmin):
    view_permissions = (P.KEYS_READ,)
    section, singular, plural = "Keys", "Key", "Keys"
    looks = (
        Look(
            "show",
            "Show",
            P.KEYS_READ,
            read_public_string,
            "A public key stands in browsers and apps; it may be shown again at any time.",
            fits=lambda key: key.credential.kind == KeyKind.PUBLIC and key.state not in DEAD_STATES,
        ),
    )
    acts = (
        Act(
            "suspend",
            "Suspend",
            P.KEYS_SUSPEND,
            _suspend,
            lambda key: "The key is refused from now on, until somebody resumes it. An open rotation stalls.",
            fits=_can_become(KeyState.SUSPENDED),
            warn=_is_last,
        ),
        Act(
            "resume",
            "Resume",
            P.KEYS_RESUME,
            _resume,
            lambda key: "The key is good again, for everybody who holds it.",
            form=SeenForm,
            fits=lambda key: key.state == KeyState.SUSPENDED,
            tone=Tone.GOOD,
        ),
        Act(
            "revoke",
            "Revoke",
            P.KEYS_REVOKE,
            _revoke,
            lambda key: "The key is refused at once and for ever. There is no way back; a new one can be issued.",
            form=RevokeForm,
            fits=lambda key: key.state not in DEAD_STATES,
            warn=_is_last,
            tone=Tone.DANGER,
        ),
        Act(
            "report-compromise",
            "Report compromise",
            P.KEYS_REPORT_COMPROMISE,
            _report,
            lambda key: (
                "For a key that is known or suspected to be in wrong hands. It is refused at once and for ever, "
                "nothing brings it back, and an open rotation never reinstates it."
            ),
            fits=_can_become(KeyState.COMPROMISED),
            warn=_is_last,
            tone=Tone.DANGER,
        ),
    )

    list_display = ("key_id", "state_badge", "account", "kind", "first_used", "last_used", "expires")
    list_filter = ("state", "credential__account__environment", "credential__kind")
    search_fields = ("=key_id", "=credential__credential_id", "credential__account__merchant__merchant_id")
    search_help_text = (
        "By key id (the 16 characters after the third underscore), credential id or merchant. Times are UTC."
    )
    ordering = ("-created_at",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).select_related("credential__account__merchant", "use")

    @admin.display(ordering="credential__account__merchant_id")
    def account(self, key: Key) -> str:
        return str(key.credential.account)

    @admin.display(ordering="credential__kind")
    def kind(self, key: Key) -> str:
        return str(key.credential.kind)

    @admin.display(description="state", ordering="state")
    def state_badge(self, key: Key) -> SafeString:
        return badge(key.state)

    @admin.display(description="first used", ordering="use__first_at")
    def first_used(self, key: Key) -> SafeString:
        return short_moment(_use(key, "first_at"), missing="never")

    @admin.display(description="last used", ordering="use__last_at")
    def last_used(self, key: Key) -> SafeString:
        return short_moment(_use(key, "last_at"), missing="never")

    @admin.display(description="expires", ordering="expires_at")
    def expires(self, key: Key) -> SafeString:
        return short_moment(key.expires_at, missing="never")

    def account_of(self, row: Key) -> Account:
        return row.credential.account

    def summary(self, row: Key) -> Facts:
        return Facts(
            "Key",
            [
                ("Key id", mono(row)),
                ("State", badge(row.state)),
                ("Account", row.credential.account),
                ("Kind", row.credential.kind),
                ("Label", row.credential.label),
                ("Last used", moment(_use(row, "last_at"), missing="never")),
            ],
        )

    def detail(self, request: HttpRequest, row: Key) -> Detail:
        credential = row.credential
        account = credential.account
        return Detail(
            title=f"Key {row}",
            state=row.state,
            notes=list(_notes(row)),
            sections=[
                Facts(
                    "Key",
                    [
                        ("Key id", mono(row)),
                        (
                            "Credential",
                            link(reverse("admin:keyvault_credential_change", args=[credential]), credential),
                        ),
                        ("Account", link(reverse("admin:keyvault_account_change", args=[account.pk]), account)),
                        ("Kind", f"{credential.kind} API key"),
                        ("Label", credential.label),
                        ("String in the secret backend", row.get_material_display()),
                    ],
                ),
                Facts("Life", list(_life(row))),
                Table(
                    "Who uses it",
                    ["source", "user agent", "endpoint", "outcome", "in that minute", "last seen (UTC)"],
                    [
                        [
                            mono(use.source),
                            use.user_agent or NOTHING,
                            use.endpoint or NOTHING,
                            badge(use.outcome),
                            use.count,
                            short_moment(use.last_at),
                        ]
                        for use in UseBucket.objects.filter(key=row).order_by("-last_at")[:20]
                    ],
                    empty="Nobody has used it.",
                ),
            ],
        )


def credential_facts(credential: Credential) -> Facts:
    account = credential.account
    return Facts(
        "Credential",
        [
            ("Credential id", mono(credential)),
            ("Account", link(reverse("admin:keyvault_account_change", args=[account.pk]), account)),
            ("Kind", f"{credential.kind} API key"),
            ("Label", credential.label),
            ("Delivery", credential.get_delivery_display()),
            ("A private key with an Origin header", credential.get_origin_header_display()),
            ("Created", moment(credential.created_at)),
        ],
    )


def credential_link(credential: Credential) -> SafeString:
    return link(reverse("admin:keyvault_credential_change", args=[credential.pk]), mono(credential))


def key_link(key: Key) -> SafeString:
    return link(reverse("admin:keyvault_key_change", args=[key.key_id]), mono(key))


def _life(key: Key) -> Iterable[tuple[str, Any]]:
    """The times that NIST SP 800-57 wants recorded, and those of its use."""
    yield "Created", moment(key.created_at)
    for label, at in (
        ("Activated", key.activated_at),
        ("Suspended last", key.suspended_at),
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
    yield "Expires", moment(key.expires_at, missing="never")
    yield "First used", moment(_use(key, "first_at"), missing="never")
    yield "Last used", moment(_use(key, "last_at"), missing="never")
    yield "Uses", _use(key, "count") or 0


def _notes(key: Key) -> Iterable[str]:
    account = key.credential.account
    if key.state == KeyState.ACTIVE and key.expires_at is not None and key.expires_at <= datetime.now(UTC):
        yield "It has expired and is refused; the record of that follows in a moment."
    if key.state == KeyState.ACTIVE and account.status != "active":
        yield "Its account is suspended: the key is refused."
    elif key.state == KeyState.ACTIVE and account.merchant.status != "active":
        yield "Its merchant is suspended: the key is refused."


def _use(key: Key, name: str) -> Any:
    """A fact of the key's use. A key that was never used has no such row."""
    use: KeyUse | None = getattr(key, "use", None)
    return None if use is None else getattr(use, name)
