# SPDX-License-Identifier: Apache-2.0
"""Reads all runs of a store at an interval, in a thread of its own.

A scrape never waits for a store: it gets the figures of the last reading.  A store or a run that fails keeps
its old figures, and the failure is counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace

import structlog
from swansong_bucket.config.values import InvalidValue, run_name
from swansong_bucket.errors import Stopped, StoreError, SwansongError, Transient
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.stores.base import all_pages
from swansong_bucket.util.threads import lasting_thread, parallel

from swansong_tools.economics.cost import Prices
from swansong_tools.exporter.figures import RunFigures
from swansong_tools.exporter.own_health import ReadOnly, StoreReading
from swansong_tools.exporter.run_figures import RunReader

RUNS_AT_ONCE = 4
FOLDERS_MAX = 10_000
"""Limit of the folders that are examined for runs."""
FAILURES_MAX = 3
"""After this number of runs that failed, the others wait for the next reading."""
IDLE_SHARE = 60
"""A run without a new object for an hour is read after a further minute, and so on."""
IDLE_S_MAX = 1800.0
"""A run is read at least at this interval.

The alerts on evacuations look back one hour: a reading must follow well before the end of that hour.
"""
FOLDER_S = 600.0
"""A folder without a run is examined again after this time."""
REFUSED_S = 600.0
"""A run that the store refuses, or that has too many keys, is read again after this time."""

_log = structlog.get_logger(__name__)


@dataclass(eq=False, repr=False)
class StoreReader:
    """Reads the runs of one store.

    Args:
        runs: names of the runs to read; empty: all.
        runs_max: limit of the runs.
        stop: ends the thread.
        monotonic, wall: the clocks.
    """

    store: ReadOnly
    mirror: ReadOnly | None
    _: KW_ONLY
    runs: tuple[str, ...] = ()
    interval_s: float
    runs_max: int
    prices: Prices | None
    stop: threading.Event
    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self.url = self.store.url
        self._failures = self._mirror_failures = 0
        """Counts of one reading.  Threads may lose a count, and a failure is never lost."""
        self._has_mirror = False
        self._lock = threading.Lock()
        """Guards everything below."""
        self._readers: dict[str, RunReader] = {}
        self._figures: dict[str, RunFigures] = {}
        self._due_mono_s: dict[str, float] = {}
        self._left_out: set[str] = set()
        self._failing: set[str] = set()

    def start(self) -> None:
        """Start the thread.  Returns immediately."""
        lasting_thread("exporter-reader", self._run).start()

    def figures(self) -> list[RunFigures]:
        """The figures of all runs as they were read last."""
        with self._lock:
            return list(self._figures.values())

    def _run(self) -> None:
        while not self.stop.is_set():
            self.read()
            self.stop.wait(self.interval_s)

    def read(self) -> bool:
        """Read the runs that are due; False if the store, a run or the mirror failed."""
        began_mono_s = self.monotonic()
        self._failures = self._mirror_failures = 0
        self._has_mirror = False
        due: list[str] = []
        try:
            names = self._names()
            self._forget(names)
            due = [name for name in names if self._due_mono_s.get(name, 0.0) <= began_mono_s]
            parallel(due, self._read_run, threads=RUNS_AT_ONCE, stop=self.stop)
        except Stopped:
            return False
        except StoreError as error:
            self._failures += 1
            _log.warning("runs_not_listed", store=self.url, reason=error.line())
        except Exception as error:  # the next reading may succeed
            self._failures += 1
            self.store.health.failed(error)
            _log.exception("exporter_fault", store=self.url)
        now_wall_s = self.wall()
        took_s = self.monotonic() - began_mono_s
        with self._lock:
            runs, failing = len(self._figures), len(self._failing)
            left_out = len(self._left_out)
            is_refused = bool(due) and self._failing.issuperset(due)
        done = StoreReading(
            is_up=not self._failures and not is_refused,
            took_s=took_s,
            runs=runs,
            failing=failing,
            left_out=left_out,
        )
        self.store.health.read(done, by=self.url, now_wall_s=now_wall_s)
        if self.mirror is not None and self._has_mirror:
            mirrored = StoreReading(is_up=not self._mirror_failures, took_s=took_s)
            self.mirror.health.read(mirrored, by=self.url, now_wall_s=now_wall_s)
        return not (self._failures or failing or self._mirror_failures)

    # ------------------------------------------------------------ the names of the runs

    def _names(self) -> Sequence[str]:
        """The folders of the store that may be runs."""
        if self.runs:
            return self.runs
        found: set[str] = set()
        for name in all_pages("list the runs", lambda token: self.store.folders("", token)):
            try:
                found.add(str(run_name(name)))
            except InvalidValue:
                continue
            if len(found) == FOLDERS_MAX:
                _log.warning(
                    "folders_left_out",
                    store=self.url,
                    limit=FOLDERS_MAX,
                    hint="Name the runs with --run",
                )
                break
        return sorted(found)

    def _forget(self, names: Sequence[str]) -> None:
        """Forget the runs that the store does not have any more."""
        kept = set(names)
        with self._lock:
            for table in (self._readers, self._figures, self._due_mono_s):
                for name in [name for name in table if name not in kept]:
                    del table[name]
            self._left_out &= kept
            self._failing &= kept

    # ------------------------------------------------------------ one run

    def _read_run(self, name: str) -> None:
        if self._failures >= FAILURES_MAX:
            return
        try:
            self._refresh(name)
            with self._lock:
                self._failing.discard(name)
        except Stopped:
            raise
        except StoreError as error:  # the attempts were counted
            _log.warning("run_not_read", store=self.url, run=name, reason=error.line())
            if isinstance(error, Transient):
                self._failures += 1
            else:
                self._give_up(name)
        except Exception as error:
            self.store.health.failed(error)
            _log.exception("exporter_fault", store=self.url, run=name)
            self._give_up(name)

    def _give_up(self, name: str) -> None:
        with self._lock:
            self._failing.add(name)
            self._due_mono_s[name] = self.monotonic() + REFUSED_S

    def _refresh(self, name: str) -> None:
        reader = self._readers.get(name) or RunReader(
            self.store,
            RunKeys(name),
            self.prices,
            stop=self.stop,
            monotonic=self.monotonic,
        )
        now_wall_s = self.wall()
        reader.run.refresh(now_wall_s)
        if not reader.run.claims.infos and not reader.run.commits:
            self._pass_over(name)
            return
        if not self._has_place(name, reader):
            self._postpone(name, IDLE_S_MAX)
            return
        found = reader.read(now_wall_s)
        if self.mirror is not None:
            found = self._with_mirror(found, reader, self.mirror)
        with self._lock:
            self._figures[name] = found
        self._postpone(name, (reader.run.newest_age_s or 0.0) / IDLE_SHARE)

    def _pass_over(self, name: str) -> None:
        """Postpone a folder without a claim: a run may begin in it."""
        with self._lock:
            is_news = name not in self._due_mono_s
            self._figures.pop(name, None)
        if self.runs and is_news:
            _log.warning(
                "run_not_found", store=self.url, run=name, hint="Check the name and the prefix"
            )
        self._postpone(name, 0.0 if self.runs else FOLDER_S)

    def _has_place(self, name: str, reader: RunReader) -> bool:
        """Keep the reader of a run; False if there are too many runs."""
        with self._lock:
            if name not in self._readers and len(self._readers) >= self.runs_max:
                if name not in self._left_out:
                    self._left_out.add(name)
                    _log.warning(
                        "run_left_out",
                        store=self.url,
                        run=name,
                        limit=self.runs_max,
                        hint="Raise --runs-max, or name the runs with --run",
                    )
                return False
            self._left_out.discard(name)
            self._readers[name] = reader
            return True

    def _postpone(self, name: str, idle_s: float) -> None:
        """Read the run again after this time, but not sooner than the interval, and within half an hour."""
        wait_s = min(max(idle_s, self.interval_s / 2), max(IDLE_S_MAX, self.interval_s))
        with self._lock:
            self._due_mono_s[name] = self.monotonic() + wait_s

    def _with_mirror(self, found: RunFigures, reader: RunReader, mirror: ReadOnly) -> RunFigures:
        """The figures with the lag of the mirror; if the mirror fails, with the old lag."""
        self._has_mirror = True
        try:
            return replace(found, mirror=reader.mirror_lag(mirror, found.generation))
        except Stopped:
            raise
        except Exception as error:
            self._mirror_failures += 1
            if not isinstance(error, StoreError):
                mirror.health.failed(error)  # requests that failed were counted
            if isinstance(error, SwansongError):
                reason = error.line()
                _log.warning("mirror_lag_unknown", store=mirror.url, run=found.run, reason=reason)
            else:
                _log.exception("exporter_fault", store=mirror.url, run=found.run)
        with self._lock:
            old = self._figures.get(found.run)
        return found if old is None else replace(found, mirror=old.mirror)
