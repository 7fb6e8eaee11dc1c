# SPDX-License-Identifier: Apache-2.0
"""A promoted mirror ends the daemon, whatever the number of its claim; and the limits of copies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from swansong_bucket.model import Verdict
from swansongd.core.events import Exit, FenceFound
from swansongd.core.transition import EXIT_FENCED
from swansongd.flush import limits

from testkit.story import Story


@pytest.mark.fault("M06")
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("number", [3, 7, 1008])
def test_a_foreign_claim_ends_the_daemon(nodes: int, number: int) -> None:
    """Over several VMs as well: no later start of the job may continue in the old store."""
    story = Story(generation=7)
    story.join(nodes=nodes)
    story.tell(FenceFound(number, in_mirror=True))
    assert story.last(Exit) == Exit(EXIT_FENCED, f"generation {number} has taken the run over")
    assert story.state.starts.fenced_by == number


@pytest.mark.parametrize(
    ("verdict", "is_sending", "may_copy", "rate"),
    [
        (None, False, True, 5.0),
        (None, True, False, 5.0),
        ("open", False, False, None),
        (Verdict.SAFE, False, True, None),
        (Verdict.SAFE, True, False, None),
    ],
)
def test_copies_give_way_to_checkpoints(
    verdict: Any, is_sending: bool, may_copy: bool, rate: float | None
) -> None:
    """They pause for a flush and until the verdict; after it they have no limit of the rate."""
    decided = None if verdict == "open" else verdict
    evacuation = None if verdict is None else SimpleNamespace(verdict=decided)
    state: Any = SimpleNamespace(
        evacuation=evacuation,
        flush=SimpleNamespace(flight=object() if is_sending else None),
        must_yield=False,
    )
    assert limits.may_mirror(state) is may_copy
    assert limits.mirror_rate_bytes_per_s(state, 5.0) == rate
