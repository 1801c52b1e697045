"""The leak desk: paste what leaked, see which keys it contains, revoke them, and watch the verifiers confirm.

The pasted text may contain whole keys. It is read once, for public ids, and is in no page, session, row or log.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from django import forms
from django.conf import settings
from django.contrib.admin import AdminSite
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.views.decorators.debug import sensitive_variables

from keyvault.access.permissions import Permission as P
from keyvault.access.scopes import EVERYWHERE, AccessScope
from keyvault.admin.framework.components import Banner, Card, EmptyState, Meter
from keyvault.admin.framework.enforcement import grant_for, may, operator_of
from keyvault.admin.framework.menu import ConsolePage
from keyvault.admin.framework.pages import live_page, page, status_of
from keyvault.admin.framework.scoping import in_scope
from keyvault.admin.framework.step_up import answer_locked, refuse_step_up, step_up_context
from keyvault.admin.framework.widgets import NOTHING, Detail, Link, Table, badge, counted, link, moment, mono
from keyvault.admin.keys.keys import key_link, use_of
from keyvault.admin.keys.receipts import receipt_url, verifiers_table
from keyvault.domain.errors import KeyvaultError
from keyvault.domain.ids import is_key_id
from keyvault.domain.keys import KeyState, can_transition
from keyvault.domain.keystring import StringKind
from keyvault.domain.leaked_text import LeakedId, find_leaked_ids
from keyvault.models import Key
from keyvault.services.change_feed.receipts import Receipt, VerifierProgress, find_receipt
from rotation.admin.emergency import CompromiseForm
from rotation.domain.states import CLOSED
from rotation.models import Rotation
from rotation.services.rotations.emergency import MAX_KEYS, CompromiseResponse, respond_to_leak

_MAX_CHARACTERS = 500_000
_MAX_IDS = 2_000
"""Maximum different ids in a text. More would make the query for their keys too large."""

_TYPED_ABOVE = 20
"""Number of keys above which the operator types their number."""

_MAX_OTHERS = 50
"""Maximum lines of the preview about text that cannot be revoked here."""

_SESSION_REPORT = "leak_report"
"""Member of the session's data: the operator's last report, public ids only."""

_CONFIRMING_SECONDS = 2
_REPLACING_SECONDS = 10
"""Refresh interval of the receipt while verifiers confirm, and while rotations are open, in seconds."""

_EXPLAIN = (
    "Paste log lines, whole keys or key ids. Nothing is revoked before you confirm the keys that were found. The text "
    "is read once and not stored; the next page shows key ids only."
)
_NOTHING_FOUND = "The text contains no key and no key id. It is not shown again. Nothing was revoked."


class PasteForm(forms.Form):
    """The name of the field contains `secret`, so that the page of an expired session does not keep it."""

    secret_text = forms.CharField(
        label="What leaked",
        max_length=_MAX_CHARACTERS,
        strip=False,
        widget=forms.Textarea(attrs={"rows": 10, "class": "mono", "autocomplete": "off", "spellcheck": "false"}),
        help_text=f"At most {MAX_KEYS} keys. A key id is the 16 characters after the third underscore of a key.",
        error_messages={"max_length": f"Paste at most {_MAX_CHARACTERS:,} characters."},
    )


class ReportForm(CompromiseForm):
    key_ids = forms.CharField(widget=forms.HiddenInput)
    count = forms.IntegerField(required=False, widget=forms.NumberInput(attrs={"autocomplete": "off"}))
    field_order = ("key_ids", "count", "reason", "replace")

    def __init__(self, key_count: int, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.key_count = key_count
        if key_count <= _TYPED_ABOVE:
            del self.fields["count"]
        else:
            self.fields["count"].label = f"Type {key_count} to confirm the number of keys"

    def clean_count(self) -> int | None:
        count: int | None = self.cleaned_data["count"]
        if count != self.key_count:
            raise forms.ValidationError(f"Type {self.key_count}, the number of keys that will be revoked.")
        return count


def leak_view(site: AdminSite, request: HttpRequest) -> HttpResponse:
    """Ask for the text; preview the keys in it; revoke the keys of a confirmed preview."""
    grant_for(request, P.KEYS_REPORT_COMPROMISE, within=operator_of(request).scope)
    if request.method != "POST":
        return _paste_page(site, request)
    # Error reports of Django show no field of this request.
    request.sensitive_post_parameters = "__ALL__"  # type: ignore[attr-defined]  # see sensitive_post_parameters
    if "key_ids" in request.POST:
        return _report(site, request)
    return _preview(site, request)


def _paste_page(site: AdminSite, request: HttpRequest, error: str = "", status: int = 200) -> HttpResponse:
    """Return the empty form, never with what was pasted."""
    context = {"title": "Leak desk", "explain": _EXPLAIN, "form": PasteForm(), "error": error}
    return page(site, request, "leak_desk", context, status=status)


@sensitive_variables()
def _read_pasted(request: HttpRequest) -> tuple[list[LeakedId], str]:
    """Return one occurrence of each id in the pasted text, or why the text cannot be used."""
    form = PasteForm(request.POST)
    if not form.is_valid():
        return [], str(form.errors["secret_text"][0])
    found: dict[str, LeakedId] = {}
    for each in find_leaked_ids(form.cleaned_data["secret_text"], settings.KEY_PREFIX):
        if found.setdefault(each.public_id, each).kind is None and each.kind is not None:
            found[each.public_id] = each  # A key string tells more than its bare id.
        if len(found) > _MAX_IDS:
            return [], f"The text contains more than {_MAX_IDS:,} possible key ids. Paste a part of it."
    return list(found.values()), "" if found else _NOTHING_FOUND


def _preview(site: AdminSite, request: HttpRequest) -> HttpResponse:
    found, error = _read_pasted(request)
    if error:
        return _paste_page(site, request, error, 400)
    keys = _find_keys(request, [each.public_id for each in found])
    lines = {each.public_id: each for each in found}
    to_revoke = [keys[key_id] for key_id in lines if key_id in keys and _is_revocable(keys[key_id])]
    others = list(_describe_others(found, keys, operator_of(request).scope))
    if not to_revoke and not others:
        return _paste_page(site, request, _NOTHING_FOUND, 400)
    if len(to_revoke) > MAX_KEYS:
        return _paste_page(site, request, f"The text contains {len(to_revoke)} keys. Paste at most {MAX_KEYS}.", 400)
    ids = " ".join(key.key_id for key in to_revoke)
    form = ReportForm(len(to_revoke), initial={"key_ids": ids, "replace": True})
    return _preview_page(site, request, to_revoke, form, lines=lines, others=others)


def _preview_page(
    site: AdminSite,
    request: HttpRequest,
    to_revoke: Sequence[Key],
    form: ReportForm,
    *,
    lines: dict[str, LeakedId] | None = None,
    others: Sequence[Sequence[Any]] = (),
    error: KeyvaultError | None = None,
    status: int = 200,
) -> HttpResponse:
    """Show the keys that will be revoked, and the form that confirms it.

    Args:
        lines: the pasted id of each key; None: the page is shown again, after an error.
    """
    count = len(to_revoke)
    context = {
        "title": f"{counted(count, 'key')} to revoke" if count else "No key to revoke",
        "crumbs": [Link("Leak desk", reverse("admin:incidents"))],
        "keys": _keys_table(to_revoke, lines or {}) if to_revoke else None,
        "others": Table("Not revoked here", ["line", "what it is", "id", "what to do"], others) if others else None,
        "form": form if to_revoke else None,
        "button": f"Revoke {counted(count, 'key')} now",
        "error": None if error is None else error.detail,
        "step_up": step_up_context(request) if to_revoke else None,
    }
    response = page(site, request, "leak_preview", context, status=status if error is None else status_of(error))
    return answer_locked(response, error)


def _find_keys(request: HttpRequest, ids: Sequence[str]) -> dict[str, Key]:
    """Return the keys with these ids in the operator's scope."""
    rows = Key.objects.filter(in_scope(operator_of(request).scope, "credential__account"), pk__in=ids)
    return {key.key_id: key for key in rows.select_related("credential__account__merchant", "use")}


