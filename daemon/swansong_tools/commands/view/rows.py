# SPDX-License-Identifier: Apache-2.0
"""The rows of a status, for one look and for the live view.

Pure.  docs/reference/status.md describes the fields of the status.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from swansong_bucket.model import GpuHealth, Health
from swansongd.observe.status import (
    CommitStatus,
    DaemonStatus,
    EvacuationStatus,
    FlushStatus,
    FollowUpsStatus,
    GpuHealthStatus,
    HealthStatus,
    HeartbeatStatus,
    LagStatus,
    Margin,
    MetricsStatus,
    MirrorState,
    MirrorStatus,
    NotificationsStatus,
    PartStatus,
    PrefetchStatus,
    SenderStatus,
    StagingStatus,
    TrainerStatus,
    UnsentStatus,
    VerdictStatus,
)
from swansongd.trainers.unconnected import Unconnected

from swansong_tools.units import counted, human_bytes, human_s

GOOD, WARNING, BAD, PLAIN = "green", "yellow", "red", ""
"""Styles of rich."""
_STAGING_FREE_MIN = 0.05
"""Below this share of free space, the row of staging is marked."""
_LEVELS = {"degraded": WARNING, "blind": BAD, "dying": BAD, "lost": BAD}


@dataclass(frozen=True, slots=True)
class Row:
    """One fact of the status."""

    label: str
    text: str
    style: str = PLAIN
    rank: int = 50
    """Importance: a small screen drops the rows with the highest rank.  Below 20: something is wrong."""


def rows(
    status: DaemonStatus, others: Sequence[Unconnected] = (), *, is_brief: bool = False
) -> Iterator[Row]:
    """All rows that apply, in the order of the display.

    Args:
        others: processes that are not connected.
        is_brief: the display has no lists of sources, GPUs and trainers: rows stand for these.
    """
    if status.evacuation is None:
        yield _notice_now(status)
    else:
        yield Row("evacuation", _evacuation(status.evacuation), WARNING, 21)
    yield Row("run", _run(status), rank=40)
    yield Row("state", status.state + newer_generation(status), rank=21)
    yield Row("verdict", _verdict(status), rank=22)
    yield Row("last commit", _last_commit(status.last_commit), rank=20)
    if status.part is not None:
        yield Row("waiting for peers", part_of(status.part), WARNING, 19)
    yield Row("replication lag", _lag(status.replication_lag), rank=24)
    if is_brief:
        yield Row("training", _training(status), rank=25)
    yield Row("bandwidth", _bandwidth(status.bandwidth_bytes_per_s), rank=27)
    yield _store(status.store, status.store_answer_age_s)
    if status.flush is not None:
        yield Row("flush", _flush(status.flush), rank=23)
    yield Row("pending", _pending(status.unsent), rank=31)
    yield _staging(status.staging)
    yield Row("prefetch", _prefetch(status.prefetch), rank=60)
    if status.mirror is not None:
        yield _mirror(status.mirror)
    if status.bytes_referenced:
        yield Row("reused", human_bytes(status.bytes_referenced), rank=70)
    if status.notifications is not None:
        yield from _notifications(status.notifications)
    if status.metrics is not None:
        yield _metrics(status.metrics)
    for margin in status.margins:
        if not margin.problem:
            is_bad = margin.fits is False
            yield Row("margin", _margin(margin), BAD if is_bad else PLAIN, 12 if is_bad else 26)
    if is_brief:
        yield from _sources(status.sources)
        yield from _gpus(status.gpus)
    if status.failed_saves.count:
        yield Row("failed saves", _failed_saves(status), BAD, 13)
    for trainer in status.trainers:
        for line in _problems(trainer):
            yield Row("problem", line, BAD, 10)
    same = [trainer for trainer in status.trainers if trainer.redone_differs is False]
    if same:
        yield Row("redone", word(same[0].redone), rank=45)
    for each in others:
        yield Row("not connected", _unconnected(each), WARNING, 15)
    faults = status.decision_faults
    if faults.count:
        yield Row("decision faults", f"{faults.count}, the last one: {word(faults.last)}", BAD, 14)
    daemon = f"version {status.version}, pid {status.pid}, up {human_s(status.uptime_s)}"
    yield Row("daemon", daemon, rank=80)


def word(value: object) -> str:
    return "-" if value is None or value == "" else str(value)


def _notice_now(status: DaemonStatus) -> Row:
    """The forecast for a notice at this moment: the worst of the kinds of notice with a known length."""
    margins = status.margins
    short = next((margin for margin in margins if margin.fits is False), None)
    if short is not None:
        return Row("notice now", f"not SAFE: {short.problem or _margin(short)}", BAD, 12)
    if not margins or any(margin.fits is None for margin in margins):
        text = "perhaps not SAFE: save and bandwidth are not measured yet"
        return Row("notice now", text, WARNING, 12)
    spare_s = min(margin.spare_s or 0.0 for margin in margins)
    return Row("notice now", f"SAFE is expected, with {human_s(spare_s)} to spare", GOOD, 22)


def _notifications(status: NotificationsStatus) -> Iterator[Row]:
    """One row for each receiver, with its counters."""
    for name in ("webhook", "exec", "heartbeat"):
        found: SenderStatus | HeartbeatStatus | None = getattr(status, name)
        if found is None:
            continue
        shown, silent = f"{found.sent} sent", getattr(found, "silent", None)
        shown += "".join(
            f", {count} {key}"
            for key in ("queued", "failed", "dropped")
            if (count := getattr(found, key, 0))
        )
        if silent:
            shown += f"; silent: {silent}"
        if found.last_error:
            shown += f"; the last attempt failed: {found.last_error}"
        is_bad = bool(silent or found.last_error)
        yield Row(name, shown, BAD if is_bad else PLAIN, 15 if is_bad else 65)


def _metrics(metrics: MetricsStatus) -> Row:
    """The address, or why the daemon does not serve it."""
    if metrics.failure:
        return Row("metrics", f"not served: {metrics.failure}", BAD, 15)
    return Row("metrics", metrics.address, rank=65)


def _sources(sources: Sequence[HealthStatus]) -> Iterator[Row]:
    """One row for the sources that work, and one for each other source."""
    fine = [source.name for source in sources if source.health is Health.OK]
    if fine:
        yield Row("sources", f"{len(fine)} ok: {', '.join(fine)}", rank=35)
    for source in sources:
        if source.health not in (Health.OK, Health.UNSUPPORTED):
            yield Row("source", f"{source.name} {_health(source)}", level_of(source), 11)


def _gpus(gpus: Sequence[GpuHealthStatus]) -> Iterator[Row]:
    """One row for the GPUs that are healthy, and one for each other GPU."""
    bad = [gpu for gpu in gpus if gpu.health is not GpuHealth.OK]
    if len(bad) < len(gpus):
        yield Row("GPUs", f"{len(gpus) - len(bad)} ok", rank=34)
    for gpu in bad:
        yield Row("GPU", f"{gpu.index} {word(gpu.name)} {_health(gpu)}", level_of(gpu), 10)


def level_of(item: HealthStatus | GpuHealthStatus | TrainerStatus) -> str:
    """The style of a source, a store or a GPU by its health."""
    return PLAIN if isinstance(item, TrainerStatus) else _LEVELS.get(item.health, PLAIN)


def _run(status: DaemonStatus) -> str:
    claimed = (
        "no generation claimed yet"
        if status.generation is None
        else f"generation {status.generation}"
    )
    return f"{status.run} ({claimed})"


def _bandwidth(measured: float | None) -> str:
    return "not measured yet" if measured is None else f"{human_bytes(measured)}/s measured"


def _training(status: DaemonStatus) -> str:
    """Step, loss and number of the connected trainers."""
    trainers = status.trainers
    if not trainers:
        return "no trainer is connected"
    shown = [f"step {max(trainer.step for trainer in trainers)}"]
    shown += [f"loss {each.loss:.4g}" for each in trainers if each.loss is not None][:1]
    count = sum(trainer.connected for trainer in trainers) + status.trainers_not_shown
    return ", ".join((*shown, counted(count, "trainer")))


def _problems(trainer: TrainerStatus) -> Iterator[str]:
    where = f"rank {trainer.rank} at step {trainer.step}"
    if trainer.stalled_s is not None:
        yield f"{where} has made no progress for {human_s(trainer.stalled_s)}"
    if trainer.loss_is_finite is False:
        yield f"{where} reports a loss that is not finite"
    elif trainer.loss_is_usual is False:
        yield f"{where} reports a loss that is far above the losses before"
    if trainer.slower is not None:
        yield f"{where} holds up the others: batch and forward pass take {trainer.slower:.1f} times as long"
    if trainer.redone_differs:
        yield f"rank {trainer.rank}: {trainer.redone}"


def _unconnected(process: Unconnected) -> str:
    return (
        f"process {process.pid} ({word(process.program)}) of user {process.uid} {process.seen}; "
        f"if it trains this run: {process.fix}"
    )


def _failed_saves(status: DaemonStatus) -> str:
    failed, last = status.failed_saves, status.failed_saves.last
    if last is None:
        return str(failed.count)
    return (
        f"{failed.count}, the last one {human_s(last.age_s)} ago at step {word(last.step)} of rank "
        f"{word(last.rank)}: {word(last.reason)}"
    )


def _verdict(status: DaemonStatus) -> str:
    """The verdict and its age; a dash during an evacuation without a verdict."""
    last, verdict = status.last_verdict, status.verdict
    if verdict is None or last is None:
        return word(verdict)
    shown = f"{verdict}, {human_s(last.age_s)} ago"
    return shown if last.took_s is None else f"{shown}{prediction(last)}"


def _store(store: HealthStatus | None, answer_age_s: float | None) -> Row:
    if store is None:
        return Row("store", "not reached yet", rank=30)
    style = level_of(store)
    shown = _health(store)
    if answer_age_s is not None:
        shown += f"; last answer {human_s(answer_age_s)} ago"
    return Row("store", shown, style, 30 if style == PLAIN else 11)


def _health(item: HealthStatus | GpuHealthStatus) -> str:
    """Health, reason and time of a source, a store or a GPU."""
    return f"{item.health}: {word(item.reason)}, for {human_s(item.for_s)}"


def _flush(flush: FlushStatus) -> str:
    """The set in flight: step, stored bytes, and time since the start."""
    return (
        f"step {flush.step}: {human_bytes(flush.stored_bytes)} of {human_bytes(flush.size_bytes)} stored, "
        f"for {human_s(flush.for_s)}"
    )


def _pending(unsent: UnsentStatus) -> str:
    """The sets that are not uploaded: bytes, next attempt, and dropped sets."""
    shown, dropped = f"{human_bytes(unsent.bytes)} in {counted(unsent.sets, 'set')}", unsent.dropped
    if unsent.failures:
        shown += f"; the last {counted(unsent.failures, 'attempt')} failed"
    if unsent.retry_in_s is not None:
        shown += f", the next one in {human_s(unsent.retry_in_s)}"
    if dropped.age_s is not None:
        age = human_s(dropped.age_s)
        shown += f"; {counted(dropped.count, 'older set')} dropped unsent, the last one {age} ago"
    return shown


def _staging(staging: StagingStatus | None) -> Row:
    """Free space on the file system of staging."""
    if staging is None:
        return Row("staging", "unknown", rank=32)
    is_full = staging.free_bytes < _STAGING_FREE_MIN * staging.size_bytes
    shown = f"{human_bytes(staging.free_bytes)} of {human_bytes(staging.size_bytes)} free"
    return Row("staging", shown, BAD if is_full else PLAIN, 15 if is_full else 32)


def _prefetch(prefetch: PrefetchStatus | None) -> str:
    """State of the prefetch, and how far it is."""
    if prefetch is None:
        return "unknown"
    shown = prefetch.state.replace("_", " ")
    if prefetch.step is not None:
        shown += f", step {prefetch.step}"
    if prefetch.bytes_total:
        shown += f", {human_bytes(prefetch.bytes_done)} of {human_bytes(prefetch.bytes_total)}"
    return f"{shown}: {prefetch.reason}" if prefetch.reason else shown


def _mirror(mirror: MirrorStatus) -> Row:
    """State of the mirror, its newest commit, and how far it is behind."""
    shown, lag = str(mirror.state), mirror.lag
    if mirror.newest is not None:
        shown += f", has generation {mirror.newest.generation} step {mirror.newest.step}"
    if lag.commits:
        shown += (
            f", {counted(lag.commits, 'commit')} and {human_s(lag.seconds)} behind, "
            f"{human_bytes(lag.bytes)} to copy"
        )
    if mirror.damaged:
        shown += f", {counted(mirror.damaged, 'commit')} damaged in the store and not copied"
    if mirror.objects_taken:
        shown += f", {counted(mirror.objects_taken, 'object')} restored from it"
    if mirror.reason:
        shown += f": {mirror.reason}"
    is_bad = mirror.state in (MirrorState.FAILING, MirrorState.PROMOTED)
    return Row("mirror", shown, BAD if is_bad else PLAIN, 16 if is_bad else 33)


def _last_commit(commit: CommitStatus | None) -> str:
    if commit is None:
        return "none"
    age = (
        "from before the daemon started" if commit.age_s is None else f"{human_s(commit.age_s)} ago"
    )
    place = f"generation {commit.generation} step {commit.step}"
    return f"{place}{', the end of the run' * commit.is_final}, {age}"


def newer_generation(status: DaemonStatus) -> str:
    """The addition to the state of a fenced VM; empty for others."""
    newer = status.newer_generation
    return "" if newer is None else f"; generation {newer} has taken the run over"


def part_of(part: PartStatus) -> str:
    """The checkpoint over several VMs of which this VM's part is committed."""
    return (
        f"this VM's part of generation {part.generation} step {part.step} is committed "
        f"({part.nodes_committed} of {part.nodes} VMs)"
    )


