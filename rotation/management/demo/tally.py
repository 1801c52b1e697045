"""Compare the fleet's verdicts with the expected ones."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rotation.management.demo.fleet import Request

REVOKED = "key_revoked"


@dataclass(frozen=True, slots=True)
class Revocation:
    """A revocation call. Between `asked_at` and `answered_at` either verdict is right."""

    key_id: str
    asked_at: float
    answered_at: float


@dataclass(frozen=True, slots=True)
class RequestTally:
    """The verdicts, counted.

    `first_refusal_seconds`: from the reply to the revocation to the first refused request. Negative when a request was
    refused before the reply reached the caller; None when none was refused. `refusals`: how many requests were sent,
    and refused, after the reply.
    """

    requests: int
    failures: tuple[str, ...]
    first_refusal_seconds: float | None
    refusals: int


def failures_while_good(requests: Sequence[Request]) -> list[str]:
    """List every refusal. The fleet presents only its valid key, so before a revocation each refusal is wrong."""
    return [
        f"{_who(request)}: {request.fault or f'refused with {request.code}'}"
        for request in requests
        if request.fault or request.code is not None
    ]


def count(requests: Sequence[Request], revocation: Revocation) -> RequestTally:
    """Count the whole traffic, which ends after the revocation of the key that all servers used by then."""
    before = [request for request in requests if request.answered_at < revocation.asked_at]
    after = [request for request in requests if request.answered_at >= revocation.asked_at]
    refused = [request for request in after if request.code == REVOKED and request.key_id == revocation.key_id]
    return RequestTally(
        len(requests),
        (*failures_while_good(before), *_failures_after(after, revocation)),
        min((request.answered_at - revocation.answered_at for request in refused), default=None),
        sum(request.sent_at >= revocation.answered_at for request in refused),
    )


def _failures_after(requests: Sequence[Request], revocation: Revocation) -> Iterator[str]:
    for request in requests:
        late = request.sent_at - revocation.answered_at
        if request.fault or request.code not in {None, REVOKED}:
            yield f"{_who(request)}: {request.fault or f'refused with {request.code}'}"
        elif request.key_id != revocation.key_id:
            yield f"{_who(request)}: that is not the key that the fleet used"
        elif request.code is None and late >= 0:
            yield f"{_who(request)}: allowed {late * 1000:.0f} ms after it was revoked"


def _who(request: Request) -> str:
    return f"{request.server} with key {request.key_id}"
