# SPDX-License-Identifier: Apache-2.0
"""A real node_exporter of Debian reads the textfile of a real daemon."""

from __future__ import annotations

import shutil
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as parsed

from testkit.clouds import Bucket
from testkit.rig import Process, Vm
from testkit.waiting import until

NAME = "prometheus-node-exporter"


def started(vm: Vm, directory: Path) -> str:
    """The address of a node_exporter that reads this directory only."""
    if shutil.which(NAME) is None:
        pytest.skip(f"{NAME} is not installed: apt-get install {NAME}")
    process: Process = vm.spawn(
        [
            NAME,
            "--web.listen-address=127.0.0.1:0",
            "--collector.disable-defaults",
            "--collector.textfile",
            f"--collector.textfile.directory={directory}",
            "--log.format=json",
        ]
    )
    address: str = process.lines.wait(msg="Listening on")["address"]
    return address


def scrape(address: str) -> dict[str, float]:
    """The last value of each metric, by name."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {sample.name: sample.value for family in parsed(text) for sample in family.samples}


def test_node_exporter_serves_the_textfile_of_the_daemon(
    bucket: Bucket, new_vm: Any, tmp_path: Path
) -> None:
    """All metrics of a running daemon, none of one that was stopped, and the age of one that was killed."""
    directory = tmp_path / "textfile_collector"
    directory.mkdir()
    metrics = {"textfile": str(directory / "swansong.prom")}
    vm: Vm = new_vm("vm", bucket.store, settings={"metrics": metrics})
    address = started(vm, directory)
    assert "node_textfile_mtime_seconds" not in scrape(address)

    daemon = vm.start_daemon()
    found = until(lambda: (now := scrape(address)).get("swansong_build_info") and now, what="it")
    assert found["node_textfile_scrape_error"] == 0
    assert abs(time.time() - found["node_textfile_mtime_seconds"]) < 60
    assert found["swansong_start_timestamp_seconds"] > 0

    daemon.kill(signal.SIGTERM)
    assert daemon.wait() == 0
    left = scrape(address)
    assert left.keys().isdisjoint({"node_textfile_mtime_seconds", "swansong_build_info"})
    assert left["node_textfile_scrape_error"] == 0

    killed = vm.start_daemon()
    found = until(lambda: (now := scrape(address)).get("swansong_build_info") and now, what="it")
    killed.kill()
    killed.wait()
    written = found["node_textfile_mtime_seconds"]
    assert scrape(address)["node_textfile_mtime_seconds"] >= written
