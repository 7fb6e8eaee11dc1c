# SPDX-License-Identifier: Apache-2.0
"""Copies each commit to the mirror, in a thread of its own.

The newest commit goes first, because the next VM would resume from it.  A copy that makes progress is
finished before a newer one starts.  A failing mirror is retried here and shown in the status.  The health of
the store, the verdicts and the checkpoints do not depend on it.
A mirror with a claim that the store lacks was promoted, and fences this VM.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from heapq import nsmallest

import structlog
from swansong_bucket.errors import CorruptError, MissingError, Stopped, SwansongError
from swansong_bucket.format import wall
from swansong_bucket.format.keys import ManifestPlace, RunKeys
from swansong_bucket.format.manifest import Manifest
from swansong_bucket.mirror.copier import Copier
from swansong_bucket.mirror.fence import PromotedError
from swansong_bucket.model import CommitRef
from swansong_bucket.runs import catalog
from swansong_bucket.stores.base import ObjectStore
from swansong_bucket.stores.wrappers.retry import Retrying
from swansong_bucket.stores.wrappers.throttle import Throttled
from swansong_bucket.util.threads import lasting_thread

from swansongd.core.events import Event, FenceFound
from swansongd.core.state import State
from swansongd.flush import limits
from swansongd.observe.status import MirrorLagStatus, MirrorState, MirrorStatus

FENCE_INTERVAL_S = 60.0
"""Longest time between two looks for a promotion while the mirror can be reached."""
RECORDS_INTERVAL_S = 600.0
_RETRY_S_FIRST = 2.0
_RETRY_S_MAX = 60.0
_POLL_S = 0.1
_URGENT_S = 2.0
"""Time between two rounds during an evacuation."""
CALL_BUDGET_S = 20.0
WAITING_MAX = 1000
"""Manifests that wait for their copy.  While the mirror is away, the oldest ones make way for newer ones."""

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Waiting:
    """A manifest that waits for its copy."""

    since_mono_s: float
    left_bytes: int = 0


class Mirroring:
    """Copies the commits of this VM, and the newest one that it finds at its start.

    Args:
        primary: the backend of the store; this class adds the retries.
        mirror: the backend of the mirror.
        keys: of the run.
        state: returns the newest state of the decision loop.
        post: receives FenceFound if the mirror was promoted.
        stop: ends the thread.
        connections: requests to the mirror at a time.
        limit_bytes_per_s: limit of the rate outside evacuations.
        budget_s: time for which one request is retried.
    """

    def __init__(
        self,
        primary: ObjectStore,
        mirror: ObjectStore,
        keys: RunKeys,
        *,
        state: Callable[[], State],
        post: Callable[[Event], None],
        stop: threading.Event,
        connections: int,
        limit_bytes_per_s: float | None = None,
        budget_s: float = CALL_BUDGET_S,
    ) -> None:
        self._state = state
        self._post = post
        self._stop = stop
        self._keys = keys
        self._budget_s = budget_s
        self.store = self._throttled(
            mirror, lambda: limits.mirror_rate_bytes_per_s(state(), limit_bytes_per_s)
        )
        """The mirror, with retries, for other background work."""
        self._primary = self._throttled(primary, lambda: None)
        self._copier = Copier(
            self._primary, self.store, keys, stop, connections=connections, copied=self._copied
        )
        self._lock = threading.Lock()
        self._waiting: dict[ManifestPlace, _Waiting] = {}
        self._current: ManifestPlace | None = None
        self._unfinished: ManifestPlace | None = None
        """A copy that failed after it had copied chunks."""
        self._newest: CommitRef | None = None
        self._copied_commits = 0
        self._copied_bytes = 0
        self._damaged = 0
        self._shown = (MirrorState.STARTING, "")
        self._has_caught_up = False
        self._are_records_due = True
        self._fence_due_mono_s = self._records_due_mono_s = time.monotonic()
        self._wake = threading.Event()

    def start(self) -> None:
        """Start the thread.  Returns immediately."""
        lasting_thread("mirror", self._run).start()

    def committed(self, manifest: Manifest) -> None:
        """Copy this manifest, which was just committed.  Returns immediately."""
        place = ManifestPlace(manifest.ref, manifest.node, manifest.nodes)
        with self._lock:
            lacking = filter(self._copier.lacks, manifest.chunks)
            size_bytes = sum(chunk.size_bytes for chunk in lacking)
            self._add(place, _Waiting(time.monotonic(), size_bytes))
        self._wake.set()

    def check_fence(self) -> None:
        """Look for a promotion now.  Returns immediately."""
        self._fence_due_mono_s = time.monotonic()
        self._wake.set()

    def expedite(self) -> None:
        """A notice arrived: look for its farewell soon, also if no commit follows.  Returns immediately."""
        self._wake.set()

    def status(self) -> MirrorStatus:
        now_mono_s = time.monotonic()
        with self._lock:
            state, reason = self._shown
            if state is MirrorState.COPYING and self._is_paused():
                state, reason = MirrorState.PAUSED, "a checkpoint needs the link"
            newer = [
                waiting.since_mono_s
                for place, waiting in self._waiting.items()
                if self._newest is None or place.ref > self._newest
            ]
            lag_s = round(now_mono_s - min(newer), 1) if newer else 0.0
            left_bytes = sum(waiting.left_bytes for waiting in self._waiting.values())
            return MirrorStatus(
                url=self.store.url,
                state=state,
                reason=reason,
                lag=MirrorLagStatus(commits=len(self._waiting), seconds=lag_s, bytes=left_bytes),
                newest=self._newest,
                copied_commits=self._copied_commits,
                copied_bytes=self._copied_bytes,
                damaged=self._damaged,
            )

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        retry_s = _RETRY_S_FIRST
        while not self._stop.is_set():
            self._wake.clear()
            wait_s = FENCE_INTERVAL_S
            try:
                self._round()
                retry_s = _RETRY_S_FIRST
                if limits.is_urgent(self._state()):
                    wait_s = _URGENT_S
            except Stopped:
                return
            except PromotedError as error:
                self._show(MirrorState.PROMOTED, error.line())
                self._post(FenceFound(error.newer, in_mirror=True))
            except SwansongError as error:
                self._show(MirrorState.FAILING, error.line())
                wait_s, retry_s = retry_s, min(2 * retry_s, _RETRY_S_MAX)
                self._stop.wait(min(_RETRY_S_FIRST, wait_s))
            except Exception as error:
                _log.exception("mirror_fault")
                self._show(MirrorState.FAILING, f"{type(error).__name__}: {error}")
                wait_s = _RETRY_S_MAX
            self._wake.wait(wait_s)

    def _round(self) -> None:
        """Do all that is due."""
        self._wait_for_link()
        if time.monotonic() >= self._fence_due_mono_s:
            self._copier.check_fence()
            self._fence_due_mono_s = time.monotonic() + FENCE_INTERVAL_S
        if not self._has_caught_up:
            self._catch_up()
            self._has_caught_up = True
        while (place := self._next()) is not None:
            self._show(MirrorState.COPYING)
            self._copy(place)
        is_decided = self._is_decided()
        if self._are_records_due or is_decided or time.monotonic() >= self._records_due_mono_s:
            self._copier.copy_records(self._wait_for_link)
            self._are_records_due = False
            self._records_due_mono_s = time.monotonic() + RECORDS_INTERVAL_S
        self._show(MirrorState.OK)

    def _is_paused(self) -> bool:
        """Whether copies must pause.  After the stop nothing waits: each copy ends at its next window."""
        return not (self._stop.is_set() or limits.may_mirror(self._state()))

    def _wait_for_link(self) -> None:
        """Block while copies must pause; raises Stopped."""
        while self._is_paused():
            self._stop.wait(_POLL_S)
        if self._stop.is_set():
            raise Stopped("stopped before it was done")

    def _is_decided(self) -> bool:
        """Whether an evacuation has its verdict: its farewell must reach the mirror before the VM ends."""
        state = self._state()
        return limits.is_urgent(state) and not limits.is_undecided(state)

    def _next(self) -> ManifestPlace | None:
        """The newest manifest, or the one whose copy was interrupted and makes progress.

        On a slow link, a newer commit is waiting whenever a copy fails: the mirror would never get one whole.
        """
        with self._lock:
            if self._unfinished in self._waiting:
                return self._unfinished
            return max(self._waiting, default=None)

    def _catch_up(self) -> None:
        """Find the commits of earlier VMs that are newer than those in the mirror.

        If the mirror is empty, only the newest one: ``swansong mirror`` copies the others.
        """
        whole = [c for c in catalog.list_commits(self.store, self._keys) if c.is_complete]
        absent = [commit for commit in self._copier.absent() if commit.is_complete]
        newest = whole[0].ref if whole else None
        found = [commit for commit in absent if newest is None or commit.ref > newest]
        if newest is None:
            del found[1:]
        since_mono_s = time.monotonic() - (self._age_s(found[-1]) if found else 0.0)
        with self._lock:
            self._newest = newest
            for commit in found:
                for node in commit.manifest_keys:
                    place = commit.place(node)
                    if place not in self._waiting:
                        self._add(place, _Waiting(since_mono_s))

    def _add(self, place: ManifestPlace, waiting: _Waiting) -> None:
        """Called under the lock."""
        self._waiting[place] = waiting
        if len(self._waiting) > WAITING_MAX:
            oldest, second = nsmallest(2, self._waiting)
            since_mono_s = self._waiting.pop(oldest).since_mono_s
            # The lag still counts from the first commit that the mirror lacks.
            kept = self._waiting[second]
            kept.since_mono_s = min(kept.since_mono_s, since_mono_s)

    def _age_s(self, commit: catalog.Commit) -> float:
        """Age of a commit by the wall clock; 0 if it is unknown."""
        try:
            manifest = catalog.load_node(
                self._primary, self._keys, commit, min(commit.manifest_keys)
            )
        except CorruptError:
            return 0.0
        created_s = wall.instant_s(manifest.created)
        return 0.0 if created_s is None else max(0.0, time.time() - created_s)

    def _copy(self, place: ManifestPlace) -> None:
        began_mono_s = time.monotonic()
        bytes_before = self._copied_bytes
        self._current = place
        try:
            result = self._copier.copy(place, self._planned)
        except MissingError as error:
            _log.info("mirror_commit_gone", reason=str(error))
            self._drop(place)
            return
        except CorruptError as error:
            _log.error("commit_not_mirrored", commit=str(place.ref), reason=error.line())
            self._damaged += 1
            self._drop(place)
            return
        finally:
            self._current = None
            self._unfinished = place if self._copied_bytes > bytes_before else None
        with self._lock:
            self._waiting.pop(place, None)
            self._newest = max(self._newest or place.ref, place.ref)
            self._copied_commits += result.is_new
        self._are_records_due = True
        _log.info(
            "mirrored",
            generation=place.ref.generation,
            step=place.ref.step,
            chunks=result.chunks,
            size_bytes=result.size_bytes,
            seconds=round(time.monotonic() - began_mono_s, 3),
        )

    def _drop(self, place: ManifestPlace) -> None:
        with self._lock:
            self._waiting.pop(place, None)

    def _planned(self, size_bytes: int) -> None:
        """The copy in progress needs this number of bytes."""
        with self._lock, suppress(KeyError):
            if self._current is not None:
                self._waiting[self._current].left_bytes = size_bytes

    def _copied(self, size_bytes: int) -> None:
        with self._lock:
            self._copied_bytes += size_bytes
            waiting = None if self._current is None else self._waiting.get(self._current)
            if waiting is not None:
                waiting.left_bytes = max(0, waiting.left_bytes - size_bytes)

    def _show(self, state: MirrorState, reason: str = "") -> None:
        before, self._shown = self._shown, (state, reason)
        if before[0] is state:
            return
        if state is MirrorState.PROMOTED:
            _log.error("mirror_promoted", url=self.store.url, reason=reason)
        elif state is MirrorState.FAILING:
            _log.warning("mirror_failing", url=self.store.url, reason=reason)
        elif before[0] is MirrorState.FAILING:
            _log.info("mirror_recovered", url=self.store.url)

    def _throttled(self, store: ObjectStore, rate: Callable[[], float | None]) -> Retrying:
        paced = Throttled(store, rate, is_paused=self._is_paused, limits_reads=True)
        return Retrying(paced, budget_s=self._budget_s, stop=self._stop)
