"""The runbook: for every reason why a rotation does not progress, what happened and what helps. PURE.

A stalled rotation is looked up by its `why`, a waiting one by its `waiting_for`. The console shows the entry on the
rotation's page, with the actions that it names. `rotation/README.md` holds all entries, written by `runbook_markdown`.
"""

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from keyvault.domain.issuance import Delivery
from keyvault.domain.keys import KeyKind
from rotation.domain.events import Event
from rotation.domain.policy import PLAN_UNREADABLE
from rotation.domain.states import WHY


class Remedy(StrEnum):
    """An action on the rotation, by its name in the console, or another page."""

    APPROVE = "approve"
    REJECT = "reject"
    BYPASS = "bypass"
    RESUME = "resume"
    EXTEND = "extend"
    ABORT = "abort"
    ROLL_BACK = "roll-back"
    CONFIRM = "confirm"
    WAIVE = "waive"
    HOLD = "hold"
    RELEASE = "release"
    RETIRE = "retire"
    COLLECT = "collect"
    PREDECESSOR = "predecessor"
    REPLACEMENT = "replacement"
    ACCOUNT = "account"
    REQUEST_AGAIN = "request"


R = Remedy

REMEDY_LABELS = {
    R.APPROVE: "Approve",
    R.REJECT: "Reject",
    R.BYPASS: "Bypass approval (break-glass)",
    R.RESUME: "Resume",
    R.EXTEND: "Extend deadline",
    R.ABORT: "Abort",
    R.ROLL_BACK: "Roll back",
    R.CONFIRM: "Confirm for the merchant",
    R.WAIVE: "Waive a source",
    R.HOLD: "Hold suspended",
    R.RELEASE: "Release held key",
    R.RETIRE: "Set retirement date",
    R.COLLECT: "Collect replacement",
    R.PREDECESSOR: "Old key",
    R.REPLACEMENT: "Replacement",
    R.ACCOUNT: "Account and webhook endpoints",
    R.REQUEST_AGAIN: "Rotate a key",
}
"""Console label of each remedy."""


@dataclass(frozen=True, slots=True)
class Case:
    """The properties of a rotation that its advice depends on.

    `has_old_key`: the predecessor is neither revoked, compromised nor expired. `has_endpoint`: the account has an
    enabled webhook endpoint, so that messages reach the merchant.
    """

    delivery: Delivery
    kind: KeyKind
    has_old_key: bool
    has_endpoint: bool


@dataclass(frozen=True, slots=True)
class RotationGroup:
    """The rotations that a sentence applies to; `name` is the README's name for them."""

    name: str
    includes: Callable[[Case], bool]


def _delivered_by(*deliveries: Delivery) -> Callable[[Case], bool]:
    return lambda case: case.kind is KeyKind.PRIVATE and case.delivery in deliveries


PUBLIC = RotationGroup("Public key", lambda case: case.kind is KeyKind.PUBLIC)
PRIVATE = RotationGroup("Private key", lambda case: case.kind is KeyKind.PRIVATE)
BACKEND = RotationGroup("Secret backend", _delivered_by(Delivery.SECRET_BACKEND))
SHOWN_ONCE = RotationGroup("Shown once", _delivered_by(Delivery.SHOW_ONCE))
SEALED = RotationGroup("Sealed", _delivered_by(Delivery.SEALED))
OLD_KEY_GOOD = RotationGroup("Old key still good", lambda case: case.has_old_key)
OLD_KEY_ENDED = RotationGroup("Old key ended", lambda case: not case.has_old_key)
WITH_ENDPOINT = RotationGroup("With a webhook endpoint", lambda case: case.has_endpoint)
WITHOUT_ENDPOINT = RotationGroup("Without a webhook endpoint", lambda case: not case.has_endpoint)

_HELPS = {R.COLLECT: SHOWN_ONCE}
"""Remedies that help only one group of rotations: a key that the merchant reads elsewhere need not be collected."""


@dataclass(frozen=True, slots=True)
class Only:
    """A sentence that applies to one group of rotations."""

    group: RotationGroup
    text: str


