# SPDX-License-Identifier: Apache-2.0
"""The facts and functions that answers, downloads and the prefetch of one run share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from swansong_bucket.format.keys import RunKeys
from swansong_bucket.model import CommitRef, StoredShard
from swansong_bucket.stores.base import ObjectStore

from swansongd.core.state import State
from swansongd.observe.facts import Observed
from swansongd.staging.prepare import RunDirectory


@dataclass(frozen=True, slots=True)
class RestoreContext:
    """The run, its store, and the connection to the decision loop."""

    store: ObjectStore
    """The backend, without retries."""
    keys: RunKeys
    run: RunDirectory
    """Staging directory of the run."""
    state: Callable[[], State]
    """Returns the newest state of the decision loop."""
    stop: threading.Event
    """Ends all threads and downloads."""
    mirror: ObjectStore | None = field(default=None, kw_only=True)
    """Backend of the mirror: read for what the store has lost or damaged; None without a mirror."""
    post: Callable[[Observed], None] = field(default=lambda _event: None, kw_only=True)
    """Takes the events of the queries and downloads."""
    fetched: Callable[[CommitRef, Sequence[StoredShard]], None] = field(
        default=lambda _ref, _shards: None, kw_only=True
    )
    """Takes a commit and the shards that were downloaded, unless the mirror had some of them."""
    claim_refusal: Callable[[], str] = field(default=lambda: "", kw_only=True)
    """Returns why no generation can be claimed before an operator acts; empty: a claim may succeed."""
    rescan: Callable[[], None] | None = field(default=None, kw_only=True)
    """Requests a scan of staging; None: a choice uses the last scan."""
    monotonic: Callable[[], float] = field(default=time.monotonic, kw_only=True)
