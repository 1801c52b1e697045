"""Every route of the service: the service plane, each environment's integration plane, the console."""

from django.contrib import admin
from django.urls import include, path

from keyvault.domain.environments import Environment
from rotation.api import AcknowledgeView

urlpatterns = [
    path("", include("keyvault.api.urls")),
    path("", include("rotation.urls")),
    *(
        path(f"{environment}/credentials/acknowledge", AcknowledgeView.as_view(environment=environment))
        for environment in Environment
    ),
    path("admin/", admin.site.urls),
]

handler400 = "keyvault.project.views.bad_request"
handler403 = "keyvault.project.views.forbidden"
handler404 = "keyvault.project.views.not_found"
handler500 = "keyvault.project.views.server_error"
