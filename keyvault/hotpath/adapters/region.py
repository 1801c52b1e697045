"""The verifier of a region: the engine without a log-in to the database.

It reads records, rules and the change feed from the central service, with a service token that may replicate digests.
Peppers come from the region's own secret backend, and limits are counted in the region. While the central service is
unreachable, the verifier answers from memory for the token's staleness bound, and with `verifier_stale` after that.
"""

import asyncio
import base64
import hashlib
import json
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from keyvault.access.catalog import BUILT_IN, Bearer, Endpoint, LimiterFailurePolicy, parse_context
from keyvault.access.customers import CustomerRecord
from keyvault.access.limits import Limit
from keyvault.access.permissions import Permission
from keyvault.access.policy_snapshot import PolicySnapshot
from keyvault.access.principals import Service
from keyvault.access.scopes import AccessScope
from keyvault.access.verification import TokenRecord
from keyvault.backends.base import BackendError
from keyvault.backends.central import CentralRefusedError, CentralService, CentralUnavailableError
from keyvault.domain.digests import PepperSet
from keyvault.domain.environments import Environment
from keyvault.domain.errors import DependencyUnavailableError, KeyvaultError
from keyvault.domain.keys import KeyKind, KeyRecord, KeyState, RetirementReason
from keyvault.domain.networks import parse_network
from keyvault.domain.timestamps import format_timestamp
from keyvault.hotpath.adapters.assembly import AssembledVerifier, Status, make_engine
from keyvault.hotpath.engine.ports import Ports
from keyvault.hotpath.frontends.asyncio_frontend import AsyncStore
from keyvault.hotpath.frontends.threaded_frontend import StoreUnavailableError
from keyvault.hotpath.messages.pending_requests import CUSTOMER, KEY, TOKEN, Found
from keyvault.models import PepperVersion
from keyvault.services.change_feed.readers import MAX_NAME_LENGTH, MAX_USES, OLDEST_USE
from keyvault.services.change_feed.remote_follower import RemoteFollower
from keyvault.services.change_feed.snapshot import MAX_KEYS
from keyvault.services.limits.limiter import failed_proofs
from keyvault.services.peppers.ring import list_served_sets, load_peppers, pepper_health
from keyvault.services.startup.readiness import readiness_body
from keyvault.services.usage.recorder import Report, Uses, usage_log
from keyvault.services.verification.judging import record_buckets
from keyvault.services.verification.refusals import refusal_log

_log = logging.getLogger(__name__)

R = TypeVar("R")

READ_SECONDS: Final = 4.0
"""Maximum time of one read for a request, in seconds. Below every staleness bound: an older reply must not be used."""

READ_THREADS: Final = 8
"""Number of threads that read from the central service."""

_PEPPER_SECONDS: Final = 5.0
_PIECE_BYTES: Final = 60_000
"""Maximum size of the uses of one piece as JSON, in bytes. The service reads bodies of 64 KiB."""

_MAX_AGE: Final = OLDEST_USE - timedelta(hours=1)
"""Maximum age of a use that is sent. The hour is for the difference of the clocks and for the time that pieces take."""


class CentralStore(AsyncStore):
    """Records and rules from the central service."""

    def __init__(self, central: CentralService) -> None:
        self._central = central
        self._threads = ThreadPoolExecutor(READ_THREADS, "central")
        self.default_limits: Mapping[str, Limit] = {}

    async def find(self, kind: str, ids: frozenset[str]) -> Mapping[str, Found]:
        return await self._run(lambda: self._find(kind, sorted(ids)))

    async def read_rules(self, known: PolicySnapshot | None) -> PolicySnapshot:
        return await self._run(lambda: self._read_rules(known))

    def default_limit(self, environment: Environment) -> Limit:
        """Return the central service's default limit of an account. It is known once the rules were read."""
        return self.default_limits[environment]

    async def open(self) -> None:
        """Open nothing: the first read connects."""

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, read: Callable[[], R]) -> R:
        try:
            async with asyncio.timeout(READ_SECONDS):
                return await asyncio.get_running_loop().run_in_executor(self._threads, read)
        except (CentralUnavailableError, CentralRefusedError, TimeoutError) as error:
            raise StoreUnavailableError(str(error)) from error

    def _find(self, kind: str, ids: Sequence[str]) -> Mapping[str, Found]:
        path, parameter, member, parse = _SNAPSHOTS[kind]
        found: dict[str, Found] = {}
        for start in range(0, len(ids), MAX_KEYS):
            body = self._central.get(path, {parameter: ",".join(ids[start : start + MAX_KEYS])})
            found |= {each[parameter[:-1]]: parse(each) for each in body[member]}
        return found

    def _read_rules(self, known: PolicySnapshot | None) -> PolicySnapshot:
        body = self._central.get("/v1/snapshot")
        state = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).digest()
        if known is not None and known.state == state:
            return known
        limits = body["limits"]
        self.default_limits = {name: _limit(limit) for name, limit in limits["default"].items()}
        overrides = {
            (each["account_id"], each["environment"], each["endpoint"]): (_limit(each["limit"]), each["setting"])
            for each in limits["overrides"]
        }
        added = [_endpoint(each) for each in body["endpoints"] if not each["built_in"]]
        return PolicySnapshot(BUILT_IN.with_added(added), overrides, state)


