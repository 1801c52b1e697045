"""Rotation's routes on the service plane; the composition root adds the integration plane's."""

from django.urls import path

from keyvault.api import converters  # noqa: F401  registers the ids used below
from rotation.api.rotations import RotationAbortView, RotationsView, RotationView

urlpatterns = [
    path("v1/rotations", RotationsView.as_view()),
    path("v1/rotations/<rotation_id:rotation_id>", RotationView.as_view()),
    path("v1/rotations/<rotation_id:rotation_id>/abort", RotationAbortView.as_view()),
]
