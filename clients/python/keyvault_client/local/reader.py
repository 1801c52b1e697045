"""Follows the change feed, and reports uses, in two threads of the process."""

import json
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Mapping
from threading import Event, Lock, Thread
from typing import Any
from urllib.parse import urlencode

from keyvault_client.effects import Failure
from keyvault_client.local.memory import LocalMemory, clock
from keyvault_client.local.uses import LocalReport, format_time
from keyvault_client.retries import parse_http_date
from keyvault_client.transport import SyncRunner
from keyvault_client.verifier import ServiceAddress

logger = logging.getLogger("keyvault_client")

_WAIT_SECONDS = 20
"""Time that the service may wait for a change before it answers, in seconds."""

_ANSWER_SECONDS = 5.0
"""Time that an answer may take beyond the wait, in seconds."""

_REPORT_SECONDS = 1.0
"""Interval between reports of uses, in seconds."""

_PAUSE_SECONDS = 0.5
"""Pause after a failure, in seconds."""

_MAX_FETCHED = 100
"""Maximum key records of one request."""


class UnexpectedReplyError(Exception):
    """The service did not answer as documented. `status` 0: it did not answer."""

    def __init__(self, status: int, cause: str, members: Mapping[str, Any] | None = None) -> None:
        super().__init__(cause)
        self.status = status
        self.members = members or {}


