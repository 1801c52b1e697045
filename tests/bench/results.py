"""Results of one machine and day: a JSON file, and the tables that are generated from it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from . import growth, local, processes, revoke, scale, signin, verify
from .figures import EVICTION, STALE, TARGETS, Met, Run, Spread, Target, number, ratio_by_cpu, spread
from .generators import SOURCE

FOLDER = Path(__file__).with_name("results")
TABLE = FOLDER / "RESULTS.md"

Results = dict[str, Any]


def file_for(machine: str, now: datetime) -> Path:
    return FOLDER / f"{now:%Y-%m-%d}-{machine}.json"


def add(path: Path, part: str, part_results: Results, machine: Mapping[str, str]) -> Results:
    """Add the results of one part to the file of the day; return the results of all parts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    all_results: Results = json.loads(path.read_text()) if path.exists() else {}
    all_results[part] = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": dict(machine),
        **part_results,
    }
    path.write_text(json.dumps(all_results, indent=1, ensure_ascii=False) + "\n")
    return all_results


def page(all_results: Results, source: str) -> str:
    """Return RESULTS.md for the results of one file."""
    parts = ["# Measured", "", f"Written by `python -m tests.bench` from `{source}`; do not edit.", ""]
    parts += [*_head(all_results), *targets_table(all_results), ""]
    renderers = {
        "verify": _verify_lines,
        "revoke": _revocation_lines,
        "local": _local_lines,
        "growth": _growth_lines,
        "signin": _sign_in_lines,
        "processes": _process_lines,
        "scale": _scale_lines,
    }
    for part, render in renderers.items():
        if _has(all_results, part):
            parts += render(all_results[part])
    return "\n".join(parts).rstrip("\n") + "\n"


def targets_table(all_results: Results) -> list[str]:
    """Return the table of all targets, measured or not."""
    runs = read_runs(all_results.get("verify", {}))
    figures = figures_of(all_results)
    parts_by_cpu = {"local": local.by_cpu, "scale": scale.by_cpu}
    by_cpu = {
        figure: value
        for part, of in parts_by_cpu.items()
        if _has(all_results, part)
        for figure, value in of(all_results[part]).items()
    }
    rows = []
    for target in TARGETS:
        measured = target.measure(runs, figures)
        sign = "at most " if target.is_ceiling else ""
        rows.append(
            [
                f"{target.title}{_sample_note(target.figure, all_results)}",
                f"{sign}{target.required:,g}{target.unit}",
                f"{sign}{target.aim:,g}{target.unit}",
                "-" if measured is None else measured.format(target.unit),
                str(target.compare(measured)),
                _by_cpu(target, runs, by_cpu),
            ]
        )
    heads = ["ratio, same core, same run", "at least", "aim", "measured median (min..max)", "met", "by processor time"]
    return table(heads, rows)


def is_met(all_results: Results) -> bool:
    """Return whether no part failed and every measured target is met."""
    if any(
        "failed" in part_results or any(state.startswith("failed") for state in part_results.get("states", {}).values())
        for part_results in all_results.values()
    ):
        return False
    runs, figures = read_runs(all_results.get("verify", {})), figures_of(all_results)
    return all(target.compare(target.measure(runs, figures)) is not Met.NO for target in TARGETS)


def read_runs(part_results: Results) -> list[Run]:
    names = {field.name for field in fields(Run)}
    return [
        Run(**{name: value for name, value in run.items() if name in names}) for run in part_results.get("runs", [])
    ]


def figures_of(all_results: Results) -> dict[str, Spread]:
    found: dict[str, Spread] = {}
    parts = {
        "verify": verify.figures_of,
        "revoke": revoke.figures_of,
        "local": local.figures_of,
        "growth": growth.figures_of,
        "signin": signin.figures_of,
        "processes": processes.figures_of,
        "scale": scale.figures_of,
    }
    for part, of in parts.items():
        if _has(all_results, part):
            found |= of(all_results[part])
    return found


def _has(all_results: Results, part: str) -> bool:
    return part in all_results and "failed" not in all_results[part]


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    heads = list(heads)
    return ["| " + " | ".join(row) + " |" for row in (heads, ["---"] * len(heads), *rows)]


def _by_cpu(target: Target, runs: Sequence[Run], figures: Mapping[str, float]) -> str:
    if target.figure in figures:
        return number(figures[target.figure])
    found = ratio_by_cpu(runs, target.above, target.below, target.factor) if target.above else None
    return "" if found is None else number(found)


def _sample_note(figure: str, all_results: Results) -> str:
    if figure == STALE and _has(all_results, "revoke"):
        return f" (of {revoke.count_after(all_results['revoke']):,} requests)"
    if figure == EVICTION and _has(all_results, "revoke"):
        return f" ({revoke.sample(all_results['revoke'])})"
    return ""


