# SPDX-License-Identifier: Apache-2.0
"""SIGTERM of a trainer: it ends after a last checkpoint, which its daemon requests.

A user, a batch system, a pod or a shutdown sends it, to the daemon as well or not.  A launcher such as
torchrun sends it to the living ranks of a VM within 0.1 s after one rank died.  Their training loops may be
blocked in a collective with the dead rank, where the main thread can run no Python code.  So another thread
decides about the end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from swansong.protocol import SIGTERM_LIMIT_S

EXIT_CODE = 128 + signal.SIGTERM
"""Exit code of a process whose main thread does not stop; otherwise the signal ends the process."""
STOP_LIMIT_S = 0.5
"""Longest wait for the main thread to stop; one that is blocked in a collective cannot."""


class Termination:
    """Calls two functions after SIGTERM, and then ends the process.

    A handler that the script has installed stays, and replaces this one if it is installed later.

    Args:
        answer: called in another thread, while the training loop continues.
        leave: called in another thread afterwards, while the main thread stands still.  Neither function
            raises anything.
        is_last: if the script's own handler calls this one, stop there and call ``leave``; otherwise the
            script's handler decides alone.
    """

    def __init__(
        self, answer: Callable[[], object], leave: Callable[[], object], *, is_last: bool
    ) -> None:
        self._answer = answer
        self._leave = leave
        self._is_last = is_last
        self._must_stop = False
        self._has_stopped = threading.Event()
        self._is_over = threading.Event()
        self._fds: tuple[int, int] | None = None
        self._is_held = False

    def start(self) -> None:
        """Install the handler, if SIGTERM has the default action and this is the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(write_fd, False)
        former_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        if former_fd >= 0:  # of an event loop, which needs it
            signal.set_wakeup_fd(former_fd)
            os.close(read_fd)
            os.close(write_fd)
            return
        self._fds = (read_fd, write_fd)
        signal.signal(signal.SIGTERM, self._handle)
        threading.Thread(
            target=self._watch, args=(read_fd,), name="swansong-sigterm", daemon=True
        ).start()

    def close(self) -> None:
        """Restore the default action.  A process that has got the signal before must end by itself."""
        if self._fds is None or threading.current_thread() is not threading.main_thread():
            return
        _, write_fd = self._fds
        self._fds = None
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        former_fd = signal.set_wakeup_fd(-1)
        if former_fd not in (write_fd, -1):
            signal.set_wakeup_fd(former_fd)
        os.close(write_fd)  # ends the thread, which closes the other one

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Ignore the signal in a block of the main thread, after which the process ends by itself."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    def forked(self) -> None:
        """Restore the default action in the child of a fork, such as a worker of a data loader."""
        if self._fds is not None:
            read_fd, _ = self._fds
            self.close()
            os.close(read_fd)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self._fds is None or self._is_held:
            return
        if self._is_last and signal.getsignal(signal.SIGTERM) != self._handle:
            self._must_stop = True
            os.write(self._fds[1], bytes([signal.SIGTERM]))  # the thread has ignored the signal
        if self._must_stop:
            self._has_stopped.set()
            self._is_over.wait()
        if self._is_over.is_set():
            # systemd and shells see the signal, as without the guard.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def _watch(self, read_fd: int) -> None:
        while number := os.read(read_fd, 1):
            is_ours = self._must_stop or signal.getsignal(signal.SIGTERM) == self._handle
            if number[0] == signal.SIGTERM and is_ours and not self._is_held:
                # Not in this thread: the stopped main thread may hold a lock that the functions need.
                ending = threading.Thread(target=self._end, name="swansong-last", daemon=True)
                ending.start()
                ending.join(SIGTERM_LIMIT_S)
                os._exit(EXIT_CODE)
        os.close(read_fd)

    def _end(self) -> None:
        if not self._must_stop:
            self._answer()
        if self._fds is None or self._is_held:
            self._is_over.wait()  # the script ends by itself, with its own exit code
        if not self._must_stop:
            self._must_stop = True
            os.kill(os.getpid(), signal.SIGTERM)
        self._has_stopped.wait(STOP_LIMIT_S)
        self._leave()
        self._is_over.set()
        threading.Event().wait(STOP_LIMIT_S)