class CentralPeppers:
    """Lists the pepper versions of the central service. While it does not answer, the last list counts."""

    def __init__(self, central: CentralService) -> None:
        self._central = central
        self._rows: list[dict[str, Any]] = []
        self._read_at = float("-inf")
        self._lock = threading.Lock()

    def __call__(self, pepper_set: PepperSet) -> list[PepperVersion]:
        """Return the versions of a set. Raises CentralUnavailableError if no list was read yet."""
        with self._lock:
            if time.monotonic() - self._read_at >= _PEPPER_SECONDS:
                try:
                    self._rows = self._central.get("/v1/snapshot/peppers")["peppers"]
                    self._read_at = time.monotonic()
                except (CentralUnavailableError, CentralRefusedError) as error:
                    if not self._rows:
                        raise CentralUnavailableError("The peppers are not known yet.", internal=str(error)) from error
            rows = [row for row in self._rows if row["pepper_set"] == pepper_set]
        return [
            PepperVersion(
                pepper_set=row["pepper_set"],
                number=row["number"],
                check_value=base64.b64decode(row["check_value"]),
                created_at=_time(row["created_at"]),
                hashes_from_at=_time(row["hashes_from_at"]),
                retired_at=_time(row["retired_at"]),
            )
            for row in rows
        ]


class CentralSink:
    """Sends the reports of this process to the central service, which knows it as a reader."""

    keeps_file = False

    def __init__(self, central: CentralService, name: str) -> None:
        self._central = central
        self._name = name
        self._through = datetime.now(UTC)
        self._report = self._first = self._last = 0
        """The report that was sent last, the number of its first piece, and that of the last piece sent."""

    def register(self, reporter_id: str, now: datetime, report: int) -> None:
        """Do nothing: the first read of the feed registers the reader."""

    def store(self, report: Report) -> bool:
        """Send a report in pieces. Only the last one moves the watermark. Raises CentralUnavailableError.

        Uses that the service never takes are dropped, so that they do not block those after them.
        """
        oldest = datetime.now(UTC) - _MAX_AGE
        pieces = _split(_use(row, oldest) for rows in report.counted for row in rows)
        if report.number != self._report:  # else it is sent again, under the same numbers
            self._report, self._first = report.number, self._last + 1
        for number, uses in enumerate(pieces, self._first):
            is_last = number == self._first + len(pieces) - 1
            self._last = max(self._last, number)
            self._send(
                number=number,
                through=report.through if is_last else self._through,
                uses=uses,
                is_final=report.is_final and is_last,
            )
        self._through = report.through
        return True

    def shred(self, report: Report) -> None:
        """Do nothing: stored replies expire."""

    def report_dead(self, now: datetime) -> None:
        """Do nothing: no file keeps the uses of a killed process. The silence of keys starts again instead."""

    def _send(self, *, number: int, through: datetime, uses: Sequence[dict[str, object]], is_final: bool) -> None:
        body = {
            "reader": self._name,
            "number": number,
            "flushed_through": format_timestamp(through),
            "is_final": is_final,
            "uses": uses,
            "peppers": load_peppers.newest_versions(),
        }
        try:
            self._central.post("/v1/usage-reports", body)
        except CentralRefusedError as error:
            refused = _refused_uses(error)
            accepted = [use for index, use in enumerate(uses) if index not in refused]
            if len(accepted) == len(uses):
                # An unknown reader registers with its next read of the feed. The report is kept until then.
                raise CentralUnavailableError("The usage report was refused.", internal=str(error)) from error
            why = ", ".join(error.pointers[:3])
            _log.warning(
                "the central service refused reported uses; they are dropped",
                extra={"count": len(uses) - len(accepted), "why": why},
            )
            # A refused report is not stored, so its number is free.
            self._send(number=number, through=through, uses=accepted, is_final=is_final)


