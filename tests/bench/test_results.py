"""The generated table contains every target and every case, whichever parts were run."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from .figures import API_KEY, BAO_KV, HIT, OWN_HELLO, TARGETS
from .results import add, is_met, page, read_runs, targets_table
from .servers import SERVERS
from .test_figures import run

EVICTED = "commit → last of 4 verifiers evicted, loaded, p99"
MACHINE = {"cpu": "2 x test CPU", "commit": "abc1234"}


def verified(rate: float = 60.0) -> dict[str, Any]:
    runs = [run(HIT, turn, rate + turn) for turn in (1, 2, 3)] + [run(OWN_HELLO, turn, 100) for turn in (1, 2, 3)]
    paced = {"case": HIT, "offered": 80.0, "achieved": 80.0, "p50_us": 100.0, "p99_us": 250.0, "p999_us": 900.0}
    return {
        "runs": [asdict(each) for each in runs],
        "paced": [{**paced, "round": 1, "flags": []}],
        "states": {BAO_KV: "not run: no bao on PATH", API_KEY: "failed: the revoked key: 200"},
        "generator": {"closed": "wrk", "open": "pacer.c"},
        "options": {"connections": 32, "keys": 10_000, "listed": 10},
        "cores": "servers on CPU 0, load and databases on CPU 1",
    }


def revoked(stale: int = 0, **changed: Any) -> dict[str, Any]:
    place = {
        "place": "same host",
        "revocations": 300,
        "quiet": 280,
        "lost": 0,
        "p50_ms": 1.0,
        "p99_ms": 2.0,
        "all_p99_ms": 3.0,
        "refused_p50_ms": 5.0,
        "refused_p99_ms": 6.0,
        "refused_all_p99_ms": 7.0,
        "returned_p50_ms": 1.0,
        "after": 100_200,
        "stale": stale,
        "stale_after_receipt": 0,
        "last_stale_ms": 0.0,
        "per_second": 16_000.0,
    }
    places = [place, {**place, "place": "elsewhere", "p99_ms": 4.0, "stale": 7, **changed}]
    return {"places": places, "verifiers": 4, "rate": 16_000, "cores": "one core"}


def grown() -> dict[str, Any]:
    sizes = {"tables_mb": 1.0, "indexes_mb": 1.0, "primary_mb": 1.0, "seconds": 2.0}
    rounds = [[{"p50_us": 90.0, "p99_us": 190.0}], [{"p50_us": 94.5, "p99_us": 210.0}]]
    measured = [{"keys": 10**4, **sizes, "rounds": rounds[0]}, {"keys": 10**6, **sizes, "rounds": rounds[1]}]
    memory = [{"keys": 0, "rss_mb": 60.0}, {"keys": 1e4, "rss_mb": 70.0}]
    return {"sizes": measured, "memory": memory, "traced": {"keys": 10**5, "bytes_each": 812.0}, "cores": "one core"}


def scaled(
    completed: int = 200, idle_ms: float = 15.0, tick_ms: float = 1.9, page_ms: float | None = 60.0
) -> dict[str, Any]:
    small, large = {"run-maintenance": 10.0, "tick": 0.2}, {"run-maintenance": idle_ms, "tick": tick_ms}
    idle = [[{name: [ms, ms] for name, ms in jobs.items()} for jobs in (small, large)]] * 2
    page = {"page": "keyvault_key_changelist", "ms": 40.0, "queries": 8, "status": "200"}
    return {
        "sizes": [10_000, 1_000_000],
        "loaded": [{"credentials": 10_000, "seconds": 9.0}, {"credentials": 1_000_000, "seconds": 300.0}],
        "idle": idle,
        "due": {"run-maintenance": 900.0},
        "pages": [[page], [{**page, "ms": page_ms}]],
        "revoke": [{"p50_ms": 20.0}, {"p50_ms": 22.0}],
        "repeat": [{"p50_ms": 3.0, "statuses": {"202": 200}}] * 2,
        "completed": 200,
        "completed_per_second": 12.0,
        "turns_per_second": 60.0,
        "per_second_by_cpu": 14.0,
        "rows_each": {"keyvault_auditentry": 16.0},
        "tables": {
            "keyvault_auditentry": {"rows": 3e6, "bytes": 2.4e9},
            "keyvault_usebucket": {"rows": 1e7, "bytes": 5e9},
        },
        "driven": {
            "rotations": 200,
            "completed": completed,
            "rate": 5,
            "started_per_second": 4.9,
            "p50_ms": 80.0,
            "p99_ms": 400.0,
        },
    }


def signed_in(p99_us: float = 6_000.0) -> dict[str, Any]:
    idle, loaded = {"p50_us": 2_000.0, "p99_us": 4_000.0, "late_us": 1.0}, {"p50_us": 2_500.0, "p99_us": p99_us}
    rounds: list[dict[str, Any]] = [
        {"round": turn, "sign_ins": 80, "sign_ins_per_second": 4.0, "idle": idle, "loaded": loaded, "flags": []}
        for turn in (1, 2)
    ]
    return {"rounds": rounds, "rate": 50.0, "generator": "pacer.c"}


def idled(idle_percent: float = 4.0) -> dict[str, Any]:
    measured = [
        {"process": "make run, all processes", "rss_mb": 390.0, "idle_percent": idle_percent},
        {"process": "worker", "rss_mb": 131.0, "idle_percent": 1.5},
    ]
    return {"processes": measured, "production_failed": "", "seconds": 60.0, "cores": "one core"}


def decided(**changed: Any) -> dict[str, Any]:
    measured = {"p50_us": 10.0, "p99_us": 30.0, "asked_per_second": 80.0, "share": 0.95, "flags": []}
    rounds = [
        {"round": turn, "per_second": rate, "per_cpu_second": rate / 0.95, **measured}
        for turn, rate in ((1, 57_000.0), (2, 60_000.0), (3, 61_000.0))
    ]
    counts = {"allowed": 1_780_000, "revocations": 50, "without_receipt": 0, "asked_after": 10_000, "stale": 0}
    return {
        "rounds": rounds,
        "receipt_p50_ms": 12.0,
        "keys": 100,
        "accounts": 10,
        "cores": "one core",
        **counts,
        **changed,
    }


def whole(**parts: dict[str, Any]) -> dict[str, Any]:
    return {name: {"at": "2026-11-21T12:00:00+00:00", "machine": MACHINE, **part} for name, part in parts.items()}


def rows_by_title(lines: list[str]) -> dict[str, list[str]]:
    """The rows of a table by their first cell."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {row[0]: row[1:] for row in rows}


