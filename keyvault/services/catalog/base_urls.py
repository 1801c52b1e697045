"""The base URL of each environment, as configured."""

from django.conf import settings

from keyvault.domain.environments import Environment

BASE_URLS = {Environment(name): url for name, url in settings.BASE_URLS.items()}