def _is_revocable(key: Key) -> bool:
    return can_transition(KeyState(key.state), KeyState.COMPROMISED)


def _keys_table(keys: Sequence[Key], lines: dict[str, LeakedId]) -> Table:
    return Table(
        "Keys that will be revoked",
        ["line", "what it is", "key", "account", "credential", "state", "last used"],
        [
            [
                lines[key.key_id].line if key.key_id in lines else "",
                _name_kind(lines.get(key.key_id)),
                key_link(key),
                _account(key),
                key.credential.label or str(key.credential),
                badge(key.state),
                moment(use_of(key, "last_at"), missing="never"),
            ]
            for key in keys
        ],
    )


def _account(key: Key) -> SafeString:
    account = key.credential.account
    return format_html("{} {}", account.merchant_id, badge(account.environment))


def _name_kind(found: LeakedId | None) -> str:
    if found is None or found.kind is None:
        return "key id"
    return f"whole {_NAMES[found.kind]}" if found.is_whole else f"part of a {_NAMES[found.kind]}"


_NAMES = {
    StringKind.PUBLIC: "public key",
    StringKind.PRIVATE: "private key",
    StringKind.CUSTOMER_TOKEN: "customer token",
    StringKind.SERVICE_TOKEN: "service token",
}

_ELSEWHERE = {
    StringKind.CUSTOMER_TOKEN: "The merchant revokes it through the API.",
    StringKind.SERVICE_TOKEN: "Revoke it under Service tokens.",
}