@dataclass(frozen=True, slots=True)
class RunbookEntry:
    """One cause and its remedies.

    `says`: prefixes of the matching `why` or `waiting_for`. `steps`: in the order in which to try them. `besides`:
    additional facts for some rotations. `only_failing`: the wait is normal until an attempt fails.
    """

    title: str
    says: tuple[str, ...]
    happened: str
    steps: tuple[str | Only, ...]
    remedies: tuple[Remedy, ...]
    only_failing: bool = False
    besides: tuple[Only, ...] = ()


@dataclass(frozen=True, slots=True)
class Advice:
    """An entry reduced to what applies to one rotation."""

    title: str
    happened: str
    steps: tuple[str, ...]
    remedies: tuple[Remedy, ...]


_REPLACEMENT_LOCATION = (
    Only(BACKEND, "The replacement waits in the secret backend, at the credential's path."),
    Only(
        SHOWN_ONCE, "The replacement is shown once, in the console, to the operator who collects it for the merchant."
    ),
    Only(
        SEALED,
        "The replacement is sealed to the recipient's key. The API returns it as the rotation's handover, and a "
        "message to the merchant's webhook endpoint, if there is one, holds it, too.",
    ),
    Only(PUBLIC, "The replacement has its own page, where it is shown as often as needed."),
)

_ONLY_THE_REPLACEMENT = "The old key has ended: only the replacement verifies."
_INFORM_MERCHANT = (
    "If there will be no endpoint, inform the merchant yourself where the replacement is: it verifies, and there is "
    "no old key to return to. The rotation stays open until an endpoint accepts the message."
)
_CHECK_COLLECTION = (
    'Check below whether it was "Collected in the console". If not, have it collected and handed to the merchant, '
    "who cannot use it before."
)
_END_ROTATION = (
    Only(OLD_KEY_GOOD, "If the cause cannot be fixed, end the rotation."),
    Only(
        OLD_KEY_ENDED,
        "If the cause cannot be fixed, end the rotation before the replacement is handed over, and reissue the "
        "credential.",
    ),
)


