"""Base class of public views: read-only, without data about any merchant or operator."""

from rest_framework.permissions import AllowAny
from rest_framework.request import Request
from rest_framework.views import APIView

from keyvault.access.verification import find_exposed
from keyvault.api.exceptions import DeniedError
from keyvault.api.middleware import raw_url


class PublicView(APIView):
    authentication_classes = ()
    permission_classes = (AllowAny,)
    http_method_names = ["get", "head"]

    def initial(self, request: Request, *args: object, **kwargs: object) -> None:
        exposed = find_exposed(raw_url(request._request))
        if exposed is not None:
            raise DeniedError(exposed)
        super().initial(request, *args, **kwargs)
