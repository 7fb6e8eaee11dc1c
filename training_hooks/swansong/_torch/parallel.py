# SPDX-License-Identifier: Apache-2.0
"""Calls functions that release the interpreter lock, in several threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

THREADS_MAX = 8
"""Largest number of threads."""


def run(functions: Sequence[Callable[[], object]], threads_max: int | None = None) -> None:
    """Call all functions, in this thread and further ones, and raise the first error.

    Args:
        functions: in the order in which they are begun.
        threads_max: default: :data:`THREADS_MAX`, or fewer if this process may use fewer processors.
    """
    left, errors = iter(functions), list[BaseException]()

    def work() -> None:
        try:
            for function in left:
                if errors:
                    return
                function()
        except BaseException as error:
            errors.append(error)

    if threads_max is None:
        threads_max = min(THREADS_MAX, len(os.sched_getaffinity(0)))
    threads = [
        threading.Thread(target=work, name="swansong-parallel", daemon=True)
        for _ in range(min(threads_max, len(functions)) - 1)
    ]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
