"""Rotations on the console's overview."""

import pytest

from keyvault.access.roles import Role
from keyvault.domain.keys import KeyKind
from rotation.domain.events import RotationState as S
from tests.admin.desk import browser, set_up_desk, text_of
from tests.factories import make_operator

from .test_full_pages import make_full_rotation, put_in

pytestmark = pytest.mark.database

WAITS = [
    (S.STAGED, None, "every verifier to accept the replacement"),
    (S.PUBLISHING, None, "the merchant&#x27;s webhook endpoint"),
    (S.AWAITING_PROOF, None, "use of the replacement"),
    (S.OVERLAP, None, "silence of the old key"),
    (S.QUARANTINE, None, "the quarantine, "),
    (S.REVOKING, None, "the worker to revoke the old key"),
    (S.ROLLING_BACK, None, "the quarantine, "),
    (S.STALLED, S.OVERLAP, "the deadline passed"),
]


@pytest.mark.usefixtures("db")
def test_overview_says_what_each_rotation_waits_for() -> None:
    row = make_full_rotation(set_up_desk(), KeyKind.PRIVATE)
    client, shown = browser(make_operator("viewer", *Role)), {}
    for state, stalled_from, expected in WAITS:
        put_in(row, state, stalled_from)
        table = text_of(client.get("/admin/")).partition("Waiting for</th>")[2].partition("</table>")[0]
        shown[state] = (expected in table, "to the deadline" in table)
    without_deadline = {S.REVOKING, S.STALLED}
    assert shown == {state: (True, state not in without_deadline) for state, _, _ in WAITS}
