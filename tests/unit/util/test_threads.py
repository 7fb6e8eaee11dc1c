# SPDX-License-Identifier: Apache-2.0
"""Tasks in parallel threads, and tasks in order in one thread."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from structlog.testing import CapturingLogger
from swansong_bucket.errors import Stopped
from swansong_bucket.util import threads as module
from swansong_bucket.util.threads import Worker, lasting_thread, parallel

from testkit.waiting import until


def test_every_task_runs_once() -> None:
    """With fewer threads than tasks, and with more."""
    for threads in (1, 3, 50):
        done: list[int] = []
        parallel(range(20), done.append, threads=threads)
        assert sorted(done) == list(range(20))


def test_tasks_run_in_parallel_up_to_the_limit() -> None:
    """Three threads meet at a barrier; a fourth thread would be counted."""
    barrier = threading.Barrier(3)
    lock = threading.Lock()
    running = 0
    most = 0

    def meet(_task: int) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        barrier.wait(60)
        with lock:
            running -= 1
        barrier.wait(60)

    parallel(range(6), meet, threads=3)
    assert most == 3


def test_after_the_first_error_no_task_begins_and_no_thread_is_left() -> None:
    """The running task is waited for, and the error is raised."""
    begun: list[int] = []
    both_begun = threading.Barrier(2)
    failed = threading.Event()

    def work(task: int) -> None:
        begun.append(task)
        both_begun.wait(60)
        if task == 0:
            failed.set()
            raise ValueError("task 0")
        failed.wait(60)

    before = set(threading.enumerate())
    with pytest.raises(ValueError, match="task 0"):
        parallel(range(100), work, threads=2)
    assert set(threading.enumerate()) <= before  # threads of other tests may end meanwhile
    assert set(begun) >= {0, 1}
    assert len(begun) <= 4


def test_a_stop_raises_stopped_unless_all_tasks_are_done() -> None:
    """The caller must not take the tasks for done, nor do them again."""
    stop = threading.Event()
    done: list[int] = []

    def work(task: int) -> None:
        done.append(task)
        stop.set()

    with pytest.raises(Stopped):
        parallel(range(10), work, threads=1, stop=stop)
    assert done == [0]
    stop.clear()
    parallel([7], work, threads=1, stop=stop)
    assert done == [0, 7]


@pytest.mark.fault("H07")
def test_a_lasting_thread_outlasts_its_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each error is logged.  The thread ends when its function returns."""
    log = CapturingLogger()
    monkeypatch.setattr(module, "_log", log)
    monkeypatch.setattr(module, "_FAULT_PAUSE_S", 0.01)
    monkeypatch.setattr(module, "_FAULT_PAUSE_S_MAX", 0.02)
    outcomes = [OSError(errno.EMFILE, "no descriptor"), ValueError("broken"), None]

    def run() -> None:
        error = outcomes.pop(0)
        if error is not None:
            raise error

    thread = lasting_thread("test", run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert not outcomes
    assert [call.kwargs for call in log.calls] == [{"worker": "test"}] * 2


@pytest.mark.fault("H07")
def test_a_worker_runs_its_tasks_in_order_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of a task is logged, and does not end the thread."""
    log = CapturingLogger()
    monkeypatch.setattr(module, "_log", log)
    worker = Worker("test", tasks_max=1000)
    done: list[tuple[int, int]] = []

    def fail() -> None:
        raise ValueError("broken")

    for number in range(500):
        assert worker.submit(lambda number=number: done.append((number, threading.get_ident())))  # type: ignore[misc]
        assert worker.submit(fail)
    before = set(threading.enumerate())
    worker.start()
    until(lambda: len(done) == 500, what="all tasks")
    assert [number for number, _ in done] == list(range(500))
    assert len({thread for _, thread in done}) == 1
    assert len(set(threading.enumerate()) - before) == 1
    until(lambda: len(log.calls) == 500, what="all faults")


@pytest.mark.fault("H07")
def test_a_worker_with_a_full_queue_refuses_a_task_immediately() -> None:
    """The caller never blocks, and the queue does not grow without limit."""
    worker = Worker("test", tasks_max=2)
    held = threading.Event()
    assert [worker.submit(held.wait) for _ in range(4)] == [True, True, False, False]
    worker.start()
    held.set()
    until(lambda: worker.submit(held.wait), what="room")


def test_tasks_are_read_one_by_one() -> None:
    """A million tasks are never in memory together, and an error of their iterator is raised."""
    ahead: list[int] = []
    made = done = 0

    def tasks() -> Iterator[int]:
        nonlocal made
        for number in range(10):
            made += 1
            yield number
        raise ValueError("no further task")

    def work(_task: int) -> None:
        nonlocal done
        ahead.append(made - done)
        done += 1

    with pytest.raises(ValueError, match="no further task"):
        parallel(tasks(), work, threads=1)
    assert ahead == [1] * 10


def test_the_progress_counts_every_task_of_a_collection() -> None:
    """One call at a time, in order."""
    shown: list[tuple[int, int]] = []
    parallel(
        [7, 8, 9],
        lambda _task: None,
        threads=50,
        progress=lambda done, count: shown.append((done, count)),
    )
    assert shown == [(1, 3), (2, 3), (3, 3)]


def test_no_collection_gets_more_threads_than_it_has_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers name their limit, however few tasks there are."""
    names: list[str] = []
    make = threading.Thread

    def counted(**options: Any) -> threading.Thread:
        names.append(options["name"])
        return make(**options)

    monkeypatch.setattr(module.threading, "Thread", counted)
    done: list[int] = []
    parallel([7, 8, 9], done.append, threads=50)
    assert sorted(done) == [7, 8, 9]
    assert names == ["parallel-0", "parallel-1", "parallel-2"]
