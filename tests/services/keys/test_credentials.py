"""Credential restrictions: set by an operator, enforced by the next verdict, and audited."""

import json
from typing import Any

import pytest

from keyvault.access.decision import Denial
from keyvault.access.permissions import Permission as P
from keyvault.domain.errors import ErrorCode, PermissionMissingError, RequestInvalidError
from keyvault.domain.keys import KeyKind
from keyvault.domain.networks import MAX_NETWORKS
from keyvault.models import AuditEntry, Credential
from keyvault.models.keys import OriginHeader
from keyvault.services.catalog.catalog import find_endpoint
from keyvault.services.keys.credentials import restrict_credential
from keyvault.services.verification.judging import VerificationRequest, judge_presented
from tests.factories import SANDBOX, grant, issue, now
from tests.services.conftest import Scene

pytestmark = pytest.mark.django_db


def restrict(scene: Scene, credential: Credential, *networks: str, origin: OriginHeader = OriginHeader.REFUSE) -> None:
    allowed = grant(scene.admin, P.CREDENTIALS_RESTRICT, credential.account)
    restrict_credential(allowed, credential, networks, origin)


def denial_code(text: Any, address: str | None = None, origin: str | None = None) -> ErrorCode | None:
    verification = VerificationRequest(
        key=text.reveal(),
        environment=SANDBOX,
        endpoint=find_endpoint("orders.retrieve"),
        client_address=address,
        origin=origin,
    )
    verdict = judge_presented(verification, now()).verdict
    return verdict.code if isinstance(verdict, Denial) else None


@pytest.mark.database
def test_credential_restricted_to_networks_is_refused_elsewhere(scene: Scene) -> None:
    """The restriction applies from the next request, and also when the client address is unknown."""
    key, text = issue(scene.sandbox)
    assert denial_code(text, "198.51.100.1") is None
    restrict(scene, key.credential, "192.0.2.0/24", "2001:db8::/32")
    assert (
        denial_code(text, "192.0.2.77")
        is denial_code(text, "2001:db8::1")
        is denial_code(text, "::ffff:192.0.2.1")
        is None
    )
    for elsewhere in ("198.51.100.1", "2001:db9::1", None):
        assert denial_code(text, elsewhere) is ErrorCode.IP_NOT_ALLOWED
    restrict(scene, key.credential)
    assert denial_code(text) is None


def test_credential_set_to_report_an_origin_allows_requests_with_one(scene: Scene) -> None:
    key, text = issue(scene.sandbox)
    assert denial_code(text, origin="https://shop.example") is ErrorCode.PRIVATE_KEY_IN_BROWSER
    restrict(scene, key.credential, origin=OriginHeader.REPORT)
    assert denial_code(text, origin="https://shop.example") is None


def test_credential_restricted_is_audited_with_old_and_new(scene: Scene) -> None:
    key, _ = issue(scene.sandbox)
    restrict(scene, key.credential, "192.0.2.0/24")
    restrict(scene, key.credential, "192.0.2.7", "192.0.2.7/32", origin=OriginHeader.REPORT)
    entry = AuditEntry.objects.latest("id")
    details = json.loads(bytes(entry.body))["details"]
    assert (entry.event, entry.chain_id) == ("credential.restricted", "account:acme/sandbox")
    assert details["old"] == {"networks": ["192.0.2.0/24"], "origin_header": "refuse"}
    assert details["new"] == {"networks": ["192.0.2.7/32"], "origin_header": "report"}


@pytest.mark.parametrize(
    "text", ["", "x", "192.0.2.1/24", "192.0.2.0/33", "::ffff:192.0.2.0/120", "fe80::1%eth0", "0xc0000200", "1" * 99]
)
def test_credential_with_an_invalid_network_reports_its_position(scene: Scene, text: str) -> None:
    """A network that matches no address, or more than intended, is refused with its position in the list."""
    key, _ = issue(scene.sandbox)
    with pytest.raises(RequestInvalidError) as refused:
        restrict(scene, key.credential, "192.0.2.0/24", text)
    assert [fault.pointer for fault in refused.value.faults] == ["/networks/1"]
    key.credential.refresh_from_db()
    assert key.credential.networks == []


def test_credential_with_too_many_networks_is_refused(scene: Scene) -> None:
    key, _ = issue(scene.sandbox)
    with pytest.raises(RequestInvalidError) as refused:
        restrict(scene, key.credential, *(f"192.0.2.{n}" for n in range(MAX_NETWORKS + 1)))
    assert [fault.pointer for fault in refused.value.faults] == ["/networks"]


def test_credential_of_a_public_key_set_to_report_an_origin_is_refused(scene: Scene) -> None:
    key, _ = issue(scene.sandbox, kind=KeyKind.PUBLIC)
    with pytest.raises(RequestInvalidError):
        restrict(scene, key.credential, origin=OriginHeader.REPORT)


def test_credential_restricted_with_another_grant_is_refused(scene: Scene) -> None:
    key, _ = issue(scene.sandbox)
    for operator in (scene.tam, scene.responder, scene.approver):
        with pytest.raises(PermissionMissingError):
            grant(operator, P.CREDENTIALS_RESTRICT, scene.sandbox)
    with pytest.raises(PermissionMissingError):
        restrict_credential(
            grant(scene.admin, P.CREDENTIALS_RESTRICT, scene.production), key.credential, [], OriginHeader.REFUSE
        )
