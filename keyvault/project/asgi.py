"""The ASGI application for Granian: Django's WSGI application behind a bridge that loses nothing of a request.

Loading fails where serving would go wrong: `keyvault.project.wsgi` checks the process, and routes that do not match the
catalog fail here and not at the first request.
"""

from keyvault.project.wsgi import application as wsgi_application
from keyvault.project.wsgi import verifier

# isort: split
from keyvault.project.asgi_wsgi_bridge import Bridge

application = Bridge(wsgi_application, verifier.frontend.verify_known)

from keyvault.project import urls  # noqa: E402, F401  loads the routes, once Django is set up
