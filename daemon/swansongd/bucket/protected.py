# SPDX-License-Identifier: Apache-2.0
"""The commits that no retention rule may delete: the newest healthy one, and the best one by a metric.

Pure: computed from the health in the manifests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from swansongd.model import CommitRef, is_healthy

HEALTHY = "healthy"


@dataclass(frozen=True, slots=True)
class Ranking:
    """The metric by which one commit is the best."""

    metric: str = "loss"
    is_highest: bool = False
    """The greatest value is the best, as for an accuracy."""

    @property
    def reason(self) -> str:
        return f"best {self.metric}"


def protected_commits(
    commits: Iterable[tuple[CommitRef, Mapping[str, float]]], ranking: Ranking | None = None
) -> dict[CommitRef, list[str]]:
    """The protected commits, each with its reasons: ``healthy``, ``best loss``.

    A commit that is known to be unhealthy is never the best.  Of equal ones the newest is.

    Args:
        commits: complete ones, with their health.
        ranking: None for the least loss.
    """
    ranking = ranking or Ranking()
    reasons: defaultdict[CommitRef, list[str]] = defaultdict(list)
    known = sorted(commits, key=lambda item: item[0], reverse=True)
    newest = next((ref for ref, health in known if is_healthy(health)), None)
    if newest is not None:
        reasons[newest].append(HEALTHY)
    sign = -1.0 if ranking.is_highest else 1.0
    rated = [
        (sign * health[ranking.metric], ref)
        for ref, health in known
        if ranking.metric in health and is_healthy(health) is not False
    ]
    if rated:
        value = min(rated)[0]
        best = max(ref for rating, ref in rated if rating == value)
        reasons[best].append(ranking.reason)
    return dict(reasons)
