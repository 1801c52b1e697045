"""The real server answers 2,000 raw requests as the contract requires; `make fuzz` sends 100,000."""

from collections import Counter
from pathlib import Path

import pytest

from .drive import UNLIMITED, make_keys, surprises
from .oracle import Known, predict, with_checksum
from .requests import generate
from .served import serving

SEED, COUNT = 20_000_000, 2_000
VERDICTS = {
    "bearer_not_supported",
    "credential_ambiguous",
    "credential_in_url",
    "credential_invalid",
    "credential_missing",
    "customer_token_invalid",
    "customer_token_missing",
    "endpoint_unknown",
    "environment_mismatch",
    "idempotency_key_missing",
    "key_revoked",
    "merchant_suspended",
    "method_not_allowed",
    "method_not_supported",
    "not_found",
    "private_key_in_browser",
    "rate_limited",
    "served",
    "service_token_invalid",
    "",
}
"""Codes that the requests below cause; the empty one is the server's own 400."""


@pytest.mark.long
@pytest.mark.django_db(transaction=True)
def test_fuzz_of_request_lines_and_headers_finds_no_deviation_from_the_contract(tmp_path: Path) -> None:
    """Guarantee: every spelling of a request is judged by the table of verdicts, refused, or not read as a request."""
    known = make_keys()
    with serving(tmp_path, **UNLIMITED) as port:
        found = next(surprises(port, known, iter(range(SEED, SEED + COUNT))), None)
    assert found is None, str(found)
    log = (tmp_path / "server.log").read_text()
    assert [text for text in known if text in log] == []
    assert [line for line in log.splitlines() if '"ERROR"' in line or "Traceback" in line] == []


def test_fuzz_meets_every_verdict_that_it_can_predict() -> None:
    """The generator covers every code, often enough that this is no coincidence."""
    known = {
        with_checksum(f"kv_prv_sbx_{'0' * 59}"): Known("private", "sandbox"),
        with_checksum(f"kv_pub_sbx_{'1' * 59}"): Known("public", "sandbox"),
        with_checksum(f"kv_prv_prd_{'2' * 59}"): Known("private", "production"),
        with_checksum(f"kv_pub_prd_{'5' * 59}"): Known("public", "production"),
        with_checksum(f"kv_prv_sbx_{'3' * 59}"): Known("private", "sandbox", "revoked"),
        with_checksum(f"kv_prv_sbx_{'4' * 59}"): Known("private", "sandbox", "suspended"),
    }
    met = Counter(code for seed in range(SEED, SEED + COUNT) for _, code in predict(generate(seed, known), known))
    assert {code for code, times in met.items() if times >= 5} == VERDICTS
