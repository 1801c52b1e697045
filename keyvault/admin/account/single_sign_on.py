"""Pages of single sign-on: send the browser to the identity provider, and sign in the person who comes back.

allauth builds the authorization request with PKCE, keeps its state in the session and redeems the code. It does not
finish the sign-in: it would not verify the ID token's signature and nonce, and would write operators by itself.
"""

import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, NoReturn

import requests
from allauth.socialaccount.adapter import DefaultSocialAccountAdapter
from allauth.socialaccount.internal import statekit
from allauth.socialaccount.models import SocialApp
from allauth.socialaccount.providers.base.constants import AuthProcess
from allauth.socialaccount.providers.oauth2.client import OAuth2Error
from allauth.socialaccount.providers.openid_connect.provider import OpenIDConnectProvider
from allauth.socialaccount.providers.openid_connect.views import OpenIDConnectOAuth2Adapter
from django.conf import settings
from django.contrib.admin import AdminSite
from django.contrib.auth import login
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.urls import reverse

from keyvault.access.single_sign_on import AuthorizationRequest, FederatedIdentity, IdentityProvider, SignOnFault
from keyvault.admin.framework.pages import page
from keyvault.admin.framework.sign_in import find_next, second_factor_url, set_device_cookie, show_last_sign_in
from keyvault.backends.identity_provider import IdentityProviderError
from keyvault.services.sessions.id_tokens import verify_id_token
from keyvault.services.sessions.single_sign_on import configured_provider, identity_provider_client, refuse, sign_on
from keyvault.services.sessions.step_up import forget_second_factor, has_passed_second_factor, note_second_factor
from keyvault.wire.headers import address_from_environ

PROVIDER_ID = "sso"
"""The one provider's name in allauth's state."""

_SCOPES = ("openid", "profile")


class SingleSignOnAdapter(DefaultSocialAccountAdapter):  # type: ignore[misc]  # allauth has no types
    """allauth's adapter: the configured provider, calls that are bounded, and no sign-up."""

    def list_apps(self, request: HttpRequest, provider: str | None = None, client_id: str | None = None) -> list[Any]:
        """Return the configured provider. allauth would also read a table, which is empty."""
        if (configured := settings.IDENTITY_PROVIDER) is None:
            return []
        return [
            SocialApp(
                provider=OpenIDConnectProvider.id,
                provider_id=PROVIDER_ID,
                name="Single sign-on",
                client_id=configured.client_id,
                secret=configured.client_secret.reveal(),
                settings={"server_url": configured.issuer, "oauth_pkce_enabled": True},
            )
        ]

    def get_requests_session(self) -> requests.Session:
        return identity_provider_client().session()

    def is_open_for_signup(self, request: HttpRequest, sociallogin: Any) -> bool:
        return False


class SingleSignOnProvider(OpenIDConnectProvider):  # type: ignore[misc]  # allauth has no types
    """The configured provider, for one request."""

    def get_oauth2_adapter(self, request: HttpRequest) -> "CodeFlow":
        return CodeFlow(request, PROVIDER_ID)

    def get_scope(self) -> list[str]:
        """Return the requested scopes. Some providers send groups only to clients that ask for the scope `groups`."""
        supported = identity_provider_client().metadata().get("scopes_supported")
        return [*_SCOPES, *(["groups"] if isinstance(supported, list) and "groups" in supported else [])]


