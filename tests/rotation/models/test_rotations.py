"""The stage of a rotation, from its two columns."""

import pytest

from rotation.domain.events import RotationState as S
from rotation.models import Rotation


@pytest.mark.parametrize(
    ("state", "stalled_from", "stage"),
    [
        (S.STALLED, S.PUBLISHING, S.PUBLISHING),
        (S.STALLED, None, S.STALLED),
        (S.OVERLAP, None, S.OVERLAP),
        (S.OVERLAP, S.PUBLISHING, S.OVERLAP),
        (S.CANCELLED, S.ROLLING_BACK, S.CANCELLED),
    ],
)
def test_stage_reads_where_it_stalled_only_while_it_is_stalled(state: S, stalled_from: S | None, stage: S) -> None:
    """A value that remains from an earlier stall decides nothing."""
    row = Rotation(state=state.value, stalled_from=None if stalled_from is None else stalled_from.value)
    assert row.stage is stage
