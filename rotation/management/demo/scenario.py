"""The lifecycle of one key, live: requested, approved, used, rotated under traffic, reinstated, revoked."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from django.conf import settings
from django.core.management.base import CommandError
from django.db import connection

from keyvault.access.permissions import Permission
from keyvault.access.principals import HOST
from keyvault.domain.environments import Environment
from keyvault.domain.errors import KeyvaultError
from keyvault.domain.origins import to_domain
from keyvault.management.commands.seed_demo import list_demo_operators
from keyvault.management.json_command import call
from keyvault.management.service import SERVER, WORKER, local_url, supervise, wait_until_ready
from keyvault.management.supervisor import Supervisor
from keyvault.services.change_feed.receipts import Receipt, VerifierProgress
from keyvault.services.recording.audit_chain import AuditReport, verify_audit
from keyvault.services.recording.authorization import authorize
from keyvault.services.sessions.invitations import prepare_sign_in
from rotation.domain.events import RotationState as S
from rotation.management.demo.context import DemoContext, DemoError
from rotation.management.demo.issuing import issue_under_four_eyes, verify_as_a_backend
from rotation.management.demo.overlooked_client import Reinstated, rotate_with_an_overlooked_client
from rotation.management.demo.report import DemoReport
from rotation.management.demo.revoking import format_receipt, revoke_immediately
from rotation.management.demo.rotating import RotationEntry, merchant_fleet, rotate_under_traffic, watch_traffic
from rotation.management.demo.tally import RequestTally, count
from rotation.management.demo.traces import find_logged_errors, find_secrets

EXPECTED_STATES = (
    S.SCHEDULED,
    S.STAGED,
    S.PUBLISHING,
    S.AWAITING_PROOF,
    S.OVERLAP,
    S.QUARANTINE,
    S.REVOKING,
    S.COMPLETED,
)
MAX_SHOWN = 10


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The results to check after all processes have stopped.

    `audit_entries`: of the first rotation. `reinstated`: the outcome of the second one. `receipt`: of the revocation.
    `found`: readable secrets. `logged_errors`: log lines that report an error.
    """

    tally: RequestTally
    audit_entries: list[RotationEntry]
    reinstated: Reinstated
    receipt: Receipt
    audit: AuditReport
    found: list[str]
    logged_errors: list[str]


def run_demo(report: DemoReport, port: int) -> None:
    """Run the demo. Raises DemoError or ServiceError, with an explanation, at the first failed expectation.

    Runs in a data folder of its own, with a policy that requires a second person in the sandbox, too.
    """
    report.section("Setup")
    _set_up(report)
    with supervise(port) as service:
        service.report = report.aside
        context = DemoContext(report, service, port)
        with report.waiting("waiting for the server to be ready …"):
            wait_until_ready(service, port)
        report.step(f"a server and a Celery worker run; {local_url(port)}/readyz says ready")
        _show_sign_ins(context)
        try:
            tally, audit_entries, reinstated, receipt = _live(context)
        except (DemoError, CommandError, KeyvaultError) as error:
            raise DemoError(f"{error}{_tail(service, getattr(error, 'program', WORKER))}") from error
    report.section("Checks")
    too = ", the Vault's audit log in it," if settings.IS_VAULT else ""
    report.step(f"server and worker have stopped; the data folder{too} is searched, then deleted")
    audit = verify_audit()
    connection.close()
    found = sorted(set(find_secrets(settings.DATA_DIR, context.secrets)))
    errors = list(find_logged_errors(settings.DATA_DIR / "logs"))
    outcome = DemoResult(tally, audit_entries, reinstated, receipt, audit, found, errors)
    _show(report, outcome, len(context.secrets))
    wrong = list(_find_failures(outcome))
    if wrong:
        more = [f"… and {len(wrong) - MAX_SHOWN} more"] if len(wrong) > MAX_SHOWN else []
        raise DemoError("\n".join(wrong[:MAX_SHOWN] + more) + _tail(service, SERVER))


def _set_up(report: DemoReport) -> None:
    with report.waiting("setting up the database and the keystore …"):
        made = call("setup")
        report.step(
            f"{made['database']} database and {'logs' if settings.IS_VAULT else 'keystore'} in {settings.DATA_DIR}"
        )
        if settings.IS_VAULT:
            report.step(f"secrets in the Vault at {settings.VAULT_ADDRESS}; a login for each role, opened once")
        seeded = call("seed_demo")
    merchants = ", ".join(merchant["merchant_id"] for merchant in seeded["merchants"])
    operators = ", ".join(operator["username"] for operator in seeded["operators"])
    report.step(f"merchants {merchants}; operators {operators}")
    needed = settings.APPROVALS_NEEDED[Environment.SANDBOX]
    report.aside(f"KEYVAULT_SANDBOX_APPROVALS={needed}: here the sandbox requires a second person, as production does")


