"""Operators of the console. Two operators that are the same human share a `person`, which four-eyes checks compare."""

import secrets
from collections.abc import Iterator
from typing import Any, ClassVar

from django.conf import settings
from django.contrib.auth.hashers import check_password
from django.contrib.auth.models import AbstractUser, UserManager
from django.db import models
from django.db.models.signals import m2m_changed, pre_delete, pre_save
from django.dispatch import receiver
from django.utils.crypto import salted_hmac

from keyvault.access.roles import Role
from keyvault.access.scopes import AccessScope
from keyvault.domain.ids import mint_id
from keyvault.domain.keystring import SCOPE_ENVIRONMENTS, StringScope
from keyvault.models.columns import at, choice, choices_check
from keyvault.models.recording import RecordedModel, RecordedQuerySet, UnrecordedWriteError, require_recording


def mint_person() -> str:
    return mint_id("per", secrets.token_bytes)


class OperatorManager(UserManager["Operator"]):
    """Django's user manager, with the query set of `RecordedModel`, which forbids bulk writes."""

    use_in_migrations = False

    def get_queryset(self) -> RecordedQuerySet:
        return RecordedQuerySet(self.model, using=self._db)


class Operator(RecordedModel, AbstractUser):
    """A console user. Its roles are its groups, which a migration creates. There are no superusers.

    It acts on the merchants of `scope_merchants` (None: all; by default none) in the environments of
    `scope_environments`. Until it has merchants, its person may still be linked to another operator's.
    Every `compare_and_swap` ends the operator's sessions, which are bound to the row's version.
    """

    person = models.CharField(max_length=32, default=mint_person)
    scope_merchants = models.JSONField(null=True, blank=True, default=list)
    scope_environments = choice(StringScope, default=StringScope.ALL)
    invitation_digest = models.CharField(max_length=64, null=True, unique=True)
    invitation_expires_at = at()

    group_names: frozenset[str] | None = None
    """Names of the groups, if they were read with the row; never after a change of the groups."""

    objects: ClassVar[OperatorManager] = OperatorManager()  # type: ignore[assignment]  # of users, with the same guard

    class Meta(AbstractUser.Meta):
        base_manager_name = "objects"
        constraints = [
            models.CheckConstraint(name="operator_no_superuser", condition=models.Q(is_superuser=False)),
            choices_check("operator_scope_environments", "scope_environments", StringScope),
        ]

    @property
    def roles(self) -> frozenset[Role]:
        known = {role.value for role in Role}
        names = self.groups.values_list("name", flat=True) if self.group_names is None else self.group_names
        return frozenset(Role(name) for name in names if name in known)

    @property
    def access_scope(self) -> AccessScope:
        merchants = None if self.scope_merchants is None else frozenset(self.scope_merchants)
        return AccessScope(merchants, SCOPE_ENVIRONMENTS[StringScope(self.scope_environments)])

    def alters(self) -> None:
        """Return None: no verdict on a key reads an operator."""
        return None  # noqa: RET501  an optional subject

    def get_session_auth_hash(self) -> str:
        """Return the hash that binds sessions: a change of password, roles, scope or state ends them."""
        return self._bind_session(None)

    def get_session_auth_fallback_hash(self) -> Iterator[str]:
        """Yield the same under each former session key, which `rotate_session_key` has replaced."""
        return (self._bind_session(secret) for secret in settings.SECRET_KEY_FALLBACKS)

    def _bind_session(self, secret: str | None) -> str:
        bound = f"{self.password}:{self.version}"
        return salted_hmac("keyvault.models.Operator.session", bound, secret=secret, algorithm="sha256").hexdigest()

    def check_password(self, raw_password: str | None) -> bool:
        """Check the password without a write. `services.sessions.sign_in` upgrades the hash in its own transaction."""
        return raw_password is not None and check_password(raw_password, self.password)


class RoleUse(models.Model):
    """When an operator got a role, and last used a permission of it. It exists while the operator has the role.

    `last_used_at`: written at most once a day; None: never.
    """

    # The unique constraint begins with the operator.
    operator = models.ForeignKey(Operator, models.PROTECT, related_name="role_uses", db_index=False)
    role = choice(Role)
    granted_at = models.DateTimeField()
    last_used_at = at()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["operator", "role"], name="role_use_unique"),
            choices_check("role_use_role", "role", Role),
        ]

    def __str__(self) -> str:
        return f"{self.role} of {self.operator_id}"


@receiver(m2m_changed, sender=Operator.groups.through)
@receiver(m2m_changed, sender=Operator.user_permissions.through)
def _require_recorded_roles(action: str, **_: Any) -> None:
    """Guard an operator's groups, which are rows of another table and no RecordedModel."""
    if action.startswith("pre_"):
        require_recording(Operator)


@receiver(pre_save, sender="mfa.Authenticator")
@receiver(pre_delete, sender="mfa.Authenticator")
@receiver(pre_save, sender="socialaccount.SocialAccount")
@receiver(pre_delete, sender="socialaccount.SocialAccount")
def _require_recorded_sign_in(**_: Any) -> None:
    """Guard an operator's second factors and its link to the identity provider, which are rows of allauth."""
    require_recording(Operator)


@receiver(pre_save, sender="socialaccount.SocialToken")
@receiver(pre_save, sender="socialaccount.SocialApp")
def _store_no_provider_secret(**_: Any) -> None:
    """Keep the provider's tokens and the client secret out of the database."""
    raise UnrecordedWriteError("tokens and secrets of the identity provider are never stored")
