"""Recipient keys, which a merchant sets so that replacements are sealed to it, and their approvals."""

from django.db import models
from django.db.models import Q

from keyvault.domain.canonical import canonical_digest
from keyvault.domain.recipient_keys import KEY_CHARACTERS
from keyvault.domain.timestamps import format_timestamp
from keyvault.models.columns import ApprovalColumns, account_environment, at, created_at
from keyvault.models.keys import Credential, Key
from keyvault.models.merchants import Account
from keyvault.models.recording import RecordedModel


class RecipientKey(RecordedModel):
    """An X25519 public key to which a credential's replacements are sealed.

    `key`: the API key whose holder set it. `applies_at`: rotations requested from then on use it; `approvals_needed`
    persons may bring that forward. `withdrawn_at`: when it was replaced before it applied, or an operator withdrew it;
    nothing is sealed to it any more.
    """

    recipient_key_id = models.CharField(primary_key=True, max_length=32)
    credential = models.ForeignKey(Credential, models.PROTECT, related_name="recipient_keys", db_index=False)
    account = models.ForeignKey(Account, models.PROTECT, related_name="recipient_keys", db_index=False)
    account_environment = account_environment()
    key = models.ForeignKey(Key, models.PROTECT, related_name="+", db_index=False)
    public_key = models.CharField(max_length=KEY_CHARACTERS)
    approvals_needed = models.PositiveSmallIntegerField()
    created_at = created_at()
    applies_at = models.DateTimeField()
    withdrawn_at = at()

    class Meta:
        indexes = [
            models.Index(fields=["credential", "-created_at"], name="recipient_by_credential"),
            models.Index(fields=["-created_at", "-recipient_key_id"], name="recipient_newest"),
            models.Index(fields=["account", "-created_at"], name="recipient_account"),
            models.Index(fields=["account_environment", "-created_at"], name="recipient_env"),
            models.Index(fields=["applies_at"], name="recipient_pending", condition=Q(withdrawn_at__isnull=True)),
        ]

    def __str__(self) -> str:
        return self.recipient_key_id

    def alters(self) -> None:
        return None

    @property
    def plan_digest(self) -> str:
        """The digest that an approval names."""
        return canonical_digest(
            {
                "what": "recipient_key",
                "recipient_key_id": self.recipient_key_id,
                "credential_id": self.credential_id,
                "public_key": self.public_key,
                "created_at": format_timestamp(self.created_at),
            }
        )

    @property
    def requester_person(self) -> str:
        """The holder of the API key, who is no person of ours, so that every approver is another one."""
        return f"key:{self.key_id}"

    @property
    def is_requester_claimed(self) -> bool:
        """False: the holder proved possession of the API key."""
        return False


class RecipientKeyApproval(ApprovalColumns):
    """One person's approval to use a recipient key before its 24 hours have passed."""

    recipient_key = models.ForeignKey(RecipientKey, models.PROTECT, related_name="approvals")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["recipient_key", "person"], name="recipient_approval_once"),
        ]

    def __str__(self) -> str:
        return f"{self.approver_id} on {self.recipient_key_id}"

    def alters(self) -> None:
        return None
