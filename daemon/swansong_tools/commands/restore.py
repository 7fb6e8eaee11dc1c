# SPDX-License-Identifier: Apache-2.0
"""``swansong restore``: fetch the newest whole commit of a run to a directory.

With ``--local`` the daemon of this VM answers as it answers a trainer: its download may be finished already.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from swansong.layout import RESTORED_DIRECTORY
from swansong.protocol import Restored
from swansong_bucket.errors import ConfigError, Stopped, Unreachable
from swansongd.config.config import Config, load

from swansong_tools.commands.common import (
    add_flag,
    add_generation,
    add_output,
    add_run,
    add_step,
    note,
    target,
)
from swansong_tools.commands.daemon_client import DaemonClient
from swansong_tools.commands.destination import link, report_fresh, resolved
from swansong_tools.commands.progress import ProgressDisplay

NOTES = "See docs/operations/restore.md."
EXAMPLES = {
    "Fetch the newest whole commit.": "swansong restore --to /mnt/resume",
    "Fetch the commit of one step, after a rollback for example.": (
        "swansong restore --to /mnt/resume --step 12000"
    ),
    "Start a trainer at boot, also in a run that has no commit yet.": (
        "swansong restore --to /mnt/resume --local --fresh-ok"
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add_step(parser)
    parser.add_argument(
        "--to",
        type=target,
        required=True,
        metavar="DIR",
        help="target directory; must be empty or not exist",
    )
    add_flag(parser, "--healthy", "restore only a commit that is known to have a finite loss")
    add_flag(parser, "--fresh-ok", "exit with 0 instead of 17 if the run has no commit yet")
    add_flag(
        parser,
        "--local",
        "prefer a sealed checkpoint in this VM's staging directory if the store has no newer one; "
        "DIR becomes a link to it, or to the download of the daemon",
    )
    add_generation(parser, "restore only a commit of this generation")
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    if args.local and (args.step is not None or args.generation is not None or args.healthy):
        raise ConfigError(
            [
                "--local always takes the newest checkpoint; remove --step, --generation and --healthy"
            ]
        )
    config = load(args.config)
    destination = resolved(args.to, config)
    if args.local and _is_given_by_the_daemon(args, config, destination):
        return 0
    from swansong_tools.commands import fetch  # noqa: PLC0415 - slow to import

    return fetch.run(args, destination)


def _is_given_by_the_daemon(args: argparse.Namespace, config: Config, destination: Path) -> bool:
    """Replace the destination by a link to the directory that the daemon gives a trainer.

    Returns:
        False if this command must fetch the checkpoint: the daemon of the run does not answer, or has an
        error.
    """
    began_mono_s = time.monotonic()
    answer = _answer(args, config)
    if answer is None:
        return False
    facts = {"run": config.run.name, "seconds": round(time.monotonic() - began_mono_s, 3)}
    if not answer.path:
        report_fresh(facts, as_json=args.json)
        return True
    # A set in staging has no generation yet.
    is_fetched = Path(answer.path).parent.name == RESTORED_DIRECTORY
    facts |= {"generation": answer.generation if is_fetched else None, "step": answer.step}
    link(destination, Path(answer.path), facts, as_json=args.json)
    return True


def _answer(args: argparse.Namespace, config: Config) -> Restored | None:
    socket = config.trainer.socket
    is_other_run = args.run not in (None, config.run.name)
    if is_other_run or not os.path.exists(socket):
        return None
    run_directory = config.staging.path / config.run.name
    try:
        with (
            DaemonClient(socket) as daemon,
            ProgressDisplay("restore", is_quiet=args.quiet or args.json) as progress,
        ):
            answer = daemon.restored(progress)
    except Unreachable as error:
        reason = error.line()
    except KeyboardInterrupt:
        raise Stopped("restore interrupted") from None
    else:
        path = Path(answer.path)
        is_ours = path.parent in (run_directory, run_directory / RESTORED_DIRECTORY)
        if not answer.error and (is_ours if answer.path else args.fresh_ok):
            return answer
        reason = answer.error or f"{answer.path or 'no checkpoint'} is not in {run_directory}"
    note(f"the daemon gave no checkpoint: {reason}")
    return None
