"""Rotations in the console: asked for, approved by a second person, watched, aborted, resumed, collected once."""

import json
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from django import forms
from django.contrib import admin
from django.db.models import Model, QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.safestring import SafeString

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.admin.acts import Act, ActForm, Ask, Cleaned, Done, RowChoice, SeenForm, SeenWhyForm, Tone, WhyForm
from keyvault.admin.cells import (
    NOTHING,
    Detail,
    Extras,
    Facts,
    Line,
    Link,
    Step,
    Table,
    Waiting,
    badge,
    link,
    moment,
    mono,
    seconds,
    short_moment,
)
from keyvault.admin.enforcement import may, operator_of
from keyvault.admin.four_eyes import ApproveForm, approvals_table, break_glass_warning, requester_name
from keyvault.admin.noun import NounAdmin
from keyvault.domain.environments import Environment
from keyvault.domain.issuance import Delivery
from keyvault.domain.keys import KeyKind, KeyState
from keyvault.models import Account, Credential, Key
from rotation.models import Rotation
from rotation.policy import DEFAULTS, LONGEST_SECONDS, Plan, Proof
from rotation.services.requests import (
    Wish,
    abort_rotation,
    approve_rotation,
    collect_replacement,
    describe,
    reject_rotation,
    request_rotation,
    resume_rotation,
)
from rotation.states import CLOSED, UNPUBLISHED, RotationState

S = RotationState

WAY = (
    S.AWAITING_APPROVAL,
    S.SCHEDULED,
    S.STAGED,
    S.PUBLISHING,
    S.AWAITING_PROOF,
    S.OVERLAP,
    S.QUARANTINE,
    S.REVOKING,
    S.COMPLETED,
)
"""The way forward, as the page's timeline shows it."""

PROOFS = {
    Proof.TRAFFIC: "traffic: real authentications with the replacement",
    Proof.ACK: "acknowledgement: the merchant presents the replacement to credentials/acknowledge",
}
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}
_PERIOD = re.compile(r"\s*([0-9]{1,8})\s*([smhd]?)\s*")


class PeriodField(forms.CharField):
    """A period as people write it: `90`, `30m`, `1h`, `7d`. Gives whole seconds, or None for nothing."""

    def to_python(self, value: Any) -> Any:
        text = super().to_python(value)
        if not text:
            return None
        match = _PERIOD.fullmatch(text)
        if match is None or int(match[1]) * _UNITS[match[2]] > LONGEST_SECONDS:
            raise forms.ValidationError("A number with s, m, h or d, such as 30m or 7d; a year at most.")
        return int(match[1]) * _UNITS[match[2]]


def _credential_words(credential: Credential) -> str:
    return f"{credential.account} · {credential.label} ({credential.credential_id})"


def _by_default(name: str) -> str:
    """What an empty field means, by environment."""
    return "; ".join(f"{seconds(getattr(DEFAULTS[env], name))} in {env}" for env in Environment)


class RotateForm(ActForm):
    credential_id = RowChoice(
        Credential.objects.select_related("account")
        .filter(kind=KeyKind.PRIVATE, keys__state=KeyState.ACTIVE)
        .distinct()
        .order_by("account__merchant_id", "account__environment", "label"),
        words=_credential_words,
        label="Credential",
    )
    proof = forms.ChoiceField(choices=[(proof.value, words) for proof, words in PROOFS.items()])
    quiet_seconds = PeriodField(
        required=False,
        label="Quiet period",
        help_text=(
            f"How long the old key must be silent. Such as 30m, 1h, 7d. Empty: {_by_default('quiet_seconds')}, "
            "or twice the longest gap seen there."
        ),
    )
    quarantine_seconds = PeriodField(
        required=False,
        label="Quarantine",
        help_text=f"How long it is then suspended before it is revoked. Empty: {_by_default('quarantine_seconds')}.",
    )
    expires_in_days = forms.IntegerField(
        required=False,
        min_value=1,
        max_value=3650,
        label="The replacement expires in days",
        help_text="Empty: it does not expire.",
    )
    reason = forms.CharField(max_length=300, widget=forms.Textarea(attrs={"rows": 3}))


class ApprovePlanForm(ApproveForm):
    @classmethod
    def plan_of(cls, row: Rotation) -> Plan:
        return row.approved_plan


def _request(grant: Grant, cleaned: Cleaned) -> Done:
    wish = Wish(
        reason=cleaned["reason"],
        proof=Proof(cleaned["proof"]),
        quiet_seconds=cleaned["quiet_seconds"],
        quarantine_seconds=cleaned["quarantine_seconds"],
        expires_in_days=cleaned["expires_in_days"],
    )
    rotation = request_rotation(grant, cleaned["credential_id"], wish)
    if rotation.state == S.AWAITING_APPROVAL:
        return Done("Asked. It now waits for the approval of a second person.", row=rotation)
    return Done("Asked. This environment wants no second person: the worker begins now.", row=rotation)


