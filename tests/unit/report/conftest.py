# SPDX-License-Identifier: Apache-2.0
"""The recorded run that the tests of the report share."""

from __future__ import annotations

import pytest
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.runs import history
from swansong_bucket.runs.history import RunHistory
from swansong_bucket.runs.run import Run

from testkit import past_run
from testkit.memory_store import MemoryStore


@pytest.fixture(scope="session")
def past() -> RunHistory:
    """A preemption with a follow-up, and one during which the store failed, 29 s after its notice of 30 s."""
    store = MemoryStore()
    past_run.write(store)
    return history.read(Run.listed(store, RunKeys(past_run.RUN)))
