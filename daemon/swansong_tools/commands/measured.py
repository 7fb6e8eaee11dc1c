# SPDX-License-Identifier: Apache-2.0
"""The figures of a run for ``swansong advise``, from its bucket and the configuration of this machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median

from swansong_bucket.errors import CorruptError, NothingToRestore
from swansong_bucket.format.farewell import RecordedEvacuation
from swansong_bucket.format.manifest import Manifest
from swansong_bucket.loss_records import PARTS, History, Life
from swansong_bucket.model import CheckpointKind, NoticeKind, Verdict, last_share
from swansong_bucket.runs import catalog, history
from swansong_bucket.runs.run import RecordedCommit, Run
from swansongd.config.config import Config
from swansongd.core import pace
from swansongd.core.cadence import expected_mtbf_s
from swansongd.core.planner import Measurements
from swansongd.sources.selection import possible_notice_kinds

from swansong_tools.commands.assumed import DOWN_S, SNAPSHOT_BYTES_PER_S, Subject
from swansong_tools.commands.bucket_command import Opened
from swansong_tools.commands.progress import ProgressDisplay
from swansong_tools.economics import loss as losses
from swansong_tools.economics.advice import Setup
from swansong_tools.economics.bill import Upkeep
from swansong_tools.economics.expected import DAY_S, InterruptionKind, Job, best_interval
from swansong_tools.economics.loss import Interruption, Loss
from swansong_tools.economics.poisson import poisson_interval
from swansong_tools.units import counted, human_s

EVACUATIONS_MAX = 1000
_MANIFESTS_MAX = 5
"""Newest commits among which a readable manifest is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bucket:
    """The records of a run, as the bucket has them."""

    config: Config
    run: str
    lives: tuple[Life, ...]
    loss: Loss
    newest: Manifest
    commits: tuple[RecordedCommit, ...]
    evacuations: tuple[RecordedEvacuation, ...]
    stored_bytes: int
    is_all_stored: bool
    """Whether all stored objects were counted."""


def measured(here: Opened, *, is_quiet: bool) -> Subject:
    """The run in the bucket.

    Raises:
        NothingToRestore: the run has not trained, or has no readable commit.
        CorruptError, StoreError, Stopped: reading the bucket failed.
    """
    store, keys, stop = here.store, here.keys, here.stop
    run = Run.listed(store, keys, stop=stop)
    found = history.read(
        run,
        evacuations_max=EVACUATIONS_MAX,
        progress_of=lambda what: ProgressDisplay(f"reading {what}", what, is_quiet=is_quiet),
    )
    loss, newest = losses.loss(found.lives.lives), _newest_manifest(run)
    if loss is None or newest is None:
        raise NothingToRestore(
            f"advice for run {keys.run} failed: the run has no commit, or its trainers report no steps",
            hint="Describe the run with --size, --bandwidth and --notice",
        )
    stored_bytes, is_all_stored = history.stored_bytes(store, keys, stop=stop)
    return _subject(
        _Bucket(
            config=here.config,
            run=keys.run,
            lives=found.lives.lives,
            loss=loss,
            newest=newest,
            commits=found.commits.commits,
            evacuations=found.evacuations.evacuations,
            stored_bytes=stored_bytes,
            is_all_stored=is_all_stored,
        )
    )


def _newest_manifest(run: Run) -> Manifest | None:
    """The manifest of the first VM, of the newest commit that can be read."""
    for commit in run.commits[:_MANIFESTS_MAX]:
        with suppress(CorruptError):
            if 0 in commit.manifests:
                return catalog.load_node(run.store, run.keys, commit, 0)
    return None


