# SPDX-License-Identifier: Apache-2.0
"""Builds the fake NVML library of ``fake_nvml.c``, and controls it through a file."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("fake_nvml.c")
LIBRARY = "libnvidia-ml.so.1"


def has_compiler() -> bool:
    """Whether this machine can build the library."""
    return shutil.which("cc") is not None and Path("/usr/include/stdio.h").exists()


class FakeNvml:
    """A library in ``directory``, and the file that controls it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._control = directory / "control"
        self._values: dict[str, object] = {}
        self._xids = 0
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-o", str(directory / LIBRARY), str(_SOURCE)],
            check=True,
            capture_output=True,
        )
        self.set(count=1)

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which a process loads the library."""
        return {"LD_LIBRARY_PATH": str(self._directory), "FAKE_NVML": str(self._control)}

    def set(self, gpu: int | None = None, **values: object) -> None:
        """Change values, of a GPU or of the library."""
        prefix = "" if gpu is None else f"{gpu}."
        self._values |= {prefix + name: value for name, value in values.items()}
        new = self._control.with_suffix(".new")
        new.write_text("".join(f"{key} {value}\n" for key, value in self._values.items()))
        os.replace(new, self._control)

    def xid(self, code: int, gpu: int = 0) -> None:
        """Let the library report an Xid event."""
        self._xids += 1
        self._values |= {"xid.gpu": gpu, "xid.code": code, "xid.seq": self._xids}
        self.set()
