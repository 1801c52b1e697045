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
    RETIRE = "retire"
    COLLECT = "collect"
    PREDECESSOR = "predecessor"
    REPLACEMENT = "replacement"
    ACCOUNT = "account"
    ASK_AGAIN = "request"


R = Remedy

REMEDY_LABELS = {
    R.APPROVE: "Approve",
    R.REJECT: "Reject",
    R.BYPASS: "Begin without the second person",
    R.RESUME: "Resume",
    R.EXTEND: "Extend the deadline",
    R.ABORT: "Abort",
    R.ROLL_BACK: "Roll back",
    R.CONFIRM: "Confirm for the merchant",
    R.RETIRE: "Set the retirement date",
    R.COLLECT: "Collect the replacement",
    R.PREDECESSOR: "The old key's page",
    R.REPLACEMENT: "The replacement's page",
    R.ACCOUNT: "The account's page, with its webhook endpoints",
    R.ASK_AGAIN: "Rotate a key",
}
"""Console label of each remedy."""


@dataclass(frozen=True, slots=True)
class Case:
    """The properties of a rotation that its advice depends on.

    `has_old_key`: the predecessor is neither revoked, compromised nor expired.
    """

    delivery: Delivery
    kind: KeyKind
    has_old_key: bool


@dataclass(frozen=True, slots=True)
class Group:
    """The rotations that a sentence applies to; `name` is the README's name for them."""

    name: str
    includes: Callable[[Case], bool]


def _delivered_by(*deliveries: Delivery) -> Callable[[Case], bool]:
    return lambda case: case.kind is KeyKind.PRIVATE and case.delivery in deliveries


PUBLIC = Group("Public key", lambda case: case.kind is KeyKind.PUBLIC)
PRIVATE = Group("Private key", lambda case: case.kind is KeyKind.PRIVATE)
BACKEND = Group("Secret backend", _delivered_by(Delivery.SECRET_BACKEND))
SHOWN_ONCE = Group("Shown once", _delivered_by(Delivery.SHOW_ONCE))
SEALED = Group("Sealed", _delivered_by(Delivery.SEALED))
OLD_KEY_GOOD = Group("Old key still good", lambda case: case.has_old_key)
OLD_KEY_ENDED = Group("Old key ended", lambda case: not case.has_old_key)


@dataclass(frozen=True, slots=True)
class Only:
    """A sentence that applies to one group of rotations."""

    group: Group
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


_WHERE_IT_IS = (
    Only(BACKEND, "The replacement waits in the secret backend, at the credential's path."),
    Only(SHOWN_ONCE, "The replacement is shown once, in the console, to whoever collects it for the merchant."),
    Only(
        SEALED,
        "The replacement is sealed to the recipient's key: the rotation's handover in the API holds it, and so does "
        "the message to the merchant's webhook endpoint.",
    ),
    Only(PUBLIC, "The replacement has its own page, where it is shown as often as anybody needs it."),
)

_ONLY_THE_REPLACEMENT = "The old key has ended: only the replacement verifies."
_TELL_THEM_YOURSELF = (
    "Where there will be no endpoint, tell the merchant yourself where the replacement is: it verifies, and there is "
    "no old key to go back to. The rotation stays open until an endpoint takes the message."
)
_SEE_THAT_IT_WAS_COLLECTED = (
    'See below whether it was "Collected in the console". If not, have it collected and brought to the merchant: '
    "nobody can use what nobody was given."
)
_END_IT = (
    Only(OLD_KEY_GOOD, "Where it cannot be mended, end it."),
    Only(
        OLD_KEY_ENDED, "Where it cannot be mended, end it while nobody has the replacement, and reissue the credential."
    ),
)


