# SPDX-License-Identifier: Apache-2.0
"""``swansong prune``: delete the commits that no rule keeps."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from typing import Any

from rich.table import Table
from swansong_bucket.config.sections import RetentionConfig
from swansong_bucket.retention.prune import PruneDecision, PruneReport, prune
from swansong_bucket.util.printable import printable

from swansong_tools.commands.bucket_command import opened
from swansong_tools.commands.common import (
    add_flag,
    add_output,
    add_run,
    note,
    place,
    print_json,
)
from swansong_tools.commands.prices import add_prices, money, prices_of
from swansong_tools.commands.progress import ProgressDisplay
from swansong_tools.commands.terminal import console, table
from swansong_tools.economics.cost import Prices, of_storage, with_list_prices
from swansong_tools.units import counted, human_age, human_bytes

NOTES = "See docs/operations/retention.md."
EXAMPLES = {
    "Explain what would be kept and deleted, and delete nothing.": "swansong prune --dry-run",
    "Delete the commits that no rule keeps.": "swansong prune",
    "State the savings for a price of your own.": "swansong prune --dry-run --price gb_month=0.01",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add_flag(parser, "--dry-run", "explain, and delete nothing")
    add_prices(parser)
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    prices, is_quiet = prices_of(args), args.quiet or args.json
    with (
        opened(args) as here,
        ProgressDisplay("reading manifests", "commits", is_quiet=is_quiet) as progress,
        ProgressDisplay("deleting", "objects", is_quiet=is_quiet) as deleting,
    ):

        def deleted(objects: int, total: int, size_bytes: int) -> None:
            deleting.detail = human_bytes(size_bytes)
            deleting(objects, total)

        report = prune(
            here.store,
            here.keys,
            here.config.retention,
            now_wall_s=time.time(),
            is_dry_run=args.dry_run,
            progress=progress,
            deleted=deleted,
            stop=here.stop,
        )
        prices = with_list_prices(prices, here.config.store.url)
    if args.json:
        print_json(_facts(here.keys.run, report, prices, is_dry_run=args.dry_run))
        return 0
    if report.decisions:
        console().print(_table(report.decisions))
    _summarise(here.keys.run, report, prices, is_dry_run=args.dry_run)
    _note_unknown_metric(here.config.retention, report.decisions)
    return 0


def _note_unknown_metric(rules: RetentionConfig, decisions: list[PruneDecision]) -> None:
    """Many runs report no loss, which is the default: that is no mistake."""
    metric = rules.best_metric
    is_used = any(f"best {metric}" in decision.reasons for decision in decisions)
    if rules.keep_best and decisions and not is_used and metric != RetentionConfig().best_metric:
        problem = f"retention.best_metric: is the metric of no commit (got {metric!r})"
        note(f"{problem}; list the metrics with: swansong ls")


def _facts(run: str, report: PruneReport, prices: Prices, *, is_dry_run: bool) -> dict[str, Any]:
    counts = asdict(report)
    counts.pop("decisions")
    return {
        "run": run,
        "dry_run": is_dry_run,
        "commits": [
            {
                **place(decision.ref),
                "final": decision.ref.is_final,
                "nodes": decision.nodes,
                "age_s": decision.age_s,
                "whole": decision.is_whole,
                "size_bytes": decision.size_bytes,
                "kept_by": list(decision.reasons),
                "freed_bytes": decision.freed_bytes,
                "remains": decision.remains or None,
            }
            for decision in report.decisions
        ],
        **counts,
        "currency": prices.currency,
        "freed_cost_per_month": _cost(report.freed_bytes, prices),
        "kept_cost_per_month": _cost(report.kept_bytes, prices),
    }


def _table(decisions: list[PruneDecision]) -> Table:
    shown = table("GENERATION", "STEP", "AGE", "SIZE", "FREES", "DECISION", wraps="DECISION")
    for decision in decisions:
        shown.add_row(
            str(decision.ref.generation),
            f"{decision.ref.step}{' (final)' * decision.ref.is_final}",
            "-" if decision.age_s is None else human_age(decision.age_s),
            human_bytes(decision.size_bytes),
            human_bytes(decision.freed_bytes) if decision.goes else "-",
            str(printable(_decision(decision))),
            style=None if decision.goes else "dim",
        )
    return shown


def _decision(decision: PruneDecision) -> str:
    if decision.remains:
        return f"stays: {decision.remains}"
    if decision.reasons:
        return f"kept: {', '.join(decision.reasons)}"
    return "deleted: no rule keeps it" + ("" if decision.is_whole else ", and it is not whole")


def _summarise(run: str, report: PruneReport, prices: Prices, *, is_dry_run: bool) -> None:
    gone = sum(decision.goes for decision in report.decisions)
    verb = "would delete" if is_dry_run else "deleted"
    print(
        f"run {run}: {verb} {gone} of {counted(len(report.decisions), 'commit')} and "
        f"{counted(report.objects, 'object')}, "
        f"{human_bytes(report.freed_bytes)}{_money(report.freed_bytes, prices)}; "
        f"{human_bytes(report.kept_bytes)} stay{_money(report.kept_bytes, prices)}"
    )
    if report.orphans:
        print(
            f"{report.orphans} of these objects, {human_bytes(report.orphan_bytes)}, belong to no commit"
        )
    if report.young_bytes:
        print(
            f"{human_bytes(report.young_bytes)} belong to no commit yet, and are too young to delete"
        )
    for key, reason in list(report.remain.items())[:5]:
        note(f"{key} was not deleted: {reason}")
    if report.remain_count > 5:
        note(f"{report.remain_count - 5} further objects were not deleted")


def _money(size_bytes: int, prices: Prices) -> str:
    amount = _cost(size_bytes, prices)
    return "" if amount is None else f" ({money(amount, prices.currency)} a month)"


def _cost(size_bytes: int, prices: Prices) -> float | None:
    amount = of_storage(prices, size_bytes)
    return None if amount is None else round(amount, 2)
