# SPDX-License-Identifier: Apache-2.0
"""Requests, time and memory of the commands in a bucket with many commits.

    python -m bench.many_commits [--commits 10000] [--objects 1000000] [--generations 10000]

The store is in memory and lists 1,000 keys a page, as S3 does.  It makes manifests when they are read, so the
figures are those of Swansong.  Each request of a real store adds its own time: about 50 ms for a page.
The last command is a prune, after which most commits and objects are gone.
"""

from __future__ import annotations

import argparse
import bisect
import logging
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog
from blake3 import blake3
from swansong_bucket.config.sections import RetentionConfig
from swansong_bucket.errors import NotFound
from swansong_bucket.format import claim as claims
from swansong_bucket.format import manifest
from swansong_bucket.format.claim import ClaimObject
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.format.manifest import Manifest
from swansong_bucket.model import CheckpointKind, Chunk, CommitRef, StoredShard
from swansong_bucket.retention.prune import prune
from swansong_bucket.runs import catalog, commit, lives
from swansong_bucket.stores.base import ObjectInfo, Page, listed
from swansong_tools.upkeep.verify import verify

from testkit.committed import whole_shard

PAGE_KEYS = 1000
INTERVAL_S = 600.0
"""Time between two commits."""
KEYS = RunKeys("r")
_BYTES = bytes(4096)
_DIGEST = blake3(_BYTES).digest()