STALLS = (
    RunbookEntry(
        "The deadline has passed",
        ("the deadline has passed",),
        "The deadline passed before the rotation was completed. No key was revoked.",
        (
            Only(
                OLD_KEY_GOOD,
                "Check the timeline, and the list of clients that still use the old key: these must switch.",
            ),
            "Agree on a date with the merchant and extend the deadline: the rotation resumes where it stalled.",
            Only(
                OLD_KEY_GOOD,
                "If the merchant cannot switch, end the rotation: before delivery it is canceled; after delivery it "
                "rolls back, and the old key stays.",
            ),
        ),
        (R.EXTEND, R.ABORT, R.ROLL_BACK),
        besides=(
            Only(OLD_KEY_GOOD, "Every key that verified before still does."),
            Only(
                OLD_KEY_ENDED,
                "The old key has ended since: the replacement is the merchant's only key, and a new deadline lets the "
                "rotation deliver it.",
            ),
        ),
    ),
    RunbookEntry(
        "The webhook message about the replacement was not accepted",
        ("the merchant's webhook endpoint does not accept the message",),
        "The plan requires the merchant's endpoint to accept the message before the replacement counts as delivered. "
        "The endpoint accepted none for about 75 hours, or was disabled.",
        (
            "Open the webhook endpoint from the account's page: its last responses show the cause.",
            "Have it fixed, enable it, and resume the rotation: the message is sent again.",
            Only(OLD_KEY_GOOD, "If there will be no endpoint, roll back, and request a rotation without the webhook."),
            Only(OLD_KEY_ENDED, _INFORM_MERCHANT),
        ),
        (R.ACCOUNT, R.RESUME, R.ROLL_BACK),
        besides=(
            Only(OLD_KEY_GOOD, "The old key is unchanged."),
            Only(OLD_KEY_ENDED, _ONLY_THE_REPLACEMENT),
        ),
    ),
    RunbookEntry(
        "The replacement was suspended",
        (WHY[Event.REPLACEMENT_SUSPENDED],),
        "An operator suspended the new key. Clients that have switched to it are refused.",
        (
            "Find out who suspended it and why: the audit log names them, under the replacement's key id.",
            "If the key is safe to use, resume it on its page, then resume the rotation.",
            Only(
                OLD_KEY_GOOD,
                "If it is not, revoke it on its page or report it compromised: the rotation is then canceled "
                "automatically and the old key stays. If only the rotation is unwanted, end it.",
            ),
            Only(
                OLD_KEY_ENDED,
                "If it is not, revoke it on its page or report it compromised: the rotation is then canceled "
                "automatically. Reissue the credential after that, from its page.",
            ),
        ),
        (R.REPLACEMENT, R.RESUME, R.ABORT, R.ROLL_BACK),
        besides=(
            Only(OLD_KEY_GOOD, "The old key is unchanged."),
            Only(OLD_KEY_ENDED, "The old key has ended, too: neither key verifies."),
        ),
    ),
    RunbookEntry(
        "The old key was suspended",
        (WHY[Event.PREDECESSOR_SUSPENDED],),
        "An operator suspended the old key before it was due for quarantine. Clients that have not switched are "
        "refused.",
        (
            "Find out who suspended it and why: the audit log names them, under the old key's id.",
            "If the key is safe to use, resume it on its page, then resume the rotation.",
            (
                "If it must not be used again, revoke it on its page. If the replacement is delivered, the rotation "
                "then completes automatically. If it is made but not delivered, resume the rotation, too, so that it "
                "is delivered. If none is made, the rotation is canceled: reissue the credential from its page."
            ),
        ),
        (R.PREDECESSOR, R.RESUME, R.ABORT, R.ROLL_BACK),
    ),
    RunbookEntry(
        "The quarantine was lifted by hand",
        (WHY[Event.QUARANTINE_LIFTED],),
        "An operator resumed the key that the rotation had suspended. Both keys verify.",
        (
            "Find out who resumed it and for which client: a client still needs it, and is listed below.",
            Only(
                PRIVATE,
                "When it has switched, resume the rotation: it waits for silence again, and then quarantines again.",
            ),
            Only(PUBLIC, "When it has switched, resume the rotation: it quarantines again immediately."),
            "If it cannot switch, roll back.",
        ),
        (R.PREDECESSOR, R.RESUME, R.ROLL_BACK),
    ),
    RunbookEntry(
        "A step kept failing",
        ("a step kept failing",),
        "The same step failed 12 times in a row, while the backend was available. No valid key was suspended or "
        "revoked.",
        (
            "Read the error: it is shown above, and with each attempt in the ledger below.",
            "Fix what it names, in the secret backend or in the access to it.",
            "Resume the rotation. A partly completed step is found and finished, never repeated.",
            *_END_ROTATION,
        ),
        (R.RESUME, R.ABORT, R.ROLL_BACK),
    ),
    RunbookEntry(
        "The secret backend denies access",
        ("the secret backend denies access",),
        "The worker logged in again and retried once, and was denied again: a policy is too narrow, a role is missing, "
        "or this host lacks a login. No valid key was suspended or revoked. Other rotations on that backend fail, too.",
        (
            "Run manage.py check_vault on the worker's host: it names the path or the login, and the fix.",
            "Fix it; manage.py bootstrap_vault rewrites policies and roles, and leaves correct ones unchanged.",
            "Resume the rotation. A partly completed step is found and finished, never repeated.",
            *_END_ROTATION,
        ),
        (R.RESUME, R.ABORT, R.ROLL_BACK),
    ),
    RunbookEntry(
        "The secret backend holds an unknown version",
        ("The secret backend holds a value at this credential's path that Keyvault did not write",),
        "Another writer wrote to the credential's path. That version is never overwritten: the merchant may use it.",
        (
            "Find out in the backend's own log who wrote the newest version at the credential's path.",
            "Have that version deleted there, or moved to a path of its writer's own.",
            "Resume the rotation. Ending it requires the same cleanup first.",
        ),
        (R.RESUME, R.ABORT, R.ROLL_BACK),
    ),
    RunbookEntry(
        "This release cannot read the plan",
        (PLAN_UNREADABLE,),
        "The plan has a field or a value of a newer release, or names a time zone that the worker's host does not "
        "know. No valid key was suspended or revoked. Other rotations continue.",
        (
            "Read the reason: it names the field, the value or the zone.",
            "Run the newest release on every worker, or install the zone (package tzdata), then resume the rotation.",
            (
                "If that is not possible, abort it before delivery and request another one. After delivery only a "
                "release that reads its plan can return it to the old key."
            ),
        ),
        (R.RESUME, R.ABORT),
    ),
    RunbookEntry(
        "The window has no further opening",
        ("the window has no further opening",),
        "The hours, weekdays and blackouts of the approved plan leave no time to begin. Nothing has begun.",
        (
            "Abort it. An approved plan is never changed.",
            "Request another one, with a window that opens.",
        ),
        (R.ABORT, R.REQUEST_AGAIN),
    ),
)
"""An entry for every reason to stall."""

