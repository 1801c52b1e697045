"""Explain why a request was denied, by request id, key id or description. No secret is requested or accepted.

Read-only: a described request is evaluated as if the key's secret had been presented, and spends no limit.
"""

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

from django import forms
from django.contrib.admin import AdminSite
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.urls import reverse

from keyvault.access.catalog import Endpoint, NoMatchingEndpoint
from keyvault.access.decision import Denial
from keyvault.access.endpoint_description import authorization_panel, format_limit
from keyvault.access.endpoints import METHODS
from keyvault.access.judgement import before_proof
from keyvault.access.scopes import AccessScope
from keyvault.access.verification import INVALID, find_exposed
from keyvault.admin.framework.accounts import environment_field
from keyvault.admin.framework.actions import Cleaned
from keyvault.admin.framework.components import Banner, Card, Checks, Columns, EvidenceItem
from keyvault.admin.framework.enforcement import operator_of
from keyvault.admin.framework.pages import page
from keyvault.admin.framework.widgets import NOTHING, FactTable, Link, Table, badge, copy_button, link, moment, mono
from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode
from keyvault.domain.ids import is_key_id
from keyvault.models import Refusal
from keyvault.services.catalog.base_urls import BASE_URLS
from keyvault.services.catalog.catalog import find_endpoint, match_endpoint
from keyvault.services.keys.records import find_key_record
from keyvault.services.limits.overrides import account_limit_in_force, endpoint_limit_in_force
from keyvault.services.merchants.merchants import find_account
from keyvault.services.verification.judging import Judgement, VerificationRequest, explain_described, judge_presented
from keyvault.wire.problems import PROBLEM_TYPES

_WHOLE_KEY = (
    "The input contains a whole key or token. It was neither looked up nor stored. Enter the key id: the 16 characters "
    "after the third underscore. Rotate a key that was pasted in a wrong place."
)
_TOO_LONG = (
    "The input is longer than any id. It was neither looked up nor stored. A request id has at most 32 characters, a "
    "key id has 16."
)
_NOT_KEPT = (
    "No refusal with this id is stored. The request was allowed, was a dry run, is older than 30 days, had no "
    "endpoint, or was one of many unauthenticated requests. Describe the request below instead."
)
_CHECKS = {
    ErrorCode.CREDENTIAL_IN_URL: "the URL contains no credential",
    ErrorCode.CREDENTIAL_AMBIGUOUS: "each credential header occurs once",
    ErrorCode.CREDENTIAL_MISSING: "an API key is present",
    ErrorCode.CREDENTIAL_INVALID: "possession of the key is proved",
    ErrorCode.ENVIRONMENT_MISMATCH: "the key belongs to this environment",
    ErrorCode.KEY_NOT_ACTIVE: "the key is neither suspended nor awaiting activation",
    ErrorCode.KEY_EXPIRED: "the key has not expired",
    ErrorCode.KEY_REVOKED: "the key was not revoked",
    ErrorCode.MERCHANT_MISMATCH: "the merchant named owns the key",
    ErrorCode.MERCHANT_SUSPENDED: "neither merchant nor account is suspended",
    ErrorCode.ENDPOINT_UNKNOWN: "the endpoint is in the catalog, with this method",
    ErrorCode.METHOD_NOT_ALLOWED: "the path supports this method",
    ErrorCode.METHOD_NOT_SUPPORTED: "the endpoint accepts this kind of key",
    ErrorCode.BEARER_NOT_SUPPORTED: "no Bearer, or the endpoint accepts one",
    ErrorCode.PRIVATE_KEY_IN_BROWSER: "no private key was sent with an Origin",
    ErrorCode.IP_NOT_ALLOWED: "the client's address is in the credential's networks",
    ErrorCode.CONTEXT_MISSING: "the context that the endpoint requires is present",
    ErrorCode.CUSTOMER_TOKEN_MISSING: "a required Bearer is present",
    ErrorCode.CUSTOMER_TOKEN_INVALID: "the Bearer is a valid token of this merchant and environment",
    ErrorCode.CUSTOMER_TOKEN_EXPIRED: "the Bearer has not expired",
    ErrorCode.CUSTOMER_TOKEN_REVOKED: "the Bearer was not revoked",
    ErrorCode.RATE_LIMITED: "the limits of account and endpoint are not exhausted",
    ErrorCode.VERIFIER_STALE: "the key can be looked up",
}
_RETRY_CHECKS = {
    1: "the credential is in the documented header",
    2: "the key belongs to the requested environment and merchant",
    3: "the endpoint supports the authorization method that was sent",
    4: "the key or customer token has not expired or been revoked",
    5: "any required merchant, store or customer context is present",
}
"""Checks for the client before it retries, by the `check` member of the response."""

