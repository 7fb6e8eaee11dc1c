# SPDX-License-Identifier: Apache-2.0
"""The store for work that can wait until an evacuation is over."""

from __future__ import annotations

import pytest
from swansong_bucket.errors import Stopped, Transient
from swansongd.flush.background import Background

from testkit.memory_store import MemoryStore


def test_a_notice_ends_background_work() -> None:
    """During an evacuation no request is sent, and one in flight that fails counts as stopped."""
    is_urgent, store = False, MemoryStore()
    background = Background(store, lambda: is_urgent)

    def fail(*_: str) -> None:
        nonlocal is_urgent
        is_urgent = is_noticed
        raise Transient("no answer")

    store.before = fail
    is_noticed = False
    with pytest.raises(Transient):
        background.get("a")
    is_noticed = True
    with pytest.raises(Stopped):
        background.get("a")
    store.requests.clear()
    with pytest.raises(Stopped):
        background.get("a")
    assert not store.requests
