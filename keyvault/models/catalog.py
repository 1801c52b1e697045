"""Upstream endpoints that operators add to the catalog, and overrides of rate limits."""

from django.db import models
from django.db.models import Q

from keyvault.access.catalog import Bearer, LimiterFailurePolicy
from keyvault.domain.environments import Environment
from keyvault.domain.ids import Subject
from keyvault.models.columns import LimitColumns, at, choice, choices_check, created_at, limit_check
from keyvault.models.merchants import Account


class CatalogEndpoint(LimitColumns):
    """One upstream endpoint, with the fields of `access.catalog.Endpoint`. `withdrawn_at`: when it was removed."""

    name = models.CharField(primary_key=True, max_length=100)
    method = models.CharField(max_length=16)
    path = models.CharField(max_length=300)
    credentials = models.JSONField()
    bearer = choice(Bearer, default=Bearer.NONE)
    idempotent_by_key = models.BooleanField(default=False)
    summary = models.CharField(max_length=200, blank=True)
    merchant_from = models.CharField(max_length=100, blank=True)
    store_from = models.CharField(max_length=100, blank=True)
    on_limiter_loss = choice(LimiterFailurePolicy, default=LimiterFailurePolicy.LOCAL_SHARE)
    created_at = created_at()
    withdrawn_at = at()

    class Meta:
        constraints = [
            choices_check("endpoint_bearer", "bearer", Bearer),
            choices_check("endpoint_on_limiter_loss", "on_limiter_loss", LimiterFailurePolicy),
            limit_check("endpoint_limit_whole"),
        ]

    def __str__(self) -> str:
        return self.name

    def alters(self) -> Subject:
        return "endpoint", self.name


class LimitOverride(LimitColumns):
    """The limit of one endpoint for one account, or for all accounts of the environment (account None).

    Both numbers None: the override is cleared, and the next more general limit applies.
    """

    account = models.ForeignKey(Account, models.PROTECT, null=True, blank=True, related_name="limit_overrides")
    environment = choice(Environment)
    endpoint = models.CharField(max_length=100)
    created_at = created_at()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["account", "endpoint"], name="limit_of_pair_unique"),
            models.UniqueConstraint(
                fields=["environment", "endpoint"], name="limit_of_endpoint_unique", condition=Q(account__isnull=True)
            ),
            choices_check("limit_environment", "environment", Environment),
            limit_check("limit_whole"),
        ]

    def __str__(self) -> str:
        return f"{self.account or self.environment} {self.endpoint}"

    def alters(self) -> Subject:
        return "limit", str(self)