STALLS = (
    RunbookEntry(
        "The deadline has passed",
        ("the deadline has passed",),
        "The deadline came before the rotation was done. Nothing was taken away for that.",
        (
            Only(
                OLD_KEY_GOOD,
                "See below how far it came, and who still uses the old key: these are the places to switch.",
            ),
            "Agree on a date with the merchant and extend the deadline: it goes on where it stalled.",
            Only(
                OLD_KEY_GOOD,
                "Where the merchant cannot switch, end it: before delivery nothing is left of it; after delivery it "
                "rolls back, and the old key stays.",
            ),
        ),
        (R.EXTEND, R.ABORT, R.ROLL_BACK),
        besides=(
            Only(OLD_KEY_GOOD, "Whatever verified before still does."),
            Only(
                OLD_KEY_ENDED,
                "The old key has ended since: the merchant has nothing but the replacement, and a new deadline lets it "
                "come.",
            ),
        ),
    ),
    RunbookEntry(
        "Nobody takes the news of the replacement",
        ("the merchant's webhook endpoint does not take the news",),
        "The plan wants the merchant's endpoint to take the message before the replacement counts as delivered, and "
        "it took none for about 75 hours, or was disabled.",
        (
            "Open the webhook endpoint, from the account's page: its last answers say what is wrong.",
            "Have it mended, enable it, and resume the rotation: the message is sent anew.",
            Only(OLD_KEY_GOOD, "Where there will be no endpoint, roll back, and ask again without the webhook."),
            Only(OLD_KEY_ENDED, _TELL_THEM_YOURSELF),
        ),
        (R.ACCOUNT, R.RESUME, R.ROLL_BACK),
        besides=(
            Only(OLD_KEY_GOOD, "The old key is as it was."),
            Only(OLD_KEY_ENDED, _ONLY_THE_REPLACEMENT),
        ),
    ),
    RunbookEntry(
        "The replacement was suspended",
        (WHY[Event.REPLACEMENT_SUSPENDED],),
        "Somebody suspended the new key by hand. Whoever has switched to it is refused.",
        (
            "Find out who suspended it, and ask them why: the audit log tells, under the replacement's key id.",
            "If it is good, resume the key on its page, then resume the rotation.",
            Only(
                OLD_KEY_GOOD,
                "If it is not, revoke it on its page or report it compromised: the rotation is then cancelled by "
                "itself and the old key stays. If only the rotation is unwanted, end it.",
            ),
            Only(
                OLD_KEY_ENDED,
                "If it is not, revoke it on its page or report it compromised: the rotation is then cancelled by "
                "itself. Reissue the credential after that, from its page.",
            ),
        ),
        (R.REPLACEMENT, R.RESUME, R.ABORT, R.ROLL_BACK),
        besides=(
            Only(OLD_KEY_GOOD, "The old key is as it was."),
            Only(OLD_KEY_ENDED, "The old key has ended, too: nobody gets in with either."),
        ),
    ),
    RunbookEntry(
        "The old key was suspended",
        (WHY[Event.PREDECESSOR_SUSPENDED],),
        "Somebody suspended the old key by hand, before it was due for quarantine. Whoever has not switched is "
        "refused.",
        (
            "Find out who suspended it, and ask them why: the audit log tells, under the old key's id.",
            "If it may go on, resume the key on its page, then resume the rotation.",
            (
                "If it must not be used again, revoke it on its page. With the replacement delivered, the rotation "
                "then ends by itself and the replacement stays. With one made and not delivered, resume the rotation "
                "too, so that it comes. With none made, the rotation is cancelled: reissue the credential from its "
                "page."
            ),
        ),
        (R.PREDECESSOR, R.RESUME, R.ABORT, R.ROLL_BACK),
    ),
    RunbookEntry(
        "The quarantine was lifted by hand",
        (WHY[Event.QUARANTINE_LIFTED],),
        "Somebody resumed the key that the rotation had suspended. Both keys verify.",
        (
            "Find out who resumed it and for whom: somebody still needed it, and stands below among its users.",
            Only(
                PRIVATE,
                "When they have switched, resume the rotation: it waits for silence anew, and then quarantines again.",
            ),
            Only(PUBLIC, "When they have switched, resume the rotation: it quarantines again at once."),
            "Where they cannot switch, roll back.",
        ),
        (R.PREDECESSOR, R.RESUME, R.ROLL_BACK),
    ),
    RunbookEntry(
        "A step kept failing",
        ("a step kept failing",),
        "The same step failed a dozen times in a row, and not because the backend was away. No key that verified was "
        "taken away.",
        (
            "Read the error: it stands above, and with each try in the ledger below.",
            "Mend what it names, in the secret backend or in our access to it.",
            "Resume the rotation. A step that was done in part is found and finished, never done twice.",
            *_END_IT,
        ),
        (R.RESUME, R.ABORT, R.ROLL_BACK),
    ),
    RunbookEntry(
        "The secret backend refuses us",
        ("the secret backend refuses us",),
        "The worker logged in anew and tried once more, and was refused again: a policy is too narrow, a role is gone, "
        "or this host lacks a login. No key that verified was taken away, and every other rotation there will meet the "
        "same.",
        (
            "Run manage.py vault_doctor on the worker's host: it names the path or the login, and how to mend it.",
            "Mend it; manage.py vault_bootstrap writes policies and roles anew, and changes nothing that is right.",
            "Resume the rotation. A step that was done in part is found and finished, never done twice.",
            *_END_IT,
        ),
        (R.RESUME, R.ABORT, R.ROLL_BACK),
    ),
    RunbookEntry(
        "The secret backend holds something that is not ours",
        ("The secret backend holds something at this credential's place that Keyvault did not write",),
        "Somebody else wrote to the credential's path. It is never overwritten: it may be what the merchant runs on.",
        (
            "Find out in the backend's own log who wrote the newest version at the credential's path.",
            "Have that version deleted there, or moved to a path that is theirs.",
            "Resume the rotation. Ending it takes the same clearing first.",
        ),
        (R.RESUME, R.ABORT, R.ROLL_BACK),
    ),
    RunbookEntry(
        "This release cannot read the plan",
        (PLAN_UNREADABLE,),
        "The plan has a field or a value of a newer release, or names a time zone that the worker's host does not "
        "know. Both keys verify. Other rotations go on.",
        (
            "Read the reason: it names the field, the value or the zone.",
            "Run the newest release on every worker, or install the zone (package tzdata), then resume the rotation.",
            (
                "Where that cannot be, abort it before delivery and ask for another one. After delivery it goes back "
                "only with a release that reads its plan."
            ),
        ),
        (R.RESUME, R.ABORT),
    ),
    RunbookEntry(
        "Its window does not open any more",
        ("its window does not open any more",),
        "The hours, weekdays and blackouts of the approved plan leave no time in which it may begin. Nothing was "
        "begun.",
        (
            "Abort it. A plan that was approved is never changed.",
            "Ask for another one, with a window that opens.",
        ),
        (R.ABORT, R.ASK_AGAIN),
    ),
)
"""An entry for every reason to stall."""

