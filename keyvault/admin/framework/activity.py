"""Audit entries as sentences, for the activity of an account and of its rows."""

import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from django.db.models import QuerySet
from django.http import HttpRequest
from django.urls import reverse

from keyvault.access.permissions import Permission as P
from keyvault.admin.framework.components import Card, Feed, FeedEntry
from keyvault.admin.framework.enforcement import may
from keyvault.domain.audit import account_chain
from keyvault.models import Account, AuditEntry
from keyvault.models.union_parts import limit_part

MAX_READ = 300
"""Maximum entries that a page reads: the newest of the account's chain."""

MAX_SHOWN = 10

SPECIAL = {
    "key.staged": "Key made",
    "key.stored": "Key written to the secret backend",
    "key.material_destroyed": "Key destroyed in the secret backend",
    "key.burned": "Key discarded",
    "rotation.staged": "Replacement made",
    "rotation.publishing": "Delivery of the replacement started",
    "rotation.delivered": "Replacement delivered",
    "rotation.awaiting_proof": "Wait for proof of use started",
    "rotation.overlap": "Proof of use recorded",
    "rotation.quarantine": "Old key quarantined",
    "rotation.revoking": "Revocation of the old key started",
    "rotation.told": "Merchant notified of the rotation",
    "rotation.retirement_asked": "Retirement date of the old key requested",
    "credential.restricted": "Restrictions of the credential changed",
    "issuance.requested": "Key requested",
    "issuance.staged": "Key made for a request",
    "issuance.issued": "Key issued",
    "issuance.collected": "Key collected",
    "issuance.burned": "Issued key discarded",
    "operator.signed_in": "Signed in",
    "operator.signed_out": "Signed out",
    "operator.password_accepted": "Password entered",
    "operator.sign_in_prepared": "Sign-in of an operator prepared",
    "journal.failed": "Revocation log failed",
    "journal.loss_approved": "Loss of the revocation log approved",
    "journal.loss_accepted": "Loss of the revocation log accepted",
    "operator.unfamiliar_sign_in": "Unfamiliar sign-in",
    "queue.late": "Late queue reported",
    "anchor.late": "Late revocation anchor reported",
    "clock.differs": "Wrong clock of a host reported",
    "backend.denied": "Denial of the secret backend reported",
    "backend.unattributed": "Unattributed copy in the secret backend reported",
    "audit.rollback_accepted": "Rollback of the audit log accepted",
    "credential.recipient_key_set": "Recipient key set",
    "webhook.failed": "Webhook endpoint failed",
    "rotation.predecessor_available": "Old key available again",
    "rotation.used_in_quarantine": "Old key used in quarantine",
    "rotation.predecessor_retiring": "Old key about to be retired",
    "rotation.replacement_available": "Replacement available",
    "rotation.replacement_awaited": "Replacement not used yet",
    "issuance.approved": "Key request approved",
    "issuance.rejected": "Key request rejected",
    "issuance.withdrawn": "Key request withdrawn",
    "issuance.expired": "Key request expired",
}

_TONES = {
    "bad": ("compromised", "revoked", "rejected", "stalled", "suspended", "bypassed", "offboarded", "failed"),
    "good": ("approved", "completed", "issued", "resumed", "activated", "delivered", "collected"),
    "info": ("requested", "started", "created"),
}
_TONE_OF = {verb: tone for tone, verbs in _TONES.items() for verb in verbs}


def name_event(event: str) -> str:
    """Return an event or a kind of notice in words, such as `Rotation requested`."""
    noun, _, verb = event.partition(".")
    what = SPECIAL.get(event) or f"{noun} {verb}".replace("_", " ").strip()
    return f"{what[0].upper()}{what[1:]}"


def sentence_of(event: str, actor: str) -> str:
    """Describe an audit entry, such as `Rotation requested by tam`."""
    return f"{name_event(event)} by {actor.partition(':')[2] or actor}"


_ASIDE = "every entry is in the audit log"


def activity_cards(request: HttpRequest, account: Account, about: Collection[str]) -> list[Card]:
    """Return a card with the entries about rows of an account; none if the operator may not read the audit log.

    `about`: ids of which an entry must name one. Only the newest MAX_READ entries of the account are read.
    """
    if not may(request, P.AUDIT_READ, account):
        return []
    feed = Feed(list(_list_entries(account, about)), f"Nothing in the newest {MAX_READ} audit entries of the account.")
    return [Card("Timeline", feed, _ASIDE)]


def account_activity(request: HttpRequest, accounts: Sequence[Account]) -> dict[int, Card]:
    """Return a card with the newest entries of each account, by its id, where the operator may read them. One query."""
    chains = {_chain_of(each): each for each in accounts if may(request, P.AUDIT_READ, each)}
    newest = [limit_part(_newest_of(chain), MAX_SHOWN) for chain in chains]
    rows = sorted(newest[0].union(*newest[1:], all=True), key=lambda row: -row.sequence) if newest else []
    found: dict[str, list[FeedEntry]] = {chain: [] for chain in chains}
    for entry in rows:
        found[entry.chain_id].append(_feed_entry(entry))
    empty = "No audit entries of the account yet."
    return {
        account.pk: Card(f"Activity in {account.environment}", Feed(found[chain], empty), _ASIDE)
        for chain, account in chains.items()
    }


def _list_entries(account: Account, about: Collection[str]) -> Iterator[FeedEntry]:
    wanted, shown = [text.encode() for text in about], 0
    for entry in _newest_of(_chain_of(account))[:MAX_READ]:
        if any(text in bytes(entry.body) for text in wanted):
            yield _feed_entry(entry)
            shown += 1
        if shown == MAX_SHOWN:
            return


def _chain_of(account: Account) -> str:
    return account_chain(account.merchant_id, account.environment)


def _newest_of(chain: str) -> QuerySet[AuditEntry]:
    return AuditEntry.objects.filter(chain=chain).order_by("-sequence")


def _feed_entry(entry: AuditEntry) -> FeedEntry:
    return FeedEntry(
        sentence_of(entry.event, entry.actor),
        entry.at,
        _detail(json.loads(bytes(entry.body))),
        reverse("admin:keyvault_auditentry_change", args=[entry.pk]),
        _TONE_OF.get(entry.event.rpartition(".")[2], ""),
    )


def _detail(body: dict[str, Any]) -> str:
    """Return what people wrote or chose: a reason or a label."""
    details = body.get("details", {})
    for name in ("why", "reason", "label"):
        if isinstance(details.get(name), str) and details[name]:
            return str(details[name])
    return ""
