# SPDX-License-Identifier: Apache-2.0
"""The wishes of the askers of :mod:`swansongd.restore.downloads`, and the downloads that fulfil them.

An asker wants a commit, and perhaps only the shards of its ranks.  A download serves all askers whose wishes
it includes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from swansong.layout import is_rank_manifest, rank_of_directory
from swansong_bucket.model import CommitRef, StoredShard
from swansong_bucket.transfer.restore import RestoreResult, Selection

COMMON_BYTES_MAX = 2**20
"""Largest file of no rank that every rank gets."""
PREFIXES_MAX = 4096
"""Wishes of one VM; with more, it fetches all shards."""


class Choice(Enum):
    """How exactly an asker names its commit."""

    NEWEST = auto()
    """The newest one; an older one if it is damaged."""
    NAMED = auto()
    """This generation and step; the end of the run has the state of the other commit of its step."""
    EXACT = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """The commit that an asker wants."""

    ref: CommitRef | None
    """None: the run has no whole commit as far as the asker knows."""
    choice: Choice = Choice.NEWEST
    before: CommitRef | None = None
    """Only older commits than this one, which the ranks of the job refuse."""
    prefixes: frozenset[str] = frozenset()
    """Only shards whose paths begin with one of these, and small common files; empty: all shards."""
    is_prefetch: bool = False
    """No trainer has asked yet: the download gives way to others, and leaves room for checkpoints."""
    is_over: Callable[[], bool] = field(default=lambda: False, compare=False)
    """Whether a prefetch has become useless: it ends with Stopped then, unless a trainer waits for it."""

    def accepts(self, found: CommitRef) -> bool:
        """Whether this commit is wanted."""
        if self.before is not None and found >= self.before:
            return False
        if self.choice is Choice.NAMED:
            return replace(found, is_final=False) == self.ref
        return self.choice is Choice.NEWEST or found == self.ref

    def selection(self) -> Selection:
        """The commits that the restore considers."""
        return Selection(
            step=None if self.choice is Choice.NEWEST or self.ref is None else self.ref.step,
            near=0 if self.ref is None else self.ref.generation,
            accepts=self.accepts,
        )


def selects(prefixes: frozenset[str], shard: StoredShard) -> bool:
    """Whether ranks with these wishes read the shard.

    The manifest of a rank belongs to its directory.  Small files of no rank are for all ranks.
    """
    starts = tuple(prefixes)
    if not prefixes or shard.path.startswith(starts):
        return True
    if is_rank_manifest(shard.path):
        return f"{shard.path.removesuffix('.json')}/".startswith(starts)
    return "/" not in shard.path and shard.size_bytes <= COMMON_BYTES_MAX


def ranks_of(prefixes: frozenset[str]) -> frozenset[int]:
    """The ranks of these directories; empty if one of them is not the directory of a rank."""
    names = (prefix[:-1] if prefix.endswith("/") else "" for prefix in prefixes)
    ranks = frozenset(rank_of_directory(name) for name in names)
    return frozenset() if -1 in ranks else ranks


def covers(prefixes: frozenset[str], others: frozenset[str]) -> bool:
    """Whether the first wishes include the others."""
    if not prefixes or not others:
        return not prefixes
    return all(other.startswith(tuple(prefixes)) for other in others)


def union(prefixes: Iterable[frozenset[str]]) -> frozenset[str]:
    """The wishes of several ranks; all shards if one of them reads all, or if there are too many."""
    each = list(prefixes)
    united = frozenset[str]().union(*each)
    return united if all(each) and len(united) <= PREFIXES_MAX else frozenset()


@dataclass(slots=True, kw_only=True)
class Download:
    """One download, in progress or finished."""

    wish: Wish
    base: Download | None = None
    """A finished download of the same commit, whose directory gets further files."""
    ref: CommitRef | None = None
    """The commit that is fetched, once its manifests are read."""
    shards: Sequence[StoredShard] = ()
    """Those that are fetched, with ``ref``."""
    result: RestoreResult | None = None
    """None until the download is finished."""
    id: str = ""
    """Names the finished download to the trainers that took its shards; empty before."""
    done_bytes: int = 0
    total_bytes: int = 0
    is_asked: bool = False
    """A trainer waits for it, or got it."""
    is_cancelled: bool = False
    is_paused: bool = False
    halt: threading.Event = field(default_factory=threading.Event)

    @property
    def name(self) -> str:
        """Name of the finished directory; empty before."""
        return "" if self.result is None else self.result.path.name

    def cancel(self) -> None:
        self.is_cancelled = True
        self.halt.set()

    @property
    def prefixes(self) -> frozenset[str]:
        """The wishes that the directory fulfils in the end."""
        own = self.wish.prefixes
        return own if self.base is None else union((self.base.prefixes, own))

    def serves(self, wish: Wish) -> bool:
        """Whether an asker with this wish gets what it wants."""
        return self.is_of(wish) and covers(self.prefixes, wish.prefixes)

    def exceeds(self, wish: Wish) -> bool:
        """Whether it fetches shards that the asker does not want."""
        return any(not selects(wish.prefixes, shard) for shard in self.shards)

    def selection(self) -> Selection:
        """The commits and the shards that the restore considers."""
        base, prefixes = self.base, self.wish.prefixes
        if base is None or base.result is None:
            selection, here = self.wish.selection(), frozenset[str]()
        else:
            selection = Wish(ref=base.result.ref, choice=Choice.EXACT).selection()
            here = base.paths
        return replace(
            selection,
            files=lambda shard: selects(prefixes, shard) and shard.path not in here,
            ranks=ranks_of(prefixes),
        )

    @property
    def paths(self) -> frozenset[str]:
        """The files of the finished directory."""
        before = frozenset[str]() if self.base is None else self.base.paths
        return before | {shard.path for shard in self.shards}

    def begin(self, ref: CommitRef, shards: Sequence[StoredShard]) -> None:
        """These shards of this commit are fetched."""
        self.total_bytes = sum(shard.size_bytes for shard in shards)
        self.shards = shards
        self.ref = ref

    def is_of(self, wish: Wish) -> bool:
        """Whether it is of the commit that an asker with this wish wants."""
        if self.is_cancelled:
            return False
        expected = self.ref or self.wish.ref
        if wish.choice is Choice.NEWEST:
            # The same newest commit: if it is damaged, every asker gets the same older one.
            is_same = (self.wish.choice, self.wish.ref) == (Choice.NEWEST, wish.ref)
            return (is_same and self.wish.before == wish.before) or expected == wish.ref
        return expected is not None and wish.accepts(expected)
