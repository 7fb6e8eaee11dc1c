# SPDX-License-Identifier: Apache-2.0
"""Threads that run one at a time on a simulated clock: a seed decides where they switch.

:func:`install` replaces functions of :mod:`threading`, :mod:`time`, :mod:`select` and :mod:`selectors`, so
production code needs no change.  Each simulated thread is a real thread that waits for its turn.  It passes
its turn on wherever it would block, and at some of the locks that it acquires or releases.  If all threads
wait, the clock moves to the first deadline, so waiting costs no time.  shuttle (Rust) and FoundationDB's Flow
use the same techniques.

A process must call :func:`install` before it imports production code, which keeps some of the functions as
default values.  The functions behave as usual while no schedule is running.
"""

from __future__ import annotations

import _thread
import os
import queue
import random
import select
import selectors
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

_REAL_LOCK = _thread.allocate_lock
_REAL_START = _thread.start_new_thread
_REAL_URANDOM = os.urandom
_REAL_POLL = select.poll
_REAL_SELECTOR = selectors.DefaultSelector
_REAL_TIMES: dict[str, Any] = {
    name: getattr(time, name)
    for name in (
        *("monotonic", "time", "time_ns", "sleep", "process_time", "thread_time"),
        *("clock_gettime", "clock_gettime_ns"),
    )
}
_REAL_IS_ALIVE, _REAL_JOIN = threading.Thread.is_alive, threading.Thread.join
_PRODUCTION = {"swansong", "swansong_bucket", "swansong_tools", "swansongd"}
_WALL_OFFSET_S = 1_800_000_000.0
_SWITCH_S_MAX = 0.0005
"""Longest simulated time that one turn takes."""
_LOCK_SWITCH_SHARE = 0.25
"""Share of the acquired and released locks at which the thread may change."""


class Deadlock(AssertionError):
    """All threads wait without a timeout, or the run does not end."""


@dataclass(eq=False)
class Task:
    """A simulated thread."""

    name: str
    group: str
    """The simulated process of the thread; see :meth:`Schedule.kill`."""
    turn: Any = field(default_factory=_REAL_LOCK)
    ready: Callable[[], bool] | None = None
    deadline_s: float | None = None
    has_ended: bool = False
    is_frozen: bool = False

    def may_run(self, now_s: float) -> bool:
        if self.is_frozen:
            return False
        if self.ready is None:
            return self.deadline_s is None or self.deadline_s <= now_s
        return (self.deadline_s is not None and self.deadline_s <= now_s) or self.ready()


