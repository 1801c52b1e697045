"""The results of a machine and a day: one JSON file, and the table that is generated from it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from . import growth, revoke, scale, signin, verify
from .figures import EVICTION, STALE, TARGETS, Met, Run, Spread, Target, number, ratio_by_cpu, spread
from .generators import SOURCE

FOLDER = Path(__file__).with_name("results")
TABLE = FOLDER / "RESULTS.md"

Told = dict[str, Any]


def file_for(machine: str, now: datetime) -> Path:
    return FOLDER / f"{now:%Y-%m-%d}-{machine}.json"


def add(path: Path, part: str, told: Told, machine: Mapping[str, str]) -> Told:
    """Puts one benchmark's figures beside those that the day's file has of others, and answers all of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole: Told = json.loads(path.read_text()) if path.exists() else {}
    whole[part] = {"at": datetime.now(UTC).isoformat(timespec="seconds"), "machine": dict(machine), **told}
    path.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")
    return whole


def page(whole: Told, source: str) -> str:
    """RESULTS.md, of one file's figures and nothing else."""
    parts = ["# Measured", "", f"Written by `python -m tests.bench` from `{source}`; do not edit.", ""]
    parts += [*_head(whole), *targets_table(whole), ""]
    shown_by = {"verify": _rates, "revoke": _revoked, "growth": _grown, "signin": _signed_in, "scale": _scaled}
    for part, shown in shown_by.items():
        if _has(whole, part):
            parts += shown(whole[part])
    return "\n".join(parts).rstrip("\n") + "\n"


def targets_table(whole: Told) -> list[str]:
    """Every target, whether it was measured or not."""
    runs = read_runs(whole.get("verify", {}))
    figures = figures_of(whole)
    rows = []
    for target in TARGETS:
        measured = target.measure(runs, figures)
        sign = "at most " if target.is_ceiling else ""
        rows.append(
            [
                f"{target.title}{_about(target.figure, whole)}",
                f"{sign}{target.least:,g}{target.unit}",
                f"{sign}{target.aim:,g}{target.unit}",
                "-" if measured is None else measured.told(target.unit),
                str(target.judge(measured)),
                _by_cpu(target, runs, scale.by_cpu(whole["scale"]) if _has(whole, "scale") else {}),
            ]
        )
    heads = ["ratio, same core, same run", "at least", "aim", "measured median (min..max)", "met", "by processor time"]
    return table(heads, rows)


def is_met(whole: Told) -> bool:
    """Whether nothing failed, and no target that was measured was missed."""
    if any(
        "failed" in told or any(state.startswith("failed") for state in told.get("states", {}).values())
        for told in whole.values()
    ):
        return False
    runs, figures = read_runs(whole.get("verify", {})), figures_of(whole)
    return all(target.judge(target.measure(runs, figures)) is not Met.NO for target in TARGETS)


def read_runs(told: Told) -> list[Run]:
    names = {field.name for field in fields(Run)}
    return [Run(**{name: value for name, value in run.items() if name in names}) for run in told.get("runs", [])]


def figures_of(whole: Told) -> dict[str, Spread]:
    found: dict[str, Spread] = {}
    parts = {
        "verify": verify.figures_of,
        "revoke": revoke.figures_of,
        "growth": growth.figures_of,
        "signin": signin.figures_of,
        "scale": scale.figures_of,
    }
    for part, of in parts.items():
        if _has(whole, part):
            found |= of(whole[part])
    return found


def _has(whole: Told, part: str) -> bool:
    return part in whole and "failed" not in whole[part]


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    heads = list(heads)
    return ["| " + " | ".join(row) + " |" for row in (heads, ["---"] * len(heads), *rows)]


def _by_cpu(target: Target, runs: Sequence[Run], figures: Mapping[str, float]) -> str:
    if target.figure in figures:
        return number(figures[target.figure])
    found = ratio_by_cpu(runs, target.above, target.below, target.factor) if target.above else None
    return "" if found is None else number(found)


def _about(figure: str, whole: Told) -> str:
    if figure == STALE and _has(whole, "revoke"):
        return f" (of {revoke.count_after(whole['revoke']):,} requests)"
    if figure == EVICTION and _has(whole, "revoke"):
        return f" ({revoke.sample(whole['revoke'])})"
    return ""


