"""Changes of keys, tokens, accounts and rules under constant requests, and the responses that are wrong after each.

Each change makes a `Ban`: responses that no verifier may give to a request that was sent after the change returned. A
change whose outcome is unknown, because the database was lost, makes none, and its requests are no longer judged.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

from django.db import DatabaseError, InterfaceError, connections

from keyvault.access.endpoints import EndpointDraft
from keyvault.access.limits import Limit
from keyvault.access.permissions import Permission as P
from keyvault.domain.ids import Subject
from keyvault.domain.keys import KeyKind
from keyvault.domain.revocation import RevocationReason
from keyvault.models import Account, CatalogEndpoint, Change, Key, ServiceToken
from keyvault.services.catalog.endpoints import add_endpoint, restore_endpoint, withdraw_endpoint
from keyvault.services.change_feed.receipts import VerifierProgress, find_receipt
from keyvault.services.keys.lifecycle import resume_key, revoke_key, suspend_key
from keyvault.services.limits.overrides import set_account_limit
from keyvault.services.merchants.merchants import resume_account, suspend_account
from keyvault.services.tokens.service_tokens import revoke_service_token
from tests.factories import grant, have_peppers, make_token, now
from tests.faults.sender import Reply, VerifyRequest, make_request
from tests.rotation import scene

WARM_SECONDS = 0.25
"""Time of frequent requests before a change, in seconds, so that every verifier has cached the verdict."""

LOW = Limit(20, 1)
LITTLE = 50
"""Maximum number of requests that remain of LOW in any process. Far more remain of the previous limit."""


@dataclass(slots=True)
class Ban:
    """Responses that are wrong from `returned_at`, the return of the change, until `ended_at`, before it is undone.

    `complete_at`: when its receipt was known to be complete. `is_notified`: the generation counter notified the
    verifiers of the writer's host. `name` None: all requests. `only`: the affected host; None: each. `bound_seconds`
    None: MAX_STALENESS.
    """

    what: str
    name: str | None
    returned_at: float
    sequence: int | None = None
    is_wrong: Callable[[Reply], bool] = lambda reply: reply.is_yes
    is_notified: bool = True
    only: str | None = None
    bound_seconds: float | None = None
    complete_at: float | None = None
    expired: set[str] = field(default_factory=set)
    ended_at: float = float("inf")


@dataclass(slots=True)
class ChangeTarget:
    """A subject to change. `undo` None: the change cannot be undone."""

    name: str
    subject: Subject
    change: Callable[[], object]
    undo: Callable[[], object] | None = None
    is_wrong: Callable[[Reply], bool] = lambda reply: reply.is_yes
    ban: Ban | None = None


@dataclass(slots=True)
class Subjects:
    """The subjects of an experiment. `good` are never changed. `expiring` expires half an hour from now."""

    requests: dict[str, VerifyRequest]
    good: list[str]
    expiring: str
    victims: list[ChangeTarget]
    others: list[ChangeTarget]


def make_subjects(victims: int, tokens: int) -> Subjects:
    have_peppers()
    token = make_token(P.KEYS_VERIFY, name="gateway")[1]
    requests: dict[str, VerifyRequest] = {}
    place = scene.account("steady")
    good = []
    for number in range(6):
        key, text = scene.issue(place, now(), label=f"good {number}")
        requests[f"good{number}"] = make_request(f"good{number}", text, token)
        good.append(f"good{number}")
    _, ending = scene.issue(place, now() - timedelta(hours=23, minutes=30), label="expiring", expires_in_days=1)
    requests["expiring"] = make_request("expiring", ending, token)
    revoked, others = [], []
    for number in range(victims):
        key, text = scene.issue(scene.account(f"shop{number % 4}"), now(), label=f"victim {number}")
        requests[key.key_id] = make_request(key.key_id, text, token)
        revoked.append(ChangeTarget(key.key_id, ("key", key.key_id), _revoking(key.key_id)))
    for number in range(4):
        key, text = scene.issue(place, now(), label=f"held {number}")
        requests[key.key_id] = make_request(key.key_id, text, token)
        others.append(
            ChangeTarget(
                key.key_id,
                ("key", key.key_id),
                _with_key(suspend_key, P.KEYS_SUSPEND, key.key_id),
                _with_key(resume_key, P.KEYS_RESUME, key.key_id),
            )
        )
    _, steady = scene.issue(place, now(), label="of others")
    for number in range(tokens):
        row, text = make_token(P.KEYS_VERIFY, name=f"gateway {number}")
        requests[row.token_id] = make_request(row.token_id, steady, text)
        others.append(ChangeTarget(row.token_id, ("service_token", row.token_id), _revoking_token(row.token_id)))
    for name, forward, back, wrong in (
        ("halted", _halting(suspend_account), _halting(resume_account), lambda reply: reply.is_yes),
        ("narrow", _limiting(LOW), _limiting(None), lambda reply: reply.is_yes and (reply.remaining or 0) > LITTLE),
    ):
        _, text = scene.issue(scene.account(name), now(), label=name)
        requests[name] = make_request(name, text, token)
        change, undo = _at(name, forward), _at(name, back)
        others.append(ChangeTarget(name, ("account", f"{name}/sandbox"), change, undo, wrong))
    draft = EndpointDraft("faults.list", "GET", "/faults", frozenset({KeyKind.PRIVATE}))
    add_endpoint(grant(scene.admin(), P.CATALOG_WRITE), draft)
    requests["faults.list"] = make_request("faults.list", steady, token, "faults.list")
    others.append(
        ChangeTarget(
            "faults.list",
            ("endpoint", "faults.list"),
            _with_endpoint(withdraw_endpoint),
            _with_endpoint(restore_endpoint),
        )
    )
    return Subjects(requests, good, "expiring", revoked, others)


def _revoking(key_id: str) -> Callable[[], object]:
    def change() -> None:
        key = _key(key_id)
        revoke_key(grant(scene.admin(), P.KEYS_REVOKE, key.credential.account), key, RevocationReason.SUPERSEDED)

    return change


def _with_key(service: Callable[..., object], permission: P, key_id: str) -> Callable[[], object]:
    def change() -> None:
        key = _key(key_id)
        service(grant(scene.admin(), permission, key.credential.account), key)

    return change


def _key(key_id: str) -> Key:
    key: Key = Key.objects.select_related("credential__account__merchant").get(pk=key_id)
    return key


def _revoking_token(token_id: str) -> Callable[[], object]:
    def change() -> None:
        revoke_service_token(grant(scene.admin(), P.TOKENS_WRITE), ServiceToken.objects.get(pk=token_id))

    return change


def _at(merchant_id: str, change: Callable[[Account], object]) -> Callable[[], object]:
    return lambda: change(scene.account(merchant_id))


def _halting(service: Callable[..., object]) -> Callable[[Account], object]:
    return lambda account: service(grant(scene.admin(), P.MERCHANTS_WRITE, account), account)


def _limiting(limit: Limit | None) -> Callable[[Account], object]:
    return lambda account: set_account_limit(grant(scene.admin(), P.LIMITS_WRITE, account), account, limit)


def _with_endpoint(service: Callable[..., object]) -> Callable[[], object]:
    def change() -> None:
        service(grant(scene.admin(), P.CATALOG_WRITE), CatalogEndpoint.objects.get(name="faults.list"))

    return change


# --- changes -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class SubjectChanges:
    """Changes by several threads. `prefer` is called with the name of the next subject.

    `when`: the current cut. `changed_during`: the intervals in which a subject was changed. `doubtful`: names that are
    no longer judged.
    """

    subjects: Subjects
    prefer: Callable[[str], None]
    bans: list[Ban] = field(default_factory=list)
    changed_during: dict[str, list[list[float]]] = field(default_factory=dict)
    doubtful: set[str] = field(default_factory=set)
    when: str = ""
    can_notify: bool = True
    """Whether the generation of the writer's host can be written."""

    count: int = 0
    lost: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def revoke(self, *, is_notified: bool = True, by: Callable[[str], None] | None = None) -> Ban | None:
        """Revoke the next victim after every verifier has cached it; `by` revokes it in another process.

        Return None if the outcome is unknown.
        """
        with self._lock:
            target = self.subjects.victims.pop()
        if by is not None:
            target.change = lambda: by(target.name)
        return self.apply(target, is_notified=is_notified)

    def apply(self, target: ChangeTarget, *, is_notified: bool = True) -> Ban | None:
        self.prefer(target.name)
        time.sleep(WARM_SECONDS)
        self.changed_during.setdefault(target.name, []).append([time.monotonic(), float("inf")])
        could_notify = self.can_notify
        if not self._try(target, target.change):
            return None
        returned_at = time.monotonic()
        self.count += 1
        is_notified = is_notified and could_notify and self.can_notify
        what = f"{self.when}: {' '.join(target.subject)}"
        ban = Ban(what, target.name, returned_at, None, target.is_wrong, is_notified)
        with _trying():
            ban.sequence = _last_sequence(target.subject)
        target.ban = ban
        self.bans.append(ban)
        return ban

    def undo(self, target: ChangeTarget) -> None:
        assert target.ban is not None
        assert target.undo is not None
        target.ban.ended_at, target.ban = time.monotonic(), None
        if self._try(target, target.undo):
            self.count += 1
            self.changed_during[target.name][-1][1] = time.monotonic()

    def _try(self, target: ChangeTarget, change: Callable[[], object]) -> bool:
        try:
            change()
        except (DatabaseError, InterfaceError):
            connections.close_all()
            self.lost += 1
            self.doubtful.add(target.name)
            return False
        return True


