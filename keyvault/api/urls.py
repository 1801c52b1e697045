"""The service plane's routes."""

from django.urls import path

from keyvault.api import converters  # noqa: F401  registers the ids used below
from keyvault.api.views.health import healthz, readyz
from keyvault.api.views.keys import CredentialsView, KeyView, RevokeView
from keyvault.api.views.verification import VerifyView

urlpatterns = [
    path("healthz", healthz),
    path("readyz", readyz),
    path("v1/keys/verify", VerifyView.as_view()),
    path("v1/keys/<key_id:key_id>", KeyView.as_view()),
    path("v1/keys/<key_id:key_id>/revoke", RevokeView.as_view()),
    path("v1/credentials", CredentialsView.as_view()),
]
