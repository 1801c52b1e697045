"""What one process of tests remembers, and how the next test starts without it.

Limits are counted by account, and a rolled back account's id comes again in the next test. What an earlier test revoked
is not revoked in this one's database, and a position in an earlier database is none in this one's.
"""

from pathlib import Path

from keyvault.hotpath.adapters.assembly import load_blocking
from keyvault.services import maintenance
from keyvault.services.audit import checkpoints
from keyvault.services.limits.limiter import failed_proofs, limiter
from keyvault.services.limits.sign_in_attempts import attempts
from keyvault.services.revocations import anchor, log_backfill
from keyvault.services.revocations.log_opening import late_comparison
from keyvault.services.usage.recorder import usage_log
from keyvault.services.work.shared_jobs import shared_jobs

from .factories import forget_evidence, renew_revocation_log


def forget_process_state(data_dir: Path) -> None:
    """Forget limits, records, evidence and the positions of the periodic jobs; renew the revocation log."""
    renew_revocation_log(data_dir / "revocation_log")
    forget_evidence(data_dir / "keystore.sqlite3")
    limiter.cache_clear()
    failed_proofs.cache_clear()
    attempts.cache_clear()
    load_blocking.cache_clear()
    usage_log._counters.clear()  # of the engines of earlier tests
    late_comparison.is_due = False
    anchor._writer = anchor.AnchorWriter()
    log_backfill._backfill = log_backfill.LogBackfill()
    maintenance._turns = maintenance.MaintenanceTurns()
    shared_jobs._begun.clear()
    checkpoints._walked.clear()
