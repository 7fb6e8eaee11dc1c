# SPDX-License-Identifier: Apache-2.0
"""Progress of a command on standard error."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, Self

from swansongd.cli.common import human_bytes, note

_SILENT_S = 5.0
"""Work that finishes within this time prints no progress lines."""


class _Shown(ABC):
    """Progress on standard error: a bar on a terminal, else one line per tenth.

    Args:
        what: the verb, for example ``restore``.
        counts_bytes: whether the progress is in bytes.
    """

    def __init__(self, what: str, *, counts_bytes: bool) -> None:
        self._what = what
        self._bar: Any = None
        self._task: Any = None
        self._tenths = 0
        self._began_mono_s = time.monotonic()
        if sys.stderr.isatty():
            from swansongd.cli.terminal import bar  # noqa: PLC0415 - slow to import

            self._bar = bar(counts_bytes=counts_bytes)
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
        super().__init__(what, counts_bytes=True)

    def _line(self, tenths: int, done: int, total: int, took_s: float) -> None:
        share = f"{self._what} {tenths}0 % of {human_bytes(total)}"
        note(f"{share}, {human_bytes(done / took_s)}/s")


class ShownCount(_Shown):
    """Progress in objects.  Without a terminal the first seconds print nothing.

    Args:
        is_quiet: print nothing at all without a terminal.
    """

    def __init__(self, what: str, *, is_quiet: bool = False) -> None:
        super().__init__(what, counts_bytes=False)
        self._is_quiet = is_quiet

    def _line(self, tenths: int, done: int, total: int, took_s: float) -> None:
        if took_s > _SILENT_S and not self._is_quiet:
            note(f"{self._what} {tenths}0 % of {total}, {done / took_s:.3g}/s")
