# SPDX-License-Identifier: Apache-2.0
"""The layout of a checkpoint in staging: the names of its files, and the manifest of each rank.

Both distributions use this module: it belongs to the hooks, and the daemon imports it.  Standard library
only, Python 3.10 and later.

::

    <staging>/<run>/step-<12 digits>.<nonce>.partial/    the ranks write to this set
        rank-00000.begun                                 rank manifest without files, until the rank is done
        rank-00000.writing/...                           files that the rank may still change
        rank-00000/...                                   files that are final, and may be uploaded early
    <staging>/<run>/step-<12 digits>.<nonce>/            sealed: renamed when all rank manifests are there
        rank-00000.json                                  rank manifest, the last file that the rank writes
        rank-00000/...                                   the files that it lists
    <staging>/<run>/restored/                            checkpoints that the daemon has fetched for a trainer
    <staging>/<run>/.<name>                              temporary files; private directory of the daemon
    <staging>/<run>/<other>                              a checkpoint of another framework, see ADOPTED_NAMES
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Annotated, Any

from swansong import bounds, openat
from swansong.fields import (
    KEYS_MAX,
    VERSION,
    Bytes,
    FieldType,
    Id,
    Metrics,
    Node,
    Nodes,
    Rank,
    Ranks,
    ShardPath,
    StartId,
    Step,
    Text,
    Version,
    build,
    fitted,
    parse_object,
)

RESTORED_DIRECTORY = "restored"
RANK_MANIFEST_MAX_BYTES = 20 * 2**20
"""100,000 files with paths of 150 characters."""
ADOPTED_NAMES = {
    "checkpoint-n": re.compile(r"checkpoint-([0-9]{1,12})"),  # Hugging Face Trainer
    "dcp": re.compile(r"(?:.*[^0-9])?([0-9]{1,12})[^0-9]*|.*"),  # torch.distributed.checkpoint
    "ckpt": re.compile(r"(?:.*[^a-z])?step=([0-9]{1,12})(?:[^0-9].*)?\.ckpt"),  # Lightning
}
"""Names of other frameworks' checkpoints, by layout.  The first group is the step, where the name has one."""

_PARTIAL_SUFFIX = ".partial"
_WRITING_SUFFIX = ".writing"
_BEGUN_SUFFIX = ".begun"
_SEALED = re.compile(r"step-([0-9]{12})\.([A-Za-z0-9]{1,64})")
_RANK = "rank-[0-9]{5,9}"
_RANK_DIRECTORY = re.compile(_RANK)
_RANK_MANIFEST = re.compile(_RANK + r"\.json")
_RANK_BEGUN = re.compile(_RANK + re.escape(_BEGUN_SUFFIX))
_FINAL = re.compile(_RANK + r"(\.json|/.*)")


def sealed_name(step: int, nonce: str) -> str:
    """Return the name of a sealed set.

    Raises:
        BoundsError: the step has more digits than the daemon finds.
    """
    return f"step-{bounds.integer(step, 'step', 0, bounds.STEP_MAX):012d}.{nonce}"


def parse_sealed_name(name: str) -> tuple[int, str] | None:
    """Return (step, nonce) of a sealed set; None for any other name."""
    match = _SEALED.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def partial_name(sealed: str) -> str:
    """Return the name of a set until it gets its sealed name."""
    return sealed + _PARTIAL_SUFFIX


def parse_partial_name(name: str) -> tuple[int, str] | None:
    """Return (step, nonce) of a set that is being written; None for any other name."""
    sealed = name.removesuffix(_PARTIAL_SUFFIX)
    return None if sealed == name else parse_sealed_name(sealed)


def parse_adopted_name(layout: str, name: str) -> int | None:
    """Return the step of another framework's checkpoint.

    Args:
        layout: a key of :data:`ADOPTED_NAMES`.
        name: of the file or directory.

    Returns:
        -1 if the name fits the layout but has no step; None if it does not fit.
    """
    match = ADOPTED_NAMES[layout].fullmatch(name)
    if match is None:
        return None
    return -1 if match[1] is None else int(match[1])


def is_private_name(name: str) -> bool:
    """Whether an entry of the staging directory is not a checkpoint that a trainer wrote."""
    return name.startswith(".") or name == RESTORED_DIRECTORY


def rank_directory(rank: int) -> str:
    """Return the name of the directory, within a set, for one rank's final files."""
    return f"rank-{rank:05d}"


