"""/metrics: exposes service metrics, and no merchant data."""

from pathlib import Path
from subprocess import run
from sys import executable

import pytest
from django.test import Client

from keyvault.backends import meters

ELSEWHERE = """
import os, sys
os.environ["PROMETHEUS_MULTIPROC_DIR"] = sys.argv[1]
from keyvault.backends import meters
for _ in range(3):
    meters.note_call("keyvault-issuer-sandbox", "ok")
meters.note_ready(False)
"""


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    return tmp_path


def test_metrics_of_one_process_count_calls_by_outcome(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    meters.note_call("keyvault-reader-production", "conflict")
    meters.note_lease("keyvault-reader-production", None)
    meters.note_pepper("sandbox", 2)
    answer = client.get("/metrics")
    assert answer.status_code == 200
    assert answer["Content-Type"].startswith("text/plain")
    assert answer["Cache-Control"] == "no-store"
    text = answer.content.decode()
    assert 'keyvault_vault_calls_total{login="keyvault-reader-production",outcome="conflict"}' in text
    assert 'keyvault_vault_lease_ends_timestamp_seconds{login="keyvault-reader-production"} 0.0' in text
    assert 'keyvault_pepper_version{set="sandbox"} 2.0' in text


def test_metrics_of_several_processes_are_summed_without_gauges_of_dead_ones(client: Client, shared: Path) -> None:
    """Counters outlive their process; its gauge of a sealed Vault does not."""
    run([executable, "-c", ELSEWHERE, str(shared)], check=True)
    run([executable, "-c", ELSEWHERE, str(shared)], check=True)
    assert len(list(shared.glob("gauge_livemax_*.db"))) == 2
    text = client.get("/metrics").content.decode()
    assert 'keyvault_vault_calls_total{login="keyvault-issuer-sandbox",outcome="ok"} 6.0' in text
    assert "keyvault_vault_sealed 1" not in text
    assert list(shared.glob("gauge_livemax_*.db")) == []


def test_metrics_are_read_only_and_refuse_a_key_in_the_url(client: Client) -> None:
    assert client.post("/metrics").status_code == 405
    assert client.get("/metrics?key=kv_prv_sbx_" + "0" * 65).status_code == 400