_ID_FIELDS = ("subject", "key_id", "customer_token_id")
_MAX_ID_LENGTH = 32

_MAX_DENIALS = 10
"""Maximum denials that the explanation of a key lists."""

_LISTED_FOR = timedelta(days=7)
"""Maximum age of a listed denial."""

_MATCHED_NOTHING = frozenset({ErrorCode.ENDPOINT_UNKNOWN, ErrorCode.METHOD_NOT_ALLOWED})
"""Verdicts on a request for no endpoint: all rules of the key itself passed."""


class SubjectForm(forms.Form):
    subject = forms.CharField(
        label="Request id or key id",
        max_length=_MAX_ID_LENGTH,
        widget=forms.TextInput(attrs={"class": "mono", "autocomplete": "off", "spellcheck": "false"}),
        help_text="The request_id of the response, or the 16 characters after the third underscore of the key.",
    )


class DescribedForm(forms.Form):
    """Description of a request. No field is verified, and no field is secret."""

    environment = environment_field()
    endpoint = forms.CharField(
        required=False, max_length=100, help_text="Name in the catalog. Alternatively, enter method and path."
    )
    method = forms.ChoiceField(required=False, choices=[("", "-"), *((method, method) for method in METHODS)])
    path = forms.CharField(required=False, max_length=2000)
    key_id = forms.CharField(
        label="Key id", required=False, max_length=16, help_text="Never the whole key. Empty: no key was sent."
    )
    merchant = forms.CharField(
        label="Merchant named",
        required=False,
        max_length=64,
        help_text="Merchant named by the caller, a header or the path.",
    )
    store = forms.CharField(label="Store context", required=False, max_length=200)
    has_bearer = forms.BooleanField(label="With a Bearer", required=False)
    customer_token_id = forms.CharField(
        label="Customer token id", required=False, max_length=16, help_text="Token id of the Bearer. Empty: unknown."
    )
    has_origin = forms.BooleanField(label="With an Origin", required=False, help_text="Browsers send this header.")
    client_address = forms.GenericIPAddressField(label="Client address", required=False)

    def clean(self) -> dict[str, Any]:
        cleaned: dict[str, Any] = super().clean() or self.cleaned_data
        if bool(cleaned.get("endpoint")) == bool(cleaned.get("method") and cleaned.get("path")):
            self.add_error("endpoint", "Enter either an endpoint name, or method and path.")
        return cleaned


def explain_view(
    site: AdminSite,
    request: HttpRequest,
    stored: QuerySet[Refusal],
    url_of: Callable[[Refusal], str],
) -> HttpResponse:
    """Show both forms and the result of the submitted one.

    Args:
        stored: refusals that the operator may see.
        url_of: returns the page of a stored refusal.
    """
    by_id = SubjectForm()
    by_description = DescribedForm()
    context: dict[str, Any] = {"title": "Explain a denial"}
    status = 200
    if request.method == "POST":
        if (secret := _find_secret(request.POST)) is not None:
            # Echo none of the input: it may contain a secret.
            context["error"], status = secret, 400
        elif "subject" in request.POST:
            by_id = SubjectForm(request.POST)
            subject = by_id.cleaned_data["subject"].strip() if by_id.is_valid() else ""
            found = stored.filter(pk=subject).first() if subject else None
            if found is not None:
                return HttpResponseRedirect(url_of(found))
            if is_key_id(subject):
                context["sections"] = _explain_key(subject, operator_of(request).scope, stored, url_of)
                by_description = DescribedForm(initial={"key_id": subject})
            else:
                status = 404 if subject else 400
                context["error"] = _NOT_KEPT if subject else ""
        else:
            by_description = DescribedForm(request.POST)
            context["is_described"] = True
            if by_description.is_valid():
                context["sections"] = _explanation(by_description.cleaned_data, operator_of(request).scope)
            else:
                status = 400
    return page(site, request, "explain", {**context, "by_id": by_id, "by_description": by_description}, status=status)


