# SPDX-License-Identifier: Apache-2.0
"""The rows of a status report, for one look and for the live view.

Pure.  docs/reference/status.md describes the fields of the report.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from swansong_tools.commands.view.values import number, seconds, size, table, tables, word

GOOD, WARNING, BAD, PLAIN = "green", "yellow", "red", ""
"""Styles of rich."""
_STAGING_FREE_MIN = 0.05
"""Below this share of free space, the row of staging is marked."""
_LEVELS = {"degraded": WARNING, "blind": BAD, "dying": BAD, "lost": BAD}


@dataclass(frozen=True, slots=True)
class Row:
    """One fact of the report."""

    label: str
    text: str
    style: str = PLAIN
    rank: int = 50
    """Importance: a small screen drops the rows with the highest rank.  Below 20: something is wrong."""


def rows(report: dict[str, Any], *, is_brief: bool = False) -> Iterator[Row]:
    """All rows that apply, in the order of the display.

    Args:
        is_brief: the display has no lists of sources, GPUs and trainers: rows stand for these.
    """
    yield Row("run", _run(report), rank=40)
    yield Row("state", word(report.get("state")) + newer_generation(report), rank=21)
    yield Row("verdict", _verdict(report), rank=22)
    yield Row("last commit", _last_commit(report.get("last_commit")), rank=20)
    if isinstance(report.get("part"), dict):
        yield Row("waiting for peers", part_of(report["part"]), WARNING, 19)
    yield Row("replication lag", _lag(report.get("replication_lag")), rank=24)
    if is_brief:
        yield Row("training", _training(report), rank=25)
    yield Row("bandwidth", _bandwidth(report), rank=27)
    yield _store(report.get("store"))
    if isinstance(report.get("flush"), dict):
        yield Row("flush", _flush(report["flush"]), rank=23)
    yield Row("pending", _pending(report.get("unsent"), report.get("pending_bytes")), rank=31)
    yield _staging(report.get("staging"))
    yield Row("prefetch", _prefetch(report.get("prefetch")), rank=60)
    if isinstance(report.get("mirror"), dict):
        yield _mirror(report["mirror"])
    if report.get("bytes_referenced"):
        yield Row("reused", size(report["bytes_referenced"]), rank=70)
    yield from _notifications(table(report.get("notifications")))
    if isinstance(report.get("metrics"), dict):
        yield _metrics(report["metrics"])
    yield Row("evacuation", _evacuation(report.get("evacuation")), rank=21)
    for margin in tables(report.get("margins")):
        is_bad = margin.get("fits") is False
        yield Row("margin", _margin(margin), BAD if is_bad else PLAIN, 12 if is_bad else 26)
    if is_brief:
        yield from _sources(report)
        yield from _gpus(report)
    failed = table(report.get("failed_saves"))
    if failed.get("count"):
        yield Row("failed saves", _failed_saves(failed), BAD, 13)
    for line in _problems(report.get("trainers")):
        yield Row("problem", line, BAD, 10)
    for each in tables(table(report.get("unconnected")).get("processes")):
        yield Row("not connected", _unconnected(each), WARNING, 15)
    faults = table(report.get("decision_faults"))
    if faults.get("count"):
        shown = f"{word(faults['count'])}, the last one: {word(faults.get('last'))}"
        yield Row("decision faults", shown, BAD, 14)
    yield Row("daemon", _daemon(report), rank=80)


def _notifications(report: dict[str, Any]) -> Iterator[Row]:
    """One row for each receiver, with its counters."""
    for name in ("webhook", "exec", "heartbeat"):
        found = table(report.get(name))
        if not found:
            continue
        shown = f"{word(found.get('sent'))} sent"
        shown += "".join(
            f", {word(found[key])} {key}"
            for key in ("queued", "failed", "dropped")
            if found.get(key)
        )
        if found.get("silent"):
            shown += f"; silent: {word(found['silent'])}"
        if found.get("last_error"):
            shown += f"; the last attempt failed: {word(found['last_error'])}"
        is_bad = bool(found.get("silent") or found.get("last_error"))
        yield Row(name, shown, BAD if is_bad else PLAIN, 15 if is_bad else 65)


def _metrics(metrics: dict[str, Any]) -> Row:
    """The address, or why the daemon does not serve it."""
    if metrics.get("failure"):
        return Row("metrics", f"not served: {word(metrics['failure'])}", BAD, 15)
    return Row("metrics", word(metrics.get("address")), rank=65)


def _sources(report: dict[str, Any]) -> Iterator[Row]:
    """One row for the sources that work, and one for each other source."""
    sources = tables(report.get("sources"))
    fine = [word(row.get("name")) for row in sources if row.get("health") == "ok"]
    if fine:
        yield Row("sources", f"{len(fine)} ok: {', '.join(fine)}", rank=35)
    for row in sources:
        if row.get("health") not in ("ok", "unsupported"):
            shown = f"{word(row.get('name'))} {_health(row)}"
            yield Row("source", shown, level_of(row) or WARNING, 11)


def _gpus(report: dict[str, Any]) -> Iterator[Row]:
    """One row for the GPUs that are healthy, and one for each other GPU."""
    gpus = tables(report.get("gpus"))
    fine = sum(row.get("health") == "ok" for row in gpus)
    if fine:
        yield Row("GPUs", f"{fine} ok", rank=34)
    for row in gpus:
        if row.get("health") != "ok":
            name = f"{word(row.get('index'))} {word(row.get('name'))}"
            yield Row("GPU", f"{name} {_health(row)}", level_of(row) or WARNING, 10)


def level_of(row: dict[str, Any]) -> str:
    """The style of a source, a store or a GPU by its health."""
    health = row.get("health")
    return _LEVELS.get(health, PLAIN) if isinstance(health, str) else PLAIN


def _run(report: dict[str, Any]) -> str:
    generation = report.get("generation")
    claimed = (
        "no generation claimed yet" if generation is None else f"generation {word(generation)}"
    )
    return f"{word(report.get('run'))} ({claimed})"


def _daemon(report: dict[str, Any]) -> str:
    version, pid = word(report.get("version")), word(report.get("pid"))
    return f"version {version}, pid {pid}, up {seconds(report.get('uptime_s'))}"


def _bandwidth(report: dict[str, Any]) -> str:
    measured = report.get("bandwidth_bytes_per_s")
    return "not measured yet" if measured is None else f"{size(measured)}/s measured"


def _training(report: dict[str, Any]) -> str:
    """Step, loss and number of the connected trainers."""
    trainers = tables(report.get("trainers"))
    if not trainers:
        return "no trainer is connected"
    steps = [step for row in trainers if (step := number(row.get("step"))) is not None]
    shown = [f"step {max(steps):.0f}"] if steps else []
    loss = next((row["loss"] for row in trainers if number(row.get("loss")) is not None), None)
    if loss is not None:
        shown.append(f"loss {loss:.4g}")
    connected = sum(row.get("connected") is not False for row in trainers)
    count = round(connected + (number(report.get("trainers_not_shown")) or 0))
    return ", ".join((*shown, f"{count} trainer{'s' * (count != 1)}"))


def _problems(trainers: Any) -> list[str]:
    """The problems of all trainers, one line each."""
    lines = []
    for trainer in tables(trainers):
        where = f"rank {word(trainer.get('rank'))} at step {word(trainer.get('step'))}"
        if trainer.get("stalled_s") is not None:
            lines.append(f"{where} has made no progress for {seconds(trainer['stalled_s'])}")
        if trainer.get("loss_is_finite") is False:
            lines.append(f"{where} reports a loss that is not finite")
    return lines


def _unconnected(process: dict[str, Any]) -> str:
    return (
        f"process {word(process.get('pid'))} ({word(process.get('program'))}) of user "
        f"{word(process.get('uid'))} {word(process.get('seen'))}; if it trains this run: "
        f"{word(process.get('fix'))}"
    )


def _failed_saves(failed: dict[str, Any]) -> str:
    last = failed.get("last")
    if not isinstance(last, dict):
        return word(failed["count"])
    return (
        f"{word(failed['count'])}, the last one {seconds(last.get('age_s'))} ago at step "
        f"{word(last.get('step'))} of rank {word(last.get('rank'))}: {word(last.get('reason'))}"
    )


def _verdict(report: dict[str, Any]) -> str:
    """The verdict and its age; a dash during an evacuation without a verdict."""
    last = report.get("last_verdict")
    verdict = report.get("verdict")
    if verdict is None or not isinstance(last, dict):
        return word(verdict)
    return f"{word(verdict)}, {seconds(last.get('age_s'))} ago{prediction(last)}"


def _store(health: Any) -> Row:
    if not isinstance(health, dict):
        return Row("store", "not reached yet", rank=30)
    style = level_of(health)
    return Row("store", _health(health), style, 30 if style == PLAIN else 11)


def _health(row: dict[str, Any]) -> str:
    """Health, reason and time of a source or a store."""
    for_s = seconds(row.get("for_s"))
    return f"{word(row.get('health'))}: {word(row.get('reason'))}, for {for_s}"


def _flush(flush: dict[str, Any]) -> str:
    """The set in flight: step, stored bytes, and time since the start."""
    return (
        f"step {word(flush.get('step'))}: {size(flush.get('stored_bytes'))} of "
        f"{size(flush.get('size_bytes'))} stored, for {seconds(flush.get('for_s'))}"
    )


def _pending(unsent: Any, pending_bytes: Any) -> str:
    """The sets that are not uploaded: bytes, next attempt, and dropped sets."""
    if not isinstance(unsent, dict):
        return size(pending_bytes)
    shown = f"{size(unsent.get('bytes'))} in {word(unsent.get('sets'))} sets"
    if unsent.get("failures"):
        shown += f"; the last {word(unsent['failures'])} attempts failed"
    if unsent.get("retry_in_s") is not None:
        shown += f", the next one in {seconds(unsent['retry_in_s'])}"
    dropped = table(unsent.get("dropped"))
    if dropped.get("count"):
        shown += (
            f"; {word(dropped['count'])} older sets were dropped unsent, "
            f"the last one {seconds(dropped.get('age_s'))} ago"
        )
    return shown


def _staging(staging: Any) -> Row:
    """Free space on the file system of staging."""
    if not isinstance(staging, dict):
        return Row("staging", "unknown", rank=32)
    free, whole = number(staging.get("free_bytes")), number(staging.get("size_bytes"))
    is_full = free is not None and whole is not None and free < _STAGING_FREE_MIN * whole
    shown = f"{size(free)} of {size(whole)} free"
    return Row("staging", shown, BAD if is_full else PLAIN, 15 if is_full else 32)


def _prefetch(prefetch: Any) -> str:
    """State of the prefetch, and how far it is."""
    if not isinstance(prefetch, dict):
        return "unknown"
    shown = word(prefetch.get("state")).replace("_", " ")
    if prefetch.get("step") is not None:
        shown += f", step {word(prefetch['step'])}"
    if prefetch.get("bytes_total"):
        shown += f", {size(prefetch.get('bytes_done'))} of {size(prefetch['bytes_total'])}"
    return f"{shown}: {word(prefetch['reason'])}" if prefetch.get("reason") else shown


def _mirror(mirror: dict[str, Any]) -> Row:
    """State of the mirror, its newest commit, and how far it is behind."""
    shown, newest, lag = word(mirror.get("state")), mirror.get("newest"), table(mirror.get("lag"))
    if isinstance(newest, dict):
        place = f"generation {word(newest.get('generation'))} step {word(newest.get('step'))}"
        shown += f", has {place}"
    if lag.get("commits"):
        shown += (
            f", {word(lag['commits'])} commits and {seconds(lag.get('seconds'))} behind, "
            f"{size(lag.get('bytes'))} to copy"
        )
    if mirror.get("damaged"):
        shown += f", {word(mirror['damaged'])} commits are damaged in the store and not copied"
    if mirror.get("objects_taken"):
        shown += f", {word(mirror['objects_taken'])} objects were restored from it"
    if mirror.get("reason"):
        shown += f": {word(mirror['reason'])}"
    is_bad = mirror.get("state") in ("failing", "promoted")
    return Row("mirror", shown, BAD if is_bad else PLAIN, 16 if is_bad else 33)


def _last_commit(commit: Any) -> str:
    if not isinstance(commit, dict):
        return "none"
    age_s = commit.get("age_s")
    age = "from before the daemon started" if age_s is None else f"{seconds(age_s)} ago"
    place = f"generation {word(commit.get('generation'))} step {word(commit.get('step'))}"
    return f"{place}{', the end of the run' * (commit.get('is_final') is True)}, {age}"


def newer_generation(report: dict[str, Any]) -> str:
    """The addition to the state of a fenced VM; empty for others."""
    newer = report.get("newer_generation")
    return "" if newer is None else f"; generation {word(newer)} has taken the run over"


def part_of(part: dict[str, Any]) -> str:
    """The checkpoint over several VMs of which this VM's part is committed."""
    return (
        f"this VM's part of generation {word(part.get('generation'))} step {word(part.get('step'))} "
        f"is committed ({word(part.get('nodes_committed'))} of {word(part.get('nodes'))} VMs)"
    )


