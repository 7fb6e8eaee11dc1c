# SPDX-License-Identifier: Apache-2.0
"""SIGTERM in a job of several ranks: one last function call before the process ends.

A launcher such as torchrun sends SIGTERM to the living ranks of a VM within 0.1 s after one rank died.
Their training loops may be blocked in a collective with the dead rank, where the main thread can run no
Python code.  So another thread does the work.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

EXIT_CODE = 128 + signal.SIGTERM
STOP_LIMIT_S = 0.5
"""Longest wait for the main thread to stop; one that is blocked in a collective cannot."""
SAVE_LIMIT_S = 25.0
"""Longest time from the signal to the end of the process; torchrun sends SIGKILL after 30 s."""


class Termination:
    """Calls a function after SIGTERM, while the main thread stands still, and then ends the process.

    A handler that the script has installed stays, and replaces this one if it is installed later.

    Args:
        save: called in another thread; raises nothing.
    """

    def __init__(self, save: Callable[[], object]) -> None:
        self._save = save
        self._has_stopped = threading.Event()
        self._never = threading.Event()
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
        signal.signal(signal.SIGTERM, self._stop)
        threading.Thread(
            target=self._watch, args=(read_fd,), name="swansong-sigterm", daemon=True
        ).start()

    def close(self) -> None:
        """Restore the default action."""
        if self._fds is None or threading.current_thread() is not threading.main_thread():
            return
        read_fd, write_fd = self._fds
        self._fds = None
        if signal.getsignal(signal.SIGTERM) == self._stop:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        former_fd = signal.set_wakeup_fd(-1)
        if former_fd not in (write_fd, -1):
            signal.set_wakeup_fd(former_fd)
        os.close(write_fd)  # ends the thread, which closes the other one
        del read_fd

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

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        if self._fds is not None and not self._is_held:
            self._has_stopped.set()
            # If another handler has replaced this one and calls it, the thread has ignored the signal.
            os.write(self._fds[1], bytes([signal.SIGTERM]))
            self._never.wait()

    def _watch(self, read_fd: int) -> None:
        while number := os.read(read_fd, 1):
            is_ours = signal.getsignal(signal.SIGTERM) == self._stop
            is_ours |= self._has_stopped.is_set()
            if number[0] == signal.SIGTERM and is_ours and not self._is_held:
                self._has_stopped.wait(STOP_LIMIT_S)
                # Not in this thread: the stopped main thread may hold a lock that the save needs.
                saving = threading.Thread(target=self._save, name="swansong-last", daemon=True)
                saving.start()
                saving.join(SAVE_LIMIT_S)
                os._exit(EXIT_CODE)
        os.close(read_fd)
