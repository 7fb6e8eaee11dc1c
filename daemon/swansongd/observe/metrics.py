# SPDX-License-Identifier: Apache-2.0
"""The metrics of the daemon: a snapshot and the counters, as samples of :data:`FAMILIES`.

All of it runs in the threads that serve a scrape.  The decision loop only counts, see
:mod:`swansongd.observe.counters`.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

from prometheus_client import Metric
from swansong_bucket.loss_records import LOST
from swansong_bucket.model import PEER_SOURCE, GpuHealth, Health, Severity, Verdict

from swansongd.config.config import MetricsConfig
from swansongd.core.notices import BY_HAND
from swansongd.core.state import State
from swansongd.core.transition import HOST_SOURCE
from swansongd.observe.build_status import status_of
from swansongd.observe.counters import Counters
from swansongd.observe.daemon_families import FAMILIES
from swansongd.observe.exposition import Exposition, Textfile, registry_of
from swansongd.observe.families import Sheet
from swansongd.observe.phase import Phase
from swansongd.observe.slow import slow_ranks
from swansongd.observe.snapshot import Snapshot
from swansongd.observe.stall import stalled
from swansongd.observe.status import DaemonStatus, Margin, MetricsStatus, MirrorState

_SOURCES_UP = (Health.OK, Health.DEGRADED)
NOTIFIED_OTHERWISE = (HOST_SOURCE, PEER_SOURCE, *BY_HAND)
"""Sources of notices that no thread watches."""
GPUS_MAX = 32
XID_CLASSES = ("application", "degraded", "dying")
CHANNELS, OUTCOMES = ("webhook", "exec", "heartbeat"), ("sent", "failed", "dropped")
_REMOVAL_S = 1.0
"""Limit of the wait for the removal of the textfile at a stop."""


class Metrics:
    """Serves the metrics where the configuration says.

    Args:
        config: of the daemon.
        snapshot: returns the figures of this moment, in any thread.
        stop: ends the threads.
    """

    def __init__(
        self, config: MetricsConfig, snapshot: Callable[[], Snapshot], stop: threading.Event
    ) -> None:
        self.counters = Counters()
        registry = registry_of(DaemonCollector(snapshot, self.counters))
        self._exposition: Exposition | None = None
        if config.listen is not None:
            self._exposition = Exposition(config.listen, registry, key="metrics.listen", stop=stop)
        self._textfile: Textfile | None = None
        if config.textfile is not None:
            self._textfile = Textfile(config.textfile, registry, key="metrics.textfile", stop=stop)

    def status(self) -> MetricsStatus | None:
        """None without ``metrics.listen``."""
        return None if self._exposition is None else self._exposition.status()

    @property
    def failure(self) -> str:
        """Why ``metrics.listen`` is not served; empty if it is, or if it is not configured."""
        return "" if self._exposition is None else self._exposition.failure

    def start(self) -> None:
        """Start the threads.  Returns immediately."""
        if self._exposition is not None:
            self._exposition.start()
        if self._textfile is not None:
            self._textfile.start()

    def close(self) -> None:
        """Remove socket and textfile, in a limited time; after ``stop`` was set."""
        if self._exposition is not None:
            self._exposition.close()
        if self._textfile is not None:
            self._textfile.removed(_REMOVAL_S)


class DaemonCollector:
    """Makes the samples of one scrape.

    Args:
        snapshot: returns the figures of this moment.
        counters: of the decision loop.
    """

    def __init__(self, snapshot: Callable[[], Snapshot], counters: Counters) -> None:
        self._snapshot = snapshot
        self._counters = counters
        self._instants: dict[tuple[str, ...], tuple[float, float]] = {}

    def describe(self) -> Iterable[Metric]:
        """The families without samples, so that a scrape can name those that it wants."""
        return [family.metric() for family in FAMILIES]

    def collect(self) -> Sequence[Metric]:
        """The samples of this moment."""
        snapshot = self._snapshot()
        status = status_of(snapshot)
        sheet = Sheet(FAMILIES, run=status.run)
        self._put_daemon(sheet, snapshot, status)
        self._put_commits(sheet, snapshot, status)
        self._put_flush(sheet, snapshot, status)
        self._put_sources(sheet, snapshot, status)
        self._put_evacuations(sheet, snapshot)
        self._put_trainers(sheet, snapshot)
        self._put_loss(sheet, snapshot)
        self._put_prune(sheet, snapshot)
        _put_mirror(sheet, status)
        _put_gpus(sheet, status)
        _put_notifications(sheet, status)
        return sheet.metrics()

    def _put_instant(
        self, sheet: Sheet, name: str, snapshot: Snapshot, mono_s: float | None, **labels: str
    ) -> None:
        """Add a timestamp.  The same instant keeps its value, although the two clocks drift apart."""
        if mono_s is None:
            return
        series = (name, *labels.values())
        known = self._instants.get(series)
        if known is None or known[0] != mono_s:
            known = self._instants[series] = mono_s, round(snapshot.wall_s(mono_s), 3)
        sheet.put(name, known[1], **labels)

    def _put_daemon(self, sheet: Sheet, snapshot: Snapshot, status: DaemonStatus) -> None:
        version, python = status.version, platform.python_version()
        sheet.put("swansong_build_info", 1.0, version=version, python=python)
        self._put_instant(sheet, "swansong_start_timestamp_seconds", snapshot, snapshot.born_mono_s)
        names = (*(phase.value for phase in Phase), *(verdict.value for verdict in Verdict))
        sheet.put_one_of("swansong_state", "state", names, status.state)
        sheet.put("swansong_generation", status.generation)
        sheet.put("swansong_decision_faults_total", status.decision_faults.count)
        sheet.put("swansong_log_lines_dropped_total", snapshot.log_lines_dropped)

    def _put_commits(self, sheet: Sheet, snapshot: Snapshot, status: DaemonStatus) -> None:
        now, counters = snapshot.now_mono_s, self._counters
        last, last_mono_s = status.last_commit, snapshot.tally.committed_mono_s
        self._put_instant(sheet, "swansong_last_commit_timestamp_seconds", snapshot, last_mono_s)
        sheet.put("swansong_last_commit_step", None if last is None else last.step)
        for kind, count in counters.commits.items():
            sheet.put("swansong_commits_total", count, kind=kind)
        sheet.put("swansong_commit_failures_total", counters.commit_failures)
        age_s = None if last_mono_s is None else max(0.0, now - last_mono_s)
        sheet.put("swansong_replication_lag_seconds", age_s)
        sheet.put("swansong_replication_lag_steps", status.replication_lag.steps)
        sheet.put("swansong_replication_lag_bytes", status.replication_lag.bytes)
        sheet.put("swansong_checkpoint_interval_seconds", status.checkpoint_interval_s)
        sheet.put("swansong_checkpoint_size_bytes", snapshot.state.measured.save_bytes)
        sheet.put("swansong_unsent_sets", status.unsent.sets)
        sheet.put("swansong_dropped_sets_total", status.unsent.dropped.count)
        sheet.put("swansong_save_failures_total", status.failed_saves.count)

    def _put_flush(self, sheet: Sheet, snapshot: Snapshot, status: DaemonStatus) -> None:
        store, staging = status.store, status.staging
        sheet.put("swansong_flush_bytes_total", snapshot.state.flush.sent_bytes)
        sheet.put("swansong_flush_referenced_bytes_total", status.bytes_referenced)
        sheet.put("swansong_flush_bandwidth_bytes_per_second", status.bandwidth_bytes_per_s)
        sheet.put("swansong_flush_failures_total", self._counters.flush_failures)
        sheet.put("swansong_flush_consecutive_failures", status.unsent.failures)
        sheet.put("swansong_store_up", store is not None and store.health is Health.OK)
        for kind, count in status.store_errors.items():
            sheet.put("swansong_store_errors_total", count, kind=kind)
        if staging is not None:
            sheet.put("swansong_staging_size_bytes", staging.size_bytes)
            sheet.put("swansong_staging_free_bytes", staging.free_bytes)

    def _put_sources(self, sheet: Sheet, snapshot: Snapshot, status: DaemonStatus) -> None:
        known = {source.name: source for source in status.sources}
        for name in sorted({*known, *snapshot.sources}):
            health = known[name].health if name in known else None
            if health is not Health.UNSUPPORTED:
                sheet.put("swansong_source_up", health in _SOURCES_UP, source=name)
            for value in Health:
                is_health = value is health
                sheet.put("swansong_source_health", is_health, source=name, health=value.value)
        for source in _may_notify(snapshot, self._counters.notices):
            count = self._counters.notices.get(source, 0)
            sheet.put("swansong_notices_total", count, source=source)
        in_force = [notice.severity for notice in status.notices]
        for severity in (each.name.lower() for each in Severity):
            sheet.put("swansong_notices_in_force", in_force.count(severity), severity=severity)
        for notice, margin in _named(status.margins):
            needed_s = None if margin.spare_s is None else margin.grace_s - margin.spare_s
            sheet.put("swansong_evacuation_needed_seconds", needed_s, notice=notice)
            sheet.put("swansong_evacuation_available_seconds", margin.grace_s, notice=notice)
            sheet.put("swansong_evacuation_margin_seconds", margin.spare_s, notice=notice)
            sheet.put("swansong_evacuation_fits", margin.fits, notice=notice)

    def _put_evacuations(self, sheet: Sheet, snapshot: Snapshot) -> None:
        state, counters = snapshot.state, self._counters
        evacuation, last = state.evacuation, state.course.last_verdict
        if evacuation is not None and evacuation.is_precaution:
            evacuation = None
        sheet.put("swansong_evacuation_open", evacuation is not None)
        deadline = None if evacuation is None else evacuation.deadline_mono_s
        name = "swansong_evacuation_deadline_timestamp_seconds"
        self._put_instant(sheet, name, snapshot, deadline)
        counted = counters.evacuations
        for source in _may_notify(snapshot, {source for source, _ in counted}):
            for verdict in Verdict:
                count = counted.get((source, verdict.value), 0)
                sheet.put("swansong_evacuations_total", count, source=source, verdict=verdict.value)
        sheet.put_histogram("swansong_evacuation_duration_seconds", counters.durations)
        for phase, histogram in counters.phases.items():
            sheet.put_histogram("swansong_evacuation_phase_seconds", histogram, phase=phase)
        newest = counters.last_verdicts
        for is_drill, drill in ((False, "no"), (True, "yes")):
            chosen = newest.get(is_drill)
            value = None if chosen is None else chosen.verdict.value
            names = [verdict.value for verdict in Verdict]
            sheet.put_one_of("swansong_last_verdict", "verdict", names, value, drill=drill)
            at_mono_s = None if chosen is None else chosen.mono_s
            name = "swansong_last_verdict_timestamp_seconds"
            self._put_instant(sheet, name, snapshot, at_mono_s, drill=drill)
        if last is not None:
            sheet.put("swansong_last_evacuation_expected_seconds", last.expected_s)
            sheet.put("swansong_last_evacuation_took_seconds", last.took_s)
        sheet.put("swansong_follow_ups_total", counters.follow_ups)
        for source in _may_notify(snapshot, counters.precautions):
            count = counters.precautions.get(source, 0)
            sheet.put("swansong_precautions_total", count, source=source)

    def _put_trainers(self, sheet: Sheet, snapshot: Snapshot) -> None:
        state, training = snapshot.state, snapshot.training
        unhealthy = sum(
            False in (each.loss_is_finite, each.loss_is_usual) for each in state.connected
        )
        sheet.put("swansong_trainers_connected", len(state.connected))
        name, joined = "swansong_trainers_joined_timestamp_seconds", state.joined_mono_s
        self._put_instant(sheet, name, snapshot, joined)
        sheet.put("swansong_trainers_stalled", len(stalled(state, snapshot.now_mono_s)))
        sheet.put("swansong_trainers_unhealthy", unhealthy)
        sheet.put("swansong_trainers_slow", len(slow_ranks(state)))
        own_s = [trainer.own_s for trainer in state.connected if trainer.own_s is not None]
        sheet.put("swansong_trainer_own_seconds", max(own_s, default=None))
        differ = sum(each.differs for each in snapshot.compared.values())
        sheet.put("swansong_trainers_redone_differ", differ)
        sheet.put("swansong_trainers_refused_total", snapshot.tally.refused.count)
        sheet.put("swansong_trainer_step", None if training.step < 0 else training.step)
        sheet.put("swansong_trainer_step_seconds", training.step_s)
        sheet.put("swansong_trainer_save_seconds", state.measured.save_s)
        sheet.put("swansong_stall_seconds", _stall_s(state, snapshot.now_mono_s))
        sheet.put("swansong_standstill_seconds_total", training.saves_s + training.stall_s)

    def _put_loss(self, sheet: Sheet, snapshot: Snapshot) -> None:
        sheet.put("swansong_resumptions_total", snapshot.loss.resumptions)
        for part in LOST:
            gpu_s = snapshot.loss.gpu_s.get(part, 0.0)
            sheet.put("swansong_preemption_loss_gpu_seconds_total", gpu_s, part=part)

    def _put_prune(self, sheet: Sheet, snapshot: Snapshot) -> None:
        prune = snapshot.prune
        if prune is None:
            return
        name = "swansong_prune_timestamp_seconds"
        self._put_instant(sheet, name, snapshot, snapshot.pruned_mono_s)
        sheet.put("swansong_prune_failures_total", prune.failures)
        sheet.put("swansong_pruned_commits_total", prune.commits)
        sheet.put("swansong_pruned_bytes_total", prune.freed_bytes)
        sheet.put("swansong_prune_kept_bytes", prune.kept_bytes)


def _put_mirror(sheet: Sheet, status: DaemonStatus) -> None:
    mirror = status.mirror
    if mirror is None:
        return
    sheet.put_one_of("swansong_mirror_state", "state", list(MirrorState), mirror.state)
    sheet.put("swansong_mirror_lag_seconds", mirror.lag.seconds)
    sheet.put("swansong_mirror_lag_commits", mirror.lag.commits)
    sheet.put("swansong_mirror_lag_bytes", mirror.lag.bytes)
    sheet.put("swansong_mirror_commits_total", mirror.copied_commits)
    sheet.put("swansong_mirror_bytes_total", mirror.copied_bytes)
    sheet.put("swansong_mirror_damaged_commits", mirror.damaged)


def _put_gpus(sheet: Sheet, status: DaemonStatus) -> None:
    gpus = status.gpus[:GPUS_MAX]
    sheet.put("swansong_gpus", len(gpus))
    for name, gpu in {str(g.index) if g.index >= 0 else g.pci: g for g in gpus}.items():
        sheet.put_one_of("swansong_gpu_health", "health", list(GpuHealth), gpu.health, gpu=name)
        for kind in XID_CLASSES:
            labels = {"gpu": name, "class": kind}
            sheet.put("swansong_gpu_xid_errors_total", gpu.xids.get(kind, 0), **labels)


def _put_notifications(sheet: Sheet, status: DaemonStatus) -> None:
    for channel in CHANNELS:
        counts = status.notifications and getattr(status.notifications, channel)
        if counts is None:
            continue
        for outcome in OUTCOMES:
            labels = {"channel": channel, "outcome": outcome}
            sheet.put("swansong_notifications_total", getattr(counts, outcome, None), **labels)


def _may_notify(snapshot: Snapshot, counted: Iterable[str]) -> list[str]:
    """All sources of notices: a counter begins at 0, or queries would miss its first increase."""
    return sorted({*snapshot.sources, *NOTIFIED_OTHERWISE, *counted})


def _named(found: Sequence[Margin]) -> Iterator[tuple[str, Margin]]:
    """Each margin with the name of its notice: a longer grace period of the same source has another name."""
    by_source = sorted(found, key=lambda margin: (margin.source, margin.grace_s))
    for source, group in groupby(by_source, key=lambda margin: margin.source):
        yield from zip((source, f"{source}.long"), group, strict=False)


def _stall_s(state: State, now_mono_s: float) -> float:
    """Time since the last report of the rank that has stalled longest; 0 without a stall."""
    reported_s = (
        trainer.reported_mono_s
        for trainer in stalled(state, now_mono_s)
        if trainer.reported_mono_s is not None
    )
    return max((now_mono_s - at_s for at_s in reported_s), default=0.0)
