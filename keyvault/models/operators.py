"""Operators of the console. Two log-ins of one human being share a `person`: four eyes compare persons."""

import secrets

from django.contrib.auth.models import AbstractUser
from django.db import models

from keyvault.access.roles import Role
from keyvault.domain.ids import mint_id


def mint_person() -> str:
    return mint_id("per", secrets.token_bytes)


class Operator(AbstractUser):
    """A log-in; its roles are its groups, made by migration. There are no superusers: nothing asks for one."""

    person = models.CharField(max_length=32, default=mint_person)

    class Meta(AbstractUser.Meta):
        constraints = [
            models.CheckConstraint(name="operator_no_superuser", condition=models.Q(is_superuser=False)),
        ]

    @property
    def roles(self) -> frozenset[Role]:
        known = {role.value for role in Role}
        return frozenset(Role(name) for name in self.groups.values_list("name", flat=True) if name in known)
