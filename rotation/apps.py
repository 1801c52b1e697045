"""The application's place in Django."""

from django.apps import AppConfig


class RotationConfig(AppConfig):
    name = "rotation"