class RegionalVerifier(AssembledVerifier):
    """The engine of a regional verifier process."""

    def __init__(self) -> None:
        central = central_service()
        name = usage_log.reporter_id[-MAX_NAME_LENGTH:]
        store = CentralStore(central)

        def adapt(ports: Ports) -> Ports:
            return replace(
                ports,
                buckets=lambda record, endpoint, limit, setting: record_buckets(
                    record, endpoint, limit, setting, store.default_limit
                ),
                note_key_proof=lambda *proof: None,
                note_token_proof=lambda *proof: None,
            )

        engine = make_engine(failed_proofs().note_here, load_peppers.loaded, adapt)

        def set_bound(seconds: float) -> None:
            engine.freshness.bound_seconds = seconds

        self._remote = RemoteFollower(central, name, engine.evict, engine.freshness.confirm, set_bound)
        usage_log.sink = CentralSink(central, name)
        refusal_log.keeps_rows = False
        super().__init__(engine, store)

    def begin(self) -> None:
        """Read the feed once, so that the service knows this reader before its first report. Then follow and report."""
        try:
            self._remote.read_once()
            self._remote.confirm_once()
        except (CentralUnavailableError, CentralRefusedError) as error:
            _log.warning("the central service does not answer yet; requests get verifier_stale", extra={"why": error})
        self._remote.start()
        usage_log.start()

    def end(self) -> None:
        """Stop answering from memory, then deregister with the last report."""
        for stop in (self._remote.stop, usage_log.stop):
            try:
                stop()
            except Exception:  # noqa: BLE001  the process ends in any case
                _log.exception("recorded data could not be sent at exit")

    def ready(self) -> Status:
        checks = {f"peppers_{pepper_set}": ready for pepper_set, ready in pepper_health().items()}
        return readiness_body({**checks, "change_feed": self._remote.is_fresh})


def load_region() -> RegionalVerifier:
    return RegionalVerifier()


def central_service() -> CentralService:
    return CentralService(settings.REGION_SOURCE, settings.REGION_TOKEN, settings.REGION_CA_FILE or None)


def start_region_or_exit() -> None:
    """Load the peppers at process start. Exit with one line if they are not those of the central service.

    A set that cannot be loaded yet is loaded later; until then its requests get `verifier_stale`.
    """
    load_peppers.read_rows = CentralPeppers(central_service())
    for pepper_set in list_served_sets():
        try:
            load_peppers(pepper_set)
        except (BackendError, DependencyUnavailableError) as error:
            why = error.internal or error.detail
            _log.error("not ready: peppers cannot be read yet", extra={"set": pepper_set, "why": why})
        except (KeyvaultError, ImproperlyConfigured) as error:
            why = getattr(error, "internal", "")
            sys.exit(f"the regional verifier does not start: {error} {why}".rstrip())


# --- parsing --------------------------------------------------------------------------------------------------


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def _limit(body: Mapping[str, int]) -> Limit:
    return Limit(body["count"], body["seconds"])


def _endpoint(body: Mapping[str, Any]) -> Endpoint:
    return Endpoint(
        name=body["name"],
        method=body["method"],
        path=body["path"],
        credentials=frozenset(map(KeyKind, body["credentials"])),
        bearer=Bearer(body["bearer"]),
        idempotent_by_key=body["idempotency_key"],
        summary=body["summary"],
        merchant_from=parse_context(body["merchant_from"] or ""),
        store_from=parse_context(body["store_from"] or ""),
        limit=None if body["limit"] is None else _limit(body["limit"]),
        on_limiter_loss=LimiterFailurePolicy(body["on_limiter_loss"]),
        is_built_in=False,
    )