def _head(all_results: Results) -> list[str]:
    """Return date and commit of each part, and the machine."""
    lines, last = [], None
    for part in ("verify", "revoke", "local", "growth", "signin", "processes", "scale"):
        if part not in all_results:
            lines.append(f"- {part}: not run")
            continue
        machine = all_results[part]["machine"]
        failed = f", failed: {all_results[part]['failed']}" if "failed" in all_results[part] else ""
        lines.append(f"- {part}: {all_results[part]['at']}, commit {machine['commit']}{failed}")
        last = machine
    if last is not None:
        lines += [f"- {name}: {text}" for name, text in last.items() if name != "commit"]
    return [*lines, ""]


def _verify_lines(part_results: Results) -> list[str]:
    runs, paced = read_runs(part_results), part_results["paced"]
    cases = list(dict.fromkeys([run.case for run in runs] + list(part_results["states"])))
    heads = ["case", "requests/s, all rounds", "quiet rounds", "p50 us", "p99 us", "CPU us", "share", "RSS MB", "noisy"]
    generators = part_results["generator"]
    intro = (
        f"{part_results['options']['connections']} connections, {part_results['options']['keys']:,} keys in rotation,"
        f" {part_results['options']['listed']} % of them with an allow-list of networks; generator:"
        f" {generators['closed']}; {part_results['cores']}. PostgreSQL runs without fsync. A round is noisy if a server"
        " that does not wait for a database had less than 94 % of its core, or the host stole over 1 %."
        " The server of the miss cases runs with KEYVAULT_VERIFIER_KEYS=1 and gets all other keys in rotation: its"
        " cache is full and admits few of them."
    )
    lines = ["## Closed loop", "", intro, ""]
    lines += table(
        heads, (_rate_row(case, [run for run in runs if run.case == case], part_results["states"]) for case in cases)
    )
    heads = ["case", "offered/s", "achieved/s", "p50 us", "p99 us", "p99.9 us", "noisy"]
    rows = [_open_loop_row(case, [each for each in paced if each["case"] == case]) for case in cases]
    lines += ["", "## Open loop at 80 % of each server's own maximum", ""]
    intro = f"Latency is measured from the time when a request is due; generator: {generators['open']}."
    if generators["open"] == SOURCE.name:
        intro += " It has a higher priority than the databases on its core, if the kernel allows it."
    lines += [intro, ""]
    return [*lines, *table(heads, [row for row in rows if row]), ""]


def _rate_row(case: str, runs: list[Run], states: Mapping[str, str]) -> list[str]:
    if not runs:
        return [case, states.get(case, "not run"), *[""] * 7]
    rates = spread([(run.requests_per_second, True) for run in runs])
    quiet = [(run.requests_per_second, True) for run in runs if not run.flags]

    def median_of(name: str) -> str:
        return number(spread([(getattr(run, name), True) for run in runs]).median)

    noisy = "; ".join(f"{run.round}: {', '.join(run.flags)}" for run in runs if run.flags)
    shown = [median_of(name) for name in ("p50_us", "p99_us", "cpu_us", "share", "rss_mb")]
    return [case, str(rates), str(spread(quiet)) if quiet else "none", *shown, noisy]


def _open_loop_row(case: str, rounds: list[Results]) -> list[str]:
    if not rounds:
        return []
    shown = [
        str(spread([(each[name], not each["flags"]) for each in rounds]))
        for name in ("offered", "achieved", "p50_us", "p99_us", "p999_us")
    ]
    return [case, *shown, "; ".join(f"{each['round']}: {', '.join(each['flags'])}" for each in rounds if each["flags"])]


def _revocation_lines(part_results: Results) -> list[str]:
    lines = ["## From commit to eviction and denial", "", revoke.describe(part_results), ""]
    return [*lines, *table(revoke.HEADS, map(revoke.row, part_results["places"])), ""]


def _local_lines(part_results: Results) -> list[str]:
    lines = ["## Decisions from memory", "", local.describe(part_results), ""]
    return [*lines, *table(local.HEADS, map(local.row, part_results["rounds"])), ""]


def _growth_lines(part_results: Results) -> list[str]:
    lines = ["## Growth", "", growth.describe(part_results), ""]
    return [
        *lines,
        *table(growth.HEADS, map(growth.row, part_results["sizes"])),
        "",
        *growth.memory_lines(part_results),
        "",
    ]


def _sign_in_lines(part_results: Results) -> list[str]:
    rows = [row for each in part_results["rounds"] for row in signin.rows(each)]
    return ["## Orders under sign-ins", "", signin.describe(part_results), "", *table(signin.HEADS, rows), ""]


def _process_lines(part_results: Results) -> list[str]:
    lines = ["## Idle processes", "", processes.describe(part_results), ""]
    return [*lines, *table(processes.HEADS, map(processes.row, part_results["processes"])), ""]


def _scale_lines(part_results: Results) -> list[str]:
    lines = ["## Cost of large tables", "", scale.describe(part_results), ""]
    lines += [*table(scale.JOB_HEADS, scale.job_rows(part_results)), ""]
    lines += [*table(scale.PAGE_HEADS, scale.page_rows(part_results)), ""]
    return [*lines, *table(scale.TABLE_HEADS, scale.table_rows(part_results)), ""]