def _lag(lag: Any) -> str:
    if not isinstance(lag, dict):
        return "unknown"
    age_s = lag.get("seconds")
    shown = "unknown time" if age_s is None else seconds(age_s)
    return f"{word(lag.get('steps'))} steps, {shown}, {size(lag.get('bytes'))}"


def _evacuation(evacuation: Any) -> str:
    if not isinstance(evacuation, dict):
        return "none"
    left = seconds(evacuation.get("seconds_left"))
    return f"{word(evacuation.get('reason'))}: {progress_of(evacuation)}, {left} left" + "".join(
        f"; {phrase}" for phrase in phrases_of(evacuation)
    )


def progress_of(evacuation: dict[str, Any]) -> str:
    """Plan and phase of an evacuation."""
    return f"{word(evacuation.get('plan'))}, {word(evacuation.get('phase'))}"


def phrases_of(evacuation: dict[str, Any]) -> list[str]:
    """The wait for a trainer, the prediction, and the follow-up checkpoints of an evacuation."""
    wait_s = evacuation.get("trainer_wait_s")
    waiting = "" if wait_s is None else f"waiting for a trainer to connect, {seconds(wait_s)} left"
    phrases = (
        waiting,
        prediction(evacuation).removeprefix("; "),
        _follow_ups(evacuation.get("follow_ups")),
    )
    return [phrase for phrase in phrases if phrase]


