# SPDX-License-Identifier: Apache-2.0
"""Measures prune with many commits and objects: ``python -m bench.retention_scale``.

The store is computed: it lists pages of 1,000 keys, and encodes a manifest when it is read.  Its own time is
measured and left out.  Each size runs in a process of its own, whose peak memory is that of prune.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import multiprocessing
import resource
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import structlog
from swansong_bucket.config.sections import RetentionConfig
from swansong_bucket.format import manifest
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.format.manifest import Manifest
from swansong_bucket.model import CheckpointKind, Chunk, CommitRef
from swansong_bucket.retention.prune import prune
from swansong_bucket.stores.base import ObjectInfo, Page

from testkit.committed import whole_shard

KEYS = RunKeys("r")
PAGE_KEYS = 1000
INTERVAL_S = 600.0
CHUNK_BYTES = 16 * 2**20


class Store:
    """Commits at regular intervals, each with its own objects."""

    url = "computed://store"

    def __init__(self, commits: int, objects: int) -> None:
        self._commits = commits
        self._objects = objects
        self._deleted: set[int] = set()
        self._lock = threading.Lock()
        self.requests: Counter[str] = Counter()
        self.own_cpu_s = 0.0

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        token: str | None = None
        while True:
            infos, token = self.page(prefix, token)
            yield from infos
            if token is None:
                return

    def page(self, prefix: str, token: str | None) -> Page:
        with self._counted("list"):
            per_commit = {KEYS.commits: 1, KEYS.data: self._objects}.get(prefix, 0)
            begin = int(token or 0)
            count = self._commits * per_commit
            end = min(begin + PAGE_KEYS, count)
            infos = []
            for number in range(begin, end):
                step, index = divmod(number, per_commit)
                age_s = (self._commits - step) * INTERVAL_S
                if prefix == KEYS.data:
                    infos.append(ObjectInfo(_chunk(step, index).key, CHUNK_BYTES, age_s, "tag"))
                elif step not in self._deleted:
                    infos.append(ObjectInfo(_manifest(step), 100, age_s, "tag"))
        return Page(infos, str(end) if end < count else None)

    def get(self, key: str) -> bytes:
        with self._counted("get"):
            parsed = KEYS.parse_commit(key)
            assert parsed is not None
            step = parsed.ref.step
            made = Manifest(
                run="r",
                generation=1,
                step=step,
                kind=CheckpointKind.PERIODIC,
                node=0,
                nodes=1,
                nonce="n",
                shards=tuple(
                    whole_shard(f"f{index}", _chunk(step, index)) for index in range(self._objects)
                ),
                health={"loss": 1.0 / (step + 1), "loss_is_finite": 1.0},
            )
            return manifest.encode(made)

    def delete(self, key: str, *, if_tag: str) -> None:  # noqa: ARG002
        with self._counted("delete"):
            parsed = KEYS.parse_commit(key)
            assert parsed is not None
            self._deleted.add(parsed.ref.step)

    def delete_many(self, infos: Sequence[ObjectInfo]) -> dict[str, str]:  # noqa: ARG002
        with self._counted("delete_many"):
            return {}

    @contextlib.contextmanager
    def _counted(self, what: str) -> Iterator[None]:
        began_s = time.thread_time()
        yield
        with self._lock:
            self.requests[what] += 1
            self.own_cpu_s += time.thread_time() - began_s


def _chunk(step: int, index: int) -> Chunk:
    digest = (step * 2**32 + index).to_bytes(32)
    return Chunk(KEYS.chunk(1, digest, "9e2d9e2d9e2d9e2d"), CHUNK_BYTES)


def _manifest(step: int) -> str:
    return KEYS.commit(CommitRef(1, step), 0, 1)


def measure(commits: int, objects: int, is_dry_run: bool) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    store: Any = Store(commits, objects)
    before_bytes = _peak_bytes()
    began_cpu_s = time.process_time()
    report = prune(store, KEYS, RetentionConfig(), now_wall_s=1.8e9, is_dry_run=is_dry_run)
    cpu_s = time.process_time() - began_cpu_s - store.own_cpu_s
    kept = sum(bool(decision.reasons) for decision in report.decisions)
    print(
        f"{commits} commits, {commits * objects} objects, {'dry run' if is_dry_run else 'prune'}: "
        f"{cpu_s:.1f} CPU s, {(_peak_bytes() - before_bytes) / 1e6:.0f} MB, {kept} kept, "
        f"{report.objects} objects go, {dict(store.requests)}",
        flush=True,
    )


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commits", type=int, default=10_000)
    parser.add_argument("--objects", type=int, default=100, help="objects of each commit")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for commits in (args.commits // 10, args.commits):
        for is_dry_run in (True, False):
            process = context.Process(target=measure, args=(commits, args.objects, is_dry_run))
            process.start()
            process.join()


if __name__ == "__main__":
    main()
