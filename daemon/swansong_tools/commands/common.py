# SPDX-License-Identifier: Apache-2.0
"""Shared code of the commands: options, output, units."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from swansong import bounds
from swansong_bucket.config.values import InvalidValue, Reader, duration, run_name
from swansong_bucket.model import CommitRef
from swansong_bucket.util.printable import printable

Parser = Callable[[str], Any]
"""Returns the value of an argument, or raises ArgumentTypeError."""


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run",
        type=run_argument,
        metavar="RUN",
        help="name of the run (default: the configured run)",
    )


def add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--step", type=step, metavar="N", help="consider only commits of this step")


def add_generation(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--generation", type=generation, metavar="G", help=text)


def of_generation(wanted: int | None) -> Callable[[CommitRef], bool]:
    """The test for commits of ``--generation``; without the option all commits pass."""
    return lambda ref: wanted in (None, ref.generation)


def add_flag(parser: argparse._ActionsContainer, name: str, text: str) -> None:
    """Add an option without a value."""
    parser.add_argument(name, action="store_true", help=text)


def add_json(parser: argparse._ActionsContainer) -> None:
    add_flag(parser, "--json", "print JSON, for programs")


def argument(reader: Reader) -> Parser:
    """A parser that reads an argument as the configuration reads a value.

    Digits alone are a number, as a value without quotes is.
    """

    def parse(text: str) -> Any:
        is_number = text.isascii() and text.isdigit()
        try:
            return reader(int(text) if is_number else text)
        except InvalidValue as error:
            raise argparse.ArgumentTypeError(
                f"{text!r:.80} {error.problem}; {error.remedy}"
            ) from None

    return parse


def whole(what: str, most: int, *, least: int = 1) -> Parser:
    """A parser of a whole number.

    Args:
        what: description of a valid one, for the error.
    """

    def parse(text: str) -> int:
        is_number = text.isascii() and text.isdigit() and len(text) <= len(str(most))
        if not is_number or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r:.60} is not {what}")
        return int(text)

    return parse


def target(text: str) -> str:
    """Parse the place to write to.  A shell variable that is not set gives an empty one."""
    if not text:
        raise argparse.ArgumentTypeError("'' names no place; give a directory")
    return text


def interval(least_s: float, most_s: float, shown: str) -> Parser:
    """A parser of a duration within limits, which ``shown`` has in words."""
    read = argument(duration)

    def parse(text: str) -> float:
        seconds = float(read(text))
        if not least_s <= seconds <= most_s:
            raise argparse.ArgumentTypeError(f"{text!r:.80} is not from {shown}")
        return seconds

    return parse


run_argument = argument(run_name)
generation = whole("a generation; list them with swansong ls", bounds.GENERATION_MAX)
step = whole("a step; list them with swansong ls", bounds.STEP_MAX, least=0)


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that shows its progress: JSON comes without it."""
    add_flag(parser, "--quiet", "print no progress")
    add_json(parser)


def is_screen(stream: TextIO) -> bool:
    """Whether the stream is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


def place(ref: CommitRef | None) -> dict[str, int | None]:
    """The generation and step of a commit, as JSON values; null without a commit."""
    return {
        "generation": None if ref is None else ref.generation,
        "step": None if ref is None else ref.step,
    }


def rounded(value: Any, digits: int) -> Any:
    """JSON values with rounded fractions."""
    if isinstance(value, float):
        return round(value, digits)
    if isinstance(value, Mapping):
        return {name: rounded(each, digits) for name, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [rounded(each, digits) for each in value]
    return value


def note(line: str) -> None:
    """Print one line for people on standard error."""
    print(f"swansong: {printable(line)}", file=sys.stderr, flush=True)
