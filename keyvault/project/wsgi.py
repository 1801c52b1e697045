"""The WSGI application, for Granian or any other server. Loading it fails where serving would go wrong."""

import os

from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "keyvault.project.settings")
application = get_wsgi_application()

from keyvault.services.start import require_ready  # noqa: E402  models are there once Django is set up

require_ready()
