# SPDX-License-Identifier: Apache-2.0
"""Proposals: each saving is a difference of expected losses, and the largest comes first."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swansong_tools.economics.advice import (
    LONG_NOTICE_S,
    SAVED_GPU_S_MIN,
    Proposal,
    Setup,
    advise,
    proposals,
)
from swansong_tools.economics.bill import Upkeep, bill
from swansong_tools.economics.cost import Prices
from swansong_tools.economics.expected import DAY_S, InterruptionKind, Job, best_interval, expected
from swansong_tools.economics.poisson import poisson_interval
from swansongd.core.pace import Figure, Pace

from tests.unit.economics.test_expected import job, jobs

SETUP = Setup()
USED = Upkeep(size_bytes=10**10, stored_bytes=2**40, writes_per_save=10, reads_per_restore=100)


def named(made: Job, setup: Setup = SETUP) -> dict[str, Proposal]:
    return {proposal.name: proposal for proposal in proposals(made, setup)}


@settings(max_examples=40)
@given(made=jobs, follow_ups=st.booleans(), prefetch=st.booleans())
def test_proposals_are_ranked_by_their_saving(
    made: Job, *, follow_ups: bool, prefetch: bool
) -> None:
    """Each one saves GPU time: the difference of the expected losses, of all GPUs."""
    made = replace(made, follow_ups=follow_ups, background_bytes_per_s=5e8)
    found = proposals(made, Setup(ranks=8, busiest_share=1.0, has_prefetch=prefetch))
    savings = [each.saved_gpu_s for each in found]
    assert savings == sorted(savings, reverse=True)
    assert all(saved >= SAVED_GPU_S_MIN for saved in savings)
    before_s = expected(made).total_s
    for each in found:
        assert each.saved_gpu_s == pytest.approx((before_s - each.after.total_s) * made.gpus)
        assert each.change
        assert each.formula


def test_the_best_interval_is_no_proposal() -> None:
    """Only another interval is."""
    made = job(interval_s=6000.0)
    assert named(made)["interval"].change.endswith("run.checkpoint_interval_s = 587")
    assert '"auto"' in named(made, Setup(configured_interval_s=6000.0))["interval"].change
    best = replace(made, interval_s=best_interval(made).best_s)
    assert "interval" not in named(best)


def test_ranks_that_save_together_are_faster() -> None:
    """One of eight ranks saves all: with even shares, save and stall take an eighth."""
    made = job()
    found = named(made, Setup(ranks=8, busiest_share=1.0))["even_saves"]
    assert found.after.stall_s == pytest.approx(expected(made).stall_s / 8)
    assert "even_saves" not in named(made, Setup(ranks=8, busiest_share=0.13))
    assert "even_saves" not in named(made, Setup(ranks=8))


def test_a_longer_notice_on_gcp_covers_what_the_short_one_does_not() -> None:
    """10 GB at 0.3 GB/s need 33 s and more: a notice of 25 s loses half an interval each time."""
    gcp = InterruptionKind(source="gcp.preempted", grace_s=25.0, per_day=4.0)
    made = replace(job(bandwidth=3e8), kinds=(gcp,))
    found = named(made)["notice_120"]
    lost_s = 300 + made.lag_s + 25
    assert expected(made).redone_s == pytest.approx(4 * lost_s)
    assert found.after.redone_s < 4 * 60
    assert "notice_120" not in named(replace(made, kinds=(replace(gcp, source="aws.spot"),)))
    assert "notice_120" not in named(replace(made, kinds=(replace(gcp, grace_s=LONG_NOTICE_S),)))


def test_a_shutdown_can_be_given_more_time() -> None:
    """The key names the time that nine of ten checkpoints need, rounded up."""
    made = replace(job(), kinds=(InterruptionKind(source="logind", grace_s=14.0, per_day=4.0),))
    found = named(made)["grace_logind"]
    assert found.change.startswith("deadline.shutdown_delay_s = 20,")
    assert found.after.redone_s < expected(made).redone_s / 5


def test_a_vm_that_is_ordered_at_the_notice_comes_sooner() -> None:
    """80 s without a VM and in its boot: four of five interruptions have a notice of 30 s."""
    made = job(grace_s=30.0)
    found = named(made)["replacement"]
    assert found.saved_gpu_s == pytest.approx(8 * 4 * 30, rel=0.01)
    longer = named(job(grace_s=120.0))["replacement"]
    assert longer.saved_gpu_s == pytest.approx(8 * 4 * 80, rel=0.01)
    assert longer.after.down_s == pytest.approx(5 * 90 - 4 * 80)
    assert "replacement" not in named(made, Setup(orders_vm=True))


def test_settings_that_cost_time_are_proposed() -> None:
    """Follow-ups, prefetch, the background limit and a long reserve."""
    pace = Pace(commit_s=Figure(0.2))
    made = replace(
        job(),
        follow_ups=False,
        background_bytes_per_s=1e8,
        measured=replace(job().measured, pace=pace),
        down_s={"start": 20.0, "fetch": 30.0},
    )
    found = named(made, Setup(has_prefetch=False))
    assert found["follow_ups"].saved_gpu_s > 0
    assert found["no_background_limit"].saved_gpu_s == pytest.approx(8 * 90, rel=0.01)
    assert found["prefetch"].after.down_s == pytest.approx(5 * 30)
    assert "reserve" not in found  # without follow-ups the reserve costs nothing
    shorter = named(replace(made, follow_ups=True))["reserve"]
    assert shorter.change == "deadline.reserve_s = 1"
    assert shorter.saved_gpu_s == pytest.approx(8 * 4 * 2, rel=0.05)


def test_a_run_without_interruptions_loses_only_its_saves() -> None:
    """Nothing can be saved on interruptions that do not happen."""
    made = replace(job(), kinds=())
    assert expected(made).redone_s == expected(made).down_s == 0
    assert set(named(made)) <= {"interval", "smaller_state"}


def test_margins_are_in_the_order_of_their_grace() -> None:
    """The shortest notice comes first."""
    found = advise(job(), SETUP, (("b", 120.0), ("a", 25.0)))
    assert [each.source for each in found.margins] == ["a", "b"]
    assert found.margins[0].needed_s == found.margins[1].needed_s


# Exact intervals of the Poisson mean, from Garwood's table.
@pytest.mark.parametrize(
    ("count", "low", "high"),
    [(0, 0.0, 3.689), (1, 0.0253, 5.572), (5, 1.623, 11.668), (50, 37.11, 65.92)],
)
def test_the_interval_of_a_rate_is_exact(count: int, low: float, high: float) -> None:
    """95 % of the Poisson distribution."""
    assert poisson_interval(count) == (
        pytest.approx(low, abs=5e-3),
        pytest.approx(high, abs=5e-3),
    )


def test_the_bill_has_the_amounts_of_a_day() -> None:
    """8 GPUs at 1.80 and 3.60 an hour; 1 TiB at 0.02 a GiB and month; 10,000 writes."""
    made = job()
    found = expected(made)
    prices = Prices(currency="EUR", spot=1.8, on_demand=3.6, gb_month=0.02, writes=0.005, reads=0.0)
    day = bill(made, USED, prices, steps=10**6)
    unpaid_s = 5 * 60
    assert day.spot == pytest.approx(8 * (DAY_S - unpaid_s) * 1.8 / 3600)
    assert day.on_demand == pytest.approx(8 * DAY_S * found.ettr * 3.6 / 3600)
    assert day.storage == pytest.approx(1024 * 0.02 * 12 / 365.25)
    assert day.stall == pytest.approx(8 * found.saves_s * 1.8 / 3600)
    assert day.requests == pytest.approx(day.writes / 1000 * 0.005)
    assert day.writes == pytest.approx((DAY_S - found.down_s - found.stall_s) / 60.2 + 2 * 4 * 10)
    assert day.reads == 500
    assert day.interruptions_gpu_s == pytest.approx(
        8 * (found.redone_s + found.stall_s + found.down_s - unpaid_s)
    )
    assert day.saved == pytest.approx(day.on_demand - day.spot - day.storage - day.requests)
    assert day.days == pytest.approx(10**6 * 0.5 / DAY_S / found.ettr)
    assert bill(made, USED, Prices()).saved is None
    several = bill(replace(made, nodes=2), USED, prices)
    assert several.spot == pytest.approx(8 * (DAY_S - unpaid_s / 2) * 1.8 / 3600)


def test_only_money_that_the_bill_saves_is_shown() -> None:
    """Less time without a VM saves GPU seconds and no money; nor does a boot that is paid for twice."""
    made = replace(job(cost_s=0.0), down_s={"cloud": 3600.0, "boot": 0.0})
    day = bill(made, USED, Prices(spot=1.8))
    for down_s in ({"cloud": 3600.0, "boot": 0.0}, {"cloud": 0.0, "boot": 60.0}):
        own = replace(made, down_s=down_s)
        own_day = bill(own, USED, Prices(spot=1.8))
        sooner = named(own)["replacement"]
        assert sooner.saved_gpu_s > 8 * 4 * 59
        assert own_day.saved_by(sooner.job) == pytest.approx(0.0, abs=1e-9)
    assert day.spot is not None
    productive = 8 * DAY_S * expected(made).ettr * 1.8 / 3600
    assert day.lost_gpus == pytest.approx(day.spot - productive)


def test_the_money_of_a_proposal_is_the_difference_of_two_bills() -> None:
    """Stall, interruptions, storage and requests of the row sums; half the state stores half the bytes."""
    made = job()
    prices = Prices(spot=1.8, gb_month=0.02, writes=0.005, reads=0.0004)
    day, smaller = bill(made, USED, prices), named(made)["smaller_state"].job
    after = day.of(smaller)
    assert after.storage == pytest.approx((day.storage or 0.0) / 2)
    rows = [
        sum(filter(None, (b.stall, b.storage, b.requests, b.interruptions))) for b in (day, after)
    ]
    assert day.saved_by(smaller) == pytest.approx(rows[0] - rows[1])
    assert bill(made, USED, Prices()).saved_by(smaller) is None
