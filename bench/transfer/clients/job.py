# SPDX-License-Identifier: Apache-2.0
"""The job of a Python contestant, and the measurement of its time.  Standard library only.

A contestant imports its modules and creates its client before the measurement, as a daemon does at its
start.  It connects during the measurement.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One transfer: these files of ``directory``, to or from these keys of ``bucket``."""

    operation: str
    """``upload`` or ``download``."""
    directory: Path
    files: Sequence[tuple[str, int]]
    """Name and size in bytes."""
    bucket: str
    prefix: str
    endpoint: str
    ca: str
    """Path of the authority that signed the certificate of the sink."""
    options: Sequence[str]

    def key(self, name: str) -> str:
        return f"{self.prefix}/{name}"

    def option(self, name: str, default: int) -> int:
        """The value of an option given as ``name=number``."""
        for option in self.options:
            key, _, value = option.partition("=")
            if key == name:
                return int(value)
        return default


def run(prepare: Callable[[Job], Callable[[], object]]) -> None:
    """Prepare, transfer, and print start, end and CPU seconds of the transfer as one line of JSON."""
    path, *options = sys.argv[1:]
    given = json.loads(Path(path).read_text())
    job = Job(
        operation=given["operation"],
        directory=Path(given["directory"]),
        files=[(name, size) for name, size in given["files"]],
        bucket=given["bucket"],
        prefix=given["prefix"],
        endpoint=given["endpoint"],
        ca=given["ca"],
        options=options,
    )
    transfer = prepare(job)
    cpu_before_s = time.process_time()
    began = time.monotonic()
    transfer()
    ended = time.monotonic()
    cpu_after_s = time.process_time()
    print(
        json.dumps(
            {
                "began_mono_s": began,
                "ended_mono_s": ended,
                "cpu_s": cpu_after_s - cpu_before_s,
            }
        ),
        flush=True,
    )


def in_threads(count: int, items: Sequence[T], work: Callable[[T], object]) -> None:
    """Process all items in ``count`` threads; raises the first error after all threads ended."""
    left = iter(items)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def worker() -> None:
        while True:
            with lock:
                item = next(left, None)
            if item is None:
                return
            try:
                work(item)
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=worker) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def parts(size_bytes: int, part_bytes: int) -> list[tuple[int, int]]:
    """Offset and length of each part."""
    return [
        (offset, min(part_bytes, size_bytes - offset))
        for offset in range(0, size_bytes, part_bytes)
    ]
