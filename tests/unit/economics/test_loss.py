# SPDX-License-Identifier: Apache-2.0
"""The preemption loss, against histories whose every second is known."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swansong_bucket.loss_records import LOST, PARTS, GenerationEnd, Life, lost_gpu_s
from swansong_tools.economics import loss as losses
from swansong_tools.economics.loss import WINDOWS_MAX, Loss, loss

from testkit import lost_vms

BEGUN_S = 1_800_000_000.0
durations = st.floats(0.0, 5000.0)


@dataclass(frozen=True)
class Stay:
    """One VM as it was: the parts of its start, and its training."""

    down_s: tuple[float, ...]
    steps: int
    step_s: float
    back: int
    """Number of steps that it does again."""
    saves_s: float
    stall_s: float


stays = st.builds(
    Stay,
    down_s=st.tuples(*([durations] * len(PARTS))),
    steps=st.integers(0, 300),
    step_s=st.floats(0.01, 50.0),
    back=st.integers(0, 400),
    saves_s=durations,
    stall_s=durations,
)


def told(history: list[Stay]) -> list[Life]:
    """The records that these VMs leave behind, by perfect clocks."""
    lives: list[Life] = []
    now_s, step = BEGUN_S, 0
    for number, stay in enumerate(history, start=1):
        now_s += sum(stay.down_s)
        start = max(0, step - stay.back)
        resumption = lost_vms.resumed(
            number,
            now_s,
            start=start,
            parts_s=stay.down_s[1:],
            nodes=1,
            restored=None,
            earlier=lives[-1].ending if lives else None,
        )
        step = start + 1 + stay.steps
        now_s += stay.steps * stay.step_s + stay.saves_s + stay.stall_s
        ending = replace(
            lost_vms.ENDING,
            generation=number,
            step=step,
            wall_s=now_s,
            is_estimated=False,
            step_s=stay.step_s,
            saves_s=stay.saves_s,
            stall_s=stay.stall_s,
        )
        lives.append(
            Life(
                generation=number,
                claimed_wall_s=None,
                resumption=resumption,
                start_step=start,
                ending=ending,
            )
        )
    return lives


def kept_s(history: list[Stay], lives: list[Life]) -> float:
    """Training time of the steps that no later VM has done again, counted step by step."""
    total_s = 0.0
    for place, (stay, life) in enumerate(zip(history, lives, strict=True)):
        assert life.resumption is not None
        later = min((each.start_step for each in lives[place + 1 :]), default=life.ending.step)
        first = life.resumption.first_step
        total_s += max(0, min(later, life.ending.step) - first) * stay.step_s
    return total_s


def of(lives: list[Life]) -> Loss:
    found = loss(lives)
    assert found is not None
    return found


@given(history=st.lists(stays, min_size=1, max_size=8))
def test_each_second_belongs_to_one_part(history: list[Stay]) -> None:
    """The parts sum to the wall time, and each has exactly its own time, whatever happened."""
    lives = told(history)
    found = of(lives)
    # The first VM's boot is before the start of the run's first daemon.
    begun_s = BEGUN_S + sum(history[0].down_s[:2])
    assert found.begun_wall_s == pytest.approx(begun_s)
    assert found.wall_s == pytest.approx(lives[-1].ending.wall_s - begun_s)
    assert found.productive_s == pytest.approx(kept_s(history, lives), abs=1e-3)
    for place, part in enumerate(PARTS):
        true_s = sum(stay.down_s[place] for stay in (history if place > 1 else history[1:]))
        assert found.parts_s[part] == pytest.approx(true_s, abs=1e-3)
    assert found.parts_s["stall"] == pytest.approx(sum(s.stall_s for s in history), abs=1e-3)
    total_s = found.productive_s + sum(found.parts_s.values())
    assert total_s == pytest.approx(found.wall_s, rel=1e-6, abs=1e-3)
    assert sum(found.goodput_s.values()) == pytest.approx(sum(found.parts_s.values()), abs=1e-3)
    assert found.gpu_s == pytest.approx(8 * found.wall_s)
    assert len(found.windows) <= WINDOWS_MAX
    assert sum(each.length_s for each in found.windows) == pytest.approx(found.wall_s)
    windows_s = sum(each.productive_s for each in found.windows)
    assert windows_s == pytest.approx(found.productive_s, rel=1e-6, abs=1e-2)


instants = st.floats(0.0, 4_102_444_800.0)
forged = st.builds(
    Life,
    generation=st.integers(1, 10),
    claimed_wall_s=st.none() | instants,
    start_step=st.integers(0, 10**12 - 1),
    resumption=st.none()
    | st.builds(
        replace,
        st.just(lost_vms.RESUMPTION),
        generation=st.integers(1, 10),
        vm=st.sampled_from(["a", "b"]),
        ranks=st.integers(1, 10**5),
        nodes=st.integers(1, 3),
        booted_wall_s=instants,
        daemon_wall_s=instants,
        bytes_fetched=st.integers(0, 2**60),
        bytes_linked=st.integers(0, 2**60),
        asked_wall_s=st.none() | instants,
        answered_wall_s=st.none() | instants,
        started_wall_s=instants,
        first_step_wall_s=instants,
        start_step=st.integers(0, 10**12 - 1),
        first_step=st.integers(0, 10**12 - 1),
    ),
    ending=st.builds(
        GenerationEnd,
        generation=st.integers(1, 10),
        step=st.integers(0, 10**12 - 1),
        wall_s=instants,
        is_estimated=st.booleans(),
        step_s=st.none() | st.floats(0.0, 1e9),
        ranks=st.none() | st.integers(1, 10**5),
        saves_s=st.none() | st.floats(0.0, 1e9),
        stall_s=st.none() | st.floats(0.0, 1e9),
    ),
)


@pytest.mark.fault("S25")
@given(lives=st.lists(forged, max_size=6))
def test_forged_records_are_a_partition_as_well(lives: list[Life]) -> None:
    """Any clocks, steps and gaps: no part is negative, and the parts sum to the wall time."""
    found = loss(lives)
    if found is None:
        assert not lives
        return
    parts = [found.productive_s, *found.parts_s.values()]
    assert all(part >= -1e-3 for part in parts)
    assert sum(parts) == pytest.approx(found.wall_s, rel=0.01, abs=1e-2)
    assert len(found.windows) <= WINDOWS_MAX
    assert all(0.0 <= each.ettr <= 1.0 for each in found.windows)
    for each in found.interruptions:
        known = sum(seconds or 0.0 for seconds in each.parts_s.values())
        assert known == pytest.approx(each.down_s, rel=1e-6, abs=1e-2)


@given(
    history=st.lists(stays, min_size=1, max_size=5), ranks=st.lists(st.integers(1, 64), min_size=5)
)
def test_each_gpu_counts_from_when_the_number_changes(
    history: list[Stay], ranks: list[int]
) -> None:
    """The parts sum to all GPU seconds, and an interruption's stall and redone are of the earlier GPUs."""
    lives = told(history)
    sized = []
    for life, own in zip(lives, ranks, strict=False):
        assert life.resumption is not None
        sized.append(replace(life, resumption=replace(life.resumption, ranks=own)))
    found = of(sized)
    ends_s = [found.begun_wall_s, *(each.ended_wall_s for each in found.interruptions)]
    lengths_s = (end - begin for begin, end in pairwise([*ends_s, found.until_wall_s]))
    total = sum(own * length_s for own, length_s in zip(ranks, lengths_s, strict=False))
    assert found.gpu_s == pytest.approx(total, rel=1e-6, abs=1e-2)
    saves = sum(own * stay.saves_s for own, stay in zip(ranks, history, strict=False))
    assert found.parts_gpu_s["saves"] == pytest.approx(saves, abs=1e-2)
    for each, before in zip(found.interruptions, ranks, strict=False):
        assert each.lost_parts_gpu_s["stall"] == pytest.approx((each.stall_s or 0.0) * before)


