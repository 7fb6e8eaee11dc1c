# SPDX-License-Identifier: Apache-2.0
"""A real terminal for tests: a program in tmux, and the picture that a person would see."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Self

import pytest

from testkit.waiting import until


class Terminal:
    """A terminal of a size, with one program.  Its last line is the exit code of the program.

    Args:
        env: the environment of the program, besides TERM, which tmux sets unless it is here.
    """

    def __init__(
        self, command: Sequence[str], *, columns: int = 80, lines: int = 24, env: Mapping[str, str]
    ) -> None:
        if not shutil.which("tmux"):
            pytest.skip("needs tmux")
        self._name = f"swansong-{os.getpid()}-{secrets.token_hex(4)}"
        words = " ".join(f"{name}={shlex.quote(value)}" for name, value in env.items())
        # The shell stays: the last picture is read after the end of the program.
        # The trap: Ctrl-C reaches the shell as well.
        script = f"trap : INT; printf 'before\\n'; env {words} {shlex.join(command)}; echo exit $?; exec cat"
        size = ("-x", str(columns), "-y", str(lines))
        self._tmux("-f", "/dev/null", "new-session", "-d", *size, "sh", "-c", script)

    def screen(self, *, escapes: bool = False) -> list[str]:
        """The lines of the screen, without trailing blanks; with ``escapes``, colours are codes."""
        text = self._tmux("capture-pane", "-p", *(["-e"] if escapes else []))
        return [line.rstrip() for line in text.splitlines()]

    def text(self) -> str:
        return "\n".join(self.screen())

    def wait(self, *words: str) -> list[str]:
        """Wait until the screen shows all these words at once; returns its lines."""

        def shown() -> list[str]:
            lines = self.screen()
            return lines if all(word in "\n".join(lines) for word in words) else []

        try:
            return until(shown, what=f"{words} on the screen")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text()}") from None

    def press(self, key: str) -> None:
        """Press a key, such as ``C-c``."""
        self._tmux("send-keys", key)

    def resize(self, columns: int, lines: int) -> None:
        self._tmux("resize-window", "-x", str(columns), "-y", str(lines))

    def modes(self) -> str:
        """Whether the cursor is shown, lines wrap, and the alternate screen is on: ``1 1 0`` for a shell."""
        return self._tmux(
            "display-message", "-p", "#{cursor_flag} #{wrap_flag} #{alternate_on}"
        ).strip()

    def close(self) -> None:
        subprocess.run(["tmux", "-L", self._name, "kill-server"], check=False, capture_output=True)

    def _tmux(self, *arguments: str) -> str:
        # -u: tmux keeps Unicode whatever the locale of the test is.
        done = subprocess.run(
            ["tmux", "-u", "-L", self._name, *arguments],
            check=True,
            capture_output=True,
            text=True,
            timeout=30,
            encoding="utf-8",
        )
        return done.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
