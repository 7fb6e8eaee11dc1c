# SPDX-License-Identifier: Apache-2.0
"""``swansong advise``: show what would save GPU time and money, for a run or for a plan of one."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from swansong_tools.commands import advise_text
from swansong_tools.commands.assumed import Subject, add_assumed, assumed, is_assumed
from swansong_tools.commands.bucket_command import opened
from swansong_tools.commands.common import add_json, add_run, print_json, rounded
from swansong_tools.commands.measured import measured
from swansong_tools.commands.prices import add_prices, prices_of
from swansong_tools.economics.advice import Advice, advise
from swansong_tools.economics.bill import Bill, bill
from swansong_tools.economics.cost import Prices, costs, saved, with_list_prices
from swansong_tools.economics.expected import (
    Expected,
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
        with opened(args, may_be_new=True) as here:
            subject = measured(here, is_quiet=args.json)
            prices = with_list_prices(prices, here.config.store.url)
    found = advise(subject.job, subject.setup, subject.notices)
    money = bill(subject.job, subject.upkeep, prices, steps=subject.steps)
    if args.json:
        print_json(rounded(facts(subject, found, prices, money), 6))
    else:
        advise_text.show(subject, found, prices, money)
    return 0


_A_DAY = ("stall", "storage", "requests", "interruptions", "spot", "on_demand", "saved")


def facts(subject: Subject, advice: Advice, prices: Prices, money: Bill) -> dict[str, Any]:
    """The advice as JSON values; docs/operations/loss.md names the fields."""
    job, made = subject.job, subject.job.forecast
    return {
        "run": subject.name,
        "verdict": advise_text.verdict(subject),
        "rests_on": subject.rests_on,
        "seen": subject.seen,
        "assumed": list(subject.assumed),
        "job": {
            "gpus": job.gpus,
            "size_bytes": job.measured.save_bytes,
            "bandwidth_bytes_per_s": bandwidth_bytes_per_s(job),
            "step_s": job.measured.step_s,
            "save_cost_s": job.save_cost_s,
            "save_s": made.save_s,
            "send_s": made.send_s,
            "commit_s": made.commit_s,
            "lag_s": job.lag_s,
            "interruptions_per_day": job.per_day,
            "uncovered_per_day": job.uncovered_per_day,
            "down_s": job.down_s,
        },
        "margins": [{**asdict(each), "spare_s": each.spare_s} for each in advice.margins],
        "interval": {
            "in_use_s": job.interval_s,
            "mtbf_s": advice.interval.mtbf_s,
            "young_s": advice.interval.young_s,
            "daly_s": advice.interval.daly_s,
            "recommended_s": advice.interval.best_s,
        },
        "observed_per_day": None if subject.loss is None else _observed(subject.loss),
        "expected_per_day": _expected(advice.expected, job.gpus),
        "proposals": [
            {
                "name": each.name,
                "title": each.title,
                "change": each.change,
                "formula": each.formula,
                "saved_gpu_s_per_day": each.saved_gpu_s,
                "saved_cost_per_day": money.saved_by(each.job),
                "expected_per_day": _expected(each.after, job.gpus),
            }
            for each in advice.proposals
        ],
        "currency": prices.currency,
        "cost_per_day": {
            **{name: getattr(money, name) for name in _A_DAY},
            "stored_bytes": round(money.stored_bytes),
            "writes": money.writes,
            "reads": money.reads,
            "days_of_run": money.days,
        },
        "cost_so_far": None if subject.loss is None else _so_far(subject.loss, prices),
    }


def _so_far(loss: Loss, prices: Prices) -> dict[str, Any]:
    found = costs(loss, prices)
    return {**found, "saved": saved(found["on_demand"], found["spot"])}


def _observed(loss: Loss) -> dict[str, Any]:
    """The loss of the run as it was, per day."""
    found = observed(loss)
    return {**_expected(found, 1), "lost_gpu_s": observed_gpu_s(loss)}


def _expected(found: Expected, gpus: int) -> dict[str, Any]:
    return {**asdict(found), "lost_gpu_s": found.total_s * gpus, "ettr": found.ettr}
