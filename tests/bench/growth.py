"""What more keys cost: a look-up's latency, the database's size, and the memory of a verifier that knows them."""

import argparse
import http.client
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from typing import Any

from . import cases
from .books import ask, open_book
from .figures import BATCH_SIZE, GROWTH, Spread, number, spread
from .launch import StartError, launched
from .machine import Cores, members, rss_mb
from .servers import verifier_command
from .site import POSTGRES, House, Site
from .telling import tell

SMALL, LARGE, HUGE = 10_000, 1_000_000, 10_000_000
REMEMBERED = (10_000, 100_000, 1_000_000)
TRACED = 100_000
"""Records counted by Python's allocator: it takes several times as long as the reading."""

HEADS = ["keys", "look-up p50 us", "p99 us", "tables MB", "indexes MB", "index by key id MB", "loaded s"]


def add_options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--ten-million", action="store_true", help="as well; takes some minutes and 6 GB")
    parser.add_argument("--look-ups", type=int, default=10_000, help="in each round; 10,000 unless told")


class Growth:
    """One benchmark under way."""

    def __init__(self, site: Site, cores: Cores, asked: argparse.Namespace) -> None:
        self._site, self._cores, self._asked = site, cores, asked

    def run(self) -> dict[str, Any]:
        house = self._site.on_postgres
        sizes = [SMALL, LARGE, *([HUGE] if self._asked.ten_million else [])]
        with ExitStack() as stack:
            told, books, urls = [], [], {}
            for size in sizes:
                urls[size] = self._site.new_database(f"keys_{size}", template="keyvault")
                environ = {**house.environ, "KEYVAULT_DATABASE_URL": urls[size]}
                book = stack.enter_context(open_book("tests.bench.growing", environ))
                books.append(book)
                strings = self._site.folder / f"keys-{size}"
                loaded = ask(book, f"add {size} {strings}")
                told.append({"keys": size, "seconds": loaded["seconds"], **ask(book, "sizes"), "rounds": []})
                tell(f"  {size:,} keys: {loaded['seconds']:.0f} s")
            traced = ask(books[sizes.index(LARGE)], f"remember {TRACED}")
            tell(f"  a record in memory: {number(traced['bytes_each'])} bytes")
            for turn in range(1, self._asked.rounds + 1):
                for each, book in zip(told, books, strict=True):
                    each["rounds"].append(ask(book, f"measure {self._asked.look_ups}"))
                shown = "  ".join(f"{each['keys']:,}: p50 {number(each['rounds'][-1]['p50_us'])} us" for each in told)
                tell(f"  round {turn}: {shown}")
        try:
            memory, failed = self._remember(house, urls[LARGE]), ""
        except (StartError, RuntimeError, OSError) as error:
            memory, failed = [], f"failed: {error}"
            tell(f"  a verifier's memory: {failed}")
        return {
            "sizes": told,
            "traced": traced,
            "memory": memory,
            "memory_failed": failed,
            "cores": self._cores.words,
        }

    def _remember(self, house: House, url: str) -> list[dict[str, float]]:
        """Resident memory of a real verifier, by how many keys it has been asked for."""
        environ = {**house.environ, "KEYVAULT_DATABASE_URL": url, "KEYVAULT_VERIFIER_KEYS": str(2 * LARGE)}
        log, told = self._site.folder / "remembering.log", []
        with (
            launched(verifier_command(), environ, log, self._cores.server) as started,
            (self._site.folder / f"keys-{LARGE}").open() as lines,
        ):
            time.sleep(2)
            connection = http.client.HTTPConnection(cases.ADDRESS, started.port, timeout=60)
            told.append({"keys": 0, "rss_mb": rss_mb(members(started.process))})
            for size in REMEMBERED:
                # The first ten thousand are the database's own keys; no request here uses them.
                wanted = min(size, LARGE - self._asked.keys - 1) - int(told[-1]["keys"])
                began = time.monotonic()
                asked = _ask_all(connection, house, lines, wanted)
                now = {"keys": told[-1]["keys"] + asked, "rss_mb": rss_mb(members(started.process))}
                told.append({**now, "per_second": asked / (time.monotonic() - began)})
                tell(f"  a verifier that knows {now['keys']:,.0f} keys: {number(now['rss_mb'])} MB")
            connection.close()
        return told


def _ask_all(connection: http.client.HTTPConnection, house: House, lines: Iterator[str], wanted: int) -> int:
    """Each key once, in batches; how many. Raises RuntimeError when one is refused."""
    asked = 0
    while keys := [line.strip() for line in islice(lines, min(BATCH_SIZE, wanted - asked))]:
        status, body = cases.ask(connection, cases.batch_of(house, keys))
        if not cases.are_allowed(status, body):
            raise RuntimeError(f"a batch of valid keys: {status} {body[:300]!r}")
        asked += len(keys)
    return asked


def row(told: Mapping[str, Any]) -> list[str]:
    times = [str(spread([(each[name], True) for each in told["rounds"]])) for name in ("p50_us", "p99_us")]
    sizes = [number(told[name]) for name in ("tables_mb", "indexes_mb", "primary_mb", "seconds")]
    return [f"{told['keys']:,}", *times, *sizes]


def describe(told: Mapping[str, Any]) -> str:
    return (
        "One look-up after the other by the query of a miss, in interleaved rounds, of keys that were read before;"
        f" PostgreSQL with {' '.join(POSTGRES)}; tables of keys and credentials with their indexes."
        f" Up to {LARGE:,} keys are genuine, the rest is filler of the same shape. {told['cores']}."
    )


def memory_lines(told: Mapping[str, Any]) -> list[str]:
    """What a verifier's memory is, and what each record adds to it."""
    if not told["memory"]:
        return [f"A verifier's memory: {told['memory_failed']}"]
    bare, rows = told["memory"][0], []
    for each in told["memory"]:
        per_record = (each["rss_mb"] - bare["rss_mb"]) * 2**20 / each["keys"] if each["keys"] else 0.0
        rows.append([f"{each['keys']:,.0f}", number(each["rss_mb"]), number(per_record) if per_record else "-"])
    traced = told["traced"]
    about = (
        f"A record with all that finds it again: {number(traced['bytes_each'])} bytes, as Python's allocator counts"
        f" {traced['keys']:,} of them. A verifier as a whole, one worker and its supervisor, each key asked for once:"
    )
    heads = ["keys that it knows", "resident MB", "bytes each"]
    return [about, "", *("| " + " | ".join(each) + " |" for each in (heads, ["---"] * 3, *rows))]


def figures_of(told: Mapping[str, Any]) -> dict[str, Spread]:
    """The median look-up among a million over that among ten thousand, round by round."""
    rounds = {each["keys"]: each["rounds"] for each in told["sizes"]}
    ratios = [
        (large["p50_us"] / small["p50_us"], True) for small, large in zip(rounds[SMALL], rounds[LARGE], strict=True)
    ]
    return {GROWTH: spread(ratios)} if ratios else {}
