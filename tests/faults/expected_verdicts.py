"""The expected verdict of every response, from the audit log: only it states when a key was unusable.

On the same host a revoked key is refused in every request that begins after the revocation has returned. The time of
its audit entry is earlier: it is taken before the transaction.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from keyvault.access.principals import WORKER
from keyvault.backends.base import StoredSecret
from keyvault.domain.keys import KeyState
from keyvault.models import AuditEntry, Credential, Key
from keyvault.services.recording.audit_chain import verify_audit
from keyvault.services.secrets.stored_copies import find_stored
from rotation.domain.states import CLOSED
from rotation.models import Rotation
from tests.faults.results import Result
from tests.faults.traffic import Merchant, VerificationAnswer

_MAKES_UNUSABLE = frozenset({"key.suspended", "key.revoked", "key.compromised", "key.burned", "key.expired"})
_REVOKES = frozenset({"key.revoked", "key.compromised"})
_RESUMES = "key.resumed"
_COMMITTED_WITHIN_SECONDS = 20
"""Maximum time from an entry's time, taken before its transaction, to the commit, in seconds: the database's own
timeout."""

_ERROR = re.compile(r"Traceback \(most recent call last\)|\"level\": \"(?:ERROR|CRITICAL)\"")
_LOST = '"message": "a process no longer reports"'


@dataclass(slots=True)
class KeyHistory:
    """The times at which a key became unusable, and until when it may not have been restored.

    `revoked_by`: when the act that made it unusable had certainly returned, unless it was resumed later.
    `revoked_by_hand_at`: the time of a person's revocation, before its transaction.
    """

    unusable_from: list[float] = field(default_factory=list)
    usable_from: list[float] = field(default_factory=list)
    revoked_by: float | None = None
    revoked_by_hand_at: float | None = None

    def may_refuse(self, answer: VerificationAnswer) -> bool:
        """Return whether the refusal is right.

        A merchant's own request may be refused only if a person had revoked the key: the engine never revokes one that
        is in use. A dry run, which is no use, may be refused if the key was unusable at some moment between request and
        response.
        """
        if not answer.is_dry:
            return self.revoked_by_hand_at is not None and answer.answered_at >= self.revoked_by_hand_at
        spans = zip(self.unusable_from, [*self.usable_from, float("inf")], strict=False)
        return any(answer.answered_at >= begun and answer.sent_at <= ended for begun, ended in spans)

    def may_allow(self, answer: VerificationAnswer) -> bool:
        return self.revoked_by is None or answer.sent_at <= self.revoked_by


@dataclass(frozen=True, slots=True)
class Verdicts:
    """`wrongly_refused` and `wrongly_allowed` must be 0. `unanswered`: no verdict, such as a 503 or no response.

    Right refusals are those of a key that a person had revoked, and of dry runs with an unusable key.
    """

    requests: int
    refused_by_hand: int
    refused_dry: int
    wrongly_refused: tuple[str, ...]
    wrongly_allowed: tuple[str, ...]
    unanswered: tuple[VerificationAnswer, ...]


def judge(answers: Sequence[VerificationAnswer], returned_at: Mapping[str, float]) -> Verdicts:
    """Judge every response. Those without a verdict are listed separately: the experiment may allow them."""
    histories = read_histories(returned_at)
    by_hand, dry, wrong_no, wrong_yes, unanswered = 0, 0, [], [], []
    for each in answers:
        history = histories[each.key_id]
        if each.status in {0, 500, 502, 503, 504}:
            unanswered.append(each)
        elif each.is_yes:
            if not history.may_allow(each):
                wrong_yes.append(
                    f"{_who(each)}: allowed {each.sent_at - (history.revoked_by or 0):.3f} s after its end"
                )
        elif history.may_refuse(each):
            dry += each.is_dry
            by_hand += not each.is_dry
        else:
            wrong_no.append(f"{_who(each)}: {each.status} {each.code}, {_describe_loss(history, each)}")
    return Verdicts(len(answers), by_hand, dry, tuple(wrong_no), tuple(wrong_yes), tuple(unanswered))


def judge_traffic(
    result: Result,
    answers: Sequence[VerificationAnswer],
    outages: Sequence[tuple[float, float]] = (),
    returned_at: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Count every response. Only requests during an outage may get no verdict (503).

    `returned_at`: by key id, when the experiment's own revocation of the key returned.
    """
    verdicts = judge(answers, returned_at)
    result.counts |= {
        "requests": verdicts.requests,
        "refused after a person's change": verdicts.refused_by_hand,
        "dry runs refused": verdicts.refused_dry,
    }
    excused = [each for each in verdicts.unanswered if each.status == 503 and _is_within(each, outages)]
    if outages:
        result.counts["503 in an outage"] = len(excused)
    result.must_be_none("refused that should pass", verdicts.wrongly_refused)
    result.must_be_none("allowed that should not", verdicts.wrongly_allowed)
    others = [each for each in verdicts.unanswered if each not in excused]
    result.must_be_none(
        "without a verdict", [f"{_who(each)}: {each.status} {each.fault}{each.code}" for each in others]
    )


