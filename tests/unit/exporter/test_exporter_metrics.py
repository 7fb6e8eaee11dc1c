# SPDX-License-Identifier: Apache-2.0
"""The metrics of the exporter, which promtool accepts."""

from __future__ import annotations

from prometheus_client import generate_latest
from swansong_tools.economics.cost import Prices
from swansong_tools.exporter.run_metrics import ExporterCollector
from swansongd.observe.exposition import registry_of

from testkit import committed
from testkit.lost_vms import a_run
from testkit.memory_store import MemoryStore
from testkit.prometheus import check_metrics

from .test_readings import Rig, a_mirror


def collector() -> ExporterCollector:
    """An exporter whose every metric has a sample."""
    store = MemoryStore()
    a_run(store)
    committed.commit(store, {"a": b"1"}, generation=3, step=200)
    rig = Rig(store, mirror=a_mirror(), prices=Prices(spot=1.0, on_demand=3.0))
    assert rig.read()
    assert rig.mirror_health is not None
    return ExporterCollector([rig.reader], [rig.health, rig.mirror_health])


def test_every_metric_has_a_sample() -> None:
    """The samples of runs name run and store first."""
    for metric in collector().collect():
        assert metric.samples, metric.name
        if metric.name.startswith("swansong_run_"):
            assert {tuple(sample.labels)[:2] for sample in metric.samples} == {("run", "store")}


def test_promtool_finds_no_fault() -> None:
    """Names, units, help texts and the format follow the rules of Prometheus."""
    check_metrics(generate_latest(registry_of(collector())))
