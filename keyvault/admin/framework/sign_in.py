"""Sign-in page of the console; `services.sessions.sign_in` verifies, counts and records each attempt."""

from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

from django.conf import settings
from django.contrib import messages
from django.contrib.admin.forms import AdminAuthenticationForm
from django.contrib.auth import REDIRECT_FIELD_NAME
from django.contrib.auth.backends import ModelBackend
from django.contrib.auth.base_user import AbstractBaseUser
from django.contrib.auth.views import LoginView
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.http import url_has_allowed_host_and_scheme

from keyvault.admin.framework.middleware import is_console_path
from keyvault.domain.errors import KeyvaultError
from keyvault.domain.plaintext import Plaintext
from keyvault.models import Operator
from keyvault.services.sessions.devices import DEVICE_LIFETIME, write_device
from keyvault.services.sessions.lockout import SignInLockedError
from keyvault.services.sessions.second_factors import FactorAttempt
from keyvault.services.sessions.sign_in import SignInAttempt, sign_in
from keyvault.services.sessions.step_up import forget_second_factor, has_passed_second_factor
from keyvault.services.sessions.store import read_with_session
from keyvault.wire.headers import address_from_environ

TOO_MANY_REQUESTS = 429


class SessionBackend(ModelBackend):
    """Load the operator of a session. It verifies no password, which would bypass the failure counter."""

    def get_user(self, user_id: int) -> AbstractBaseUser | None:
        """Return the operator that was read with the session of the request, or read it."""
        known = read_with_session.get()
        if known is None or known.pk != user_id:
            return super().get_user(user_id)
        return known if self.user_can_authenticate(known) else None

    def authenticate(
        self, request: HttpRequest | None, username: str | None = None, password: str | None = None, **kwargs: Any
    ) -> None:
        return None


def address_of(request: HttpRequest) -> str | None:
    return address_from_environ(request.META, settings.TRUSTED_PROXIES)


def second_factor_url(next_url: str) -> str:
    """Return the page of the second factor, which continues to `next_url`."""
    return f"{reverse('admin:second_factor')}?{urlencode({REDIRECT_FIELD_NAME: next_url})}"


def find_next(request: HttpRequest) -> str:
    """Return the page of the console to which the request asks to continue; by default the overview."""
    asked = request.POST.get(REDIRECT_FIELD_NAME) or request.GET.get(REDIRECT_FIELD_NAME, "")
    is_ours = is_console_path(asked) and url_has_allowed_host_and_scheme(asked, {request.get_host()})
    return asked if is_ours else reverse("admin:index")


def factor_attempt(request: HttpRequest, operator: Operator) -> FactorAttempt:
    """Return an attempt with the address and the device of the request."""
    return FactorAttempt(
        operator,
        address_of(request),
        request.COOKIES.get(settings.DEVICE_COOKIE, ""),
        is_step_up=has_passed_second_factor(request.session),
    )


def set_new_device_cookie(response: HttpResponse, request: HttpRequest, operator: Operator) -> None:
    """Make the browser a known device of the operator, whose earlier cookies have ended."""
    set_device_cookie(response, write_device(operator, None, address_of(request)))


def set_device_cookie(response: HttpResponse, device: str) -> None:
    response.set_cookie(
        settings.DEVICE_COOKIE,
        device,
        max_age=DEVICE_LIFETIME,
        path="/admin/",
        secure=settings.SESSION_COOKIE_SECURE,
        httponly=True,
        # Not Strict: the identity provider sends the browser back from another site.
        samesite="Lax",
    )


def show_last_sign_in(request: HttpRequest, at: datetime | None) -> None:
    """Show the time of the previous sign-in on the next page, so that the operator notices another person's."""
    if at is not None:
        messages.info(request, f"Your last sign-in was on {at:%Y-%m-%d at %H:%M} UTC.")


def set_locked(response: HttpResponse, retry_after_seconds: int) -> None:
    """Answer that too many attempts failed."""
    response.status_code = TOO_MANY_REQUESTS
    response["Retry-After"] = str(retry_after_seconds)


class SignInForm(AdminAuthenticationForm):
    """Sign-in form.

    After `is_valid`, `get_user()` is set, or `locked_seconds` if sign-in is locked.
    """

    locked_seconds: int | None = None

    def clean(self) -> dict[str, Any]:
        username, password = self.cleaned_data.get("username"), self.cleaned_data.get("password")
        if not username or not password or self.request is None:
            return self.cleaned_data
        address = address_of(self.request)
        device = self.request.COOKIES.get(settings.DEVICE_COOKIE, "")
        presented = SignInAttempt(username, Plaintext(password), address, device)
        try:
            self.user_cache = sign_in(presented, datetime.now(UTC))
        except SignInLockedError as error:
            self.locked_seconds = error.retry_after_seconds
            raise ValidationError(error.detail) from None
        except KeyvaultError as error:
            raise ValidationError(error.detail) from None
        return self.cleaned_data


class SignInView(LoginView):
    """The page of name and password, which continues to the page of the second factor."""

    authentication_form = SignInForm
    template_name = "console/login.html"

    def form_valid(self, form: Any) -> HttpResponse:
        response = super().form_valid(form)
        forget_second_factor(self.request.session)
        return response

    def get_success_url(self) -> str:
        return second_factor_url(find_next(self.request))

    def form_invalid(self, form: Any) -> HttpResponse:
        response = super().form_invalid(form)
        if form.locked_seconds is not None:
            set_locked(response, form.locked_seconds)
        return response
