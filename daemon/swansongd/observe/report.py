# SPDX-License-Identifier: Apache-2.0
"""The state of the daemon for ``swansong status``.  docs/reference/status.md shows :data:`FIELDS`."""

from __future__ import annotations

from dataclasses import dataclass

from swansong_bucket.model import GpuStatus, Health, Notice, SourceStatus, TrainerView

from swansongd.core import arrival, followup, periodic
from swansongd.core.state import State
from swansongd.observe.margin import Margin, margins
from swansongd.observe.phase import phase_of
from swansongd.observe.snapshot import MirrorFigures, PruneFigures, Snapshot
from swansongd.observe.tally import DroppedSets, FailedSaves, Figures, RefusedRanks

STORE_HEALTH = "store"
"""Name under which :attr:`State.sources` holds the health of the store."""
TRAINERS_MAX = 100
"""Trainers in one report: it must fit into one message of the channel."""
FIELDS = {
    "state": "one of the states below",
    "verdict": "how the last evacuation ended: SAFE, PARTIAL, LOST or NO_TRAINING; `null` before "
    "the first one, and during an evacuation without a verdict",
    "last_verdict": "the newest verdict, also after its notice was withdrawn or outlived: "
    "`verdict`, `reason`, `generation`, `step`, `age_s`, `evacuation` (its id), `notices`, the "
    "identities that it answers, and `expected_s` and `took_s`: the time from the checkpoint "
    "request to the commit, as planned and as it was",
    "sources": "list of the sources of notices: `name`, `health` (`ok`, `degraded`, `blind`, "
    "`unsupported`: see docs/operations/notices.md#health-of-a-source), `reason`, `for_s`",
    "gpus": "list of the GPUs (docs/operations/gpu-health.md): `index` (-1 if the driver does not "
    "list it), `uuid`, `name`, `pci`, `health` (`ok`, `degraded`, `dying`, `lost`), `reason`, "
    "`for_s`, and `xids`, the number of Xid messages of each class since the daemon's start; "
    "empty without a GPU",
    "store": "the same fields for the store: it becomes unhealthy when requests fail for two "
    "seconds, or an operation was given up; `blind` after a minute; `null` until the first request",
    "last_commit": "the newest whole commit: `generation`, `step`, `is_final` (the end of the "
    "run), `age_s`. A power cut now costs the training since then. The age of a commit from "
    "before the daemon's start is `null` until its manifest is read",
    "replication_lag": "distance from the newest whole commit to the trainer: `steps`, `seconds`, "
    "`bytes`",
    "run": "name of the run",
    "generation": "the generation that this VM has claimed; `null` until the store was reached",
    "newer_generation": "in state FENCED: the generation that has taken the run over",
    "part": "over several VMs: a newer checkpoint of which this VM has committed its part, and "
    "that is not whole: `generation`, `step`, `nodes`, `nodes_committed`",
    "notices": "list of the notices in force: `source`, `kind`, `severity`, `seconds_left`, "
    "`identities` (several if `swansong notify` was repeated)",
    "evacuation": "the open evacuation: `id`, `reason`, `seconds_left`, `plan`, `why`, `phase`; "
    "`trainer_wait_s`: how long the verdict still waits for a trainer to connect, `null` if it "
    "does not wait; `expected_s` and `pessimistic_s`: the planned time from the request to the "
    "commit, on average and for nine of ten checkpoints; `took_s`: the time that it took; "
    "`follow_ups`: `count` so far, `under_way`, and `next_in_s`, the time until the next one by "
    "the figures of this moment, or `null`",
    "margins": "list with an entry for each kind of notice of this VM, the result of a notice "
    "right now: `source`, `grace_s` (time to the end of the VM), `spare_s` (seconds that the "
    "commit leaves, in nine of ten cases, reserve included; negative: it comes too late; `null`: "
    "save or bandwidth are not measured), `fits`, `lost_since_step` (if it does not fit: the step "
    "that the next VM resumes from, `null` without one)",
    "trainers": "list of the ranks: `pid`, `rank`, `world_size`, `step`, `save_s` (duration of a "
    "save), `connected`, `loss`, `loss_is_finite`, `step_s` (usual duration of a step), "
    "`stalled_s` (`null` unless it is stalled)",
    "trainers_not_shown": f"ranks that `trainers` leaves out; it has at most {TRAINERS_MAX}",
    "trainers_refused": "processes that were refused because another process has their rank: "
    "`count`, `last` reason, `age_s`",
    "failed_saves": "checkpoints that the trainer could not write since the daemon's start: "
    "`count`, and `last` with `step`, `rank`, `reason`, `age_s`",
    "checkpoint_interval_s": "training time between two periodic checkpoints, where the trainer "
    "leaves them to the daemon",
    "flush": "the set in flight: `step`, `size_bytes`, `stored_bytes`, `for_s`",
    "pending_bytes": "bytes that are staged and not stored, of the sets that may be sent next",
    "unsent": "sealed sets without a commit: `sets`, `bytes` that the store does not have, "
    "`failures` in a row, `retry_in_s`; and `dropped` with `count`, `step`, `age_s` of sets that "
    "newer ones superseded",
    "staging": "space on the file system of staging: `size_bytes`, `free_bytes`",
    "prefetch": "the prefetch (docs/operations/restore.md#prefetch): `state`, `reason`, "
    "`generation` and `step` of the commit, `bytes_done` of `bytes_total`",
    "mirror": "the mirror (docs/operations/mirror.md#watch-the-lag): `url`, `state`, `reason`, "
    "`lag` with `commits`, `seconds` and `bytes`, `newest` with `generation` and `step`, "
    "`copied_commits`, `copied_bytes`, `damaged`, `objects_taken`; `null` without one",
    "prune": "prunes by the daemon since its start: `age_s` of the last one, `commits` deleted, "
    "`freed_bytes`, `kept_bytes`, `failures`; `null` unless the daemon prunes "
    "(docs/operations/retention.md)",
    "notifications": "the notifications (docs/operations/notifications.md): `webhook` and `exec` "
    "with `queued`, `sent`, `failed`, `dropped` and `last_error`; `heartbeat` with `sent`, "
    "`failed`, `silent` (the reason against a call) and `last_error`; `limited`: notifications "
    "above the rate limit; `null` without `[notify]`",
    "metrics": "`metrics.listen`: `address`, and `failure`, the reason why the daemon does not "
    "serve it: see docs/operations/monitoring.md; `null` without `metrics.listen`",
    "bandwidth_bytes_per_s": "bandwidth to the store, as measured by recent flushes",
    "store_errors": "requests to the store that failed since the daemon's start, by kind: see "
    "docs/reference/metrics.md#flush-and-store",
    "bytes_referenced": "bytes not sent since the daemon's start, because an earlier commit has "
    "the same bytes under the same path",
    "decision_faults": "faults of the daemon itself since its start: `count`, `last`; each cost "
    "one event; please report them",
    "version": "version of the daemon",
    "pid": "process id of the daemon",
    "uptime_s": "time since the start of the daemon",
}
"""The fields of the report, in their order."""


