# SPDX-License-Identifier: Apache-2.0
"""When the lifecycle hook of an Auto Scaling group gets a heartbeat, and when it is completed.

Until the hook is completed, the group keeps the VM.  Completing it ends the VM earlier than the group would.
"""

from __future__ import annotations

from swansong_bucket.model import Verdict

from swansongd.core.state import State

ASG_SOURCE = "aws.asg"


def needs_heartbeat(state: State) -> bool:
    """Whether the hook must be extended: the group announced the end, and there is no verdict yet."""
    evacuation = state.evacuation
    return (
        ASG_SOURCE in state.notices.live and evacuation is not None and evacuation.verdict is None
    )


def is_complete(state: State, verdict: Verdict) -> bool:
    """Whether the group may end the VM now.

    Not without a commit: a set that a trainer still seals in the remaining time may be committed.
    """
    has_commit = state.commits.last_complete is not None
    return ASG_SOURCE in state.notices.live and (has_commit or verdict is Verdict.NO_TRAINING)
