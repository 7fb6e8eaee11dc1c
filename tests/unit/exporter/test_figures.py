# SPDX-License-Identifier: Apache-2.0
"""The figures of a run, from facts alone: counters that only rise."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest
from swansong_bucket.loss_records import LOST, Resumption
from swansong_bucket.model import CheckpointKind, CommitRef, Verdict
from swansong_bucket.runs.run import FarewellFacts, RecordedCommit
from swansong_tools.economics import loss as losses
from swansong_tools.exporter import figures
from swansong_tools.exporter.figures import MirrorLag

from testkit import lost_vms
from testkit.lost_vms import ENDING

NOW_S = 1_800_000_000.0


def farewell(
    evacuation_id: str,
    verdict: Verdict,
    at_s: float,
    *,
    generation: int = 1,
    deadline_s: float = 60,
    is_drill: bool = False,
) -> FarewellFacts:
    return FarewellFacts(
        generation=generation,
        evacuation_id=evacuation_id,
        is_drill=is_drill,
        verdict=verdict,
        written_wall_s=NOW_S + at_s,
        deadline_wall_s=NOW_S + deadline_s,
        training=None,
    )


FORETOLD = replace(farewell("e", Verdict.LOST, 1), is_foretold=True)
VOID = replace(farewell("e", Verdict.LOST, 9), is_foretold=True, is_void=True)


def settled(farewells: Iterable[FarewellFacts], *, at_s: float = 0.0) -> dict[str, int]:
    found = figures.evacuations(farewells, now_wall_s=NOW_S + at_s)
    return {
        verdict.value: count
        for (verdict, is_drill), count in found.settled.items()
        if count and not is_drill
    }


def test_the_latest_deadline_of_the_vms_holds_the_verdict_back() -> None:
    """The second VM has more time, and makes the evacuation SAFE: it was never LOST."""
    first = farewell("a", Verdict.LOST, 1, deadline_s=60)
    second = farewell("a", Verdict.LOST, 2, deadline_s=600)
    assert settled([first, second], at_s=300) == {}
    assert settled([first, second, farewell("a", Verdict.SAFE, 400)], at_s=400) == {"SAFE": 1}


@pytest.mark.parametrize("seed", range(50))
def test_no_count_of_evacuations_ever_falls(seed: int) -> None:
    """Verdicts change, deadlines move, notices join drills: a counter never falls, and needs no memory."""
    draw = random.Random(seed)
    farewells = [
        farewell(
            draw.choice("abc"),
            draw.choice(list(Verdict)),
            at_s,
            deadline_s=at_s + draw.choice([-100, 0, 30, 300, 3600]),
            is_drill=draw.random() < 0.3,
        )
        for at_s in sorted(draw.uniform(0, 3000) for _ in range(15))
    ]
    before: Mapping[tuple[Verdict, bool], int] = {}
    for moment in range(0, 9000, 20):
        # The upload of a farewell takes a few seconds.
        stored = [each for each in farewells if each.written_wall_s + 5 <= NOW_S + moment]
        found = figures.evacuations(stored, now_wall_s=NOW_S + moment).settled
        assert all(found[outcome] >= count for outcome, count in before.items()), moment
        before = found
    assert sum(before.values()) == len({each.evacuation_id for each in farewells})


@pytest.mark.fault("OX03")
@pytest.mark.parametrize(
    "forged",
    [
        farewell("a", Verdict.LOST, 2, deadline_s=1e9),
        farewell("a", Verdict.PARTIAL, 2, deadline_s=1e9),
        farewell("a", Verdict.LOST, 2, is_drill=True),
    ],
    ids=["far deadline", "another verdict", "drill"],
)
def test_no_forged_farewell_of_the_same_evacuation_holds_its_verdict_back(
    forged: FarewellFacts,
) -> None:
    """The evacuation counts half an hour after the forged farewell at the latest, and as no drill."""
    genuine = farewell("a", Verdict.LOST, 1)
    at_s = 3 + figures.DEADLINE_S_MAX + figures.SETTLED_AFTER_S
    for each in ([genuine, forged], [forged, genuine]):
        assert settled(each, at_s=at_s) == {forged.verdict.value: 1}


def test_the_newest_time_of_each_verdict() -> None:
    """A verdict that may improve is left out: an alert on LOST would fire without a reason."""
    found = figures.evacuations(
        [
            farewell("a", Verdict.SAFE, 1),
            farewell("b", Verdict.LOST, 5),
            farewell("c", Verdict.LOST, 7, deadline_s=300),
        ],
        now_wall_s=NOW_S + 200,
    )
    assert found.newest_wall_s == {
        (Verdict.SAFE, False): NOW_S + 1,
        (Verdict.LOST, False): NOW_S + 5,
    }


def test_drills_count_apart() -> None:
    """A drill during which a real notice arrives is a real evacuation, and was never counted as a drill."""
    drills = [
        farewell("a", Verdict.SAFE, 1, is_drill=True),
        farewell("b", Verdict.SAFE, 1, is_drill=True),
    ]
    assert not any(figures.evacuations(drills, now_wall_s=NOW_S + 10).settled.values())
    found = figures.evacuations(
        [*drills, farewell("b", Verdict.SAFE, 20)], now_wall_s=NOW_S + 200
    ).settled
    assert (found[Verdict.SAFE, True], found[Verdict.SAFE, False]) == (1, 1)


# ---------------------------------------------------------------- interruptions


def resumed(number: int, *, earlier: int | None, at_s: float, start: int) -> Resumption:
    """A resume whose first step ended then, after an ending 100 s before."""
    end = replace(
        ENDING, generation=earlier or 0, step=start + 10, wall_s=at_s - 100, is_estimated=False,
        step_s=1.0, ranks=4, saves_s=0.0, stall_s=2.0,
    )  # fmt: skip
    known = None if earlier is None else end
    return lost_vms.resumed(number, at_s, start=start, ranks=4, earlier=known)


def run_of(count: int) -> dict[int, Resumption]:
    return {
        number: resumed(
            number,
            earlier=number - 1 if number > 1 else None,
            at_s=NOW_S + 1000 * number,
            start=500 * number,
        )
        for number in range(1, count + 1)
    }


def lost(resumptions: dict[int, Resumption]) -> tuple[int, dict[str, float]]:
    found = list(figures.recorded_interruptions(resumptions, lambda _: None))
    return len(found), losses.lost_gpu_s(found)


def test_each_recorded_resume_is_an_interruption() -> None:
    """The parts are GPU seconds: 10 steps redone, 70 s for a VM, 10 s to boot, and so on."""
    count, parts = lost(run_of(3))
    assert count == 2
    gpu_s = {name: seconds / 8 for name, seconds in parts.items()}
    assert gpu_s == pytest.approx(
        {"stall": 2, "redone": 10, "cloud": 70, "boot": 10, "start": 5, "fetch": 5, "load": 5}
        | {"warm_up": 5}
    )


@pytest.mark.fault("OX01")
def test_a_new_resumption_changes_no_older_interruption() -> None:
    """Each part of the loss only rises, also over a gap in the records."""
    records = run_of(12)
    del records[5]  # not recorded: the next resumption has its end all the same
    before = (0, dict.fromkeys(LOST, 0.0))
    for number in range(1, 13):
        found = lost({each: record for each, record in records.items() if each <= number})
        assert found[0] >= before[0]
        assert all(found[1][part] >= before[1][part] - 1e-6 for part in LOST)
        before = found
    assert before[0] == 10  # 12 VMs, and 4 to 5 is not recorded


def test_a_resumption_cannot_follow_itself() -> None:
    """A forged record that names its own or a later generation as the earlier one counts nothing."""
    forged = {
        3: resumed(3, earlier=3, at_s=NOW_S, start=5),
        4: resumed(4, earlier=9, at_s=NOW_S, start=5),
    }
    assert lost(forged) == (0, dict.fromkeys(LOST, 0.0))


# ---------------------------------------------------------------- mirror


def commit(step: int, created_s: float | None) -> RecordedCommit:
    return RecordedCommit(
        ref=CommitRef(1, step),
        kind=CheckpointKind.PERIODIC,
        created_wall_s=created_s,
        size_bytes=1,
        nodes=1,
        is_whole=True,
    )


@pytest.mark.parametrize(
    ("mirrored", "lag"),
    [
        (30, MirrorLag(0, None)),
        (20, MirrorLag(1, 3.0)),
        (10, MirrorLag(2, 3.0)),
        (None, MirrorLag(3, 1.0)),
    ],
)
def test_the_lag_counts_commits_after_the_newest_mirrored_one(
    mirrored: int | None, lag: MirrorLag
) -> None:
    """An older commit that the mirror lacks is no lag; a commit without a time has no age."""
    commits = [commit(30, 3.0), commit(20, None), commit(10, 1.0)]
    ref = None if mirrored is None else CommitRef(1, mirrored)
    assert figures.mirror_lag(commits, ref) == lag


@pytest.mark.parametrize(
    ("farewells", "counts"),
    [
        ([FORETOLD], {"LOST": 1}),
        ([FORETOLD, VOID], {}),
        ([FORETOLD, farewell("e", Verdict.LOST, 5), VOID], {"LOST": 1}),
        ([FORETOLD, farewell("e", Verdict.SAFE, 5)], {"SAFE": 1}),
    ],
    ids=["died", "withdrawn", "LOST", "SAFE"],
)
def test_a_notice_that_was_withdrawn_before_any_verdict_does_not_count(
    farewells: list[FarewellFacts], counts: dict[str, int]
) -> None:
    """A VM that dies before its verdict counts as it was foretold; no forged farewell hides a verdict."""
    assert settled(farewells, at_s=1e4) == counts
