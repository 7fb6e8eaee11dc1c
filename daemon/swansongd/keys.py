# SPDX-License-Identifier: Apache-2.0
"""The layout of the bucket: the one place that formats and parses keys.  docs/format.md describes it.

Numbers are zero-padded so that a listing in lexicographic order is a listing in numeric order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from swansongd.model import CheckpointId, CommitRef

_GENERATION = re.compile(r"([0-9]{8})\.json")
_COMMIT = re.compile(r"([0-9]{8})/([0-9]{12})/([0-9]{5})-of-([0-9]{5})\.json")


@dataclass(frozen=True, slots=True)
class CommitKey:
    """What the name of a manifest says."""

    ref: CommitRef
    node: int
    nodes: int


@dataclass(frozen=True, slots=True)
class RunKeys:
    """Formats and parses the keys of one run.  The store itself adds the prefix of its URL."""

    run: str

    @property
    def generations(self) -> str:
        return f"{self.run}/generations/"

    @property
    def commits(self) -> str:
        return f"{self.run}/commits/"

    @property
    def data(self) -> str:
        return f"{self.run}/data/"

    @property
    def farewells(self) -> str:
        return f"{self.run}/farewells/"

    def generation(self, generation: int) -> str:
        return f"{self.generations}{generation:08d}.json"

    def shard(
        self, generation: int, checkpoint: CheckpointId, attempt: str, node: int, path: str
    ) -> str:
        """Key of a shard.  ``attempt`` is new for each flush, so that no key is ever written twice."""
        name = f"{checkpoint.step:012d}-{checkpoint.nonce}-{attempt}"
        return f"{self.data}{generation:08d}/{name}/{node:05d}/{path}"

    def commit(self, ref: CommitRef, node: int, nodes: int) -> str:
        return f"{self.parts(ref)}{node:05d}-of-{nodes:05d}.json"

    def farewell_prefix(self, generation: int) -> str:
        return f"{self.farewells}{generation:08d}-"

    def parts(self, ref: CommitRef) -> str:
        """What the keys of all manifests of one checkpoint begin with."""
        return f"{self.commits}{ref.generation:08d}/{ref.step:012d}/"

    def farewell(self, generation: int, stamp: str) -> str:
        return f"{self.farewell_prefix(generation)}{stamp}.json"

    def probe(self, nonce: str) -> str:
        return f"{self.run}/probes/{nonce}"

    def parse_generation(self, key: str) -> int | None:
        match = _GENERATION.fullmatch(key.removeprefix(self.generations))
        return int(match[1]) if match and key.startswith(self.generations) else None

    def parse_commit(self, key: str) -> CommitKey | None:
        match = _COMMIT.fullmatch(key.removeprefix(self.commits))
        if not match or not key.startswith(self.commits):
            return None
        generation, step, node, nodes = (int(group) for group in match.groups())
        return CommitKey(ref=CommitRef(generation, step), node=node, nodes=nodes)