def change_at_random(changes: SubjectChanges, rng: random.Random, stop: threading.Event, pause_seconds: float) -> None:
    """Change subjects, and undo the changes that can be undone, until the experiment ends. Runs in its own thread."""
    try:
        while not stop.wait(pause_seconds * 2 * rng.random()):
            others = [each for each in changes.subjects.others if each.name not in changes.doubtful]
            target = rng.choice(others) if others and rng.random() < 0.6 else None
            if target is None:
                if changes.subjects.victims:
                    changes.revoke()
            elif target.ban is not None:
                changes.undo(target)
            else:
                changes.apply(target)
            if target is not None and target.undo is None:
                changes.subjects.others.remove(target)
    finally:
        connections.close_all()


def watch_receipts(changes: SubjectChanges, stop: threading.Event) -> None:
    """Record when the receipt of each change is complete. Runs in its own thread."""
    try:
        while not stop.wait(0.015):
            for ban in [each for each in changes.bans if each.complete_at is None and each.sequence is not None]:
                with _trying():
                    receipt = find_receipt(ban.sequence or 0)
                    if receipt is not None and receipt.is_complete:
                        ban.complete_at = time.monotonic()
                        ban.expired = {each.verifier_id for each in receipt.of(VerifierProgress.EXPIRED)}
    finally:
        connections.close_all()


def _last_sequence(subject: Subject) -> int | None:
    kind, identity = subject
    rows = Change.objects.filter(subject_kind=kind, subject_id=identity)
    return rows.order_by("-sequence").values_list("sequence", flat=True).first()


@contextmanager
def _trying() -> Iterator[None]:
    """Suppress database errors: a later attempt may succeed."""
    try:
        yield
    except (DatabaseError, InterfaceError):
        connections.close_all()
