# SPDX-License-Identifier: Apache-2.0
"""The state of the daemon as ``swansong status`` shows it.  docs/operations.md describes the fields."""

from __future__ import annotations

from swansongd.core import periodic
from swansongd.core.state import State
from swansongd.model import TrainerView, Verdict

STORE_HEALTH = "store"
"""Under this name the health of the store goes beside that of the sources."""
TRAINERS_MAX = 100
"""Trainers in one report, which must fit into a message."""


def status_report(state: State, now_mono_s: float) -> dict[str, object]:
    """Everything that a person or a probe wants to know, as plain JSON values."""
    evacuation = state.evacuation
    health = {
        name: {
            "name": name,
            "health": status.health.value,
            "reason": status.reason,
            "for_s": round(now_mono_s - status.since_mono_s, 1),
        }
        for name, status in state.sources.items()
    }
    store = health.pop(STORE_HEALTH, None)
    return {
        "generation": state.generation,
        "state": state.phase.value,
        "newer_generation": state.newer_generation,
        "verdict": _verdict(evacuation.verdict if evacuation else None),
        "sources": list(health.values()),
        "store": store,
        "notices": [
            {
                "source": notice.source,
                "kind": notice.kind,
                "severity": notice.severity.name.lower(),
                "seconds_left": round(notice.deadline_mono_s - now_mono_s, 1),
            }
            for notice in state.notices.values()
        ],
        "trainers": [
            {
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
            for trainer in state.trainers[:TRAINERS_MAX]
        ],
        "trainers_not_shown": max(0, len(state.trainers) - TRAINERS_MAX),
        "checkpoint_interval_s": round(periodic.interval_s(state), 1),
        "last_commit": _last_commit(state, now_mono_s),
        "part": None if state.part is None else state.part.facts(),
        "replication_lag": _lag(state, now_mono_s),
        "pending_bytes": sum(candidate.bytes_left for candidate in state.candidates),
        "bandwidth_bytes_per_s": state.bandwidth_bytes_per_s,
        "evacuation": None
        if evacuation is None
        else {
            "id": evacuation.id,
            "reason": evacuation.reason,
            "seconds_left": round(evacuation.deadline_mono_s - now_mono_s, 1),
            "plan": evacuation.plan.kind.value,
            "why": evacuation.plan.reason,
            "phase": state.phase.value,
        },
    }


def status_line(state: State, now_mono_s: float) -> str:
    """The same in one line, for ``systemctl status``."""
    last = f"last commit {state.last_complete}" if state.last_complete else "nothing committed yet"
    if state.part is not None:
        last += f"; {state.part}"
    if state.newer_generation is not None:
        last += f"; generation {state.newer_generation} has taken the run over"
    if state.stalled:
        last += "; the trainer is stalled"
    if state.evacuation is None:
        return f"{state.phase.value}; {last}"
    left_s = state.evacuation.deadline_mono_s - now_mono_s
    return f"{state.phase.value}; {left_s:.0f} s left; {last}"


def _stalled_s(state: State, trainer: TrainerView, now_mono_s: float) -> float | None:
    """For how long nothing was heard of a rank that has come to a halt; else None."""
    if trainer.connection not in state.stalled or trainer.reported_mono_s is None:
        return None
    return round(now_mono_s - trainer.reported_mono_s, 1)


def _verdict(verdict: Verdict | None) -> str | None:
    return None if verdict is None else verdict.value


def _last_commit(state: State, now_mono_s: float) -> dict[str, object] | None:
    last = state.last_complete
    if last is None:
        return None
    since = state.last_commit_mono_s
    return {
        "generation": last.generation,
        "step": last.step,
        "age_s": None if since is None else round(now_mono_s - since, 1),
    }


def _lag(state: State, now_mono_s: float) -> dict[str, object]:
    """What would be lost if the power went now."""
    committed = state.last_complete.step if state.last_complete else 0
    ahead = max((trainer.step for trainer in state.trainers), default=committed)
    newest = max((staged.id.step for staged in state.uncommitted), default=committed)
    if state.part is not None:
        newest = max(newest, state.part.ref.step)
    since = state.last_commit_mono_s
    return {
        "steps": max(ahead, newest, committed) - committed,
        "seconds": None if since is None else round(now_mono_s - since, 1),
        "bytes": sum(candidate.bytes_left for candidate in state.candidates),
    }
