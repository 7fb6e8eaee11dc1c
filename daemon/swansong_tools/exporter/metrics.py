# SPDX-License-Identifier: Apache-2.0
"""The metrics of the exporter; docs/reference/metrics.md shows them.

The labels are names of runs, URLs of configured stores, and words of fixed lists.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from swansong_bucket.model import Verdict
from swansongd import __version__

from swansong_tools.economics.cost import Costs
from swansong_tools.exporter.figures import RunFigures
from swansong_tools.exporter.health import HealthFigures, ReadHealth
from swansong_tools.exporter.reader import StoreReader

Labels = tuple[str, ...]
Samples = Iterable[tuple[Labels, float | None]]

_RUN = ("run", "store")
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


class ExporterCollector(Collector):
    """Collects the figures of the last readings; sends no request.

    Args:
        readers: of the stores.
        healths: of the stores and mirrors.
        wall: the clock.
    """

    def __init__(
        self,
        readers: Sequence[StoreReader],
        healths: Sequence[ReadHealth],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._readers = readers
        self._healths = healths
        self._wall = wall

    def collect(self) -> Iterator[Metric]:
        """All metrics; those without a value have no sample."""
        runs = [
            ((found.run, reader.url), found)
            for reader in self._readers
            for found in reader.figures()
        ]
        yield from _commit_metrics(runs)
        yield from _evacuation_metrics(runs)
        yield from _loss_metrics(runs)
        yield from _mirror_metrics(runs, self._wall())
        yield from _object_metrics(runs)
        yield from _health_metrics([health.figures() for health in self._healths])
        yield _gauge(
            "swansong_exporter_build_info",
            "Version of the exporter",
            ("version",),
            [((__version__,), 1.0)],
        )


Runs = Sequence[tuple[Labels, RunFigures]]


def _commit_metrics(runs: Runs) -> Iterator[Metric]:
    yield _gauge(
        "swansong_run_generation",
        "Highest claimed generation of the run",
        _RUN,
        ((labels, found.generation) for labels, found in runs),
    )
    yield _gauge(
        "swansong_run_finished",
        "1 if the newest whole commit is the end of the run, 0 otherwise",
        _RUN,
        ((labels, found.is_finished) for labels, found in runs),
    )
    newest = [(labels, found.newest) for labels, found in runs if found.newest is not None]
    yield _gauge(
        "swansong_run_last_commit_timestamp_seconds",
        "Time of the newest whole commit",
        _RUN,
        ((labels, commit.created_wall_s) for labels, commit in newest),
    )
    yield _gauge(
        "swansong_run_last_commit_step",
        "Step of the newest whole commit",
        _RUN,
        ((labels, commit.ref.step) for labels, commit in newest),
    )
    yield _gauge(
        "swansong_run_last_commit_generation",
        "Generation of the newest whole commit",
        _RUN,
        ((labels, commit.ref.generation) for labels, commit in newest),
    )
    yield _gauge(
        "swansong_run_last_commit_size_bytes",
        "Size of the newest whole commit",
        _RUN,
        ((labels, commit.size_bytes) for labels, commit in newest),
    )
    yield _gauge(
        "swansong_run_oldest_commit_timestamp_seconds",
        "Time of the oldest whole commit",
        _RUN,
        ((labels, found.oldest_created_wall_s) for labels, found in runs),
    )
    yield _gauge(
        "swansong_run_commits",
        "Whole commits by kind",
        (*_RUN, "kind"),
        _split(runs, lambda found: found.commits),
    )
    yield _gauge(
        "swansong_run_commits_size_bytes",
        "Size of the whole commits by kind; bytes that several commits share count in each",
        (*_RUN, "kind"),
        _split(runs, lambda found: found.commit_bytes),
    )
    yield _gauge(
        "swansong_run_incomplete_commits",
        "Commits without the manifests of all VMs",
        _RUN,
        ((labels, found.incomplete) for labels, found in runs),
    )
    yield _gauge(
        "swansong_run_pins",
        "Pins of the run",
        _RUN,
        ((labels, found.pins) for labels, found in runs),
    )


def _evacuation_metrics(runs: Runs) -> Iterator[Metric]:
    yield _counter(
        "swansong_run_evacuations_total",
        "Evacuations by their best verdict, of all VMs of the run",
        (*_RUN, "verdict", "drill"),
        _by_verdict(runs, lambda found: found.evacuations.settled),
    )
    yield _gauge(
        "swansong_run_last_evacuation_timestamp_seconds",
        "Time of the newest farewell of an evacuation that ended with this verdict",
        (*_RUN, "verdict", "drill"),
        _by_verdict(runs, lambda found: found.evacuations.newest_wall_s),
    )


def _by_verdict(
    runs: Runs, values: Callable[[RunFigures], Mapping[tuple[Verdict, bool], float]]
) -> Samples:
    return (
        ((*labels, verdict.value, _DRILL[is_drill]), value)
        for labels, found in runs
        for (verdict, is_drill), value in values(found).items()
    )


def _loss_metrics(runs: Runs) -> Iterator[Metric]:
    yield _counter(
        "swansong_run_interruptions_total",
        "Interruptions with a recorded resume, on a new VM or on the same one",
        (*_RUN, "vm"),
        (
            ((*labels, _VM[is_same]), count)
            for labels, found in runs
            for is_same, count in found.interruptions.items()
        ),
    )
    yield _counter(
        "swansong_run_preemption_loss_gpu_seconds_total",
        "GPU seconds lost to these interruptions, by part of the loss",
        (*_RUN, "part"),
        _split(runs, lambda found: found.lost_gpu_s),
    )
    losses = [(labels, found.loss) for labels, found in runs if found.loss is not None]
    yield _gauge(
        "swansong_run_ettr_ratio",
        "Effective-training-time ratio of the run: productive by wall time",
        _RUN,
        ((labels, loss.ettr) for labels, loss in losses),
    )
    yield _gauge(
        "swansong_run_ettr_last_hour_ratio",
        "Effective-training-time ratio of the hour before the newest known step",
        _RUN,
        ((labels, loss.ettr_last_hour) for labels, loss in losses),
    )
    yield _gauge(
        "swansong_run_wall_seconds",
        "Time from the start of the first daemon to the newest known step",
        _RUN,
        ((labels, loss.wall_s) for labels, loss in losses),
    )
    yield _gauge(
        "swansong_run_gpu_seconds",
        "GPU seconds of that time",
        _RUN,
        ((labels, loss.gpu_s) for labels, loss in losses),
    )
    yield _gauge(
        "swansong_run_productive_gpu_seconds",
        "GPU seconds of training that no VM had to do again",
        _RUN,
        ((labels, loss.productive_gpu_s) for labels, loss in losses),
    )
    yield _gauge(
        "swansong_run_last_step_timestamp_seconds",
        "Time of the newest step that the bucket shows",
        _RUN,
        ((labels, loss.until_wall_s) for labels, loss in losses),
    )
    yield _gauge(
        "swansong_run_cost",
        "Cost of the run in the currency of the prices, by part",
        (*_RUN, "part", "currency"),
        (
            ((*labels, part, found.costs.currency), amount)
            for labels, found in runs
            if found.costs is not None
            for part, amount in _amounts(found.costs).items()
        ),
    )


def _amounts(costs: Costs) -> Mapping[str, float | None]:
    return {
        "spot": costs.spot,
        "interruptions": costs.interruptions,
        "saves": costs.saves,
        "on_demand": costs.on_demand,
    }


def _mirror_metrics(runs: Runs, now_wall_s: float) -> Iterator[Metric]:
    lags = [(labels, found.mirror) for labels, found in runs if found.mirror is not None]
    yield _gauge(
        "swansong_run_mirror_lag_seconds",
        "Age of the oldest commit that is newer than the newest one in the mirror",
        _RUN,
        (
            (labels, 0.0 if lag.since_wall_s is None else max(0.0, now_wall_s - lag.since_wall_s))
            for labels, lag in lags
        ),
    )
    yield _gauge(
        "swansong_run_mirror_lag_commits",
        "Whole commits that are newer than the newest one in the mirror",
        _RUN,
        ((labels, lag.commits) for labels, lag in lags),
    )


def _object_metrics(runs: Runs) -> Iterator[Metric]:
    yield _gauge(
        "swansong_run_damaged_objects",
        "Objects that are not valid and do not count, by kind",
        (*_RUN, "kind"),
        _split(runs, lambda found: found.damaged),
    )
    yield _gauge(
        "swansong_run_left_out_objects",
        "Objects beyond the limits of the exporter, which do not count, by kind",
        (*_RUN, "kind"),
        _split(runs, lambda found: found.left_out),
    )
    yield _gauge(
        "swansong_run_foreign_objects",
        "Objects with a key that no swansong of this version writes",
        _RUN,
        ((labels, found.foreign) for labels, found in runs),
    )
    yield _gauge(
        "swansong_exporter_run_read_timestamp_seconds",
        "Time of the last reading of the run",
        _RUN,
        ((labels, found.read_wall_s) for labels, found in runs),
    )


def _health_metrics(healths: Sequence[HealthFigures]) -> Iterator[Metric]:
    store = ("store",)
    yield _gauge(
        "swansong_exporter_store_up",
        "1 if the last reading of the store succeeded, 0 otherwise",
        store,
        (((each.url,), each.is_up) for each in healths if each.is_up is not None),
    )
    yield _gauge(
        "swansong_exporter_store_last_success_timestamp_seconds",
        "Time of the last reading that succeeded",
        store,
        (((each.url,), each.read_wall_s) for each in healths),
    )
    yield _gauge(
        "swansong_exporter_store_read_duration_seconds",
        "Duration of the last reading",
        store,
        (((each.url,), each.took_s) for each in healths),
    )
    yield _counter(
        "swansong_exporter_requests_total",
        "Requests to the store by operation, with retries",
        ("store", "operation"),
        (((each.url, name), n) for each in healths for name, n in each.requests.items()),
    )
    yield _counter(
        "swansong_exporter_errors_total",
        "Requests that failed, and faults of the exporter, by kind",
        ("store", "kind"),
        (((each.url, kind), n) for each in healths for kind, n in each.errors.items()),
    )
    yield _gauge(
        "swansong_exporter_runs",
        "Runs of the store with figures",
        store,
        (((each.url,), each.runs) for each in healths),
    )
    yield _gauge(
        "swansong_exporter_runs_failing",
        "Runs that the store refuses, or that have too many keys",
        store,
        (((each.url,), each.runs_failing) for each in healths),
    )
    yield _gauge(
        "swansong_exporter_runs_left_out",
        "Runs beyond --runs-max",
        store,
        (((each.url,), each.runs_left_out) for each in healths),
    )


def _split(runs: Runs, values: Callable[[RunFigures], Mapping[Any, float]]) -> Samples:
    """One sample for each entry of a mapping, whose key is the last label."""
    return (
        ((*labels, str(name)), value)
        for labels, found in runs
        for name, value in values(found).items()
    )


def _gauge(name: str, text: str, labels: Labels, samples: Samples) -> Metric:
    return _filled(GaugeMetricFamily(name, text, labels=labels), samples)


def _counter(name: str, text: str, labels: Labels, samples: Samples) -> Metric:
    return _filled(CounterMetricFamily(name, text, labels=labels), samples)


def _filled(metric: GaugeMetricFamily | CounterMetricFamily, samples: Samples) -> Metric:
    for labels, value in samples:
        if value is not None:
            metric.add_metric(labels, float(value))
    return metric
