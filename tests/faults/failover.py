"""PostgreSQL's primary is lost, and a standby that lags is promoted: no revocation is lost with the primary.

The standby streams through a network that is then held, so that the last revocations reach the primary and the
revocation log only. The service is stopped, the standby promoted, the log replayed, and the service started, on the
same KEYVAULT_DATABASE_URL, which names both servers.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg
from django.db import connections

from keyvault.access.permissions import Permission as P
from keyvault.domain.keys import DEAD_STATES
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.revocation import RevocationReason
from keyvault.models import Key
from keyvault.services.keys.lifecycle import revoke_key
from tests.environment import ROOT
from tests.factories import grant
from tests.faults import expected_verdicts
from tests.faults.campaign import begin_campaign, is_over
from tests.faults.merchants import gateway_token, make_merchants
from tests.faults.programs import GaveUpError, served, until
from tests.faults.proxy import Proxy
from tests.faults.results import Options, Result, say
from tests.faults.servers import DATABASE_NAME, Restartable
from tests.faults.traffic import Merchant, MerchantTraffic, VerificationAnswer, VerifierClient
from tests.rotation import scene
from tests.servers import postgres
from tests.servers.throwaway import Place, Plan, new_directory, unprivileged_owner

MEMBERS = 20
REPLICATED, UNREPLICATED = 4, 6
"""Keys revoked before and after the standby was cut off."""

STANDBY_ADDRESS = "127.0.0.2"
"""Another host's address, so that both servers have the same port, as in a URL with two hosts."""

STREAM_SECONDS = 30
END_SECONDS = 600
AWAY_SECONDS = 6


def run(options: Options) -> Result:
    result, primary = Result("keys revoked", n=REPLICATED + UNREPLICATED), options.servers["postgres"]
    merchants, token = make_merchants(MEMBERS), gateway_token()
    victims = [_issue(number) for number in range(REPLICATED + UNREPLICATED)]
    proxy = Proxy(urlsplit(primary.url).port or 0)
    try:
        with _standby(primary.url, proxy) as standby:
            environ = {"KEYVAULT_DATABASE_URL": _both_hosts(os.environ["KEYVAULT_DATABASE_URL"])}
            _lose_primary(options, result, primary, standby, proxy, merchants, victims, token, environ)
            _promote(standby)
            _follow_promoted(environ)
            _recover(result, victims, environ)
            _serve_again(options, result, merchants, victims, token, environ)
            connections.close_all()
    except GaveUpError as gave_up:
        result.must_be(False, str(gave_up))
    finally:
        proxy.close()
    return result


def _issue(number: int) -> tuple[str, Plaintext]:
    key, text = scene.issue(scene.account("victims"), datetime.now(UTC), label=f"victim {number}")
    return key.key_id, text


# --- the servers ----------------------------------------------------------------------------------------------


@contextmanager
def _standby(url: str, proxy: Proxy) -> Iterator[Restartable]:
    """A standby of the primary at `url`, made with pg_basebackup, that streams through the proxy."""
    owner = unprivileged_owner()
    port = urlsplit(url).port or 0
    place = Place(new_directory("kv-standby-", owner), port, owner)
    server = Restartable(_plan_standby(url, proxy, place), place)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.end()


def _plan_standby(url: str, proxy: Proxy, place: Place) -> Plan:
    binary = postgres.find_postgres()
    assert binary is not None
    parts = urlsplit(url)
    source = urlunsplit(parts._replace(netloc=f"{parts.username}:{parts.password}@127.0.0.1:{proxy.port}"))
    here = urlunsplit(parts._replace(netloc=f"{parts.username}:{parts.password}@{STANDBY_ADDRESS}:{place.port}"))
    data = place.directory / "data"
    settings = {
        "port": place.port,
        "listen_addresses": STANDBY_ADDRESS,
        "unix_socket_directories": place.directory,
        "max_connections": postgres.CONNECTIONS,
        "timezone": "UTC",
        "fsync": "off",
        "synchronous_commit": "on",
    }
    options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    copy = [
        str(binary.with_name("pg_basebackup")),
        f"--pgdata={data}",
        f"--dbname={source}",
        "--write-recovery-conf",
        "--checkpoint=fast",
        "--no-sync",
    ]
    return Plan(
        url=here,
        prepare=(copy,),
        serve=[str(binary), "-D", str(data), *options],
        is_ready=lambda: postgres._answers(here),
        stop_signal=signal.SIGQUIT,
    )


def _both_hosts(url: str) -> str:
    parts = urlsplit(url)
    hosts = f"{parts.hostname},{STANDBY_ADDRESS}"
    return urlunsplit(parts._replace(netloc=f"{parts.username}:{parts.password}@{hosts}:{parts.port}"))


def _has_streamed(primary: Restartable, standby: Restartable) -> bool:
    with psycopg.connect(primary.url) as one, psycopg.connect(standby.url) as other:
        (at,) = _fetch(one, "SELECT pg_current_wal_lsn()::text")
        (reached,) = _fetch(other, f"SELECT coalesce(pg_last_wal_replay_lsn() >= '{at}'::pg_lsn, false)")
    return bool(reached)


def _fetch(connection: psycopg.Connection, query: str) -> Any:
    row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row


def _promote(standby: Restartable) -> None:
    with psycopg.connect(standby.url, autocommit=True) as connection:
        (is_promoted,) = _fetch(connection, "SELECT pg_promote(wait => true, wait_seconds => 30)")
    if not is_promoted:
        raise GaveUpError("the standby is not promoted")
    say("the standby is promoted")


