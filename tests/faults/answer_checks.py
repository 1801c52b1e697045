"""Check every response: no verifier allows a request without fresh data, and none denies a good key."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.faults.changes import Ban, SubjectChanges
from tests.faults.results import Result
from tests.faults.sender import NO_ANSWER, Reply

UNAVAILABLE = 503
UNAVAILABLE_CODE = "verifier_stale"
"""Codes of a verifier without its database, for any data that it could not read."""


@dataclass(slots=True)
class Outages:
    """Intervals in which hosts (None: each) may return no verdict, and those in which they may not respond at all."""

    without_verdict: list[tuple[str | None, float, float]] = field(default_factory=list)
    without_answer: list[tuple[str | None, float, float]] = field(default_factory=list)

    def excuse(self, reply: Reply) -> bool:
        spans = self.without_answer if reply.status == NO_ANSWER else self.without_verdict
        return any(
            host in {None, reply.host} and reply.answered_at >= began and reply.sent_at <= ended
            for host, began, ended in spans
        )


def judge(
    result: Result,
    replies: Sequence[Reply],
    changes: SubjectChanges,
    outages: Outages,
    writer_host: str,
    staleness: float,
) -> None:
    """Judge the replies. `writer_host`: the host whose verifiers share the writer's generation counter."""
    by_name: defaultdict[str, list[Reply]] = defaultdict(list)
    for reply in sorted(replies, key=lambda each: each.sent_at):
        by_name[reply.name].append(reply)
    for place in ("same host", "elsewhere"):
        result.counts[f"sent after it, {place}"] = 0
    for ban in changes.bans:
        affected = [each for name, found in by_name.items() if ban.name in {None, name} for each in found]
        for reply in affected:
            _judge_banned(result, reply, ban, writer_host, staleness)
    unexcused, wrong_no = [], []
    for reply in replies:
        is_unavailable = reply.status == NO_ANSWER or (reply.status == UNAVAILABLE and reply.code == UNAVAILABLE_CODE)
        if is_unavailable:
            result.counts[reply.code or "no answer"] = result.counts.get(reply.code or "no answer", 0) + 1
            if not outages.excuse(reply):
                unexcused.append(_describe(reply))
        elif not reply.is_yes and not _may_refuse(reply, changes, staleness):
            wrong_no.append(_describe(reply))
    result.counts["requests"] = len(replies)
    result.counts["longest answer, s"] = round(max(each.answered_at - each.sent_at for each in replies), 2)
    result.counts["yes"] = sum(each.is_yes for each in replies)
    result.counts["changes"] = changes.count
    result.counts["changes of unknown outcome"] = changes.lost
    result.counts["receipts complete"] = sum(each.complete_at is not None for each in changes.bans)
    result.must_be_none("refused that should pass", wrong_no)
    result.must_be_none("without a verdict, not in an outage", unexcused)


def _judge_banned(result: Result, reply: Reply, ban: Ban, writer_host: str, staleness: float) -> None:
    if ban.only not in {None, reply.host} or reply.answered_at > ban.ended_at or reply.status == NO_ANSWER:
        return
    is_here = reply.host == writer_host and ban.is_notified and ban.only is None
    bound = staleness if ban.bound_seconds is None else ban.bound_seconds
    limit = ban.returned_at if is_here else ban.returned_at + bound
    if not is_here and ban.complete_at is not None:
        limit = min(limit, ban.complete_at)
    place = "same host" if is_here else "elsewhere"
    if reply.sent_at > limit:
        result.counts[f"sent after it, {place}"] += 1
        result.must_be_none(
            f"stale yes, {place}",
            [
                f"{ban.what}: {_describe(reply)}, sent {reply.sent_at - ban.returned_at:+.3f} s after it returned"
                + (f", {reply.sent_at - ban.complete_at:+.3f} s after the receipt" if ban.complete_at else "")
            ]
            if ban.is_wrong(reply)
            else [],
        )
    elif ban.is_wrong(reply) and reply.sent_at > ban.returned_at and not is_here:
        name = "latest yes elsewhere, ms after the change"
        result.counts[name] = max(result.counts.get(name, 0), round(1000 * (reply.sent_at - ban.returned_at), 1))


def _may_refuse(reply: Reply, changes: SubjectChanges, staleness: float) -> bool:
    """Return whether a cached denial may still be in use shortly after the subject is back."""
    if reply.name in changes.doubtful:
        return True
    return any(
        reply.answered_at >= began and reply.sent_at <= ended + staleness
        for began, ended in changes.changed_during.get(reply.name, [])
    )


def _describe(reply: Reply) -> str:
    verdict = "yes" if reply.is_yes else f"{reply.status} {reply.code}"
    took = reply.answered_at - reply.sent_at
    return f"{reply.host} at {reply.sent_at:.3f} answered {verdict} about {reply.name} in {took:.3f} s"
