# SPDX-License-Identifier: Apache-2.0
"""The ``swansong`` command: reads the command line, runs one command, turns errors into exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from swansongd import __version__
from swansongd.cli import doctor, ls, notify, restore, status, verify, version
from swansongd.cli.common import note
from swansongd.config import DEFAULT_PATH
from swansongd.errors import ConfigError, SwansongError
from swansongd.telemetry import log

_COMMANDS = {
    "status": status,
    "notify": notify,
    "ls": ls,
    "restore": restore,
    "verify": verify,
    "doctor": doctor,
    "version": version,
}

EXIT_CODES = {
    0: "done",
    1: "a fault of swansong itself",
    2: "the configuration or the command line is wrong",
    8: "stored bytes or a manifest do not match their digest",
    9: "stopped before it was done",
    10: "notify --wait: PARTIAL, an older commit stands",
    11: "notify --wait: LOST, nothing of the run is committed",
    12: "doctor found a failure",
    13: "the daemon does not answer on its socket",
    14: "a newer generation of this run exists",
    15: "the staging directory or the restore target cannot be used",
    16: "the object store refused or failed",
    17: "nothing to restore: the run has no commit that is whole",
}


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    epilog = "exit codes:\n" + "\n".join(f"  {code}  {text}" for code, text in EXIT_CODES.items())
    top = argparse.ArgumentParser(
        prog="swansong",
        description="Checkpoints of training runs on spot VMs: what there is, and how to get it back.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument(
        "--config",
        type=Path,
        default=DEFAULT_PATH,
        metavar="FILE",
        help=f"the configuration (default {DEFAULT_PATH})",
    )
    top.add_argument("--version", action="version", version=f"swansong {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in _COMMANDS.items():
        below = commands.add_parser(name, help=command.HELP, description=command.HELP)
        command.add_arguments(below)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = parser().parse_args(argv)
    log.configure("console", "warning")
    try:
        code: int = _COMMANDS[args.command].run(args)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        for problem in error.problems:
            note(problem)
        if error.hint:
            note(error.hint)
        return error.exit_code
    except SwansongError as error:
        note(error.line())
        return error.exit_code
    except BrokenPipeError:
        # Whoever read our output has seen enough; keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
