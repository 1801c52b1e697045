"""The peers' application, for Granian."""

import os

from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.bench.peers.settings")
application = get_wsgi_application()
