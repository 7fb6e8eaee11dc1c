# SPDX-License-Identifier: Apache-2.0
"""The layout of the bucket: the only module that formats and parses keys.  docs/format.md describes it.

Numbers are zero-padded, so that lexicographic order is numeric order.  No reader would parse a number with
more digits than the format has, so formatting it raises :class:`~swansong.bounds.BoundsError`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from swansong import bounds
from swansong.bounds import BoundsError

from swansong_bucket.model import CommitRef

_GENERATION = re.compile(r"([0-9]{8})\.json")
_FAREWELL = re.compile(r"([0-9]{8})-[0-9A-Za-z-]{1,100}\.json")
_FINAL = "-final"
_COMMIT = re.compile(rf"([0-9]{{8}})/([0-9]{{12}})({_FINAL})?/([0-9]{{5}})-of-([0-9]{{5}})\.json")
_SUSPECT = re.compile(rf"[0-9]{{8}}/[0-9]{{12}}(?:{_FINAL})?/([0-9]{{5}})\.json")
_PIN = re.compile(r"(?!.*\.[0-9a-f]{32}\.json)([A-Za-z0-9][A-Za-z0-9._-]{0,99})\.json")
_CHUNK = re.compile(r"([0-9]{8})/([0-9a-f]{64})-[0-9a-z]{1,32}")
_DATA = re.compile(r"[^/]+/(probes/[^/]+/)?data/.*", re.DOTALL)
SIGNED = re.compile(r"(.+)\.([0-9a-f]{32})\.json", re.DOTALL)
"""The stored key of a record of a run with a signing key: see :mod:`swansong_bucket.runs.signing`."""
UNSIGNED = "#unsigned"
"""End of the key of an object that no holder of the signing key has created, as a signed store lists it."""


@dataclass(frozen=True, slots=True, order=True)
class ManifestPlace:
    """The commit and the node of a manifest, which its key names."""

    ref: CommitRef
    node: int
    nodes: int


@dataclass(frozen=True, slots=True)
class RunKeys:
    """Formats and parses the keys of one run.  The store adds the prefix of its URL."""

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

    @property
    def resumptions(self) -> str:
        return f"{self.run}/resumptions/"

    @property
    def suspects(self) -> str:
        return f"{self.run}/suspects/"

    @property
    def pins(self) -> str:
        return f"{self.run}/pins/"

    @property
    def records(self) -> tuple[str, ...]:
        """Prefixes of the small objects beside commits and claims, on which no commit depends."""
        return self.farewells, self.resumptions, self.pins

    @property
    def probes(self) -> str:
        """Prefix of the rehearsals of ``swansong doctor``, each with the layout of a run."""
        return f"{self.run}/probes/"

    def generation(self, generation: int) -> str:
        return f"{self.generations}{_generation(generation)}.json"

    def chunk(self, generation: int, digest: bytes, nonce: str) -> str:
        """Key of a data object.

        Args:
            generation: of the writer.
            digest: BLAKE3 of the bytes.
            nonce: new for each object, so that no other role can create the key before its writer.  Prune can
                therefore delete an object that no manifest names without a race with a flush that needs the
                same bytes.
        """
        return f"{self.data}{_generation(generation)}/{digest.hex()}-{nonce}"

    def commit(self, ref: CommitRef, node: int, nodes: int) -> str:
        return f"{self.parts(ref)}{_node(node, 'node')}-of-{_node(nodes, 'nodes')}.json"

    def commits_before(self, generation: int) -> str:
        """A key after those of all commits of earlier generations, except for the one just before.

        Empty without earlier ones.
        """
        return f"{self.commits}{_generation(generation - 1)}" if generation > 1 else ""

    def parts_before(self, ref: CommitRef) -> str:
        """A key after those of all manifests of earlier steps, and before those of this step."""
        return f"{self.commits}{_generation(ref.generation)}/{_step(ref.step)}"

    def claims_before(self, generation: int) -> str:
        """A key after those of all claims of earlier generations, except for the one just before."""
        return f"{self.generations}{_generation(generation - 1)}" if generation > 1 else ""

    def farewell_prefix(self, generation: int) -> str:
        return f"{self.farewells}{_generation(generation)}-"

    def parts(self, ref: CommitRef) -> str:
        """Prefix of the keys of all manifests of one checkpoint."""
        return f"{self.commits}{_checkpoint(ref)}"

    def suspects_of(self, ref: CommitRef) -> str:
        """Prefix of the marks of suspect shares of one checkpoint."""
        return f"{self.suspects}{_checkpoint(ref)}"

    def suspect(self, ref: CommitRef, node: int) -> str:
        return f"{self.suspects_of(ref)}{_node(node, 'node')}.json"

    def farewell(self, generation: int, stamp: str) -> str:
        return f"{self.farewell_prefix(generation)}{stamp}.json"

    def resumption(self, generation: int) -> str:
        return f"{self.resumptions}{_generation(generation)}.json"

    def pin(self, name: str) -> str:
        if not is_pin_name(name):
            raise BoundsError(f"{bounds.shown(name)} cannot name a pin")
        return f"{self.pins}{name}.json"

    def parse_pin(self, key: str) -> str | None:
        """The name of a pin."""
        match = _PIN.fullmatch(key.removeprefix(self.pins))
        return match[1] if match and key.startswith(self.pins) else None

    def parse_generation(self, key: str) -> int | None:
        match = _GENERATION.fullmatch(key.removeprefix(self.generations))
        return int(match[1]) if match and key.startswith(self.generations) else None

    def parse_resumption(self, key: str) -> int | None:
        match = _GENERATION.fullmatch(key.removeprefix(self.resumptions))
        return int(match[1]) if match and key.startswith(self.resumptions) else None

    def parse_farewell(self, key: str) -> int | None:
        """The generation of a farewell."""
        match = _FAREWELL.fullmatch(key.removeprefix(self.farewells))
        return int(match[1]) if match and key.startswith(self.farewells) else None

    def parse_commit(self, key: str) -> ManifestPlace | None:
        match = _COMMIT.fullmatch(key.removeprefix(self.commits))
        if not match or not key.startswith(self.commits):
            return None
        generation, step, node, nodes = (int(match[place]) for place in (1, 2, 4, 5))
        if node >= nodes:
            return None
        ref = CommitRef(generation, step, is_final=match[3] is not None)
        return ManifestPlace(ref=ref, node=node, nodes=nodes)

    def parse_suspect(self, key: str) -> int | None:
        """The node of a suspect share."""
        match = _SUSPECT.fullmatch(key.removeprefix(self.suspects))
        return int(match[1]) if match and key.startswith(self.suspects) else None

    def parse_chunk(self, key: str) -> int | None:
        """The generation of a chunk."""
        match = _CHUNK.fullmatch(key.removeprefix(self.data))
        return int(match[1]) if match and key.startswith(self.data) else None

    def is_data(self, key: str) -> bool:
        """Whether the key is that of a chunk of this run."""
        return self.parse_chunk(key) is not None


def is_below_data(key: str) -> bool:
    """Whether the key is below the folder of the chunks of a run, or of a rehearsal."""
    return _DATA.fullmatch(key) is not None


def is_record(key: str) -> bool:
    """Whether the key can be that of a record: of anything but a chunk."""
    return key.endswith(".json") and not is_below_data(key)


def is_pin_name(text: str) -> bool:
    return _PIN.fullmatch(f"{text}.json") is not None


def _generation(generation: int) -> str:
    return f"{bounds.integer(generation, 'generation', 0, bounds.GENERATION_MAX):08d}"


def _step(step: int) -> str:
    return f"{bounds.integer(step, 'step', 0, bounds.STEP_MAX):012d}"


def _checkpoint(ref: CommitRef) -> str:
    final = _FINAL if ref.is_final else ""
    return f"{_generation(ref.generation)}/{_step(ref.step)}{final}/"


def _node(number: int, field: str) -> str:
    return f"{bounds.integer(number, field, 0, bounds.NODES_MAX):05d}"
