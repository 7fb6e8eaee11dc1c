# SPDX-License-Identifier: Apache-2.0
"""The standard streams of a process whose parent has closed some of them, as ``>&-`` in a shell does."""

from __future__ import annotations

import os
import sys


def replace_closed() -> None:
    """Open ``/dev/null`` for each closed stream; call this before the process opens anything else.

    The next file or socket would get its descriptor, and would contain what the process or a child prints.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            fd = os.open(os.devnull, os.O_RDWR)  # the lowest that is free
            os.set_inheritable(fd, True)
            setattr(sys, name, open(fd, mode, encoding="utf-8"))  # noqa: SIM115 - for the whole process
