"""The stable name of every log line: `event`, by the message. Tests compare this table with the code, and docs/logs.md
is generated from it.

A message may be reworded; its event never changes. A new message needs a row.
"""

from collections.abc import Mapping
from types import MappingProxyType

EVENTS: Mapping[str, str] = MappingProxyType(
    {
        # Requests
        "refused": "request.refused",
        "unhandled": "request.unhandled",
        "refused by the database": "request.conflicted",
        "the page of an error has no frame": "request.error_page_plain",
        "dropped: the client disconnected while the request waited for a thread": "request.dropped",
        "a response callback failed": "request.callback_failed",
        "database unavailable": "database.unavailable",
        "the database cannot be read": "database.unreadable",
        # Verification
        "denied": "verification.denied",
        "a key cannot be judged": "verification.stale",
        "a key cannot be looked up": "verification.lookup_failed",
        "the fast path failed": "verification.fast_path_failed",
        "a key was sent in a URL": "key.sent_in_url",
        "a private key was sent with an Origin header": "key.sent_by_browser",
        "a suspended key was presented": "key.tried_while_suspended",
        "an uncollected key was used": "key.used_uncollected",
        "a refusal could not be recorded": "refusal.not_recorded",
        "refusals could not be written": "refusal.not_written",
        "refusals could not be written; as many as fit are kept": "refusal.kept",
        "too many refusals: some were dropped": "refusal.dropped",
        "limit store lost": "limit_store.lost",
        "limit store back": "limit_store.back",
        "recorded data could not be written at exit": "process.exit_incomplete",
        # Use
        "usage could not be written; it is kept for the next attempt": "usage.not_written",
        "the last uses could not be written; another process writes those in its file": "usage.last_not_written",
        "unreported uses cannot be kept in a file; if this process is killed, silence restarts": "usage.not_kept",
        "uses of a killed process could not be reported; the next round repeats it": "usage.not_reported",
        "reported the uses of a killed process": "usage.reported",
        "usage reporters are lost, or their clocks differ": "usage.reporters_lost",
        "receivers were not notified of refused keys": "usage.receivers_failed",
        # Change feed
        "the change feed cannot be followed": "change_feed.lost",
        "the change feed is followed again": "change_feed.back",
        "change notifications are unavailable; falling back to polling": "change_feed.polling",
        "the database lacks changes that this process has applied; the process denies all requests; replay the "
        "revocations, then restart the process": "change_feed.went_back",
        "deregistration failed; receipts wait for this process until it expires": "change_feed.not_deregistered",
        "receivers were not notified of confirmed changes": "change_feed.receivers_failed",
        "a receipt could not be read": "change_feed.receipt_unreadable",
        "the change feed is read again from its end, with an empty memory": "change_feed.read_from_end",
        "the change feed cannot be read": "change_feed.unreadable",
        "the change feed is read again": "change_feed.readable",
        "the central service does not answer yet; requests get verifier_stale": "region.central_unavailable",
        "not ready: peppers cannot be read yet": "region.peppers_unavailable",
        "the central service refused reported uses; they are dropped": "region.uses_dropped",
        "recorded data could not be sent at exit": "region.not_sent",
        "could not notify this host's processes of a change; they read it from the change feed": "generation.failed",
        "could not wake other hosts; they find the change at their next poll": "change_feed.not_notified",
        # Processes
        "a process no longer reports": "process.lost",
        "the process could not deregister": "process.not_deregistered",
        "a round of a background thread failed": "thread.failed",
        "a scrape failed": "metrics.scrape_failed",
        "the broker's queues could not be measured": "broker.unavailable",
        "due work waits for a worker": "queue.late",
        "another process migrates the database; waiting for it": "migration.waiting",
        "a migration gave way to other transactions": "migration.gave_way",
        "beat has ended; the worker stops": "beat.ended",
        "%s; it may run beside the newer release until the upgrade is complete": "schema.ahead",
        "not ready: peppers cannot be read yet; run: manage.py check_vault; "
        "with a wrapped master key: --host keystore": "start.peppers_unreadable",
        "irreversible actions are refused: the clock is wrong": "clock.differs",
        # Maintenance
        "a maintenance step failed": "task.failed",
        "rows were not rolled up or deleted": "retention.failed",
        "postponed": "work.postponed",
        "postponed: a row cannot be processed": "work.failed",
        "postponed: the secret backend is unavailable": "work.backend_unavailable",
        "skipped: another worker changed the row": "work.skipped",
        "issuance paused": "issuance.paused",
        "issuance will be retried": "issuance.failed",
        # Peppers and rehashing
        "a new pepper cannot be loaded yet": "pepper.not_loaded",
        "the peppers could not be refreshed": "pepper.refresh_failed",
        "the check for new peppers failed; it is repeated with the next report": "pepper.check_failed",
        "rehashes could not be written; each key's digest is renewed when the key is next proved": (
            "pepper.rehash_failed"
        ),
        "rehashes could not be written": "pepper.rehashes_not_written",
        # Secret backend
        "the secret backend is not ready": "backend.not_ready",
        "a pending copy is not erased yet": "backend.copy_not_erased",
        "backend reconciled": "reconciliation.done",
        "reconciliation finding": "reconciliation.finding",
        "reconciliation postponed": "reconciliation.postponed",
        "reconciliation ended early": "reconciliation.ended_early",
        "the secret backend denied the reconciliation": "reconciliation.denied",
        # Audit log
        "a checkpoint of the audit log was signed": "audit.signed",
        "a checkpoint of the audit log is delayed": "audit.delayed",
        "the audit log is damaged: no checkpoint is signed": "audit.damaged",
        "the newest checkpoint is not recorded outside the database": "audit.not_marked",
        # Revocation log
        "the revocation log cannot be written": "revocation_log.failed",
        "the revocation log cannot be backfilled": "revocation_log.not_backfilled",
        "a torn line of the revocation log was removed": "revocation_log.torn",
        "the alarm about the revocation log cannot be raised": "revocation_log.alarm_failed",
        "the revocation log was not compared with the revocation anchor": "revocation_log.uncompared",
        "the revocation anchor is not up to date": "anchor.late",
        "revoked items were valid again": "revocation.replayed",
        "the database was set back; stop all processes, and run: manage.py replay_revocations": "database.set_back",
        # Disk
        "the disk is full: a part of the reserve was released": "disk.full",
        "the disk reserve could not be used": "disk.reserve_failed",
        "there is no disk reserve: the disk has too little free space, so a full disk may refuse revocations": (
            "disk.no_reserve"
        ),
        # Notices
        "a webhook delivery failed": "webhook.failed",
        "a webhook delivery got no reply": "webhook.no_reply",
        "the outcome of a webhook delivery was not stored": "webhook.outcome_lost",
        "alarms were not delivered": "alarm.undelivered",
        "the mail server refused a recipient of alarms": "alarm.recipient_refused",
        # Sign-in
        "a second factor cannot be decrypted": "second_factor.unreadable",
        "refused sign-ins could not be written": "sign_in.not_written",
        "refused sign-ins could not be written; they are kept": "sign_in.kept",
        "uses of roles could not be written": "role_use.not_written",
        "uses of roles could not be written; they are kept": "role_use.kept",
        # Rotations
        "rotation moved": "rotation.moved",
        "rotation paused": "rotation.paused",
        "rotation step failed": "rotation.step_failed",
        "unexpected error in a rotation step": "rotation.step_crashed",
        "rotation cannot be stalled": "rotation.not_stalled",
        "turns were not dispatched; the next tick dispatches them": "rotation.not_dispatched",
        "a leaked key was not revoked": "emergency.not_revoked",
        "no replacement was requested": "emergency.not_replaced",
        "schedule stalled": "schedule.stalled",
        "scheduled rotation cannot be begun": "schedule.not_begun",
        "an unreadable schedule raised no alarm": "schedule.alarm_failed",
        "a lasting refusal raised no alarm": "schedule.refusal_alarm_failed",
        "the expiry of a standing approval is not announced yet": "schedule.expiry_not_announced",
        "campaign halted": "campaign.halted",
        "campaign not advanced": "campaign.not_advanced",
        "unexpected error in a campaign's turn": "campaign.crashed",
    }
)


def find_event(message: object) -> str:
    """Return the event of a message before its arguments are filled in; "" for lines of libraries."""
    return EVENTS.get(message, "") if isinstance(message, str) else ""


def log_events_table() -> str:
    """Return the table of docs/logs.md."""
    rows = ["| event | message |", "|---|---|"]
    rows += [f"| `{event}` | {message} |" for message, event in sorted(EVENTS.items(), key=lambda row: row[::-1])]
    return "\n".join(rows)
