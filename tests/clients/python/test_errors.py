"""The exceptions of the client: their tree, and what each has for a report to support."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import keyvault_client
import pytest
from keyvault_client import KeyvaultError, MerchantClient, errors

from .feed_service import key_string
from .scripted_server import scripted_server


def below(kind: type[KeyvaultError]) -> Iterator[type[KeyvaultError]]:
    """Yield the class and all its subclasses."""
    yield kind
    for child in kind.__subclasses__():
        yield from below(child)


def drawn_tree(text: str) -> dict[str, str]:
    """Read the tree in the docstring. Returns the parent of each class."""
    parents: dict[str, str] = {}
    path = ["KeyvaultError"]
    for indent, name in re.findall(r"(?m)^    ((?:│   |    )*)[├└]── (\w+)", text):
        depth = len(indent) // 4 + 1
        path[depth:] = [name]
        parents[name] = path[depth - 1]
    return parents


TREE = tuple(below(KeyvaultError))


def test_errors_are_the_drawn_tree() -> None:
    """Guarantee: the tree in the documentation is that of the classes, and the package exports them all."""
    actual = {kind.__name__: kind.__mro__[1].__name__ for kind in TREE if kind is not KeyvaultError}
    assert actual == drawn_tree(errors.__doc__ or "")
    assert actual.keys() <= set(keyvault_client.__all__)


@pytest.mark.parametrize("kind", TREE)
def test_errors_have_what_support_asks_for(kind: type[KeyvaultError]) -> None:
    """Guarantee: a handler reads `request_id`, `code` and `check` of every exception of the client."""
    error = kind("text")
    assert (error.request_id, error.code, error.check) == (None, None, None)


@pytest.mark.parametrize("status", [302, 400, 401, 403, 404, 409, 422, 429, 503])
def test_errors_of_answers_have_the_members_of_the_problem(status: int) -> None:
    error = errors.answer_error(status, "key_revoked", 4, "r1", None)
    assert (error.status, error.request_id, error.code, error.check) == (status, "r1", "key_revoked", 4)


@pytest.mark.parametrize(
    ("reply", "request_id"),
    [
        ({"status": 502, "text": "<h1>a proxy</h1>", "headers": {"X-Request-Id": "r2"}}, "r2"),
        ({"status": 400, "body": {"code": "request_invalid"}, "headers": {"X-Request-Id": "r2"}}, "r2"),
        ({"status": 400, "body": {"request_id": "r1"}, "headers": {"X-Request-Id": "r2"}}, "r1"),
        ({"status": 400, "body": {"request_id": 7}, "headers": {"X-Request-Id": "r2"}}, "r2"),
        ({"status": 200, "text": "<h1>a proxy</h1>", "headers": {"X-Request-Id": "r2"}}, "r2"),
        ({"status": 502, "text": "", "headers": {"X-Request-Id": "r\t2"}}, None),
        ({"status": 502, "text": "", "headers": {"X-Request-Id": "r" * 5000}}, None),
        ({"status": 502, "text": "", "headers": {"X-Request-Id": ""}}, None),
        ({"status": 502, "text": "", "headers": {"X-Request-Id": key_string(1)}}, None),
        ({"status": 400, "body": {"request_id": "r\n1"}, "headers": {"X-Request-Id": "r2"}}, "r2"),
        ({"status": 502, "text": ""}, None),
    ],
)
def test_errors_without_a_problem_document_have_the_request_id_of_the_header(
    reply: Mapping[str, Any], request_id: str | None
) -> None:
    """Guarantee: a request can be found in the logs also when a proxy or a broken answer replaced the problem."""
    options = keyvault_client.MerchantOptions(max_attempts=1)
    with (
        scripted_server(reply) as server,
        MerchantClient(f"{server.url}/sandbox", "sandbox", key_string(1), options) as client,
        pytest.raises(KeyvaultError) as failed,
    ):
        client.request("GET", "/orders")
    assert failed.value.request_id == request_id
