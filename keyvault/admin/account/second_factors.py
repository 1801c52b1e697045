"""The pages of an operator's own second factors: list, add, remove, new recovery codes.

Each of them requires a recent second factor.
"""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import wraps
from typing import Any

from allauth.mfa.adapter import get_adapter
from django.contrib import messages
from django.contrib.admin import AdminSite
from django.contrib.auth import update_session_auth_hash
from django.http import HttpRequest, HttpResponse, HttpResponseBase, HttpResponseNotAllowed, HttpResponseRedirect
from django.urls import reverse
from django.utils.safestring import SafeString

from keyvault.access.permissions import Permission
from keyvault.admin.framework.enforcement import View, grant_for
from keyvault.admin.framework.pages import page
from keyvault.admin.framework.sign_in import second_factor_url, set_new_device_cookie
from keyvault.admin.framework.step_up import CODE, is_step_up_due, read_credential
from keyvault.admin.framework.widgets import Link
from keyvault.domain.errors import PermissionMissingError, StateConflictError
from keyvault.domain.free_text import find_text_fault
from keyvault.domain.plaintext import Plaintext
from keyvault.models import Operator
from keyvault.services.sessions.passkeys import are_passkeys_possible, begin_registration, complete_registration
from keyvault.services.sessions.second_factors import (
    PASSKEY,
    RECOVERY_CODES,
    TOTP,
    WRONG_FACTOR,
    add_second_factor,
    confirm_totp,
    count_recovery_codes,
    decrypt_seed,
    encrypt_seed,
    list_second_factors,
    new_recovery_codes,
    new_totp_seed,
    remove_second_factor,
)

_NAMES = {TOTP: "Authenticator app", PASSKEY: "Passkey", RECOVERY_CODES: "Recovery codes"}
"""Names of second factors that have no name of their own."""

_SEED = "totp_seed"
"""Session key: the encrypted seed that the page shows."""


def fresh(*methods: str) -> Callable[[View], View]:
    """Require a recent second factor and one of the methods."""

    def decorate(view: View) -> View:
        @wraps(view)
        def checked(site: AdminSite, request: HttpRequest, **arguments: Any) -> HttpResponseBase:
            if request.method not in methods:
                return HttpResponseNotAllowed(methods)
            if is_step_up_due(request):
                here = reverse("admin:second_factors") if request.method == "POST" else request.get_full_path()
                return HttpResponseRedirect(second_factor_url(here))
            return view(site, request, **arguments)

        return checked

    return decorate


@fresh("GET", "HEAD")
def factors_page(site: AdminSite, request: HttpRequest) -> HttpResponse:
    factors = [
        {
            "id": factor.pk,
            "name": factor.data.get("name") or _NAMES[factor.type],
            "added": factor.created_at,
            "used": factor.last_used_at,
            "left": count_recovery_codes(factor) if factor.type == RECOVERY_CODES else None,
        }
        for factor in list_second_factors(_operator(request))
    ]
    context = {"title": "Second factors", "factors": factors, "has_passkeys": are_passkeys_possible(request.get_host())}
    return page(site, request, "second_factors", context)


@fresh("GET", "HEAD", "POST")
def add_totp_page(site: AdminSite, request: HttpRequest) -> HttpResponse:
    operator, error = _operator(request), ""
    seed = request.session.get(_SEED)
    if seed is None:
        seed = request.session[_SEED] = encrypt_seed(new_totp_seed())
    if request.method == "POST":
        code = request.POST.get(CODE, "").replace(" ", "")
        factor = confirm_totp(seed, code, datetime.now(UTC))
        if factor is not None:
            add_second_factor(grant_for(request, Permission.SESSIONS_WRITE), operator, factor)
            del request.session[_SEED]
            return _stay_signed_in(request, operator, _done(request, "The authenticator app is added."))
        error = WRONG_FACTOR
    context = {"title": "Add an authenticator app", "error": error, **totp_context(operator, seed)}
    return page(site, request, "add_totp", {**context, "crumbs": _crumbs()}, status=400 if error else 200)


@fresh("GET", "HEAD", "POST")
def add_passkey_page(site: AdminSite, request: HttpRequest) -> HttpResponse:
    operator, error = _operator(request), ""
    if not are_passkeys_possible(request.get_host()):
        raise StateConflictError("Passkeys need a domain name and https. Use an authenticator app.")
    if request.method == "POST":
        name = request.POST.get("name", "").strip() or "Passkey"
        fault = find_text_fault(name, 40)
        factor = None if fault else complete_registration(read_credential(request.POST), name)
        if factor is not None:
            add_second_factor(grant_for(request, Permission.SESSIONS_WRITE), operator, factor)
            return _done(request, f"The passkey {name} is added.")
        error = f"The name must have {fault}." if fault else "The passkey was not accepted. Try again."
    context = {
        "title": "Add a passkey",
        "error": error,
        "passkey_options": begin_registration(operator),
        "crumbs": _crumbs(),
    }
    return page(site, request, "add_passkey", context, status=400 if error else 200)


@fresh("POST")
def recovery_codes_page(site: AdminSite, request: HttpRequest) -> HttpResponse:
    """Replace the recovery codes, and show the new ones once."""
    operator, (factor, codes) = _operator(request), new_recovery_codes()
    add_second_factor(grant_for(request, Permission.SESSIONS_WRITE), operator, factor)
    back = Link("second factors", reverse("admin:second_factors"))
    return _stay_signed_in(request, operator, recovery_codes_response(site, request, codes, back))


@fresh("POST")
def remove_page(site: AdminSite, request: HttpRequest, factor_id: int) -> HttpResponse:
    """Remove a factor. The operator's other sessions end."""
    operator = _operator(request)
    remove_second_factor(grant_for(request, Permission.SESSIONS_WRITE), operator, factor_id)
    done = _done(request, "The second factor is removed, and your other sessions have ended.")
    return _stay_signed_in(request, operator, done)


def totp_context(operator: Operator, encrypted_seed: str) -> dict[str, Any]:
    """Return what a page shows to set up an authenticator app: the QR code, and the seed to type."""
    seed, adapter = decrypt_seed(encrypted_seed), get_adapter()
    svg = adapter.build_totp_svg(adapter.build_totp_url(operator, seed.reveal()))
    # Safe: a library draws the image from our own text. The XML declaration before it is not HTML.
    return {"totp_image": SafeString(svg[svg.index("<svg") :]), "totp_seed": seed.reveal()}


def recovery_codes_response(
    site: AdminSite, request: HttpRequest, codes: Sequence[Plaintext], back: Link
) -> HttpResponse:
    """Render the only page that shows recovery codes."""
    shown = [f"{code.reveal()[:4]} {code.reveal()[4:]}" for code in codes]
    return page(site, request, "recovery_codes", {"title": "Recovery codes", "codes": shown, "back": back})


def _operator(request: HttpRequest) -> Operator:
    if not isinstance(request.user, Operator):
        raise PermissionMissingError("Not signed in. Sign in to the console.")
    return request.user


def _done(request: HttpRequest, message: str) -> HttpResponse:
    messages.success(request, message)
    return HttpResponseRedirect(reverse("admin:second_factors"))


def _stay_signed_in(request: HttpRequest, operator: Operator, response: HttpResponse) -> HttpResponse:
    """Bind this session and this device to the operator as it is now. Its other sessions may have ended."""
    update_session_auth_hash(request, operator)
    set_new_device_cookie(response, request, operator)
    return response


def _crumbs() -> list[Link]:
    return [Link("Second factors", reverse("admin:second_factors"))]