class Schedule:
    """Decides which thread runs next.  The thread that creates the schedule is the main one.

    Args:
        seed: determines all decisions.
        switches_max: the run fails after this number of turns.
    """

    def __init__(self, seed: int, switches_max: int = 600_000) -> None:
        self.random = random.Random(seed)
        self.now_s = 10_000.0
        self.frozen_s = 0.0
        """Time of the last :meth:`freeze`: a frozen process cannot be on time."""
        self.switches = 0
        self._switches_max = switches_max
        self.failures: list[BaseException] = []
        """Errors that ended a thread."""
        self.skews_s: dict[str, float] = {}
        """How much the wall clocks of some machines are ahead, and of processes with another clock."""
        self._fatal: BaseException | None = None
        """An error of the schedule itself: the main thread raises it, and the others never run again."""
        self.current = self._main = Task("main", "world")
        self.current.turn.acquire()
        self.tasks = [self.current]
        random.seed(seed)
        _active.append(self)

    @property
    def wall_s(self) -> float:
        return self.now_s + _WALL_OFFSET_S + self.skew_s(self.current.group)

    def skew_s(self, group: str) -> float:
        """How much the wall clock of a process is ahead."""
        machine = self.skews_s.get(group.partition("-")[0], 0.0)
        return self.skews_s.get(group, machine)

    # ------------------------------------------------------------ switches

    def switch(self) -> None:
        """Let any thread run that can; it may be the same one."""
        self.wait(None, None)

    def switch_at_lock(self) -> None:
        if self._switches_at_lock():
            self.switch()

    def sleep(self, seconds: float) -> None:
        self.wait(None, seconds)

    def wait(self, ready: Callable[[], bool] | None, timeout_s: float | None) -> bool:
        """Let other threads run until ``ready()``; returns False after the timeout."""
        me = self.current
        me.ready = ready
        me.deadline_s = None if timeout_s is None else self.now_s + max(0.0, timeout_s)
        self._pass_turn(me)
        me.deadline_s = me.ready = None
        return ready is None or ready()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Use real locks and clocks in this block, while the simulated world stands still."""
        _active.remove(self)
        try:
            yield
        finally:
            _active.append(self)

    def stop(self) -> None:
        """Use real locks and clocks from now on."""
        _active.clear()

    def _pass_turn(self, me: Task) -> None:
        try:
            chosen = self._choose() if self._fatal is None else self._main
        except BaseException as error:
            self._fatal, chosen = error, self._main
        if chosen is not me:
            has_ended = me.has_ended  # from the next line on, the chosen thread may kill this one
            self.current = chosen
            chosen.turn.release()
            if has_ended:
                return
            me.turn.acquire()
        if self._fatal is not None and me is self._main:
            raise self._fatal

    def _choose(self) -> Task:
        self.switches += 1
        if self.switches > self._switches_max:
            raise Deadlock(f"no end after {self.switches} turns: {self._names()}")
        self.now_s += self._turn_share() * _SWITCH_S_MAX
        while True:
            chosen = self._next()
            if chosen is not None:
                return chosen
            deadlines = [
                t.deadline_s for t in self.tasks if t.deadline_s is not None and not t.is_frozen
            ]
            if not deadlines:
                raise Deadlock(f"all threads wait: {self._names()}")
            self.now_s = max(self.now_s, min(deadlines))

    # The three decisions about turns, which testkit.simulation.choices notes and replays.

    def _switches_at_lock(self) -> bool:
        return self.random.random() < _LOCK_SWITCH_SHARE

    def _turn_share(self) -> float:
        """The time that this turn takes, as a share of the longest one."""
        return self.random.random()

    def _next(self) -> Task | None:
        """A thread that can run now, if there is one."""
        tasks = self.tasks[:]
        while tasks:  # the first in a random order: to poll the sockets of all is slow
            index = int(self.random.random() * len(tasks))
            if tasks[index].may_run(self.now_s):
                return tasks[index]
            tasks[index] = tasks[-1]
            del tasks[-1]
        return None

    def _names(self) -> str:
        return ", ".join(f"{t.group}/{t.name}" for t in self.tasks)

    # ------------------------------------------------------------ threads

    def start(
        self,
        function: Callable[..., object],
        args: tuple[Any, ...] = (),
        *,
        name: str = "",
        group: str = "",
    ) -> Task:
        """Start a simulated thread in the process of the current one, or in ``group``."""
        task = Task(name, group or self.current.group)
        task.turn.acquire()

        def run() -> None:
            task.turn.acquire()
            try:
                function(*args)
            except SystemExit:
                pass
            except BaseException as error:
                self.failures.append(error)
            task.has_ended = True
            self.tasks = [each for each in self.tasks if each is not task]
            self._pass_turn(task)
            task.turn.acquire()  # the end of a real thread frees objects, and closes files, at any time

        _REAL_START(run, ())
        self.tasks.append(task)
        return task

    def kill(self, group: str) -> None:
        """Send SIGKILL to a process: its threads never run again."""
        assert self.current.group != group
        for task in self.tasks:
            task.has_ended |= task.group == group
        self.tasks = [task for task in self.tasks if not task.has_ended]

    def freeze(self, prefix: str, *, is_frozen: bool = True) -> None:
        """Send SIGSTOP, or SIGCONT, to all processes whose names have this prefix."""
        self.frozen_s = self.now_s
        for task in self.tasks:
            if task.group.startswith(prefix):
                task.is_frozen = is_frozen


_active: list[Schedule] = []


def active() -> Schedule | None:
    return _active[-1] if _active else None


# ---------------------------------------------------------------- replacements


class _Lock:
    """``threading.Lock``, which is a real lock while no schedule is running."""

    def __init__(self) -> None:
        self._is_held = False
        self._real = _REAL_LOCK()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        schedule = active()
        if schedule is None:
            return bool(self._real.acquire(blocking, timeout))
        schedule.switch_at_lock()
        if self._is_held:
            if not blocking:
                return False
            schedule.wait(lambda: not self._is_held, None if timeout < 0 else timeout)
            if self._is_held:
                return False
        self._is_held = True
        return True

    def release(self) -> None:
        schedule = active()
        if schedule is None:
            self._real.release()
            return
        if not self._is_held:
            raise RuntimeError("release unlocked lock")
        self._is_held = False
        schedule.switch_at_lock()

    def locked(self) -> bool:
        return self._real.locked() if active() is None else self._is_held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        self._is_held = False
        self._real = _REAL_LOCK()


class _Poll:
    def __init__(self) -> None:
        self._real = _REAL_POLL()
        self.register, self.unregister = self._real.register, self._real.unregister
        self.modify = self._real.modify

    def poll(self, timeout_ms: float | None = None) -> Any:
        schedule = active()
        if schedule is None or timeout_ms == 0:
            return self._real.poll(timeout_ms)
        timeout_s = None if timeout_ms is None or timeout_ms < 0 else timeout_ms / 1000
        schedule.wait(lambda: bool(self._real.poll(0)), timeout_s)
        return self._real.poll(0)


class _Selector(_REAL_SELECTOR):
    def select(self, timeout: float | None = None) -> Any:
        schedule = active()
        if schedule is None:
            return super().select(timeout)
        look = super().select
        schedule.wait(lambda: bool(look(0)), timeout)
        return look(0)


def _start_new_thread(function: Callable[..., object], args: tuple[Any, ...]) -> int:
    schedule = active()
    if schedule is None:
        return int(_REAL_START(function, args))
    thread: Any = getattr(function, "__self__", None)
    thread.simulated = schedule.start(function, args, name=thread.name)
    return 0


def _is_alive(thread: threading.Thread) -> bool:
    task: Task | None = getattr(thread, "simulated", None)
    return _REAL_IS_ALIVE(thread) if task is None else not task.has_ended


def _join(thread: threading.Thread, timeout: float | None = None) -> None:
    schedule = active()
    if schedule is None:
        _REAL_JOIN(thread, timeout)
    else:
        schedule.wait(lambda: not _is_alive(thread), timeout)


def _clock(name: str, simulated: Callable[[Schedule], Any]) -> Callable[..., Any]:
    real = _REAL_TIMES[name]

    def read(*args: Any) -> Any:
        schedule = active()
        return real(*args) if schedule is None else simulated(schedule)

    return read


def _sleep(seconds: float) -> None:
    schedule = active()
    if schedule is None:
        _REAL_TIMES["sleep"](seconds)
    else:
        schedule.sleep(seconds)


def _urandom(size: int) -> bytes:
    """Random bytes for :class:`random.SystemRandom` and :mod:`secrets`."""
    schedule = active()
    return _REAL_URANDOM(size) if schedule is None else schedule.random.randbytes(size)


def fix_hashes() -> None:
    """Start this process again unless its hash seed is 0: the order of a set depends on hashes of strings."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        again = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, again, {**os.environ, "PYTHONHASHSEED": "0"})


