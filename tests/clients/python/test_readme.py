"""The Python examples of clients/python/README.md, run with the addresses and files of a test."""

import json
import re
import runpy
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from keyvault_client import WebhookSignatureError

from keyvault.domain.plaintext import Plaintext
from keyvault.wire.webhooks import sign

from .feed_service import TOKEN, feed_service, key_string
from .scripted_server import scripted_server

README = Path(__file__).resolve().parents[3] / "clients/python/README.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
KEY = key_string(1)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that runs the one example with a text, and returns its names."""

    def run_example(text: str, replaced: Mapping[str, str]) -> dict[str, Any]:
        (example,) = [found for found in EXAMPLES if text in found]
        for written, ours in replaced.items():
            assert written in example
            example = example.replace(written, ours)
        place = tmp_path / "example.py"
        place.write_text(example)
        return runpy.run_path(str(place))

    return run_example


def test_readme_merchant_example_creates_an_order(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """Guarantee: the pasted lines send the key of the file to the environment's base URL."""
    key = tmp_path / "key"
    key.write_text(KEY)
    with scripted_server({"status": 201, "headers": {}, "body": {"order_token": "ord_1"}}) as server:
        named = {"https://api.example": server.url, "/run/secrets/key": str(key)}
        names = run("MerchantClient", named)
        names["client"].close()
        (sent,) = server.received
    assert names["order"] == {"order_token": "ord_1"}
    assert (sent.method, sent.path, sent.headers["x-api-key"]) == ("POST", "/sandbox/merchants/orders", KEY)
    assert json.loads(sent.body) == {"amount_minor": 1250, "currency": "EUR"}


def test_readme_local_verifier_example_decides_from_memory(
    run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: the pasted function allows a valid key, from memory after the first questions, and no other."""
    monkeypatch.setenv("SHOP_TOKEN", TOKEN)
    with feed_service() as (service, url):
        service.revoke(key_string(2))
        names = run("LocalVerifier", {"https://keyvault.internal": url})
        with names["verifier"]:
            end = time.monotonic() + 60
            asked = -1
            while len(service.asked) != asked:
                assert time.monotonic() < end, "it did not decide from memory"
                asked = len(service.asked)
                assert names["is_allowed"](KEY)
            assert not names["is_allowed"](key_string(2))


def test_readme_webhook_example_verifies_a_message(
    run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: the pasted function returns the id of a signed message, and refuses a changed one."""
    secret = "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="
    monkeypatch.setenv("WEBHOOK_SECRET", secret)
    receive = run("verify_webhook", {})["receive"]
    headers = sign([Plaintext(secret)], "msg_1", datetime.now(UTC), b"{}")
    assert receive(headers, b"{}") == "msg_1"
    with pytest.raises(WebhookSignatureError):
        receive(headers, b"{ }")


def test_readme_examples_all_run() -> None:
    """Guarantee: each example in Python is one that a test runs."""
    assert len(EXAMPLES) == 3
