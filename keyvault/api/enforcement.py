"""Authentication and authorization of service-plane views.

A service token proves the principal, and every view calls the one decision function.
"""

from datetime import UTC, datetime

from rest_framework.authentication import BaseAuthentication
from rest_framework.request import Request
from rest_framework.views import APIView

from keyvault.access.decision import Denial, Grant, decide
from keyvault.access.permissions import Permission
from keyvault.access.principals import Service
from keyvault.access.rules import Target, operation
from keyvault.access.verification import find_exposed
from keyvault.api.exceptions import DeniedError
from keyvault.api.middleware import raw_url
from keyvault.api.permissions import HasServiceToken
from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode
from keyvault.models import Account
from keyvault.services.keys.records import prove_service_token
from keyvault.services.recording.authorization import authorize
from keyvault.wire.headers import read_bearer

_INVALID = Denial(ErrorCode.SERVICE_TOKEN_INVALID, "Send a valid service token in Authorization: Bearer.")


class ServiceTokenAuthentication(BaseAuthentication):
    """Accept service tokens only: neither sessions nor API keys."""

    def authenticate(self, request: Request) -> tuple[Service, None]:
        service = prove_service_token(read_bearer(request.headers.get("Authorization")), datetime.now(UTC))
        if service is None:
            raise DeniedError(_INVALID)
        return service, None

    def authenticate_header(self, request: Request) -> str:
        return "Bearer"


class ServiceView(APIView):
    """Base class of service-plane views. `permission` is checked before the rest of the request is read."""

    authentication_classes = (ServiceTokenAuthentication,)
    permission_classes = (HasServiceToken,)
    http_method_names = ["get", "head", "post"]
    permission: Permission

    def initial(self, request: Request, *args: object, **kwargs: object) -> None:
        exposed = find_exposed(raw_url(request._request))
        if exposed is not None:
            raise DeniedError(exposed)
        super().initial(request, *args, **kwargs)
        self.now = datetime.now(UTC)
        authorize(self.service, self.permission, now=self.now)

    @property
    def service(self) -> Service:
        if not isinstance(self.request.user, Service):
            raise DeniedError(_INVALID)
        return self.request.user

    def grant_for(self, account: Account) -> Grant:
        """Return the grant for the account. Raises PermissionMissingError, NotFoundError."""
        return authorize(self.service, self.permission, account, now=self.now)

    def require_scope(self, environment: Environment | None, merchant_id: str | None) -> None:
        """Raise DeniedError if a named environment or merchant is outside the token. It reads no row.

        So another merchant and an unknown one get the same response.
        """
        verdict = decide(operation(self.permission), self.service, Target(environment, merchant_id), self.now)
        if isinstance(verdict, Denial):
            raise DeniedError(verdict)
