# SPDX-License-Identifier: Apache-2.0
"""Which commits have a name of their own: what a person goes back to, and what no retention may delete.

Pure: from what the manifests say.  ``healthy`` is the newest complete commit whose loss is finite, ``best
loss`` (or of whatever metric) the one in which that is least.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from swansongd.model import CommitRef, is_healthy

HEALTHY = "healthy"


@dataclass(frozen=True, slots=True)
class Best:
    """What makes a commit the best one."""

    metric: str = "loss"
    is_highest: bool = False
    """The greatest value is the best one, as for an accuracy."""

    @property
    def pin(self) -> str:
        return f"best {self.metric}"


def pins(
    commits: Iterable[tuple[CommitRef, Mapping[str, float]]], best: Best | None = None
) -> dict[CommitRef, list[str]]:
    """The pins of each commit that has any.

    Args:
        commits: complete ones, with their health.
        best: None for the least loss.  Only a commit that is not known to be unhealthy can be best.
    """
    best = best or Best()
    named: defaultdict[CommitRef, list[str]] = defaultdict(list)
    known = sorted(commits, key=lambda item: item[0], reverse=True)
    newest = next((ref for ref, health in known if is_healthy(health)), None)
    if newest is not None:
        named[newest].append(HEALTHY)
    sign = -1.0 if best.is_highest else 1.0
    rated = [
        (sign * health[best.metric], ref)
        for ref, health in known
        if best.metric in health and is_healthy(health) is not False
    ]
    if rated:
        value = min(rated)[0]
        named[max(ref for rating, ref in rated if rating == value)].append(best.pin)
    return dict(named)
