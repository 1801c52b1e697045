"""Explain why a request was refused, by request id or by description. No secret is requested or accepted.

Read-only: a described request is evaluated as if the key's secret had been presented, and spends no limit.
"""

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
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
from keyvault.admin.framework.enforcement import operator_of
from keyvault.admin.framework.pages import page
from keyvault.admin.framework.widgets import FactTable, Link, Table, badge, link, mono
from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode
from keyvault.models import Refusal
from keyvault.services.catalog.base_urls import BASE_URLS
from keyvault.services.catalog.catalog import find_endpoint, match_endpoint
from keyvault.services.limits.overrides import account_limit_in_force, endpoint_limit_in_force
from keyvault.services.merchants.merchants import find_account
from keyvault.services.verification.judging import Judgement, VerificationRequest, explain_described, judge_presented
from keyvault.wire.problems import PROBLEM_TYPES

_WHOLE_KEY = (
    "The input contains a whole key or token. It was neither looked up nor stored. Enter the key id: the 16 characters "
    "after the third underscore. Rotate a key that was pasted in a wrong place."
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

_ID_FIELDS = ("request_id", "key_id", "customer_token_id")
_MAX_ID_LENGTH = 32


class RequestIdForm(forms.Form):
    request_id = forms.CharField(label="Request id", max_length=32, help_text="The request_id of the response.")


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
    crumbs: Sequence[Link],
    stored: QuerySet[Refusal],
    url_of: Callable[[Refusal], str],
) -> HttpResponse:
    """Show both forms and the result of the submitted one.

    Args:
        stored: refusals that the operator may see.
        url_of: returns the page of a stored refusal.
    """
    by_id = RequestIdForm()
    by_description = DescribedForm()
    context: dict[str, Any] = {"title": "Why was this refused?", "crumbs": crumbs}
    status = 200
    if request.method == "POST":
        if _holds_secret(request.POST):
            # Echo none of the input: it contains a secret.
            context["error"], status = _WHOLE_KEY, 400
        elif "request_id" in request.POST:
            by_id = RequestIdForm(request.POST)
            found = stored.filter(pk=by_id.cleaned_data["request_id"].strip()).first() if by_id.is_valid() else None
            if found is not None:
                return HttpResponseRedirect(url_of(found))
            status = 404 if by_id.is_valid() else 400
            context["error"] = _NOT_KEPT if by_id.is_valid() else ""
        else:
            by_description = DescribedForm(request.POST)
            if by_description.is_valid():
                context["sections"] = _explanation(by_description.cleaned_data, operator_of(request).scope)
            else:
                status = 400
    return page(site, request, "explain", {**context, "by_id": by_id, "by_description": by_description}, status=status)


def verdict_facts(code: ErrorCode, detail: str, internal: str) -> FactTable:
    """Return the response, its meaning, and the details for operators only."""
    kind = PROBLEM_TYPES[code]
    rows: list[tuple[str, Any]] = [
        ("Response", f"{kind.status} {kind.title}"),
        ("Code", mono(code)),
        ("Detail sent to the caller", detail),
        ("Cause", kind.cause),
        ("Remedy", kind.remedy),
    ]
    if kind.check is not None:
        rows.append(("Check before retrying", f"{kind.check}: {_RETRY_CHECKS[kind.check]}"))
    if internal:
        rows.append(("For operators only", internal))
    return FactTable("Verdict", rows)


def trace_table(trace: Sequence[tuple[ErrorCode, bool]]) -> Table:
    return Table(
        "Rules applied, in order",
        ["rule", "outcome", "requirement"],
        [
            [mono(code), badge("passed" if passed else "refused"), _CHECKS.get(code, PROBLEM_TYPES[code].title)]
            for code, passed in trace
        ],
    )


def _holds_secret(sent: QueryDict) -> bool:
    """Whether any field contains a whole key, or an id field contains more than an id."""
    texts = [text for _, values in sent.lists() for text in map(str, values)]
    ids = [text for name in _ID_FIELDS for text in map(str, sent.getlist(name))]
    return any(find_exposed(text) is not None for text in texts) or any(len(text) > _MAX_ID_LENGTH for text in ids)


def _explanation(cleaned: Cleaned, scope: AccessScope) -> list[FactTable | Table]:
    environment = Environment(cleaned["environment"])
    endpoint = _endpoint(cleaned, environment)
    judgement = _judge(cleaned, environment, endpoint, scope)
    sections: list[FactTable | Table] = []
    verdict = judgement.verdict
    if isinstance(verdict, Denial):
        sections.append(verdict_facts(verdict.code, verdict.detail, verdict.internal))
    else:
        sections.append(FactTable("Verdict", [("Response", "200 Allowed"), *_limits(judgement, endpoint)]))
    sections.append(trace_table([(check.rule, check.passed) for check in judgement.trace]))
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
    judgement = explain_described(presented, cleaned["key_id"], cleaned["customer_token_id"] or None, now)
    record = None if judgement is None else judgement.record
    is_hidden = record is not None and not scope.has(record.merchant_id, record.environment)
    return before_proof(INVALID) if judgement is None or is_hidden else judgement


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
