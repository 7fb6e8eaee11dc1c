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

from swansong_bucket.loss_records import GenerationEnd, Life, Resumption
from swansong_bucket.model import CheckpointKind, CommitRef, Verdict
from swansong_bucket.runs.run import FarewellFacts, RecordedCommit

from swansong_tools.economics import loss as losses
from swansong_tools.economics.loss import Interruption, Loss

SETTLED_AFTER_S = 120.0
"""An evacuation counts this long after its end."""
LATE_S = 60.0
"""A farewell that was written later than this after the end changes nothing.  The rest of
:data:`SETTLED_AFTER_S` is for its upload, and for clocks that differ."""
DEADLINE_S_MAX = 1800.0
"""A deadline holds a verdict back for this long after its farewell at most: farewells are not signed."""
_MERIT = {
    verdict: merit
    for merit, verdict in enumerate(
        (Verdict.NO_TRAINING, Verdict.LOST, Verdict.PARTIAL, Verdict.SAFE)
    )
}


@dataclass(frozen=True, slots=True)
class MirrorLag:
    """The distance of the mirror to the store."""

    commits: int
    """Whole commits that are newer than the newest one in the mirror."""
    since_wall_s: float | None
    """When the oldest of these was created; None if there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLosses:
    """The figures of a run that change only with its objects."""

    interruptions: Mapping[bool, int]
    """By whether the run resumed on the same VM."""
    lost_gpu_s: Mapping[str, float]
    """GPU seconds of these interruptions, by part."""
    loss: Loss | None
    """The totals of ``swansong loss``, without the single interruptions."""
    costs: Mapping[tuple[str, str], float | None]
    """By part and currency; empty without prices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """The figures of one run at one moment."""

    run: str
    read_wall_s: float
    generation: int
    """The highest claimed generation; 0 without a claim."""
    newest: RecordedCommit | None
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
    evacuations: EvacuationCounts
    losses: RunLosses
    mirror: MirrorLag | None = None
    """None: no mirror is configured, or it was not read yet."""

    @property
    def is_finished(self) -> bool:
        return self.newest is not None and self.newest.ref.is_final


# ---------------------------------------------------------------- evacuations


@dataclass(frozen=True, slots=True)
class EvacuationCounts:
    """The evacuations of a run, by verdict, and by whether they were drills."""

    settled: Mapping[tuple[Verdict, bool], int]
    """Number of evacuations whose verdict is final."""
    newest_wall_s: Mapping[tuple[Verdict, bool], float]
    """Time of the newest of these evacuations."""


def evacuations(farewells: Iterable[FarewellFacts], *, now_wall_s: float) -> EvacuationCounts:
    """Count each evacuation once, by its final verdict: one evacuation leaves several farewells.

    The result depends on the farewells and the time alone, so a restart of the exporter does not change it.
    An evacuation that counts never changes its verdict, so no count falls.
    """
    found: defaultdict[tuple[int, str], list[FarewellFacts]] = defaultdict(list)
    for each in farewells:
        found[each.generation, each.evacuation_id].append(each)
    settled = dict.fromkeys(product(Verdict, (False, True)), 0)
    newest_wall_s: dict[tuple[Verdict, bool], float] = {}
    for group in found.values():
        outcome = _outcome(group, now_wall_s)
        if outcome is None:
            continue
        verdict, is_drill, written_wall_s = outcome
        settled[verdict, is_drill] += 1
        newest_wall_s[verdict, is_drill] = max(
            newest_wall_s.get((verdict, is_drill), 0.0), written_wall_s
        )
    return EvacuationCounts(settled, newest_wall_s)


def _outcome(
    farewells: Iterable[FarewellFacts], now_wall_s: float
) -> tuple[Verdict, bool, float] | None:
    """Final verdict of one evacuation, whether it was a drill, and the time of the newest farewell.

    None while the verdict may still change, and if the notice was withdrawn before any verdict.

    The best verdict is the final one: the daemon may write LOST or PARTIAL before a better verdict.
    A farewell moves the end to its deadline, but never to an earlier time: several VMs with different
    deadlines take part in one evacuation.  A farewell after the end is ignored, because the evacuation may
    have been counted before.

    SAFE is final at once, except in a drill: a notice that arrives during the drill makes it real.
    """
    ordered = sorted(farewells, key=lambda each: each.written_wall_s)
    end_wall_s = _until_wall_s(ordered[0])
    counted: list[FarewellFacts] = []
    for each in ordered:
        if each.written_wall_s > end_wall_s + LATE_S:
            break
        end_wall_s = max(end_wall_s, _until_wall_s(each))
        counted.append(each)
    if all(each.is_foretold for each in counted) and any(each.is_void for each in counted):
        return None
    verdict = max((each.verdict for each in counted), key=_MERIT.__getitem__)
    is_drill = all(each.is_drill for each in counted)
    is_final = verdict is Verdict.SAFE and not is_drill
    if not is_final and now_wall_s <= end_wall_s + SETTLED_AFTER_S:
        return None
    return verdict, is_drill, counted[-1].written_wall_s


def _until_wall_s(farewell: FarewellFacts) -> float:
    """The end of the evacuation as this farewell has it."""
    written_wall_s = farewell.written_wall_s
    deadline_wall_s = farewell.deadline_wall_s or 0.0
    return min(max(written_wall_s, deadline_wall_s), written_wall_s + DEADLINE_S_MAX)


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


def _unrecorded(ending: GenerationEnd, claimed_wall_s: float | None) -> Life:
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
    ending = GenerationEnd(
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


# ---------------------------------------------------------------- commits


def by_kind(
    commits: Sequence[RecordedCommit],
) -> tuple[dict[CheckpointKind, int], dict[CheckpointKind, int]]:
    """Number and bytes of the commits of each kind."""
    counts = Counter(each.kind for each in commits)
    sizes_bytes: Counter[CheckpointKind | None] = Counter()
    for each in commits:
        sizes_bytes[each.kind] += each.size_bytes
    return (
        {kind: counts[kind] for kind in CheckpointKind},
        {kind: sizes_bytes[kind] for kind in CheckpointKind},
    )


def mirror_lag(commits: Sequence[RecordedCommit], mirrored: CommitRef | None) -> MirrorLag:
    """The distance of a mirror whose newest whole commit is ``mirrored``; None: it has none."""
    behind = [each for each in commits if mirrored is None or each.ref > mirrored]
    created_s = [each.created_wall_s for each in behind if each.created_wall_s is not None]
    return MirrorLag(len(behind), min(created_s, default=None))