def _follow_promoted(environ: Mapping[str, str]) -> None:
    """Let this process, which is an operator's, use the promoted server as the service does."""
    connections.close_all()
    connections["default"].settings_dict["HOST"] = urlsplit(environ["KEYVAULT_DATABASE_URL"]).hostname
    assert DATABASE_NAME in environ["KEYVAULT_DATABASE_URL"]


# --- the loss -------------------------------------------------------------------------------------------------


def _lose_primary(
    options: Options,
    result: Result,
    primary: Restartable,
    standby: Restartable,
    proxy: Proxy,
    merchants: list[Merchant],
    victims: list[tuple[str, Plaintext]],
    token: Plaintext,
    environ: Mapping[str, str],
) -> None:
    """Revoke on the primary, part of it unseen by the standby, and kill the primary under traffic. Then stop all."""
    with (
        served(options.folder, environ=environ) as (service, port),
        MerchantTraffic(merchants, port, token, 40, options.seed) as sent,
    ):
        client = VerifierClient(port, token)
        result.must_be_none("refused that should pass", _must_allow(client, victims))
        _revoke(victims[:REPLICATED])
        until("the standby to follow", lambda: _has_streamed(primary, standby), STREAM_SECONDS, service.restart_ended)
        proxy.send_command("hold")
        _revoke(victims[REPLICATED:])
        result.must_be_none("allowed that should not", _must_refuse(client, victims))
        result.must_be(not _has_streamed(primary, standby), "the standby has what it should lack")
        service.wait(1)
        lost_at = time.time()
        primary.stop(signal.SIGQUIT)
        say("the primary is lost, with revocations that the standby lacks")
        until_then = time.monotonic() + AWAY_SECONDS
        while time.monotonic() < until_then:
            service.restart_ended()
            result.must_be_none("allowed that should not", _must_refuse(client, victims))
            service.wait(0.5)
        client.close()
    wrong = [
        f"{each.key_id} {each.status} {each.code}{each.fault}"
        for each in sent.answers
        if not each.is_yes and not (each.answered_at >= lost_at and each.status == 503)
    ]
    result.counts |= {"requests": len(sent.answers), "503 in the outage": sum(a.status == 503 for a in sent.answers)}
    result.must_be_none("refused that should pass", wrong)


def _revoke(victims: list[tuple[str, Plaintext]]) -> None:
    for key_id, _ in victims:
        key = Key.objects.get(pk=key_id)
        revoke_key(grant(scene.admin(), P.KEYS_REVOKE, key.credential.account), key, RevocationReason.KEY_COMPROMISE)


def _ask(client: VerifierClient, victims: list[tuple[str, Plaintext]]) -> list[VerificationAnswer]:
    return [client.ask(key_id, text, 0, is_dry=True) for key_id, text in victims]


def _must_allow(client: VerifierClient, victims: list[tuple[str, Plaintext]]) -> list[str]:
    return [f"{each.key_id}: {each.status} {each.code}" for each in _ask(client, victims) if not each.is_yes]


def _must_refuse(client: VerifierClient, victims: list[tuple[str, Plaintext]]) -> list[str]:
    return [f"{each.key_id} is allowed" for each in _ask(client, victims) if each.is_yes]


# --- the runbook ----------------------------------------------------------------------------------------------


def _manage(environ: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    environ = {**os.environ, **environ}
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120, check=False)


def _recover(result: Result, victims: list[tuple[str, Plaintext]], environ: Mapping[str, str]) -> None:
    good = set(Key.objects.exclude(state__in=DEAD_STATES).values_list("pk", flat=True)) & {name for name, _ in victims}
    result.counts["revoked keys that the standby holds active"] = len(good)
    result.must_be(good == {name for name, _ in victims[REPLICATED:]}, f"the standby lacks {len(good)} revocations")
    start = _manage(environ, "-c", "import keyvault.project.wsgi")
    is_refused = start.returncode != 0 and "manage.py replay_revocations" in start.stderr
    result.must_be(is_refused, f"the start is not refused: {start.returncode} {start.stderr[-500:]}")
    replay = _manage(environ, "manage.py", "replay_revocations")
    result.must_be(replay.returncode == 0, f"the replay fails: {replay.stdout[-500:]} {replay.stderr[-500:]}")
    say(f"replayed: {replay.stdout.count('revoked again')}")
    result.counts["revoked again"] = replay.stdout.count("revoked again")


def _serve_again(
    options: Options,
    result: Result,
    merchants: list[Merchant],
    victims: list[tuple[str, Plaintext]],
    token: Plaintext,
    environ: Mapping[str, str],
) -> None:
    """The service starts on the promoted server, refuses what was revoked, and rotates."""
    with (
        served(options.folder, environ=environ) as (service, port),
        MerchantTraffic(merchants, port, token, 40, options.seed) as sent,
    ):
        client = VerifierClient(port, token)
        result.must_be_none("allowed that should not", _must_refuse(client, victims))
        campaign = begin_campaign()
        until("the end of the campaign", lambda: is_over(campaign, MEMBERS), END_SECONDS, service.restart_ended)
        result.must_be_none("allowed that should not", _must_refuse(client, victims))
        client.close()
    result.counts["rotated afterwards"] = campaign.rotations.filter(state="completed").count()
    expected_verdicts.judge_traffic(result, sent.answers)
    expected_verdicts.judge_end(result, merchants)
