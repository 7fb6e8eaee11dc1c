# SPDX-License-Identifier: Apache-2.0
"""The ``swansong`` command: parse the command line, run one command, turn errors into exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from swansong_bucket.errors import (
    EXIT_CODES,
    ConfigError,
    StagingError,
    SwansongError,
    Unreachable,
)
from swansong_bucket.util.standard_streams import replace_closed
from swansongd import __version__
from swansongd.config.config import DEFAULT_PATH

from swansong_tools.paths import exists

COMMANDS = {
    "init": "write the configuration, then check the installation",
    "run": "start a trainer, and a daemon if none serves this machine",
    "status": "show the state of the daemon on this VM",
    "notify": "give the daemon notice that this VM will be terminated",
    "drill": "rehearse an evacuation, or a restore from the mirror",
    "takeover": "continue the run here although another VM may still train",
    "ls": "list the commits of a run, newest first",
    "pin": "keep a commit under a name",
    "unpin": "remove a pin",
    "prune": "delete the commits that no rule keeps",
    "loss": "show what interruptions have cost a run",
    "report": "show what happened to a run, as text or as a page",
    "advise": "show what would save GPU time and money",
    "exporter": "serve metrics of runs, read from their buckets",
    "finished": "report by the exit code whether a run has ended",
    "restore": "fetch the newest whole commit of a run",
    "export": "write a commit as plain files to a bucket or a directory",
    "mirror": "copy commits to the mirror, or continue the run there",
    "verify": "compare all stored bytes of a run with their digests",
    "lifecycle": "print lifecycle rules that fit the bucket of a run",
    "doctor": "check the installation and print a fix for each problem",
    "completion": "print a completion script for bash, zsh or fish",
    "version": "print the version",
}
"""Each command is the module of the same name, imported only if the command line names it.  A command that an
operator repeats every second must not load the code of all others.  EXAMPLES and NOTES of the module are part
of its help."""

EXAMPLES = {
    "Show what the daemon is doing.": "swansong status",
    "Check this VM before the first training run.": "sudo swansong doctor",
    "Fetch the newest checkpoint.": "swansong restore --to /mnt/resume",
}


def parser(argv: Iterable[str]) -> argparse.ArgumentParser:
    """The command line, with the options of each command that ``argv`` names."""
    codes = "\n".join(f"  {code:<3} {text}" for code, text in EXIT_CODES.items())
    top = argparse.ArgumentParser(
        prog="swansong",
        description="List, restore and verify the checkpoints of training runs on spot VMs.",
        epilog=f"{_examples(EXAMPLES)}\n\nexit codes:\n{codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument(
        "--config",
        type=Path,
        default=DEFAULT_PATH,
        metavar="FILE",
        help=f"configuration file (default {DEFAULT_PATH})",
    )
    top.add_argument("--version", action="version", version=f"swansong {__version__}")
    commands = top.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True
    )
    for name, text in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name in argv:
            module = _module(name)
            module.add_arguments(command)
            command.epilog = _examples(module.EXAMPLES)
            if hasattr(module, "NOTES"):
                command.description = f"{command.description}\n{module.NOTES}"
    return top


def _examples(examples: Mapping[str, str]) -> str:
    return "examples:\n" + "\n".join(f"  # {why}\n  {line}" for why, line in examples.items())


def _note(line: str) -> None:
    from swansong_tools.commands.common import note  # noqa: PLC0415 - most commands print no error

    note(line)


def _note_other_jobs(config: Path, command: str) -> None:
    from swansong_tools.commands.jobs import other_jobs  # noqa: PLC0415 - as above

    for job in other_jobs(config):
        _note(f"other job of this VM: swansong --config {job} {command}")


def _module(command: str) -> Any:
    return import_module(f"swansong_tools.commands.{command}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    replace_closed()
    words = sys.argv[1:] if argv is None else argv
    args = parser(words).parse_args(words)
    try:
        code: int = _module(args.command).run(args)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        for problem in error.problems:
            _note(problem)
        if error.hint:
            _note(error.hint)
        if not exists(args.config):
            _note_other_jobs(args.config, args.command)
        return error.exit_code
    except SwansongError as error:
        _note(error.line())
        if isinstance(error, Unreachable):
            _note_other_jobs(args.config, args.command)
        return error.exit_code
    except BrokenPipeError:
        # The reader closed the pipe.  Without this the interpreter prints an error when it flushes at exit.
        _discard_output()
        return 0
    except OSError as error:
        try:
            print(flush=True)  # fails again if the output was the cause
        except OSError:
            _discard_output()
            _note(f"writing the output failed: {error.strerror}; redirect it to another file")
            return StagingError.exit_code
        raise


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