def _lag(lag: LagStatus) -> str:
    shown = "unknown time" if lag.seconds is None else human_s(lag.seconds)
    return f"{counted(lag.steps, 'step')}, {shown}, {human_bytes(lag.bytes)}"


def _evacuation(evacuation: EvacuationStatus) -> str:
    left = human_s(evacuation.seconds_left)
    return f"{evacuation.reason}: {progress_of(evacuation)}, {left} left" + "".join(
        f"; {phrase}" for phrase in phrases_of(evacuation)
    )


def progress_of(evacuation: EvacuationStatus) -> str:
    """Plan and phase of an evacuation."""
    return f"{evacuation.plan}, {evacuation.phase}"


def phrases_of(evacuation: EvacuationStatus) -> list[str]:
    """The wait for a trainer, the prediction, and the follow-up checkpoints of an evacuation."""
    wait_s = evacuation.trainer_wait_s
    waiting = "" if wait_s is None else f"waiting for a trainer to connect, {human_s(wait_s)} left"
    phrases = (
        waiting,
        prediction(evacuation).removeprefix("; "),
        _follow_ups(evacuation.follow_ups),
    )
    return [phrase for phrase in phrases if phrase]


def _follow_ups(follow_ups: FollowUpsStatus) -> str:
    if follow_ups.under_way:
        return f"follow-up checkpoint {follow_ups.count} is under way"
    next_s = follow_ups.next_in_s
    return "" if next_s is None else f"next follow-up checkpoint in {human_s(next_s)}"


def prediction(row: EvacuationStatus | VerdictStatus) -> str:
    """The time from the request to the commit: as it was, and as it was expected."""
    if row.took_s is None:
        expected_s = row.expected_s
        return "" if expected_s is None else f"; the commit is expected after {human_s(expected_s)}"
    expected = "" if row.expected_s is None else f", expected were {human_s(row.expected_s)}"
    return f"; the checkpoint took {human_s(row.took_s)}{expected}"


def _margin(margin: Margin) -> str:
    """The consequence of a notice at this moment."""
    source, spare_s, since = margin.source, margin.spare_s, margin.lost_since_step
    if spare_s is None:
        return f"{source}: unknown, save and bandwidth are not measured yet"
    if spare_s >= 0:
        return f"{source}: {human_s(spare_s)} of {human_s(margin.grace_s)} to spare"
    lost = "all training is lost" if since is None else f"training since step {since} is lost"
    return f"{source}: {human_s(-spare_s)} short: {lost}"
