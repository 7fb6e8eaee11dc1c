# SPDX-License-Identifier: Apache-2.0
"""Finds ranks that are slower than their peers, for which all other ranks wait in each step."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from swansongd.core.state import State

SLOWER = 1.3
"""A slow rank takes longer than its peers, by this factor, for the part of a step in which no rank waits."""
SHARE = 0.05
"""Its peers wait for it for at least this share of the step."""
_LEAST_S = 1e-6


def slow_ranks(state: State) -> Mapping[int, float]:
    """Return the slow ranks by connection: their time divided by the time of their peers.

    The peers of a rank are the other ranks on this VM that report such a time.
    """
    known = {
        trainer.connection: (trainer.own_s, trainer.step_s)
        for trainer in state.connected
        if trainer.own_s is not None and trainer.step_s is not None
    }
    found = {}
    for connection, (own_s, step_s) in known.items():
        peers_s = [other_s for each, (other_s, _) in known.items() if each != connection]
        usual_s = max(median(peers_s), _LEAST_S) if peers_s else own_s
        if own_s > SLOWER * usual_s and own_s - usual_s > SHARE * step_s:
            found[connection] = own_s / usual_s
    return found
