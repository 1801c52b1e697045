"""Issuance requests and their approvals. Triggers enforce four eyes, see `models.triggers`."""

from django.conf import settings
from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Length

from keyvault.domain.environments import Environment
from keyvault.domain.issuance import COLLECTED_DELIVERIES, MAX_EXPIRES_IN_DAYS, Delivery, IssuancePlan, IssuanceState
from keyvault.domain.keys import KeyKind
from keyvault.models.columns import (
    ApprovalColumns,
    RequestColumns,
    account_environment,
    at,
    choice,
    choices_check,
    page_indexes,
    prefix_index,
)
from keyvault.models.keys import Credential, Key
from keyvault.models.merchants import Account
from keyvault.models.tokens import ServiceToken

models.CharField.register_lookup(Length)


class IssuanceRequest(RequestColumns):
    """A request for a credential. Approvers differ from `requester_person`; `requested_via`: the service's token."""

    issuance_request_id = models.CharField(primary_key=True, max_length=32)
    # The index of the account's pages serves the foreign key.
    account = models.ForeignKey(Account, models.PROTECT, related_name="issuance_requests", db_index=False)
    account_environment = account_environment()
    kind = choice(KeyKind)
    label = models.CharField(max_length=100)
    delivery = choice(Delivery)
    recipient_public_key = models.CharField(max_length=43, blank=True)
    expires_in_days = models.PositiveIntegerField(null=True, blank=True)
    state = choice(IssuanceState)
    requester = models.ForeignKey(settings.AUTH_USER_MODEL, models.PROTECT, null=True, related_name="issuance_requests")
    requested_via = models.ForeignKey(ServiceToken, models.PROTECT, null=True, blank=True)
    expires_at = models.DateTimeField()
    decided_at = at()
    issued_at = at()
    collected_at = at()
    credential = models.ForeignKey(Credential, models.PROTECT, null=True, blank=True, related_name="requests")
    key = models.ForeignKey(Key, models.PROTECT, null=True, blank=True, related_name="requests")

    class Meta:
        constraints = [
            choices_check("request_kind", "kind", KeyKind),
            choices_check("request_state", "state", IssuanceState),
            choices_check("request_delivery", "delivery", Delivery),
            models.CheckConstraint(name="request_expires_later", condition=Q(expires_at__gt=F("created_at"))),
            models.CheckConstraint(
                name="request_issued_key",
                condition=~Q(state__in=["issued", "collected", "burned"])
                | Q(key__isnull=False, credential__isnull=False, issued_at__isnull=False),
            ),
            models.CheckConstraint(
                name="request_collected_at", condition=~Q(state="collected") | Q(collected_at__isnull=False)
            ),
            models.CheckConstraint(
                name="request_recipient",
                condition=Q(delivery="sealed", recipient_public_key__length=43)
                | (~Q(delivery="sealed") & Q(recipient_public_key="")),
            ),
            models.CheckConstraint(
                name="request_expires_in_days",
                condition=Q(expires_in_days__isnull=True) | Q(expires_in_days__range=(1, MAX_EXPIRES_IN_DAYS)),
            ),
        ]
        indexes = [
            models.Index(fields=["state", "created_at", "issuance_request_id"], name="request_by_state"),
            models.Index(fields=["-created_at", "-issuance_request_id"], name="request_newest"),
            prefix_index("request_label", "label"),
            *page_indexes("request", "issuance_request_id"),
            *page_indexes("request", "issuance_request_id", "state"),
            models.Index(
                fields=["issued_at", "issuance_request_id"],
                name="request_uncollected",
                condition=Q(
                    state="issued", kind="private", delivery__in=sorted(each.value for each in COLLECTED_DELIVERIES)
                ),
            ),
        ]

    def __str__(self) -> str:
        return self.issuance_request_id

    def alters(self) -> None:
        return None

    def plan(self) -> IssuancePlan:
        return IssuancePlan(
            merchant_id=self.account.merchant_id,
            environment=Environment(self.account.environment),
            kind=KeyKind(self.kind),
            label=self.label,
            delivery=Delivery(self.delivery),
            expires_in_days=self.expires_in_days,
            recipient_public_key=self.recipient_public_key,
        )


class IssuanceApproval(ApprovalColumns):
    """One person's approval of one plan digest."""

    request = models.ForeignKey(IssuanceRequest, models.PROTECT, related_name="approvals")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["request", "person"], name="issuance_approval_once"),
        ]

    def __str__(self) -> str:
        return f"{self.approver_id} on {self.request_id}"

    def alters(self) -> None:
        return None