def full_report(snapshot: Snapshot) -> dict[str, object]:
    """The report on the whole daemon, as plain JSON values."""
    now_mono_s = snapshot.now_mono_s
    values = {
        "run": snapshot.run,
        "version": snapshot.version,
        "pid": snapshot.pid,
        "uptime_s": round(now_mono_s - snapshot.born_mono_s, 1),
        "bytes_referenced": snapshot.bytes_referenced,
        "store_errors": dict(snapshot.store_errors),
        "decision_faults": {"count": snapshot.decision_faults, "last": snapshot.last_fault},
        "staging": snapshot.staging and dict(snapshot.staging),
        "prefetch": dict(snapshot.prefetch),
        "mirror": _mirror(snapshot.mirror, snapshot.mirror_objects_taken),
        "prune": _prune(snapshot.prune, now_mono_s),
        "notifications": snapshot.notifications and dict(snapshot.notifications),
        "metrics": snapshot.metrics and dict(snapshot.metrics),
        **status_report(snapshot.state, snapshot.tally, now_mono_s),
    }
    return {name: values[name] for name in FIELDS}


def _mirror(figures: MirrorFigures | None, objects_taken: int) -> dict[str, object] | None:
    if figures is None:
        return None
    newest = figures.newest
    return {
        "url": figures.url,
        "state": figures.state.value,
        "reason": figures.reason,
        "lag": {
            "commits": figures.lag_commits,
            "seconds": figures.lag_s,
            "bytes": figures.lag_bytes,
        },
        "newest": newest and {"generation": newest.generation, "step": newest.step},
        "copied_commits": figures.copied_commits,
        "copied_bytes": figures.copied_bytes,
        "damaged": figures.damaged,
        "objects_taken": objects_taken,
    }


