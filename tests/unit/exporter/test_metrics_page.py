# SPDX-License-Identifier: Apache-2.0
"""docs/operations/exporter-metrics.md lists the metrics of the exporter, and promtool accepts them."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from swansongd.exporter.metrics import ExporterCollector
from swansongd.observe.cost import Prices
from swansongd.observe.exposition import registry_of

from testkit import REPOSITORY, committed
from testkit.memory_store import MemoryStore
from tests.unit.bucket.test_lives import a_run

from .test_reader import Rig

PAGE = (REPOSITORY / "docs/operations/exporter-metrics.md").read_text()
ROW = re.compile(r"^\| `(swansong_[a-z_]+)` \| (\w+) \| (.*?) ?\| (.+) \|$", re.MULTILINE)


def collector() -> ExporterCollector:
    """An exporter whose every metric has a sample."""
    store, mirror = MemoryStore(), MemoryStore()
    mirror.url = "memory://mirror"
    a_run(store)
    committed.commit(store, {"a": b"1"}, generation=3, step=200)
    rig = Rig(store, mirror=mirror, prices=Prices(spot=1.0, on_demand=3.0))
    assert rig.read()
    assert rig.mirror_health is not None
    return ExporterCollector([rig.reader], [rig.health, rig.mirror_health])


def name_of(metric: Metric) -> str:
    return f"{metric.name}_total" if metric.type == "counter" else str(metric.name)


def test_the_page_lists_every_metric() -> None:
    """Each metric has a row with its type, its own labels and its help text, and each row a metric."""
    found = {}
    for metric in collector().collect():
        (labels,) = {tuple(sample.labels) for sample in metric.samples}
        is_of_a_run = metric.name.startswith("swansong_run_")
        assert not is_of_a_run or labels[:2] == ("run", "store"), metric.name
        own = labels[2:] if is_of_a_run else labels
        found[name_of(metric)] = (metric.type, list(own), metric.documentation)
    explained = {
        name: (kind, re.findall(r"`(\w+)`", labels), text)
        for name, kind, labels, text in ROW.findall(PAGE)
    }
    assert explained == found


def test_promtool_finds_no_fault() -> None:
    """Names, units, help texts and the format follow the rules of Prometheus."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    text = generate_latest(registry_of(collector()))
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
