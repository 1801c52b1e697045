"""The WSGI application, for Granian or any other server."""

import os

from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "keyvault.project.settings")
application = get_wsgi_application()