def install() -> None:
    """Replace the functions.  Called once in a process.

    Raises:
        RuntimeError: production code is imported already, and may keep the real functions.
    """
    early = sorted(name for name in sys.modules if name.partition(".")[0] in _PRODUCTION)
    if early:
        raise RuntimeError(f"install() failed: imported before it: {', '.join(early)}")
    module: Any = threading
    module.Lock = module._allocate_lock = _Lock
    module.RLock = module._PyRLock
    module._start_new_thread = _start_new_thread
    module.Thread.is_alive = _is_alive
    module.Thread.join = _join
    select.poll = _Poll  # type: ignore[misc, assignment]
    selectors.DefaultSelector = _Selector  # type: ignore[misc]
    monotonic = _clock("monotonic", lambda s: s.now_s)
    clocks: dict[str, Any] = {
        "monotonic": monotonic,
        "time": _clock("time", lambda s: s.wall_s),
        "time_ns": _clock("time_ns", lambda s: int(s.wall_s * 1e9)),
        "process_time": _clock("process_time", lambda s: s.now_s),
        "thread_time": _clock("thread_time", lambda _: 0.0),
        "clock_gettime": _clock("clock_gettime", lambda s: s.now_s),
        "clock_gettime_ns": _clock("clock_gettime_ns", lambda s: int(s.now_s * 1e9)),
        "sleep": _sleep,
    }
    for name, clock in clocks.items():
        setattr(time, name, clock)
    module._time = monotonic
    queue.time = monotonic  # type: ignore[attr-defined]
    queue.SimpleQueue = queue._PySimpleQueue  # type: ignore[attr-defined, misc]
    random._urandom = _urandom  # type: ignore[attr-defined]
