"""The page of an invitation: a new operator sets a password and its first second factor.

An operator of single sign-on sets no password, and signs in afterwards: the link alone does not prove who it is.
"""

from datetime import UTC, datetime
from typing import Any

from django import forms
from django.contrib.admin import AdminSite
from django.contrib.auth import login, logout
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed
from django.urls import reverse

from keyvault.admin.account.second_factors import recovery_codes_response, totp_context
from keyvault.admin.framework.actions import ActionForm
from keyvault.admin.framework.pages import page, status_of
from keyvault.admin.framework.sign_in import set_new_device_cookie
from keyvault.admin.framework.step_up import CODE, CREDENTIAL, read_credential
from keyvault.admin.framework.widgets import Link
from keyvault.domain.errors import KeyvaultError, RequestInvalidError
from keyvault.domain.plaintext import Plaintext
from keyvault.models import Operator
from keyvault.services.operators.operators import is_single_sign_on
from keyvault.services.sessions.invitations import accept_invitation, find_invited
from keyvault.services.sessions.passkeys import are_passkeys_possible, begin_registration, complete_registration
from keyvault.services.sessions.second_factors import NewFactor, confirm_totp, encrypt_seed, new_totp_seed
from keyvault.services.sessions.step_up import note_second_factor

_SEED = "enrolment_seed"
"""Session key: the invited operator's id and the encrypted seed that the page shows."""


class FactorForm(ActionForm):
    """The form of an operator of single sign-on: only the second factor, whose inputs are in the template."""


class InvitationForm(FactorForm):
    password = forms.CharField(
        label="Password",
        strip=False,
        max_length=4096,
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}),
        help_text="At least 12 characters.",
    )
    password_again = forms.CharField(
        label="Password again",
        strip=False,
        max_length=4096,
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}),
    )

    def clean(self) -> dict[str, Any]:
        if self.cleaned_data.get("password") != self.cleaned_data.get("password_again"):
            self.add_error("password_again", "The two passwords differ.")
        return self.cleaned_data


def invitation_page(site: AdminSite, request: HttpRequest) -> HttpResponse:
    """Show and accept an invitation. The session that results is signed in, except by single sign-on."""
    if request.method not in {"GET", "HEAD", "POST"}:
        return HttpResponseNotAllowed(("GET", "HEAD", "POST"))
    now = datetime.now(UTC)
    operator = find_invited(Plaintext(request.GET.get("token", "")), now)
    seed = _seed_of(request, operator)
    is_linked = is_single_sign_on(operator)
    form_class = FactorForm if is_linked else InvitationForm
    if request.method != "POST":
        return _render(site, request, operator, seed, form_class())
    form = form_class(request.POST)
    if not form.is_valid():
        return _render(site, request, operator, seed, form, status=400)

    def prove() -> NewFactor | None:
        if request.POST.get(CREDENTIAL):
            return complete_registration(read_credential(request.POST), "Passkey")
        return confirm_totp(seed, request.POST.get(CODE, "").replace(" ", ""), now)

    password = None if is_linked else Plaintext(form.cleaned_data["password"])
    try:
        codes = accept_invitation(operator, password, prove, now)
    except RequestInvalidError as error:
        faults = [fault for fault in error.faults if fault.pointer == "/password"]
        form.show_faults(RequestInvalidError(error.detail, faults))
        wrong = "" if faults else error.faults[0].detail
        return _render(site, request, operator, seed, form, error=wrong, status=status_of(error))
    except KeyvaultError as error:
        return _render(site, request, operator, seed, form, error=error.detail, status=status_of(error))
    if is_linked:
        # The session may be one that the acceptance has ended.
        logout(request)
        return recovery_codes_response(site, request, codes, Link("the sign-in page", reverse("admin:login")))
    request.session.pop(_SEED, None)
    login(request, operator)
    note_second_factor(request.session, now)
    response = recovery_codes_response(site, request, codes, Link("the console", reverse("admin:index")))
    set_new_device_cookie(response, request, operator)
    return response


def _seed_of(request: HttpRequest, operator: Operator) -> str:
    """Return the encrypted seed of this session for the operator. The page shows the same one until it is accepted."""
    known = request.session.get(_SEED)
    if known is None or known["operator"] != operator.pk:
        known = request.session[_SEED] = {"operator": operator.pk, "seed": encrypt_seed(new_totp_seed())}
    return str(known["seed"])


def _render(
    site: AdminSite,
    request: HttpRequest,
    operator: Operator,
    seed: str,
    form: FactorForm,
    *,
    error: str = "",
    status: int = 200,
) -> HttpResponse:
    context = {
        "title": f"Welcome, {operator.username}",
        "form": form,
        "error": error,
        "passkey_options": begin_registration(operator) if are_passkeys_possible(request.get_host()) else None,
        **totp_context(operator, seed),
    }
    return page(site, request, "invitation", context, status=status)
