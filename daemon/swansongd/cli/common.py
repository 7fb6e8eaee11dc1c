# SPDX-License-Identifier: Apache-2.0
"""Shared code of the commands: options, the opened store, signals, progress, units."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from swansong import bounds

from swansongd.bucket import signing
from swansongd.bucket.keys import RunKeys
from swansongd.config.config import Config, load
from swansongd.config.values import InvalidValue, run_name
from swansongd.flush.claim_record import expect_recorded_store
from swansongd.restore.reader import CONNECTIONS
from swansongd.staging.scan import OWN_DIRECTORY
from swansongd.stores.base import ObjectStore
from swansongd.stores.opening import open_store
from swansongd.stores.wrappers.retry import Retrying
from swansongd.util.log import printable

_SILENT_S = 5.0
"""Work that finishes within this time prints no progress lines."""
_CALL_BUDGET_S = 30.0
"""Time in which one failed call to the store is retried."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The configuration, its store, and the selected run."""

    config: Config
    store: ObjectStore
    keys: RunKeys
    stop: threading.Event
    """Set by SIGINT or SIGTERM; a second signal ends the process immediately."""
    connections: int
    """Maximum number of connections to the store.  No trainer needs a share of them."""


@contextmanager
def opened(args: argparse.Namespace) -> Iterator[Opened]:
    """Read the configuration, open the store, and turn the first signal into ``stop``.

    Raises:
        ConfigError: the configuration is not valid.
    """
    config = load(args.config)
    connections = max(CONNECTIONS, config.flush.connections)
    store = open_store(config.store, connections=connections)
    own = config.staging.path / config.run.name / OWN_DIRECTORY
    expect_recorded_store(store, own, config.run.name)
    key_file = config.store.signing_key_file
    # The daemon's user owns the key.  Root, who restores as well, accepts any owner.
    owners = None if os.geteuid() == 0 else {0, os.geteuid()}
    signer = None if key_file is None else signing.load(key_file, owners=owners)
    stop = threading.Event()
    before = {}

    def on_signal(number: int, _frame: FrameType | None) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, on_signal)
    try:
        yield Opened(
            config=config,
            store=Retrying(store, give_up_mono_s=lambda: None, budget_s=_CALL_BUDGET_S, stop=stop),
            keys=RunKeys(args.run or config.run.name, signer),
            stop=stop,
            connections=connections,
        )
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run", type=_run, metavar="RUN", help="name of the run (default: the configured run)"
    )


def add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--step", type=_step, metavar="N", help="consider only commits of this step"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def _run(text: str) -> str:
    try:
        return str(run_name(text))
    except InvalidValue as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error.problem}; {error.remedy}") from None


def generation(text: str) -> int:
    """Parse the argument of ``--generation``."""
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= bounds.GENERATION_MAX):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a generation; list them with swansong ls"
        )
    return int(text)


def _step(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a step; list them with swansong ls")
    return int(text)


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # main() handles it; the method of the base class would exit


def console() -> Console:
    """Standard output for tables; wide without a terminal, so that no cell is truncated."""
    return _Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 240)


def note(line: str) -> None:
    """Print one line for people on standard error."""
    print(f"swansong: {printable(line)}", file=sys.stderr, flush=True)


class _Shown(ABC):
    """Progress on standard error: a bar on a terminal, else one line per tenth.

    Args:
        what: the verb, for example ``restore``.
        columns: columns of the bar after the verb.
    """

    def __init__(self, what: str, *columns: ProgressColumn) -> None:
        self._what = what
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._tenths = 0
        self._began_mono_s = time.monotonic()
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                *columns,
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task(what, total=None)

    def __call__(self, done: int, total: int) -> None:
        if self._bar is not None:
            self._bar.start()  # not earlier: a terminal can show one bar at a time
            self._bar.update(self._task, completed=done, total=total)
            if done >= total:
                self._bar.stop()
            return
        tenths = 10 * done // total if total else 10
        if tenths < self._tenths:  # restarted with another commit
            self._tenths = 0
        if tenths > self._tenths:
            self._tenths = tenths
            self._line(tenths, done, total, max(time.monotonic() - self._began_mono_s, 1e-3))

    @abstractmethod
    def _line(self, tenths: int, done: int, total: int, took_s: float) -> None:
        """Print the line for another tenth."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


class ShownProgress(_Shown):
    """Progress in bytes."""

    def __init__(self, what: str) -> None:
        super().__init__(what, DownloadColumn(), TransferSpeedColumn())

    def _line(self, tenths: int, done: int, total: int, took_s: float) -> None:
        share = f"{self._what} {tenths}0 % of {human_bytes(total)}"
        note(f"{share}, {human_bytes(done / took_s)}/s")


class ShownCount(_Shown):
    """Progress in objects.  Without a terminal the first seconds print nothing.

    Args:
        is_quiet: print nothing at all without a terminal.
    """

    def __init__(self, what: str, *, is_quiet: bool = False) -> None:
        super().__init__(what, MofNCompleteColumn())
        self._is_quiet = is_quiet

    def _line(self, tenths: int, done: int, total: int, took_s: float) -> None:
        if took_s > _SILENT_S and not self._is_quiet:
            note(f"{self._what} {tenths}0 % of {total}, {done / took_s:.3g}/s")


def human_bytes(size_bytes: float) -> str:
    """Format bytes as ``1.2 GB``: up to three digits, decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 999.5:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.4g} TB"


def human_s(seconds: float) -> str:
    """Format a duration as ``4.2 s``, ``12 min``, ``3.5 h`` or ``2 d``."""
    for unit, size_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size_s:
            return f"{seconds / size_s:.3g} {unit}"
    return f"{seconds:.3g} s"
