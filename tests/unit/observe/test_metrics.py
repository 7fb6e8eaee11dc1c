# SPDX-License-Identifier: Apache-2.0
"""The metrics of the daemon: their names, their values through an evacuation, and the cost for a decision."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families as parsed
from swansong_bucket.loss_records import LOST
from swansong_bucket.model import (
    CommitRef,
    GpuHealth,
    GpuStatus,
    Health,
    NoticeKind,
    Severity,
    Verdict,
)
from swansongd.core import machine
from swansongd.core.events import (
    Conclude,
    Flushed,
    FlushFailed,
    FlushProgress,
    GpusRead,
    Mark,
    Tick,
    TrainerFailed,
    TrainerProgress,
)
from swansongd.observe.accounting import Accounting
from swansongd.observe.counters import KEYS_MAX, PHASES, Counters
from swansongd.observe.daemon_families import FAMILIES
from swansongd.observe.exposition import registry_of
from swansongd.observe.facts import NewestDated, TrainerRefused
from swansongd.observe.families import BUCKETS_S, Histogram
from swansongd.observe.metrics import DaemonCollector
from swansongd.observe.observer import Observation
from swansongd.observe.phase import Phase
from swansongd.observe.snapshot import LossFigures, Snapshot
from swansongd.observe.status import (
    STORE_HEALTH,
    MirrorLagStatus,
    MirrorState,
    MirrorStatus,
    NotificationsStatus,
    PruneStatus,
    SenderStatus,
    StagingStatus,
)

from testkit.prometheus import check_metrics
from testkit.story import MIB, Story, shards_of

SOURCES = ("aws.rebalance", "aws.spot", "gcp.preempted")
MIRROR = MirrorStatus(
    url="s3://mirror/prefix",
    state=MirrorState.COPYING,
    reason="",
    lag=MirrorLagStatus(commits=2, seconds=31.5, bytes=7 * MIB),
    newest=CommitRef(1, 30),
    copied_commits=4,
    copied_bytes=9 * MIB,
    damaged=1,
)
PRUNE = PruneStatus(failures=1, commits=3, freed_bytes=5 * MIB, kept_bytes=50 * MIB)
GPU = GpuStatus(
    pci="0000:3b:00",
    index=0,
    health=GpuHealth.DYING,
    reason="Xid 95",
    since_mono_s=900.0,
    xids={"dying": 2},
)
LOSS = LossFigures(resumptions=1, gpu_s={"fetch": 80.0, "redone": 16.0})


class Watched(Story):
    """A story whose decisions are counted, and scraped at any moment."""

    def __init__(self, **options: Any) -> None:
        self.counters = Counters()
        self.accounting = Accounting(lambda _: None, lambda *_: None)
        self.figures: dict[str, Any] = {}
        self.drift_s = 0.0
        super().__init__(**options)
        self.registry = registry_of(DaemonCollector(self.snapshot, self.counters))

    def observe(self, observation: Observation) -> None:
        super().observe(observation)
        before, after, event, _, now_mono_s = observation
        self.accounting.record(before, after, event, now_mono_s)
        self.counters.observe(observation)

    def snapshot(self) -> Snapshot:
        return replace(
            super().snapshot(),
            now_wall_s=1.8e9 + self.now + self.drift_s,
            training=self.accounting.training,
            sources=SOURCES,
            **self.figures,
        )

    def scrape(self) -> dict[str, float]:
        """Each sample by its name and labels without the run: ``swansong_state{state="IDLE"}``."""
        found = {}
        for family in parsed(generate_latest(self.registry).decode()):
            for sample in family.samples:
                labels = dict(sample.labels)
                assert labels.pop("run") == "llm"
                inside = ",".join(f'{name}="{value}"' for name, value in sorted(labels.items()))
                found[f"{sample.name}{{{inside}}}" if inside else sample.name] = sample.value
        return found


def full() -> Watched:
    """A story that has a sample of every family."""
    story = Watched()
    story.figures = {
        "mirror": MIRROR,
        "prune": PRUNE,
        "pruned_mono_s": 900.0,
        "loss": LOSS,
        "staging": StagingStatus(size_bytes=100 * MIB, free_bytes=40 * MIB),
        "store_answered_mono_s": 1000.0,
        "store_errors": {"transient": 2, "refused": 0},
        "bytes_referenced": 3 * MIB,
        "decision_faults": 1,
        "log_lines_dropped": 5,
        "notifications": NotificationsStatus(
            webhook=SenderStatus(queued=0, sent=3, failed=1, dropped=0)
        ),
    }
    story.tell(GpusRead((replace(GPU, health=GpuHealth.OK),)))
    story.configure(notice_kinds=(NoticeKind(source="aws.spot", grace_s=120.0),))
    story.health("aws.spot", Health.OK)
    story.health(STORE_HEALTH, Health.OK)
    story.join(step=40, save_s=2.0, save_bytes=100 * MIB)
    story.tell(TrainerProgress(1, 41, step_s=0.5, own_s=0.2, save_s=2.0, snapshot_s=0.25))
    story.commit(41, after_s=1.0)
    story.notice(900, "aws.rebalance", severity=Severity.ADVISORY)
    story.notice(120)
    return story


def phases_s(found: dict[str, float], *phases: str) -> dict[str, float]:
    """The seconds of each phase."""
    name = "swansong_evacuation_phase_seconds_sum"
    return {phase: found[f'{name}{{phase="{phase}"}}'] for phase in phases}


# ---------------------------------------------------------------- names


def test_every_declared_metric_is_exported() -> None:
    """During an evacuation of a daemon with a mirror that prunes, and after its verdict."""
    story = full()
    found = {re.sub(r"{.*", "", sample) for sample in story.scrape()}
    story.serve(41, after_s=1.0)
    found |= {re.sub(r"{.*", "", sample) for sample in story.scrape()}
    named = set()
    for each in FAMILIES:
        suffixes = ("_bucket", "_count", "_sum") if each.kind == "histogram" else ("",)
        named |= {each.name + suffix for suffix in suffixes}
    assert found == named


def test_help_is_a_phrase_and_no_label_is_reserved() -> None:
    """A scraper adds the other labels; promtool judges the names."""
    for each in FAMILIES:
        assert each.help[0].isupper() or each.help[0].isdigit()
        assert not each.help.endswith(".")
        assert not {"run", "le", "quantile", "instance", "job", "exported_run"} & {*each.labels}


def test_promtool_accepts_the_exposition() -> None:
    """``promtool check metrics`` prints nothing."""
    check_metrics(generate_latest(full().registry))


def test_a_scrape_can_name_the_metrics_that_it_wants() -> None:
    registry = full().registry
    wanted: CollectorRegistry = registry.restricted_registry(["swansong_generation"])  # type: ignore[assignment]
    assert [metric.name for metric in wanted.collect()] == ["swansong_generation"]


# ---------------------------------------------------------------- values


def test_an_evacuation_in_metrics() -> None:
    """Request, save, flush and commit each take their time; the verdict is counted under its source."""
    story = Watched()
    story.join(step=40, save_s=2.0)
    story.notice(120)
    during = story.scrape()
    assert during['swansong_state{state="CHECKPOINTING"}'] == 1.0
    assert during["swansong_evacuation_open"] == 1.0
    left_s = during["swansong_evacuation_deadline_timestamp_seconds"] - 1.8e9 - story.now
    assert left_s == pytest.approx(120.0, abs=0.01)
    assert during['swansong_evacuations_total{source="aws.spot",verdict="SAFE"}'] == 0.0
    story.notice(900, "aws.rebalance", severity=Severity.ADVISORY)
    story.now += 0.19
    story.accept(40)
    story.now += 3.0
    story.answer(41)
    story.store_all(after_s=8.0)
    after = story.scrape()
    assert after['swansong_notices_total{source="aws.spot"}'] == 1.0
    assert after['swansong_notices_in_force{severity="imminent"}'] == 1.0
    assert after['swansong_evacuations_total{source="aws.spot",verdict="SAFE"}'] == 1.0
    assert sum(n for name, n in after.items() if name.startswith("swansong_evacuations_total")) == 1
    assert phases_s(after, *PHASES) == pytest.approx(
        {"request": 0.0, "agree": 0.2, "save": 3.0, "flush": 8.0, "commit": 0.0, "peers": 0.0}
    )
    assert after["swansong_evacuation_duration_seconds_sum"] == pytest.approx(11.2)
    assert after['swansong_evacuation_duration_seconds_bucket{le="10.0"}'] == 0.0
    assert after['swansong_evacuation_duration_seconds_bucket{le="20.0"}'] == 1.0
    assert after["swansong_evacuation_duration_seconds_count"] == 1.0
    assert after['swansong_last_verdict{drill="no",verdict="SAFE"}'] == 1.0
    assert after['swansong_commits_total{kind="emergency"}'] == 1.0
    assert after["swansong_flush_bytes_total"] == 100 * MIB
    assert after["swansong_last_commit_step"] == 41.0
    assert after["swansong_replication_lag_steps"] == 0.0


def test_a_verdict_that_improves_counts_again() -> None:
    """A further commit with the same verdict does not, and the time to the first verdict counts once."""
    story, ref = Watched(), CommitRef(2, 41)
    found: dict[str, float] = {}
    for after_s, action in (
        (0.0, Mark("e", "notice", (("source", "aws.spot"),))),
        (3.0, Conclude("e", Verdict.PARTIAL, "why", ref, 9.0)),
        (4.0, Conclude("e", Verdict.LOST, "why", ref, 9.0, is_final=False)),
        (5.0, Conclude("e", Verdict.SAFE, "why", ref, 9.0)),
        (6.0, Conclude("e", Verdict.SAFE, "why", CommitRef(2, 42), 9.0)),
        (7.0, Conclude("other", Verdict.LOST, "why", ref, 9.0)),
    ):
        now = story.now + after_s
        story.counters.observe(Observation(story.state, story.state, Tick(), (action,), now))
        found = story.scrape()
    counts = {
        verdict: found[f'swansong_evacuations_total{{source="aws.spot",verdict="{verdict}"}}']
        for verdict in ("SAFE", "PARTIAL", "LOST")
    }
    assert counts == {"SAFE": 1.0, "PARTIAL": 1.0, "LOST": 0.0}
    assert found["swansong_evacuation_duration_seconds_count"] == 1.0
    assert found["swansong_evacuation_duration_seconds_sum"] == 3.0


def verdicts(story: Watched) -> dict[str, str]:
    """The newest verdict of drills and of real evacuations."""
    found = story.scrape()
    dated = {
        drill
        for drill in ("yes", "no")
        if f'swansong_last_verdict_timestamp_seconds{{drill="{drill}"}}' in found
    }
    newest = {
        drill: verdict.value
        for drill in ("yes", "no")
        for verdict in Verdict
        if found.get(f'swansong_last_verdict{{drill="{drill}",verdict="{verdict.value}"}}') == 1.0
    }
    assert newest.keys() == dated
    return newest


def test_a_drill_neither_fires_nor_hides_an_alert() -> None:
    """Its verdict has a series of its own, and a VM that answers the drill of another VM has a drill."""
    story = Watched()
    assert verdicts(story) == {}
    for evacuation, identities, verdict, newest in (
        ("a", {"drill:1"}, Verdict.LOST, {"yes": "LOST"}),
        ("b", {"aws.spot:1"}, Verdict.LOST, {"yes": "LOST", "no": "LOST"}),
        ("c", {"drill:2"}, Verdict.SAFE, {"yes": "SAFE", "no": "LOST"}),
        ("d", {"drill-0123456789abcdef"}, Verdict.PARTIAL, {"yes": "PARTIAL", "no": "LOST"}),
        ("d", {"drill-0123456789abcdef", "aws.spot:2"}, Verdict.SAFE, {"no": "SAFE"}),
    ):
        story.now += 1
        last = Conclude(
            evacuation, verdict, "why", None, 0.0, mono_s=story.now, notices=frozenset(identities)
        )
        before = story.state
        story.state = replace(before, course=replace(before.course, last_verdict=last))
        story.counters.observe(Observation(before, story.state, Tick(), (), story.now))
        assert verdicts(story) == newest
    times = {
        drill: story.scrape()[f'swansong_last_verdict_timestamp_seconds{{drill="{drill}"}}']
        for drill in newest
    }
    assert times == pytest.approx({"no": 1.8e9 + story.now})


def test_an_older_set_does_not_end_a_phase() -> None:
    """A set that was in flight at the notice is stored while the trainer saves, and committed after that."""
    story = Watched()
    story.join(step=40)
    story.seal(39)
    story.notice(120)
    story.accept(40)
    story.now += 1.0
    story.flushed()
    story.now += 1.0
    story.answer(41)
    story.now += 0.5
    story.committed()
    story.store_all(after_s=4.0)
    found = story.scrape()
    sums_s = phases_s(found, "save", "flush", "commit")
    assert sums_s == pytest.approx({"save": 2.0, "flush": 4.5, "commit": 0.0})
    assert found['swansong_evacuation_phase_seconds_count{phase="commit"}'] == 1.0


def test_without_a_new_set_the_older_one_ends_the_phases() -> None:
    """The trainer fails, and the set that was in flight at the notice is committed."""
    story = Watched()
    story.join(step=40)
    story.seal(39)
    story.notice(120)
    story.tell(TrainerFailed(1, story.request_id, "no space left"))
    story.now += 3.0
    story.store_all()
    found = story.scrape()
    assert phases_s(found, "flush") == pytest.approx({"flush": 3.0})
    assert found['swansong_evacuation_phase_seconds_count{phase="commit"}'] == 1.0


def test_the_bytes_of_flushes_count_once() -> None:
    """Progress and the end of a flush add up to its bytes, and referenced bytes are not sent.

    The next flush adds to them.  A rebuilt state keeps the number: a counter must not decrease.
    """
    story = Watched()
    story.seal(10)
    flight = story.flight
    for sent in (10, 30, 20):
        story.tell(FlushProgress(flight.flush_id, sent * MIB, bytes_sent=sent * MIB))
    assert story.scrape()["swansong_flush_bytes_total"] == 30 * MIB
    shards = shards_of(flight.staged, flight.flush_id)
    story.tell(Flushed(flight.flush_id, shards, bytes_referenced=40 * MIB))
    story.tell(FlushProgress(flight.flush_id, 99 * MIB, bytes_sent=99 * MIB))
    assert story.scrape()["swansong_flush_bytes_total"] == 60 * MIB
    story.seal(20)
    story.tell(FlushProgress(story.flight.flush_id, 5 * MIB, bytes_sent=5 * MIB))
    story.state = machine.rebuilt(story.state)
    assert story.scrape()["swansong_flush_bytes_total"] == 65 * MIB


def test_failures_are_counted() -> None:
    """A void set is no failure of the store."""
    story = Watched()
    for void in (True, False):
        story.seal(10 + void)
        story.tell(FlushFailed(story.flight.flush_id, "why", void=void))
    found = story.scrape()
    assert found["swansong_flush_failures_total"] == 1.0
    assert found["swansong_flush_consecutive_failures"] == 1.0


def test_a_source_is_up_only_if_it_answers() -> None:
    """Unknown is not healthy: a source without an answer is down, one that the VM lacks has no series."""
    story = Watched()
    story.health("aws.spot", Health.DEGRADED)
    story.health("aws.rebalance", Health.BLIND)
    story.health("logind", Health.UNSUPPORTED)
    found = story.scrape()
    up = {
        match[1]: value
        for name, value in found.items()
        if (match := re.match(r'swansong_source_up{source="(.*)"}', name))
    }
    assert up == {"aws.spot": 1.0, "aws.rebalance": 0.0, "gcp.preempted": 0.0}
    assert found['swansong_source_health{health="unsupported",source="logind"}'] == 1.0
    assert found["swansong_store_up"] == 0.0


def test_each_notice_has_its_margin() -> None:
    """Available minus needed is the margin; a second grace period of a source has another name."""
    story = full()
    kinds = [("gcp.preempted", 110.0), ("gcp.preempted", 25.0), ("host", 25.0)]
    story.configure(
        notice_kinds=tuple(NoticeKind(source=s, grace_s=grace_s) for s, grace_s in kinds)
    )
    found = story.scrape()
    graces = {"gcp.preempted": 25.0, "gcp.preempted.long": 110.0, "host": 25.0}
    for notice, grace_s in graces.items():
        available, needed, margin = (
            found[f'swansong_evacuation_{figure}_seconds{{notice="{notice}"}}']
            for figure in ("available", "needed", "margin")
        )
        assert available == grace_s
        assert margin == pytest.approx(available - needed)


def test_slow_ranks_and_unhealthy_losses_are_counted() -> None:
    """A loss that has exploded counts like one that is not finite."""
    story = Watched()
    for rank, own_s in enumerate((0.3, 0.3, 0.9)):
        story.join(rank + 1, rank=rank, ranks=3, step=1)
        facts = {"loss_is_finite": rank != 1, "loss_is_usual": rank == 0}
        story.tell(TrainerProgress(rank + 1, 2, step_s=1.0, own_s=own_s, **facts))
    found = story.scrape()
    assert found["swansong_trainers_unhealthy"] == 2.0
    assert found["swansong_trainers_slow"] == 1.0
    assert found["swansong_trainer_own_seconds"] == 0.9


def test_a_stalled_rank_shows_the_time_since_its_report() -> None:
    story = Watched()
    story.join(step=1)
    story.tell(TrainerProgress(1, 2, step_s=0.5))
    assert story.scrape()["swansong_stall_seconds"] == 0.0
    story.wait(75)
    found = story.scrape()
    assert found["swansong_stall_seconds"] == pytest.approx(75.0)
    assert found["swansong_trainers_stalled"] == 1.0


def test_the_moment_of_joining_is_that_of_the_connected_ranks() -> None:
    """Absent without a rank, unchanged by a second rank, and new after a pause without any rank."""
    name = "swansong_trainers_joined_timestamp_seconds"
    story = Watched()
    assert name not in story.scrape()
    first = story.now
    story.join(1, rank=0, ranks=2)
    story.wait(5)
    story.join(2, rank=1, ranks=2)
    assert story.scrape()[name] == pytest.approx(1.8e9 + first)
    story.leave(1)
    story.leave(2)
    assert name not in story.scrape()
    again = story.now
    story.join(3)
    assert story.scrape()[name] == pytest.approx(1.8e9 + again)


def test_values_agree_with_the_status() -> None:
    """The same snapshot gives the status report."""
    story = full()
    found, shown = story.scrape(), story.status
    assert shown.state == next(
        phase.value for phase in Phase if found.get(f'swansong_state{{state="{phase.value}"}}')
    )
    lag = shown.replication_lag
    assert found["swansong_replication_lag_seconds"] == pytest.approx(lag.seconds, abs=0.06)
    assert found["swansong_replication_lag_steps"] == lag.steps
    assert found["swansong_replication_lag_bytes"] == lag.bytes
    assert found["swansong_mirror_lag_seconds"] == MIRROR.lag.seconds
    assert found["swansong_pruned_commits_total"] == 3
    assert found["swansong_prune_timestamp_seconds"] == 1.8e9 + 900.0
    assert shown.prune == replace(PRUNE, age_s=round(story.now - 900.0, 1))
    assert found['swansong_store_errors_total{kind="transient"}'] == 2.0
    assert shown.store_errors == {"transient": 2, "refused": 0}
    assert shown.store_answer_age_s == pytest.approx(story.now - 1000.0, abs=0.06)
    assert found['swansong_preemption_loss_gpu_seconds_total{part="fetch"}'] == 80.0
    parts = [name for name in found if name.startswith("swansong_preemption_loss")]
    assert len(parts) == len(LOST)


def test_each_gpu_has_its_health() -> None:
    """By index, or by address on the bus if the driver does not list it."""
    story = Watched()
    story.tell(GpusRead((GPU, replace(GPU, pci="0000:3c:00", index=-1))))
    found = story.scrape()
    assert found["swansong_gpus"] == 2.0
    for gpu in ("0", "0000:3c:00"):
        assert found[f'swansong_gpu_health{{gpu="{gpu}",health="dying"}}'] == 1.0
        assert found[f'swansong_gpu_health{{gpu="{gpu}",health="ok"}}'] == 0.0
        assert found[f'swansong_gpu_xid_errors_total{{class="dying",gpu="{gpu}"}}'] == 2.0
        assert found[f'swansong_gpu_xid_errors_total{{class="degraded",gpu="{gpu}"}}'] == 0.0


def test_notifications_are_counted_by_channel() -> None:
    """A channel that is not configured has no series."""
    found = full().scrape()
    assert found['swansong_notifications_total{channel="webhook",outcome="failed"}'] == 1.0
    assert not [name for name in found if 'channel="exec"' in name]


def test_a_timestamp_does_not_drift() -> None:
    """The wall clock and the monotonic clock drift apart, and the time of one commit stays the same."""
    story = Watched(newest=CommitRef(1, 30))
    story.tell(NewestDated(CommitRef(1, 30), 60.0))
    first = story.scrape()["swansong_last_commit_timestamp_seconds"]
    assert first == 1.8e9 + story.now - 60.0
    story.now += 1000
    story.drift_s = 0.3
    assert story.scrape()["swansong_last_commit_timestamp_seconds"] == first


def test_unknown_values_are_absent() -> None:
    """No alert compares them with 0, and a restart of the daemon ends no alert about a verdict."""
    found = Watched(claimed=False).scrape()
    for name in ("generation", "last_commit_timestamp_seconds", "replication_lag_seconds",
                 "flush_bandwidth_bytes_per_second", "trainer_step", "mirror_lag_seconds",
                 "prune_timestamp_seconds", "staging_free_bytes",
                 "last_verdict"):  # fmt: skip
        assert not [series for series in found if series.startswith(f"swansong_{name}")]


# ---------------------------------------------------------------- limits


@pytest.mark.fault("OM01")
def test_no_trainer_and_no_source_adds_series() -> None:
    """Ranks, reasons, ids and any number of forged sources leave the number of series bounded."""
    quiet = len(full().scrape())
    story = full()
    for rank in range(1, 60):
        story.join(rank + 1, rank=rank, ranks=60, step=40)
        story.tell(TrainerRefused(rank, f"hostile {rank}"))
        story.tell(TrainerProgress(rank + 1, 41, loss=float("nan"), loss_is_finite=False))
    assert len(story.scrape()) == quiet
    for number in range(2 * KEYS_MAX):
        story.notice(120, f"forged.{number}")
    counted = [n for n in story.scrape() if n.startswith("swansong_notices_total")]
    assert len(counted) <= KEYS_MAX + 10
    assert not re.search("hostile|pid", generate_latest(story.registry).decode())


def test_a_histogram_counts_each_duration_in_one_bucket() -> None:
    histogram = Histogram()
    for seconds in (0.0, 0.1, 0.11, 300.0, 301.0):
        histogram = histogram.plus(seconds)
    assert histogram.counts[0] == 2
    assert histogram.counts[1] == 1
    assert histogram.counts[-2:] == (1, 1)
    assert sum(histogram.counts) == 5
    assert len(histogram.counts) == len(BUCKETS_S) + 1


@pytest.mark.fault("OM01")
def test_a_scrape_that_hangs_delays_no_decision() -> None:
    """While one scrape is stuck in the middle, decisions are counted, and another scrape succeeds."""
    story = full()
    reached, released = threading.Event(), threading.Event()

    def stuck() -> Snapshot:
        reached.set()
        assert released.wait(60)
        return story.snapshot()

    collector = DaemonCollector(stuck, story.counters)
    scrape = threading.Thread(target=collector.collect, daemon=True)
    scrape.start()
    assert reached.wait(60)
    for step in range(42, 142):
        story.progress(step)
    assert story.scrape()["swansong_trainer_step"] == 141.0
    assert scrape.is_alive()
    released.set()
    scrape.join(60)
    assert not scrape.is_alive()


def test_counting_a_decision_costs_microseconds() -> None:
    """Measured in CPU time of this thread, for the events that are frequent."""
    story = Watched()
    story.seal(10)
    event = FlushProgress(story.flight.flush_id, MIB, bytes_sent=MIB)
    rounds = 20_000
    began = time.thread_time()
    for _ in range(rounds):
        story.counters.observe(Observation(story.state, story.state, event, (), story.now))
    each_us = (time.thread_time() - began) / rounds * 1e6
    assert each_us < 50, f"{each_us:.1f} us"
    print(f"{each_us:.2f} us")


def test_every_verdict_and_phase_has_a_series() -> None:
    """Counters begin at 0: Prometheus misses the first increase of a new series."""
    found = Watched().scrape()
    for source in (*SOURCES, "host", "manual", "drill", "peer"):
        for verdict in Verdict:
            key = f'swansong_evacuations_total{{source="{source}",verdict="{verdict.value}"}}'
            assert found[key] == 0.0
        assert found[f'swansong_notices_total{{source="{source}"}}'] == 0.0
    for phase in PHASES:
        assert found[f'swansong_evacuation_phase_seconds_count{{phase="{phase}"}}'] == 0.0
