# SPDX-License-Identifier: Apache-2.0
"""``swansong ls``: list the commits of a run, newest first."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from rich.table import Table

from swansongd.bucket import catalog
from swansongd.bucket.catalog import Commit
from swansongd.bucket.manifest import Manifest
from swansongd.bucket.pins import Pin, Pins
from swansongd.bucket.retention import Candidate, reasons_to_keep
from swansongd.cli.common import add_json, add_run, human_bytes, note, print_json
from swansongd.cli.opening import Opened, opened
from swansongd.cli.progress import ShownCount
from swansongd.cli.terminal import console
from swansongd.config.config import RetentionConfig
from swansongd.errors import CorruptError
from swansongd.model import CommitRef, is_healthy
from swansongd.restore.restore import health_of
from swansongd.util.printable import printable

EXAMPLES = {
    "List all commits of the configured run.": "swansong ls",
    "List the five newest commits.": "swansong ls --newest 5",
    "Mark the commit with the highest accuracy.": "swansong ls --best accuracy --highest",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument(
        "--best",
        metavar="METRIC",
        help="metric that ranks the commits (default: retention.best_metric)",
    )
    parser.add_argument(
        "--highest",
        action="store_true",
        help="with --best: the highest value of the metric is the best",
    )
    parser.add_argument(
        "--newest",
        type=_count,
        metavar="N",
        help="list only the N newest commits; the protected ones are chosen among these",
    )
    add_json(parser)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 10 and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a number of commits")
    return int(text)


def run(args: argparse.Namespace) -> int:
    with opened(args) as here:
        rules = here.config.retention
        if args.best is not None:
            rules = replace(rules, best_metric=args.best, best_is_highest=args.highest)
        rows = rows_of(here, args.newest, is_quiet=args.json)
        pins = Pins(here.store, here.keys).now()
        claims = {
            generation: info.age_s
            for info in here.store.list(here.keys.generations)
            if (generation := here.keys.parse_generation(info.key)) is not None
        }
        _protect(rows, pins, claims, rules)
        if args.json:
            print_json(rows)
        elif not rows:
            note(f"run {here.keys.run} has no commits")
        else:
            console().print(_table(rows, rules.best_metric))
        if args.newest is None:
            _note_lost(pins, rows)
    return 0


def rows_of(here: Opened, newest: int | None, *, is_quiet: bool) -> list[dict[str, Any]]:
    """The facts of each commit, newest first.

    Args:
        newest: number of commits to read; None for all.
        is_quiet: print no progress without a terminal.
    """
    commits = list(islice(catalog.newest_commits(here.store, here.keys), newest))
    rows: dict[tuple[CommitRef, int], dict[str, Any]] = {}

    def take(commit: Commit, loaded: tuple[Manifest, ...] | CorruptError) -> None:
        rows[commit.ref, commit.nodes] = _row(commit, loaded)

    with ShownCount("reading manifests", is_quiet=is_quiet) as progress:
        catalog.load_each(here.store, here.keys, commits, take, progress=progress, stop=here.stop)
    return [rows[commit.ref, commit.nodes] for commit in commits]


def _row(commit: Commit, loaded: tuple[Manifest, ...] | CorruptError) -> dict[str, Any]:
    row: dict[str, Any] = {
        "generation": commit.ref.generation,
        "step": commit.ref.step,
        "final": commit.ref.is_final,
        "nodes": commit.nodes,
        "nodes_committed": len(commit.manifest_keys),
        "complete": commit.is_complete,
        "kind": None,
        "size_bytes": None,
        "created": None,
        "loss": None,
        "health": {},
        "healthy": None,
        "age_s": None if commit.age_s is None else round(commit.age_s),
        "protected": [],
        "pins": [],
        "problem": None,
    }
    if isinstance(loaded, CorruptError):
        return row | {"complete": False, "problem": loaded.line()}
    first, health = loaded[0], health_of(loaded)
    return row | {
        "kind": str(first.kind),
        "size_bytes": sum(manifest.size_bytes for manifest in loaded),
        "created": first.created,
        "loss": health.get("loss"),
        "health": health,
        "healthy": is_healthy(health),
    }


def _protect(
    rows: list[dict[str, Any]],
    pins: list[Pin],
    claims: Mapping[int, float | None],
    rules: RetentionConfig,
) -> None:
    """Add to each row its pins, and all reasons for which prune keeps the commit."""
    for row in rows:
        row["pins"] = [
            {"name": pin.name, "note": pin.note, "created": pin.created}
            for pin in pins
            if pin.ref == _ref(row)
        ]
    candidates = [
        Candidate(
            ref=_ref(row),
            nodes=row["nodes"],
            age_s=row["age_s"],
            is_whole=row["complete"],
            health=row["health"],
            pins=[pin["name"] for pin in row["pins"]],
        )
        for row in rows
    ]
    reasons = reasons_to_keep(candidates, claims, rules, time.time())
    for row, candidate in zip(rows, candidates, strict=True):
        row["protected"] = reasons.get(candidate.key, [])


def _ref(row: dict[str, Any]) -> CommitRef:
    return CommitRef(row["generation"], row["step"], row["final"])


def _note_lost(pins: list[Pin], rows: list[dict[str, Any]]) -> None:
    known = {_ref(row) for row in rows}
    for pin in pins:
        if pin.ref not in known:
            note(f"the pin {pin.name} names {pin.ref}, which does not exist")


def _table(rows: list[dict[str, Any]], metric: str) -> Table:
    table = Table(box=None, pad_edge=False)
    head = ["GENERATION", "STEP", "KIND", "NODES", "COMPLETE", "SIZE", "CREATED"]
    numbers = ["LOSS"] if metric == "loss" else ["LOSS", str(printable(metric)).upper()]
    for name in (*head, *numbers, "HEALTHY", "PROTECTED"):
        right = name in ("GENERATION", "STEP", "SIZE", *numbers)
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    for row in rows:
        damaged = row["problem"] is not None
        table.add_row(
            str(row["generation"]),
            str(row["step"]),
            row["kind"] or "?",
            f"{row['nodes_committed']}/{row['nodes']}",
            f"no: {printable(row['problem'])}" if damaged else "yes" if row["complete"] else "no",
            "?" if row["size_bytes"] is None else human_bytes(row["size_bytes"]),
            str(printable(row["created"] or "?")),
            *(_number(row["health"].get(name)) for name in dict.fromkeys(("loss", metric))),
            {True: "yes", False: "no", None: "-"}[row["healthy"]],
            ", ".join(str(printable(reason)) for reason in _shown_reasons(row)) or "-",
            style="dim" if damaged or not row["complete"] else None,
        )
    return table


def _shown_reasons(row: dict[str, Any]) -> list[str]:
    """The reasons, with the notes of the pins."""
    notes = {f"pin {pin['name']}": pin["note"] for pin in row["pins"]}
    return [
        f"{reason} ({notes[reason]})" if notes.get(reason) else reason
        for reason in row["protected"]
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
