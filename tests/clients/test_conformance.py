"""clients/conformance.json equals what the service's code produces, and what a whole service answers."""

import base64
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from keyvault.domain.plaintext import Plaintext
from keyvault.domain.recipients import seal_to
from keyvault.wire.webhooks import SecretInvalidError, SignatureInvalidError, verify
from tests.clients.conformance import PATH, RECIPIENT, to_text
from tests.clients.service_answers import KEYS

CASES: dict[str, Any] = json.loads(PATH.read_text())


def test_conformance_file_equals_the_code() -> None:
    """Run `python -m tests.clients.conformance` to write it."""
    assert PATH.read_text() == to_text()