def test_targets_table_names_every_target_though_nothing_was_run() -> None:
    rows = rows_by_title(targets_table({}))
    assert list(rows) == [target.title for target in TARGETS]
    assert {row[3] for row in rows.values()} == {"not run"}


def test_targets_table_says_what_was_measured_and_whether_it_is_met() -> None:
    rows = rows_by_title(targets_table(whole(verify=verified(), revoke=revoked(), growth=grown())))
    assert rows["verifier, all features / own hello"] == ["0.5", "0.6", "0.62 (0.61..0.63)", "aim", "1"]
    assert rows["p99 at 80 % of own maximum, open loop"][2:4] == ["0.25 ms", "aim"]
    assert rows['stale "valid" after revoke returned, same host (of 100,200 requests)'][2:4] == ["0", "aim"]
    assert rows[f"{EVICTED} (elsewhere, by the receipt, 280 of 300 revocations)"][2:4] == ["4 ms", "aim"]
    assert rows["look-up p50 at 1 million / 10 thousand keys"][2:4] == ["1.05", "aim"]


def test_targets_table_of_one_stale_grant_is_not_met() -> None:
    all_results = whole(revoke=revoked(stale=1))
    assert (
        next(row for title, row in rows_by_title(targets_table(all_results)).items() if title.startswith("stale"))[3]
        == "no"
    )
    assert not is_met(all_results)


def test_targets_table_of_a_platform_has_the_worst_job_and_processor_time() -> None:
    rows = rows_by_title(targets_table(whole(scale=scaled())))
    assert rows["worst periodic job, nothing due, in full / at a hundredth"][2:4] == ["1.5 (1.5..1.5)", "yes"]
    assert rows["rotations completed a second on two cores, with audit"][2:] == ["12", "yes", "14"]
    assert rows["event → step of its rotation, workers under load, p99"][2:4] == ["0.4 s", "aim"]


@pytest.mark.parametrize("wrong", [{"completed": 199}, {"idle_ms": 25.0}, {"tick_ms": 2.0}, {"page_ms": 101.0}])
def test_is_met_is_false_after_a_lost_rotation_or_a_job_that_grows(wrong: dict[str, Any]) -> None:
    assert is_met(whole(scale=scaled()))
    assert not is_met(whole(scale=scaled(**wrong)))


def test_jobs_that_cost_nearly_nothing_are_not_compared() -> None:
    """Their times double by chance. A job that reaches the floor in full is compared with whatever it was."""
    rows = rows_by_title(targets_table(whole(scale=scaled(idle_ms=1.9))))
    assert rows["worst periodic job, nothing due, in full / at a hundredth"][2:4] == ["1 (1..1)", "aim"]


def test_page_of_a_platform_lists_jobs_pages_and_tables() -> None:
    text = page(whole(scale=scaled()), "x.json")
    assert "| run-maintenance | 10 | 15 | 1.5 (1.5..1.5) | 900 |" in text
    assert "| tick | 0.2 | 1.9 | - | - |" in text
    assert "less than 2 ms in full, at most once a second in each environment, has no ratio" in text
    assert "| keyvault_key_changelist | 40 | 60 | 1.5 | 8 | 200 |" in text
    assert "| keyvault_auditentry | 3,000,000 | 800 | 16 | 42.7 |" in text