def _key(body: Mapping[str, Any]) -> KeyRecord:
    limit = body["limit"]
    return KeyRecord(
        key_id=body["key_id"],
        credential_id=body["credential_id"],
        kind=KeyKind(body["kind"]),
        environment=Environment(body["environment"]),
        merchant_id=body["merchant_id"],
        digest=base64.b64decode(body["digest"]),
        pepper_version=body["pepper_version"],
        state=KeyState(body["state"]),
        retirement=None if body["retirement"] is None else RetirementReason(body["retirement"]),
        expires_at=_time(body["expires_at"]),
        merchant_active=body["merchant_active"],
        account_active=body["account_active"],
        reports_origin=body["origin_header"] == "report",
        networks=tuple(map(parse_network, body["networks"])),
        account_id=body["account_id"],
        limit_count=None if limit is None else limit["count"],
        limit_seconds=None if limit is None else limit["seconds"],
        account_version=body["account_version"],
    )


def _token(body: Mapping[str, Any]) -> TokenRecord:
    expires_at = datetime.fromisoformat(body["expires_at"])
    service = Service(
        token_id=body["token_id"],
        name=body["name"],
        person=body["person"],
        permissions=frozenset(map(Permission, body["permissions"])),
        scope=AccessScope.from_json(body["scope"]),
        lineage=body["lineage"],
        is_probe=body["is_probe"],
    )
    digest = base64.b64decode(body["digest"])
    return TokenRecord(service, digest, body["pepper_version"], expires_at, _time(body["revoked_at"]))


def _customer(body: Mapping[str, Any]) -> CustomerRecord:
    return CustomerRecord(
        token_id=body["token_id"],
        environment=Environment(body["environment"]),
        merchant_id=body["merchant_id"],
        customer_id=body["customer_id"],
        digest=base64.b64decode(body["digest"]),
        pepper_version=body["pepper_version"],
        expires_at=datetime.fromisoformat(body["expires_at"]),
        revoked_at=_time(body["revoked_at"]),
    )


def _split(uses: Iterable[dict[str, object]]) -> list[list[dict[str, object]]]:
    """Return the uses in pieces that each fit in one request: at least one piece, which may be empty."""
    pieces: list[list[dict[str, object]]] = [[]]
    size = 0
    for use in uses:
        length = len(json.dumps(use)) + len(", ")
        if pieces[-1] and (size + length > _PIECE_BYTES or len(pieces[-1]) == MAX_USES):
            pieces.append([])
            size = 0
        pieces[-1].append(use)
        size += length
    return pieces


def _refused_uses(error: CentralRefusedError) -> set[int]:
    """Return the numbers of the uses with a member that the service does not accept.

    Faults of times are ignored, in a use (`/uses/0`) and in the report (`/flushed_through`): the clock may be
    corrected, and the report is sent again.
    """
    if "/flushed_through" in error.pointers:
        return set()
    found = (re.match("/uses/([0-9]{1,6})/", pointer) for pointer in error.pointers)
    return {int(match[1]) for match in found if match is not None}


def _use(row: Uses, oldest: datetime) -> dict[str, object]:
    """Return the use as the service takes it. Older times become `oldest`, so that silence never covers the use."""
    key_id, endpoint, source, user_agent, origin, outcome, count, first, last = row
    times = (max(datetime.fromtimestamp(at, UTC), oldest) for at in (first, last))
    # Always of the same length: a repeated report has the same pieces.
    first_at, last_at = (format_timestamp(at, "microseconds") for at in times)
    texts = {"endpoint": endpoint, "source": source, "user_agent": user_agent, "origin": origin}
    return {"key_id": key_id, **texts, "outcome": outcome, "count": count, "first_at": first_at, "last_at": last_at}


_SNAPSHOTS: Final[Mapping[str, tuple[str, str, str, Callable[[Mapping[str, Any]], Found]]]] = {
    KEY: ("/v1/snapshot/keys", "key_ids", "keys", _key),
    TOKEN: ("/v1/snapshot/tokens", "token_ids", "tokens", _token),
    CUSTOMER: ("/v1/snapshot/customers", "token_ids", "customers", _customer),
}
