# SPDX-License-Identifier: Apache-2.0
"""The metrics of the exporter; docs/reference/metrics.md shows them.

The labels are names of runs, URLs of configured stores, and words of fixed lists.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import Metric
from prometheus_client.registry import Collector
from swansongd import __version__
from swansongd.observe.families import Sheet, counter, gauge

from swansong_tools.exporter.figures import MirrorLag, RunFigures
from swansong_tools.exporter.own_health import ReadHealth
from swansong_tools.exporter.readings import StoreReader

_VM = {False: "new", True: "same"}
_DRILL = {False: "no", True: "yes"}
LABELS = {
    "store": "URL of the store, or of a mirror",
    "kind": "Kind of the commit: `periodic`, `emergency` or `final`; of the object: `commit`, `farewell`, "
    "`resumption` or `claim`; of the error: `transient`, `refused`, `not_found`, `too_large`, `corrupt` or "
    "`unexpected`",
    "vm": "`new` or `same`: the VM on which the run resumed",
    "part": "Part of the loss: see docs/operations/loss.md; of the cost: `spot`, `interruptions`, `saves` or "
    "`on_demand`",
    "operation": "`get`, `head` or `list`",
}
"""The meaning of labels, beyond the help texts and the labels of the daemon's metrics."""

OF_RUNS = (
    gauge("swansong_run_generation", "Highest claimed generation of the run"),
    gauge(
        "swansong_run_finished",
        "1 if the newest whole commit is the end of the run, 0 otherwise",
    ),
    gauge("swansong_run_last_commit_timestamp_seconds", "Time of the newest whole commit"),
    gauge("swansong_run_last_commit_step", "Step of the newest whole commit"),
    gauge("swansong_run_last_commit_generation", "Generation of the newest whole commit"),
    gauge("swansong_run_last_commit_size_bytes", "Size of the newest whole commit"),
    gauge("swansong_run_oldest_commit_timestamp_seconds", "Time of the oldest whole commit"),
    gauge("swansong_run_commits", "Whole commits by kind", "kind"),
    gauge(
        "swansong_run_commits_size_bytes",
        "Size of the whole commits by kind; bytes that several commits share count in each",
        "kind",
    ),
    gauge("swansong_run_incomplete_commits", "Commits without the manifests of all VMs"),
    gauge("swansong_run_pins", "Pins of the run"),
    counter(
        "swansong_run_evacuations_total",
        "Evacuations by their best verdict, of all VMs of the run",
        "verdict",
        "drill",
    ),
    gauge(
        "swansong_run_last_evacuation_timestamp_seconds",
        "Time of the newest farewell of an evacuation that ended with this verdict",
        "verdict",
        "drill",
    ),
    counter(
        "swansong_run_interruptions_total",
        "Interruptions with a recorded resume, on a new VM or on the same one",
        "vm",
    ),
    counter(
        "swansong_run_preemption_loss_gpu_seconds_total",
        "GPU seconds lost to these interruptions, by part of the loss",
        "part",
    ),
    gauge(
        "swansong_run_ettr_ratio",
        "Effective-training-time ratio of the run: productive by wall time",
    ),
    gauge(
        "swansong_run_ettr_last_hour_ratio",
        "Effective-training-time ratio of the hour before the newest known step",
    ),
    gauge(
        "swansong_run_wall_seconds",
        "Time from the start of the first daemon to the newest known step",
    ),
    gauge("swansong_run_gpu_seconds", "GPU seconds of that time"),
    gauge(
        "swansong_run_productive_gpu_seconds",
        "GPU seconds of training that no VM had to do again",
    ),
    gauge(
        "swansong_run_last_step_timestamp_seconds", "Time of the newest step that the bucket shows"
    ),
    gauge(
        "swansong_run_cost",
        "Cost of the run in the currency of the prices, by part",
        "part",
        "currency",
    ),
    gauge(
        "swansong_run_mirror_lag_seconds",
        "Age of the oldest commit that is newer than the newest one in the mirror",
    ),
    gauge(
        "swansong_run_mirror_lag_commits",
        "Whole commits that are newer than the newest one in the mirror",
    ),
    gauge(
        "swansong_run_damaged_objects",
        "Objects that are not valid and do not count, by kind",
        "kind",
    ),
    gauge(
        "swansong_run_left_out_objects",
        "Objects beyond the limits of the exporter, which do not count, by kind",
        "kind",
    ),
    gauge(
        "swansong_run_foreign_objects",
        "Objects with a key that no swansong of this version writes",
    ),
    gauge("swansong_exporter_run_read_timestamp_seconds", "Time of the last reading of the run"),
)
"""Each sample also has the labels ``run`` and ``store``."""
OF_STORES = (
    gauge(
        "swansong_exporter_store_up", "1 if the last reading of the store succeeded, 0 otherwise"
    ),
    gauge(
        "swansong_exporter_store_last_success_timestamp_seconds",
        "Time of the last reading that succeeded",
    ),
    gauge("swansong_exporter_store_read_duration_seconds", "Duration of the last reading"),
    counter(
        "swansong_exporter_requests_total",
        "Requests to the store by operation, with retries",
        "operation",
    ),
    counter(
        "swansong_exporter_errors_total",
        "Requests that failed, and faults of the exporter, by kind",
        "kind",
    ),
    gauge("swansong_exporter_runs", "Runs of the store with figures"),
    gauge(
        "swansong_exporter_runs_failing", "Runs that the store refuses, or that have too many keys"
    ),
    gauge("swansong_exporter_runs_left_out", "Runs beyond --runs-max"),
)
"""Each sample also has the label ``store``."""
BUILD_INFO = gauge("swansong_exporter_build_info", "Version of the exporter", "version")


