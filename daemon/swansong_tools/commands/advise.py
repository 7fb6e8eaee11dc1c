# SPDX-License-Identifier: Apache-2.0
"""``swansong advise``: show what would save GPU time and money, for a run or for a plan of one."""

from __future__ import annotations

import argparse
from typing import Any

from swansong_tools.commands import advise_text
from swansong_tools.commands.assumed import Subject, add_assumed, assumed, is_assumed
from swansong_tools.commands.common import add_json, add_run, print_json
from swansong_tools.commands.measured import measured
from swansong_tools.commands.opening import opened
from swansong_tools.commands.prices import add_prices, prices_of
from swansong_tools.economics.advice import Advice, advise
from swansong_tools.economics.bill import Bill, bill
from swansong_tools.economics.cost import Costs, Prices, costs, with_list_prices
from swansong_tools.economics.expected import (
    Expected,
    ExpectedMargin,
    bandwidth_bytes_per_s,
    observed,
    observed_gpu_s,
)
from swansong_tools.economics.loss import Loss

NOTES = "See docs/operations/loss.md."
EXAMPLES = {
    "Show what would save most for the configured run.": (
        "swansong advise --price spot=1.20 --price on_demand=3.90"
    ),
    "Check whether a checkpoint would fit into a notice, before the run exists.": (
        "swansong advise --size 84GB --bandwidth 2GB/s --notice 30s --gpus 8"
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add_assumed(parser)
    add_prices(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    prices = prices_of(args)
    if is_assumed(args):
        subject = assumed(args)
    else:
        with opened(args) as here:
            subject = measured(here, is_quiet=args.json)
            prices = with_list_prices(prices, here.config.store.url)
    found = advise(subject.job, subject.setup, subject.notices)
    money = bill(subject.job, subject.upkeep, prices, steps=subject.steps)
    if args.json:
        print_json(facts(subject, found, prices, money))
    else:
        advise_text.show(subject, found, prices, money)
    return 0


def facts(subject: Subject, advice: Advice, prices: Prices, money: Bill) -> dict[str, Any]:
    """The advice as JSON values; docs/operations/loss.md names the fields."""
    job, made = subject.job, subject.job.forecast
    return {
        "run": subject.name,
        "verdict": advise_text.verdict(subject),
        "rests_on": subject.rests_on,
        "seen": subject.seen and {name: _rounded(value) for name, value in subject.seen.items()},
        "assumed": list(subject.assumed),
        "job": {
            "gpus": job.gpus,
            "size_bytes": job.measured.save_bytes,
            "bandwidth_bytes_per_s": _rounded(bandwidth_bytes_per_s(job)),
            "step_s": _rounded(job.measured.step_s),
            "save_cost_s": _rounded(job.save_cost_s),
            "save_s": _rounded(made.save_s),
            "send_s": _rounded(made.send_s),
            "commit_s": _rounded(made.commit_s),
            "lag_s": _rounded(job.lag_s),
            "interruptions_per_day": _rounded(job.per_day),
            "uncovered_per_day": _rounded(job.uncovered_per_day),
            "down_s": {part: _rounded(seconds) for part, seconds in job.down_s.items()},
        },
        "margins": [_margin(each) for each in advice.margins],
        "interval": {
            "in_use_s": _rounded(job.interval_s),
            "mtbf_s": _rounded(advice.interval.mtbf_s),
            "young_s": _rounded(advice.interval.young_s),
            "daly_s": _rounded(advice.interval.daly_s),
            "recommended_s": _rounded(advice.interval.best_s),
        },
        "observed_per_day": None if subject.loss is None else _observed(subject.loss),
        "expected_per_day": _expected(advice.expected, job.gpus),
        "proposals": [
            {
                "name": each.name,
                "title": each.title,
                "change": each.change,
                "formula": each.formula,
                "saved_gpu_s_per_day": _rounded(each.saved_gpu_s),
                "saved_cost_per_day": _rounded(money.saved_by(each.job)),
                "expected_per_day": _expected(each.after, job.gpus),
            }
            for each in advice.proposals
        ],
        "currency": prices.currency,
        "cost_per_day": _bill(money),
        "cost_so_far": None if subject.loss is None else _so_far(costs(subject.loss, prices)),
    }


def _observed(loss: Loss) -> dict[str, Any]:
    """The loss of the run as it was, per day."""
    found = observed(loss)
    return {**_expected(found, 1), "lost_gpu_s": _rounded(observed_gpu_s(loss))}


def _so_far(found: Costs) -> dict[str, Any]:
    return {
        "spot": _rounded(found.spot),
        "interruptions": _rounded(found.interruptions),
        "saves": _rounded(found.saves),
        "on_demand": _rounded(found.on_demand),
        "saved": _rounded(found.saved),
    }


def _bill(money: Bill) -> dict[str, Any]:
    return {
        "stall": _rounded(money.stall),
        "storage": _rounded(money.storage),
        "requests": _rounded(money.requests),
        "interruptions": _rounded(money.interruptions),
        "spot": _rounded(money.spot),
        "on_demand": _rounded(money.on_demand),
        "saved": _rounded(money.saved),
        "stored_bytes": round(money.upkeep.stored_bytes),
        "writes": _rounded(money.upkeep.writes),
        "reads": _rounded(money.upkeep.reads),
        "days_of_run": _rounded(money.days),
    }


def _margin(each: ExpectedMargin) -> dict[str, Any]:
    return {
        "source": each.source,
        "grace_s": _rounded(each.grace_s),
        "needed_s": _rounded(each.needed_s),
        "spare_s": _rounded(each.spare_s),
        "chance": _rounded(each.chance),
    }


def _expected(found: Expected, gpus: int) -> dict[str, Any]:
    return {
        "saves_s": _rounded(found.saves_s),
        "stall_s": _rounded(found.stall_s),
        "redone_s": _rounded(found.redone_s),
        "down_s": _rounded(found.down_s),
        "lost_gpu_s": _rounded(found.total_s * gpus),
        "ettr": _rounded(found.ettr),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
