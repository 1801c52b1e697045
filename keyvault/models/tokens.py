"""Service tokens: credentials of backend services and gateways on the service plane."""

from django.conf import settings
from django.db import models
from django.db.models import F, Q

from keyvault.access.permissions import Permission
from keyvault.access.scopes import AccessScope
from keyvault.domain.digests import DIGEST_BYTES
from keyvault.domain.ids import Subject
from keyvault.domain.keystring import SCOPE_ENVIRONMENTS, StringScope
from keyvault.models.columns import TokenColumns, choice, choices_check

MAX_READERS = 64
"""Default number of processes that read the change feed with one token."""

MAX_STALENESS_SECONDS = 10
"""Default time for which a reader may answer from memory after a response, in seconds."""


class ServiceToken(TokenColumns):
    """A service token. `merchants` None: all merchants. `creator_person` is responsible for its requests.

    `is_creator_claimed`: it was created or rotated on a command line, which does not prove who the creator is.
    `lineage` is the id of the first token in a series of rotations. Verifications by a token with `is_probe` are our
    own test calls and never count as use of a key. `max_readers` and `max_staleness_seconds`: how many processes read
    the change feed with it, and for how long each may answer from memory after a response.
    """

    lineage = models.CharField(max_length=16)
    name = models.CharField(max_length=100)
    scope = choice(StringScope)
    permissions = models.JSONField()
    merchants = models.JSONField(null=True, blank=True)
    is_probe = models.BooleanField(default=False)
    max_readers = models.PositiveSmallIntegerField(default=MAX_READERS, db_default=MAX_READERS)
    max_staleness_seconds = models.PositiveSmallIntegerField(
        default=MAX_STALENESS_SECONDS, db_default=MAX_STALENESS_SECONDS
    )
    creator = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.PROTECT, null=True, blank=True, related_name="service_tokens"
    )
    creator_person = models.CharField(max_length=64)
    is_creator_claimed = models.BooleanField()

    class Meta:
        constraints = [
            choices_check("token_scope", "scope", StringScope),
            models.CheckConstraint(name="token_digest_bytes", condition=Q(digest__length=DIGEST_BYTES)),
            models.CheckConstraint(name="token_expires_later", condition=Q(expires_at__gt=F("created_at"))),
        ]

    def __str__(self) -> str:
        return f"{self.name} ({self.token_id})"

    def __repr__(self) -> str:
        return f"ServiceToken({self.token_id})"

    def alters(self) -> Subject:
        return "service_token", self.token_id

    @property
    def access_scope(self) -> AccessScope:
        merchants = None if self.merchants is None else frozenset(self.merchants)
        return AccessScope(merchants, SCOPE_ENVIRONMENTS[StringScope(self.scope)])

    @property
    def permission_set(self) -> frozenset[Permission]:
        return frozenset(map(Permission, self.permissions))
