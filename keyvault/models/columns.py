"""Column types shared by all tables."""

from enum import StrEnum
from typing import Any

from django.db import models
from django.db.models import Q


def choice(values: type[StrEnum] | type[models.TextChoices], **options: Any) -> "models.CharField[Any, Any]":
    """Return a column for a lower_snake enum value; add `choices_check`, since Django's `choices` only affect forms."""
    options.setdefault("choices", [(value.value, value.value.replace("_", " ")) for value in values])
    return models.CharField(max_length=32, **options)


def choices_check(name: str, column: str, values: type[StrEnum] | type[models.TextChoices]) -> models.CheckConstraint:
    return models.CheckConstraint(name=name, condition=Q(**{f"{column}__in": [value.value for value in values]}))


def created_at() -> "models.DateTimeField[Any, Any]":
    """Return a column that the service sets from its own `now`, not from the database's clock."""
    return models.DateTimeField()


def at() -> "models.DateTimeField[Any, Any]":
    """Return a column for the time of an event; None: it has not happened."""
    return models.DateTimeField(null=True, blank=True)
