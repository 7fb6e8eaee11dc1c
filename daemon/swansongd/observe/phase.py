# SPDX-License-Identifier: Apache-2.0
"""The daemon's state in one word, as ``swansong status`` shows it."""

from __future__ import annotations

from enum import StrEnum

from swansong_bucket.model import Verdict

from swansongd.core.state import Evacuation, State


class Phase(StrEnum):
    """The daemon's state as ``swansong status`` shows it; a verdict replaces it once there is one."""

    IDLE = "IDLE"
    """No notice is in force."""
    ARMED = "ARMED"
    """A notice is in force, and no evacuation is open: the notice is advisory, or its end is not near."""
    CHECKPOINTING = "CHECKPOINTING"
    """The trainer has a request for a checkpoint."""
    FLUSHING = "FLUSHING"
    """A sealed set is being sent, or about to be."""
    COMMITTING = "COMMITTING"
    """The shards are stored, the manifest is being created."""
    WAITING_FOR_TRAINER = "WAITING_FOR_TRAINER"
    """No trainer is connected, and one that connects now is asked for a checkpoint."""
    WAITING_FOR_PEERS = "WAITING_FOR_PEERS"
    """This VM's part is committed, and not all other VMs have committed theirs."""
    AWAITING_HANDOVER = "AWAITING_HANDOVER"
    """The VM that this one replaces still trains until its deadline."""
    STANDING_BY = "STANDING_BY"
    """Its notice was withdrawn: it trains on, and this VM takes over when it ends."""
    FENCED = "FENCED"
    """Another VM, or a start of the job without this VM, has taken the run over."""


def phase_of(state: State) -> Phase | Verdict:
    """Derived, so that it cannot disagree with the facts."""
    if state.starts.fenced_by is not None:
        return Phase.FENCED
    evacuation = state.evacuation
    if evacuation is None or evacuation.is_precaution:
        other = state.starts.predecessor
        if other is not None and other.generation:
            return Phase.AWAITING_HANDOVER if other.is_leaving else Phase.STANDING_BY
        return Phase.ARMED if state.notices.in_force else Phase.IDLE
    if evacuation.verdict is Verdict.SAFE:
        return evacuation.verdict  # whatever follows
    request = evacuation.request
    if request is not None and request.is_waiting and evacuation.verdict is None:
        return Phase.CHECKPOINTING
    if state.flush.flight is not None:
        return Phase.FLUSHING
    if state.commits.stored:
        return Phase.COMMITTING
    if evacuation.verdict is None and state.commits.incomplete is not None:
        return Phase.WAITING_FOR_PEERS
    if evacuation.verdict is None and _awaits_trainer(state, evacuation):
        return Phase.WAITING_FOR_TRAINER
    return evacuation.verdict or Phase.FLUSHING


def _awaits_trainer(state: State, evacuation: Evacuation) -> bool:
    """Whether a farewell was written ahead because no trainer has connected so far."""
    is_asked = evacuation.request is not None and not evacuation.request.is_unsent
    return evacuation.foretold is not None and not is_asked and not state.connected


def is_follow_up_under_way(state: State) -> bool:
    """Whether the trainer saves a follow-up checkpoint, or the daemon sends it."""
    request = state.follow_up
    if request is None or request.failure:
        return False
    answer = request.answer
    return request.is_waiting or (answer is not None and not state.is_whole(answer))
