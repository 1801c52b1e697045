"""Rotation's routes on the service plane; the composition root adds the integration plane's."""

from django.urls import path

from rotation.api import RotationsView, RotationView

urlpatterns = [
    path("v1/rotations", RotationsView.as_view()),
    path("v1/rotations/<str:rotation_id>", RotationView.as_view()),
]