def test_lost_steps_are_the_last_ones_of_their_vm() -> None:
    """Two hours of training, of which the second is lost: none of it counts where the last hour begins."""
    first = Stay((0.0,) * 6, steps=7200, step_s=1.0, back=0, saves_s=0.0, stall_s=0.0)
    second = replace(first, steps=1800, back=3600)
    found = of(told([first, second]))
    assert found.productive_s == pytest.approx(3600 + 1800, abs=2)
    # Half an hour of lost steps, then half an hour of steps that count.
    assert found.last_hour_productive_s == pytest.approx(1800, abs=2)
    assert found.ettr_last_hour == pytest.approx(0.5, abs=0.001)
    halves = [each.productive_s for each in found.windows]
    at_s = [each.from_wall_s - found.begun_wall_s for each in found.windows]
    lost_s = sum(
        productive_s
        for start_s, productive_s in zip(at_s, halves, strict=True)
        if 3600 <= start_s < 7200
    )
    assert lost_s == pytest.approx(0.0, abs=2), "the windows of the second hour"


def test_a_missing_record_is_marked() -> None:
    """Without the record of a resume, its time down has no parts, and nothing is invented."""
    stay = Stay((5.0,) * 6, steps=10, step_s=1.0, back=3, saves_s=0.0, stall_s=0.0)
    first, second = told([stay, stay])
    claimed_s = first.ending.wall_s + 10.0
    (found,) = of([first, replace(second, resumption=None, claimed_wall_s=claimed_s)]).interruptions
    assert found.is_estimated
    assert found.parts_s == {"unknown": pytest.approx(10.0)}
    assert (found.bytes_fetched, found.redone_s) == (None, pytest.approx(3.0))


