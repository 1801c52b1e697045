"""The type of secret text: it blocks every usual way for text to leak."""

import copy
import json
import logging
import pickle
import pprint
import string
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyvault.domain.plaintext import MASK, Plaintext

SECRET = "hunter2-is-not-a-good-one"

SHOWN: dict[str, Callable[[Plaintext], str]] = {
    "repr": repr,
    "str": str,
    "ascii": ascii,
    "format": format,
    "format with a width": lambda secret: format(secret, ">40"),
    "f-string": lambda secret: f"{secret}",
    "f-string, repr": lambda secret: f"{secret!r}",
    "f-string, self-documenting": lambda secret: f"{secret=}",
    "f-string with a precision": lambda secret: f"{secret:.30}",
    "str.format": lambda secret: "{}".format(secret),  # noqa: UP032  the way itself is what is tried
    "percent s": lambda secret: "%s" % secret,  # noqa: UP031  the way itself is what is tried
    "percent r": lambda secret: "%r" % secret,  # noqa: UP031  the way itself is what is tried
    "string.Template": lambda secret: string.Template("$secret").substitute(secret=secret),
    "in a list": lambda secret: str([secret]),
    "in a dictionary": lambda secret: str({"secret": secret}),
    "pprint": pprint.pformat,
    "json with default=str": lambda secret: json.dumps({"secret": secret}, default=str),
    "json with default=repr": lambda secret: json.dumps({"secret": secret}, default=repr),
    "log message": lambda secret: logging.makeLogRecord({"msg": "got %s", "args": (secret,)}).getMessage(),
}

REFUSED: dict[str, Callable[[Plaintext], object]] = {
    **{
        f"pickle {protocol}": lambda secret, protocol=protocol: pickle.dumps(secret, protocol)  # type: ignore[misc]  # a default binds the loop's value
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    },
    "pickle inside something": lambda secret: pickle.dumps({"args": [secret]}),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "deepcopy inside something": lambda secret: copy.deepcopy([secret]),
    "asdict": lambda secret: asdict(Holder(secret)),
    "json": json.dumps,
    "equality": lambda secret: secret == SECRET,
    "equality with another": lambda secret: secret == Plaintext(SECRET),
    "inequality": lambda secret: secret != Plaintext(SECRET),
    "membership": lambda secret: secret in [Plaintext(SECRET)],
    "hash": hash,
    "set": lambda secret: {secret},
    "order": lambda secret: secret < secret,  # type: ignore[operator]  # that it cannot is the point
    "concatenation": lambda secret: "got " + secret,  # type: ignore[operator]  # that it cannot is the point
    "join": lambda secret: ", ".join([secret]),  # type: ignore[list-item]  # that it cannot is the point
    "iteration": lambda secret: list(secret),  # type: ignore[call-overload]  # that it cannot is the point
    "length": lambda secret: len(secret),  # type: ignore[arg-type]  # that it cannot is the point
    "index": lambda secret: secret[0],  # type: ignore[index]  # that it cannot is the point
    "bytes": lambda secret: bytes(secret),  # type: ignore[call-overload]  # that it cannot is the point
    "vars": vars,
}


@dataclass
class Holder:
    secret: Plaintext


@pytest.mark.parametrize("way", SHOWN)
def test_plaintext_shown_is_masked(way: str) -> None:
    """Every accidental conversion of a secret to text gives only its mask."""
    shown = SHOWN[way](Plaintext(SECRET))
    assert SECRET not in shown
    assert MASK in shown


@pytest.mark.parametrize("way", REFUSED)
def test_plaintext_stored_compared_or_taken_apart_is_refused(way: str) -> None:
    """A secret cannot be stored in a queue, file, cache or dictionary key, or compared byte by byte."""
    with pytest.raises(TypeError) as refused:
        REFUSED[way](Plaintext(SECRET))
    assert SECRET not in str(refused.value)


def test_plaintext_in_a_traceback_with_locals_is_masked() -> None:
    """An error reporter that prints local variables shows the mask."""

    def fail(secret: Plaintext, held: list[Plaintext]) -> None:
        raise RuntimeError(f"cannot use {secret}")

    try:
        fail(Plaintext(SECRET), [Plaintext(SECRET)])
    except RuntimeError as error:
        text = "".join(traceback.TracebackException.from_exception(error, capture_locals=True).format())
    assert "secret = Plaintext(***)" in text
    assert SECRET not in text


def test_plaintext_takes_no_other_attribute() -> None:
    """No attribute can be added that would be shown beside the mask."""
    secret: Any = Plaintext(SECRET)
    with pytest.raises(AttributeError):
        secret.note = SECRET


@given(st.text())
def test_plaintext_reveals_exactly_what_it_was_given(text: str) -> None:
    assert Plaintext(text).reveal() == text
