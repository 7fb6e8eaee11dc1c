# SPDX-License-Identifier: Apache-2.0
"""``swansong status``: show the state of the daemon on this VM."""

from __future__ import annotations

import argparse

from swansong_bucket.errors import ConfigError
from swansongd.config.config import load
from swansongd.observe.status import to_json
from swansongd.trainers import unconnected

from swansong_tools.commands.common import add_flag, add_json, interval, print_json
from swansong_tools.commands.daemon_client import DaemonClient
from swansong_tools.commands.jobs import other_jobs

NOTES = "The caller must be root, the daemon's user, or one of trainer.users."
EXAMPLES = {
    "Show the state, the last commit and the replication lag.": "swansong status",
    "Watch them, with a countdown during an evacuation.": "swansong status --watch",
    "Append one line per change to a file.": "swansong status --watch >>/var/log/swansong-changes",
    "Print the state alone, for a script.": "swansong status --json | jq -r .state",
}

_INTERVAL_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kind = parser.add_mutually_exclusive_group()
    add_json(kind)
    add_flag(
        kind,
        "--watch",
        "show the state until Ctrl-C; without a terminal, print one line per change",
    )
    parser.add_argument(
        "--interval",
        type=interval(0.1, 3600.0, "100ms to 1h"),
        metavar="TIME",
        help=f"with --watch: time between two queries, such as 500ms or 10s (default {_INTERVAL_S:g}s)",
    )


def run(args: argparse.Namespace) -> int:
    if args.interval is not None and not args.watch:
        raise ConfigError(["--interval has an effect only with --watch"])
    trainer = load(args.config).trainer
    if args.watch:
        from swansong_tools.commands.view.watch import watch  # noqa: PLC0415 - slow to import

        return watch(trainer.socket, args.interval or _INTERVAL_S)
    with DaemonClient(trainer.socket) as daemon:
        status, uid = daemon.status(), daemon.peer_uid()
    search = unconnected.search(trainer, status, uid)
    if args.json:
        print_json({**to_json(status), "unconnected": search.facts()})
        return 0
    from swansong_tools.commands.view.once import print_status  # noqa: PLC0415 - slow to import

    print_status(status, search.found, other_jobs(args.config))
    return 0
