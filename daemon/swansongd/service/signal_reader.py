# SPDX-License-Identifier: Apache-2.0
"""Signals to this process, handled in other threads as soon as they arrive.

Python runs a handler in the main thread, whose wait for the next event it does not end.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable

from swansong_bucket.util.threads import lasting_thread

_READ_BYTES = 4096


def handle(numbers: Iterable[int], handler: Callable[[int], object]) -> None:
    """Call ``handler`` with the number of each of these signals that arrives; call this in the main thread.

    Args:
        numbers: of the signals.
        handler: runs in a separate thread and may block: SIGTERM needs answers of the host, and SIGINT
            ends the daemon meanwhile.  It must not raise an exception.
    """
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(write_fd, False)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    handled = frozenset(numbers)
    arrived: list[int] = []
    for number in handled:
        signal.signal(number, lambda _number, _frame: None)  # otherwise nothing is written

    def read() -> None:
        while True:
            while arrived:
                threading.Thread(target=handler, args=(arrived[0],), daemon=True).start()
                del arrived[0]  # now: a VM that allows no more threads must lose no signal
            # A library may have a handler for another number.
            arrived.extend(handled.intersection(os.read(read_fd, _READ_BYTES)))

    lasting_thread("signals", read).start()
