"""Sign-in page of the console; `services.sessions.sign_in` verifies, counts and records each attempt."""

from datetime import UTC, datetime
from typing import Any

from django.conf import settings
from django.contrib.admin.forms import AdminAuthenticationForm
from django.contrib.auth.backends import ModelBackend
from django.contrib.auth.views import LoginView
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse

from keyvault.domain.errors import KeyvaultError
from keyvault.domain.plaintext import Plaintext
from keyvault.services.sessions.sign_in import DEVICE_LIFETIME, SignInAttempt, SignInLockedError, sign_in
from keyvault.wire.headers import address_from_environ

TOO_MANY_REQUESTS = 429


class SessionBackend(ModelBackend):
    """Load the operator of a session. It verifies no password, which would bypass the failure counter."""

    def authenticate(
        self, request: HttpRequest | None, username: str | None = None, password: str | None = None, **kwargs: Any
    ) -> None:
        return None


class SignInForm(AdminAuthenticationForm):
    """Sign-in form.

    After `is_valid`, `get_user()` and `device` are set, or `locked_seconds` if sign-in is locked.
    """

    device = ""
    locked_seconds: int | None = None

    def clean(self) -> dict[str, Any]:
        username, password = self.cleaned_data.get("username"), self.cleaned_data.get("password")
        if not username or not password or self.request is None:
            return self.cleaned_data
        address = address_from_environ(self.request.META, settings.TRUSTED_PROXIES)
        device = self.request.COOKIES.get(settings.DEVICE_COOKIE, "")
        presented = SignInAttempt(username, Plaintext(password), address, device)
        try:
            signed_in = sign_in(presented, datetime.now(UTC))
        except SignInLockedError as error:
            self.locked_seconds = error.retry_after_seconds
            raise ValidationError(error.detail) from None
        except KeyvaultError as error:
            raise ValidationError(error.detail) from None
        self.user_cache, self.device = signed_in.operator, signed_in.device
        return self.cleaned_data


class SignInView(LoginView):
    authentication_form = SignInForm
    template_name = "console/login.html"

    def form_valid(self, form: Any) -> HttpResponse:
        response = super().form_valid(form)
        response.set_cookie(
            settings.DEVICE_COOKIE,
            form.device,
            max_age=DEVICE_LIFETIME,
            path="/admin/",
            secure=settings.SESSION_COOKIE_SECURE,
            httponly=True,
            samesite="Strict",
        )
        return response

    def form_invalid(self, form: Any) -> HttpResponse:
        response = super().form_invalid(form)
        if form.locked_seconds is not None:
            response.status_code = TOO_MANY_REQUESTS
            response["Retry-After"] = str(form.locked_seconds)
        return response
