"""One process of the fleet: `python -m tests.fleet.merchant_process BASE_URL KEY_FILE COUNTS watch|forget PAUSE`.

It sends an order every PAUSE seconds until its standard input ends. `watch`: it takes up a replacement from the key
file. `forget`: it reads the file at its start only. COUNTS: file that always has its counts, as JSON.
"""

import json
import os
import select
import sys
import time
from pathlib import Path

from keyvault_client import AuthenticationError, FileKey, KeyvaultError, MerchantClient

WATCH_SECONDS = 1.0
QUARANTINED = "key_not_active"
MAX_KEPT = 5


def main(base_url: str, key_file: str, counts: str, mode: str, pause: str) -> int:
    source = FileKey(key_file, WATCH_SECONDS)
    key = source.read(0) if mode == "forget" else source
    orders, refused = 0, 0
    failures: list[str] = []
    with MerchantClient(base_url, "sandbox", key) as client:
        while not select.select([sys.stdin], [], [], float(pause))[0]:
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


def _write(path: Path, counts: dict[str, object]) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(counts))
    os.replace(new, path)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
