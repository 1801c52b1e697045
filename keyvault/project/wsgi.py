"""The WSGI application, for Granian or any other server: the engine in front of Django.

The import fails if the process cannot serve: it runs the start-up checks.
"""

import os
import sys

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.wsgi import get_wsgi_application
from django.db import connection

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "keyvault.project.settings")
try:
    django = get_wsgi_application()
except ImproperlyConfigured as _error:
    sys.exit(f"the server does not start: {_error}")

# Models can be imported after Django's setup.
from keyvault.hotpath.adapters.assembly import load_blocking
from keyvault.hotpath.frontends.wsgi import mounted
from keyvault.project.engine_view import serves_host
from keyvault.services.alarm_messages import alarm_thread
from keyvault.services.startup.metrics import serve_metrics_or_exit
from keyvault.services.startup.processes import process_watch
from keyvault.services.startup.startup_checks import start_or_exit
from keyvault.wire.planes import Plane
from rotation.services.rotations.turns import dispatcher
from rotation.tasks import send_turn

start_or_exit("server")
verifier = load_blocking()
# At start, not with the first verdict: a new pepper takes effect once every process that may use it has loaded it.
verifier.start()
dispatcher.send = send_turn
process_watch.start()
if Plane.CONSOLE in settings.PLANES and settings.ALARM_CHANNELS:
    # The console is the only server that may call external addresses (deploy/processes.toml).
    alarm_thread.start()
serve_metrics_or_exit("server")
connection.close()
verify_known = verifier.frontend.verify_known if Plane.SERVICE in settings.PLANES else None
"""The fast path of verify; None where the service plane is not served."""
application = mounted(django, verifier.frontend, serves_host) if Plane.SERVICE in settings.PLANES else django