UNKNOWN = RunbookEntry(
    "It stalled",
    (),
    "It stalled for the reason shown above. No valid key was suspended or revoked.",
    ("Fix what the reason names, then resume it.", *_END_ROTATION),
    (R.RESUME, R.EXTEND, R.ABORT, R.ROLL_BACK),
)
"""The entry for a reason that no other entry matches."""

WAITS = (
    RunbookEntry(
        "An operator holds the key in quarantine",
        ("an operator to release the held key",),
        "The key stays suspended: the rotation neither resumes nor revokes it. After the release the quarantine begins "
        "again.",
        (
            "Find out who holds it and why: the audit log names them, under the rotation's id.",
            "Release it once that is settled. To end the key now, revoke it on its own page.",
        ),
        (R.RELEASE, R.PREDECESSOR),
    ),
    RunbookEntry(
        "It is not approved yet",
        ("approval by a second person",),
        "It begins once a person other than the requester has approved exactly this plan. Without approval it expires.",
        (
            "Ask an approver: the request is on their overview.",
            (
                "If none can be reached and it is urgent, bypass the approval: that is break-glass, raises an alarm, "
                "and stays listed until reviewed."
            ),
        ),
        (R.APPROVE, R.BYPASS, R.REJECT, R.ABORT),
    ),
    RunbookEntry(
        "Not every verifier accepts the replacement yet",
        ("every verifier to accept the replacement",),
        "A verifier has not loaded the new key yet. The key is delivered once all live verifiers have loaded it.",
        (
            "Wait: the rotation continues automatically.",
            "If the wait persists, check that the verifiers run and reach the database.",
        ),
        (R.ABORT,),
    ),
    RunbookEntry(
        "A step that needs the secret backend fails",
        ("the secret backend to", "the replacement to be made"),
        "A step that needs the secret backend, or the peppers, is retried. While the backend is down no attempt is "
        "used up: the rotation continues within a minute of its return.",
        (
            "Read the last error below.",
            "Fix the backend, or the connection to it. Nothing has to be resumed.",
        ),
        (),
        only_failing=True,
        besides=(
            Only(OLD_KEY_GOOD, "Every key that verified before still does."),
            Only(OLD_KEY_ENDED, "The old key has ended: the merchant has no key until the replacement is delivered."),
        ),
    ),
    RunbookEntry(
        "The merchant's webhook endpoint does not accept the message",
        ("the merchant's webhook endpoint to accept the message",),
        "The replacement is ready, but the plan counts it as delivered only once the merchant's endpoint has accepted "
        "the message. Messages are retried for about 75 hours; 410 disables an endpoint.",
        (
            "Open the webhook endpoint from the account's page: its last responses show the cause.",
            (
                "Have the merchant fix it, then enable it again: messages given up in the last 7 days are sent again, "
                "and the rotation continues automatically."
            ),
            Only(OLD_KEY_GOOD, "If it cannot be fixed, roll back and request a rotation without the webhook."),
            Only(OLD_KEY_ENDED, _INFORM_MERCHANT),
        ),
        (R.ACCOUNT, R.ROLL_BACK),
        besides=(*_REPLACEMENT_LOCATION, Only(OLD_KEY_ENDED, _ONLY_THE_REPLACEMENT)),
    ),
    RunbookEntry(
        "The merchant does not use the replacement yet",
        ("traffic on the replacement", "the merchant to acknowledge"),
        "The replacement is not proved in use. No key is revoked before it is.",
        (
            Only(SHOWN_ONCE, _CHECK_COLLECTION),
            Only(SEALED, "Have the merchant open it with the private key that the recipient's key belongs to."),
            Only(
                WITH_ENDPOINT,
                "Ask the merchant to switch. A message to their webhook endpoint reminds them at 25, 50 and 75 percent "
                "of the time to the deadline.",
            ),
            Only(
                WITHOUT_ENDPOINT,
                "Tell the merchant where the replacement is, and ask them to switch. No message reminds them: the "
                "account has no enabled webhook endpoint.",
            ),
            "Both keys verify. Extend the deadline before it passes, if they need longer.",
            "For a credential without traffic, an operator may confirm instead.",
        ),
        (R.COLLECT, R.CONFIRM, R.EXTEND, R.ROLL_BACK),
        besides=_REPLACEMENT_LOCATION,
    ),
    RunbookEntry(
        "It waits for an operator's confirmation",
        ("an operator to confirm",),
        "Traffic cannot prove that this replacement is in use.",
        (
            Only(SHOWN_ONCE, _CHECK_COLLECTION),
            Only(
                PUBLIC, "Ask the merchant whether the replacement is in use, that is shipped in their pages and apps."
            ),
            Only(PRIVATE, "Ask the merchant whether they will use the replacement."),
            "Confirm it for them, and state who informed you and how.",
        ),
        (R.COLLECT, R.CONFIRM, R.ROLL_BACK),
        besides=(
            Only(PUBLIC, "Shipped apps hold a public key."),
            Only(PRIVATE, "The credential has no traffic."),
            *_REPLACEMENT_LOCATION,
        ),
    ),
    RunbookEntry(
        "The replacement is in use, but not for long enough",
        ("the replacement to be in use for its soak time",),
        "The traffic on it suffices; the plan requires it to last for the soak time.",
        ("Wait: the rotation continues automatically.",),
        (R.ROLL_BACK,),
    ),
    RunbookEntry(
        "A key is still in use, or its silence is not proved yet",
        ("silence of ",),
        "The rotation waits for each source of the key that is being retired. A source that has switched to the other "
        "key is finished once it has not used this one for the quiet period and its own longest gap, because another "
        "of its hosts may not have switched. Any other one must be silent for the quiet period and, in production, "
        "for twice its longest gap. Each use restarts its time. Only time for which every verifier has reported its "
        "uses counts.",
        (
            (
                "Check below which sources it waits for: source, network, user agent, endpoint, last seen. Those "
                "marked as switched need nothing. The others have not switched."
            ),
            Only(PRIVATE, "Until the quarantine begins both keys verify. Extend the deadline if they need longer."),
            Only(
                PRIVATE,
                "A source can be waived by name if it will not use the key again or was seen only once (all its "
                "uses are within 24 hours). If it calls with the key after that, it is refused.",
            ),
        ),
        (R.EXTEND, R.WAIVE, R.ROLL_BACK),
    ),
    RunbookEntry(
        "The quarantine has not ended yet",
        ("the quarantine of ",),
        "The key that is being retired is suspended: each request with it is refused. It is revoked at the end of the "
        "quarantine.",
        (
            "Wait: the rotation continues automatically.",
            Only(
                PRIVATE,
                "An attempt by a source that used the key before begins the quarantine again. The first one reinstates "
                "the old key, if the plan says so: have this client switch.",
            ),
            Only(
                PRIVATE,
                "An attempt by an unknown source raises an alarm: the key may have leaked. See below who was refused. "
                "If the merchant does not know this client, report the key as compromised on its page.",
            ),
            Only(
                PUBLIC,
                "No traffic makes a public key valid again after its retirement date: clients must switch.",
            ),
            "Hold the key suspended if you need more time: the rotation then neither resumes nor revokes it.",
        ),
        (R.HOLD, R.ROLL_BACK),
    ),
    RunbookEntry(
        "The key that stays was not used last",
        ("the replacement to be used after", "the predecessor to be used after"),
        "The key that is being retired was used later than the one that stays: a client has not switched, or both keys "
        "are silent since. An outage, or a pause of the merchant, does not prove a switch.",
        (
            "Check below who uses the key that is being retired: these clients have not switched.",
            "If both are silent, wait for traffic, or have the merchant call once with the key that stays.",
            "Extend the deadline if that takes longer.",
            "In a rollback without traffic: confirm for the merchant that they use the old key.",
        ),
        (R.EXTEND, R.CONFIRM, R.ROLL_BACK),
    ),
    RunbookEntry(
        "No verifier reports",
        ("a verifier that reports uses",),
        "Silence is observed, not assumed: it needs a process that verifies keys and reports their uses.",
        ("Start the service, or find out why it cannot write its reports to the database.",),
        (),
    ),
    RunbookEntry(
        "The merchant or the account is suspended",
        ("the merchant or the account to be resumed",),
        "Clients of a suspended merchant stop without having switched, so their silence proves nothing. It counts from "
        "the resumption on, and so does a quarantine.",
        (
            "Resume the merchant or the account when the reason of the suspension has ended.",
            "Extend the deadline before it passes, if the suspension lasts longer.",
        ),
        (R.ACCOUNT, R.EXTEND),
    ),
    RunbookEntry(
        "The old public key waits for its retirement date",
        ("a retirement date for the old public key", "the retirement date of the old public key"),
        "Shipped apps hold a public key for months. Only an approved date retires it; until then both keys verify, and "
        "no alarm is raised.",
        (
            "Check below which shops and app versions still use it.",
            "Set the date, or another one; where the environment requires it, a second person approves it.",
        ),
        (R.RETIRE, R.ROLL_BACK),
    ),
)
"""An entry for every wait that a person can influence."""


