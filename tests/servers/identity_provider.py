"""An OpenID Connect provider on this machine that a test can attack with: discovery, keys, authorization, tokens."""

import base64
import hashlib
import json
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit

import jwt
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm

CLIENT_ID = "keyvault-console"
CLIENT_SECRET = "the secret of the client"

Claims = dict[str, Any]


@dataclass(frozen=True)
class SigningKey:
    """A key of the provider. The published half has its id."""

    key_id: str
    private: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    @property
    def published(self) -> dict[str, Any]:
        as_dict = ECAlgorithm.to_jwk(self.private.public_key(), as_dict=True)
        return {**as_dict, "kid": self.key_id, "use": "sig", "alg": "ES256"}

    def sign(self, claims: Claims, **header: Any) -> str:
        return jwt.encode(claims, self.private, "ES256", {"kid": self.key_id, **header})


@dataclass(frozen=True)
class _Code:
    """An authorization code that was not redeemed yet."""

    nonce: str | None
    challenge: str | None
    redirect_uri: str


@dataclass
class StubProvider:
    """The provider's state. `person`: claims of the operator. A test replaces `sign` and `metadata` to attack."""

    issuer: str
    person: Claims = field(default_factory=lambda: {"sub": "248289761001", "preferred_username": "jane", "groups": []})
    keys: list[SigningKey] = field(default_factory=lambda: [SigningKey("key-1")])
    metadata: Claims = field(default_factory=dict)
    changes: Claims = field(default_factory=dict)
    """Claims that replace those of the ID token; None removes one."""
    sign: Callable[[Claims], str | None] | None = None
    requests: Counter[str] = field(default_factory=Counter)
    """Number of requests by path."""
    asked: dict[str, str] = field(default_factory=dict)
    """Parameters of the last authorization request."""
    codes: dict[str, _Code] = field(default_factory=dict)

    def rotate(self, key_id: str) -> None:
        """Replace the signing key by a new one."""
        self.keys = [SigningKey(key_id)]

    def discovery(self) -> Claims:
        return {
            "issuer": self.issuer,
            "authorization_endpoint": f"{self.issuer}/authorize",
            "token_endpoint": f"{self.issuer}/token",
            "jwks_uri": f"{self.issuer}/jwks",
            "token_endpoint_auth_methods_supported": ["client_secret_post"],
            "authorization_response_iss_parameter_supported": True,
            "scopes_supported": ["openid", "profile", "groups"],
            **self.metadata,
        }

    def authorize(self, query: str) -> str:
        """Return the URL to which the browser is sent back: the person has agreed."""
        self.asked = dict(parse_qsl(query))
        code = secrets.token_urlsafe(16)
        challenge = self.asked.get("code_challenge") if self.asked.get("code_challenge_method") == "S256" else None
        self.codes[code] = _Code(self.asked.get("nonce"), challenge, self.asked["redirect_uri"])
        answer = {"code": code, "state": self.asked["state"], "iss": self.issuer}
        return f"{self.asked['redirect_uri']}?{urlencode(answer)}"

    def redeem(self, form: dict[str, str]) -> Claims | None:
        """Return the token response, or None for a code that is not redeemed."""
        code = self.codes.pop(form.get("code", ""), None)
        digest = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        if (
            code is None
            or (form.get("client_id"), form.get("client_secret")) != (CLIENT_ID, CLIENT_SECRET)
            or form.get("redirect_uri") != code.redirect_uri
            or code.challenge != challenge
        ):
            return None
        claims = self.claims(code.nonce)
        token = self.sign(claims) if self.sign else self.keys[0].sign(claims)
        return {"access_token": secrets.token_urlsafe(16), "token_type": "Bearer", "id_token": token}

    def claims(self, nonce: str | None) -> Claims:
        now = int(time.time())
        times = {"iat": now, "exp": now + 300, "auth_time": now}
        claims = {"iss": self.issuer, "aud": CLIENT_ID, "nonce": nonce, **times, **self.person, **self.changes}
        return {name: value for name, value in claims.items() if value is not None}


@contextmanager
def identity_provider() -> Iterator[StubProvider]:
    """Listen on 127.0.0.1 until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            stub.requests[url.path] += 1
            if url.path == "/.well-known/openid-configuration":
                self._answer(200, stub.discovery())
            elif url.path == "/jwks":
                self._answer(200, {"keys": [key.published for key in stub.keys]})
            elif url.path == "/authorize":
                self.send_response(302)
                self.send_header("Location", stub.authorize(url.query))
                self.send_header("Content-Length", "0")
                self.end_headers()
            else:
                self._answer(404, {})

        def do_POST(self) -> None:
            stub.requests[self.path] += 1
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            reply = stub.redeem({name: values[-1] for name, values in parse_qs(body).items()})
            self._answer(400 if reply is None else 200, reply or {"error": "invalid_grant"})

        def _answer(self, status: int, document: Claims) -> None:
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        stub = StubProvider(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield stub
        finally:
            server.shutdown()
            thread.join()