def _head(whole: Told) -> list[str]:
    """When and on what; each benchmark's own where they differ."""
    lines, last = [], None
    for part in ("verify", "revoke", "growth", "signin", "scale"):
        if part not in whole:
            lines.append(f"- {part}: not run")
            continue
        machine = whole[part]["machine"]
        failed = f", failed: {whole[part]['failed']}" if "failed" in whole[part] else ""
        lines.append(f"- {part}: {whole[part]['at']}, commit {machine['commit']}{failed}")
        last = machine
    if last is not None:
        lines += [f"- {name}: {text}" for name, text in last.items() if name != "commit"]
    return [*lines, ""]


def _rates(told: Told) -> list[str]:
    runs, paced = read_runs(told), told["paced"]
    cases = list(dict.fromkeys([run.case for run in runs] + list(told["states"])))
    heads = ["case", "requests/s, all rounds", "quiet rounds", "p50 us", "p99 us", "CPU us", "share", "RSS MB", "noisy"]
    generators = told["generator"]
    about = (
        f"{told['options']['connections']} connections, {told['options']['keys']:,} keys in rotation,"
        f" {told['options']['listed']} % of them with an allow-list of networks; generator:"
        f" {generators['closed']}; {told['cores']}. PostgreSQL is a throwaway without fsync. A round is noisy when a"
        " server that does not wait for a database had less than 94 % of its core, or the host stole over 1 %."
        " The server of the miss cases runs with KEYVAULT_VERIFIER_KEYS=1 and gets all other keys in rotation: its"
        " cache is full and admits hardly any of them."
    )
    lines = ["## Closed loop", "", about, ""]
    lines += table(
        heads, (_rate_row(case, [run for run in runs if run.case == case], told["states"]) for case in cases)
    )
    heads = ["case", "offered/s", "achieved/s", "p50 us", "p99 us", "p99.9 us", "noisy"]
    rows = [_paced_row(case, [each for each in paced if each["case"] == case]) for case in cases]
    lines += ["", "## Open loop at 80 % of each one's own maximum", ""]
    about = f"The clock of a request starts when it is due, sent or not; generator: {generators['open']}."
    if generators["open"] == SOURCE.name:
        about += " It goes before the databases on its core, where the kernel lets it."
    lines += [about, ""]
    return [*lines, *table(heads, [row for row in rows if row]), ""]


def _rate_row(case: str, runs: list[Run], states: Mapping[str, str]) -> list[str]:
    if not runs:
        return [case, states.get(case, "not run"), *[""] * 7]
    rates = spread([(run.requests_per_second, True) for run in runs])
    quiet = [(run.requests_per_second, True) for run in runs if not run.flags]

    def middle(name: str) -> str:
        return number(spread([(getattr(run, name), True) for run in runs]).median)

    noisy = "; ".join(f"{run.round}: {', '.join(run.flags)}" for run in runs if run.flags)
    shown = [middle(name) for name in ("p50_us", "p99_us", "cpu_us", "share", "rss_mb")]
    return [case, str(rates), str(spread(quiet)) if quiet else "none", *shown, noisy]


def _paced_row(case: str, rounds: list[Told]) -> list[str]:
    if not rounds:
        return []
    shown = [
        str(spread([(each[name], not each["flags"]) for each in rounds]))
        for name in ("offered", "achieved", "p50_us", "p99_us", "p999_us")
    ]
    return [case, *shown, "; ".join(f"{each['round']}: {', '.join(each['flags'])}" for each in rounds if each["flags"])]


def _revoked(told: Told) -> list[str]:
    lines = ["## From commit to eviction and refusal", "", revoke.describe(told), ""]
    return [*lines, *table(revoke.HEADS, map(revoke.row, told["places"])), ""]


def _grown(told: Told) -> list[str]:
    lines = ["## Growth", "", growth.describe(told), ""]
    return [*lines, *table(growth.HEADS, map(growth.row, told["sizes"])), "", *growth.memory_lines(told), ""]


def _signed_in(told: Told) -> list[str]:
    rows = [row for each in told["rounds"] for row in signin.rows(each)]
    return ["## Orders under sign-ins", "", signin.describe(told), "", *table(signin.HEADS, rows), ""]


def _scaled(told: Told) -> list[str]:
    lines = ["## A platform's size", "", scale.describe(told), ""]
    lines += [*table(scale.JOB_HEADS, scale.job_rows(told)), ""]
    lines += [*table(scale.PAGE_HEADS, scale.page_rows(told)), ""]
    return [*lines, *table(scale.TABLE_HEADS, scale.table_rows(told)), ""]
