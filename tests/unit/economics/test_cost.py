# SPDX-License-Identifier: Apache-2.0
"""The cost of a run, against amounts that a person can compute."""

from __future__ import annotations

from dataclasses import replace

import pytest
from swansong_tools.economics.cost import (
    LIST_PRICES,
    Prices,
    costs,
    of_requests,
    of_storage,
    saved,
    with_list_prices,
)
from swansong_tools.economics.expected import observed_gpu_s

from tests.unit.economics.test_loss import Stay, of, told

PRICES = Prices(currency="EUR", on_demand=3.6, spot=1.8, gb_month=0.02, writes=0.005, reads=0.0004)
STAY = Stay((70.0, 30.0, 10.0, 10.0, 5.0, 5.0), 1000, 1.0, 40, 20.0, 10.0)


def test_the_cost_of_a_run_is_its_paid_gpu_time() -> None:
    """8 GPUs at 1.80 an hour cost 0.004 a second; the cloud's pause costs nothing."""
    lives = told([STAY, STAY])
    loss = of(lives)
    (interruption,) = loss.interruptions
    assert costs(loss, PRICES) == pytest.approx(
        {
            "spot": (loss.wall_s - 70) * 0.004,
            "interruptions": (interruption.lost_s - 70) * 0.004,
            "saves": 40 * 0.004,
            "on_demand": loss.productive_s * 0.008,
        }
    )


def test_a_machine_that_stays_is_paid_for() -> None:
    """A container starts again on a host that ran all along: the pause is paid for."""
    first, second = told([STAY, STAY])
    assert second.resumption is not None
    early = replace(second.resumption, booted_wall_s=first.ending.wall_s - 1000)
    loss = of([first, replace(second, resumption=early)])
    assert costs(loss, PRICES)["spot"] == pytest.approx(loss.wall_s * 0.004)


def test_the_other_vms_of_a_job_are_paid_for() -> None:
    """While one of four VMs is replaced, three exist."""
    first, second = told([STAY, STAY])
    assert second.resumption is not None
    loss = of([first, replace(second, resumption=replace(second.resumption, nodes=4))])
    assert costs(loss, PRICES)["spot"] == pytest.approx((loss.wall_s - 70 / 4) * 0.004)


def test_costs_count_each_gpu_when_the_number_changes() -> None:
    """8 GPUs, then 2: saves, the on-demand amount and the observed loss are not of an average of GPUs."""
    first, second = told([STAY, replace(STAY, steps=3000)])
    assert second.resumption is not None
    loss = of([first, replace(second, resumption=replace(second.resumption, ranks=2))])
    found = costs(loss, PRICES)
    assert found["saves"] == pytest.approx((8 + 2) * 20 * 0.0005)
    # The second VM does 40 steps of a second again, and its first step belongs to *down*.
    assert found["on_demand"] == pytest.approx((8 * (1000 - 40) + 2 * 3000) * 0.001)
    lost = loss.gpu_s - loss.productive_gpu_s
    assert observed_gpu_s(loss) == pytest.approx(lost / loss.wall_s * 86400)


def test_an_amount_without_its_price_is_unknown() -> None:
    """No amount is guessed."""
    assert set(costs(of(told([STAY])), Prices()).values()) == {None}
    assert saved(5.0, None) is saved(None, 5.0) is None
    assert saved(5.0, 2.0, 1.0, None) == 2.0, "storage counts, and unknown requests do not"
    assert of_storage(Prices(), 1) is None
    assert of_requests(replace(PRICES, reads=None), 1, 1) is None


def test_list_prices_fill_gaps_in_their_own_currency_only() -> None:
    """A price of the user counts first; dollars are never mixed with another currency."""
    listed = LIST_PRICES["s3"]
    assert with_list_prices(Prices(gb_month=0.01), "s3://b") == replace(listed, gb_month=0.01)
    assert with_list_prices(Prices(currency="EUR"), "s3://b") == Prices(currency="EUR")
    assert with_list_prices(Prices(), "file:///b") == Prices()