class CodeFlow(OpenIDConnectOAuth2Adapter):  # type: ignore[misc]  # allauth has no types
    """The authorization code flow of one request, with an ID token that is verified."""

    @property
    def openid_config(self) -> Mapping[str, Any]:
        return identity_provider_client().metadata()

    @property
    def basic_auth(self) -> bool:
        """Whether the client secret is sent in the Authorization header: the default of RFC 8414, section 2."""
        return "client_secret_post" not in (self.openid_config.get("token_endpoint_auth_methods_supported") or ())

    def get_provider(self) -> SingleSignOnProvider:
        (app,) = SingleSignOnAdapter(self.request).list_apps(self.request)
        return SingleSignOnProvider(self.request, app)

    def get_callback_url(self, request: HttpRequest, app: Any) -> str:
        """Return the registered URL, independent of the request's Host header."""
        return f"{settings.CONSOLE_ORIGIN}{reverse('admin:single_sign_on_callback')}"

    def complete_login(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("allauth does not verify the ID token; `redeem` does")

    def redeem(
        self, code_verifier: str, authorization: AuthorizationRequest, now: datetime
    ) -> FederatedIdentity | SignOnFault:
        """Exchange the request's code for an ID token and verify it. Raises IdentityProviderError."""
        app = self.get_provider().app
        try:
            reply = self.get_access_token_data(self.request, app, self.get_client(self.request, app), code_verifier)
        except requests.RequestException as error:
            raise IdentityProviderError(
                "The identity provider does not reply. Try again later.", internal=type(error).__name__
            ) from None
        except (OAuth2Error, KeyError, TypeError, ValueError):
            # The reply is no token. allauth's text repeats it, so it is not logged.
            return SignOnFault.CODE_REFUSED
        token = reply.get("id_token") if isinstance(reply, dict) else None
        return verify_id_token(token, identity_provider_client().find_keys, configured_provider(), authorization, now)


def begin(site: AdminSite, request: HttpRequest) -> HttpResponse:
    """Send the browser to the provider. Raises IdentityProviderError.

    A page does that, since the console's CSP forbids a form that is redirected to another site.
    """
    configured = configured_provider()
    if request.method != "POST":
        return HttpResponseNotAllowed(["POST"])
    # A signed-in operator proves its identity again. OpenBao and Vault refuse 0.
    max_age_seconds = 1 if request.user.is_authenticated else settings.SESSION_COOKIE_AGE
    if not request.user.is_authenticated:
        request.session.set_expiry(statekit.STATE_TTL)
    begun_at = int(datetime.now(UTC).timestamp())
    authorization = AuthorizationRequest(configured.issuer, secrets.token_urlsafe(32), begun_at, max_age_seconds)
    parameters = {"nonce": authorization.nonce, "max_age": str(max_age_seconds)}
    if configured.requested_acr:
        parameters["acr_values"] = " ".join(configured.requested_acr)
    response = (
        CodeFlow(request, PROVIDER_ID)
        .get_provider()
        .redirect(request, AuthProcess.LOGIN, find_next(request), authorization.stored(), auth_params=parameters)
    )
    context = {"title": "Single sign-on", "url": response["Location"]}
    return _unshared(page(site, request, "single_sign_on", context))


def finish(request: HttpRequest) -> HttpResponse:
    """Sign in the person whom the provider has sent back. Raises SignOnRefusedError, IdentityProviderError."""
    configured = configured_provider()
    now, address = datetime.now(UTC), address_from_environ(request.META, settings.TRUSTED_PROXIES)
    deny = partial(refuse, address=address, now=now)
    state = statekit.unstash_state(request, provider_id=PROVIDER_ID, state_id=request.GET.get("state", ""))
    if state is None:
        raise deny(SignOnFault.STATE_INVALID)
    try:
        identity = _authenticate(request, configured, state, now)
    except IdentityProviderError:
        deny(SignOnFault.PROVIDER_UNAVAILABLE)
        raise
    if isinstance(identity, SignOnFault):
        raise deny(identity)
    signed_on = sign_on(identity, address, request.COOKIES.get(settings.DEVICE_COOKIE, ""), now)
    is_step_up = has_passed_second_factor(request.session)
    if is_step_up and request.user.pk == signed_on.operator.pk:
        # The session keeps what the operator did and chose in it, such as the receipt of a leak.
        forget_second_factor(request.session)
        request.session.cycle_key()
    else:
        request.session.flush()
    login(request, signed_on.operator)
    if identity.second_factor_at is None or signed_on.device is None:
        return _unshared(HttpResponseRedirect(second_factor_url(state["next"])))
    note_second_factor(request.session, identity.second_factor_at)
    if not is_step_up:
        show_last_sign_in(request, signed_on.last_sign_in_at)
    response = _unshared(HttpResponseRedirect(state["next"]))
    set_device_cookie(response, signed_on.device)
    return response


def _authenticate(
    request: HttpRequest, configured: IdentityProvider, state: Mapping[str, Any], now: datetime
) -> FederatedIdentity | SignOnFault:
    """Return the identity that the provider's response proves. Raises IdentityProviderError."""
    client, verifier = identity_provider_client(), state.get("pkce_code_verifier")
    authorization = AuthorizationRequest.from_stored(state["data"])
    names_issuer = client.metadata().get("authorization_response_iss_parameter_supported") is True
    if authorization.is_mixed_up(request.GET.get("iss"), configured, names_issuer=names_issuer):
        return SignOnFault.ISSUER_MIXED_UP
    if "error" in request.GET or not request.GET.get("code"):
        return SignOnFault.PROVIDER_REFUSED
    if not verifier:
        return SignOnFault.STATE_INVALID
    return CodeFlow(request, PROVIDER_ID).redeem(verifier, authorization, now)


def _unshared(response: HttpResponse) -> HttpResponse:
    """Keep the URL, with the code or the state, from other sites."""
    response["Referrer-Policy"] = "no-referrer"
    return response