def _prune(figures: PruneFigures | None, now_mono_s: float) -> dict[str, object] | None:
    if figures is None:
        return None
    last_mono_s = figures.succeeded_mono_s
    return {
        "age_s": None if last_mono_s is None else round(now_mono_s - last_mono_s, 1),
        "commits": figures.commits,
        "freed_bytes": figures.freed_bytes,
        "kept_bytes": figures.kept_bytes,
        "failures": figures.failures,
    }


def status_report(state: State, tally: Figures, now_mono_s: float) -> dict[str, object]:
    """The report on the decisions, as plain JSON values."""
    health = {
        name: _health(name, status, now_mono_s) for name, status in state.notices.sources.items()
    }
    store = health.pop(STORE_HEALTH, None)
    since_mono_s = tally.committed_mono_s
    age_s = None if since_mono_s is None else round(now_mono_s - since_mono_s, 1)
    return {
        "generation": state.generation,
        "state": phase_of(state).value,
        "newer_generation": state.starts.fenced_by,
        "verdict": _verdict(state),
        "last_verdict": _last_verdict(state, now_mono_s),
        "sources": list(health.values()),
        "store": store,
        "gpus": [_gpu(gpu, now_mono_s) for gpu in state.gpus.status.values()],
        "notices": [_notice(notice, now_mono_s) for notice in state.notices.live.values()],
        "trainers": [
            _trainer(state, trainer, now_mono_s) for trainer in state.ranks.trainers[:TRAINERS_MAX]
        ],
        "failed_saves": _failed_saves(tally.failed_saves, now_mono_s),
        "trainers_not_shown": max(0, len(state.ranks.trainers) - TRAINERS_MAX),
        "trainers_refused": _refused(tally.refused, now_mono_s),
        "checkpoint_interval_s": round(periodic.interval_s(state), 1),
        "last_commit": _last_commit(state, age_s),
        "part": None if state.part is None else state.part.facts(),
        "replication_lag": _lag(state, age_s),
        "pending_bytes": pending_bytes(state),
        "flush": _flush(state, now_mono_s),
        "unsent": _unsent(state, tally.dropped, now_mono_s),
        "bandwidth_bytes_per_s": state.learned.bandwidth_bytes_per_s,
        "evacuation": _evacuation(state, now_mono_s),
        "margins": [_margin(each) for each in margins(state)],
    }


def _health(name: str, status: SourceStatus, now_mono_s: float) -> dict[str, object]:
    return {
        "name": name,
        "health": status.health.value,
        "reason": status.reason,
        "for_s": round(now_mono_s - status.since_mono_s, 1),
    }


def _gpu(gpu: GpuStatus, now_mono_s: float) -> dict[str, object]:
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "pci": gpu.pci,
        "health": gpu.health.value,
        "reason": gpu.reason,
        "for_s": round(now_mono_s - gpu.since_mono_s, 1),
        "xids": dict(gpu.xids),
    }


def _notice(notice: Notice, now_mono_s: float) -> dict[str, object]:
    return {
        "source": notice.source,
        "kind": notice.kind,
        "severity": notice.severity.name.lower(),
        "seconds_left": round(notice.deadline_mono_s - now_mono_s, 1),
        "identities": [notice.identity, *notice.repeats],
    }


