# SPDX-License-Identifier: Apache-2.0
"""``swansong notify``: give the daemon notice that this VM will be terminated."""

from __future__ import annotations

import argparse
import os
import secrets
import time
from dataclasses import replace
from pathlib import Path

from swansong.protocol import Noted, Notify, NotifyWithdrawn
from swansong_bucket.config.values import duration
from swansong_bucket.errors import FencedError, Stopped, Unreachable
from swansong_bucket.model import Verdict
from swansongd.config.config import load
from swansongd.observe.phase import Phase
from swansongd.observe.status import DaemonStatus, VerdictStatus, to_json
from swansongd.sources.manual import identity_of

from swansong_tools.commands.common import add_flag, add_json, argument, note, print_json
from swansong_tools.commands.daemon_client import DaemonClient
from swansong_tools.commands.view.rows import newer_generation, part_of

EXIT_BY_VERDICT = {
    Verdict.SAFE: 0,
    Verdict.PARTIAL: 10,
    Verdict.LOST: 11,
    Verdict.NO_TRAINING: 19,
}

NOTES = """\
The caller must be root or the daemon's user.
Over several VMs, --wait waits for the whole checkpoint until the deadline.
Without a trainer it waits until a checkpoint would no longer fit, because a trainer may still connect."""
EXAMPLES = {
    "The VM will be terminated in 90 seconds: evacuate, and exit with the verdict.": (
        "sudo swansong notify --in 90s --wait"
    ),
    "An announced maintenance: take a checkpoint now, and evacuate when the deadline is near.": (
        "sudo swansong notify --in 1h --reason 'maintenance window'"
    ),
    "The VM will not be terminated after all: continue training.": (
        "sudo swansong notify --withdraw --reason 'false alarm'"
    ),
}

_SHOWN = ("state", "verdict", "notices", "evacuation", "last_commit", "part", "newer_generation")
_SOURCES = ("manual", "drill")
_POLL_S = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_notice(parser).add_argument(
        "--withdraw", action="store_true", help="withdraw all manual notices, drills included"
    )


def add_notice(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """Add the options of a notice; returns the group of ``--in`` and its alternatives."""
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument(
        "--in",
        dest="in_s",
        type=argument(duration),
        metavar="TIME",
        help="time until the VM is terminated, such as 90s or 1h",
    )
    parser.add_argument(
        "--reason", default="", metavar="TEXT", help="reason, for the log and the farewell"
    )
    add_flag(parser, "--wait", "wait for the verdict; the exit code shows it")
    add_json(parser)
    return kind


def run(args: argparse.Namespace) -> int:
    if not args.withdraw:
        return give_notice(args, drill=False)
    with DaemonClient(load(args.config).trainer.socket) as daemon:
        daemon.request(NotifyWithdrawn(reason=args.reason), Noted)
        return _show(args, daemon.until(lambda status: not _has_manual_notice(status)))


def give_notice(args: argparse.Namespace, *, drill: bool) -> int:
    """Give the daemon a notice; with ``--wait`` return the exit code of its verdict, or of a fence.

    Raises:
        Unreachable: the daemon does not answer.
        Stopped: the notice was withdrawn before the verdict.
    """
    with DaemonClient(load(args.config).trainer.socket) as daemon:
        try:
            return _give(args, daemon, drill=drill)
        except Unreachable:
            last = daemon.last_status
            if last is None or last.newer_generation is None:
                raise
            _show(args, last)
            return FencedError.exit_code


def _give(args: argparse.Namespace, daemon: DaemonClient, *, drill: bool) -> int:
    notify = Notify(
        nonce=secrets.token_hex(8),
        # Counted from the start of this process, so that simultaneous calls state the same deadline.
        seconds_left=max(0.0, args.in_s - _running_s()),
        reason=args.reason,
        drill=drill,
    )
    identity = identity_of(notify.nonce, drill=notify.drill)
    daemon.request(notify, Noted)
    status = daemon.until(
        lambda status: _is_in_force(status, identity) or verdict_on(status, identity)
    )
    if not args.wait:
        return _show(args, status)
    note("The notice is in force; waiting for the verdict.")
    is_waiting = False
    while not (last := verdict_on(status, identity)):
        if not _is_in_force(status, identity):
            raise Stopped("waiting for the verdict failed: the notice was withdrawn")
        if not is_waiting and status.state == Phase.WAITING_FOR_TRAINER:
            is_waiting = True
            note("No trainer is connected: the verdict comes shortly before the end.")
        time.sleep(_POLL_S)
        status = daemon.status()
    _show(args, replace(status, verdict=last.verdict))
    return EXIT_BY_VERDICT[last.verdict]


def _running_s() -> float:
    """Age of this process in seconds; 0 if /proc cannot be read."""
    try:
        stat = Path("/proc/self/stat").read_text()
        started_ticks = int(stat.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0.0
    started_s = started_ticks / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)


def _has_manual_notice(status: DaemonStatus) -> bool:
    return any(notice.source in _SOURCES for notice in status.notices)


def _is_in_force(status: DaemonStatus, identity: str) -> bool:
    return any(identity in notice.identities for notice in status.notices)


def verdict_on(status: DaemonStatus, identity: str) -> VerdictStatus | None:
    """The newest verdict, if it belongs to an evacuation for this notice."""
    last = status.last_verdict
    return last if last is not None and identity in last.notices else None


def _show(args: argparse.Namespace, status: DaemonStatus) -> int:
    if args.json:
        report = to_json(status)
        print_json({key: report[key] for key in _SHOWN})
    else:
        print(f"{status.verdict or status.state}: {committed_text(status)}")
    return 0


def committed_text(status: DaemonStatus) -> str:
    """The newest whole commit, and what else a verdict needs to be understood."""
    commit, last = status.last_commit, status.last_verdict
    if commit is not None:
        committed = f"generation {commit.generation} step {commit.step} is committed"
    elif status.verdict is not None and last is not None:
        committed = last.reason  # the store may have a commit, if it could not be read
    else:
        committed = "no commit is known"
    if status.part:
        committed += f"; {part_of(status.part)}"
    return committed + newer_generation(status)
