# SPDX-License-Identifier: Apache-2.0
"""The metrics of the exporter; docs/reference/metrics.md shows them.

The labels are names of runs, URLs of configured stores, and words of fixed lists.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from swansong_bucket.model import Verdict
from swansong_bucket.runs.run import RecordedCommit
from swansongd import __version__

from swansong_tools.economics.loss import Loss
from swansong_tools.exporter.figures import MirrorLag, RunFigures
from swansong_tools.exporter.health import ReadHealth
from swansong_tools.exporter.reader import StoreReader

Labels = tuple[str, ...]
Figures = TypeVar("Figures")
Value = float | None

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


@dataclass(frozen=True, slots=True)
class _Family(Generic[Figures]):
    """One metric; a counter if its name ends in ``_total``, else a gauge."""

    name: str
    help: str
    value: Callable[[Figures], Value | Mapping[Any, Value]]
    """A sample, or several by the values of ``labels``.  None stands for no sample."""
    labels: Labels = ()
    """Besides the labels of the run or of the store."""

    def metric(self, shared: Labels, found: Iterable[tuple[Labels, Figures]]) -> Metric:
        """The metric with its samples.

        Args:
            shared: names of the labels of the run or of the store.
            found: values of these labels, with the figures.
        """
        kind = CounterMetricFamily if self.name.endswith("_total") else GaugeMetricFamily
        metric = kind(self.name, self.help, labels=(*shared, *self.labels))
        for own, figures in found:
            value = self.value(figures)
            for key, sample in (value if isinstance(value, Mapping) else {(): value}).items():
                if sample is not None:
                    further = key if isinstance(key, tuple) else (str(key),)
                    metric.add_metric((*own, *further), float(sample))
        return metric


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

    def collect(self) -> Iterator[Metric]:
        """All metrics; those without a value have no sample."""
        runs = [
            ((found.run, reader.url), found)
            for reader in self.readers
            for found in reader.figures()
        ]
        healths = [((health.url,), health) for health in self.healths]
        for of_run in _of_runs(self.wall()):
            yield of_run.metric(("run", "store"), runs)
        for of_store in _OF_STORES:
            yield of_store.metric(("store",), healths)
        build_info = GaugeMetricFamily(
            "swansong_exporter_build_info", "Version of the exporter", labels=("version",)
        )
        build_info.add_metric((__version__,), 1.0)
        yield build_info


def _of_runs(now_wall_s: float) -> tuple[_Family[RunFigures], ...]:
    return (
        _Family(
            "swansong_run_generation",
            "Highest claimed generation of the run",
            lambda run: run.generation,
        ),
        _Family(
            "swansong_run_finished",
            "1 if the newest whole commit is the end of the run, 0 otherwise",
            lambda run: run.is_finished,
        ),
        _Family(
            "swansong_run_last_commit_timestamp_seconds",
            "Time of the newest whole commit",
            _of_newest(lambda commit: commit.created_wall_s),
        ),
        _Family(
            "swansong_run_last_commit_step",
            "Step of the newest whole commit",
            _of_newest(lambda commit: commit.ref.step),
        ),
        _Family(
            "swansong_run_last_commit_generation",
            "Generation of the newest whole commit",
            _of_newest(lambda commit: commit.ref.generation),
        ),
        _Family(
            "swansong_run_last_commit_size_bytes",
            "Size of the newest whole commit",
            _of_newest(lambda commit: commit.size_bytes),
        ),
        _Family(
            "swansong_run_oldest_commit_timestamp_seconds",
            "Time of the oldest whole commit",
            lambda run: run.oldest_created_wall_s,
        ),
        _Family(
            "swansong_run_commits", "Whole commits by kind", lambda run: run.commits, ("kind",)
        ),
        _Family(
            "swansong_run_commits_size_bytes",
            "Size of the whole commits by kind; bytes that several commits share count in each",
            lambda run: run.commit_bytes,
            ("kind",),
        ),
        _Family(
            "swansong_run_incomplete_commits",
            "Commits without the manifests of all VMs",
            lambda run: run.incomplete,
        ),
        _Family("swansong_run_pins", "Pins of the run", lambda run: run.pins),
        _Family(
            "swansong_run_evacuations_total",
            "Evacuations by their best verdict, of all VMs of the run",
            lambda run: _by_verdict(run.evacuations.settled),
            ("verdict", "drill"),
        ),
        _Family(
            "swansong_run_last_evacuation_timestamp_seconds",
            "Time of the newest farewell of an evacuation that ended with this verdict",
            lambda run: _by_verdict(run.evacuations.newest_wall_s),
            ("verdict", "drill"),
        ),
        _Family(
            "swansong_run_interruptions_total",
            "Interruptions with a recorded resume, on a new VM or on the same one",
            lambda run: {
                _VM[is_same]: count for is_same, count in run.losses.interruptions.items()
            },
            ("vm",),
        ),
        _Family(
            "swansong_run_preemption_loss_gpu_seconds_total",
            "GPU seconds lost to these interruptions, by part of the loss",
            lambda run: run.losses.lost_gpu_s,
            ("part",),
        ),
        _Family(
            "swansong_run_ettr_ratio",
            "Effective-training-time ratio of the run: productive by wall time",
            _of_loss(lambda loss: loss.ettr),
        ),
        _Family(
            "swansong_run_ettr_last_hour_ratio",
            "Effective-training-time ratio of the hour before the newest known step",
            _of_loss(lambda loss: loss.ettr_last_hour),
        ),
        _Family(
            "swansong_run_wall_seconds",
            "Time from the start of the first daemon to the newest known step",
            _of_loss(lambda loss: loss.wall_s),
        ),
        _Family(
            "swansong_run_gpu_seconds",
            "GPU seconds of that time",
            _of_loss(lambda loss: loss.gpu_s),
        ),
        _Family(
            "swansong_run_productive_gpu_seconds",
            "GPU seconds of training that no VM had to do again",
            _of_loss(lambda loss: loss.productive_gpu_s),
        ),
        _Family(
            "swansong_run_last_step_timestamp_seconds",
            "Time of the newest step that the bucket shows",
            _of_loss(lambda loss: loss.until_wall_s),
        ),
        _Family(
            "swansong_run_cost",
            "Cost of the run in the currency of the prices, by part",
            lambda run: run.losses.costs,
            ("part", "currency"),
        ),
        _Family(
            "swansong_run_mirror_lag_seconds",
            "Age of the oldest commit that is newer than the newest one in the mirror",
            lambda run: _lag_s(run.mirror, now_wall_s),
        ),
        _Family(
            "swansong_run_mirror_lag_commits",
            "Whole commits that are newer than the newest one in the mirror",
            lambda run: None if run.mirror is None else run.mirror.commits,
        ),
        _Family(
            "swansong_run_damaged_objects",
            "Objects that are not valid and do not count, by kind",
            lambda run: run.damaged,
            ("kind",),
        ),
        _Family(
            "swansong_run_left_out_objects",
            "Objects beyond the limits of the exporter, which do not count, by kind",
            lambda run: run.left_out,
            ("kind",),
        ),
        _Family(
            "swansong_run_foreign_objects",
            "Objects with a key that no swansong of this version writes",
            lambda run: run.foreign,
        ),
        _Family(
            "swansong_exporter_run_read_timestamp_seconds",
            "Time of the last reading of the run",
            lambda run: run.read_wall_s,
        ),
    )


_OF_STORES: tuple[_Family[ReadHealth], ...] = (
    _Family(
        "swansong_exporter_store_up",
        "1 if the last reading of the store succeeded, 0 otherwise",
        lambda store: store.is_up,
    ),
    _Family(
        "swansong_exporter_store_last_success_timestamp_seconds",
        "Time of the last reading that succeeded",
        lambda store: store.read_wall_s,
    ),
    _Family(
        "swansong_exporter_store_read_duration_seconds",
        "Duration of the last reading",
        lambda store: store.took_s,
    ),
    _Family(
        "swansong_exporter_requests_total",
        "Requests to the store by operation, with retries",
        lambda store: store.requests,
        ("operation",),
    ),
    _Family(
        "swansong_exporter_errors_total",
        "Requests that failed, and faults of the exporter, by kind",
        lambda store: store.errors,
        ("kind",),
    ),
    _Family(
        "swansong_exporter_runs",
        "Runs of the store with figures",
        lambda store: sum(each.runs for each in store.readings),
    ),
    _Family(
        "swansong_exporter_runs_failing",
        "Runs that the store refuses, or that have too many keys",
        lambda store: sum(each.failing for each in store.readings),
    ),
    _Family(
        "swansong_exporter_runs_left_out",
        "Runs beyond --runs-max",
        lambda store: sum(each.left_out for each in store.readings),
    ),
)


def _of_newest(value: Callable[[RecordedCommit], Value]) -> Callable[[RunFigures], Value]:
    return lambda run: None if run.newest is None else value(run.newest)


def _of_loss(value: Callable[[Loss], Value]) -> Callable[[RunFigures], Value]:
    return lambda run: None if run.losses.loss is None else value(run.losses.loss)


def _by_verdict(values: Mapping[tuple[Verdict, bool], float]) -> Mapping[Labels, float]:
    return {
        (verdict.value, _DRILL[is_drill]): value for (verdict, is_drill), value in values.items()
    }


def _lag_s(lag: MirrorLag | None, now_wall_s: float) -> Value:
    if lag is None:
        return None
    return 0.0 if lag.since_wall_s is None else max(0.0, now_wall_s - lag.since_wall_s)