def _trainer(state: State, trainer: TrainerView, now_mono_s: float) -> dict[str, object]:
    return {
        "pid": trainer.pid,
        "rank": trainer.rank,
        "world_size": trainer.world_size,
        "step": trainer.step,
        "save_s": trainer.save_s,
        "connected": trainer.is_connected,
        "loss": trainer.loss,
        "loss_is_finite": trainer.loss_is_finite,
        "step_s": trainer.step_s,
        "stalled_s": _stalled_s(state, trainer, now_mono_s),
    }


def _evacuation(state: State, now_mono_s: float) -> dict[str, object] | None:
    evacuation = state.evacuation
    if evacuation is None:
        return None
    wait_s = arrival.wait_s(state, now_mono_s)
    request = max(state.requests_made, key=lambda each: each.asked_mono_s, default=None)
    return {
        "id": evacuation.id,
        "reason": evacuation.reason,
        "seconds_left": round(evacuation.deadline_mono_s - now_mono_s, 1),
        "plan": evacuation.plan.kind.value,
        "why": evacuation.plan.reason,
        "phase": phase_of(state).value,
        "trainer_wait_s": None if wait_s is None else round(wait_s, 1),
        "follow_ups": _follow_ups(state, now_mono_s),
        "expected_s": _rounded(request.expected_s if request else None),
        "pessimistic_s": _rounded(request.pessimistic_s if request else None),
        "took_s": _rounded(request.took_s if request else None),
    }


def _follow_ups(state: State, now_mono_s: float) -> dict[str, object]:
    evacuation, next_s = state.evacuation, followup.wait_s(state, now_mono_s)
    return {
        "count": 0 if evacuation is None else evacuation.follow_ups,
        "under_way": followup.is_under_way(state),
        "next_in_s": None if next_s is None else round(next_s, 1),
    }


def _margin(margin: Margin) -> dict[str, object]:
    return {
        "source": margin.source,
        "grace_s": round(margin.grace_s, 1),
        "spare_s": None if margin.spare_s is None else round(margin.spare_s, 1),
        "fits": None if margin.spare_s is None else margin.spare_s >= 0,
        "lost_since_step": margin.lost_since_step,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 2)


def status_line(state: State, now_mono_s: float) -> str:
    """A summary in one line, for ``systemctl status``."""
    last = (
        f"last commit {state.commits.last_complete}"
        if state.commits.last_complete
        else "nothing committed yet"
    )
    if state.part is not None:
        last += f"; {state.part}"
    if state.starts.fenced_by is not None:
        last += f"; generation {state.starts.fenced_by} has taken the run over"
    if state.ranks.stalled:
        last += "; the trainer is stalled"
    store = state.notices.sources.get(STORE_HEALTH)
    if store is not None and store.health is not Health.OK:
        last += f"; the store is {store.health.value}: {store.reason:.200}"
    if state.evacuation is None:
        return f"{phase_of(state).value}; {last}"
    left_s = state.evacuation.deadline_mono_s - now_mono_s
    wait_s = arrival.wait_s(state, now_mono_s)
    if followup.is_under_way(state):
        last = f"a follow-up checkpoint is under way; {last}"
    if wait_s is not None:
        last = f"waiting for a trainer to connect, {wait_s:.0f} s left; {last}"
    return f"{phase_of(state).value}; {left_s:.0f} s left; {last}"


def _stalled_s(state: State, trainer: TrainerView, now_mono_s: float) -> float | None:
    """Seconds since the last report of a rank that is stalled; None for any other rank."""
    if trainer.connection not in state.ranks.stalled or trainer.reported_mono_s is None:
        return None
    return round(now_mono_s - trainer.reported_mono_s, 1)


def _verdict(state: State) -> str | None:
    """The verdict of the open evacuation, None while it is undecided; otherwise the last verdict."""
    decided = state.evacuation or state.course.last_verdict
    is_precaution = state.evacuation is not None and state.evacuation.is_precaution
    if is_precaution:
        decided = state.course.last_verdict
    return None if decided is None or decided.verdict is None else decided.verdict.value


