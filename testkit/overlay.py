# SPDX-License-Identifier: Apache-2.0
"""A file system in layers, as containers have, whose layers are on different file systems."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

_MS_BIND = 4096


@contextmanager
def overlay(directory: Path) -> Iterator[Path]:
    """Mount overlayfs with its upper layer on a tmpfs; skips the test if this sandbox has no mounts."""
    names = ("lower", "upper", "merged")
    lower, upper, merged = places = [directory / name for name in names]
    for place in places:
        place.mkdir()
    layers = f"lowerdir={lower},upperdir={upper}/up,workdir={upper}/work,xino=off"
    with ExitStack() as mounts:
        mount(mounts, "tmpfs", upper)
        for name in ("up", "work"):
            (upper / name).mkdir()
        mount(mounts, "overlay", merged, layers)
        yield merged


def mount(
    mounts: ExitStack, kind: str, place: Path, options: str = "", *, source: Path | None = None
) -> None:
    """Mount a file system, or another file of one (``bind``), until the stack is closed."""
    libc, at = ctypes.CDLL(None, use_errno=True), os.fsencode(place)
    flags = _MS_BIND if kind == "bind" else 0
    what = kind.encode() if source is None else os.fsencode(source)
    if libc.mount(what, at, kind.encode(), flags, os.fsencode(options)) != 0:
        pytest.skip(f"does not apply: no mount of {kind} in this sandbox")
    mounts.callback(libc.umount2, at, 2)