def _is_within(answer: VerificationAnswer, outages: Sequence[tuple[float, float]]) -> bool:
    """Return whether some moment between request and response lies in an outage."""
    return any(answer.answered_at >= began and answer.sent_at <= ended for began, ended in outages)


def judge_end(result: Result, merchants: Sequence[Merchant]) -> None:
    """Check the final state: no rotation is stuck, every merchant has a good key, and the audit log is intact."""
    result.must_be_none("rotations stuck", find_stuck())
    result.must_be_none("credentials without a usable key", find_keyless(merchants))
    result.must_be_none("broken audit", find_broken_audit())


def read_histories(returned_at: Mapping[str, float]) -> defaultdict[str, KeyHistory]:
    """Return the times by key id. A key without an entry in the log was always usable."""
    histories: defaultdict[str, KeyHistory] = defaultdict(KeyHistory)
    turns = _turns_of_keys()
    for row, details in read_audit(event__in=[*_MAKES_UNUSABLE, _RESUMES]):
        at, key_id = row.at.timestamp(), details["key_id"]
        history = histories[key_id]
        committed_at = at + _COMMITTED_WITHIN_SECONDS
        if row.actor != WORKER.actor:
            # A worker's turn may begin between a person's entry and its commit, so it proves nothing about it.
            committed_at = returned_at.get(key_id, committed_at)
        elif at in turns[key_id]:
            # The act is a step of a rotation, whose next step begins after this one has returned.
            committed_at = min([committed_at, *(turn for turn in turns[key_id] if turn > at)])
        if row.event == _RESUMES:
            history.usable_from.append(committed_at)
            history.revoked_by = None
            continue
        if len(history.unusable_from) == len(history.usable_from):
            history.unusable_from.append(at)
            history.revoked_by = committed_at
        if row.event in _REVOKES and row.actor != WORKER.actor:
            history.revoked_by_hand_at = min(at, history.revoked_by_hand_at or at)
    return histories


def _turns_of_keys() -> defaultdict[str, list[float]]:
    """Return by key id the times of the steps that workers made in the rotations of the key: one after the other."""
    keys: defaultdict[str, set[str | None]] = defaultdict(set)
    for rotation_id, *pair in Rotation.objects.values_list("rotation_id", "predecessor_id", "replacement_id"):
        keys[rotation_id].update(pair)
    turns: defaultdict[str, list[float]] = defaultdict(list)
    for row, details in read_audit(event__startswith="rotation.", actor=WORKER.actor):
        for key_id in keys[details.get("rotation_id", "")] - {None}:
            turns[str(key_id)].append(row.at.timestamp())
    return turns


def read_audit(**chosen: object) -> Iterator[tuple[AuditEntry, dict[str, Any]]]:
    """Return the entries with their details, those of a chain in the order of their commits."""
    for row in AuditEntry.objects.filter(**chosen).order_by("chain_id", "sequence"):
        yield row, json.loads(bytes(row.body))["details"]


