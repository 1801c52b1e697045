"""Keys inside wrapping tokens of a real server: whoever opens one first is the only one, and it is told afterwards."""

import logging
import time
from typing import Any

import hvac
import pytest

from keyvault.access.permissions import Permission as P
from keyvault.backends.base import BackendError, Mount, Wrapped
from keyvault.backends.vault.client import open_client
from keyvault.domain.environments import Environment
from keyvault.domain.errors import StateConflictError
from keyvault.domain.issuance import Delivery, IssuanceState
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.redaction import redact
from keyvault.models import IssuanceRequest, Key, Material, Notice, WrappedHandover
from keyvault.services import issuance, upkeep, wrapping
from keyvault.services.handovers import confirm_handover, hand_over_wrapped, suspect_handover
from tests.backends.vault.installation import InstalledVault
from tests.factories import account, approve, grant, issue_request, request_key

from .conftest import Scene, make_scene
from .rows import dump_tables
from .test_keys import verdict

pytestmark = [pytest.mark.database, pytest.mark.django_db]

S = IssuanceState


@pytest.fixture
def scene(vault_service: InstalledVault) -> Scene:
    return make_scene()


def fresh(request: IssuanceRequest) -> IssuanceRequest:
    found = issuance.get_request(request.pk)
    assert found is not None
    return found


def issued(environment: Environment = Environment.SANDBOX) -> IssuanceRequest:
    request = request_key(account("acme", environment), delivery=Delivery.WRAPPED)
    if request.state == S.PENDING:
        approve(request)
    issue_request(request)
    return fresh(request)


def ask(scene: Scene, request: IssuanceRequest) -> Wrapped:
    return hand_over_wrapped(grant(scene.tam, P.ISSUANCE_COLLECT, request.account), request)


def suspect(scene: Scene, request: IssuanceRequest) -> str:
    return suspect_handover(grant(scene.tam, P.ISSUANCE_COLLECT, request.account), request, request.key_id or "")


def receiver(vault: InstalledVault, token: Plaintext) -> hvac.Client:
    """Whoever holds the token and nothing else."""
    return open_client(vault.server, token)


def looked_up(vault: InstalledVault, token: Plaintext) -> dict[str, Any]:
    """What the receiver does first, without opening it."""
    answer = receiver(vault, token).adapter.post("/v1/sys/wrapping/lookup", json={"token": token.reveal()})
    found: dict[str, Any] = answer["data"]
    return found


def opened(vault: InstalledVault, token: Plaintext) -> Plaintext:
    answer = receiver(vault, token).adapter.post("/v1/sys/wrapping/unwrap")
    return Plaintext(answer["data"]["data"]["secret"])


def alarms() -> int:
    return Notice.objects.filter(kind=NoticeKind.HANDOVER_SUSPECTED, is_alarm=True).count()


@pytest.mark.parametrize("environment", list(Environment))
def test_handover_on_the_server_is_looked_up_opened_and_good(
    vault_service: InstalledVault, scene: Scene, environment: Environment
) -> None:
    """The receiver finds the path that they were told, opens the token once, and has the key."""
    request = issued(environment)
    wrapped = ask(scene, request)
    assert looked_up(vault_service, wrapped.token)["creation_path"] == wrapped.creation_path
    text = opened(vault_service, wrapped.token)
    assert verdict(text, environment=environment) is None
    confirm_handover(grant(scene.tam, P.ISSUANCE_COLLECT, request.account), request, request.key_id or "")
    upkeep.destroy_due()
    key = Key.objects.get()
    assert (fresh(request).state, key.material) == (S.COLLECTED, Material.DESTROYED)
    mount = Mount.SANDBOX if environment is Environment.SANDBOX else Mount.PRODUCTION
    versions = vault_service.backend.versions(mount, key.credential.backend_path)
    assert [version.state for version in versions] == ["destroyed"]
    assert alarms() == 0
    for secret in (text, wrapped.token):
        assert secret.reveal() not in repr(dump_tables())


def test_handover_on_the_server_opened_by_a_thief_is_found_out(vault_service: InstalledVault, scene: Scene) -> None:
    """The token opens once: the receiver whose does not says so, and the thief's key is dead."""
    request = issued()
    wrapped = ask(scene, request)
    text = opened(vault_service, wrapped.token)
    with pytest.raises(BackendError) as caught:
        opened(vault_service, wrapped.token)
    assert caught.value.status in {400, 403}
    suspect(scene, request)
    assert verdict(text) is not None
    assert (fresh(request).state, alarms()) == (S.APPROVED, 1)
    issue_request(fresh(request))
    assert verdict(opened(vault_service, ask(scene, fresh(request)).token)) is None


def test_handover_on_the_server_asked_again_after_a_thief_is_an_alarm(
    vault_service: InstalledVault, scene: Scene
) -> None:
    """The server takes an opened token away a moment later: in that moment, too, it is known to be opened."""
    request = issued()
    for number in range(1, 3):
        text = opened(vault_service, ask(scene, fresh(request)).token)
        with pytest.raises(StateConflictError, match="interception"):
            ask(scene, fresh(request))
        assert (verdict(text) is None, alarms()) == (False, number)
        issue_request(fresh(request))


def test_handover_on_the_server_expired_counts_as_intercepted(
    vault_service: InstalledVault, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wrapping, "WRAP_SECONDS", 1)
    request = issued()
    wrapped = ask(scene, request)
    handover = WrappedHandover.objects.get()
    until = time.monotonic() + 30
    while wrapping.is_unopened(handover):
        assert time.monotonic() < until, "it never expires"
    with pytest.raises(BackendError):
        opened(vault_service, wrapped.token)
    with pytest.raises(StateConflictError, match="interception"):
        ask(scene, request)
    assert (fresh(request).state, alarms()) == (S.APPROVED, 1)


def test_handover_on_the_server_asked_again_voids_the_first_token(vault_service: InstalledVault, scene: Scene) -> None:
    request = issued()
    first = ask(scene, request)
    with pytest.raises(StateConflictError, match="in a moment"):
        ask(scene, request)
    with pytest.raises(BackendError):
        opened(vault_service, first.token)
    issue_request(fresh(request))
    assert fresh(request).key_id != request.key_id
    assert verdict(opened(vault_service, ask(scene, fresh(request)).token)) is None
    assert alarms() == 0


def test_handover_on_the_server_word_against_an_unopened_token_ends_nothing(
    vault_service: InstalledVault, scene: Scene
) -> None:
    """A look-up is no opening."""
    request = issued()
    wrapped = ask(scene, request)
    looked_up(vault_service, wrapped.token)
    with pytest.raises(StateConflictError, match="Nobody has opened"):
        suspect(scene, request)
    assert verdict(opened(vault_service, wrapped.token)) is None


def test_handover_token_of_the_server_is_masked_in_a_log(
    vault_service: InstalledVault, scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """A wrapping token is the key for as long as it opens: no log line has one, whoever wrote it there."""
    with caplog.at_level(logging.DEBUG):
        token = ask(scene, issued()).token.reveal()
    assert token not in caplog.text
    for line in (f"unwrap {token} now", f'{{"token": "{token}"}}', f"VAULT_TOKEN={token}", f"X-Vault-Token: {token}"):
        assert token[2:] not in redact(line)
