# SPDX-License-Identifier: Apache-2.0
"""Checks the resume of this process's own command, when a fresh run begins."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable

from swansong._log import log
from swansong.protocol import CHECK_ENV

STEPS = 5
"""Steps before the kill, and after it, if the variable is 1."""
_LOOK_S = 0.5


def check_command(world_size: int, is_over: Callable[[], bool]) -> None:
    """Check this process's command if the environment asks for it, and log the result; raises nothing.

    Another process starts the command three times.

    Args:
        world_size: number of ranks of the job.
        is_over: asked at short intervals; if it returns True, the check ends.
    """
    wanted = os.environ.get(CHECK_ENV, "")
    if not wanted or os.path.isabs(wanted):  # the process of a check has the path of a socket
        return
    if not re.fullmatch("[1-9][0-9]{0,5}", wanted):
        log.error("%s=%s: not checked; set it to 1, or to a number of steps", CHECK_ENV, wanted)
        return
    steps = STEPS if wanted == "1" else int(wanted)
    options = ["--kill-at", str(steps), "--steps", str(2 * steps)]
    if world_size > 1:
        log.error(
            "%s=%s: not checked, because the job has %d ranks; run"
            " python -m swansong.testing --ranks %d %s -- torchrun ...",
            CHECK_ENV,
            wanted,
            world_size,
            world_size,
            " ".join(options),
        )
        return
    log.warning("%s: starting this command three times, for %d steps", CHECK_ENV, 2 * steps)
    begun_mono_s = time.monotonic()
    try:
        is_equal, said = _checked(options, is_over)
    except OSError as error:
        is_equal, said = False, str(error)
    level = logging.WARNING if is_equal else logging.ERROR
    log.log(level, "%s: %s (%.0f s)", CHECK_ENV, said, time.monotonic() - begun_mono_s)


def _checked(options: list[str], is_over: Callable[[], bool]) -> tuple[bool, str]:
    """Whether the runs are equal, and what the command says."""
    command = [sys.executable, "-m", "swansong.testing", "--while-stdin", *options, "--"]
    read_fd, write_fd = os.pipe()  # its end ends the check, also if this process is killed
    with os.fdopen(read_fd) as stdin, os.fdopen(write_fd, "w") as is_wanted:
        checking = subprocess.Popen(  # noqa: S603 - this process's own command
            [*command, sys.executable, *sys.orig_argv[1:]],
            # Steps of the check are no steps of the run.
            env={**os.environ, "WANDB_MODE": "disabled"},
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                said = checking.communicate(timeout=_LOOK_S)[0]
                return checking.returncode == 0, said.strip()
            if is_over():
                is_wanted.close()
