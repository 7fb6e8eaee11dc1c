# SPDX-License-Identifier: Apache-2.0
"""The requests of other VMs of the job, as notices on this VM.

Daemons do not connect to each other.  They learn about other VMs from their trainers, which agree in the
job's own store, and from the bucket.
"""

from __future__ import annotations

from dataclasses import replace

from swansongd.core.request_ids import are_of_one
from swansongd.core.transition import Transition
from swansongd.model import DeadlineQuality, Notice, Severity

PEER_SOURCE = "peer"
LONGEST_S = 3600.0
"""The longest notice that a cloud gives: host maintenance."""
REQUESTS_MAX = 3
WINDOW_S = 60.0
"""No more than REQUESTS_MAX requests of other VMs within this time become notices."""


def notice_of(
    transition: Transition, request_id: str, reason: str, seconds_left: float
) -> Notice | None:
    """The notice that follows from another VM's request.

    None when the request is known or our own, when no trainer of this VM belongs to a job over several VMs,
    or when there were too many requests.  A trainer that forges requests therefore costs a few checkpoints.
    """
    state = transition.state
    known = state.notices.get(PEER_SOURCE)
    # Repeated and follow-up requests have the id of the first one and a suffix.
    names = (
        *state.opened,
        known.identity if known is not None else "",
        state.evacuation.id if state.evacuation is not None else "",
    )
    is_known = any(name and are_of_one(request_id, name) for name in names)
    if is_known or not state.spans_vms:
        return None
    recent = tuple(taken for taken in state.peers_mono_s if transition.now - taken < WINDOW_S)
    if len(recent) >= REQUESTS_MAX:
        transition.log("warning", "peer_request_ignored", reason=f"over {len(recent)} in a minute")
        return None
    deadline_mono_s = transition.now + min(max(0.0, seconds_left), LONGEST_S)
    ends = (state.peer_end_mono_s, deadline_mono_s)
    transition.state = replace(
        transition.state,
        peers_mono_s=(*recent, transition.now),
        peer_end_mono_s=min(end for end in ends if end is not None),
    )
    return Notice(
        source=PEER_SOURCE,
        kind="reclaim",
        identity=request_id,
        severity=Severity.IMMINENT,
        deadline_mono_s=deadline_mono_s,
        deadline_quality=DeadlineQuality.DERIVED,
        detail=reason,
    )
