# SPDX-License-Identifier: Apache-2.0
"""``swansong prune``: delete the commits that no rule keeps."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from typing import Any

from rich.table import Table

from swansongd.bucket.prune import Report, Verdict, prune
from swansongd.bucket.retention import age_text
from swansongd.cli.common import add_json, add_run, human_bytes, note, print_json
from swansongd.cli.opening import opened
from swansongd.cli.progress import ShownCount
from swansongd.cli.terminal import console
from swansongd.util.printable import printable

PRICES = {"s3": 0.023, "gs": 0.020}
"""List prices of a GB for a month in dollars: S3 Standard in us-east-1, GCS Standard in one US region."""
_GB = 2**30
"""Both clouds bill storage by this unit."""

EXAMPLES = {
    "Explain what would be kept and deleted, and delete nothing.": "swansong prune --dry-run",
    "Delete the commits that no rule keeps.": "swansong prune",
    "State the savings for a price of your own.": "swansong prune --dry-run --price-per-gb-month 0.01",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--dry-run", action="store_true", help="explain, and delete nothing")
    parser.add_argument(
        "--price-per-gb-month",
        type=_price,
        metavar="X",
        help="price of 2^30 bytes for a month in dollars (default: list price of the cloud)",
    )
    add_json(parser)


def _price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = -1.0
    if not 0 <= price < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a price; give a number such as 0.02")
    return price


def run(args: argparse.Namespace) -> int:
    with (
        opened(args) as here,
        ShownCount("reading manifests", is_quiet=args.json) as progress,
    ):
        report = prune(
            here.store,
            here.keys,
            here.config.retention,
            now_wall_s=time.time(),
            is_dry_run=args.dry_run,
            progress=progress,
            stop=here.stop,
        )
        scheme = here.config.store.url.partition("://")[0]
    price = PRICES.get(scheme) if args.price_per_gb_month is None else args.price_per_gb_month
    if args.json:
        print_json(_facts(here.keys.run, report, price, is_dry_run=args.dry_run))
        return 0
    if report.verdicts:
        console().print(_table(report.verdicts))
    _summarise(here.keys.run, report, price, is_dry_run=args.dry_run)
    return 0


def _facts(run: str, report: Report, price: float | None, *, is_dry_run: bool) -> dict[str, Any]:
    counts = asdict(report)
    counts.pop("verdicts")
    return {
        "run": run,
        "dry_run": is_dry_run,
        "commits": [
            {
                "generation": verdict.ref.generation,
                "step": verdict.ref.step,
                "final": verdict.ref.is_final,
                "nodes": verdict.nodes,
                "age_s": verdict.age_s,
                "whole": verdict.is_whole,
                "size_bytes": verdict.size_bytes,
                "kept_by": list(verdict.reasons),
                "freed_bytes": verdict.freed_bytes,
                "remains": verdict.remains or None,
            }
            for verdict in report.verdicts
        ],
        **counts,
        "freed_dollars_per_month": _dollars(report.freed_bytes, price),
        "kept_dollars_per_month": _dollars(report.kept_bytes, price),
    }


def _table(verdicts: list[Verdict]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("GENERATION", "STEP", "AGE", "SIZE", "FREES", "DECISION"):
        right = name != "DECISION"
        table.add_column(name, justify="right" if right else "left", no_wrap=right)
    for verdict in verdicts:
        goes = not verdict.reasons and not verdict.remains
        table.add_row(
            str(verdict.ref.generation),
            f"{verdict.ref.step}{' (final)' * verdict.ref.is_final}",
            "?" if verdict.age_s is None else age_text(verdict.age_s),
            human_bytes(verdict.size_bytes),
            human_bytes(verdict.freed_bytes) if goes else "-",
            str(printable(_decision(verdict))),
            style=None if goes else "dim",
        )
    return table


def _decision(verdict: Verdict) -> str:
    if verdict.remains:
        return f"stays: {verdict.remains}"
    if verdict.reasons:
        return f"kept: {', '.join(verdict.reasons)}"
    return "deleted: no rule keeps it" + ("" if verdict.is_whole else ", and it is not whole")


def _summarise(run: str, report: Report, price: float | None, *, is_dry_run: bool) -> None:
    gone = [verdict for verdict in report.verdicts if not verdict.reasons and not verdict.remains]
    verb = "would delete" if is_dry_run else "deleted"
    print(
        f"run {run}: {verb} {len(gone)} of {len(report.verdicts)} commits and {report.objects} objects, "
        f"{human_bytes(report.freed_bytes)}{_money(report.freed_bytes, price)}; "
        f"{human_bytes(report.kept_bytes)} stay{_money(report.kept_bytes, price)}"
    )
    if report.orphans:
        print(
            f"{report.orphans} of these objects, {human_bytes(report.orphan_bytes)}, belong to no commit"
        )
    if report.young_bytes:
        print(
            f"{human_bytes(report.young_bytes)} belong to no commit yet, and are too young to delete"
        )
    if report.uploads:
        verb = "would abort" if is_dry_run else "aborted"
        print(f"{verb} {report.uploads} old multipart uploads")
    for key, reason in list(report.remain.items())[:5]:
        note(f"{key} was not deleted: {reason}")
    if report.remain_count > 5:
        note(f"{report.remain_count - 5} further objects were not deleted")


def _money(size_bytes: int, price: float | None) -> str:
    dollars = _dollars(size_bytes, price)
    return "" if dollars is None else f" (${dollars:,.2f} a month)"


def _dollars(size_bytes: int, price: float | None) -> float | None:
    return None if price is None else round(size_bytes / _GB * price, 2)
