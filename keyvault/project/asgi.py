"""The ASGI application for Granian: Django's WSGI application behind a bridge that keeps each request as sent.

The import fails if the process cannot serve: `keyvault.project.wsgi` runs the start-up checks, and the routes are
compared with the catalog now instead of at the first request.
"""

import gc

from keyvault.project.wsgi import application as wsgi_application
from keyvault.project.wsgi import verify_known

# isort: split
from keyvault.project.asgi_wsgi_bridge import Bridge
from keyvault.project.feed_waiting import FeedWaiters
from keyvault.services.change_feed.follower import on_new_changes

application = Bridge(wsgi_application, verify_known, feed=FeedWaiters(on_new_changes))

from keyvault.project import urls  # noqa: E402, F401  loads the routes, once Django is set up

# What is loaded lives until the process ends. A collection that visits all of it delays every request meanwhile.
gc.collect()
gc.freeze()