def verdict_sections(
    code: ErrorCode,
    detail: str,
    internal: str,
    trace: Sequence[tuple[ErrorCode, bool]],
    *,
    subject: str = "The request is",
) -> list[Any]:
    """Return the verdict as a sentence with an answer for the merchant, the rules, and the details.

    Args:
        internal: for operators only; no part of the answer.
        subject: beginning of the sentence, before `denied`.
    """
    kind = PROBLEM_TYPES[code]
    rows: list[tuple[str, Any]] = [
        ("Response", f"{kind.status} {kind.title}"),
        ("Code", mono(code)),
        ("Detail sent to the caller", detail),
        ("Cause", _without_marks(kind.cause)),
        ("Remedy", _without_marks(kind.remedy)),
    ]
    if kind.check is not None:
        rows.append(("Check before retrying", f"{kind.check}: {_RETRY_CHECKS[kind.check]}"))
    if internal:
        rows.append(("For operators only", internal))
    cause, remedy = _without_marks(kind.cause), _without_marks(kind.remedy)
    lead = f"{subject} denied: {kind.title}."
    answer = " ".join([lead, f"The response is {kind.status} {code}.", cause, remedy])
    return [
        Banner(lead, remedy, "bad", [copy_button(answer, "Copy answer for the merchant")]),
        Columns([rules_card(trace, code), FactTable("Verdict", rows)]),
    ]


def rules_card(trace: Sequence[tuple[ErrorCode, bool]], denied: ErrorCode | None = None) -> Card:
    """Return the rules that were applied, in order. The one that denied the request is open.

    A denial that no rule of the trace records comes last.
    """
    applied = list(trace)
    if denied is not None and all(passed for _, passed in applied):
        applied.append((denied, False))
    return Card("Rules applied, in order", Checks([_check(code, passed) for code, passed in applied]))


def _without_marks(text: str) -> str:
    """Return a text of the problem types without the marks of code, which only the documentation renders."""
    return text.replace("`", "")


def _check(code: ErrorCode, passed: bool) -> EvidenceItem:
    requirement = _CHECKS.get(code, PROBLEM_TYPES[code].title)
    title = f"{requirement[0].upper()}{requirement[1:]}"
    if passed:
        return EvidenceItem(title, "done")
    return EvidenceItem(title, "failed", f"Not met. {_without_marks(PROBLEM_TYPES[code].cause)}", badge("refused"))


def _find_secret(sent: QueryDict) -> str | None:
    """Return why the input is refused without a look-up: a whole key, or a text longer than an id. None: neither."""
    texts = [text for _, values in sent.lists() for text in map(str, values)]
    if any(find_exposed(text) is not None for text in texts):
        return _WHOLE_KEY
    ids = [text.strip() for name in _ID_FIELDS for text in map(str, sent.getlist(name))]
    return _TOO_LONG if any(len(text) > _MAX_ID_LENGTH for text in ids) else None


def _explain_key(
    key_id: str, scope: AccessScope, stored: QuerySet[Refusal], url_of: Callable[[Refusal], str]
) -> list[Any]:
    """Explain what every request with this key gets, with its latest denials. A key outside the scope is unknown."""
    record = find_key_record(key_id)
    if record is None or not scope.has(record.merchant_id, record.environment):
        return [Banner("No key has this id.", "Every request with it is denied: Credential invalid.", "bad")]
    now = datetime.now(UTC)
    presented = VerificationRequest(
        key=None, environment=record.environment, endpoint=NoMatchingEndpoint(), is_dry=True
    )
    judgement = explain_described(presented, key_id, None, now)
    verdict = None if judgement is None else judgement.verdict
    url = reverse("admin:keyvault_key_change", args=[key_id])
    sections: list[Any]
    if isinstance(verdict, Denial) and verdict.code not in _MATCHED_NOTHING:
        trace = [(check.rule, check.passed) for check in judgement.trace] if judgement else []
        subject = f"Every request with key {key_id} is"
        sections = verdict_sections(verdict.code, verdict.detail, verdict.internal, trace, subject=subject)
    else:
        text = "Whether a request is allowed depends on the endpoint, the merchant that it names and its address."
        sections = [Banner("The key itself is accepted.", text, "good", [Link("Open key", url)])]
    return [*sections, _denials_table(key_id, record.environment, now, stored, url_of)]


def _denials_table(
    key_id: str,
    environment: Environment,
    now: datetime,
    stored: QuerySet[Refusal],
    url_of: Callable[[Refusal], str],
) -> Table:
    # The environment lets the database read an index by time, newest first, for a key with many denials.
    rows = stored.filter(key_id=key_id, environment=environment, at__gte=now - _LISTED_FOR).order_by("-at")
    return Table(
        f"Latest denials of key …{key_id[-6:]}",
        ["request", "when", "denied as", "endpoint", "source"],
        [
            [
                link(url_of(row), mono(row.request_id)),
                moment(row.at),
                PROBLEM_TYPES[ErrorCode(row.code)].title,
                row.endpoint or NOTHING,
                mono(row.source or NOTHING),
            ]
            for row in rows[:_MAX_DENIALS]
        ],
        empty=f"No request with this key was denied in the last {_LISTED_FOR.days} days.",
    )


