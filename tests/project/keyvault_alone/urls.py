"""The project's routes without rotation's."""

from django.conf import settings
from django.contrib import admin
from django.urls import include, path, re_path
from rest_framework.response import Response

from keyvault.api.integration import EndpointServer, IntegrationView, require_matching_servers
from keyvault.api.servers import SERVERS
from keyvault.domain.environments import Environment

_UNSERVED = EndpointServer("Not served.", answers=lambda call: Response(status=501), status=501)
# The catalog has endpoints that rotation serves.
_SERVERS = {**SERVERS, "credentials.acknowledge": _UNSERVED, "credentials.replacement": _UNSERVED}
require_matching_servers(_SERVERS)

urlpatterns = [
    path("", include("keyvault.api.urls")),
    *(
        re_path(rf"^{environment}/", IntegrationView.as_view(environment=Environment(environment), servers=_SERVERS))
        for environment in settings.ENVIRONMENTS
    ),
    path("admin/", admin.site.urls),
]
