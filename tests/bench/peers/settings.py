"""Django settings of both peers: no middleware, JSON only, a persistent connection to the URL `BENCH_DATABASE`."""

import os
import secrets
from urllib.parse import urlsplit

_database = urlsplit(os.environ["BENCH_DATABASE"])

SECRET_KEY = secrets.token_urlsafe(50)
ALLOWED_HOSTS = ["127.0.0.1"]
INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "rest_framework",
    "rest_framework_api_key",
    "knox",
]
MIDDLEWARE: list[str] = []
ROOT_URLCONF = "tests.bench.peers.urls"
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": _database.path.strip("/"),
        "USER": _database.username,
        "PASSWORD": _database.password,
        "HOST": _database.hostname,
        "PORT": _database.port,
        "CONN_MAX_AGE": None,
    }
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
REST_FRAMEWORK = {
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["rest_framework.parsers.JSONParser"],
    "UNAUTHENTICATED_USER": None,
}
REST_KNOX = {"TOKEN_TTL": None, "AUTO_REFRESH": False}
LOGGING_CONFIG = None
