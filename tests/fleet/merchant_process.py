"""One process of the fleet: `python -m tests.fleet.merchant_process BASE_URL KEY_FILE COUNTS watch|forget`.

`watch`: it creates an order every second, and takes up a replacement from the key file. `forget`: it reads the file at
its start only, and creates an order for each line of its standard input. It ends with its standard input. COUNTS: file
that always has its counts, as JSON.
"""

import json
import os
import select
import sys
import time
from pathlib import Path

from keyvault_client import AuthenticationError, FileKey, KeyvaultError, MerchantClient

PAUSE_SECONDS = 1.0
WATCH_SECONDS = 1.0
QUARANTINED = "key_not_active"
MAX_KEPT = 5


def main(base_url: str, key_file: str, counts: str, mode: str) -> int:
    source = FileKey(key_file, WATCH_SECONDS)
    key, pause = (source.read(0), None) if mode == "forget" else (source, PAUSE_SECONDS)
    orders, refused = 0, 0
    failures: list[str] = []
    with MerchantClient(base_url, "sandbox", key) as client:
        while _is_due(pause):
            began = time.monotonic()
            try:
                client.create_order(1299, "EUR")
                orders += 1
            except KeyvaultError as error:
                if isinstance(error, AuthenticationError) and error.code == QUARANTINED:
                    refused += 1
                else:
                    failures.append(f"{type(error).__name__} after {time.monotonic() - began:.1f} s: {error}")
            _write(
                Path(counts),
                {
                    "orders": orders,
                    "refused": refused,
                    "failed": len(failures),
                    "failures": failures[:MAX_KEPT],
                },
            )
    return 0


def _is_due(pause_seconds: float | None) -> bool:
    """Wait for the pause, or for a line of standard input. Returns False when that has ended."""
    return not select.select([sys.stdin], [], [], pause_seconds)[0] or bool(sys.stdin.readline())


def _write(path: Path, counts: dict[str, object]) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(counts))
    os.replace(new, path)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
