"""Issue a key: request, approval by a second person, issuance by the worker, one-time collection."""

from collections.abc import Callable
from dataclasses import dataclass

from keyvault.domain.issuance import IssuanceState
from keyvault.domain.plaintext import Plaintext
from keyvault.management.json_command import call
from keyvault.models import Credential, IssuanceRequest
from keyvault.services.issuance.requests import get_request
from rotation.management.demo import operators
from rotation.management.demo.context import DemoContext, DemoError
from rotation.management.demo.operators import MERCHANT, refusal_of

ISSUE_SECONDS = 60
RATE_FOR_THE_FLEET = 1000


@dataclass(frozen=True, slots=True)
class Issued:
    """An issued key with its string."""

    credential: Credential
    key_id: str
    text: Plaintext


def issue_under_four_eyes(context: DemoContext) -> Issued:
    report = context.report
    report.section("Two people, one key")
    request = operators.request_key("tam")
    report.step(f"tam requests a private sandbox key for {MERCHANT}: {request.issuance_request_id} is {request.state}")
    _must_be_refused(context, "tam approves it himself", lambda: operators.approve("tam", request))
    own = operators.request_key("admin")
    _must_be_refused(
        context, "admin, who may approve, approves her own request", lambda: operators.approve("admin", own)
    )
    operators.withdraw("admin", own)
    operators.approve("approver", request)
    report.step(f"approver approves exactly this request (digest {request.plan_digest[:12]}…), without seeing a key")
    issued = context.until(
        "the worker to issue the key", lambda: _issued(request.issuance_request_id), seconds=ISSUE_SECONDS
    )
    if issued.key is None:
        raise DemoError(f"{issued.issuance_request_id} is issued and names no key.")
    report.step(f"the worker issues it: key {issued.key.key_id} of credential {issued.key.credential_id}")
    text = operators.collect("tam", issued)
    context.secrets.append(text)
    report.step(f"tam collects it, once: {text.reveal()}")
    _must_be_refused(context, "tam collects it again", lambda: operators.collect("tam", _reload(issued)))
    return Issued(issued.key.credential, issued.key.key_id, text)


def verify_as_a_backend(context: DemoContext, issued: Issued) -> None:
    report = context.report
    report.section("Verification")
    made = call(
        "create_service_token",
        *("orders-service", "--environment", "sandbox", "--permission", "keys:verify", "--days", "1", "--reveal"),
    )
    context.token = Plaintext(made["token"])
    context.secrets.append(context.token)
    report.step("orders-service, a backend of the platform, gets a token with one permission: keys:verify in sandbox")
    decision = context.expect("the key, presented for orders.retrieve", issued.text, None, dry_run=True)
    report.aside(f"it is {decision['merchant_id']}'s {decision['kind']} key {decision['key_id']}")
    context.expect(
        "the same for a public endpoint", issued.text, "method_not_supported", endpoint="client.configuration"
    )
    context.expect("the same, presented as globex's", issued.text, "merchant_mismatch", merchant="globex")
    context.expect("the same with its last character mistyped", _mistyped(issued.text), "credential_invalid")
    call(
        "set_limit",
        *("--merchant", MERCHANT, "--environment", "sandbox", "--by", "admin"),
        *("--rate", str(RATE_FOR_THE_FLEET), "--per-seconds", "1"),
    )
    report.step(f"admin raises {MERCHANT}'s limit to {RATE_FOR_THE_FLEET} a second, effective immediately")


def _must_be_refused(context: DemoContext, what: str, act: Callable[[], object]) -> None:
    refusal = refusal_of(act)
    if refusal is None:
        raise DemoError(f"{what}: that was not refused.")
    context.report.step(f"{what}: refused. {refusal}")


def _issued(issuance_request_id: str) -> IssuanceRequest | None:
    request = get_request(issuance_request_id)
    return request if request is not None and request.state == IssuanceState.ISSUED else None


def _reload(request: IssuanceRequest) -> IssuanceRequest:
    """Reload the request."""
    fresh = get_request(request.issuance_request_id)
    if fresh is None:
        raise DemoError(f"{request.issuance_request_id} is gone.")
    return fresh


def _mistyped(text: Plaintext) -> Plaintext:
    whole = text.reveal()
    return Plaintext(whole[:-1] + ("0" if whole[-1] != "0" else "1"))