def _approve(grant: Grant, rotation: Rotation, cleaned: Cleaned) -> Done:
    approve_rotation(grant, rotation, cleaned["plan_digest"])
    if rotation.state == S.SCHEDULED:
        return Done("Approved. The worker begins when its time has come.")
    return Done("Your approval is noted; it takes another person's too.")


def _reject(grant: Grant, rotation: Rotation, cleaned: Cleaned) -> Done:
    reject_rotation(grant, rotation, cleaned["why"])
    return Done("Rejected.")


def _abort(grant: Grant, rotation: Rotation, cleaned: Cleaned) -> Done:
    abort_rotation(grant, rotation, cleaned["why"])
    return Done("Aborted. The old key stays as it is.")


def _resume(grant: Grant, rotation: Rotation, cleaned: Cleaned) -> Done:
    resume_rotation(grant, rotation)
    return Done("It goes on where it stalled, with its timers started anew.")


def _collect(grant: Grant, rotation: Rotation, cleaned: Cleaned) -> Done:
    return Done("The replacement", secret=collect_replacement(grant, rotation))


def _what_collecting_does(rotation: Rotation) -> str:
    if rotation.credential.delivery == Delivery.SHOW_ONCE:
        return "The replacement is shown on the next page, this once, and its copy here is destroyed afterwards."
    return "The replacement is shown on the next page, this once. The secret backend keeps its copy."


def _may_be_aborted(rotation: Rotation) -> bool:
    state = S(rotation.stalled_from) if rotation.stalled_from else rotation.current_state
    return rotation.delivered_at is None and (state is S.AWAITING_APPROVAL or state in UNPUBLISHED)


def _may_be_collected(rotation: Rotation) -> bool:
    """A sealed credential's key is shown to nobody: its replacement is read from the secret backend."""
    is_waiting = rotation.delivered_at is not None and rotation.collected_at is None
    return is_waiting and rotation.current_state not in CLOSED and rotation.credential.delivery != Delivery.SEALED