def _subject(read: _Bucket) -> Subject:
    config, notes = read.config, list[str]()
    gpus = _gpus(read)
    figures = _measurements(read)
    cost_s = _save_cost_s(read, gpus, notes)
    preemptions = tuple(each for each in read.loss.interruptions if not each.is_same_vm)
    job = Job(
        gpus=gpus,
        nodes=read.newest.nodes,
        measured=figures,
        save_cost_s=cost_s,
        interval_s=0.0,
        stall_s=_stall_s(preemptions, cost_s),
        down_s=_down_s(preemptions, figures, notes),
        kinds=(),
        reserve_s=config.deadline.reserve_s,
        follow_ups=config.trainer.follow_ups,
        background_bytes_per_s=config.flush.background_bytes_per_s,
    )
    kinds, silent = _kinds(read, job, preemptions, notes)
    job = replace(job, kinds=kinds)
    job = replace(job, interval_s=_interval_s(read, job, notes))
    notices = _notices(read)
    if not read.is_all_stored:
        notes.append(
            f"the storage is that of {history.STORED_MAX:,} objects; the run has more of them"
        )
    seen = _seen(read, len(preemptions), silent)
    return Subject(
        name=read.run,
        job=job,
        setup=_setup(read, gpus),
        notices=notices,
        headline=_headline(job, notices, is_silent=2 * silent > len(preemptions)),
        upkeep=_upkeep(read),
        loss=read.loss,
        rests_on=_rests_on(seen, config.run.mtbf_s),
        seen=seen,
        assumed=tuple(notes),
    )


# ---------------------------------------------------------------- the job and its checkpoints