_WIDTH = 118


def find_stall(why: str) -> RunbookEntry:
    """Return the entry for a stalled rotation; `UNKNOWN` for a reason that no entry matches."""
    return next(_matching(STALLS, why), UNKNOWN)


def find_wait(waiting_for: str, *, is_failing: bool) -> RunbookEntry | None:
    """Return the entry for a wait; None: it waits for a time or for its next turn.

    `is_failing`: the last attempt of its step failed.
    """
    entry = next(_matching(WAITS, waiting_for), None)
    return None if entry is not None and entry.only_failing and not is_failing else entry


def fit_advice(entry: RunbookEntry, case: Case) -> Advice:
    """Reduce the entry to what applies to such a rotation."""
    besides = (each.text for each in entry.besides if each.group.includes(case))
    steps = (_text_for(step, case) for step in entry.steps)
    remedies = (each for each in entry.remedies if each not in _HELPS or _HELPS[each].includes(case))
    return Advice(
        entry.title, " ".join((entry.happened, *besides)), tuple(step for step in steps if step), tuple(remedies)
    )


def _text_for(step: str | Only, case: Case) -> str:
    if isinstance(step, str):
        return step
    return step.text if step.group.includes(case) else ""


def _matching(entries: tuple[RunbookEntry, ...], text: str) -> Iterator[RunbookEntry]:
    return (entry for entry in entries if text.startswith(entry.says))


