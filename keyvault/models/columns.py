"""The column kinds that every table here uses, so that they are the same everywhere."""

from enum import StrEnum
from typing import Any

from django.db import models
from django.db.models import Q


def choice(values: type[StrEnum] | type[models.TextChoices], **options: Any) -> "models.CharField[Any, Any]":
    """A lower_snake enum value; pair it with `choices_check`, since Django's `choices` bind forms only."""
    options.setdefault("choices", [(value.value, value.value.replace("_", " ")) for value in values])
    return models.CharField(max_length=32, **options)


def choices_check(name: str, column: str, values: type[StrEnum] | type[models.TextChoices]) -> models.CheckConstraint:
    return models.CheckConstraint(name=name, condition=Q(**{f"{column}__in": [value.value for value in values]}))


def created_at() -> "models.DateTimeField[Any, Any]":
    """Set by the service from its own `now`, not by the database's clock."""
    return models.DateTimeField()


def at() -> "models.DateTimeField[Any, Any]":
    """When something happened; None: it has not."""
    return models.DateTimeField(null=True, blank=True)
