"""Audit chains, the change feed and break-glass actions, append-only by triggers (see `triggers`)."""

from django.conf import settings
from django.db import models
from django.db.models import F, Q

from keyvault.access.principals import SYSTEM_PREFIX
from keyvault.domain.audit import APPROVAL_SUFFIX
from keyvault.domain.digests import PepperSet
from keyvault.models.columns import at, choice, choices_check, created_at
from keyvault.models.merchants import Account
from keyvault.models.recording import RecordedModel


class AuditChain(models.Model):
    """The head of a chain. Adding an entry locks the row and advances it by one; `newest_at` is that entry's time.

    `signed_in`: number of the checkpoint that signed the chain last, up to the entry `signed_sequence`; 0: none has.
    `unsigned_since`: when the first entry after that was written; None: there is none. The worker finds the chains to
    sign by these three columns. They are no evidence: `audit_verify` compares them with the checkpoints.
    """

    name = models.CharField(primary_key=True, max_length=96)
    scope = choice(PepperSet)
    sequence = models.PositiveBigIntegerField(default=0)
    head_hash = models.BinaryField(max_length=32)
    newest_at = at()
    signed_in = models.PositiveBigIntegerField(default=0)
    signed_sequence = models.PositiveBigIntegerField(default=0)
    unsigned_since = at()

    class Meta:
        constraints = [choices_check("audit_chain_scope", "scope", PepperSet)]
        indexes = [
            models.Index(
                fields=["scope", "unsigned_since"],
                name="audit_chain_unsigned",
                condition=Q(unsigned_since__isnull=False),
            )
        ]

    def __str__(self) -> str:
        return self.name


class AuditEntry(models.Model):
    """An audit entry. `body` has the hashed bytes; the other columns are copies for searching.

    `scope`: the chain's scope. The indexes of the lists by environment begin with it.
    """

    chain = models.ForeignKey(AuditChain, models.PROTECT, related_name="entries")
    scope = choice(PepperSet)
    sequence = models.PositiveBigIntegerField()
    at = models.DateTimeField()
    event = models.CharField(max_length=64)
    actor = models.CharField(max_length=200)
    body = models.BinaryField()
    previous = models.BinaryField(max_length=32)
    hash = models.BinaryField(max_length=32)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["chain", "sequence"], name="audit_entry_unique")]
        indexes = [
            models.Index(fields=["-at"], name="audit_by_time"),
            models.Index(fields=["event", "-at"], name="audit_by_event"),
            models.Index(fields=["scope", "-at"], name="audit_by_scope"),
            models.Index(fields=["scope", "event", "-at"], name="audit_by_scope_event"),
            models.Index(fields=["actor", "-at"], name="audit_by_actor"),
            models.Index(fields=["scope", "actor", "-at"], name="audit_by_scope_actor"),
        ]

    def __str__(self) -> str:
        return f"{self.chain_id} #{self.sequence} {self.event}"


class AuditCheckpoint(models.Model):
    """A signed statement of the heads of the scope's chains that had changed. `body` has the signed bytes.

    `signer` names the key (`vault:<mount>/<key>` or `local`); `key_version` selects its public key.
    """

    scope = choice(PepperSet)
    number = models.PositiveBigIntegerField()
    at = models.DateTimeField()
    body = models.BinaryField()
    signature = models.BinaryField(max_length=64)
    signer = models.CharField(max_length=200)
    key_version = models.PositiveIntegerField()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["scope", "number"], name="audit_checkpoint_unique"),
            choices_check("audit_checkpoint_scope", "scope", PepperSet),
        ]
        indexes = [
            models.Index(fields=["scope", "signer", "key_version", "number"], name="audit_checkpoint_by_key"),
        ]

    def __str__(self) -> str:
        return f"{self.scope} checkpoint {self.number}"


class Change(models.Model):
    """One entry of the change feed: a subject whose verdicts a transaction changed. The sequence only grows."""

    sequence = models.BigAutoField(primary_key=True)
    subject_kind = models.CharField(max_length=32)
    subject_id = models.CharField(max_length=160)
    at = models.DateTimeField()

    class Meta:
        indexes = [models.Index(fields=["subject_kind", "subject_id", "sequence"], name="change_by_subject")]

    def __str__(self) -> str:
        return f"{self.sequence}: {self.subject_kind} {self.subject_id}"


class BreakGlass(RecordedModel):
    """A break-glass action: a rule was bypassed on purpose. It stays listed until it is reviewed.

    `account`: the subject's; None for a subject of several accounts. `person` acted, or was named on the command line.
    `requester_person` requested the subject. `excluded_persons`: everyone who must not review the action, separated by
    spaces; persons are only added.

    `is_claimed`: it was done on a command line, which proves no identity. Two persons review it, `first_reviewer` and
    `reviewer`; the claimed approver of an approval may be one of them.
    """

    act_id = models.CharField(primary_key=True, max_length=32)
    event = models.CharField(max_length=64)
    subject = models.CharField(max_length=160)
    account = models.ForeignKey(Account, models.PROTECT, null=True, blank=True, related_name="+")
    operator = models.ForeignKey(settings.AUTH_USER_MODEL, models.PROTECT, related_name="break_glass_acts")
    person = models.CharField(max_length=32)
    requester_person = models.CharField(max_length=32)
    excluded_persons = models.TextField()
    host_user = models.CharField(max_length=64, blank=True)
    is_claimed = models.BooleanField()
    why = models.CharField(max_length=300)
    created_at = created_at()
    first_reviewer = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.PROTECT, null=True, blank=True, related_name="first_break_glass_reviews"
    )
    first_reviewer_person = models.CharField(max_length=32, null=True, blank=True)
    reviewed_at = at()
    reviewer = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.PROTECT, null=True, blank=True, related_name="break_glass_reviews"
    )
    reviewer_person = models.CharField(max_length=32, null=True, blank=True)

    class Meta:
        constraints = [
            models.CheckConstraint(
                name="break_glass_excluded",
                condition=Q(excluded_persons__contains=F("requester_person"))
                & (
                    Q(excluded_persons__contains=F("person"))
                    | (
                        Q(is_claimed=True, event__endswith=APPROVAL_SUFFIX)
                        & ~Q(requester_person__startswith=SYSTEM_PREFIX)
                    )
                ),
            ),
            models.CheckConstraint(
                name="break_glass_second_person",
                condition=Q(reviewer_person__isnull=True) | ~Q(excluded_persons__contains=F("reviewer_person")),
            ),
            models.CheckConstraint(
                name="break_glass_first_second_person",
                condition=Q(first_reviewer_person__isnull=True)
                | ~Q(excluded_persons__contains=F("first_reviewer_person")),
            ),
            models.CheckConstraint(
                name="break_glass_reviewed",
                condition=Q(reviewed_at__isnull=True, reviewer_person__isnull=True)
                | Q(reviewed_at__isnull=False, reviewer_person__isnull=False),
            ),
            models.CheckConstraint(
                name="break_glass_claim_reviewed",
                condition=Q(is_claimed=False)
                | Q(reviewer_person__isnull=True)
                | (Q(first_reviewer_person__isnull=False) & ~Q(first_reviewer_person=F("reviewer_person"))),
            ),
        ]

        indexes = [
            models.Index(fields=["subject"], name="break_glass_by_subject"),
            models.Index(fields=["-created_at", "-act_id"], name="break_glass_newest"),
            models.Index(fields=["created_at"], name="break_glass_unreviewed", condition=Q(reviewed_at__isnull=True)),
        ]

    def __str__(self) -> str:
        return f"{self.event} {self.subject}"

    def alters(self) -> None:
        return None
