"""Show the status of each pepper version; exit 1 when one is missing, wrong or swapped with another."""

import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.permissions import Permission
from keyvault.access.principals import HOST
from keyvault.management.json_command import JsonCommand
from keyvault.services.pepper_rotation.status import (
    DORMANT_DAYS,
    DormantKey,
    count_usage,
    list_dormant_keys,
    list_pepper_states,
    list_unrecorded,
)
from keyvault.services.recording.authorization import authorize


class Command(JsonCommand):
    help = "Show every pepper version: what depends on it, whether it is loaded and stored, and its problems."

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--dormant-days", type=int, default=DORMANT_DAYS, help="days without use (default %(default)s)"
        )
        parser.add_argument("--list", action="store_true", help="list the dormant keys")

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        authorize(HOST, Permission.PEPPERS_READ, now=self.now)
        states = list_pepper_states()
        days = options["dormant_days"]
        unrecorded = list_unrecorded()
        self.is_faulty = any(state.fault for state in states) or any(each.fault for each in unrecorded)
        answer: dict[str, Any] = {
            "ok": not self.is_faulty,
            "versions": [
                {**asdict(state), **asdict(count_usage(state.pepper_set, state.number, self.now, days))}
                for state in states
            ],
            "rowless": [asdict(each) for each in unrecorded],
        }
        if options["list"]:
            answer["dormant"] = [
                asdict(key)
                for state in states
                for key in list_dormant_keys(state.pepper_set, state.number, self.now, days)
            ]
        return answer

    def format_text(self, answer: Mapping[str, Any]) -> str:
        lines = []
        for state in answer["versions"]:
            lines.append(f"{state['pepper_set']} {state['number']}  {_stage(state)}")
            lines.append(
                f"  created {state['created_at']:%Y-%m-%d}; dependent {state['living']} (dormant {state['dormant']}), "
                f"ended {state['dead']}; backend: {_STORED[state['stored']]}"
            )
            if state["usage"]:
                lines.append(f"  used by: {state['usage']}")
            if state["lagging"]:
                lines.append(f"  creates no digests yet; not loaded by: {', '.join(state['lagging'])}")
            if state["fault"]:
                lines.append(f"  WRONG: {state['fault']}")
        for each in answer["rowless"]:
            lines.append(f"{each['pepper_set']} {each['number']}  in the secret backend, unknown to the database")
            lines.append(f"  WRONG: {each['fault']}" if each["fault"] else "  rotate_pepper continues with it")
        lines += [
            f"rotate, revoke, or wait until it is used: {DormantKey(**key).format_line()}"
            for key in answer.get("dormant", ())
        ]
        return "\n".join(lines)

    def handle(self, *args: Any, **options: Any) -> None:
        super().handle(*args, **options)
        if self.is_faulty:
            sys.exit(1)


_STORED = {True: "stored", False: "missing", None: "unavailable"}


def _stage(state: Mapping[str, Any]) -> str:
    if state["destroyed_at"]:
        return f"retired {state['retired_at']:%Y-%m-%d}, destroyed"
    if state["retired_at"]:
        return f"retired {state['retired_at']:%Y-%m-%d}, can be destroyed from {state['destroyable_from']:%Y-%m-%d}"
    if not state["is_loaded"]:
        return "NOT LOADED"
    return "loaded, creates the digests" if state["is_hashing"] else "loaded, verifies only"
