# SPDX-License-Identifier: Apache-2.0
"""The rules of :mod:`swansong.trackers` without a tracker's package; test-frameworks has the real ones."""

from __future__ import annotations

import struct
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swansong import trackers
from swansong._offline_wandb import _entries
from swansong.trackers import Tracker, wandb_id

from testkit.waiting import until

BLOCK_BYTES = 32 * 1024


def a_guard(**facts: Any) -> Any:
    return SimpleNamespace(**{"preempting": False, "rank": 0, "run": "run", **facts})


def test_an_error_of_the_tracker_never_reaches_the_training_loop() -> None:
    """A tracker that is away costs its points, not the training."""

    def fails(*_arguments: object) -> None:
        raise OSError("the tracker is away")

    guard = a_guard(preempting=True)
    tracker = Tracker(guard, write=fails, mark=fails, end=fails)
    tracker.log(1, {"loss": 0.5})
    tracker.mark_preempting()
    tracker.close()


def test_a_preemption_marks_the_run_once() -> None:
    """Also if the request was answered before the next call: the mark stays due."""
    made: list[str] = []
    guard = a_guard()
    tracker = Tracker(guard, mark=lambda: made.append("mark"))
    tracker.log(1, {})
    assert made == []
    guard.preempting = True
    tracker.log(2, {})
    tracker.log(3, {})
    until(lambda: len(made) == 1, what="the mark")
    assert len(made) == 1


def test_a_tracker_that_hangs_at_the_mark_delays_no_checkpoint() -> None:
    """The save for the notice comes right after the log call that marks the run."""
    may_end, began = threading.Event(), threading.Event()

    def hangs() -> None:
        began.set()
        may_end.wait(60)

    tracker = Tracker(a_guard(preempting=True), mark=hangs)
    tracker.log(1, {})
    assert began.wait(60)
    assert not may_end.is_set()  # the call has returned while the mark hangs
    may_end.set()


def test_only_rank_0_opens_a_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks log and close without any effect, and need no package."""
    for name in ("wandb", "mlflow", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    guard = a_guard(rank=1)
    for tracker in (
        trackers.to_wandb(guard),
        trackers.to_mlflow(guard),
        trackers.to_tensorboard(guard, "directory", 0),
    ):
        tracker.log(1, {"loss": 0.5})
        tracker.close()
        assert tracker.native is None


def test_nothing_is_logged_after_the_end() -> None:
    written: list[int] = []
    tracker = Tracker(
        a_guard(), write=lambda step, _values: written.append(step), end=lambda: written.append(-1)
    )
    tracker.log(1, {})
    tracker.close()
    tracker.log(2, {})
    assert written == [1, -1]


def test_the_wandb_id_follows_from_the_name_of_the_run() -> None:
    """Names that W&B refuses get a digest, so that two names never share an id."""
    assert wandb_id("gpt-7b.v2_x") == "gpt-7b.v2_x"
    strange = [wandb_id(name) for name in ("a/b", "a:b", "a b", "a" * 200, "a" * 201)]
    assert len(set(strange)) == len(strange)
    assert all(len(name) <= 128 and not set(name) & set("/\\#?%: ") for name in strange)


@given(st.lists(st.integers(0, 70_000), max_size=8), st.integers(0, 200_000))
def test_whole_entries_of_a_log_survive_its_truncation(sizes: list[int], cut: int) -> None:
    """A killed process leaves a prefix of the file: all entries before the cut are read, and no torn one."""
    entries = [bytes([number]) * size for number, size in enumerate(sizes)]
    data, ends = _log_of(entries)
    assert list(_entries(data)) == entries
    kept = [entry for entry, end in zip(entries, ends, strict=True) if end <= cut]
    assert list(_entries(data[:cut])) == kept


def _log_of(entries: list[bytes]) -> tuple[bytes, list[int]]:
    """A LevelDB log with a header of 7 bytes, and the end of each entry."""
    data, ends = bytearray(b":W&B\x00\x00\x00"), []
    for entry in entries:
        rest, is_first = entry, True
        while is_first or rest:
            room = BLOCK_BYTES - len(data) % BLOCK_BYTES
            if room < 7:
                data += bytes(room)
                continue
            piece, rest = rest[: room - 7], rest[room - 7 :]
            kind = {(True, False): 1, (True, True): 2, (False, True): 3, (False, False): 4}
            data += struct.pack("<IHB", 0, len(piece), kind[is_first, bool(rest)]) + piece
            is_first = False
        ends.append(len(data))
    return bytes(data), ends
