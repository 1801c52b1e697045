"""Export of the signed audit log in the browser, for the auditor's checker, with the public keys that verify it."""

from collections.abc import Generator, Iterator
from contextlib import closing
from datetime import UTC, date, datetime, time, timedelta

from django import forms
from django.contrib.admin import AdminSite
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.urls import reverse

from keyvault.access.permissions import Permission as P
from keyvault.access.scopes import EVERYWHERE, AccessScope
from keyvault.admin.framework.enforcement import grant_for, operator_of
from keyvault.admin.framework.menu import ConsolePage
from keyvault.admin.framework.pages import page
from keyvault.admin.framework.widgets import Link
from keyvault.domain.audit_records import ExportRecord, public_keys_text, record_line
from keyvault.domain.digests import PEPPER_SET, PepperSet
from keyvault.domain.errors import PermissionMissingError, StateConflictError
from keyvault.services.audit.checkpoints import read_public_keys
from keyvault.services.audit.export import begin_export, export_claimed

_MAX_DAYS = 92
"""Maximum age of the first exported entry, in days. A response must not run for hours."""

_DEFAULT_DAYS = 30


class ExportForm(forms.Form):
    since = forms.DateField(
        label="Entries since",
        widget=forms.DateInput(attrs={"type": "date"}),
        help_text=f"UTC, at most {_MAX_DAYS} days ago. The file begins at the signed checkpoint before that day.",
    )

    def clean_since(self) -> date:
        since: date = self.cleaned_data["since"]
        today = datetime.now(UTC).date()
        if not today - timedelta(days=_MAX_DAYS) <= since <= today:
            raise forms.ValidationError(
                f"Choose one of the last {_MAX_DAYS} days. For a longer period run: manage.py export_audit"
            )
        return since


def exported_scopes(scope: AccessScope) -> list[PepperSet]:
    """Return the scopes of the log that the operator may export as a whole; none for an operator of some merchants."""
    if scope == EVERYWHERE:
        return list(PepperSet)
    return [] if scope.merchants is not None else [PEPPER_SET[env] for env in sorted(scope.environments)]


def _require_scopes(request: HttpRequest) -> list[PepperSet]:
    scopes = exported_scopes(operator_of(request).scope)
    if not scopes:
        raise PermissionMissingError(
            "An export contains the log of all merchants, and your scope names some. Ask an auditor without a scope."
        )
    return scopes


def export_view(site: AdminSite, request: HttpRequest) -> HttpResponse:
    """Show the form of the export."""
    scopes = _require_scopes(request)
    since = datetime.now(UTC).date() - timedelta(days=_DEFAULT_DAYS)
    return _form_page(site, request, ExportForm(initial={"since": since}), scopes)


def _form_page(
    site: AdminSite, request: HttpRequest, form: ExportForm, scopes: list[PepperSet], status: int = 200
) -> HttpResponse:
    context = {
        "title": "Export the audit log",
        "crumbs": [Link("Audit entries", reverse("admin:keyvault_auditentry_changelist"))],
        "form": form,
        "scopes": [scope.value for scope in scopes],
        "command": "python -m keyvault_client.audit_check LOG.jsonl --public-key KEYS.json",
    }
    return page(site, request, "audit_export", context, status=status)


def log_view(site: AdminSite, request: HttpRequest) -> HttpResponse | StreamingHttpResponse:
    """Stream the log as JSON lines. The last record states how many there are, so that a truncated file is detected.

    Raises StateConflictError while another export of the operator runs. Each export is in the log.
    """
    scopes = _require_scopes(request)
    now = datetime.now(UTC)
    form = ExportForm(request.GET if "since" in request.GET else {"since": now.date() - timedelta(days=_DEFAULT_DAYS)})
    if not form.is_valid():
        return _form_page(site, request, form, scopes, 400)
    since = datetime.combine(form.cleaned_data["since"], time(), UTC)
    names, within = [scope.value for scope in scopes], operator_of(request).scope
    lease = begin_export(grant_for(request, P.AUDIT_READ, within=within), names, since, within)
    return StreamingHttpResponse(
        _lines(export_claimed(lease, names, since, now)),
        content_type="application/x-ndjson",
        headers=_attachment(f"audit-log-{now:%Y-%m-%d}.jsonl"),
    )


def keys_view(site: AdminSite, request: HttpRequest) -> HttpResponse:
    """Return the public keys that verify the checkpoints.

    Raises:
        StateConflictError: no signer provides its key now.
    """
    _require_scopes(request)
    keys, _ = read_public_keys()
    if not keys:
        raise StateConflictError("No public key is available yet. The worker creates one when it first signs.")
    name = f"audit-public-keys-{datetime.now(UTC):%Y-%m-%d}.json"
    return HttpResponse(public_keys_text(keys), content_type="application/json", headers=_attachment(name))


def _lines(records: Generator[ExportRecord, None, None]) -> Iterator[str]:
    with closing(records):
        for record in records:
            yield f"{record_line(record)}\n"


def _attachment(name: str) -> dict[str, str]:
    return {"Cache-Control": "no-store", "Content-Disposition": f'attachment; filename="{name}"'}


PAGES = (
    ConsolePage("audit_export", "audit/export/", "Export", "", (P.AUDIT_READ,), export_view),
    ConsolePage("audit_export_log", "audit/export/log/", "Log", "", (P.AUDIT_READ,), log_view),
    ConsolePage("audit_export_keys", "audit/export/public-keys/", "Public keys", "", (P.AUDIT_READ,), keys_view),
)
