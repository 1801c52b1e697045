"""Schemathesis against the live server: requests that the OpenAPI page allows, and many that it forbids."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from keyvault.access.permissions import SERVICE_PERMISSIONS, Permission
from keyvault.domain.keys import KeyKind
from keyvault.domain.keystring import StringScope
from keyvault.domain.plaintext import Plaintext
from keyvault.models import IssuanceRequest
from keyvault.services.keys.lifecycle import last_sequence
from keyvault.services.merchants.client_configuration import MAX_SECONDS
from tests.api.integration import change_account
from tests.environment import ROOT
from tests.factories import account, approve, issue, issue_request, make_merchant, make_token
from tests.fuzz.drive import UNLIMITED
from tests.fuzz.served import serving

pytestmark = [pytest.mark.long, pytest.mark.django_db(transaction=True), pytest.mark.timeout(300)]

SETTINGS = Path(__file__).with_name("schemathesis.toml")
SHOWN_ONCE = {"merchant": "globex", "environment": "sandbox", "kind": "private", "delivery": "show_once"}


def test_live_server_conforms_to_the_openapi_page(tmp_path: Path) -> None:
    """Guarantee: no request makes an operation give a response that the page does not list."""
    for merchant_id in ("acme", "globex"):
        make_merchant(merchant_id)
    _, private = issue(account("acme"))
    _, public = issue(account("acme"), kind=KeyKind.PUBLIC)
    _, leaked = issue(account("acme"), label="to be revoked")
    # The service token may revoke keys, so it cannot see the keys that authenticate the other requests.
    _, service = make_token(*SERVICE_PERMISSIONS, scope=StringScope.ALL, merchants=["globex"])
    _, gateway = make_token(Permission.KEYS_VERIFY, scope=StringScope.SANDBOX)
    change_account("acme", customer_token_seconds=MAX_SECONDS)
    theirs = [issue(account("globex"), label=f"number {number}")[0] for number in range(3)]
    with serving(tmp_path, **UNLIMITED) as port:
        key, bearer = {"X-Api-Key": private.reveal()}, {"Authorization": f"Bearer {service.reveal()}"}
        customer = _post(port, "/sandbox/customers/carol/access-tokens", {"ttl_seconds": 3600}, key)
        order = _post(port, "/sandbox/merchants/orders", {"amount_minor": 4200, "currency": "EUR"}, key)
        asked = _post(port, "/v1/issuance-requests", SHOWN_ONCE, bearer)
        issue_request(approve(IssuanceRequest.objects.get(pk=asked["issuance_request_id"])))
        rotation = _post(port, "/v1/rotations", {"credential_id": theirs[0].credential_id}, bearer)
        exists = {
            "order_token": [order["order_token"]],
            "token_id": [customer["token_id"]],
            "key_id": [each.key_id for each in theirs],
            "credential_id": [each.credential_id for each in theirs],
            "issuance_request_id": [asked["issuance_request_id"]],
            "rotation_id": [rotation["rotation_id"]],
            "sequence": [last_sequence(each) for each in theirs],
            "merchant": ["globex"],
            "client_uri": [f"/sandbox/merchants/orders/{order['order_token']}"],
        }
        for name, values in exists.items():
            (tmp_path / f"{name}.txt").write_text("\n".join(f'"{value}"' for value in values))
        credentials = {"private": private, "public": public, "leaked": leaked, "service": service, "gateway": gateway}
        ran = _run(port, tmp_path, **credentials, customer=Plaintext(customer["token"]))
    assert ran.returncode == 0, ran.stdout[-20_000:] + ran.stderr[-2_000:]
    assert '"ERROR"' not in (tmp_path / "server.log").read_text()


def _post(port: int, path: str, body: dict[str, Any], credentials: dict[str, str]) -> Any:
    headers = {**credentials, "Idempotency-Key": "the first", "Content-Type": "application/json"}
    with closing(HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read()
    assert answer.status == 201, text
    return json.loads(text)


def _run(port: int, folder: Path, **credentials: Plaintext) -> subprocess.CompletedProcess[str]:
    settings = shutil.copy(SETTINGS, folder)
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", settings, "run"]
    secrets = {f"SCHEMATHESIS_{name.upper()}": text.reveal() for name, text in credentials.items()}
    return subprocess.run(
        [*command, f"http://127.0.0.1:{port}/v1/openapi.json"],
        cwd=folder,
        env={**os.environ, **secrets, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