_UNKNOWN = "No key has this id. Nothing to do, unless it belongs to another installation."
_UNKNOWN_IN_SCOPE = "No key has this id in your scope. Ask an operator whose scope is unlimited."


def _describe_others(found: Sequence[LeakedId], keys: dict[str, Key], scope: AccessScope) -> Iterator[list[Any]]:
    """Yield the lines about what is not revoked here. Words of 16 letters in a log line are no ids."""
    shown = 0
    for each in found:
        key = keys.get(each.public_id)
        if each.kind in _ELSEWHERE:
            what = _ELSEWHERE[each.kind]
        elif key is not None and _is_revocable(key):
            continue
        elif key is not None:
            what = f"Already {key.state}, and refused. Nothing to do."
        elif each.kind is not None or each.is_alone:
            what = _UNKNOWN if scope == EVERYWHERE else _UNKNOWN_IN_SCOPE
        else:
            continue
        if shown == _MAX_OTHERS:
            yield ["", "more", "", f"Only the first {_MAX_OTHERS} lines are listed."]
            return
        shown += 1
        yield [each.line, _name_kind(each), mono(each.public_id), what]


# --- revoke ---------------------------------------------------------------------------------------------------------


def _report(site: AdminSite, request: HttpRequest) -> HttpResponse:
    """Revoke the keys of the preview, each in its own transaction, and show the receipt."""
    ids = list(dict.fromkeys(request.POST["key_ids"].split()))
    if not 1 <= len(ids) <= MAX_KEYS or not all(map(is_key_id, ids)):
        return _paste_page(site, request, "The preview is incomplete. Paste the text again.", 400)
    keys = _find_keys(request, ids)
    to_revoke = [keys[key_id] for key_id in ids if key_id in keys]
    form = ReportForm(len(ids), request.POST)
    if refused := refuse_step_up(request):
        return _preview_page(site, request, to_revoke, form, error=refused)
    if not form.is_valid():
        return _preview_page(site, request, to_revoke, form, status=400)
    responses = respond_to_leak(
        operator_of(request),
        ids,
        reason=form.cleaned_data["reason"],
        replace=form.cleaned_data["replace"],
        now=datetime.now(UTC),
    )
    request.session[_SESSION_REPORT] = [_as_member(response) for response in responses]
    return HttpResponseRedirect(reverse("admin:incident_receipt"))


def _as_member(response: CompromiseResponse) -> dict[str, Any]:
    """Return what the session keeps of one key: public ids and the outcome."""
    return {
        "key_id": response.key_id,
        "sequence": response.sequence,
        "fault": response.fault,
        "rotation_id": response.rotation_id,
        "no_replacement": response.no_replacement,
    }


# --- receipt --------------------------------------------------------------------------------------------------------


