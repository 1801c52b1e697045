"""A worker of the dedicated verifier, started by `manage.py verifier`; listens on a port or an inherited socket.

    python -m keyvault.project.verifier --port 8100 --host 127.0.0.1 --ready 5
    python -m keyvault.project.verifier --listener 4 --ready 5

`--ready` is a file descriptor. The worker writes one line with its process id to it once it answers requests.
"""

import argparse
import os
import socket
import sys
from collections.abc import Callable

import django
from django.core.exceptions import ImproperlyConfigured

from keyvault.hotpath.http1.server import RequestHandler, listen, run
from keyvault.wire.planes import Plane


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m keyvault.project.verifier")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int)
    parser.add_argument("--listener", type=int, help="file descriptor of a listening socket")
    parser.add_argument("--ready", type=int, required=True)
    options = parser.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "keyvault.project.settings")
    try:
        django.setup()
    except ImproperlyConfigured as error:
        sys.exit(f"the verifier does not start: {error}")
    # Models can be imported after django.setup().
    from django.conf import settings

    from keyvault.services.startup.metrics import serve_metrics_or_exit

    load: Callable[[], RequestHandler]
    # Imported where needed: a verifier with a database loads no module of a region.
    if settings.REGION_SOURCE:
        from keyvault.hotpath.adapters.region import load_region, start_region_or_exit

        start_region_or_exit()
        load = load_region
    else:
        from keyvault.hotpath.adapters.assembly import load_async
        from keyvault.services.startup.startup_checks import start_or_exit

        start_or_exit("verifier", plane=Plane.SERVICE)
        load = load_async
    serve_metrics_or_exit("verifier")

    def report_ready() -> None:
        os.write(options.ready, f"{os.getpid()}\n".encode())

    listening = socket.socket(fileno=options.listener) if options.port is None else listen(options.host, options.port)
    run(load, listening, report_ready)


if __name__ == "__main__":
    main()
