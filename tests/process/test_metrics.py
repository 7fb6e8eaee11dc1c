# SPDX-License-Identifier: Apache-2.0
"""The metrics of a real daemon through an evacuation: over loopback, over a Unix socket, as a textfile."""

from __future__ import annotations

import signal
import socket
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as parsed

from testkit.clouds import Aws, Bucket
from testkit.rig import Process
from testkit.waiting import until

Samples = dict[tuple[str, ...], float]


def connected(daemon: Process) -> socket.socket:
    """A connection to the metrics of the daemon."""
    address = daemon.lines.wait(event="metrics_served")["address"]
    if address.startswith("unix:"):
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(30)
        client.connect(address.removeprefix("unix:"))
        return client
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def samples(text: str) -> Samples:
    """Each value by name and label values, without the run: ``("swansong_state", "IDLE")``."""
    found = {}
    for family in parsed(text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "run"}
            found[sample.name, *(labels[name] for name in sorted(labels))] = sample.value
    return found


def scrape(daemon: Process) -> Samples:
    connection = HTTPConnection("daemon")
    connection.sock = connected(daemon)
    connection.request("GET", "/metrics")
    answer = connection.getresponse()
    assert answer.status == 200
    text = answer.read().decode()
    connection.close()
    return samples(text)


def check_counters(before: Samples, after: Samples) -> None:
    """One evacuation happened between two scrapes."""
    assert before["swansong_evacuations_total", "aws.spot", "SAFE"] == 0
    assert after["swansong_evacuations_total", "aws.spot", "SAFE"] == 1
    assert after["swansong_notices_total", "aws.spot"] == 1
    assert after["swansong_last_verdict", "no", "SAFE"] == 1
    for phase in ("request", "agree", "save", "flush", "commit"):
        assert after["swansong_evacuation_phase_seconds_count", phase] == 1, phase
    counters = [name for name in before if name[0].endswith(("_total", "_bucket", "_count"))]
    assert all(after[name] >= before[name] for name in counters)


def check_status(after: Samples, status: dict[str, Any]) -> None:
    """A scrape right after the status has the same figures."""
    assert after["swansong_state", status["state"]] == 1
    assert after["swansong_generation",] == status["generation"]
    assert after["swansong_last_commit_step",] == status["last_commit"]["step"]
    assert after["swansong_trainers_connected",] == len(status["trainers"]) == 1
    assert after["swansong_replication_lag_bytes",] == status["replication_lag"]["bytes"]
    age_s = status["replication_lag"]["seconds"]
    assert age_s - 0.1 <= after["swansong_replication_lag_seconds",] <= age_s + 30
    assert after["swansong_staging_size_bytes",] == status["staging"]["size_bytes"]
    assert after["swansong_decision_faults_total",] == status["decision_faults"]["count"] == 0
    assert after["swansong_flush_bytes_total",] > 0
    up = {name[1]: value for name, value in after.items() if name[0] == "swansong_source_up"}
    assert up["aws.spot"] == 1
    for margin in status["margins"]:
        available_s = after["swansong_evacuation_available_seconds", margin["source"]]
        assert available_s == pytest.approx(margin["grace_s"], abs=0.05)
        is_known = ("swansong_evacuation_margin_seconds", margin["source"]) in after
        assert is_known is (margin["spare_s"] is not None)


@pytest.mark.fault("OM01", "OM02")
def test_metrics_through_a_preemption(
    aws: Aws, bucket: Bucket, new_vm: Any, witness: str, tmp_path: Path
) -> None:
    """Two hostile scrapers change nothing: the verdict is SAFE, and all figures agree with the status."""
    textfile = tmp_path / "swansong.prom"
    first = new_vm(
        "first",
        bucket.store,
        metadata=aws.metadata,
        settings={"metrics": {"listen": "127.0.0.1:0", "textfile": str(textfile)}},
    )
    daemon = first.start_daemon()
    first.start_trainer(script=witness)
    with connected(daemon) as silent, connected(daemon) as deaf:
        silent.sendall(b"GET /metrics HTTP/1.1\r\n")
        deaf.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        daemon.lines.wait(event="resumption_recorded")
        before = scrape(daemon)
        aws.notice(in_s=8)
        daemon.lines.wait(event="verdict", verdict="SAFE")
    status = first.status()
    after = scrape(daemon)

    check_counters(before, after)
    check_status(after, status)
    assert samples(textfile.read_text()).keys() >= {("swansong_start_timestamp_seconds",)}
    daemon.kill(signal.SIGTERM)
    assert daemon.wait() == 0
    assert not textfile.exists()
    first.power_off()
    aws.withdraw()

    path = tmp_path / "metrics.sock"
    second = new_vm("second", bucket.store, settings={"metrics": {"listen": f"unix:{path}"}})
    daemon = second.start_daemon()
    second.start_trainer(script=witness)
    daemon.lines.wait(event="resumption_recorded")
    found = until(
        lambda: (now := scrape(daemon))["swansong_resumptions_total",] and now, what="the resume"
    )
    assert found["swansong_preemption_loss_gpu_seconds_total", "fetch"] > 0
    assert found["swansong_preemption_loss_gpu_seconds_total", "cloud"] >= 0
    daemon.kill(signal.SIGTERM)
    assert daemon.wait() == 0
    assert not path.exists()
