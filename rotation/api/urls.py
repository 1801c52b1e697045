"""Rotation's routes on the service plane; the composition root adds the integration plane's."""

from django.urls import path, register_converter
from django.urls.converters import StringConverter

from rotation.api.rotations import RotationAbortView, RotationsView, RotationView


class RotationIdConverter(StringConverter):
    regex = "rot_[0-9A-Za-z]{20}"


register_converter(RotationIdConverter, "rotation_id")

urlpatterns = [
    path("v1/rotations", RotationsView.as_view()),
    path("v1/rotations/<rotation_id:rotation_id>", RotationView.as_view()),
    path("v1/rotations/<rotation_id:rotation_id>/abort", RotationAbortView.as_view()),
]