UNKNOWN = RunbookEntry(
    "It stalled",
    (),
    "For the reason that stands above. No key that verified was taken away.",
    ("Mend what the reason names, then resume it.", *_END_IT),
    (R.RESUME, R.EXTEND, R.ABORT, R.ROLL_BACK),
)
"""The entry for a reason that no other entry matches."""

WAITS = (
    RunbookEntry(
        "Nobody has approved it yet",
        ("approval by a second person",),
        "It begins once another person than the one who asked has approved exactly this plan. Unapproved, it expires.",
        (
            "Ask an approver: it stands on their front page.",
            (
                "Where nobody can be reached and it cannot wait, begin it without the second person: that is "
                "break-glass, raises an alarm, and stays in sight until it was reviewed."
            ),
        ),
        (R.APPROVE, R.BYPASS, R.REJECT, R.ABORT),
    ),
    RunbookEntry(
        "Not every verifier would accept the replacement",
        ("every verifier to accept the replacement",),
        "A verifier has not heard of the new key yet. It is delivered once all have, or are too old to count.",
        (
            "Wait: it goes on by itself.",
            "If it lasts, see that the verifiers run and reach the database.",
        ),
        (R.ABORT,),
    ),
    RunbookEntry(
        "The secret backend does not take it",
        ("the secret backend to", "the replacement to be made"),
        "A step that needs the secret backend, or our peppers, is tried again and again. While the backend is away "
        "nothing is used up: it goes on within a minute of its return.",
        (
            "See the last error below.",
            "Mend the backend, or our way to it. Nothing has to be resumed.",
        ),
        (),
        only_failing=True,
        besides=(
            Only(OLD_KEY_GOOD, "Whatever verified before still does."),
            Only(OLD_KEY_ENDED, "The old key has ended: the merchant has no key until the replacement is delivered."),
        ),
    ),
    RunbookEntry(
        "The merchant's webhook endpoint does not take the news",
        ("the merchant's webhook endpoint to take the news",),
        "The replacement is ready, but the plan counts it as delivered only once the merchant's endpoint has taken the "
        "message. Messages are tried again for about 75 hours; 410 disables an endpoint.",
        (
            "Open the webhook endpoint, from the account's page: its last answers say what is wrong.",
            (
                "Have the merchant mend it, then enable it again: what was given up in the last 7 days is sent anew, "
                "and the rotation goes on by itself."
            ),
            Only(OLD_KEY_GOOD, "Where it cannot be mended, roll back and ask again without the webhook."),
            Only(OLD_KEY_ENDED, _TELL_THEM_YOURSELF),
        ),
        (R.ACCOUNT, R.ROLL_BACK),
        besides=(*_WHERE_IT_IS, Only(OLD_KEY_ENDED, _ONLY_THE_REPLACEMENT)),
    ),
    RunbookEntry(
        "The merchant has not taken the replacement up",
        ("traffic on the replacement", "the merchant to acknowledge"),
        "The replacement is not proved in use. Nothing is taken away before it is.",
        (
            Only(SHOWN_ONCE, _SEE_THAT_IT_WAS_COLLECTED),
            Only(SEALED, "Have the merchant open it with the private key that the recipient's key belongs to."),
            "Tell the merchant to switch. They are reminded at 25, 50 and 75 percent of the time to the deadline.",
            "Both keys verify. Extend the deadline before it passes, if they need longer.",
            "Of a credential that nobody uses, an operator may confirm instead.",
        ),
        (R.COLLECT, R.CONFIRM, R.EXTEND, R.ROLL_BACK),
        besides=_WHERE_IT_IS,
    ),
    RunbookEntry(
        "It waits for an operator's word",
        ("an operator to confirm",),
        "No traffic can prove this one.",
        (
            Only(SHOWN_ONCE, _SEE_THAT_IT_WAS_COLLECTED),
            Only(
                PUBLIC, "Ask the merchant whether the replacement is in use, that is shipped in their pages and apps."
            ),
            Only(PRIVATE, "Ask the merchant whether the replacement is what they will use."),
            "Confirm it for them, and say who told you and how.",
        ),
        (R.COLLECT, R.CONFIRM, R.ROLL_BACK),
        besides=(
            Only(PUBLIC, "A public key sits in shipped apps."),
            Only(PRIVATE, "Nobody uses the credential."),
            *_WHERE_IT_IS,
        ),
    ),
    RunbookEntry(
        "The replacement is in use, but not for long enough",
        ("the replacement to be in use for its soak time",),
        "The traffic on it suffices; the plan wants it to last for the soak time.",
        ("Wait: it goes on by itself.",),
        (R.ROLL_BACK,),
    ),
    RunbookEntry(
        "A key is still in use, or its silence is not seen yet",
        ("silence of ",),
        "Each use of the key that is to go starts the time of silence anew, and only what every verifier has reported "
        "counts.",
        (
            (
                "See below who still uses it: source, network, user agent, endpoint, last seen. These places have not "
                "switched."
            ),
            Only(PRIVATE, "Until the quarantine begins both keys verify. Extend the deadline if they need longer."),
            Only(
                PRIVATE,
                "During the quarantine, attempts of a known source reinstate the old key once, if the plan says so; "
                "those of a stranger raise an alarm.",
            ),
            Only(PUBLIC, "Traffic never brings back a public key whose date has come: whoever uses it has to switch."),
        ),
        (R.EXTEND, R.ROLL_BACK),
    ),
    RunbookEntry(
        "The key that is to stay was not used last",
        ("the replacement to be used after", "the predecessor to be used after"),
        "The key that is to go was used later than the one that is to stay: somebody has not switched, or both are "
        "silent since. An outage, or a pause of the merchant, is no sign that they have switched.",
        (
            "See below who uses the key that is to go: these places have not switched.",
            "Where both are silent, wait for the traffic to come back, or have them call once with the key that stays.",
            "Extend the deadline if that takes longer.",
            "On the way back, where nobody calls: confirm for the merchant that they are on the old key.",
        ),
        (R.EXTEND, R.CONFIRM, R.ROLL_BACK),
    ),
    RunbookEntry(
        "No verifier reports",
        ("a verifier that reports uses",),
        "Silence is observed, not assumed: without a process that verifies and reports, nothing is known.",
        ("Start the service, or see why it cannot write its reports to the database.",),
        (),
    ),
    RunbookEntry(
        "The old public key waits for its date",
        ("a date on which the old public key is retired", "the date on which the old public key is retired"),
        "Shipped apps hold a public key for months. It is retired on an approved date and on nothing else; until then "
        "both verify, and nobody is paged.",
        (
            "See below which shops and app versions still use it.",
            "Set the date, or another one; where the environment wants it, a second person approves it.",
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


def fitted(entry: RunbookEntry, case: Case) -> Advice:
    """Reduce the entry to what applies to such a rotation."""
    besides = (each.text for each in entry.besides if each.group.includes(case))
    steps = (_text_for(step, case) for step in entry.steps)
    return Advice(
        entry.title, " ".join((entry.happened, *besides)), tuple(step for step in steps if step), entry.remedies
    )


def _text_for(step: str | Only, case: Case) -> str:
    if isinstance(step, str):
        return step
    return step.text if step.group.includes(case) else ""


def _matching(entries: tuple[RunbookEntry, ...], said: str) -> Iterator[RunbookEntry]:
    return (entry for entry in entries if said.startswith(entry.says))


def runbook_markdown() -> str:
    """Return all entries for the README: stalls first, then waits."""
    return "\n".join(
        [
            "### It has stalled",
            "",
            *(line for entry in STALLS for line in _lines(entry)),
            "### It waits",
            "",
            *(line for entry in WAITS for line in _lines(entry)),
        ]
    )


def _lines(entry: RunbookEntry) -> Iterator[str]:
    yield f"#### {entry.title}"
    yield from textwrap.wrap(f"Says: {', '.join(f'`{said.strip()} …`' for said in entry.says)}", _WIDTH)
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
        words = ", ".join(REMEDY_LABELS[remedy] for remedy in entry.remedies)
        yield from textwrap.wrap(f"In the console: {words}.", _WIDTH)
        yield ""


def _named(text: str | Only) -> str:
    return text if isinstance(text, str) else f"*{text.group.name}*: {text.text}"
