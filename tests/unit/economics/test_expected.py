# SPDX-License-Identifier: Apache-2.0
"""The expected loss: simulated runs, the formulas of the literature, and figures that must not fall."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from swansong_tools.economics.expected import (
    DAY_S,
    InterruptionKind,
    Job,
    best_interval,
    covered_redone_s,
    expected,
    fit,
    margin,
    scaled,
)
from swansongd.core.pace import Figure, Pace
from swansongd.core.planner import Measurements

GB = 10**9


def job(
    *,
    size_bytes: int = 10 * GB,
    bandwidth: float = 1e9,
    save_s: float = 3.0,
    cost_s: float = 2.0,
    interval_s: float = 600.0,
    grace_s: float = 120.0,
    per_day: float = 4.0,
    silent_per_day: float = 1.0,
) -> Job:
    return Job(
        gpus=8,
        measured=Measurements(
            bandwidth_bytes_per_s=bandwidth, save_s=save_s, save_bytes=size_bytes, step_s=0.5
        ),
        save_cost_s=cost_s,
        interval_s=interval_s,
        stall_s=2 * cost_s,
        down_s={"cloud": 60.0, "boot": 20.0, "fetch": 10.0},
        kinds=(
            InterruptionKind(source="", per_day=silent_per_day),
            InterruptionKind(source="aws.spot", grace_s=grace_s, per_day=per_day),
        ),
        reserve_s=3.0,
    )


jobs = st.builds(
    job,
    size_bytes=st.integers(1, 1000 * GB),
    bandwidth=st.floats(1e7, 1e11),
    save_s=st.floats(0.0, 300.0),
    cost_s=st.floats(0.0, 60.0),
    interval_s=st.floats(60.0, 1e5),
    grace_s=st.floats(0.0, 300.0),
    per_day=st.floats(0.0, 50.0),
    silent_per_day=st.floats(0.0, 20.0),
)
factors = st.floats(0.01, 1.0)
NEVER_WORSE = 1e-6


# ---------------------------------------------------------------- simulation


def simulated_ettr(interval_s: float, cost_s: float, lag_s: float, lives_s: list[float]) -> float:
    """The ratio of VMs without notices that live this long: only committed training counts."""
    period_s, kept_s = interval_s + cost_s, 0.0
    for life_s in lives_s:
        captures = math.floor((life_s - lag_s - interval_s) / period_s) + 1
        kept_s += max(0, captures) * interval_s
    return kept_s / (sum(lives_s) + DOWN_S * len(lives_s))


DOWN_S = 90.0


def silent(up_s: float, cost_s: float) -> Job:
    """A job whose VMs get no notice, and live this long on average."""
    per_day = DAY_S / (up_s + DOWN_S)
    return replace(
        job(cost_s=cost_s),
        kinds=(InterruptionKind(source="", per_day=per_day),),
        down_s={"cloud": DOWN_S},
    )


@pytest.mark.parametrize(
    ("up_s", "cost_s"), [(4 * 3600.0, 1.0), (4 * 3600.0, 20.0), (3600.0, 10.0)]
)
def test_the_best_interval_loses_least_in_simulated_runs(up_s: float, cost_s: float) -> None:
    """No interval of a grid loses 4 % less, and the expected ratio is that of the simulation."""
    rng = random.Random(17)
    lives_s = [rng.expovariate(1 / up_s) for _ in range(20_000)]
    made = silent(up_s, cost_s)
    best_s = best_interval(made).best_s

    def lost(interval_s: float) -> float:
        return 1 - simulated_ettr(interval_s, cost_s, made.lag_s, lives_s)

    grid = [best_s * 1.25**power for power in range(-6, 7)]
    assert lost(best_s) <= 1.04 * min(lost(interval_s) for interval_s in grid)
    assert lost(best_s / 4) > 1.1 * lost(best_s)
    for interval_s in (best_s, 2 * best_s):
        found = expected(replace(made, interval_s=interval_s))
        assert found.total_s / DAY_S == pytest.approx(lost(interval_s), rel=0.06)


# ---------------------------------------------------------------- the formulas


def test_without_notices_the_ratio_is_that_of_meta() -> None:
    """E[ETTR] of arXiv 2410.21680, where a checkpoint is stored in no time; ``per_day`` is their N * r_f."""
    made = replace(
        silent(6 * 3600.0, 5.0), measured=Measurements(save_s=0.0, save_bytes=0), interval_s=500.0
    )
    lost_share = made.per_day / DAY_S * (DOWN_S + 500.0 / 2)
    of_meta = (1 - lost_share) / (1 + made.save_cost_s / 500.0)
    assert expected(made).ettr == pytest.approx(of_meta, abs=2e-4)


def test_the_interval_is_that_of_young_and_daly() -> None:
    """One silent interruption a day, 2 s for a checkpoint: the root of 2 * 2 * 86,400 is 588 s."""
    found = best_interval(job())
    assert found.mtbf_s == pytest.approx(DAY_S)
    assert found.young_s == pytest.approx(math.sqrt(2 * 2 * DAY_S))
    assert found.daly_s == pytest.approx(found.young_s - 2, rel=2e-3)
    assert found.best_s == found.daly_s


def test_an_interruption_with_a_usable_notice_costs_no_interval() -> None:
    """It repeats the lead of the last follow-up; a notice that is too short costs half an interval."""
    made = job(silent_per_day=0.0)
    notice = made.kinds[1]
    assert expected(made).redone_s == pytest.approx(4 * covered_redone_s(made, notice))
    assert covered_redone_s(made, notice) == pytest.approx(
        10 + 3 + 3 + 1.0 + 1.28 * 1.566, rel=0.02
    )
    short = replace(made, kinds=(replace(notice, grace_s=10.0),))
    assert expected(short).redone_s == pytest.approx(4 * (300 + 10 + 3 + 10))


def test_without_follow_ups_the_notice_is_repeated() -> None:
    """The VM trains until its end; a shutdown ends with its verdict."""
    made = replace(job(silent_per_day=0.0), follow_ups=False)
    assert covered_redone_s(made, made.kinds[1]) == 120.0
    assert covered_redone_s(job(), replace(made.kinds[1], grace_s=15.0)) == 15.0
    shutdown = InterruptionKind(source="logind", grace_s=19.0, per_day=1.0)
    assert covered_redone_s(made, shutdown) == pytest.approx(made.forecast.expected_s)


def test_a_background_limit_delays_commits() -> None:
    """10 GB at 100 MB/s: the state of a checkpoint is stored after 100 s, besides the save."""
    limited = replace(job(), background_bytes_per_s=1e8)
    assert (job().lag_s, limited.lag_s) == (pytest.approx(13.0), pytest.approx(103.0))
    assert limited.forecast == job().forecast
    assert replace(job(), background_bytes_per_s=1e12).lag_s == pytest.approx(13.0)
    slow = replace(job().measured, pace=Pace(commit_s=Figure(2.0)))
    assert replace(job(), measured=slow).lag_s == pytest.approx(15.0)


# ---------------------------------------------------------------- figures that must not fall


def total_s(made: Job) -> float:
    return expected(made).total_s


@settings(max_examples=60)
@given(made=jobs, factor=factors)
def test_a_better_figure_never_costs_time(made: Job, factor: float) -> None:
    """More bandwidth, faster saves, less state, longer notices, fewer interruptions, a faster fetch."""
    before_s = total_s(made)
    better = {
        "bandwidth": replace(made, measured=scaled(made.measured, send=factor)),
        "save": replace(made, measured=scaled(made.measured, save=factor)),
        "size": replace(made, measured=scaled(made.measured, save=factor, size=factor)),
        "cost": replace(made, save_cost_s=made.save_cost_s * factor),
        "down": replace(made, down_s={**made.down_s, "fetch": 10.0 * factor}),
        "limit": replace(made, background_bytes_per_s=None),
    }
    for name, changed in better.items():
        assert total_s(changed) <= before_s * (1 + NEVER_WORSE), name
    limited = replace(made, background_bytes_per_s=1e9 * factor)
    assert total_s(limited) >= before_s * (1 - NEVER_WORSE)


@settings(max_examples=60)
@given(made=jobs, factor=factors)
def test_a_longer_notice_never_shortens_the_margin(made: Job, factor: float) -> None:
    """The chance of a commit grows with the grace period, and with the bandwidth."""
    grace_s = made.kinds[1].grace_s
    whole, part = margin(made, "x", grace_s), margin(made, "x", grace_s * factor)
    assert whole.spare_s >= part.spare_s
    assert 0 <= part.chance <= whole.chance <= 1
    faster = margin(replace(made, measured=scaled(made.measured, send=factor)), "x", grace_s)
    assert faster.chance >= whole.chance - NEVER_WORSE
    assert faster.spare_s >= whole.spare_s - NEVER_WORSE


@settings(max_examples=60)
@given(made=jobs)
def test_the_changes_that_make_it_fit_do(made: Job) -> None:
    """With the named size or rate nothing is left over; a larger state does not fit."""
    grace_s = made.kinds[1].grace_s
    assume(margin(made, "x", grace_s).spare_s < -0.1)
    found = fit(made, grace_s)
    for factor, name in ((found.size_factor, "size"), (found.send_factor, "send")):
        if not factor or (made.measured.save_bytes or 0) * factor < 1000:
            continue
        changes = {"size": factor, "save": factor} if name == "size" else {"send": factor}
        spare_s = margin(
            replace(made, measured=scaled(made.measured, **changes)), "x", grace_s
        ).spare_s
        assert spare_s == pytest.approx(0.0, abs=0.01)


def test_learned_figures_scale_as_measured_ones() -> None:
    """A pace from a manifest changes with the size, the save and the bandwidth."""
    pace = Pace(save_s=Figure(4.0), urgent_save_s=Figure(2.0), send_s_per_byte=Figure(1e-9))
    made = replace(job(), measured=Measurements(save_s=4.0, save_bytes=10 * GB, pace=pace))
    assert made.forecast.save_s == pytest.approx(2.0)
    assert made.forecast.send_s == pytest.approx(10.0)
    half = replace(made, measured=scaled(made.measured, save=0.5, size=0.5, send=0.5)).forecast
    assert (half.save_s, half.send_s) == (pytest.approx(1.0), pytest.approx(2.5))
