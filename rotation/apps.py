"""Django application configuration."""

from django.apps import AppConfig


class RotationConfig(AppConfig):
    name = "rotation"
