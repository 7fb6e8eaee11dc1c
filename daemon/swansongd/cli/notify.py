# SPDX-License-Identifier: Apache-2.0
"""``swansong notify``: tell the daemon that this VM will go away, for whoever knows it otherwise."""

from __future__ import annotations

import argparse
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swansong.protocol import Noted, Notify, NotifyWithdrawn

from swansongd.cli.common import add_json, print_json
from swansongd.cli.status import newer_generation, part_of
from swansongd.cli.talk import TIMEOUT_S, Daemon
from swansongd.config.config import load
from swansongd.config.values import Wrong, duration
from swansongd.errors import Stopped, Unreachable
from swansongd.model import Verdict
from swansongd.sources.manual import identity_of

EXIT_BY_VERDICT = {Verdict.SAFE: 0, Verdict.PARTIAL: 10, Verdict.LOST: 11}

_SOURCES = ("manual", "drill")
_LOOK_S = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--in",
        dest="in_s",
        type=_duration,
        metavar="TIME",
        help="time until the VM is terminated, such as 90s or 1h",
    )
    what.add_argument("--withdraw", action="store_true", help="withdraw all notices given by hand")
    parser.add_argument("--reason", default="", metavar="TEXT", help="for logs and the farewell")
    parser.add_argument("--drill", action="store_true", help="this is a rehearsal")
    parser.add_argument(
        "--wait", action="store_true", help="wait for this notice's verdict, which is the exit code"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    with Daemon(load(args.config).trainer.socket) as daemon:
        if args.withdraw:
            daemon.ask(NotifyWithdrawn(reason=args.reason), Noted)
            return _show(args, _until(daemon, lambda report: not _given_by_hand(report)))
        notify = Notify(
            nonce=secrets.token_hex(8),
            # From when the command was started: calls at once then have the same end.
            seconds_left=max(0.0, args.in_s - _running_s()),
            reason=args.reason,
            drill=args.drill,
        )
        identity = identity_of(notify.nonce, drill=notify.drill)
        daemon.ask(notify, Noted)
        report = _until(
            daemon, lambda report: _is_in_force(report, identity) or _is_answered(report, identity)
        )
        if not args.wait:
            return _show(args, report)
        while not _is_answered(report, identity):
            if not _is_in_force(report, identity):
                raise Stopped("the notice was withdrawn before there was a verdict")
            time.sleep(_LOOK_S)
            report = daemon.report()
        verdict = report["last_verdict"]["verdict"]
        _show(args, {**report, "verdict": verdict})
        return EXIT_BY_VERDICT[Verdict(verdict)]


def _until(daemon: Daemon, is_seen: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The daemon's state once the decision loop has seen our message."""
    give_up_mono_s = time.monotonic() + TIMEOUT_S
    while not is_seen(report := daemon.report()):
        if time.monotonic() > give_up_mono_s:
            raise Unreachable(
                f"the daemon took the message and did not act on it within {TIMEOUT_S:g} s",
                hint="See what it does: swansong status",
            )
        time.sleep(_LOOK_S)
    return report


def _running_s() -> float:
    """How long this process has been running; 0 where /proc does not tell."""
    try:
        stat = Path("/proc/self/stat").read_text()
        started_ticks = int(stat.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0.0
    started_s = started_ticks / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)


def _given_by_hand(report: dict[str, Any]) -> bool:
    return any(notice["source"] in _SOURCES for notice in report["notices"])


def _is_in_force(report: dict[str, Any], identity: str) -> bool:
    return any(identity in notice["identities"] for notice in report["notices"])


def _is_answered(report: dict[str, Any], identity: str) -> bool:
    """Whether the newest verdict is that of an evacuation for this notice."""
    last = report["last_verdict"]
    return last is not None and identity in last["notices"]


def _show(args: argparse.Namespace, report: dict[str, Any]) -> int:
    keys = ("state", "verdict", "notices", "evacuation", "last_commit", "part", "newer_generation")
    shown = {key: report[key] for key in keys}
    if args.json:
        print_json(shown)
    else:
        commit = shown["last_commit"]
        stands = (
            f"generation {commit['generation']} step {commit['step']} is committed"
            if commit
            else "nothing is committed"
        )
        if shown["part"]:
            stands += f"; {part_of(shown['part'])}"
        stands += newer_generation(report)
        print(f"{shown['verdict'] or shown['state']}: {stands}")
    return 0


def _duration(text: str) -> float:
    plain = text.isascii() and text.isdigit()
    try:
        return duration(int(text) if plain else text)
    except Wrong as wrong:
        raise argparse.ArgumentTypeError(f"{text!r} {wrong.problem}; {wrong.remedy}") from None