def test_a_question_that_was_not_seen_is_part_of_the_start() -> None:
    """A trainer that restores without the daemon: its fetch and load count as its start."""
    stay = Stay((5.0,) * 6, steps=10, step_s=1.0, back=0, saves_s=0.0, stall_s=0.0)
    first, second = told([stay, stay])
    assert second.resumption is not None
    silent = replace(second.resumption, asked_wall_s=None)
    (found,) = of([first, replace(second, resumption=silent)]).interruptions
    assert found.parts_s == pytest.approx(
        {"cloud": 5.0, "boot": 5.0, "start": 15.0, "fetch": None, "load": None, "warm_up": 5.0}
    )


@pytest.mark.fault("N11")
def test_a_clock_that_is_behind_is_marked() -> None:
    """The new VM's first step is before the old VM's last one: nothing is negative."""
    stay = Stay((5.0,) * 6, steps=10, step_s=1.0, back=0, saves_s=0.0, stall_s=0.0)
    first, second = told([stay, stay])
    assert second.resumption is not None
    early_s = first.ending.wall_s - 4.0
    behind = replace(second.resumption, first_step_wall_s=early_s, daemon_wall_s=early_s - 20.0)
    (found,) = of([first, replace(second, resumption=behind)]).interruptions
    assert found.is_skewed
    assert found.down_s == 0.0
    (sound,) = of([first, second]).interruptions
    assert not sound.is_skewed


def test_one_resumption_has_the_loss_of_its_interruption() -> None:
    """The metrics of a daemon agree with the loss of the run: two VMs, and steps of the first are redone."""
    first = Stay(
        down_s=(0.0, 1.0, 2.0, 3.0, 4.0, 5.0),
        steps=20,
        back=0,
        step_s=2.0,
        saves_s=1.0,
        stall_s=3.0,
    )
    second = Stay(
        down_s=(30.0, 20.0, 4.0, 3.0, 2.0, 1.0),
        steps=5,
        back=4,
        step_s=2.0,
        saves_s=0.0,
        stall_s=0.0,
    )
    lives = told([first, second])
    (known,) = of(lives).interruptions
    assert lives[1].resumption is not None
    lost = lost_gpu_s(lives[1].resumption)
    assert tuple(lost) == LOST
    assert lost == pytest.approx(
        {"stall": 24.0, "redone": 64.0, "cloud": 240.0, "boot": 160.0, "start": 32.0, "fetch": 24.0,
         "load": 16.0, "warm_up": 8.0}
    )  # fmt: skip
    assert sum(lost.values()) == pytest.approx(known.lost_s * known.ranks)
    assert lives[0].resumption is not None
    assert set(lost_gpu_s(lives[0].resumption).values()) == {0.0}, "nothing was lost before"


def test_a_run_of_no_measurable_length_has_one_window() -> None:
    """Forged records can lie so close together that their distance in windows is 0."""
    (window,) = losses._windows([], 0.0, 5e-324)
    assert window.productive_s == 0.0
