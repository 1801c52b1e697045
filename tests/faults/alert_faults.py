"""The faults, and the alerts that each of them fires."""

import re
import signal
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from http.cookiejar import CookieJar
from shutil import disk_usage
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import HTTPCookieProcessor, build_opener

from django.db import connection, transaction

from keyvault.access.permissions import Permission as P
from keyvault.domain.errors import StateConflictError
from keyvault.domain.notifications import NoticeKind
from keyvault.management.service import local_url
from keyvault.models import Key, WebhookDelivery
from keyvault.services.approvals.inbox import mark_all_seen
from keyvault.services.keys.lifecycle import suspend_key
from rotation.domain.events import RotationState as S
from rotation.domain.plan_fields import Proof
from rotation.models import Rotation
from tests.factories import grant
from tests.faults.alert_deployment import Deployment
from tests.faults.programs import GaveUpError, until
from tests.rotation import scene

STEP_SECONDS = 60
RESTART_SECONDS = 240
"""Maximum time in which a killed worker runs again, in seconds. A busy machine is slow."""

GUESSES = 70
DELAY_SECONDS = 0.14
ALMOST_FULL_BYTES = 128 * 1024 * 1024
"""Free space on an almost full disk: less than the rule demands, more than the reserve needs."""

Cause = Callable[[Deployment], Callable[[], object]]
"""Cause a fault, and return how to undo it."""


@dataclass(frozen=True)
class AlertFault:
    """`needs_disk`: it needs a small file system. `is_restarting`: programs that end during the fault are restarted."""

    alerts: frozenset[str]
    cause: Cause
    needs_disk: bool = False
    is_restarting: bool = True


def _kill(name: str) -> Cause:
    """Kill the worker or beat. Before it is started again, the server must have sent an alarm about it."""

    def cause(deployment: Deployment) -> Callable[[], object]:
        before, received = len(deployment.hooks.received), deployment.hooks.received
        deployment.kill(name)

        def is_sent() -> bool:
            return any(NoticeKind.PROCESS_LOST.encode() in each.body for each in received[before:])

        def undo() -> None:
            until("an alarm to be sent", is_sent, STEP_SECONDS)
            deployment.supervisor.restart_ended()

        return undo

    return cause


def _kill_worker(deployment: Deployment) -> Callable[[], object]:
    """Kill the worker, and let a webhook message wait for it."""
    undo = _kill("worker")(deployment)
    deployment.revoke(deployment.issue_key())
    return undo


def _stop(name: str) -> Cause:
    def cause(deployment: Deployment) -> Callable[[], object]:
        server = deployment.options.servers[name]
        server.stop(signal.SIGINT if name == "postgres" else signal.SIGKILL)
        return server.start

    return cause


def _lose_log(deployment: Deployment) -> Callable[[], object]:
    aside = deployment.log.with_name("aside")
    deployment.log.rename(aside)
    return lambda: aside.rename(deployment.log)


def _make_log_read_only(deployment: Deployment) -> Callable[[], object]:
    """Make the file system of the revocation log read-only, and revoke a key."""

    def remount(option: str) -> None:
        command = ["mount", "-o", f"remount,{option}", str(deployment.disk)]
        subprocess.run(command, check=True)

    remount("ro")
    deployment.revoke_through_server()
    return lambda: remount("rw")


def _step_clock(deployment: Deployment) -> Callable[[], object]:
    deployment.clock.write_text("30")
    return lambda: deployment.clock.write_text("0")


def _fill_disk(left_bytes: int) -> Cause:
    def cause(deployment: Deployment) -> Callable[[], object]:
        assert deployment.disk is not None
        filler = deployment.disk / "filler"
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while not left_bytes or disk_usage(deployment.disk).free > left_bytes:
                file.write(bytes(1 << 20))
        return filler.unlink

    return cause


def _stall_rotation(deployment: Deployment) -> Callable[[], object]:
    plan = {"proof": Proof.TRAFFIC, "proof_count": 2, "proof_sources": 1}
    rotation = scene.rotate(deployment.merchant.credential, datetime.now(UTC), **plan)
    mine = Rotation.objects.filter(pk=rotation.pk)
    until("a delivered replacement", lambda: mine.filter(state=S.AWAITING_PROOF).exists(), STEP_SECONDS)
    rotation = mine.get()
    suspend_key(grant(scene.admin(), P.KEYS_SUSPEND, deployment.account), rotation.predecessor)
    until("the rotation to stall", lambda: mine.filter(state=S.STALLED).exists(), STEP_SECONDS)
    return lambda: None


def _refuse_webhooks(deployment: Deployment) -> Callable[[], object]:
    """Answer webhooks of merchants and of alarms with 500; a message of a merchant has been tried for long enough."""
    deployment.hooks.status = 500
    with transaction.atomic():
        deployment.revoke(deployment.issue_key())
        WebhookDelivery.objects.filter(state="due").update(give_up_at=datetime.now(UTC))

    def undo() -> None:
        deployment.hooks.status = 200

    return undo


def _guess_password(deployment: Deployment) -> Callable[[], object]:
    """Try many passwords of an operator; no operator acknowledges the alarm about it."""
    with suppress(StateConflictError):
        mark_all_seen(grant(scene.approver(), P.NOTICES_MARK), datetime.now(UTC))
    url = f"{local_url(deployment.port)}/admin/login/"
    browser = build_opener(HTTPCookieProcessor(CookieJar()))
    page = browser.open(url, timeout=30).read().decode()
    (token,) = re.findall(r'name="csrfmiddlewaretoken" value="(\w+)"', page)[:1]
    for number in range(GUESSES):
        fields = {"username": scene.admin().username, "password": f"guess {number}", "csrfmiddlewaretoken": token}
        with suppress(HTTPError):
            browser.open(url, urlencode(fields).encode(), timeout=30).close()
    return lambda: mark_all_seen(grant(scene.approver(), P.NOTICES_MARK), datetime.now(UTC))


