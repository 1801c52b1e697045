"""`traceparent`: only a valid one is used, and it is the same one for the whole request."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyvault.wire.trace_context import current_trace_id, current_traceparent, read_traceparent, traced

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
VALID = f"00-{TRACE}-00f067aa0ba902b7-01"


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"00",
        "",
        VALID.upper(),
        f"{VALID} ",
        f"{VALID}\n",
        f"{VALID}-extra",
        f"{VALID},{VALID}",
        VALID.replace("00-", "01-", 1),
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-00f067aa0ba902b7",
        VALID[:-1],
        "\u0660" + VALID[1:],
    ],
)
def test_invalid_header_is_ignored(value: object) -> None:
    assert read_traceparent(value) == ""


@given(st.text())
def test_accepted_header_is_plain_and_bounded(value: str) -> None:
    assert read_traceparent(value) in {"", value}
    assert len(read_traceparent(value)) in {0, 55}


def test_trace_ends_with_its_block() -> None:
    with traced(VALID):
        assert (current_traceparent(), current_trace_id()) == (VALID, TRACE)
        with traced("nonsense"):
            assert current_traceparent() == ""
        assert current_traceparent() == VALID
    assert (current_traceparent(), current_trace_id()) == ("", "")
