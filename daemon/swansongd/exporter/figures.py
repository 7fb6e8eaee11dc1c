# SPDX-License-Identifier: Apache-2.0
"""The figures of a run, computed from the facts of its objects.  Pure.

Counters are computed from farewells, resumptions and claims alone.  No part of Swansong deletes these, so a
counter has the same value after a restart of the exporter, and deleted commits do not change it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from swansongd.core.ledger import Ending, LastReport, Life, Resumption
from swansongd.model import CheckpointKind, CommitRef, Verdict
from swansongd.observe import loss as losses
from swansongd.observe.cost import Costs
from swansongd.observe.loss import Interruption, Loss

SETTLED_AFTER_S = 120.0
"""A verdict does not improve any more this long after the deadline, or after the farewell."""
LOSS_PARTS = ("stall", "redone", *losses.PARTS)
"""The parts of the loss of a recorded interruption."""
_MERIT = {
    verdict: merit for merit, verdict in enumerate((Verdict.LOST, Verdict.PARTIAL, Verdict.SAFE))
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFacts:
    """A whole commit."""

    ref: CommitRef
    kind: CheckpointKind
    size_bytes: int
    """Over all nodes.  A part that several commits share counts in each of them."""
    created_wall_s: float | None
    """When the last VM wrote its manifest; None if no manifest has a valid time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FarewellFacts:
    """A farewell."""

    generation: int
    evacuation_id: str
    is_drill: bool
    verdict: Verdict
    written_wall_s: float
    deadline_wall_s: float | None
    training: LastReport | None