class ManyCommits:
    """A store with this number of commits, spread evenly over generations, each of its own objects."""

    url = "memory://many"

    def __init__(
        self, commits: int, objects: int, generations: int, *, page_keys: int = PAGE_KEYS
    ) -> None:
        self._page_keys = page_keys
        self._shards = max(1, objects // commits)
        self._refs = {}
        for number in range(commits):
            generation = 1 + number * generations // commits
            ref = CommitRef(generation, 100 * number)
            self._refs[KEYS.commit(ref, 0, 1)] = ref
        claimed = [KEYS.generation(number) for number in range(1, generations + 1)]
        data = [
            shard.extents[0].chunk.key for ref in self._refs.values() for shard in self._stored(ref)
        ]
        self._keys = sorted([*self._refs, *claimed, *data])
        self._deleted: set[str] = set()
        self._lock = threading.Lock()
        self.requests: Counter[str] = Counter()

    def _stored(self, ref: CommitRef) -> Iterator[StoredShard]:
        for index in range(self._shards):
            path = f"rank-{index:05d}/weights.bin"
            chunk = Chunk(KEYS.chunk(ref.generation, _DIGEST, f"{ref.step}x{index}"), len(_BYTES))
            yield whole_shard(path, chunk)

    def _request(self, what: str) -> None:
        with self._lock:
            self.requests[what] += 1

    def _info(self, key: str) -> ObjectInfo:
        size_bytes = 4096 if KEYS.is_data(key) else 900
        step = self._refs[key].step if key in self._refs else 0
        return ObjectInfo(key, size_bytes, len(self._refs) * INTERVAL_S - 6 * step, "tag")

    def get(self, key: str) -> bytes:
        self._request("get")
        if key in self._refs:
            ref = self._refs[key]
            made = Manifest(
                run="r", generation=ref.generation, step=ref.step, kind=CheckpointKind.PERIODIC, node=0,
                nodes=1, nonce="abc", shards=tuple(self._stored(ref)), health={"loss": 1.0},
                created="2030-01-01T00:00:00Z",
            )  # fmt: skip
            return manifest.encode(made)
        number = KEYS.parse_generation(key)
        if number is None:
            raise NotFound(key)
        return claims.encode(ClaimObject(run="r", generation=number, start=f"s{number}"))

    def head(self, key: str) -> ObjectInfo | None:
        del key
        self._request("head")
        return None

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        return listed(prefix, lambda token: self.page(prefix, token, after=after), after)

    def page(self, prefix: str, token: str | None, *, after: str = "") -> Page:
        self._request("list")
        start = bisect.bisect_left(self._keys, prefix)
        if token is not None:
            start = int(token)
        elif after:
            start = max(start, bisect.bisect_right(self._keys, after))
        end = start + self._page_keys
        found = [key for key in self._keys[start:end] if key.startswith(prefix)]
        is_last = end >= len(self._keys) or not self._keys[end].startswith(prefix)
        infos = [self._info(key) for key in found if key not in self._deleted]
        return Page(infos, None if is_last else str(end))

    def delete(self, key: str, *, if_tag: str) -> None:
        del if_tag
        self._request("delete")
        self._deleted.add(key)

    def delete_many(self, infos: Sequence[ObjectInfo]) -> dict[str, str]:
        self._request("delete_many")
        self._deleted |= {info.key for info in infos}
        return {}

    def get_range(self, key: str, offset: int, size_bytes: int, sink: Any) -> None:
        del key, offset
        self._request("get_range")
        sink.rewind()
        sink.write(memoryview(_BYTES)[:size_bytes])


@dataclass(frozen=True)
class Cost:
    """The cost of one command."""

    name: str
    lists: int
    others: int
    cpu_s: float
    peak_mb: float


def measure(name: str, store: ManyCommits, run: Callable[[], object]) -> Cost:
    store.requests.clear()
    before_s = time.process_time()
    run()
    cpu_s = time.process_time() - before_s
    lists = store.requests.pop("list", 0)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Cost(name, lists, sum(store.requests.values()), cpu_s, peak_mb)


def costs(store: Any, generations: int) -> Iterator[Cost]:
    """The cost of each command, the cheap ones first: the memory is the highest of the process so far."""
    held = claims.decode(store.get(KEYS.generation(generations)))
    pruned = partial(prune, store, KEYS, RetentionConfig(), now_wall_s=1.8e9)
    commands: dict[str, Callable[[], object]] = {
        "choose the newest commit, without a known generation": (
            lambda: commit.newest_whole_commit(store, KEYS)
        ),
        "choose the newest commit, with the generation of the daemon": (
            lambda: commit.newest_whole_commit(store, KEYS, near=generations)
        ),
        "check the fence, before each commit": (
            lambda: commit.ensure_not_fenced(store, KEYS, held)
        ),
        "claim: find the next number": lambda: catalog.newest_claims(store, KEYS, 5),
        "start: history of earlier VMs": lambda: catalog.history(store, KEYS, generations),
        "start: end of the earlier VM": (
            lambda: lives.earlier_ending(store, KEYS, generations, ended_by_s=())
        ),
        "ls: keys of all commits": lambda: catalog.list_commits(store, KEYS),
        "ls: manifests of all commits": lambda: catalog.load_each(
            store, KEYS, catalog.list_commits(store, KEYS), lambda _commit, _loaded: None
        ),
        "verify --sample 1e-7 %: sizes of all objects": (lambda: verify(store, KEYS, sample=1e-9)),
        "prune --dry-run": lambda: pruned(is_dry_run=True),
        "prune": pruned,
    }
    for name, run in commands.items():
        yield measure(name, store, run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commits", type=int, default=10_000)
    parser.add_argument("--objects", type=int, default=1_000_000)
    parser.add_argument("--generations", type=int, default=10_000)
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    store = ManyCommits(args.commits, args.objects, args.generations)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{args.commits} commits of {args.generations} generations, {args.objects} objects")
    print(f"memory of the store: {peak_mb:.0f} MB\n")
    print("| command | list requests | other requests | CPU s | peak MB |")
    print("| --- | --- | --- | --- | --- |")
    for cost in costs(store, args.generations):
        figures = f"{cost.lists} | {cost.others} | {cost.cpu_s:.2f} | {cost.peak_mb - peak_mb:.0f}"
        print(f"| {cost.name} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