def rank_of_directory(name: str) -> int:
    """The rank of a :func:`rank_directory`; -1 for another name."""
    return int(name.removeprefix("rank-")) if _RANK_DIRECTORY.fullmatch(name) else -1


def writing_directory(rank: int) -> str:
    """Return the name of the directory for files that a rank may still change."""
    return rank_directory(rank) + _WRITING_SUFFIX


def is_writing_directory(name: str) -> bool:
    """Whether the files of a directory within a set may still change."""
    return name.endswith(_WRITING_SUFFIX)


def rank_of_writing_directory(name: str) -> int:
    """The rank of a :func:`writing_directory`; -1 for another name."""
    return (
        rank_of_directory(name.removesuffix(_WRITING_SUFFIX)) if is_writing_directory(name) else -1
    )


def rank_manifest_name(rank: int) -> str:
    """Return the file name of a rank manifest."""
    return f"{rank_directory(rank)}.json"


def is_rank_manifest(path: str) -> bool:
    """Whether a path within a set is a :func:`rank_manifest_name`."""
    return _RANK_MANIFEST.fullmatch(path) is not None


def rank_begun_name(rank: int) -> str:
    """Return the file name of a rank manifest without files, which a rank writes first."""
    return rank_directory(rank) + _BEGUN_SUFFIX


def is_rank_begun(path: str) -> bool:
    """Whether a path within a set is a :func:`rank_begun_name`."""
    return _RANK_BEGUN.fullmatch(path) is not None


def is_final(path: str) -> bool:
    """Whether a file, by its path within a set, does not change any more."""
    return _FINAL.fullmatch(path) is not None


def is_of_rank(name: str, rank: int) -> bool:
    """Whether an entry of a set belongs to this rank, temporary files of its manifests included."""
    manifests = (rank_manifest_name(rank), rank_begun_name(rank))
    temporary = tuple(openat.temporary_prefix(each) for each in manifests)
    own = (*manifests, rank_directory(rank), writing_directory(rank))
    return name in own or name.startswith(temporary)


@dataclass(frozen=True)
class FileEntry:
    """One file in a rank manifest."""

    path: ShardPath
    size_bytes: Bytes


def _fit_files(files: list[FileEntry]) -> list[dict[str, Any]]:
    return [fitted(each) for each in bounds.items(files, "files", bounds.FILES_MAX)]


def _check_files(value: Any, name: str) -> list[FileEntry]:
    return [
        build(FileEntry, bounds.mapping(each, f"{name}[{number}]", KEYS_MAX), f"{name}[{number}]")
        for number, each in enumerate(bounds.items(value, name, bounds.FILES_MAX))
    ]


Files = Annotated[list[FileEntry], FieldType(_check_files, _fit_files)]


@dataclass(frozen=True)
class RankManifest:
    """The last file that a rank writes into a checkpoint."""

    run: Text
    step: Step
    kind: Id
    """``periodic``, ``emergency`` or ``final``."""
    files: Files
    rank: Rank = 0
    world_size: Ranks = 1
    local_world_size: Ranks = 1
    node: Node = 0
    nodes: Nodes = 1
    request_id: Id = ""
    start_id: StartId = ""
    """Id of the start of the training that wrote the set; see :class:`swansong.protocol.Hello`."""
    framework: Id = "swansong"
    health: Metrics = field(default_factory=dict)
    without_ranks: Text = ""
    """Ranks of the job that took no part, such as ``2, 8-15``; empty: all took part.

    ``rank``, ``world_size``, ``node`` and ``nodes`` count only the ranks and the VMs that took part.
    """
    boot_id: Id = ""
    """Boot of the kernel in which the rank sealed the set; empty: unknown."""
    began_ticks: Bytes = 0
    """When the process of the rank began, in clock ticks since that boot; 0: unknown."""
    version: Version = VERSION

    def encode(self) -> bytes:
        """Return the content of the file.

        Raises:
            ProtocolError: the manifest lists too many files, or a field has the wrong type.
        """
        return json.dumps(fitted(self), indent=1, allow_nan=False).encode()

    @classmethod
    def decode(cls, data: bytes) -> RankManifest:
        """Parse the content of the file.

        Raises:
            ProtocolError: the content is malformed, or contains an unsafe path.
        """
        body = parse_object(data, RANK_MANIFEST_MAX_BYTES, "rank manifest")
        manifest: RankManifest = build(cls, body, "rank manifest")
        return manifest
