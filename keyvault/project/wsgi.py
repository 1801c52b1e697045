"""The WSGI application, for Granian or any other server: the engine in front of Django.

The import fails if the process cannot serve: it runs the start-up checks.
"""

import os

from django.core.wsgi import get_wsgi_application
from django.db import connection

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "keyvault.project.settings")
django = get_wsgi_application()

from keyvault.hotpath.adapters.assembly import load_blocking  # noqa: E402  models exist after Django's setup
from keyvault.hotpath.frontends.wsgi import mounted  # noqa: E402  likewise
from keyvault.project.engine_view import serves_host  # noqa: E402  likewise
from keyvault.services.startup.processes import process_watch  # noqa: E402  likewise
from keyvault.services.startup.startup_checks import start_or_exit  # noqa: E402  likewise
from rotation.services.rotations.turns import dispatcher  # noqa: E402  likewise
from rotation.tasks import send_turn  # noqa: E402  likewise

start_or_exit("server")
verifier = load_blocking()
# At start, not with the first verdict: a new pepper takes effect once every process that may use it has loaded it.
verifier.start()
dispatcher.send = send_turn
process_watch.start()
connection.close()
application = mounted(django, verifier.frontend, serves_host)
