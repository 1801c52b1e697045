"""Flask.

protect(app, Verifier("https://keyvault.internal", "sandbox", token))

@app.get("/orders")
def orders():
    return {"merchant": current_identity().merchant_id}
"""

from flask import Flask, request

from keyvault_client.adapters.incoming import AdapterOptions, identity_of
from keyvault_client.adapters.wsgi import KeyvaultMiddleware
from keyvault_client.decisions import Identity, SyncVerifier


def protect(app: Flask, verifier: SyncVerifier, options: AdapterOptions | None = None) -> None:
    """Let only allowed requests reach the app."""
    app.wsgi_app = KeyvaultMiddleware(app.wsgi_app, verifier, options)  # type: ignore[method-assign]  # as Flask documents


def current_identity() -> Identity:
    """Return the identity of the current request. Raises LookupError for an app that is not protected."""
    identity = identity_of(request.environ)
    if identity is None:
        raise LookupError("the request was not verified: call protect(app, verifier)")
    return identity
