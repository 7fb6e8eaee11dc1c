# SPDX-License-Identifier: Apache-2.0
"""``swansong ls``: list the commits of a run, newest first."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from rich.table import Table
from rich.text import Text
from swansong_bucket.config.sections import RetentionConfig
from swansong_bucket.errors import ConfigError, CorruptError
from swansong_bucket.format.manifest import Manifest
from swansong_bucket.model import CommitRef, is_healthy
from swansong_bucket.retention.rules import CommitFacts, reasons_to_keep
from swansong_bucket.retention.survey import claim_ages
from swansong_bucket.runs import catalog
from swansong_bucket.runs.catalog import Commit
from swansong_bucket.runs.history import AddedBytes
from swansong_bucket.runs.pins import Pins, StoredPin
from swansong_bucket.runs.run import Run
from swansong_bucket.transfer.restore import health_of
from swansong_bucket.util.printable import printable

from swansong_tools.commands.bucket_command import Opened, opened
from swansong_tools.commands.common import add_flag, add_json, add_run, note, print_json, whole
from swansong_tools.commands.progress import ProgressDisplay
from swansong_tools.commands.terminal import console, table
from swansong_tools.units import counted, human_age, human_bytes

_NOTES_MAX = 5
"""Commits of one kind that are explained below the table."""
_METRIC_CHARS_MAX = 12
"""Length of the head of a metric in the table of 80 columns."""

NOTES = "See docs/operations/restore.md."
EXAMPLES = {
    "List all commits of the configured run.": "swansong ls",
    "List the five newest commits.": "swansong ls --newest 5",
    "Mark the commit with the highest accuracy.": "swansong ls --best accuracy --highest",
    "Show all columns, and all reasons why a commit is protected.": "swansong ls --wide | less -S",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument(
        "--best",
        metavar="METRIC",
        help="metric that ranks the commits (default: retention.best_metric)",
    )
    add_flag(parser, "--highest", "with --best: the highest value of the metric is the best")
    parser.add_argument(
        "--newest",
        type=whole("a number of commits", 10**9),
        metavar="N",
        help="list only the N newest commits; the protected ones are chosen among these",
    )
    kind = parser.add_mutually_exclusive_group()
    add_flag(kind, "--wide", "show all columns; the default fits 80 columns")
    add_json(kind)


def run(args: argparse.Namespace) -> int:
    if args.highest and args.best is None:
        raise ConfigError(["--highest has an effect only with --best"])
    with opened(args) as here:
        rules = here.config.retention
        if args.best is not None:
            rules = replace(rules, best_metric=args.best, best_is_highest=args.highest)
        pins = Pins(here.store, here.keys).now()
        rows = rows_of(here, args.newest, is_quiet=args.json)
        claims, _ = claim_ages(here.store, here.keys)
        _protect(rows, pins, claims, rules)
        if args.json:
            print_json(rows)
        elif not rows:
            note(f"run {here.keys.run} has no commits")
        else:
            metric = rules.best_metric
            columns = _wide(metric) if args.wide else _narrow(rows, metric)
            console(is_wide=args.wide).print(_table(rows, columns))
            _note_unknown_metric(rows, metric, args.best)
            _note_damaged(rows)
            _note_reduced(rows)
        if args.newest is None:
            _note_lost(pins, rows)
    return 0


def rows_of(here: Opened, newest: int | None, *, is_quiet: bool) -> list[dict[str, Any]]:
    """The facts of each commit, newest first.

    Args:
        newest: number of commits to read; None for all.
        is_quiet: print no progress.
    """
    # One more: the oldest one adds what the commit before it does not name.
    limit = None if newest is None else newest + 1
    commits = list(islice(catalog.newest_commits(here.store, here.keys), limit))
    rows: dict[tuple[CommitRef, int], dict[str, Any]] = {}
    added = AddedBytes()

    def take(commit: Commit, loaded: tuple[Manifest, ...] | CorruptError) -> None:
        added.take(commit, loaded)
        rows[commit.key] = _row(commit, loaded)

    run = Run(here.store, here.keys, stop=here.stop)
    with ProgressDisplay("reading manifests", "commits", is_quiet=is_quiet) as progress:
        run.read_commits(commits, take=take, progress=progress)
    added_bytes = added.by_commit()
    for key, row in rows.items():
        if row["problem"] is None:
            row["added_bytes"] = added_bytes[key]
    return [rows[commit.key] for commit in commits[:newest] if commit.key in rows]


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
        "added_bytes": None,
        "created": None,
        "loss": None,
        "health": {},
        "healthy": None,
        "age_s": None if commit.age_s is None else round(commit.age_s),
        "protected": [],
        "pins": [],
        "problem": None,
        "without_ranks": None,
    }
    if isinstance(loaded, CorruptError):
        return row | {"complete": False, "problem": loaded.line()}
    first, health = loaded[0], health_of(loaded)
    return row | {
        "kind": str(first.kind),
        "without_ranks": first.trainer.get("without_ranks"),
        "size_bytes": sum(manifest.size_bytes for manifest in loaded),
        "created": first.created,
        "loss": health.get("loss"),
        "health": health,
        "healthy": is_healthy(health),
    }


def _protect(
    rows: list[dict[str, Any]],
    pins: list[StoredPin],
    claims: Mapping[int, float | None],
    rules: RetentionConfig,
) -> None:
    """Add to each row its pins, and all reasons for which prune keeps the commit."""
    for row in rows:
        row["pins"] = [
            {"name": stored.name, "note": stored.pin.note, "created": stored.pin.created}
            for stored in pins
            if stored.pin is not None and stored.pin.ref == _ref(row)
        ]
    facts = [
        CommitFacts(
            ref=_ref(row),
            nodes=row["nodes"],
            age_s=row["age_s"],
            is_whole=row["complete"],
            health=row["health"],
            pins=[pin.name for pin in pins if pin.may_mean(_ref(row), row["age_s"])],
        )
        for row in rows
    ]
    reasons = reasons_to_keep(facts, claims, rules, time.time())
    for row, commit in zip(rows, facts, strict=True):
        row["protected"] = reasons.get(commit.key, [])


def _ref(row: dict[str, Any]) -> CommitRef:
    return CommitRef(row["generation"], row["step"], row["final"])


def _note_lost(pins: list[StoredPin], rows: list[dict[str, Any]]) -> None:
    known = {_ref(row) for row in rows}
    for stored in pins:
        if stored.pin is None:
            note(f"the pin {stored.name} is damaged, and keeps all older commits: {stored.problem}")
        elif stored.pin.ref not in known:
            note(f"the pin {stored.name} names {stored.pin.ref}, which does not exist")


def _note_unknown_metric(rows: list[dict[str, Any]], metric: str, asked: str | None) -> None:
    """Many runs report no loss, which is the default: that is no mistake."""
    names = sorted({name for row in rows for name in row["health"]})
    if metric in names or (asked is None and metric == RetentionConfig().best_metric):
        return
    key = "retention.best_metric" if asked is None else "--best"
    known = f"choose one of {', '.join(names)}" if names else "the commits have no metric"
    note(f"{key}: is the metric of no commit (got {metric!r:.100}); {known}")


def _note_damaged(rows: list[dict[str, Any]]) -> None:
    damaged = [row for row in rows if row["problem"] is not None]
    for row in damaged[:_NOTES_MAX]:
        note(f"{_ref(row)} is damaged: {row['problem']}")
    if damaged[_NOTES_MAX:]:
        further = counted(len(damaged) - _NOTES_MAX, "further commit")
        note(f"{further} damaged: see swansong ls --wide")


def _note_reduced(rows: list[dict[str, Any]]) -> None:
    reduced = [row for row in rows if row["problem"] is None and row["without_ranks"] is not None]
    for row in reduced[:_NOTES_MAX]:
        note(f"* {_ref(row)} is whole{_without(row)}: see docs/trainers/several-vms.md")
    if reduced[_NOTES_MAX:]:
        further = counted(len(reduced) - _NOTES_MAX, "further commit")
        note(f"* {further} without a rank: see swansong ls --wide")


@dataclass(frozen=True, slots=True)
class _Column:
    head: str
    cell: Callable[[dict[str, Any]], object]
    is_right: bool = False


def _table(rows: list[dict[str, Any]], columns: list[_Column]) -> Table:
    left = [column.head for column in columns if not column.is_right]
    shown = table(*(column.head for column in columns), left=left, wraps=columns[-1].head)
    for row in rows:
        is_sound = row["problem"] is None and row["complete"]
        cells = (str(printable(str(column.cell(row)))) for column in columns)
        shown.add_row(
            *(Text(cell, no_wrap=True, overflow="ellipsis") for cell in cells),
            style=None if is_sound else "dim",
        )
    return shown


def _narrow(rows: list[dict[str, Any]], metric: str) -> list[_Column]:
    """The columns that fit into 80, with WHOLE only if a commit is not whole."""
    is_whole = all(
        row["complete"] and row["nodes"] == 1 and row["without_ranks"] is None for row in rows
    )
    return [
        _Column("GEN", lambda row: row["generation"], is_right=True),
        _Column("STEP", lambda row: row["step"], is_right=True),
        _Column("KIND", lambda row: row["kind"] or "-"),
        *([] if is_whole else [_Column("WHOLE", _whole)]),
        _Column("AGE", _age, is_right=True),
        _Column("SIZE", lambda row: _size(row["size_bytes"]), is_right=True),
        _Column("ADDED", lambda row: _size(row["added_bytes"]), is_right=True),
        _metric(metric, _METRIC_CHARS_MAX),
        _Column("PROTECTED", _reasons),
    ]


def _wide(metric: str) -> list[_Column]:
    return [
        _Column("GEN", lambda row: row["generation"], is_right=True),
        _Column("STEP", lambda row: row["step"], is_right=True),
        _Column("KIND", lambda row: row["kind"] or "-"),
        _Column("NODES", _nodes),
        _Column("COMPLETE", _complete),
        _Column("SIZE", lambda row: _size(row["size_bytes"]), is_right=True),
        _Column("ADDED", lambda row: _size(row["added_bytes"]), is_right=True),
        _Column("AGE", _age, is_right=True),
        _Column("CREATED", lambda row: row["created"] or "-"),
        *(_metric(name) for name in dict.fromkeys(("loss", metric))),
        _Column("HEALTHY", lambda row: {True: "yes", False: "no", None: "-"}[row["healthy"]]),
        _Column("PROTECTED", _reasons),
    ]


def _metric(name: str, most: int | None = None) -> _Column:
    head = Text(str(printable(name)).upper())
    if most is not None:
        head.truncate(most, overflow="ellipsis")
    return _Column(head.plain, lambda row: _value(row, name), is_right=True)


def _value(row: dict[str, Any], name: str) -> str:
    is_bad = name == "loss" and row["healthy"] is False
    return "not finite" if is_bad else _number(row["health"].get(name))


def _age(row: dict[str, Any]) -> str:
    return "-" if row["age_s"] is None else human_age(row["age_s"])


def _size(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else human_bytes(size_bytes)


def _nodes(row: dict[str, Any]) -> str:
    return f"{row['nodes_committed']}/{row['nodes']}"


def _whole(row: dict[str, Any]) -> str:
    if row["problem"] is not None:
        return "damaged"
    if not row["complete"]:
        return _nodes(row)
    return "yes" if row["without_ranks"] is None else "yes*"


def _without(row: dict[str, Any]) -> str:
    """The ranks of the job that took no part, because they were lost."""
    ranks = row["without_ranks"]
    return "" if ranks is None else f", without rank {printable(ranks)}"


def _complete(row: dict[str, Any]) -> str:
    if row["problem"] is not None:
        return f"no: {row['problem']}"
    return f"yes{_without(row)}" if row["complete"] else "no"


def _reasons(row: dict[str, Any]) -> str:
    return ", ".join(_shown_reasons(row)) or "-"


def _shown_reasons(row: dict[str, Any]) -> list[str]:
    """The reasons, with the notes of the pins."""
    notes = {f"pin {pin['name']}": pin["note"] for pin in row["pins"]}
    return [
        f"{reason} ({notes[reason]})" if notes.get(reason) else reason
        for reason in row["protected"]
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