@dataclass(frozen=True, slots=True)
class MirrorLag:
    """The distance of the mirror to the store."""

    commits: int
    """Whole commits that are newer than the newest one in the mirror."""
    since_wall_s: float | None
    """When the oldest of these was created; None if there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """The figures of one run at one moment."""

    run: str
    read_wall_s: float
    generation: int
    """The highest claimed generation; 0 without a claim."""
    newest: CommitFacts | None
    """The newest whole commit."""
    oldest_created_wall_s: float | None
    commits: Mapping[CheckpointKind, int]
    commit_bytes: Mapping[CheckpointKind, int]
    incomplete: int
    """Commits without the manifests of all nodes."""
    pins: int
    damaged: Mapping[str, int]
    """Objects that are not valid, by kind."""
    left_out: Mapping[str, int]
    """Objects beyond the limits of the exporter, by kind."""
    foreign: int
    """Keys that no swansong of this version writes."""
    evacuations: Evacuations
    interruptions: Mapping[bool, int]
    """By whether the run resumed on the same VM."""
    lost_gpu_s: Mapping[str, float]
    """GPU seconds of these interruptions, by part."""
    loss: Loss | None
    """The totals of ``swansong loss``, without the single interruptions."""
    costs: Costs | None
    """None without prices."""
    mirror: MirrorLag | None = None
    """None: no mirror is configured, or it was not read yet."""

    @property
    def is_finished(self) -> bool:
        return self.newest is not None and self.newest.ref.is_final


# ---------------------------------------------------------------- evacuations


@dataclass(slots=True)
class _Evacuation:
    is_drill: bool
    verdict: Verdict
    until_wall_s: float
    """Earliest deadline of its farewells: a forged one with a far deadline must not hold a verdict back."""
    written_wall_s: float
    """Time of the newest farewell."""


@dataclass(frozen=True, slots=True)
class Evacuations:
    """The evacuations of a run, by verdict, and by whether they were drills."""

    settled: Mapping[tuple[Verdict, bool], int]
    """Number of evacuations whose verdict is final."""
    newest_wall_s: Mapping[tuple[Verdict, bool], float]
    """Time of the newest of these evacuations."""


def evacuations(
    farewells: Iterable[FarewellFacts], *, generation: int, now_wall_s: float
) -> Evacuations:
    """Count evacuations by their best verdict: one evacuation leaves several farewells.

    The daemon may write LOST or PARTIAL before a better verdict, and never a worse one after it.  An
    evacuation counts once its verdict cannot improve: it is SAFE, a newer generation is claimed, or its
    deadline is over.

    Args:
        generation: the highest claimed generation.
    """
    found: dict[tuple[int, str], _Evacuation] = {}
    for each in farewells:
        until_s = max(each.written_wall_s, each.deadline_wall_s or 0.0)
        fresh = _Evacuation(each.is_drill, each.verdict, until_s, each.written_wall_s)
        known = found.setdefault((each.generation, each.evacuation_id), fresh)
        known.is_drill = known.is_drill and each.is_drill
        known.verdict = max(known.verdict, each.verdict, key=_MERIT.__getitem__)
        known.until_wall_s = min(known.until_wall_s, until_s)
        known.written_wall_s = max(known.written_wall_s, each.written_wall_s)
    settled = dict.fromkeys(product(Verdict, (False, True)), 0)
    newest_wall_s: dict[tuple[Verdict, bool], float] = {}
    for (number, _), one in found.items():
        is_over = number < generation or now_wall_s > one.until_wall_s + SETTLED_AFTER_S
        if one.verdict is not Verdict.SAFE and not is_over:
            continue
        outcome = one.verdict, one.is_drill
        settled[outcome] += 1
        newest_wall_s[outcome] = max(newest_wall_s.get(outcome, 0.0), one.written_wall_s)
    return Evacuations(settled, newest_wall_s)


# ---------------------------------------------------------------- interruptions


def recorded_interruptions(
    resumptions: Mapping[int, Resumption], claimed_wall_s: Callable[[int], float | None]
) -> Iterator[Interruption]:
    """The interruptions after which a resumption was recorded, oldest first.

    A resumption contains the end of the generation before it.  So these interruptions depend on no commit,
    and a new resumption changes none of the older ones.
    """
    chain: list[Life] = []
    for number in sorted(resumptions):
        own = resumptions[number]
        earlier = own.earlier
        if earlier is None or earlier.generation >= number:
            yield from _interruptions(chain)
            chain = []
        elif chain and chain[-1].generation == earlier.generation:
            chain[-1] = replace(chain[-1], ending=earlier)
        else:
            yield from _interruptions(chain)
            chain = [_unrecorded(earlier, claimed_wall_s(earlier.generation))]
        chain.append(_begun(own))
    yield from _interruptions(chain)


def _interruptions(chain: Sequence[Life]) -> Sequence[Interruption]:
    found = losses.loss(chain)
    return () if found is None else found.interruptions


def _unrecorded(ending: Ending, claimed_wall_s: float | None) -> Life:
    """A generation whose own resumption is missing."""
    return Life(
        generation=ending.generation,
        claimed_wall_s=claimed_wall_s,
        resumption=None,
        start_step=0,
        ending=ending,
    )


def _begun(own: Resumption) -> Life:
    """A generation whose end is not known yet."""
    ending = Ending(
        generation=own.generation,
        step=own.first_step,
        wall_s=own.first_step_wall_s,
        is_estimated=True,
    )
    return Life(
        generation=own.generation,
        claimed_wall_s=None,
        resumption=own,
        start_step=own.start_step,
        ending=ending,
    )


def lost_gpu_s(interruptions: Iterable[Interruption]) -> dict[str, float]:
    """GPU seconds of the interruptions, by part."""
    total: defaultdict[str, float] = defaultdict(float, dict.fromkeys(LOSS_PARTS, 0.0))
    for each in interruptions:
        for part, gpu_s in each.lost_parts_gpu_s.items():
            total[part] += gpu_s
    return dict(total)


# ---------------------------------------------------------------- commits


def by_kind(
    commits: Sequence[CommitFacts],
) -> tuple[dict[CheckpointKind, int], dict[CheckpointKind, int]]:
    """Number and bytes of the commits of each kind."""
    counts = Counter(each.kind for each in commits)
    sizes_bytes: Counter[CheckpointKind] = Counter()
    for each in commits:
        sizes_bytes[each.kind] += each.size_bytes
    return (
        {kind: counts[kind] for kind in CheckpointKind},
        {kind: sizes_bytes[kind] for kind in CheckpointKind},
    )


def mirror_lag(commits: Sequence[CommitFacts], mirrored: CommitRef | None) -> MirrorLag:
    """The distance of a mirror whose newest whole commit is ``mirrored``; None: it has none."""
    behind = [each for each in commits if mirrored is None or each.ref > mirrored]
    created_s = [each.created_wall_s for each in behind if each.created_wall_s is not None]
    return MirrorLag(len(behind), min(created_s, default=None))
