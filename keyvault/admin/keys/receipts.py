"""Receipt of a key change in the console: which verifiers confirmed it, and when."""

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from keyvault.admin.framework.widgets import NOTHING, Detail, FactTable, Table, badge, link, moment, mono
from keyvault.domain.timestamps import format_timestamp
from keyvault.models import Key
from keyvault.services.change_feed.receipts import Receipt, VerifierProgress, VerifierReceipt, find_receipt
from keyvault.services.keys.lifecycle import last_sequence

_REFRESH_SECONDS = 1
"""Refresh interval of an incomplete receipt, in seconds."""


def receipt_url(key: Key, sequence: int | None = None) -> str:
    """Return the URL of the receipt of a change; by default the last change of the key."""
    return reverse("admin:keyvault_key_receipt", args=[key.key_id, sequence or last_sequence(key)])


def receipt_cell(key: Key) -> SafeString:
    """Render how many verifiers confirmed the end of the key, linked to the receipt."""
    sequence = last_sequence(key)
    receipt = find_receipt(sequence)
    if receipt is None:
        return format_html('<span class="quiet">{}</span>', NOTHING)
    return link(receipt_url(key, sequence), _summarize(receipt))


def receipt_detail(receipt: Receipt, about: SafeString, account: str) -> Detail:
    """Return the receipt page, which refreshes until every verifier has confirmed."""
    return Detail(
        title=f"Receipt of change {receipt.sequence}",
        state="complete" if receipt.is_complete else "waiting",
        notes=list(_notes(receipt)),
        sections=[
            FactTable(
                "Change",
                [
                    ("Key", about),
                    ("Account", account),
                    ("Sequence", receipt.sequence),
                    ("Changed", moment(receipt.changed_at)),
                    ("Confirmed by", _summarize(receipt)),
                ],
            ),
            verifiers_table(receipt),
        ],
        refresh_seconds=None if receipt.is_complete else _REFRESH_SECONDS,
    )


def verifiers_table(receipt: Receipt) -> Table:
    """Return which verifiers confirmed the change, and when."""
    return Table(
        "Verifiers",
        ("Verifier", "Entry point", "State", "Confirmed (UTC)", "After", "Last report (UTC)"),
        [_row(receipt, verifier) for verifier in receipt.verifiers],
        empty="No verifiers. Verifiers with cached keys appear here; without them, verdicts use the database.",
    )


def _summarize(receipt: Receipt) -> str:
    confirmed, waiting = len(receipt.of(VerifierProgress.CONFIRMED)), len(receipt.of(VerifierProgress.WAITING))
    if not confirmed + waiting:
        return "no live verifiers"
    return f"{confirmed} of {confirmed + waiting} verifiers"


def _notes(receipt: Receipt) -> Iterable[str]:
    if not receipt.is_complete:
        yield "Some verifiers have not confirmed yet. This page refreshes automatically."
    if receipt.of(VerifierProgress.EXPIRED):
        yield (
            "An expired verifier has not reported for longer than its staleness bound. It no longer uses cached "
            "verdicts, so its confirmation is not required."
        )


def _row(receipt: Receipt, verifier: VerifierReceipt) -> list[Any]:
    return [
        mono(verifier.verifier_id),
        verifier.entry_point,
        badge(verifier.progress),
        _format_milliseconds(
            verifier.confirmed_at,
            missing="no longer kept" if verifier.progress is VerifierProgress.CONFIRMED else "not yet",
        ),
        _after(receipt, verifier),
        _format_milliseconds(verifier.seen_at),
    ]


def _after(receipt: Receipt, verifier: VerifierReceipt) -> SafeString | str:
    seconds = receipt.seconds_until(verifier)
    if seconds is None or receipt.changed_at is None:
        return ""
    if verifier.started_at > receipt.changed_at:
        return format_html('<span class="quiet">{}</span>', "at startup")
    return f"{seconds * 1000:,.0f} ms"


def _format_milliseconds(at: datetime | None, missing: str = "not yet") -> SafeString:
    if at is None:
        return format_html('<span class="quiet">{}</span>', missing)
    text = f"{at:%Y-%m-%d %H:%M:%S}.{at.microsecond // 1000:03}"
    return format_html('<time datetime="{}" title="{} UTC">{}</time>', format_timestamp(at), text, text)
