# SPDX-License-Identifier: Apache-2.0
"""``swansong report``: show what happened to a run, as text or as an HTML page with pictures."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from swansong import openat
from swansong_bucket.errors import StagingError
from swansong_bucket.format import wall
from swansong_bucket.runs import history
from swansong_bucket.runs.history import RunHistory
from swansong_bucket.runs.run import RecordedCommit, Run

from swansong_tools.commands import loss as loss_command
from swansong_tools.commands.bucket_command import opened
from swansong_tools.commands.common import add_json, add_run, note, place, print_json, whole
from swansong_tools.commands.prices import add_prices, money, prices_of
from swansong_tools.commands.progress import ProgressDisplay
from swansong_tools.economics import cost, loss
from swansong_tools.economics.cost import Prices
from swansong_tools.report import run_report
from swansong_tools.report.run_report import RunReport, Story

NOTES = "See docs/operations/report.md."
EXAMPLES = {
    "Show the newest evacuations of the configured run.": "swansong report",
    "Write a page with pictures, for a browser.": "swansong report --html report.html",
    "Include the cost of the GPU time.": (
        "swansong report --html report.html --price spot=1.20 --price on_demand=3.90"
    ),
}
EVACUATIONS = 5
EVACUATIONS_MAX = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page for a browser into this file"
    )
    parser.add_argument(
        "--evacuations",
        type=whole(f"a number of evacuations, at most {EVACUATIONS_MAX}", EVACUATIONS_MAX),
        default=EVACUATIONS,
        metavar="N",
        help=f"number of newest evacuations (default {EVACUATIONS}, at most {EVACUATIONS_MAX})",
    )
    add_prices(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    prices = prices_of(args)
    with opened(args) as here:
        found = history.read(
            Run.listed(here.store, here.keys, stop=here.stop),
            evacuations_max=args.evacuations,
            progress_of=lambda what: ProgressDisplay(f"reading {what}", what, is_quiet=args.json),
        )
        made = run_report.report(
            found,
            run=here.keys.run,
            store_url=here.store.url,
            written_wall_s=time.time(),
            amounts=_amounts(found, prices),
        )
    if args.html is not None:
        from swansong_tools.report.page import html  # noqa: PLC0415 - slow to import

        _write(args.html, html(made))
        note(f"wrote {args.html}")
    if args.json:
        print_json(_facts(made))
    elif args.html is None:
        from swansong_tools.commands.report_text import show  # noqa: PLC0415 - slow to import

        show(made)
    return 0


def _write(path: Path, text: str) -> None:
    """Replace the file as a whole: a reader never sees half of it."""
    mask = os.umask(0o077)
    os.umask(mask)
    try:
        with openat.held(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)) as directory_fd:
            mode, data = 0o666 & ~mask, text.encode()
            openat.replace_file(path.name, data, dir_fd=directory_fd, mode=mode, durable=False)
    except OSError as error:
        raise StagingError(
            f"--html: writing {path} failed: {error.strerror}",
            hint="Name a file in a directory that exists, in which you may create files",
        ) from None


# ---------------------------------------------------------------- money


_AMOUNTS = {
    "spot": "GPU time on spot VMs",
    "interruptions": run_report.LOST,
    "saves": "of it, stood still for other checkpoints",
    "on_demand": "The same work on demand",
    "saved": "Saved by spot VMs",
}


def _amounts(found: RunHistory, prices: Prices) -> dict[str, str]:
    summed = loss.loss(found.lives.lives)
    if summed is None:
        return {}
    amounts = cost.costs(summed, prices)
    amounts["saved"] = cost.saved(amounts["on_demand"], amounts["spot"])
    return {
        _AMOUNTS[part]: money(amount, prices.currency)
        for part, amount in amounts.items()
        if amount is not None
    }


# ---------------------------------------------------------------- for programs


def _facts(made: RunReport) -> dict[str, Any]:
    """The report as JSON values; docs/operations/report.md describes the fields."""
    commits, evacuated = made.history.commits, made.history.evacuations
    left_out = made.history.lives.left_out
    return {
        "run": made.run,
        "store": made.store_url,
        "written": wall.text(made.written_wall_s),
        "summary": run_report.summary(made),
        "evacuations": [_evacuation(story) for story in made.stories],
        "farewells_left_out": evacuated.farewells_left_out,
        "farewells_damaged": list(evacuated.damaged),
        "commits": [_commit(commit) for commit in reversed(commits.commits)],
        "commits_left_out": commits.left_out,
        "loss": loss_command.facts(made.run, made.loss, left_out),
        "cost": made.amounts,
    }


def _evacuation(story: Story) -> dict[str, Any]:
    recorded, ended = story.recorded, story.interruption
    return {
        "id": recorded.evacuation_id,
        "generation": recorded.generation,
        "node": recorded.node,
        "notices": [{"source": each.source, "kind": each.kind} for each in recorded.notices],
        "opened": wall.text(recorded.opened_wall_s),
        "deadline_s": recorded.deadline_s,
        "verdict": recorded.verdict.value,
        "reason": recorded.reason,
        "commit": None if recorded.commit is None else place(recorded.commit),
        "expected_s": recorded.expected_s,
        "took_s": recorded.took_s,
        "timeline": [
            {"phase": each.phase, "at_s": each.at_s, **each.facts} for each in recorded.timeline
        ],
        "timeline_left_out": recorded.left_out,
        "samples": [list(sample) for sample in recorded.samples],
        "resumed_by": None if ended is None else ended.generation,
        "sentences": list(run_report.sentences(story)),
    }


def _commit(commit: RecordedCommit) -> dict[str, Any]:
    return {
        **place(commit.ref),
        "final": commit.ref.is_final,
        "kind": None if commit.kind is None else commit.kind.value,
        "created": wall.text(commit.created_wall_s),
        "size_bytes": commit.size_bytes,
        "bytes_referenced": commit.bytes_referenced,
        "loss": commit.loss,
        "complete": commit.is_whole,
    }
