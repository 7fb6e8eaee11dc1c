# SPDX-License-Identifier: Apache-2.0
"""Threads of our own: one that takes tasks one after another, or a few over many tasks.

Not an executor: the interpreter waits for the threads of an executor when it exits, and these are
daemon threads.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

import structlog

from swansongd.errors import Stopped

Task = TypeVar("Task")

_POLL_S = 0.2

_log = structlog.get_logger(__name__)


class Worker:
    """One thread for tasks that the decision loop must not wait for, with a bounded queue.

    Args:
        name: of the thread.
        tasks_max: tasks that wait at most.
    """

    def __init__(self, name: str, *, tasks_max: int) -> None:
        self._name = name
        self._tasks: queue.Queue[Callable[[], object]] = queue.Queue(tasks_max)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin with the tasks."""
        self._thread.start()

    def submit(self, task: Callable[[], object]) -> bool:
        """Have the task done after those that wait; False when the queue is full.  Returns at once."""
        try:
            self._tasks.put_nowait(task)
        except queue.Full:
            return False
        return True

    def _run(self) -> None:
        while True:
            task = self._tasks.get()
            try:
                task()
            except Exception:  # the next task may be sound
                _log.exception("worker_fault", worker=self._name)


def parallel(
    tasks: Iterable[Task],
    function: Callable[[Task], None],
    *,
    threads: int,
    stop: threading.Event | None = None,
) -> None:
    """Call ``function`` once for each task, in up to ``threads`` threads at a time.

    Returns when all calls have returned.  The first error ends it: tasks not begun are dropped, calls
    under way are waited for (each is bounded by the timeouts of what it does), so that no thread of
    this call is left to touch what the caller cleans up next.

    Raises:
        Stopped: ``stop`` was set before all tasks were done.
        BaseException: the first one that ``function`` raised.
    """
    left = iter(list(tasks))
    lock = threading.Lock()
    halt = threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        while not halt.is_set():
            with lock:
                if stop is not None and stop.is_set():
                    errors.append(Stopped("stopped before it was done"))
                    halt.set()
                    return
                try:
                    task = next(left)
                except StopIteration:
                    return
            try:
                function(task)
            except BaseException as error:  # handed to the caller below
                with lock:
                    errors.append(error)
                halt.set()

    workers = [
        threading.Thread(target=work, name=f"parallel-{number}", daemon=True)
        for number in range(threads)
    ]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            while worker.is_alive():
                worker.join(_POLL_S)  # in short waits, so that Ctrl-C is seen
    except BaseException:
        halt.set()
        for worker in workers:
            if worker.ident is not None:
                worker.join()
        raise
    if errors:
        raise errors[0]