def _follow_ups(follow_ups: Any) -> str:
    found = table(follow_ups)
    if found.get("under_way"):
        return f"follow-up checkpoint {word(found.get('count'))} is under way"
    next_s = found.get("next_in_s")
    return "" if next_s is None else f"next follow-up checkpoint in {seconds(next_s)}"


def prediction(row: dict[str, Any]) -> str:
    """The time from the request to the commit: as it was, and as it was expected."""
    expected_s, took_s = row.get("expected_s"), row.get("took_s")
    if took_s is None:
        return "" if expected_s is None else f"; the commit is expected after {seconds(expected_s)}"
    expected = "" if expected_s is None else f", expected were {seconds(expected_s)}"
    return f"; the checkpoint took {seconds(took_s)}{expected}"


def _margin(margin: dict[str, Any]) -> str:
    """The consequence of a notice at this moment."""
    source, spare_s = word(margin.get("source")), number(margin.get("spare_s"))
    if spare_s is None:
        return f"{source}: unknown, save and bandwidth are not measured yet"
    if spare_s >= 0:
        grace = seconds(margin.get("grace_s"))
        return f"{source}: {seconds(spare_s)} of {grace} to spare"
    since = margin.get("lost_since_step")
    lost = "all training is lost" if since is None else f"training since step {word(since)} is lost"
    return f"{source}: {seconds(-spare_s)} short: {lost}"
