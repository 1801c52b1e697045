"""Count, list, log and announce what a reconciliation found."""

import logging
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import System
from keyvault.backends.base import BackendDeniedError
from keyvault.domain.canonical import JsonValue
from keyvault.domain.environments import Environment
from keyvault.domain.free_text import clean_text
from keyvault.domain.ids import find_account_id
from keyvault.domain.notifications import NoticeKind
from keyvault.models import Account, Key, Notice, ProviderConnection
from keyvault.services.recording.authorization import authorize
from keyvault.services.recording.notifications import announce
from keyvault.services.recording.transaction import recorded
from keyvault.services.secrets import provider_connections
from keyvault.services.secrets.stored_copies import announce_missing, report_refusal

_log = logging.getLogger(__name__)

MAX_LISTED_FINDINGS = 1000
"""Maximum findings listed in a report. All are counted and logged."""


@dataclass(slots=True)
class ReconciliationReport:
    """The contents of one environment's backend, and the changes that were made (in a dry run: would be made).

    `destroyed`: copies of dead keys. `put_right`: copies whose visibility was wrong. `missing`: copies that are gone.
    `unattributed`: copies of unknown origin. `left`: skipped because another worker was changing them.
    """

    environment: str
    is_dry_run: bool = False
    is_complete: bool = False
    paths: int = 0
    versions: int = 0
    destroyed: int = 0
    put_right: int = 0
    forgotten: int = 0
    missing: int = 0
    unattributed: int = 0
    left: int = 0
    failed: int = 0
    findings: list[dict[str, JsonValue]] = field(default_factory=list)

    def as_json(self) -> dict[str, JsonValue]:
        return asdict(self)

    def counts(self) -> dict[str, JsonValue]:
        return {name: value for name, value in self.as_json().items() if name != "findings"}

    def add_finding(self, what: str, path: str, number: int | None, **more: JsonValue) -> None:
        """Add a finding to the list and the log. Secrets in an unattributed path are redacted."""
        finding: dict[str, JsonValue] = {"what": what, "path": clean_text(path, 200), "backend_version": number, **more}
        _log.log(
            logging.WARNING if what in {"unattributed", "missing", "failed"} else logging.INFO,
            "reconciliation finding",
            extra={"finding": finding, "is_dry_run": self.is_dry_run},
        )
        if len(self.findings) < MAX_LISTED_FINDINGS:
            self.findings.append(finding)


class FindingReporter:
    """Reports the findings of one run over one environment, each once to the account that it concerns."""

    def __init__(self, environment: Environment, is_dry_run: bool, principal: System) -> None:
        self.environment, self.principal = environment, principal
        self.report = ReconciliationReport(environment.value, is_dry_run)

    def report_unattributed(self, path: str, number: int | None, why: str) -> None:
        """Report a copy that cannot be attributed.

        The reply and the log list it each time. The console shows it once, if an account is known.
        """
        self.report.unattributed += 1
        self.report.add_finding("unattributed", path, number, why=why)
        account = self._find_account(path)
        if account is not None:
            self._announce(account, clean_text(path.rpartition("/")[2], 64) or "?", path, number, why)

    def _announce(self, account: Account, subject: str, path: str, number: int | None, why: str) -> None:
        """Announce a finding unless the same one was announced before."""
        payload: dict[str, JsonValue] = {"path": clean_text(path, 200), "backend_version": number, "why": why}
        announced = Notice.objects.filter(kind=NoticeKind.BACKEND_UNATTRIBUTED, account=account, subject=subject)
        if self.report.is_dry_run or any(row.payload == payload for row in announced):
            return
        grant = self.grant(account)
        with recorded(grant, P.BACKEND_RECONCILE, "backend.unattributed_found", account=account, **payload):
            announce(grant, NoticeKind.BACKEND_UNATTRIBUTED, account, subject, **payload)

    def report_refusal(self, error: BackendDeniedError) -> None:
        account = Account.objects.filter(environment=self.environment).order_by("pk").first()
        if account is not None and not self.report.is_dry_run:
            report_refusal(self.grant(account), account, "the nightly reconciliation", error)

    def report_missing(self, key: Key) -> None:
        self.report.missing += 1
        self.report.add_finding("missing", key.credential.backend_path, key.backend_version, key_id=key.key_id)
        account = key.credential.account
        announced = Notice.objects.filter(kind=NoticeKind.BACKEND_UNATTRIBUTED, account=account, subject=key.key_id)
        if self.report.is_dry_run or any(
            row.payload.get("backend_version") == key.backend_version for row in announced
        ):
            return
        grant = self.grant(account)
        with recorded(grant, P.BACKEND_RECONCILE, "key.material_missing", account=account, key_id=key.key_id):
            announce_missing(grant, key)

    def report_missing_connection(self, row: ProviderConnection) -> None:
        fresh = provider_connections.find_by_path(self.environment, row.backend_path)
        if fresh is None or fresh.version != row.version:
            self.report.left += 1
            return
        self.report.missing += 1
        why = "a connection's credentials are gone, and the service did not destroy them"
        self.report.add_finding("missing", row.backend_path, row.backend_version, why=why)
        self._announce(row.account, provider_connections.connection_id(row), row.backend_path, row.backend_version, why)

    def _find_account(self, path: str) -> Account | None:
        rows = Account.objects.select_related("merchant").filter(environment=self.environment)
        account: Account | None = rows.filter(pk=find_account_id(path)).first()
        return account

    def grant(self, account: Account) -> Grant:
        return authorize(self.principal, P.BACKEND_RECONCILE, account, now=datetime.now(UTC))
