# SPDX-License-Identifier: Apache-2.0
"""The exporter as a process beside real daemons: its counters outlive VMs, itself and deleted commits."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as parsed

from testkit.clouds import Aws, Bucket
from testkit.rig import BIN, CREDENTIALS, WITH_CONSTANTS, Process
from testkit.waiting import until

Samples = dict[tuple[str, ...], float]
FAREWELL = {"swansongd.observe.accounting.LAST_FAREWELL_LEAD_S": 5.0}
"""The last farewell is written this long before the deadline; without this constant 2 s before."""


class Exporter:
    """``swansong exporter`` on a monitoring host: it has the address of the bucket, and no configuration."""

    def __init__(self, bucket: Bucket, warm: str) -> None:
        changed = json.dumps({"swansong_tools.commands.exporter.INTERVAL_S_MIN": 0.5})
        command = [sys.executable, str(WITH_CONSTANTS), changed, str(BIN / "swansong"), "exporter"]
        command += ["--listen", "127.0.0.1:0", "--interval", "500ms"]
        store = bucket.store
        for option in ("endpoint", "region"):
            command += [f"--{option}", store[option]]
        self.process = Process([*command, "--store", store["url"]], warm=warm, **CREDENTIALS)

    def scrape(self) -> Samples:
        address = self.process.lines.wait(event="metrics_served")["address"]
        connection = HTTPConnection(address, timeout=30)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        return samples(text)

    def wait_for(self, name: str, *labels: str, value: float) -> Samples:
        """Scrape until a metric of the run has this value."""
        found: Samples = {}

        def is_there() -> bool:
            nonlocal found
            found = self.scrape()
            return found.get((name, *labels)) == value

        until(is_there, every_s=0.1, what=f"{name}{labels} == {value}")
        return found


@pytest.fixture
def exporters(bucket: Bucket, warm_python: str) -> Iterator[Any]:
    """Start exporters, which end with the test."""
    started: list[Exporter] = []

    def start() -> Exporter:
        started.append(Exporter(bucket, warm_python))
        return started[-1]

    yield start
    for exporter in started:
        exporter.process.kill()


def samples(text: str) -> Samples:
    """Each value by name and by the values of its labels, without run and store."""
    return {
        (
            sample.name,
            *(v for name, v in sorted(sample.labels.items()) if name not in ("run", "store")),
        ): sample.value
        for family in parsed(text)
        for sample in family.samples
    }


def counters(found: Samples) -> Samples:
    """The counters of the run."""
    return {
        name: value
        for name, value in found.items()
        if name[0].startswith("swansong_run_") and name[0].endswith("_total")
    }


def train_until_preempted(vm: Any, aws: Aws, bucket: Bucket, witness: str) -> None:
    """A VM that trains, gets a notice, and leaves farewells until shortly before its deadline."""
    daemon = vm.start_daemon()
    vm.start_trainer(script=witness)
    daemon.lines.wait(event="resumption_recorded")
    before = len(bucket.keys("run/farewells/"))
    aws.notice(in_s=6)
    daemon.lines.wait(event="verdict", verdict="SAFE")
    until(
        lambda: len(bucket.keys("run/farewells/")) > before + 1,
        every_s=0.1,
        what="the last farewell",
    )
    vm.power_off()
    aws.withdraw()


def check_with_promtool(text: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, check=False, text=True
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


@pytest.mark.fault("OX01")
def test_counters_outlive_vms_exporters_and_commits(
    aws: Aws, bucket: Bucket, new_vm: Any, witness: str, exporters: Any
) -> None:
    """Two preemptions, and an exporter that is killed between them: the counters rise and never fall."""
    train_until_preempted(
        new_vm("first", bucket.store, metadata=aws.metadata, constants=FAREWELL),
        aws,
        bucket,
        witness,
    )
    exporter = exporters()
    first = exporter.wait_for("swansong_run_evacuations_total", "no", "SAFE", value=1)
    assert first["swansong_run_interruptions_total", "new"] == 0
    exporter.process.kill()

    train_until_preempted(
        new_vm("second", bucket.store, metadata=aws.metadata, constants=FAREWELL),
        aws,
        bucket,
        witness,
    )
    third = new_vm("third", bucket.store)
    daemon = third.start_daemon()
    third.start_trainer(script=witness)
    daemon.lines.wait(event="resumption_recorded")

    exporter = exporters()
    second = exporter.wait_for("swansong_run_interruptions_total", "new", value=2)
    assert second["swansong_run_evacuations_total", "no", "SAFE"] == 2
    assert all(second[name] >= value for name, value in counters(first).items())
    parts = {name[1]: v for name, v in second.items() if name[0].endswith("loss_gpu_seconds_total")}
    loss = json.loads(third.swansong("loss", "--json").stdout)["total"]
    assert sum(parts.values()) == pytest.approx(loss["lost_gpu_s"], abs=0.01)
    assert parts["fetch"] > 0.0

    for key in bucket.keys("run/commits/00000001/"):
        bucket.delete(key)
    fewer = second["swansong_run_commits", "emergency"] - 1
    pruned = exporter.wait_for("swansong_run_commits", "emergency", value=fewer)
    assert counters(pruned) == counters(second)
    exporter.process.kill(signal.SIGTERM)
    assert exporter.process.wait() == 0

    # On the VM, the command takes the store of the configuration.
    once = third.swansong("exporter", "--once", "--price", "spot=3.6")
    assert once.returncode == 0, once.stderr
    assert counters(samples(once.stdout)) == counters(second)
    assert samples(once.stdout)["swansong_run_cost", "USD", "interruptions"] > 0.0
    check_with_promtool(once.stdout)
