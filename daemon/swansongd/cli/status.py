# SPDX-License-Identifier: Apache-2.0
"""``swansong status``: show the state of the daemon on this VM."""

from __future__ import annotations

import argparse
from typing import Any

from rich.table import Table

from swansongd.cli.client import DaemonClient
from swansongd.cli.common import add_json, human_bytes, human_s, print_json
from swansongd.cli.terminal import console
from swansongd.config.config import load
from swansongd.util.printable import printable

EXAMPLES = {
    "Show the state, the last commit and the replication lag.": "swansong status",
    "Show them again every second.": "watch -n 1 swansong status",
    "Print the state alone, for a script.": "swansong status --json | jq -r .state",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    with DaemonClient(load(args.config).trainer.socket) as daemon:
        report = daemon.report()
    if args.json:
        print_json(report)
        return 0
    out = console()
    out.print(_summary(report))
    for title, key, columns in (
        ("SOURCE", "sources", ("name", "health", "reason", "for_s")),
        ("GPU", "gpus", ("index", "name", "health", "reason", "for_s")),
        ("TRAINER", "trainers", ("pid", "rank", "step")),
    ):
        rows = [row for row in report.get(key) or [] if isinstance(row, dict)]
        if rows:
            out.print()
            out.print(_listing(title, columns, rows))
    return 0


def _summary(report: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    generation = report.get("generation")
    claimed = "no generation claimed yet" if generation is None else f"generation {generation}"
    table.add_row("run", f"{_word(report.get('run'))} ({claimed})")
    table.add_row("state", _word(report.get("state")) + newer_generation(report))
    table.add_row("verdict", _verdict(report))
    table.add_row("last commit", _last_commit(report.get("last_commit")))
    if isinstance(report.get("part"), dict):
        table.add_row("waiting for peers", part_of(report["part"]))
    table.add_row("replication lag", _lag(report.get("replication_lag")))
    table.add_row("store", _store(report.get("store")))
    if isinstance(report.get("flush"), dict):
        table.add_row("flush", _flush(report["flush"]))
    table.add_row("pending", _pending(report.get("unsent"), report.get("pending_bytes")))
    table.add_row("staging", _staging(report.get("staging")))
    table.add_row("prefetch", _prefetch(report.get("prefetch")))
    if isinstance(report.get("mirror"), dict):
        is_bad = report["mirror"].get("state") in ("failing", "promoted")
        table.add_row("mirror", _mirror(report["mirror"]), style="red" if is_bad else "")
    if report.get("bytes_referenced"):
        table.add_row("reused", _bytes(report["bytes_referenced"]))
    for name, shown, is_bad in _notifications(report.get("notifications")):
        table.add_row(name, shown, style="red" if is_bad else "")
    table.add_row("evacuation", _evacuation(report.get("evacuation")))
    for margin in (row for row in report.get("margins") or [] if isinstance(row, dict)):
        table.add_row("margin", _margin(margin), style="red" if margin.get("fits") is False else "")
    failed = report.get("failed_saves")
    if isinstance(failed, dict) and failed.get("count"):
        table.add_row("failed saves", _failed_saves(failed), style="red")
    for line in _problems(report.get("trainers")):
        table.add_row("problem", line, style="red")
    faults = report.get("decision_faults")
    if isinstance(faults, dict) and faults.get("count"):
        shown = f"{_word(faults['count'])}, the last one: {_word(faults.get('last'))}"
        table.add_row("decision faults", shown, style="red")
    table.add_row(
        "daemon",
        f"version {_word(report.get('version'))}, pid {_word(report.get('pid'))}, "
        f"up {_seconds(report.get('uptime_s'))}",
    )
    return table


def _listing(title: str, columns: tuple[str, ...], rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(columns):
        name = column.removesuffix("_s").upper()
        table.add_column(f"{title} {name}" if index == 0 else name, no_wrap=True)
    for row in rows:
        cells = (
            _seconds(row.get(column)) if column.endswith("_s") else _word(row.get(column))
            for column in columns
        )
        bad = row.get("health") in ("degraded", "blind", "dying", "lost")
        table.add_row(*cells, style="red" if bad else None)
    return table


def _problems(trainers: Any) -> list[str]:
    """The problems of all trainers, one line each."""
    lines = []
    for trainer in (row for row in trainers or [] if isinstance(row, dict)):
        where = f"rank {_word(trainer.get('rank'))} at step {_word(trainer.get('step'))}"
        if trainer.get("stalled_s") is not None:
            lines.append(f"{where} has made no progress for {_seconds(trainer['stalled_s'])}")
        if trainer.get("loss_is_finite") is False:
            lines.append(f"{where} reports a loss that is not finite")
    return lines


def _failed_saves(failed: dict[str, Any]) -> str:
    last = failed.get("last")
    if not isinstance(last, dict):
        return _word(failed["count"])
    return (
        f"{_word(failed['count'])}, the last one {_seconds(last.get('age_s'))} ago at step "
        f"{_word(last.get('step'))} of rank {_word(last.get('rank'))}: {_word(last.get('reason'))}"
    )


def _verdict(report: dict[str, Any]) -> str:
    """The verdict and its age; a dash during an evacuation without a verdict."""
    last = report.get("last_verdict")
    verdict = report.get("verdict")
    if verdict is None or not isinstance(last, dict):
        return _word(verdict)
    return f"{_word(verdict)}, {_seconds(last.get('age_s'))} ago{_prediction(last)}"


def _store(health: Any) -> str:
    if not isinstance(health, dict):
        return "not reached yet"
    state = f"{_word(health.get('health'))}: {_word(health.get('reason'))}"
    return f"{state}, for {_seconds(health.get('for_s'))}"


def _flush(flush: dict[str, Any]) -> str:
    """The set in flight: step, stored bytes, and time since the start."""
    return (
        f"step {_word(flush.get('step'))}: {_bytes(flush.get('stored_bytes'))} of "
        f"{_bytes(flush.get('size_bytes'))} stored, for {_seconds(flush.get('for_s'))}"
    )


def _pending(unsent: Any, pending_bytes: Any) -> str:
    """The sets that are not uploaded: bytes, next attempt, and dropped sets."""
    if not isinstance(unsent, dict):
        return _bytes(pending_bytes)
    shown = f"{_bytes(unsent.get('bytes'))} in {_word(unsent.get('sets'))} sets"
    if unsent.get("failures"):
        shown += f"; the last {_word(unsent['failures'])} attempts failed"
    if unsent.get("retry_in_s") is not None:
        shown += f", the next one in {_seconds(unsent['retry_in_s'])}"
    dropped = unsent.get("dropped")
    if isinstance(dropped, dict) and dropped.get("count"):
        shown += (
            f"; {_word(dropped['count'])} older sets were dropped unsent, "
            f"the last one {_seconds(dropped.get('age_s'))} ago"
        )
    return shown


def _staging(staging: Any) -> str:
    """Free space on the file system of staging."""
    if not isinstance(staging, dict):
        return "unknown"
    return f"{_bytes(staging.get('free_bytes'))} of {_bytes(staging.get('size_bytes'))} free"


def _prefetch(prefetch: Any) -> str:
    """State of the prefetch, and how far it is."""
    if not isinstance(prefetch, dict):
        return "unknown"
    shown = _word(prefetch.get("state")).replace("_", " ")
    if prefetch.get("step") is not None:
        shown += f", step {_word(prefetch['step'])}"
    if prefetch.get("bytes_total"):
        shown += f", {_bytes(prefetch.get('bytes_done'))} of {_bytes(prefetch['bytes_total'])}"
    return f"{shown}: {_word(prefetch['reason'])}" if prefetch.get("reason") else shown


def _mirror(mirror: dict[str, Any]) -> str:
    """State of the mirror, its newest commit, and how far it is behind."""
    shown, newest, lag = _word(mirror.get("state")), mirror.get("newest"), mirror.get("lag")
    if isinstance(newest, dict):
        place = f"generation {_word(newest.get('generation'))} step {_word(newest.get('step'))}"
        shown += f", has {place}"
    if isinstance(lag, dict) and lag.get("commits"):
        shown += (
            f", {_word(lag['commits'])} commits and {_seconds(lag.get('seconds'))} behind, "
            f"{_bytes(lag.get('bytes'))} to copy"
        )
    if mirror.get("damaged"):
        shown += f", {_word(mirror['damaged'])} commits are damaged in the store and not copied"
    if mirror.get("objects_taken"):
        shown += f", {_word(mirror['objects_taken'])} objects were restored from it"
    return f"{shown}: {_word(mirror['reason'])}" if mirror.get("reason") else shown


def _notifications(report: Any) -> list[tuple[str, str, bool]]:
    """One row for each receiver: its name, its counters, and whether it needs attention."""
    rows = []
    for name in ("webhook", "exec", "heartbeat"):
        found = report.get(name) if isinstance(report, dict) else None
        if not isinstance(found, dict):
            continue
        shown = f"{_word(found.get('sent'))} sent"
        shown += "".join(
            f", {_word(found[key])} {key}"
            for key in ("queued", "failed", "dropped")
            if found.get(key)
        )
        if found.get("silent"):
            shown += f"; silent: {_word(found['silent'])}"
        if found.get("last_error"):
            shown += f"; the last attempt failed: {_word(found['last_error'])}"
        rows.append((name, shown, bool(found.get("silent") or found.get("last_error"))))
    return rows


def _last_commit(commit: Any) -> str:
    if not isinstance(commit, dict):
        return "none"
    age_s = commit.get("age_s")
    age = "from before the daemon started" if age_s is None else f"{_seconds(age_s)} ago"
    place = f"generation {_word(commit.get('generation'))} step {_word(commit.get('step'))}"
    return f"{place}{', the end of the run' * (commit.get('is_final') is True)}, {age}"


def newer_generation(report: dict[str, Any]) -> str:
    """The addition to the state of a fenced VM; empty for others."""
    newer = report.get("newer_generation")
    return "" if newer is None else f"; generation {_word(newer)} has taken the run over"


def part_of(part: dict[str, Any]) -> str:
    """The checkpoint over several VMs of which this VM's part is committed."""
    return (
        f"this VM's part of generation {_word(part.get('generation'))} step {_word(part.get('step'))} "
        f"is committed ({_word(part.get('nodes_committed'))} of {_word(part.get('nodes'))} VMs)"
    )


def _lag(lag: Any) -> str:
    if not isinstance(lag, dict):
        return "unknown"
    seconds = lag.get("seconds")
    shown = "unknown time" if seconds is None else _seconds(seconds)
    return f"{_word(lag.get('steps'))} steps, {shown}, {_bytes(lag.get('bytes'))}"


def _evacuation(evacuation: Any) -> str:
    if not isinstance(evacuation, dict):
        return "none"
    shown = (
        f"{_word(evacuation.get('reason'))}: {_word(evacuation.get('plan'))}, "
        f"{_word(evacuation.get('phase'))}, {_seconds(evacuation.get('seconds_left'))} left"
    )
    wait_s = evacuation.get("trainer_wait_s")
    if wait_s is not None:
        shown += f"; waiting for a trainer to connect, {_seconds(wait_s)} left"
    return shown + _prediction(evacuation) + _follow_ups(evacuation.get("follow_ups"))


def _follow_ups(follow_ups: Any) -> str:
    if not isinstance(follow_ups, dict):
        return ""
    next_s = follow_ups.get("next_in_s")
    if follow_ups.get("under_way"):
        return f"; follow-up checkpoint {_word(follow_ups.get('count'))} is under way"
    if next_s is not None:
        return f"; next follow-up checkpoint in {_seconds(next_s)}"
    return ""


def _prediction(row: dict[str, Any]) -> str:
    """The time from the request to the commit: as it was, and as it was expected."""
    expected_s, took_s = row.get("expected_s"), row.get("took_s")
    if took_s is None:
        return (
            "" if expected_s is None else f"; the commit is expected after {_seconds(expected_s)}"
        )
    expected = "" if expected_s is None else f", expected were {_seconds(expected_s)}"
    return f"; the checkpoint took {_seconds(took_s)}{expected}"


def _margin(margin: dict[str, Any]) -> str:
    """The consequence of a notice right now."""
    source, spare_s = _word(margin.get("source")), margin.get("spare_s")
    if not isinstance(spare_s, (int, float)):
        return f"a {source} notice right now: unknown, save and bandwidth are not measured yet"
    if spare_s >= 0:
        return (
            f"a {source} notice right now would leave {_seconds(spare_s)} of "
            f"{_seconds(margin.get('grace_s'))} to spare"
        )
    since = margin.get("lost_since_step")
    lost = "all training" if since is None else f"training since step {_word(since)}"
    return f"a {source} notice right now would be {_seconds(-spare_s)} short: {lost} would be lost"


def _word(value: Any) -> str:
    return "-" if value is None or value == "" else str(printable(value))


def _seconds(value: Any) -> str:
    return human_s(value) if isinstance(value, (int, float)) else "?"


def _bytes(value: Any) -> str:
    return human_bytes(value) if isinstance(value, (int, float)) else "?"