def _show_sign_ins(context: DemoContext) -> None:
    """Print a password and a TOTP secret of each operator, for the console of this demo."""
    report = context.report
    report.step(f"the console is at {to_domain(local_url(context.port))}/admin/ until the demo ends")
    grant = authorize(HOST, Permission.OPERATORS_ENROLL, now=datetime.now(UTC))
    for operator in list_demo_operators():
        prepared = prepare_sign_in(grant, operator)
        context.secrets += [prepared.password, prepared.totp_seed]
        report.aside(f"{operator.username}: {prepared.password.reveal()}, TOTP secret {prepared.totp_seed.reveal()}")
    report.aside("a code: echo SECRET | python manage.py show_totp_code")


def _live(context: DemoContext) -> tuple[RequestTally, list[RotationEntry], Reinstated, Receipt]:
    issued = issue_under_four_eyes(context)
    verify_as_a_backend(context, issued)
    with merchant_fleet(context, issued) as fleet:
        watch_traffic(context, fleet)
        replaced = rotate_under_traffic(context, fleet, issued)
        reinstated = rotate_with_an_overlooked_client(context, fleet, replaced.replacement)
        revocation, receipt = revoke_immediately(context, fleet, reinstated.replacement)
    return count(fleet.requests, revocation), replaced.entries, reinstated, receipt


def _show(report: DemoReport, outcome: DemoResult, secrets: int) -> None:
    tally, audit = outcome.tally, outcome.audit
    report.section("The figures")
    report.figure("requests", f"{tally.requests}, of which {tally.refusals} rightly refused after the revocation")
    report.figure("failures", f"{len(tally.failures)}")
    report.figure("refused in quarantine", f"{outcome.reinstated.refusals}, and {outcome.reinstated.counted} counted")
    report.figure("from revoke to first refusal", _first_refusal(tally))
    report.figure("receipt of the revocation", format_receipt(outcome.receipt))
    report.figure("audit log", f"{audit.entries} entries, {'BROKEN' if audit.first_broken else 'intact'}")
    report.figure("secrets found in files", f"{len(outcome.found)}, of {secrets} issued")
    report.figure("errors in the logs", f"{len(outcome.logged_errors)}")
    report.figure("states of the rotation", " → ".join(_timed(outcome.audit_entries)))


def _find_failures(outcome: DemoResult) -> Iterator[str]:
    """Yield a description of each failed expectation."""
    tally, audit = outcome.tally, outcome.audit
    yield from (f"A wrong verdict: {failure}" for failure in tally.failures)
    if tally.first_refusal_seconds is None:
        yield "No traffic was refused after the revocation."
    if not outcome.receipt.of(VerifierProgress.CONFIRMED) or not outcome.receipt.is_complete:
        yield f"The receipt of the revocation: {format_receipt(outcome.receipt)}"
    if audit.first_broken is not None:
        yield f"The audit log is broken: {audit.first_broken}"
    yield from (f"A secret is readable in {place}" for place in outcome.found)
    yield from (f"An error in a log: {line}" for line in outcome.logged_errors)
    passed = tuple(entry.event for entry in outcome.audit_entries if entry.event in EXPECTED_STATES)
    if passed != EXPECTED_STATES[1:]:
        yield f"The rotation took other states: {', '.join(passed)}"


def _first_refusal(tally: RequestTally) -> str:
    if tally.first_refusal_seconds is None:
        return "never"
    if tally.first_refusal_seconds < 0:
        return f"{-tally.first_refusal_seconds * 1000:.0f} ms before the reply to the revocation"
    return f"{tally.first_refusal_seconds * 1000:.0f} ms after the reply to the revocation"


def _timed(audit_entries: list[RotationEntry]) -> Iterator[str]:
    for entry in audit_entries:
        yield f"{entry.event} {(entry.at - audit_entries[0].at).total_seconds():.1f} s"


def _tail(service: Supervisor, program: str | None) -> str:
    return f"\n\nThe end of {program}.log:\n{service.log_tail(program)}" if program else ""