def _lose_keystore(deployment: Deployment) -> Callable[[], object]:
    """Move the secret backend away, and revoke a key: neither the anchor nor a signature can be written."""
    keystore = deployment.options.folder / "keystore.sqlite3"
    aside = keystore.with_name("aside.sqlite3")
    key = deployment.issue_key()
    keystore.rename(aside)
    deployment.revoke(key)
    return lambda: aside.rename(keystore)


def _rename_table(deployment: Deployment) -> Callable[[], object]:
    """Take the table of keys away, which requests, verification and workers need, as after a restore of some tables."""
    table = Key._meta.db_table

    def rename(name: str, to: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"ALTER TABLE {name} RENAME TO {to}")

    rename(table, f"{table}_aside")
    return lambda: rename(f"{table}_aside", table)


def _slow_down_database(deployment: Deployment) -> Callable[[], object]:
    deployment.proxy.send_command(f"delay {DELAY_SECONDS}")
    return lambda: deployment.proxy.send_command("delay 0")


def _seal(deployment: Deployment) -> Callable[[], object]:
    """Seal the Vault, and revoke a key: the worker needs its token for the anchor, and cannot renew it."""
    assert deployment.vault is not None
    key = deployment.issue_key()
    deployment.vault.seal()
    deployment.revoke(key)
    return deployment.vault.unseal


def _seal_and_restart(deployment: Deployment) -> Callable[[], object]:
    """Seal the Vault, and start the worker again. The fault begins when it runs: the restart fires its own alert."""
    undo = _seal(deployment)
    deployment.kill("worker")
    prometheus = deployment.prometheus

    def is_back() -> bool:
        return prometheus.are_all_scraped() and "KeyvaultTargetDown" not in prometheus.firing()

    try:
        until("the worker to be missed", lambda: not prometheus.are_all_scraped(), STEP_SECONDS)
        until("the worker to be scraped again", is_back, RESTART_SECONDS, deployment.supervisor.restart_ended)
    except GaveUpError:
        undo()
        raise
    return undo


ON_HOSTS: Mapping[str, AlertFault] = {
    "the worker is killed while work is due": AlertFault(
        frozenset({"KeyvaultProcessLost", "KeyvaultTargetDown", "KeyvaultQueueDelayed"}),
        _kill_worker,
        is_restarting=False,
    ),
    "beat is killed": AlertFault(
        frozenset({"KeyvaultProcessLost", "KeyvaultTargetDown"}), _kill("beat"), is_restarting=False
    ),
    "Redis is lost": AlertFault(frozenset({"KeyvaultRedisUnavailable", "KeyvaultLimitStoreLost"}), _stop("redis")),
    "PostgreSQL is lost": AlertFault(
        frozenset({"KeyvaultDatabaseUnavailable", "KeyvaultChangeFeedStale", "KeyvaultServerErrors"}),
        _stop("postgres"),
    ),
    "the revocation log is lost": AlertFault(frozenset({"KeyvaultRevocationLogMissing"}), _lose_log),
    "the revocation log is read-only": AlertFault(
        frozenset({"KeyvaultRevocationLogFailing"}), _make_log_read_only, needs_disk=True
    ),
    "a clock is wrong": AlertFault(frozenset({"KeyvaultClockDiffers"}), _step_clock),
    "a disk is almost full": AlertFault(
        frozenset({"KeyvaultDiskAlmostFull"}), _fill_disk(ALMOST_FULL_BYTES), needs_disk=True
    ),
    "a disk is full": AlertFault(frozenset({"KeyvaultDiskFull"}), _fill_disk(0), needs_disk=True),
}

AT_WORK: Mapping[str, AlertFault] = {
    "webhooks are answered with 500": AlertFault(
        frozenset({"KeyvaultWebhooksGivenUp", "KeyvaultAlarmsUndelivered"}), _refuse_webhooks
    ),
    "a password is guessed": AlertFault(
        frozenset({"KeyvaultSignInRefusals", "KeyvaultAlarmsUnacknowledged"}), _guess_password
    ),
    "the keystore is lost": AlertFault(
        frozenset({"KeyvaultRevocationAnchorLate", "KeyvaultAuditUnsigned"}), _lose_keystore
    ),
    "a table is missing": AlertFault(
        frozenset({"KeyvaultServerErrors", "KeyvaultVerifyErrors", "KeyvaultTaskFailing"}), _rename_table
    ),
    "the database is slow": AlertFault(frozenset({"KeyvaultVerifySlow"}), _slow_down_database),
    # The last one: the rotation stays stalled.
    "a rotation stalls": AlertFault(frozenset({"KeyvaultRotationStalled"}), _stall_rotation),
}

ON_VAULT: Mapping[str, AlertFault] = {
    "the Vault is sealed": AlertFault(frozenset({"KeyvaultVaultSealed", "KeyvaultVaultTokenExpires"}), _seal),
    "the worker starts while the Vault is sealed": AlertFault(
        frozenset({"KeyvaultVaultSealed", "KeyvaultRevocationLogUncompared"}), _seal_and_restart
    ),
}

PARTS: Mapping[str, Mapping[str, AlertFault]] = {"hosts": ON_HOSTS, "work": AT_WORK, "vault": ON_VAULT}
"""The faults by part. The parts run at the same time, each with servers of its own."""
