# SPDX-License-Identifier: Apache-2.0
"""The ``swansong`` command: reads the command line, runs one command, turns errors into exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from swansongd import __version__
from swansongd.config.config import DEFAULT_PATH
from swansongd.errors import ConfigError, SwansongError
from swansongd.observe import log

_COMMANDS = {
    "status": "show what the daemon on this VM is doing",
    "notify": "give notice by hand: the daemon evacuates as if the cloud had said it",
    "ls": "list the commits of a run, newest first",
    "restore": "bring the newest whole commit of a run to a directory",
    "verify": "re-read the stored bytes of all commits, and compare them with the manifests",
    "doctor": "check the whole installation, and print the fix of each problem",
    "version": "print the version",
}
"""Each command has a module of its name, which is imported only if the command line names it: a command that
an operator repeats every second must not load the code of all others."""

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


def parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The command line, with the options of each command that ``argv`` names."""
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
    for name, text in _COMMANDS.items():
        below = commands.add_parser(name, help=text, description=text)
        if name in argv:
            _module(name).add_arguments(below)
    return top


def _note(line: str) -> None:
    from swansongd.cli.common import note  # noqa: PLC0415 - most commands have nothing to note

    note(line)


def _module(command: str) -> Any:
    return import_module(f"swansongd.cli.{command}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    args = parser(words).parse_args(words)
    log.configure("console", "warning")
    try:
        code: int = _module(args.command).run(args)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        for problem in error.problems:
            _note(problem)
        if error.hint:
            _note(error.hint)
        return error.exit_code
    except SwansongError as error:
        _note(error.line())
        return error.exit_code
    except BrokenPipeError:
        # Whoever read our output has seen enough; keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
