"""The WSGI application, for Granian or any other server. Loading it fails where serving would go wrong."""

import os

from django.core.wsgi import get_wsgi_application
from django.db import connection

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "keyvault.project.settings")
application = get_wsgi_application()

from keyvault.services.start import require_ready  # noqa: E402  models are there once Django is set up
from keyvault.services.usage import usage_log  # noqa: E402  likewise

require_ready()
# Not with the first verdict only: a new pepper is taken into use when every process that may judge by it has it.
usage_log.start()
connection.close()