def _explanation(cleaned: Cleaned, scope: AccessScope) -> list[Any]:
    environment = Environment(cleaned["environment"])
    endpoint = _endpoint(cleaned, environment)
    judgement = _judge(cleaned, environment, endpoint, scope)
    sections: list[Any]
    verdict = judgement.verdict
    trace = [(check.rule, check.passed) for check in judgement.trace]
    if isinstance(verdict, Denial):
        sections = verdict_sections(verdict.code, verdict.detail, verdict.internal, trace)
    else:
        limits = FactTable("Verdict", [("Response", "200 Allowed"), *_limits(judgement, endpoint)])
        sections = [
            Banner("The request is allowed.", "No rule denies it.", "good"),
            Columns([rules_card(trace), limits]),
        ]
    sections.append(FactTable("Assumptions", list(_assumptions(cleaned, judgement))))
    if isinstance(endpoint, Endpoint):
        sections.append(FactTable(f"Authorization of {endpoint.name}", authorization_panel(endpoint)))
    return sections


def _endpoint(cleaned: Cleaned, environment: Environment) -> Endpoint | NoMatchingEndpoint:
    if cleaned["endpoint"]:
        return find_endpoint(cleaned["endpoint"])
    return match_endpoint(cleaned["method"], cleaned["path"], urlsplit(BASE_URLS[environment]).path)


def _judge(
    cleaned: Cleaned, environment: Environment, endpoint: Endpoint | NoMatchingEndpoint, scope: AccessScope
) -> Judgement:
    """Judge the described request. A key outside the operator's scope is an unknown one."""
    merchant, store = cleaned["merchant"] or None, cleaned["store"] or None
    if isinstance(endpoint, Endpoint):
        merchant, store = endpoint.read_contexts(cleaned["path"] or None, {}, merchant, store)
    presented = VerificationRequest(
        key=None,
        environment=environment,
        endpoint=endpoint,
        url=cleaned["path"],
        merchant=cleaned["merchant"] or None,
        merchant_context=merchant,
        store_context=store,
        bearer="assumed" if cleaned["has_bearer"] else None,
        origin="assumed" if cleaned["has_origin"] else None,
        client_address=cleaned["client_address"] or None,
        is_dry=True,
    )
    now = datetime.now(UTC)
    if not cleaned["key_id"]:
        return judge_presented(presented, now)
    record = find_key_record(cleaned["key_id"])
    if record is None or not scope.has(record.merchant_id, record.environment):
        return before_proof(INVALID)
    judgement = explain_described(presented, record.key_id, cleaned["customer_token_id"] or None, now)
    return judgement or before_proof(INVALID)


def _limits(judgement: Judgement, endpoint: Endpoint | NoMatchingEndpoint) -> Iterator[tuple[str, Any]]:
    holder = judgement.holder
    if isinstance(endpoint, NoMatchingEndpoint) or holder is None:
        return
    if not endpoint.spends:
        yield "Limits", "no limit applies to this endpoint"
        return
    account = find_account(holder.merchant_id, holder.environment)
    of_account = account_limit_in_force(account)
    of_endpoint = endpoint_limit_in_force(holder.environment, endpoint.name, account)
    yield "Limit of the account", f"{format_limit(of_account.limit)} ({of_account.source})"
    yield "Limit of the endpoint", f"{format_limit(of_endpoint.limit)} ({of_endpoint.source})"
    yield "Not checked", "whether these limits are exhausted now: an explanation spends no requests"


def _assumptions(cleaned: Cleaned, judgement: Judgement) -> Iterator[tuple[str, Any]]:
    key_id = cleaned["key_id"]
    if not key_id:
        yield "Key", "none"
    elif judgement.record is None and judgement.verdict == INVALID:
        yield "Key", "no key with this id exists"
    else:
        yield "Key", link(reverse("admin:keyvault_key_change", args=[key_id]), mono(key_id))
        yield "Secret", "assumed to be correct; never enter it here"
    if cleaned["has_bearer"]:
        yield "Bearer", cleaned["customer_token_id"] or "invalid token"
    yield "Origin", "sent" if cleaned["has_origin"] else "not sent"
    yield "Client address", cleaned["client_address"] or "not given"
