# SPDX-License-Identifier: Apache-2.0
"""Daemon threads: one that outlasts its errors, one that runs tasks in order, or several that share tasks.

Not a ThreadPoolExecutor: the interpreter joins the threads of an executor at exit.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sized
from typing import Any, TypeVar

import structlog

from swansong_bucket.errors import Stopped

Task = TypeVar("Task")

_NO_TASK = object()
_POLL_S = 0.2
_FAULT_PAUSE_S = 1.0
_FAULT_PAUSE_S_MAX = 60.0

_log = structlog.get_logger(__name__)


def lasting_thread(name: str, run: Callable[[], object]) -> threading.Thread:
    """A thread that calls ``run`` again, after a pause, until it returns without an error.

    For a loop that must last as long as its program: the lack of a descriptor or of memory, or an error of
    the disk, can fail any operation once.  The state of the loop that matters must outlast a call.

    Returns:
        The thread, which is not started yet.
    """

    def last() -> None:
        pause_s = _FAULT_PAUSE_S
        while True:
            began_mono_s = time.monotonic()
            try:
                run()
            except Exception:
                _log.exception("worker_fault", worker=name)
            else:
                return
            if time.monotonic() - began_mono_s > _FAULT_PAUSE_S_MAX:
                pause_s = _FAULT_PAUSE_S
            threading.Event().wait(pause_s)
            pause_s = min(2 * pause_s, _FAULT_PAUSE_S_MAX)

    return threading.Thread(target=last, name=name, daemon=True)


class Worker:
    """One thread with a bounded queue, for tasks that would block the decision loop.

    Args:
        name: of the thread.
        tasks_max: largest number of queued tasks.
    """

    def __init__(self, name: str, *, tasks_max: int) -> None:
        self._name = name
        self._tasks: queue.Queue[Callable[[], object]] = queue.Queue(tasks_max)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, task: Callable[[], object]) -> bool:
        """Queue a task; False if the queue is full.  Returns immediately."""
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
            except Exception:  # the next task may succeed
                _log.exception("worker_fault", worker=self._name)


def parallel(
    tasks: Iterable[Task],
    function: Callable[[Task], None],
    *,
    threads: int,
    stop: threading.Event | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Call ``function`` once for each task, in up to ``threads`` threads at a time.

    ``tasks`` is read task by task, by one thread at a time.  A collection has at most a thread for each task.
    Returns when all calls have returned.  After the first error no further task begins.  Calls in progress
    are waited for, so that no thread still uses what the caller cleans up next; each call must have its own
    timeouts.

    Args:
        progress: called after each task of a collection, one call at a time, with the number of tasks that
            are done and of all tasks.

    Raises:
        Stopped: ``stop`` was set before all tasks were done.
        BaseException: the first error that ``function`` raised.
    """
    left = iter(tasks)
    count = len(tasks) if isinstance(tasks, Sized) else threads
    done = 0
    lock = threading.Lock()
    halt = threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        nonlocal done
        try:
            while not halt.is_set():
                with lock:
                    task: Any = next(left, _NO_TASK)
                if task is _NO_TASK:
                    return
                if stop is not None and stop.is_set():
                    raise Stopped("stopped before it was done")
                function(task)
                if progress is not None:
                    with lock:
                        done += 1
                        progress(done, count)
        except BaseException as error:  # raised below, in the thread of the caller
            with lock:
                errors.append(error)
            halt.set()

    workers = [
        threading.Thread(target=work, name=f"parallel-{number}", daemon=True)
        for number in range(min(threads, count))
    ]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            while worker.is_alive():
                worker.join(_POLL_S)  # in short waits, so that Ctrl-C is handled
    except BaseException:
        halt.set()
        for worker in workers:
            if worker.ident is not None:
                worker.join()
        raise
    if errors:
        raise errors[0]
