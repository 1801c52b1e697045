"""Rotation's routes on the service plane; the composition root adds the integration plane's."""

from django.urls import path

from rotation.api.rotations import RotationAbortView, RotationsView, RotationView

urlpatterns = [
    path("v1/rotations", RotationsView.as_view()),
    path("v1/rotations/<rotation_id>", RotationView.as_view()),
    path("v1/rotations/<rotation_id>/abort", RotationAbortView.as_view()),
]