def receipt_view(site: AdminSite, request: HttpRequest) -> HttpResponse:
    """Show the outcome of the operator's last report, with the verifiers' confirmations and the replacements."""
    report = request.session.get(_SESSION_REPORT)
    crumbs = [Link("Leak desk", reverse("admin:incidents"))]
    if not report:
        empty = EmptyState(
            "No report in this session",
            "The receipt of your last report appears here. Each revoked key's page has its own receipt, too.",
            Link("Open the leak desk", reverse("admin:incidents")),
        )
        detail = Detail("Receipt of the report", "", [Card("Report", empty)])
        return _receipt_page(site, request, detail, crumbs)
    keys = _find_keys(request, [each["key_id"] for each in report])
    rotations = _find_rotations(request, report)
    sequences = [each["sequence"] for each in report if each["sequence"]]
    # A verifier that confirmed the last change has confirmed all before it.
    receipt = find_receipt(max(sequences)) if sequences else None
    revoked = sum(not each["fault"] for each in report)
    detail = Detail(
        title="Receipt of the report",
        state="",
        banner=_banner(revoked, len(report) - revoked, receipt),
        sections=[
            *([] if receipt is None else [_progress_card(receipt)]),
            Table(
                "Keys",
                ["key", "account", "state", "revocation", "replacement"],
                [_receipt_row(each, keys.get(each["key_id"]), rotations) for each in report],
            ),
            *([] if receipt is None else [verifiers_table(receipt)]),
        ],
        refresh_seconds=_refresh(receipt, rotations),
    )
    return _receipt_page(site, request, detail, crumbs)


def _receipt_page(site: AdminSite, request: HttpRequest, detail: Detail, crumbs: Sequence[Link]) -> HttpResponse:
    context = {"title": detail.title, "detail": detail, "sections": detail.sections, "crumbs": crumbs}
    return live_page(site, request, "detail", context, seconds=detail.refresh_seconds)


def _find_rotations(request: HttpRequest, report: Sequence[dict[str, Any]]) -> dict[str, Rotation]:
    """Return the replacing rotations that the operator may see."""
    if not may(request, P.ROTATIONS_READ):
        return {}
    ids = {each["rotation_id"] for each in report if each["rotation_id"]}
    rows = Rotation.objects.filter(in_scope(operator_of(request).scope, "credential__account"), pk__in=ids)
    return {rotation.rotation_id: rotation for rotation in rows}


def _refresh(receipt: Receipt | None, rotations: dict[str, Rotation]) -> int | None:
    if receipt is not None and not receipt.is_complete:
        return _CONFIRMING_SECONDS
    is_open = any(rotation.current_state not in CLOSED for rotation in rotations.values())
    return _REPLACING_SECONDS if is_open else None


def _banner(revoked: int, failed: int, receipt: Receipt | None) -> Banner:
    lead = f"{counted(revoked, 'key')} revoked." if revoked else "No key was revoked."
    not_revoked = f"{counted(failed, 'key')} NOT revoked: see the table." if failed else ""
    if receipt is None or receipt.is_complete:
        done = "All verifiers confirmed." if receipt is not None and receipt.verifiers else ""
        return Banner(lead, f"{not_revoked} {done}".strip(), "bad" if failed else "good")
    waiting = "Verifiers are confirming. This page updates by itself."
    return Banner(lead, f"{not_revoked} {waiting}".strip(), "bad" if failed else "wait")


def _progress_card(receipt: Receipt) -> Card:
    confirmed, waiting = (len(receipt.of(each)) for each in (VerifierProgress.CONFIRMED, VerifierProgress.WAITING))
    total = confirmed + waiting
    if not total:
        return Card("Confirmations", "No live verifiers. Verdicts use the database, which has the revocations.")
    text = f"{confirmed} of {counted(total, 'verifier')}"
    return Card("Confirmations", Meter(confirmed, total, text, "wait" if waiting else "good"), text)


def _receipt_row(each: dict[str, Any], key: Key | None, rotations: dict[str, Rotation]) -> list[Any]:
    if key is None:
        return [mono(each["key_id"]), NOTHING, badge("unknown"), each["fault"], ""]
    revocation = each["fault"] or link(receipt_url(key, each["sequence"]), "receipt")
    return [key_link(key), _account(key), badge(key.state), revocation, _replacement(each, rotations)]


def _replacement(each: dict[str, Any], rotations: dict[str, Rotation]) -> Any:
    rotation = rotations.get(each["rotation_id"])
    if rotation is not None:
        url = reverse("admin:rotation_rotation_change", args=[rotation.rotation_id])
        return format_html("{} {}", link(url, "rotation"), badge(rotation.state))
    return each["rotation_id"] or each["no_replacement"] or "not requested"


PAGES = (
    ConsolePage(
        "incidents",
        "incidents/",
        "Leak desk",
        "Incidents",
        (P.KEYS_REPORT_COMPROMISE,),
        leak_view,
        ("GET", "HEAD", "POST"),
    ),
    ConsolePage("incident_receipt", "incidents/receipt/", "Receipt", "", (P.KEYS_REPORT_COMPROMISE,), receipt_view),
)