def runbook_markdown() -> str:
    """Return all entries for the README: stalls first, then waits."""
    return "\n".join(
        [
            "### The rotation is stalled",
            "",
            *(line for entry in STALLS for line in _lines(entry)),
            "### The rotation waits",
            "",
            *(line for entry in WAITS for line in _lines(entry)),
        ]
    )


def _lines(entry: RunbookEntry) -> Iterator[str]:
    yield f"#### {entry.title}"
    yield from textwrap.wrap(f"Reason: {', '.join(f'`{text.strip()} …`' for text in entry.says)}", _WIDTH)
    yield ""
    yield from textwrap.wrap(entry.happened, _WIDTH)
    yield ""
    for each in entry.besides:
        yield from textwrap.wrap(f"- {_named(each)}", _WIDTH, subsequent_indent="  ")
    if entry.besides:
        yield ""
    for place, step in enumerate(entry.steps, 1):
        yield from textwrap.wrap(f"{place}. {_named(step)}", _WIDTH, subsequent_indent="   ")
    yield ""
    if entry.remedies:
        labels = ", ".join(_labeled(remedy) for remedy in entry.remedies)
        yield from textwrap.wrap(f"In the console: {labels}.", _WIDTH)
        yield ""


def _labeled(remedy: Remedy) -> str:
    label = REMEDY_LABELS[remedy]
    return f"{label} ({_HELPS[remedy].name.lower()})" if remedy in _HELPS else label


def _named(text: str | Only) -> str:
    return text if isinstance(text, str) else f"*{text.group.name}*: {text.text}"