class LocalFeedReader:
    """A registered reader of the change feed. It registers again after the service has dropped it."""

    def __init__(self, address: ServiceAddress, runner: SyncRunner, memory: LocalMemory) -> None:
        self._address = address
        self._runner = runner
        self._memory = memory
        self._begin()

    def _begin(self) -> None:
        host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:20]
        self._name = f"{host}-{os.getpid()}-{secrets.token_hex(4)}"[:40]
        self._lock = Lock()
        self._started = False
        self._logged = ""
        self._stopped, self._woken, self._finished, self._registered = Event(), Event(), Event(), Event()

    def start(self) -> None:
        """Start the threads, once in a process."""
        if self._started:
            return
        with self._lock:
            if not self._started:
                self._started = True
                Thread(target=self._follow, name="keyvault-feed", daemon=True).start()
                Thread(target=self._maintain, name="keyvault-uses", daemon=True).start()

    def restart(self, memory: LocalMemory) -> None:
        """Begin again in a forked process, which has no threads, and must not report the uses of its parent."""
        self._memory = memory
        self._begin()

    def wake(self) -> None:
        """Make the thread read what the memory lacks."""
        self._woken.set()

    def close(self) -> None:
        """Report the last uses, and deregister."""
        self._memory.close()
        self._stopped.set()
        self._woken.set()
        if self._started:
            self._finished.wait(_ANSWER_SECONDS)

    # --- the feed ---------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        after: int | None = None
        while not self._stopped.is_set():
            try:
                after = self._read(after)
                self._logged = ""
            except UnexpectedReplyError as error:
                if error.status == 410:
                    self._memory.forget()
                    if after is not None:
                        after = None
                        continue
                # A registration gets 410 while receipts still wait for this reader and its confirmation is overdue.
                self._pause(error)
            except Exception as error:  # noqa: BLE001  an unreadable change must not end the thread
                self._memory.forget()
                after = None
                self._pause(error)

    def _pause(self, error: Exception) -> None:
        # Log each cause once: the service may be unavailable for a long time.
        if str(error) != self._logged:
            self._logged = str(error)
            logger.warning(
                "keyvault: the change feed cannot be read; without it the service decides every request: %s", error
            )
        self._stopped.wait(_PAUSE_SECONDS)

    def _read(self, after: int | None) -> int:
        """Read and apply the changes after a sequence. Returns the sequence to read on from."""
        query: dict[str, str | int] = {"reader": self._name}
        if after is not None:
            query |= {"after": after, "wait": _WAIT_SECONDS}
        began = clock()
        found = self._ask("GET", f"/v1/changes?{urlencode(query)}", None, _WAIT_SECONDS + _ANSWER_SECONDS)
        sequence, staleness, waited = found["sequence"], found["staleness_seconds"], found["waited_seconds"]
        if not isinstance(sequence, int) or not 0 < staleness <= 3600 or not 0 <= waited <= clock() - began + 0.001:
            raise UnexpectedReplyError(200, "the answer of the change feed is not valid")
        if after is None:
            self._memory.forget()
        self._memory.apply(found["changes"])
        self._memory.set_current_until(began + waited + staleness)
        self._registered.set()
        if self._memory.needs_reading:
            self._woken.set()
        if after is None or sequence != after:
            self._ask("POST", "/v1/changes/confirmations", {"reader": self._name, "sequence": sequence})
        return sequence

    # --- records to read, uses to report ----------------------------------------------------------------------

    def _maintain(self) -> None:
        report_at = 0.0
        while not self._stopped.is_set():
            self._woken.wait(max(report_at - clock(), 0.0))
            self._woken.clear()
            try:
                if self._memory.needs_reading and self._registered.is_set():
                    self._read_wanted()
                if clock() >= report_at:
                    report_at = clock() + _REPORT_SECONDS
                    self._report_all()
            except Exception as error:  # noqa: BLE001  the thread must outlive every answer
                logger.warning("keyvault: uses are not reported, or records not read: %s", error)
                self._stopped.wait(_PAUSE_SECONDS)
        try:
            self._report_all(is_final=True)
        except Exception as error:  # noqa: BLE001  nothing can be done about it at the end
            logger.warning("keyvault: the last uses are not reported: %s", error)
        self._finished.set()

    def _read_wanted(self) -> None:
        version = self._memory.begin_rules()
        if version is not None:
            self._memory.end_rules(version, self._ask("GET", "/v1/snapshot", None))
        wanted = self._memory.begin_fetch(_MAX_FETCHED)
        found: Mapping[str, Any] = {"keys": []}
        try:
            if wanted:
                found = self._ask("GET", f"/v1/snapshot/keys?{urlencode({'key_ids': ','.join(wanted)})}", None)
        finally:
            self._memory.end_fetch(wanted, found["keys"])
        if self._memory.needs_reading:
            self._woken.set()

    def _report_all(self, *, is_final: bool = False) -> None:
        if not self._registered.is_set():
            return
        self._memory.begin_report()
        while self._report(self._memory.next_report()):
            pass
        if is_final:
            # The service ignores a number that it has stored, so the final mark needs a new one.
            self._report(self._memory.next_report(), is_final=True)

    def _report(self, report: LocalReport, *, is_final: bool = False) -> bool:
        """Send a report. Returns whether there is another one to send."""
        body = {
            "reader": self._name,
            "number": report.number,
            "flushed_through": format_time(report.flushed_through),
            "uses": report.rows,
        }
        try:
            self._ask("POST", "/v1/usage-reports", body | {"is_final": True} if is_final else body)
        except UnexpectedReplyError as error:
            if error.status != 400:
                raise
            faulty = _faulty_rows(error.members)
            # A refused report is not stored: its other rows and a newer time go into the next one.
            self._memory.drop_uses(faulty)
            if not faulty:
                raise
            logger.warning("keyvault: the service refused reported uses, which are dropped: %s", error)
            return True
        return self._memory.note_stored(report)

    def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float = _ANSWER_SECONDS
    ) -> dict[str, Any]:
        """Return the members of a reply. Raises UnexpectedReplyError."""
        content = b"" if body is None else json.dumps(body).encode()
        sent_at = clock()
        reply = self._runner.send(self._address.send(method, path, content, timeout))
        if isinstance(reply, Failure):
            raise UnexpectedReplyError(0, reply.cause)
        self._note_date(reply.headers.get("date"), clock() - sent_at)
        members = reply.members()
        if reply.status != 200 or not members:
            raise UnexpectedReplyError(reply.status, f"the service answered {reply.status}", members)
        return members

    def _note_date(self, date: str | None, seconds: float) -> None:
        """Note the date of a reply that came `seconds` after its request. Without one, this host's clock is used."""
        at = parse_http_date(date)
        if at is None:
            self._memory.set_service_time(time.time(), time.time())
        else:
            # A date is in whole seconds, and the reply may have been under way since the request.
            self._memory.set_service_time(at.timestamp(), at.timestamp() + 1 + seconds)


def _faulty_rows(members: Mapping[str, Any]) -> set[int]:
    """Return the numbers of the rows that a refusal names; none if it refuses the time of the whole report."""
    errors = members.get("errors")
    pointers = [error.get("pointer") for error in errors if isinstance(error, dict)] if isinstance(errors, list) else []
    if "/flushed_through" in pointers:
        # This host's clock is wrong, so the times of the rows may be refused for it, too.
        return set()
    found = (re.match(r"/uses/([0-9]{1,6})(?:/|$)", pointer) for pointer in pointers if isinstance(pointer, str))
    return {int(match[1]) for match in found if match is not None}