def test_orders_under_sign_ins_are_met_up_to_twice_the_idle_latency() -> None:
    all_results = whole(signin=signed_in())
    rows = rows_by_title(targets_table(all_results))
    assert rows["p99 of `orders.retrieve` under 16 sign-ins / idle"][:4] == [
        *("at most 2", "at most 1.25", "1.5 (1.5..1.5)", "yes")
    ]
    assert "| 1 | 16 | 4 | 2,500 | 6,000 | 1.5 |  |" in page(all_results, "x.json")
    assert is_met(all_results)
    assert not is_met(whole(signin=signed_in(p99_us=8_001.0)))


def test_idle_processes_are_met_up_to_five_percent_of_a_core() -> None:
    all_results = whole(processes=idled())
    assert rows_by_title(targets_table(all_results))["processor time of an idle `make run`"][2:4] == [
        *("4 % of a core", "yes")
    ]
    assert "| worker | 131 | 1.5 |" in page(all_results, "x.json")
    assert is_met(all_results)
    assert not is_met(whole(processes=idled(idle_percent=5.1)))


def test_decisions_from_memory_have_their_rate_also_by_processor_time() -> None:
    all_results = whole(local=decided())
    rows = rows_by_title(targets_table(all_results))
    assert rows["LocalVerifier, decisions a second on one core, uses counted"] == [
        *("50,000", "75,000", "60,000 (57,000..61,000)", "yes", "63,158")
    ]
    assert rows["LocalVerifier, p50 of a decision"][2:4] == ["10 (10..10) us", "aim"]
    assert "| 2 | 60,000 | 10 | 30 | 80 | 0.95 |  |" in page(all_results, "x.json")
    assert is_met(all_results)


@pytest.mark.parametrize("wrong", [{"stale": 1}, {"without_receipt": 1}])
def test_decisions_from_memory_after_an_untrue_or_missing_receipt_are_not_met(wrong: dict[str, int]) -> None:
    assert not is_met(whole(local=decided(**wrong)))


@pytest.mark.parametrize("wrong", [{"lost": 1}, {"stale_after_receipt": 1}])
def test_targets_table_of_a_lost_revocation_or_an_untrue_receipt_is_not_met(wrong: dict[str, int]) -> None:
    all_results = whole(revoke=revoked(**wrong))
    assert (
        next(row for title, row in rows_by_title(targets_table(all_results)).items() if title.startswith(EVICTED))[3]
        == "no"
    )


def test_is_met_asks_only_for_what_was_measured() -> None:
    fine = {**verified(), "states": {BAO_KV: "not run: no bao on PATH"}}
    assert is_met(whole(verify=fine))
    assert not is_met(whole(verify=verified(rate=40.0)))


def test_is_met_is_false_after_a_failure() -> None:
    assert not is_met(whole(verify=verified()))
    assert not is_met(whole(growth=grown(), revoke={"failed": "the writer did not start"}))


def test_page_reports_a_failed_part() -> None:
    assert ", failed: the writer did not start" in page(whole(revoke={"failed": "the writer did not start"}), "x.json")


def test_page_lists_every_case_with_the_reason_for_missing_figures() -> None:
    text = page(whole(verify=verified(), revoke=revoked(), growth=grown()), "2026-11-21-machine.json")
    assert f"| {BAO_KV} | not run: no bao on PATH |" in text
    assert f"| {API_KEY} | failed: the revoked key: 200 |" in text
    assert "`2026-11-21-machine.json`" in text
    assert "2 x test CPU" in text


@pytest.mark.parametrize("open_loop", ["pacer.c", "pacer.py"])
def test_page_names_the_generator_of_either_loop(open_loop: str) -> None:
    text = page(whole(verify={**verified(), "generator": {"closed": "wrk", "open": open_loop}}), "x.json")
    closed, _, paced = text.partition("## Open loop")
    assert "generator: wrk;" in closed
    assert f"generator: {open_loop}." in paced


def test_page_of_one_part_reports_the_others_as_not_run() -> None:
    text = page(whole(growth=grown()), "x.json")
    assert "| 10,000 | 70 | 1,049 |" in text
    assert "812 bytes" in text
    assert "- verify: not run" in text
    assert "- revoke: not run" in text


def test_results_of_a_day_are_kept_beside_each_other(tmp_path: Path) -> None:
    """A run of `revoke` alone keeps the results of `verify`."""
    path = tmp_path / "results" / "day.json"
    add(path, "verify", verified(), MACHINE)
    both = add(path, "revoke", revoked(), MACHINE)
    assert set(both) == {"verify", "revoke"}
    assert read_runs(both["verify"])[0] == run(HIT, 1, 61.0)


def test_servers_every_case_of_a_target_has_a_server() -> None:
    cases = {case for server in SERVERS for case in server.cases}
    assert {name for target in TARGETS for name in (target.above, target.below) if name} <= cases