def _gpus(read: _Bucket) -> int:
    """GPUs of the VMs that wrote the newest commit: sizes and number of VMs are those of its manifest."""
    lives_of = {life.generation: life for life in read.lives}
    life = lives_of.get(read.newest.generation, read.lives[-1])
    if life.resumption is not None:
        return max(1, life.resumption.ranks // life.resumption.nodes) * read.newest.nodes
    return life.ending.ranks or 1


def _measurements(read: _Bucket) -> Measurements:
    """The figures of the newest manifest, as the next VM reads them."""
    known = pace.inherited(pace.UNKNOWN, read.newest.pace)
    files = ((shard.path, shard.size_bytes) for shard in read.newest.shards)
    return Measurements(
        save_s=None if known.save_s is None else known.save_s.mean,
        save_bytes=read.newest.size_bytes,
        step_s=read.lives[-1].ending.step_s,
        last_share=last_share(read.newest.framework, files),
        pace=known,
    )


def _recent(read: _Bucket) -> Iterator[RecordedCommit]:
    """Periodic commits that no retention has thinned out."""
    times_s = sorted(c.created_wall_s for c in read.commits if c.created_wall_s is not None)
    since_s, until_s = _densest_s(times_s, read.config.retention.keep_within_s)
    for commit in read.commits:
        is_recent = (
            commit.created_wall_s is not None and since_s <= commit.created_wall_s <= until_s
        )
        if is_recent and commit.kind is CheckpointKind.PERIODIC:
            yield commit


def _densest_s(times_s: Sequence[float], width_s: float) -> tuple[float, float]:
    """Begin and end of the newest window of this width with the most of these ascending times.

    Retention leaves fewer commits outside the newest such window.  A window that ends at the newest time
    would contain a single commit if the VM of that commit had a clock in the future.
    """
    best, most, first = (0.0, 0.0), 0, 0
    for last, until_s in enumerate(times_s):
        while times_s[first] < until_s - width_s:
            first += 1
        if last - first + 1 >= most:
            best, most = (until_s - width_s, until_s), last - first + 1
    return best


def _by_generation(read: _Bucket) -> Mapping[int, list[RecordedCommit]]:
    found: defaultdict[int, list[RecordedCommit]] = defaultdict(list)
    for commit in _recent(read):
        found[commit.ref.generation].append(commit)
    return found


def _save_cost_s(read: _Bucket, gpus: int, notes: list[str]) -> float:
    """Time for which training stood still for checkpoints, by the number of periodic commits.

    The oldest of these generations is left out: some of its commits may be deleted.
    """
    commits = _by_generation(read)
    complete = sorted(commits)[1:] if len(commits) > 1 else sorted(commits)
    saves_s = {life.generation: life.ending.saves_s for life in read.lives}
    known = [number for number in complete if saves_s.get(number) is not None]
    count = sum(len(commits[number]) for number in known)
    if count:
        return sum(saves_s[number] or 0.0 for number in known) / count
    cost_s = read.newest.size_bytes * read.newest.nodes / gpus / SNAPSHOT_BYTES_PER_S
    notes.append(f"a checkpoint stops training for {human_s(cost_s)}: no farewell shows it yet")
    return cost_s


def _interval_s(read: _Bucket, job: Job, notes: list[str]) -> float:
    """The usual training time between two commits."""
    gaps_s = [
        later.created_wall_s - earlier.created_wall_s - job.save_cost_s
        for commits in _by_generation(read).values()
        for earlier, later in pairwise(commits)
        if later.created_wall_s is not None and earlier.created_wall_s is not None
    ]
    usual_s = median(gaps_s) if gaps_s else 0.0
    if usual_s > 0:
        return usual_s
    configured_s = read.config.run.checkpoint_interval_s
    interval_s = best_interval(job).best_s if configured_s is None else configured_s
    notes.append(f"a checkpoint every {human_s(interval_s)}: the bucket does not show the interval")
    return interval_s


def _setup(read: _Bucket, gpus: int) -> Setup:
    ranks = max(1, gpus // read.newest.nodes)
    sizes: defaultdict[str, int] = defaultdict(int)
    for shard in read.newest.shards:
        sizes[shard.path.partition("/")[0]] += shard.size_bytes
    is_known = read.newest.framework == "swansong" and read.newest.size_bytes > 0
    return Setup(
        ranks=ranks,
        busiest_share=max(sizes.values()) / read.newest.size_bytes if is_known else None,
        has_prefetch=read.config.restore.prefetch,
        configured_interval_s=read.config.run.checkpoint_interval_s,
        orders_vm=bool(read.config.notify.exec),
    )


# ---------------------------------------------------------------- interruptions


def _stall_s(preemptions: tuple[Interruption, ...], cost_s: float) -> float:
    known_s = [each.stall_s for each in preemptions if each.stall_s is not None]
    return fmean(known_s) if known_s else 2 * cost_s


def _down_s(
    preemptions: tuple[Interruption, ...], figures: Measurements, notes: list[str]
) -> dict[str, float]:
    if preemptions:
        return {
            part: fmean(each.parts_s.get(part) or 0.0 for each in preemptions)
            for part in (*PARTS, "unknown")
        }
    per_byte = figures.pace.send_s_per_byte
    fetch_s = 0.0 if per_byte is None else per_byte.mean * (figures.save_bytes or 0)
    notes.append(
        f"{human_s(sum(DOWN_S.values()))} without training after an interruption, besides the fetch"
    )
    return {**DOWN_S, "fetch": fetch_s}


def _kinds(
    read: _Bucket, job: Job, preemptions: tuple[Interruption, ...], notes: list[str]
) -> tuple[tuple[InterruptionKind, ...], int]:
    """The interruptions by their notice, and the number of those without a usable one.

    An evacuation that had enough time, and was not SAFE, counts as one without a usable notice.
    """
    graces_s: defaultdict[str, list[float]] = defaultdict(list)
    silent = 0
    for each in preemptions:
        evacuation = _evacuation(read, each)
        grace_s = 0.0 if evacuation is None else _grace_s(read, evacuation)
        has_time = job.forecast.chance(grace_s, job.reserve_s) > 0
        if evacuation is None or (has_time and evacuation.verdict is not Verdict.SAFE):
            silent += 1
        else:
            graces_s[evacuation.source].append(grace_s)
    observed_s, prior_s = read.loss.wall_s, read.config.run.mtbf_s
    mtbf_s = expected_mtbf_s(prior_s, History(observed_s=observed_s, uncovered=silent))
    kinds = [InterruptionKind(source="", per_day=DAY_S / mtbf_s)]
    for source, found_s in sorted(graces_s.items()):
        # Over the same time: an hour with one notice does not show a notice each hour.
        per_day = len(found_s) * DAY_S / (prior_s + observed_s)
        kinds.append(InterruptionKind(source=source, grace_s=median(found_s), per_day=per_day))
    rate = sum(kind.per_day for kind in kinds)
    notes.append(
        f"one more interruption without a notice than the {silent} seen, in {human_s(observed_s)} and "
        f"run.mtbf_s = {human_s(prior_s)}: {rate:.2g} interruptions a day in all"
    )
    return tuple(kinds), silent


def _evacuation(read: _Bucket, each: Interruption) -> RecordedEvacuation | None:
    """The evacuation before the end of the VM; None without one."""
    return history.last_evacuation(
        (
            evacuation
            for evacuation in read.evacuations
            if evacuation.generation == each.after_generation
        ),
        each.ended_wall_s,
        lambda evacuation: _grace_s(read, evacuation),
    )


def _grace_s(read: _Bucket, evacuation: RecordedEvacuation) -> float:
    """Time from the start of the evacuation to its deadline, which a late notice may have passed."""
    if evacuation.deadline_s is not None:
        return max(0.0, evacuation.deadline_s)
    usual = (kind.grace_s for kind in _possible(read) if kind.source == evacuation.source)
    return min(usual, default=0.0)


# ---------------------------------------------------------------- notices


def _possible(read: _Bucket) -> tuple[NoticeKind, ...]:
    return possible_notice_kinds(read.config.sources, read.config.deadline)


def _notices(read: _Bucket) -> tuple[tuple[str, float], ...]:
    """The notices that a VM of this run may get, without those of scheduled events, which leave the time."""
    seen = {evacuation.source.partition(".")[0] for evacuation in read.evacuations} & {"aws", "gcp"}
    cloud = read.config.sources.cloud
    clouds = (seen or {"aws", "gcp"}) if cloud == "auto" else {cloud}
    sources = read.config.sources
    has_end = sources.end_at is not None or sources.max_run_duration_s is not None
    return tuple(
        (kind.source, kind.grace_s)
        for kind in _possible(read)
        if (not kind.is_scheduled or (has_end and kind.source == "deadline"))
        and kind.source.partition(".")[0] in {*clouds, "logind", "host", "deadline"}
    )


def _headline(
    job: Job, notices: tuple[tuple[str, float], ...], *, is_silent: bool
) -> tuple[str, float]:
    """The most frequent notice of the run; else the shortest one of a cloud.

    Args:
        is_silent: most interruptions had no usable notice.
    """
    if is_silent:
        return "", 0.0
    noticed = [kind for kind in job.kinds if kind.grace_s > 0]
    if noticed:
        usual = max(noticed, key=lambda kind: kind.per_day)
        return usual.source, usual.grace_s
    of_clouds = [each for each in notices if "." in each[0]]
    return min(of_clouds or notices, key=lambda each: each[1])


# ---------------------------------------------------------------- storage, and the basis


def _upkeep(read: _Bucket) -> Upkeep:
    chunks = len(read.newest.chunks)
    sent_bytes = sum(commit.bytes_sent for commit in read.commits)
    new_share = sent_bytes / max(1, sum(commit.size_bytes for commit in read.commits))
    return Upkeep(
        size_bytes=read.newest.size_bytes,
        stored_bytes=float(read.stored_bytes),
        writes_per_save=(chunks * new_share + 1) * read.newest.nodes,
        reads_per_restore=(chunks + 1) * read.newest.nodes,
    )


def _seen(read: _Bucket, preemptions: int, silent: int) -> dict[str, float]:
    """Numbers of records, and the rate of interruptions with its 95 % interval."""
    days = max(read.loss.wall_s, 1.0) / DAY_S
    low, high = (bound / days for bound in poisson_interval(preemptions))
    return {
        "commits": len(read.commits),
        "interruptions": preemptions,
        "without_notice": silent,
        "wall_s": read.loss.wall_s,
        "per_day": preemptions / days,
        "per_day_low": low,
        "per_day_high": high,
    }


def _rests_on(seen: Mapping[str, float], prior_s: float) -> str:
    rate = f": {seen['per_day']:.2g} a day (95 %: {seen['per_day_low']:.2g} to {seen['per_day_high']:.2g})"
    commits = counted(int(seen["commits"]), "commit")
    interruptions = counted(int(seen["interruptions"]), "interruption")
    if seen["wall_s"] < prior_s and seen["interruptions"] <= 1:
        rate = ", too short for a rate"
    return (
        f"{commits} and {interruptions} in "
        f"{human_s(seen['wall_s'])}{rate}, {seen['without_notice']} of them without a usable notice"
    )
