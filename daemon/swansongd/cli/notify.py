# SPDX-License-Identifier: Apache-2.0
"""``swansong notify``: tell the daemon that this VM will go away, for whoever knows it otherwise."""

from __future__ import annotations

import argparse
import secrets
import time
from typing import Any

from swansong.protocol import Noted, Notify, NotifyWithdrawn

from swansongd.cli.common import add_json, print_json
from swansongd.cli.status import newer_generation, part_of
from swansongd.cli.talk import TIMEOUT_S, Daemon
from swansongd.config import load
from swansongd.config_values import Wrong, duration
from swansongd.errors import Stopped, Unreachable
from swansongd.model import Verdict

HELP = "give notice by hand: the daemon evacuates as if the cloud had said it"

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
        help="the VM goes away in so long, such as 90s or 5m",
    )
    what.add_argument(
        "--withdraw", action="store_true", help="what was notified by hand does not stand any more"
    )
    parser.add_argument("--reason", default="", metavar="TEXT", help="for logs and the farewell")
    parser.add_argument("--drill", action="store_true", help="this is a rehearsal")
    parser.add_argument(
        "--wait", action="store_true", help="wait for the verdict, and let the exit code tell it"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    with Daemon(load(args.config).trainer.socket) as daemon:
        if args.withdraw:
            daemon.ask(NotifyWithdrawn(reason=args.reason), Noted)
            return _show(args, _until(daemon, is_noted=False))
        notify = Notify(
            nonce=secrets.token_hex(8),
            seconds_left=args.in_s,
            reason=args.reason,
            drill=args.drill,
        )
        daemon.ask(notify, Noted)
        report = _until(daemon, is_noted=True)
        if not args.wait:
            return _show(args, report)
        while report["verdict"] is None:
            if not _noted(report):
                raise Stopped("the notice was withdrawn before there was a verdict")
            time.sleep(_LOOK_S)
            report = daemon.report()
        _show(args, report)
        return EXIT_BY_VERDICT[Verdict(report["verdict"])]


def _until(daemon: Daemon, *, is_noted: bool) -> dict[str, Any]:
    """The daemon's state once the decision loop has seen our message."""
    give_up_mono_s = time.monotonic() + TIMEOUT_S
    while _noted(report := daemon.report()) is not is_noted:
        if time.monotonic() > give_up_mono_s:
            raise Unreachable(
                f"the daemon took the message and did not act on it within {TIMEOUT_S:g} s",
                hint="See what it does: swansong status",
            )
        time.sleep(_LOOK_S)
    return report


def _noted(report: dict[str, Any]) -> bool:
    return any(notice["source"] in _SOURCES for notice in report["notices"])


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