def _who(answer: VerificationAnswer) -> str:
    at = datetime.fromtimestamp(answer.sent_at, UTC)
    return f"{at:%H:%M:%S.%f} {'dry run' if answer.is_dry else 'request'} with {answer.key_id}"


def _describe_loss(history: KeyHistory, answer: VerificationAnswer) -> str:
    """Describe how long the key had been unusable, or that nothing had made it so."""
    begun = [at for at in history.unusable_from if at <= answer.answered_at]
    return f"{answer.sent_at - begun[-1]:+.3f} s after the engine took it" if begun else "and nothing had taken it away"


def find_keyless(merchants: Sequence[Merchant]) -> list[str]:
    """Return the credentials whose holder reads an invalid key, or that have none or more than two valid keys.

    Credentials with a manual revocation are omitted.
    """
    found = []
    for merchant in merchants:
        credential, before = merchant.credential, None
        while True:
            stored = find_stored(credential)
            active = _list_active(credential)
            # The first result may be outdated, so only two equal results count.
            now_stored = find_stored(credential)
            if (stored and stored.version) == (now_stored and now_stored.version) == before:
                break
            before = now_stored and now_stored.version
        if not 1 <= len(active) <= 2:
            found.append(f"{credential.credential_id}: {len(active)} keys verify")
        if stored is None or stored.labels["key_id"] not in active:
            found.append(f"{credential.credential_id}: {_describe_read(credential, stored)}")
    return found


def _describe_read(credential: Credential, stored: StoredSecret | None) -> str:
    """Describe what the merchant reads, the state of its keys, and its latest rotation."""
    keys = [
        f"{key.key_id} {key.state}" for key in Key.objects.filter(credential=credential).order_by("-created_at")[:3]
    ]
    latest = Rotation.objects.filter(credential=credential).order_by("-created_at").first()
    of = f"{latest.rotation_id} is {latest.state}, {latest.predecessor_id} to {latest.replacement_id}" if latest else ""
    read = "nothing" if stored is None else f"{stored.labels['key_id']} in version {stored.version}"
    return f"the key that the merchant reads does not verify: {read}; {', '.join(keys)}; {of}"


def _list_active(credential: Credential) -> set[str]:
    return set(Key.objects.filter(credential=credential, state=KeyState.ACTIVE).values_list("pk", flat=True))


def find_stuck() -> list[str]:
    """Return the rotations that are not closed."""
    return [
        f"{rotation.rotation_id} is {rotation.state} {rotation.why}".strip()
        for rotation in Rotation.objects.exclude(state__in=CLOSED)
    ]


def find_broken_audit() -> list[str]:
    report = verify_audit()
    return [] if report.first_broken is None else [f"the audit log is broken: {report.first_broken}"]


def judge_logs(
    result: Result, folder: Path, outages: Sequence[tuple[float, float]] = (), *, kills_workers: bool = False
) -> None:
    """Check the logs of all programs. Errors about an outage or a killed worker are expected."""
    for log in sorted(folder.glob("*.log")):
        errors = find_errors(log, outages)
        result.must_be_none("errors in the logs", [line for line in errors if not (kills_workers and _LOST in line)])


def find_errors(log: Path, outages: Sequence[tuple[float, float]] = ()) -> list[str]:
    """Return the log lines of unexpected errors."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return [f"{log.name}: {line[:500]}" for line in lines if _ERROR.search(line) and not _is_of(line, outages)]


def _is_of(line: str, outages: Sequence[tuple[float, float]]) -> bool:
    """Return whether the line was written in an outage; False for a line without a time."""
    try:
        at = datetime.fromisoformat(json.loads(line)["at"]).timestamp()
    except (ValueError, KeyError, TypeError):
        return False
    return any(began <= at <= ended for began, ended in outages)


def find_repeated(*events: str) -> list[str]:
    """Return the rotations for which the audit log has one of these events more than once."""
    seen: defaultdict[tuple[str, str], int] = defaultdict(int)
    for row, details in read_audit(event__in=events):
        seen[details["rotation_id"], row.event] += 1
    return [f"{rotation_id}: {event} {count} times" for (rotation_id, event), count in seen.items() if count > 1]
