"""Credentials and their keys. A credential's id never changes; a rotation adds a key and retires another."""

from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Length, Substr

from keyvault.domain.digests import DIGEST_BYTES
from keyvault.domain.environments import Environment
from keyvault.domain.ids import KEY_ID_DIGITS, Subject
from keyvault.domain.issuance import Delivery
from keyvault.domain.keys import DEAD_STATES, KeyKind, KeyState, RetirementReason
from keyvault.domain.revocation import RevocationReason
from keyvault.models.columns import (
    DigestColumns,
    account_environment,
    at,
    choice,
    choices_check,
    created_at,
    page_indexes,
    prefix_index,
)
from keyvault.models.merchants import Account
from keyvault.models.recording import RecordedModel

KEY_TAIL = 6
"""Number of a key id's last characters by which people find a key."""

models.BinaryField.register_lookup(Length)


class OriginHeader(models.TextChoices):
    """Policy for a private key in a request with an Origin header."""

    REFUSE = "refuse"
    REPORT = "report"


class Credential(RecordedModel):
    """A credential. `networks`: the CIDR blocks from which its keys are accepted; empty: from everywhere.

    `forgotten_at`: when its path was erased from the secret backend, after the merchant was offboarded.
    """

    credential_id = models.CharField(primary_key=True, max_length=32)
    # The index of the account's pages serves the foreign key.
    account = models.ForeignKey(Account, models.PROTECT, related_name="credentials", db_index=False)
    account_environment = account_environment()
    kind = choice(KeyKind)
    label = models.CharField(max_length=100)
    delivery = choice(Delivery)
    origin_header = choice(OriginHeader, default=OriginHeader.REFUSE)
    networks = models.JSONField(default=list, blank=True)
    created_at = created_at()
    forgotten_at = at()

    class Meta:
        constraints = [
            choices_check("credential_kind", "kind", KeyKind),
            choices_check("credential_delivery", "delivery", Delivery),
            choices_check("credential_origin_header", "origin_header", OriginHeader),
        ]
        indexes = [
            models.Index(fields=["-created_at", "-credential_id"], name="credential_newest"),
            prefix_index("credential_label", "label"),
            *page_indexes("credential", "credential_id", "kind"),
        ]

    def __str__(self) -> str:
        return self.credential_id

    def alters(self) -> Subject:
        return "credential", self.credential_id

    @property
    def environment(self) -> Environment:
        return Environment(self.account.environment)

    @property
    def backend_path(self) -> str:
        """The path in the secret backend. It has internal ids only, so that a list of paths reveals no names."""
        return f"{self.account_id}/{self.credential_id}"


class Material(models.TextChoices):
    """Whether the secret backend stores this key's string.

    A quarantined key's string is soft-deleted: it cannot be read, but can be restored until it is destroyed. A worker
    performs due deletions in a separate step.
    """

    NONE = "none"
    HELD = "held"
    DELETE_DUE = "delete_due"
    DELETED = "deleted"
    RESTORE_DUE = "restore_due"
    DESTROY_DUE = "destroy_due"
    DESTROYED = "destroyed"


def _stamped(state: KeyState, column: str) -> models.CheckConstraint:
    """Return the constraint that a state has its time (NIST SP 800-57: record the time of every transition)."""
    return models.CheckConstraint(
        name=f"key_{column}", condition=~Q(state=state.value) | Q(**{f"{column}__isnull": False})
    )


class Key(DigestColumns):
    """One issued key, stored as a digest. Triggers forbid reactivation and a changed expiry, see `models.triggers`.

    `resumed_at`: when an operator last resumed it; a rotation that lifts its own quarantine leaves no time.
    """

    key_id = models.CharField(primary_key=True, max_length=16)
    credential = models.ForeignKey(Credential, models.PROTECT, related_name="keys")
    account_environment = account_environment()
    state = choice(KeyState, default=KeyState.PRE_ACTIVATION)
    retirement = choice(RetirementReason, null=True, blank=True)
    reason = choice(RevocationReason, null=True, blank=True)
    created_at = created_at()
    activated_at = at()
    suspended_at = at()
    resumed_at = at()
    deactivated_at = at()
    compromised_at = at()
    destroyed_at = at()
    expires_at = at()
    backend_version = models.PositiveIntegerField(null=True, blank=True)
    material = choice(Material, default=Material.NONE)

    class Meta:
        constraints = [
            choices_check("key_state", "state", KeyState),
            choices_check("key_material", "material", Material),
            models.CheckConstraint(name="key_digest_bytes", condition=Q(digest__length=DIGEST_BYTES)),
            models.CheckConstraint(name="key_pepper_version", condition=Q(pepper_version__gte=1)),
            _stamped(KeyState.ACTIVE, "activated_at"),
            _stamped(KeyState.SUSPENDED, "suspended_at"),
            _stamped(KeyState.DEACTIVATED, "deactivated_at"),
            _stamped(KeyState.COMPROMISED, "compromised_at"),
            _stamped(KeyState.DESTROYED, "destroyed_at"),
            models.CheckConstraint(
                name="key_expires_later",
                condition=Q(expires_at__isnull=True) | Q(expires_at__gt=F("created_at")),
            ),
            models.CheckConstraint(
                name="key_retirement",
                condition=~Q(state=KeyState.DEACTIVATED.value)
                | Q(retirement__isnull=False, retirement=RetirementReason.EXPIRED.value, reason__isnull=True)
                | Q(
                    retirement__isnull=False,
                    retirement=RetirementReason.REVOKED.value,
                    reason__isnull=False,
                    reason__in=[r.value for r in RevocationReason],
                ),
            ),
            models.CheckConstraint(
                name="key_backend_version",
                condition=Q(material=Material.NONE.value) | Q(backend_version__isnull=False),
            ),
        ]
        indexes = [
            models.Index(
                fields=["created_at", "key_id"],
                name="key_material_due",
                condition=Q(material__in=["destroy_due", "delete_due", "restore_due"]),
            ),
            models.Index(
                fields=["expires_at", "key_id"], name="key_expiring", condition=Q(state__in=["active", "suspended"])
            ),
            models.Index(fields=["-created_at", "-key_id"], name="key_newest"),
            models.Index(fields=["account_environment", "-created_at", "-key_id"], name="key_env"),
            models.Index(
                fields=["account_environment", "activated_at"], name="key_active_since", condition=Q(state="active")
            ),
            models.Index(Substr("key_id", KEY_ID_DIGITS - KEY_TAIL + 1), name="key_tail"),
            models.Index(fields=["credential"], name="key_staged", condition=Q(state="pre_activation")),
        ]

    def __str__(self) -> str:
        return self.key_id

    def __repr__(self) -> str:
        return f"Key({self.key_id}, {self.state})"

    def alters(self) -> Subject:
        return "key", self.key_id

    def has_ended(self) -> bool:
        """Return whether the key was terminated other than by expiry, which the revocation log need not record."""
        return self.state in DEAD_STATES and self.retirement != RetirementReason.EXPIRED
