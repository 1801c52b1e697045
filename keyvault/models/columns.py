"""Column types shared by all tables, and groups of columns that several tables have."""

from enum import StrEnum
from typing import Any

from django.conf import settings
from django.db import models
from django.db.models import Q

from keyvault.access.limits import MAX_COUNT, MAX_SECONDS
from keyvault.domain.digests import DIGEST_BYTES
from keyvault.domain.environments import Environment
from keyvault.models.recording import RecordedModel


def choice(values: type[StrEnum] | type[models.TextChoices], **options: Any) -> "models.CharField[Any, Any]":
    """Return a column for a lower_snake enum value; add `choices_check`, since Django's `choices` only affect forms."""
    options.setdefault("choices", [(value.value, value.value.replace("_", " ")) for value in values])
    return models.CharField(max_length=32, **options)


def choices_check(name: str, column: str, values: type[StrEnum] | type[models.TextChoices]) -> models.CheckConstraint:
    return models.CheckConstraint(name=name, condition=Q(**{f"{column}__in": [value.value for value in values]}))


def account_environment(**options: Any) -> "models.CharField[Any, Any]":
    """Return a column with a copy of the account's environment. The indexes of the lists by environment begin with it.

    A trigger compares it with the account.
    """
    return choice(Environment, verbose_name="environment", **options)


def page_indexes(name: str, primary_key: str, filtered: str = "") -> list[models.Index]:
    """Return two indexes of a list's pages, newest rows first: one by account, one by environment.

    `filtered`: a column with few values. The indexes then serve a list that is filtered by one of them.
    """
    by = [filtered] if filtered else []
    suffix = f"_{filtered}" if filtered else ""
    page = ["-created_at", f"-{primary_key}"]
    return [
        models.Index(fields=["account", *by, *page], name=f"{name}_account{suffix}"),
        models.Index(fields=["account_environment", *by, *page], name=f"{name}_env{suffix}"),
    ]


def prefix_index(name: str, column: str) -> models.Index:
    """Return the index with which PostgreSQL finds the rows whose text begins with a word, in any collation."""
    return models.Index(fields=[column], name=name, opclasses=["varchar_pattern_ops"])


def created_at() -> "models.DateTimeField[Any, Any]":
    """Return a column that the service sets from its own `now`, not from the database's clock."""
    return models.DateTimeField()


def at() -> "models.DateTimeField[Any, Any]":
    """Return a column for the time of an event; None: it has not happened."""
    return models.DateTimeField(null=True, blank=True)


def limit_check(name: str) -> models.CheckConstraint:
    """Return the constraint of `LimitColumns`: both numbers are within bounds or both are NULL."""
    return models.CheckConstraint(
        name=name,
        condition=Q(limit_count__isnull=True, limit_seconds__isnull=True)
        | Q(
            limit_count__isnull=False,
            limit_count__range=(1, MAX_COUNT),
            limit_seconds__isnull=False,
            limit_seconds__range=(1, MAX_SECONDS),
        ),
    )


class LimitColumns(RecordedModel):
    """A rate limit: requests per seconds; None: the next more general limit applies."""

    limit_count = models.PositiveIntegerField(null=True, blank=True)
    limit_seconds = models.PositiveIntegerField(null=True, blank=True)

    class Meta:
        abstract = True


class DigestColumns(RecordedModel):
    """The digest of a secret, and the version of the pepper that made it."""

    digest = models.BinaryField(max_length=DIGEST_BYTES)
    pepper_version = models.PositiveIntegerField()

    class Meta:
        abstract = True


class TokenColumns(DigestColumns):
    """A token that expires and can be revoked."""

    token_id = models.CharField(primary_key=True, max_length=16)
    created_at = created_at()
    expires_at = models.DateTimeField()
    revoked_at = at()

    class Meta:
        abstract = True

    def has_ended(self) -> bool:
        return self.revoked_at is not None


class RequestColumns(RecordedModel):
    """A request that other people approve: they approve its `plan_digest` and differ from `requester_person`.

    `is_requester_claimed`: it was made on a command line, or with a token that was created on one, so that
    `requester_person` is not proved.
    """

    plan_digest = models.CharField(max_length=64)
    approvals_needed = models.PositiveSmallIntegerField()
    requester_person = models.CharField(max_length=32)
    is_requester_claimed = models.BooleanField()
    created_at = created_at()

    class Meta:
        abstract = True


class ApprovalColumns(RecordedModel):
    """One person's approval of one plan digest."""

    approver = models.ForeignKey(settings.AUTH_USER_MODEL, models.PROTECT, related_name="+")
    person = models.CharField(max_length=32)
    plan_digest = models.CharField(max_length=64)
    created_at = created_at()

    class Meta:
        abstract = True
