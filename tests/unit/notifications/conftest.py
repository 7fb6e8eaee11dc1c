# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of notifications."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def own_fd(tmp_path: Path) -> Iterator[int]:
    """The directory of the daemon, which is also ``tmp_path``."""
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)
