"""Every route of the service: the service plane, each environment's integration plane, the console."""

from django.conf import settings
from django.contrib import admin
from django.urls import include, path, re_path

from keyvault.api.integration import IntegrationView, require_matching_servers
from keyvault.api.servers import SERVERS
from keyvault.domain.environments import Environment
from keyvault.hotpath.messages.pending_requests import BATCH, ENVOY, GATEWAYS, VERIFY
from keyvault.project.engine_view import verifying_view
from keyvault.project.views import root
from rotation.api.rotations import SERVERS as ROTATION_SERVERS

_SERVERS = {**SERVERS, **ROTATION_SERVERS}
require_matching_servers(_SERVERS)
# Here, because only a process with routes has pages.
admin.autodiscover()

urlpatterns = [
    *(path(address.removeprefix("/"), verifying_view) for address in (VERIFY, BATCH, *GATEWAYS)),
    # The rest is the client's path as sent; it may contain a newline.
    re_path(rf"^{ENVOY.removeprefix('/')}[\s\S]*", verifying_view),
    path("", include("keyvault.api.urls")),
    path("", include("rotation.api.urls")),
    *(
        re_path(rf"^{environment}/", IntegrationView.as_view(environment=Environment(environment), servers=_SERVERS))
        for environment in settings.ENVIRONMENTS
    ),
    path("admin/", admin.site.urls),
    path("", root),
]

handler400 = "keyvault.project.views.bad_request"
handler403 = "keyvault.project.views.forbidden"
handler404 = "keyvault.project.views.not_found"
handler500 = "keyvault.project.views.server_error"