@dataclass(eq=False, repr=False)
class ExporterCollector(Collector):
    """Collects the figures of the last readings; sends no request.

    Args:
        readers: of the stores.
        healths: of the stores and mirrors.
        wall: the clock.
    """

    readers: Sequence[StoreReader]
    healths: Sequence[ReadHealth]
    wall: Callable[[], float] = time.time

    def collect(self) -> Iterable[Metric]:
        """All metrics; those without a value have no sample."""
        sheet = Sheet((*OF_RUNS, *OF_STORES, BUILD_INFO))
        now_wall_s = self.wall()
        for reader in self.readers:
            for found in reader.figures():
                _put_run(sheet.of(run=found.run, store=reader.url), found, now_wall_s)
        for health in self.healths:
            _put_store(sheet.of(store=health.url), health)
        sheet.put(BUILD_INFO.name, 1.0, version=__version__)
        return sheet.metrics(is_whole=True)


def _put_run(sheet: Sheet, run: RunFigures, now_wall_s: float) -> None:
    newest, mirror = run.newest, run.mirror
    sheet.put("swansong_run_generation", run.generation)
    sheet.put("swansong_run_finished", run.is_finished)
    if newest is not None:
        sheet.put("swansong_run_last_commit_timestamp_seconds", newest.created_wall_s)
        sheet.put("swansong_run_last_commit_step", newest.ref.step)
        sheet.put("swansong_run_last_commit_generation", newest.ref.generation)
        sheet.put("swansong_run_last_commit_size_bytes", newest.size_bytes)
    sheet.put("swansong_run_oldest_commit_timestamp_seconds", run.oldest_created_wall_s)
    _put_each(sheet, "swansong_run_commits", "kind", run.commits)
    _put_each(sheet, "swansong_run_commits_size_bytes", "kind", run.commit_bytes)
    sheet.put("swansong_run_incomplete_commits", run.incomplete)
    sheet.put("swansong_run_pins", run.pins)
    for name, values in (
        ("swansong_run_evacuations_total", run.evacuations.settled),
        ("swansong_run_last_evacuation_timestamp_seconds", run.evacuations.newest_wall_s),
    ):
        for (verdict, is_drill), value in values.items():
            sheet.put(name, value, verdict=verdict.value, drill=_DRILL[is_drill])
    _put_loss(sheet, run)
    if mirror is not None:
        sheet.put("swansong_run_mirror_lag_seconds", _lag_s(mirror, now_wall_s))
        sheet.put("swansong_run_mirror_lag_commits", mirror.commits)
    _put_each(sheet, "swansong_run_damaged_objects", "kind", run.damaged)
    _put_each(sheet, "swansong_run_left_out_objects", "kind", run.left_out)
    sheet.put("swansong_run_foreign_objects", run.foreign)
    sheet.put("swansong_exporter_run_read_timestamp_seconds", run.read_wall_s)


def _put_loss(sheet: Sheet, run: RunFigures) -> None:
    loss = run.losses.loss
    for is_same, count in run.losses.interruptions.items():
        sheet.put("swansong_run_interruptions_total", count, vm=_VM[is_same])
    lost_gpu_s = run.losses.lost_gpu_s
    _put_each(sheet, "swansong_run_preemption_loss_gpu_seconds_total", "part", lost_gpu_s)
    if loss is not None:
        sheet.put("swansong_run_ettr_ratio", loss.ettr)
        sheet.put("swansong_run_ettr_last_hour_ratio", loss.ettr_last_hour)
        sheet.put("swansong_run_wall_seconds", loss.wall_s)
        sheet.put("swansong_run_gpu_seconds", loss.gpu_s)
        sheet.put("swansong_run_productive_gpu_seconds", loss.productive_gpu_s)
        sheet.put("swansong_run_last_step_timestamp_seconds", loss.until_wall_s)
    for (part, currency), amount in run.losses.costs.items():
        sheet.put("swansong_run_cost", amount, part=part, currency=currency)


def _put_store(sheet: Sheet, store: ReadHealth) -> None:
    readings = store.readings
    sheet.put("swansong_exporter_store_up", store.is_up)
    sheet.put("swansong_exporter_store_last_success_timestamp_seconds", store.read_wall_s)
    sheet.put("swansong_exporter_store_read_duration_seconds", store.took_s)
    _put_each(sheet, "swansong_exporter_requests_total", "operation", store.requests)
    _put_each(sheet, "swansong_exporter_errors_total", "kind", store.errors)
    sheet.put("swansong_exporter_runs", sum(each.runs for each in readings))
    sheet.put("swansong_exporter_runs_failing", sum(each.failing for each in readings))
    sheet.put("swansong_exporter_runs_left_out", sum(each.left_out for each in readings))


def _put_each(sheet: Sheet, name: str, label: str, values: Mapping[Any, float]) -> None:
    for key, value in values.items():
        sheet.put(name, value, **{label: str(key)})


def _lag_s(lag: MirrorLag, now_wall_s: float) -> float:
    return 0.0 if lag.since_wall_s is None else max(0.0, now_wall_s - lag.since_wall_s)