def _last_verdict(state: State, now_mono_s: float) -> dict[str, object] | None:
    last = state.course.last_verdict
    if last is None:
        return None
    return {
        "verdict": last.verdict.value,
        "reason": last.reason,
        "generation": None if last.commit is None else last.commit.generation,
        "step": None if last.commit is None else last.commit.step,
        "age_s": round(now_mono_s - last.mono_s, 1),
        "evacuation": last.evacuation_id,
        "notices": sorted(last.notices),
        "expected_s": last.expected_s,
        "took_s": last.took_s,
    }


def _last_commit(state: State, age_s: float | None) -> dict[str, object] | None:
    last = state.commits.last_complete
    if last is None:
        return None
    return {
        "generation": last.generation,
        "step": last.step,
        "is_final": last.is_final,
        "age_s": age_s,
    }


def _refused(refused: RefusedRanks, now_mono_s: float) -> dict[str, object]:
    age_s = round(now_mono_s - refused.mono_s, 1) if refused.count else None
    return {"count": refused.count, "last": refused.reason or None, "age_s": age_s}


def _flush(state: State, now_mono_s: float) -> dict[str, object] | None:
    """The set that is being sent."""
    flight = state.flush.flight
    if flight is None:
        return None
    return {
        "step": flight.staged.id.step,
        "size_bytes": flight.staged.size_bytes,
        "stored_bytes": state.flush.stored_bytes.get(flight.staged.id, 0),
        "for_s": round(now_mono_s - flight.started_mono_s, 1),
    }


@dataclass(frozen=True, slots=True)
class Unsent:
    """Sealed sets without a commit."""

    sets: int
    bytes_left: int
    """Bytes of these sets that are not in the store."""


def unsent(state: State) -> Unsent:
    """The sealed sets and bytes that wait for the store."""
    waiting = state.uncommitted
    left = sum(max(0, s.size_bytes - state.flush.stored_bytes.get(s.id, 0)) for s in waiting)
    return Unsent(len(waiting), left)


def _unsent(state: State, dropped: DroppedSets, now_mono_s: float) -> dict[str, object]:
    """Sealed sets that wait for their upload, and the number of those that newer sets replaced."""
    waiting = unsent(state)
    is_retried = bool(state.flush.failures) and state.flush.flight is None
    return {
        "sets": waiting.sets,
        "bytes": waiting.bytes_left,
        "failures": state.flush.failures,
        "retry_in_s": round(max(0.0, state.flush.retry_mono_s - now_mono_s), 1)
        if is_retried
        else None,
        "dropped": {
            "count": dropped.count,
            "step": dropped.step,
            "age_s": round(now_mono_s - dropped.mono_s, 1) if dropped.count else None,
        },
    }


def _failed_saves(failed: FailedSaves, now_mono_s: float) -> dict[str, object]:
    last = {
        "step": failed.step,
        "rank": failed.rank,
        "reason": failed.reason,
        "age_s": round(now_mono_s - failed.mono_s, 1),
    }
    return {"count": failed.count, "last": last if failed.count else None}


def _lag(state: State, age_s: float | None) -> dict[str, object]:
    return {
        "steps": lag_steps(state),
        "seconds": age_s,
        "bytes": pending_bytes(state),
    }


def lag_steps(state: State) -> int:
    """Steps that a power cut would lose now."""
    committed = _kept_step(state)
    ahead = max((trainer.step for trainer in state.ranks.trainers), default=committed)
    newest = max((staged.id.step for staged in state.uncommitted), default=committed)
    if state.part is not None:
        newest = max(newest, state.part.ref.step)
    return max(ahead, newest, committed) - committed


def _kept_step(state: State) -> int:
    """The step of this start that a power cut leaves: of its commit, or else of the state that it loaded."""
    start, last = state.start, state.commits.last_complete
    if start is None or last is None or last.generation == start.generation:
        return 0 if last is None else last.step
    return start.parent.step if start.parent.is_known else last.step


def pending_bytes(state: State) -> int:
    """Bytes that are staged and not stored, of the sets that may be sent next."""
    return sum(candidate.bytes_left for candidate in state.candidates)
