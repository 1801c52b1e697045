"""Approve several requests together: all or none, under one digest."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from keyvault.domain.canonical import JsonValue, canonical_digest
from keyvault.services.recording.transaction import recorded_together


def combine_digests(shown: Mapping[str, JsonValue]) -> str:
    """Return the digest over what was shown of each request, in the order of their ids.

    `shown`: the plan digest, or the version of the row, by the id of the request.
    """
    return canonical_digest({"approved_together": dict(shown)})


@contextmanager
def approved_together(combined_digest: str) -> Iterator[None]:
    """Approve all requests of the block, or none if one raises. The audit entry of each names the combined digest."""
    with recorded_together(combined_digest=combined_digest):
        yield