@admin.register(Rotation)
class RotationAdmin(NounAdmin):
    view_permissions = (P.ROTATIONS_READ,)
    section, singular, plural = "Keys", "Rotation", "Rotations"
    asks = (
        Ask(
            "request",
            "Rotate a key",
            P.ROTATIONS_WRITE,
            RotateForm,
            _request,
            "A replacement is made and delivered, proved in use, and only then is the old key suspended and revoked. "
            "In production a second person approves the plan first.",
            "Ask for it",
            account_of=lambda cleaned: cleaned["credential_id"].account,
            preset=lambda query: {"credential_id": query.get("credential")},
        ),
    )
    acts = (
        Act(
            "approve",
            "Approve",
            P.ROTATIONS_APPROVE,
            _approve,
            lambda rotation: "You approve exactly this plan. The replacement will be made unseen by you.",
            form=ApprovePlanForm,
            fits=lambda rotation: rotation.state == S.AWAITING_APPROVAL,
            tone=Tone.GOOD,
        ),
        Act(
            "reject",
            "Reject",
            P.ROTATIONS_APPROVE,
            _reject,
            lambda rotation: "Nothing is rotated; the key stays as it is. Whoever asked reads why.",
            form=WhyForm,
            fits=lambda rotation: rotation.state == S.AWAITING_APPROVAL,
            tone=Tone.DANGER,
        ),
        Act(
            "resume",
            "Resume",
            P.ROTATIONS_WRITE,
            _resume,
            lambda rotation: f"It goes on from {rotation.get_stalled_from_display()}, with its timers started anew.",
            form=SeenForm,
            fits=lambda rotation: rotation.state == S.STALLED and rotation.stalled_from is not None,
            tone=Tone.GOOD,
        ),
        Act(
            "abort",
            "Abort",
            P.ROTATIONS_WRITE,
            _abort,
            lambda rotation: "The old key stays as it is. A replacement that nobody was given is burned.",
            form=SeenWhyForm,
            fits=_may_be_aborted,
            tone=Tone.DANGER,
        ),
        Act(
            "collect",
            "Collect the replacement",
            P.ISSUANCE_COLLECT,
            _collect,
            _what_collecting_does,
            fits=_may_be_collected,
            warn=lambda rotation: break_glass_warning(rotation.credential.account),
            for_requester=True,
        ),
    )

    list_display = ("rotation_id", "state_badge", "account", "label", "asked_by", "created")
    list_filter = ("state", "credential__account__environment")
    search_fields = (
        "=rotation_id",
        "=credential__credential_id",
        "=predecessor__key_id",
        "=replacement__key_id",
        "credential__account__merchant__merchant_id",
    )
    search_help_text = "By rotation id, credential id, key id or merchant."
    ordering = ("-created_at",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        rows = super().get_queryset(request)
        return rows.select_related(
            "credential__account__merchant",
            "predecessor__credential__account",
            "replacement__credential__account",
            "requester",
            "requested_via",
        )

    @admin.display(ordering="credential__account__merchant_id")
    def account(self, row: Rotation) -> str:
        return str(row.credential.account)

    @admin.display(ordering="credential__label")
    def label(self, row: Rotation) -> str:
        return row.credential.label

    @admin.display(description="state", ordering="state")
    def state_badge(self, row: Rotation) -> SafeString:
        return badge(row.state)

    @admin.display(description="asked by", ordering="requester__username")
    def asked_by(self, row: Rotation) -> str:
        return requester_name(row.requester, row.requested_via)

    @admin.display(description="asked (UTC)", ordering="created_at")
    def created(self, row: Rotation) -> SafeString:
        return short_moment(row.created_at)

    def name_of(self, row: Rotation) -> str:
        return f"{row.credential.account} · {row.credential.label}"

    def account_of(self, row: Rotation) -> Account:
        return row.credential.account

    def requester_person_of(self, row: Rotation) -> str:
        return row.requester_person

    def summary(self, row: Rotation) -> Facts:
        """The plan, field by field as its digest covers it."""
        plan, credential = row.approved_plan, row.credential
        traffic = (
            f"{plan.proof_count} authentications from {plan.proof_sources} sources, "
            f"soak time {seconds(plan.soak_seconds)}"
        )
        rows: list[tuple[str, Any]] = [
            ("Account", credential.account),
            ("Credential", link(reverse("admin:keyvault_credential_change", args=[credential]), mono(credential))),
            ("Key to be replaced", _key_link(row.predecessor)),
            ("Reason", plan.reason or NOTHING),
            ("Not before", moment(plan.not_before)),
            ("Deadline", moment(plan.deadline)),
            ("Proof", PROOFS[plan.proof]),
            ("Traffic that proves it", traffic if plan.proof is Proof.TRAFFIC else f"not asked for ({traffic})"),
            ("Quiet period", seconds(plan.quiet_seconds)),
            ("Quarantine", seconds(plan.quarantine_seconds)),
            ("The replacement expires in days", plan.expires_in_days or "it does not expire"),
            ("The old key may expire meanwhile", "yes" if plan.predecessor_may_expire else "no"),
            ("Digest of all this (SHA-256)", mono(plan.digest())),
            ("Asked by", self.asked_by(row)),
        ]
        return Facts("The plan", rows)

    def detail(self, request: HttpRequest, row: Rotation) -> Detail:
        told = describe(row, datetime.now(UTC))
        return Detail(
            title=self.name_of(row),
            state=row.state,
            notes=list(_notes(request, row, told["waiting_for"])),
            steps=_steps(row),
            sections=[
                Facts("Where it stands", list(_standing(row))),
                self.summary(row),
                approvals_table(row),
                _users(told["predecessor_users"]),
                Table(
                    "Evidence",
                    ["kind", "when (UTC)", "what was seen"],
                    [
                        [badge(item.kind), short_moment(item.created_at), mono(json.dumps(item.seen, sort_keys=True))]
                        for item in row.evidence.order_by("created_at", "evidence_id")
                    ],
                ),
                Table(
                    "Ledger of side effects",
                    ["step", "key", "state", "began (UTC)", "ended (UTC)", "what came of it"],
                    [
                        [
                            badge(entry.step),
                            mono(entry.key_id or NOTHING),
                            badge(entry.state),
                            short_moment(entry.started_at),
                            short_moment(entry.finished_at),
                            entry.detail or NOTHING,
                        ]
                        for entry in row.ledger.order_by("started_at", "pk")
                    ],
                ),
            ],
        )

    def waiting(self, request: HttpRequest) -> Iterable[Waiting]:
        rows, me = self.get_queryset(request).order_by("created_at"), operator_of(request).person
        asked = rows.filter(state=S.AWAITING_APPROVAL, approval_expires_at__gt=datetime.now(UTC))
        where = f"?state__exact={S.AWAITING_APPROVAL}"
        if may(request, P.ROTATIONS_APPROVE):
            others = self.for_me(request, P.ROTATIONS_APPROVE, asked.exclude(approvals__person=me))
            yield self.waits("Rotations that you may approve", others, where, "act")
        if may(request, P.ROTATIONS_WRITE):
            own = asked.filter(requester_person=me)
            yield self.waits("Rotations asked for by you, not approved yet", own, where)
        yield self.waits("Stalled rotations", rows.filter(state=S.STALLED), f"?state__exact={S.STALLED}", "alarm")

    def line_of(self, row: Rotation) -> Line:
        return Line(
            self.url_of(row), self.name_of(row), row.why or f"asked for by {self.asked_by(row)}", row.entered_at
        )

    def extras_for(self, request: HttpRequest, row: Model) -> Extras | None:
        """The pages of a credential and of a key tell its rotations, and offer to begin one."""
        if not isinstance(row, Credential | Key) or not self.has_view_permission(request):
            return None
        credential = row if isinstance(row, Credential) else row.credential
        rotations = self.get_queryset(request).filter(credential=credential).order_by("-created_at")[:20]
        table = Table(
            "Rotations",
            ["rotation", "state", "old key", "replacement", "asked (UTC)"],
            [
                [
                    link(self.url_of(item), item),
                    badge(item.state),
                    _key_link(item.predecessor),
                    _key_link(item.replacement),
                    short_moment(item.created_at),
                ]
                for item in rotations
            ],
            empty="It was never rotated.",
        )
        is_open = any(S(item.state) not in CLOSED for item in rotations)
        is_usable = credential.kind == KeyKind.PRIVATE and credential.keys.filter(state=KeyState.ACTIVE).exists()
        rotatable = is_usable and not is_open
        if not rotatable or not may(request, P.ROTATIONS_WRITE, credential.account):
            return Extras(sections=[table])
        url = reverse("admin:rotation_rotation_request")
        return Extras(links=[Link("Rotate", f"{url}?credential={credential.pk}")], sections=[table])


def _key_link(key: Key | None) -> SafeString | str:
    if key is None:
        return NOTHING
    return link(reverse("admin:keyvault_key_change", args=[key.key_id]), mono(key))


def _notes(request: HttpRequest, row: Rotation, waiting_for: object) -> Iterable[str]:
    if row.state == S.STALLED:
        yield f"Stalled in {row.get_stalled_from_display()}: {row.why}. Both keys stay as they are."
    elif waiting_for:
        yield f"It waits for {waiting_for}."
    elif row.why:
        yield f"Closed: {row.why}."
    if row.state == S.AWAITING_APPROVAL and row.requester_person == operator_of(request).person:
        yield "You asked for this: it takes a second person to approve it."


def _steps(row: Rotation) -> list[Step]:
    """The way forward with where it stands on it. One that ended early stopped at what it had last reached."""
    times = {
        S.PUBLISHING: row.accepted_at,
        S.AWAITING_PROOF: row.delivered_at,
        S.OVERLAP: row.used_at,
        S.QUARANTINE: row.silent_at,
        S.COMPLETED: row.closed_at if row.state == S.COMPLETED else None,
    }
    way = [state for state in WAY if state is not S.AWAITING_APPROVAL or row.approvals_needed]
    state = S(row.stalled_from) if row.stalled_from and row.state == S.STALLED else row.current_state
    if state not in way:
        reached = [place for place in way if times.get(place) is not None]
        state = reached[-1] if reached else way[0]
    here, ended = way.index(state), row.state == S.COMPLETED
    stopped = row.state in {S.STALLED, S.REJECTED, S.EXPIRED, S.CANCELLED}
    return [
        Step(
            place.value.replace("_", " "),
            "done" if index < here or ended else "ahead" if index > here else "stopped" if stopped else "current",
            times.get(place),
        )
        for index, place in enumerate(way)
    ]


def _standing(row: Rotation) -> Iterable[tuple[str, Any]]:
    """The four facts, each with its own time, and what is about them."""
    yield "Rotation id", mono(row)
    yield "Old key", _key_link(row.predecessor)
    yield "Replacement", _key_link(row.replacement)
    yield "In this state since", moment(row.entered_at)
    for label, at in (
        ("Accepted: every verifier says yes to the replacement", row.accepted_at),
        ("Delivered: the secret backend holds it", row.delivered_at),
        ("Used: proved by acknowledgement or traffic", row.used_at),
        ("Silent: the old key had no traffic for the quiet period", row.silent_at),
    ):
        yield label, moment(at, missing="not yet")
    if row.acknowledged_at is not None:
        yield "Acknowledged by the merchant", moment(row.acknowledged_at)
    if row.collected_at is not None:
        yield "Collected in the console", moment(row.collected_at)
    if row.closed_at is not None:
        yield "Closed", moment(row.closed_at)


def _users(users: Any) -> Table:
    """Who has used the old key, the latest first: whom to talk to when it does not fall silent."""
    return Table(
        "Who still uses the old key",
        ["source", "user agent", "endpoint", "uses", "last seen (UTC)"],
        [
            [
                mono(user["source"]),
                user["user_agent"] or NOTHING,
                user["endpoint"] or NOTHING,
                user["count"],
                short_moment(datetime.fromisoformat(user["last_at"])),
            ]
            for user in users
        ],
        empty="Nobody was seen.",
    )
