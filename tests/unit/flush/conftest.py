# SPDX-License-Identifier: Apache-2.0
"""The flush engine of a test, and the properties that hold at the end of every test."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from swansongd.flush import queue

from testkit.flush_rig import FlushRig
from testkit.waiting import until


@pytest.fixture(autouse=True)
def no_flush_outlives_its_test() -> Iterator[None]:
    """The threads of an open flush would take samples, and report, during the tests that follow."""
    yield
    for engine in FlushRig.engines:
        for flush in filter(None, (engine._ordered, engine._active)):
            engine.cancel(flush.flush_id)


@pytest.fixture
def nothing_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a loaded machine a chunk may be late, and would be sent twice."""
    monkeypatch.setattr(queue, "LATE_S_MIN", math.inf)


@pytest.fixture
def flush(tmp_path: Path) -> Iterator[FlushRig]:
    """An engine with three workers; no files share a chunk."""
    made = FlushRig(tmp_path)
    yield made
    until(lambda: not made.open_files(), what="every staged file to be closed")
    made.expect_named_bytes()
