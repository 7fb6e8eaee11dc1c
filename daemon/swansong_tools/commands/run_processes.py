# SPDX-License-Identifier: Apache-2.0
"""Processes that end together: those of ``swansong run``, with all their descendants.

Two processes watch each other: the one that the user started, and a supervisor, the parent of daemon and
trainer.  Both are subreapers: if one is killed, the orphans below it become children of the other, which then
kills all its descendants.  A process group would miss the workers of torchrun, which have their own.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

from swansong_tools.commands.common import note

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PARENT_ENDED = signal.SIGUSR1
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_KILL_LIMIT_S = 10.0
"""A process in a driver or on a dead mount may not end."""
_LIBC = ctypes.CDLL(None)


def supervised(work: Callable[[], int]) -> int:
    """Do the work in a child process, and return its exit code.

    SIGINT, SIGTERM and SIGHUP are passed on to the work.  A SIGINT after another one of these, or the end of
    either process by SIGKILL, kills all descendants of both.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    # A parent may ignore it, and the end of the child would have no status then.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _work(work, parent)
    code = _pass_on_signals(child)
    kill_descendants()
    if code < 0:
        note(f"the supervisor of daemon and trainer was ended by signal {-code}")
    return exit_code(code)


def _pass_on_signals(child: int) -> int:
    """Pass on each signal until the child has ended; returns its exit code, ``-N`` after signal N.

    The signals are blocked.  A handler would run after the child's end if its signal came an instant before
    the wait for the child.
    """
    awaited = (*_not_ignored(), signal.SIGCHLD)
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    has_stopped = False
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        number = signal.sigwait(awaited)
        if number == signal.SIGINT and has_stopped:
            kill_descendants()
            os._exit(exit_code(-number))
        if number != signal.SIGCHLD:
            has_stopped = True
            os.kill(child, number)
    return os.waitstatus_to_exitcode(ended[1])


def _work(work: Callable[[], int], parent: int) -> NoReturn:
    code = 1
    try:
        os.setsid()  # signals of the terminal reach only the parent, which passes them on
        signal.signal(_PARENT_ENDED, lambda *_: (kill_descendants(), os._exit(1)))
        _end_with(parent, _PARENT_ENDED)
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        code = work()
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def handle_stops(handler: Callable[[int, FrameType | None], None]) -> None:
    """Handle the signals that stop a command, which are blocked until then."""
    for number in _not_ignored():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def _not_ignored() -> list[signal.Signals]:
    """The signals that stop a command; under ``nohup`` SIGHUP does not."""
    return [
        number
        for number in STOPPING
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    ]


def start(
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    stdin: int | None,
    output: IO[bytes] | None,
    blocked: Collection[signal.Signals] = (),
) -> subprocess.Popen[bytes]:
    """Start a program in its own session; it is killed when this process ends.

    Args:
        blocked: signals that the program does not receive.

    Raises:
        OSError: the program cannot be run.
    """
    parent = os.getpid()

    def prepare() -> None:
        _end_with(parent, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)

    return subprocess.Popen(  # noqa: S603 - the operator names the command
        command,
        env=env,
        stdin=stdin,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=prepare,  # noqa: PLW1509 - there is one thread
    )


def _end_with(parent: int, number: int) -> None:
    """Get this signal when the parent ends, also if it has ended already."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def reaped() -> dict[int, int]:
    """Children that have ended, adopted orphans included: exit code by process id, ``-N`` after signal N."""
    found = {}
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            found[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    return found


def exit_code(code: int) -> int:
    """The exit code that a shell would show."""
    return code if code >= 0 else 128 - code


def kill_descendants(spared: Collection[int] = ()) -> dict[int, int]:
    """Kill all processes below this one, but not those spared with what is below them.

    Returns:
        What :func:`reaped` does.
    """
    ended = {}
    limit_mono_s = time.monotonic() + _KILL_LIMIT_S
    while (left := _descendants(spared)) and time.monotonic() < limit_mono_s:
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        ended.update(reaped())
        time.sleep(0.01)
    return ended


def _descendants(spared: Collection[int]) -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [os.getpid()]
    for pid in found:  # the list grows meanwhile
        found += [child for child in children.get(pid, ()) if child not in spared]
    return found[1:]
