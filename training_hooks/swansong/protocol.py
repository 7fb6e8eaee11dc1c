# SPDX-License-Identifier: Apache-2.0
"""The messages between trainer and daemon, and the layout of a checkpoint in staging.

Both distributions use this module: it belongs to the hooks, and the daemon imports it.  Standard library
only, Python 3.10 and later.

The channel is a Unix socket of type ``SOCK_SEQPACKET``: one JSON object per message, at most
:data:`MAX_MESSAGE_BYTES`, ``{"type": "hello", ...}``.  Unknown *fields* are ignored, so that either side
may be upgraded first.  An unknown type, a missing field, a wrong type or a value out of range is a
:class:`ProtocolError`.  Every message is idempotent: after a reconnect both sides may repeat all messages.

The type of each field is one of the aliases below, and :data:`_FIELD_TYPES` has the range of each alias.
:func:`decode` checks the range.  :func:`encode` clamps measurements and texts to the range.  Otherwise a
loss of NaN, or an error message of a megabyte, would cost the sender its connection.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from swansong import bounds, openat
from swansong.bounds import BoundsError

VERSION = 1
MAX_MESSAGE_BYTES = 65536
DEFAULT_SOCKET = "/run/swansong/trainer.sock"
SOCKET_ENV = "SWANSONG_SOCKET"
"""Environment variable with the path of another socket for the hooks."""


PARENT_NONE = "none"
PARENT_UNKNOWN = "unknown"
PROCESS_PREFIX = "process-"
"""Start of the id of a start without hooks, which only the daemon draws."""

Step = int
"""Number of completed optimizer steps; -1 if unknown."""
Generation = int
"""-1 if unknown."""
Rank = int
Ranks = int
"""A number of ranks."""
Node = int
Nodes = int
"""A number of VMs."""
Count = int
Version = int
Bytes = int
Seconds = float
Metric = float
Flag = bool
Id = str
StartId = str
"""An :data:`Id` that is not one of a process without hooks, which only the daemon draws."""
"""At most 128 characters of letters, digits and ``_ . : / ~ @ + -``."""
Text = str
"""Text for people; at most 4,096 characters."""
PathText = str
"""A path on this VM."""
ShardPath = str
"""See :func:`swansong.bounds.path`."""
Capabilities = list[str]
Prefixes = list[str]
"""Beginnings of paths within a checkpoint; at most :data:`PREFIXES_MAX`."""
Metrics = dict[str, float]
Report = dict[str, Any]


class ProtocolError(ValueError):
    """A malformed message or rank manifest; the text names the field and the reason."""


@dataclass(frozen=True)
class Message:
    """Base of all messages.  ``TYPE`` is its name on the wire."""

    TYPE: ClassVar[str] = ""


# ---------------------------------------------------------------- trainer -> daemon


@dataclass(frozen=True)
class Hello(Message):
    """First message of a rank on each connection."""

    TYPE: ClassVar[str] = "hello"
    run: Text
    """Name of the run; empty takes the name from the daemon."""
    rank: Rank = 0
    local_rank: Rank = 0
    world_size: Ranks = 1
    local_world_size: Ranks = 1
    node: Node = 0
    nodes: Nodes = 1
    capabilities: Capabilities = field(default_factory=list)
    """``periodic``: takes periodic checkpoints at the daemon's request, and schedules none itself.
    ``follow_ups``: trains on after an emergency checkpoint, and takes further ones."""
    step: Step = -1
    start_id: StartId = ""
    """Id of the start of the training, which rank 0 draws; also in rank manifests.  Empty while this rank
    does not know it: see :class:`StartDrawn` and :class:`Begin`."""
    parent: Id = PARENT_UNKNOWN
    """The start that wrote the state that this start has loaded, :data:`PARENT_NONE` for a fresh run, or
    :data:`PARENT_UNKNOWN`: nothing is loaded yet, or a directory that names no start."""
    parent_step: Step = -1
    """With ``parent``: the step of that state."""
    version: Version = VERSION


@dataclass(frozen=True)
class Progress(Message):
    """Measurements of the trainer; sent at most about once a second, while it steps or polls."""

    TYPE: ClassVar[str] = "progress"
    step: Step
    loss: Metric | None = None
    loss_is_finite: Flag | None = None
    """None if the loss is unknown."""
    step_s: Seconds | None = None
    save_s: Seconds | None = None
    save_bytes: Bytes | None = None
    snapshot_s: Seconds | None = None
    """Part of ``save_s`` for which the save blocked the training loop."""
    start_id: StartId = ""
    """Id of a start of the training from ``step``; empty if training only continues."""
    parent: Id = PARENT_UNKNOWN
    """With ``start_id``: see :class:`Hello`."""
    parent_step: Step = -1


@dataclass(frozen=True)
class Accepted(Message):
    """The rank will save; ``step`` is the last step that it has completed.

    It begins no further step until it receives a target, or declines.
    """

    TYPE: ClassVar[str] = "accepted"
    request_id: Id
    step: Step


@dataclass(frozen=True)
class Agreed(Message):
    """The ranks of all VMs have agreed: they save as soon as they have completed a step ``>= step``."""

    TYPE: ClassVar[str] = "agreed"
    request_id: Id
    step: Step


@dataclass(frozen=True)
class PeerRequest(Message):
    """The daemon of another VM of the job requests a checkpoint, because that VM will be terminated."""

    TYPE: ClassVar[str] = "peer_request"
    request_id: Id
    reason: Text
    seconds_left: Seconds
    """Time until that VM is terminated, from the moment of sending."""


@dataclass(frozen=True)
class Finish(Message):
    """All ranks of a new start over several VMs have met: commit what earlier starts have sealed.

    The daemon replies with :class:`Finished` after its own commits.  If another VM's share is missing then,
    it replies again once the checkpoint is whole, or after its time limit.
    """

    TYPE: ClassVar[str] = "finish"
    start_id: StartId
    """Id of the start that will begin."""


@dataclass(frozen=True)
class Begin(Message):
    """This rank belongs to a start that begins now; all its ranks send the same id.

    Over several VMs it follows the rendezvous.  On one VM it announces further starts of the same processes,
    such as a rollback.  If this rank cannot load the checkpoint that it has asked for, it sends the id again:
    the start begins over, and has loaded nothing.
    """

    TYPE: ClassVar[str] = "begin"
    start_id: StartId


@dataclass(frozen=True)
class Sealed(Message):
    """A set has its sealed name.  ``request_id`` is empty for a periodic checkpoint."""

    TYPE: ClassVar[str] = "sealed"
    step: Step
    directory: PathText
    """Relative to the staging directory of the run."""
    save_s: Seconds
    size_bytes: Bytes
    request_id: Id = ""


@dataclass(frozen=True)
class Failed(Message):
    """A checkpoint could not be taken."""

    TYPE: ClassVar[str] = "failed"
    request_id: Id
    """Empty for a checkpoint that the trainer scheduled itself."""
    step: Step
    reason: Text


@dataclass(frozen=True)
class Declined(Message):
    """The trainer will not take the requested checkpoint."""

    TYPE: ClassVar[str] = "declined"
    request_id: Id
    reason: Text


@dataclass(frozen=True)
class RestoreQuery(Message):
    """Query for the newest whole checkpoint as a local directory."""

    TYPE: ClassVar[str] = "restore_query"
    query_id: Id
    rollback: Count = 0
    """0 for a resume.  Otherwise the number of rollbacks of the running trainer, including this one, to the
    newest healthy checkpoint; every rank sends the query."""
    before_step: Step = -1
    """For a rollback: the checkpoint must be of an earlier step."""
    generation: Generation = -1
    step: Step = -1
    """With ``generation``: exactly this commit, which rank 0 has chosen."""
    refused: Text = ""
    """With ``generation``: the reason why the ranks refuse this commit; the answer is an older commit."""
    start_id: StartId = ""
    """Start of this rank.  The daemon answers under the generation of this start, and gives all its ranks on
    this VM the same answer."""
    prefixes: Prefixes = field(default_factory=list)
    """The rank reads only files whose paths begin with one of these; empty: it reads all files."""
    takes_shards: Flag = False
    """The rank takes :class:`ShardVerified` messages while the checkpoint is fetched."""


@dataclass(frozen=True)
class ShardsTaken(Message):
    """The rank has loaded shards; the daemon sends only a few ahead of this message."""

    TYPE: ClassVar[str] = "shards_taken"
    query_id: Id
    download: Id
    count: Count
    """Number of :class:`ShardVerified` messages of this download that the rank has handled."""


@dataclass(frozen=True)
class Bye(Message):
    """The trainer disconnects on purpose."""

    TYPE: ClassVar[str] = "bye"
    reason: Text = "finished"


# ---------------------------------------------------------------- daemon -> trainer


@dataclass(frozen=True)
class Welcome(Message):
    """Answer to Hello."""

    TYPE: ClassVar[str] = "welcome"
    run: Text
    staging: PathText
    """Absolute path of the staging directory of the run, to which the hooks write."""
    generation: Generation | None = None
    """None until the daemon has reached the store and claimed a generation."""
    grace_s: Seconds = 0.0
    """Shortest grace period to expect on this VM; 0 if unknown."""
    naming_secret: Id = ""
    """Part of the names of sets that several ranks write, so that other users cannot compute them."""
    version: Version = VERSION


@dataclass(frozen=True)
class Refused(Message):
    """The daemon refuses this peer, and then closes the connection."""

    TYPE: ClassVar[str] = "refused"
    reason: Text


@dataclass(frozen=True)
class Request(Message):
    """Request for a checkpoint at the next step boundary."""

    TYPE: ClassVar[str] = "request"
    id: Id
    reason: Text
    seconds_left: Seconds
    """Time until the VM is terminated, from the moment of sending."""
    urgency: Id = "emergency"


@dataclass(frozen=True)
class Target(Message):
    """All ranks save as soon as they have completed a step ``>= step``."""

    TYPE: ClassVar[str] = "target"
    request_id: Id
    step: Step


@dataclass(frozen=True)
class Withdrawn(Message):
    """The daemon has withdrawn the request; training continues."""

    TYPE: ClassVar[str] = "withdrawn"
    request_id: Id
    reason: Text


@dataclass(frozen=True)
class Committed(Message):
    """A checkpoint of this run is committed in the object store."""

    TYPE: ClassVar[str] = "committed"
    generation: Generation
    step: Step
    is_final: Flag = False
    """The checkpoint is the end of the run."""


@dataclass(frozen=True)
class Fenced(Message):
    """Another VM has taken the run over; nothing from this VM is committed any more."""

    TYPE: ClassVar[str] = "fenced"
    generation: Generation


@dataclass(frozen=True)
class Finished(Message):
    """Answer to :class:`Finish`: this VM has committed all that it has sealed.

    It also names the VM within the earlier start.  When all VMs of that start have answered, no share of it
    is still to come.
    """

    TYPE: ClassVar[str] = "finished"
    start_id: StartId
    earlier: StartId = ""
    """Id of the newest earlier start whose ranks ran on this VM; empty if none did."""
    first_rank: Step = -1
    """The lowest rank of that start on this VM."""
    nodes: Nodes = 1
    """Number of VMs of that start."""
    waits: Flag = False
    """The daemon waits for the share of another VM of that start, and will send another answer."""


@dataclass(frozen=True)
class StartDrawn(Message):
    """The start of a job on one VM, as its rank 0 has drawn it: for the other ranks."""

    TYPE: ClassVar[str] = "start_drawn"
    start_id: StartId


@dataclass(frozen=True)
class Restoring(Message):
    """Progress of the answer to RestoreQuery."""

    TYPE: ClassVar[str] = "restoring"
    query_id: Id
    bytes_done: Bytes
    bytes_total: Bytes


@dataclass(frozen=True)
class ShardVerified(Message):
    """A file of the checkpoint that is being fetched matches its digest.

    The message passes a read-only descriptor of the file (``SCM_RIGHTS``), if the daemon could pass one.  The
    checkpoint may still turn out to be damaged: only Restored, with the same ``download``, confirms it.
    """

    TYPE: ClassVar[str] = "shard_verified"
    query_id: Id
    download: Id
    """Id of one attempt to fetch one commit."""
    path: ShardPath


@dataclass(frozen=True)
class Restored(Message):
    """Answer to RestoreQuery.  An empty ``path`` with an empty ``error`` means a fresh run."""

    TYPE: ClassVar[str] = "restored"
    query_id: Id
    path: PathText = ""
    step: Step = -1
    generation: Generation = -1
    error: Text = ""
    is_damaged: Flag = False
    """With ``error``: the commit that the query names is damaged, and an older one may be whole."""
    download: Id = ""
    """The download that fetched these files; the :class:`ShardVerified` messages of all others are void."""


# ---------------------------------------------------------------- operator <-> daemon


@dataclass(frozen=True)
class StatusQuery(Message):
    """Query of ``swansong status``."""

    TYPE: ClassVar[str] = "status_query"


@dataclass(frozen=True)
class Status(Message):
    """The daemon's state; docs/reference/status.md describes ``report``."""

    TYPE: ClassVar[str] = "status"
    report: Report


@dataclass(frozen=True)
class Notify(Message):
    """Manual notice of ``swansong notify``.  Only root and the daemon's own user may send it."""

    TYPE: ClassVar[str] = "notify"
    nonce: Id
    """Random for each notice.  Two messages with the same nonce are one notice."""
    seconds_left: Seconds
    """Time until the VM is terminated, from the moment of sending."""
    reason: Text = ""
    drill: Flag = False
    """A rehearsal."""


@dataclass(frozen=True)
class NotifyWithdrawn(Message):
    """Withdrawal of the manual notice, by ``swansong notify --withdraw``."""

    TYPE: ClassVar[str] = "notify_withdrawn"
    reason: Text = ""


@dataclass(frozen=True)
class Noted(Message):
    """Answer to Notify and NotifyWithdrawn; :class:`Status` shows the effect."""

    TYPE: ClassVar[str] = "noted"


FROM_TRAINER: tuple[type[Message], ...] = (
    Hello, Progress, Accepted, Agreed, PeerRequest, Finish, Begin, Sealed, Failed, Declined,
    RestoreQuery, ShardsTaken, Bye, StatusQuery, Notify, NotifyWithdrawn,
)  # fmt: skip
FROM_DAEMON: tuple[type[Message], ...] = (
    Welcome, Refused, Request, Target, Withdrawn, Committed, Fenced, Finished, StartDrawn, Restoring,
    ShardVerified, Restored, Status, Noted,
)  # fmt: skip
_BY_TYPE = {kind.TYPE: kind for kind in (*FROM_TRAINER, *FROM_DAEMON)}

PREFIXES_MAX = 256
_CAPABILITIES_MAX = 16
_KEYS_MAX = 1000
"""Keys of a JSON object, unknown fields included."""


def encode(message: Message) -> bytes:
    """Return the message as one datagram, with measurements and texts clamped to their ranges.

    Raises:
        ProtocolError: the datagram would exceed :data:`MAX_MESSAGE_BYTES`, or a field has the wrong type.
    """
    body = {"type": message.TYPE, **_fitted(message)}
    try:
        text = json.dumps(body, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"message {message.TYPE} is not JSON: {error}") from None
    # UTF-8 and not ASCII: two texts of the greatest length fit, whatever their characters are.
    data = text.encode(errors="backslashreplace")
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(
            f"message {message.TYPE} has {len(data)} bytes; the limit is {MAX_MESSAGE_BYTES}"
        )
    return data


def decode(data: bytes) -> Message:
    """Parse one datagram.

    Raises:
        ProtocolError: the datagram is too large or not a JSON object, its type is unknown, or a field is
            missing, has the wrong type or is out of range.
    """
    body = _parse_object(data, MAX_MESSAGE_BYTES, "message")
    name = body.get("type")
    kind = _BY_TYPE.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ProtocolError(f"unknown message type {bounds.shown(name)}")
    message: Message = _build(kind, body, kind.TYPE)
    return message


def _parse_object(data: bytes, limit_bytes: int, what: str) -> dict[str, Any]:
    try:
        return bounds.json_object(data, what, limit_bytes)
    except BoundsError as error:
        raise ProtocolError(str(error)) from None


# ---------------------------------------------------------------- names in staging
#
# <staging>/<run>/step-<12 digits>.<nonce>.partial/    the ranks write to this set
#     rank-00000.begun                                 rank manifest without files, until the rank is done
#     rank-00000.writing/...                           files that the rank may still change
#     rank-00000/...                                   files that are final, and may be uploaded early
# <staging>/<run>/step-<12 digits>.<nonce>/            sealed: renamed when all rank manifests are there
#     rank-00000.json                                  rank manifest, the last file that the rank writes
#     rank-00000/...                                   the files that it lists
# <staging>/<run>/restored/                            checkpoints that the daemon has fetched for a trainer
# <staging>/<run>/.<name>                              temporary files; private directory of the daemon
# <staging>/<run>/<other>                              a checkpoint of another framework, see ADOPTED_NAMES

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
_RANK = "rank-[0-9]{5,}"
_RANK_DIGITS_MAX = 10
_RANK_DIRECTORY = re.compile(_RANK)
_RANK_MANIFEST = re.compile(_RANK + r"\.json")
_RANK_BEGUN = re.compile(_RANK + re.escape(_BEGUN_SUFFIX))
_FINAL = re.compile(_RANK + r"(\.json|/.*)")


def sealed_name(step: int, nonce: str) -> str:
    """Return the name of a sealed set."""
    return f"step-{step:012d}.{nonce}"


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
    digits = name.removeprefix("rank-")
    return int(digits) if is_rank_directory(name) and len(digits) < _RANK_DIGITS_MAX else -1


def is_rank_directory(name: str) -> bool:
    """Whether a name is a :func:`rank_directory`."""
    return _RANK_DIRECTORY.fullmatch(name) is not None


def writing_directory(rank: int) -> str:
    """Return the name of the directory for files that a rank may still change."""
    return rank_directory(rank) + _WRITING_SUFFIX


def is_writing_directory(name: str) -> bool:
    """Whether the files of a directory within a set may still change."""
    return name.endswith(_WRITING_SUFFIX)


def parse_writing_directory(name: str) -> int | None:
    """Return the rank of a :func:`writing_directory`; None for any other name."""
    own = name.removesuffix(_WRITING_SUFFIX)
    return int(own[5:]) if own != name and is_rank_directory(own) else None


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


@dataclass(frozen=True)
class RankManifest:
    """The last file that a rank writes into a checkpoint."""

    run: Text
    step: Step
    kind: Id
    """``periodic``, ``emergency`` or ``final``."""
    files: list[FileEntry]
    rank: Rank = 0
    world_size: Ranks = 1
    local_world_size: Ranks = 1
    node: Node = 0
    nodes: Nodes = 1
    request_id: Id = ""
    start_id: StartId = ""
    """Id of the start of the training that wrote the set; see :class:`Hello`."""
    framework: Id = "swansong"
    health: Metrics = field(default_factory=dict)
    without_ranks: Text = ""
    """Ranks of the job that took no part, such as ``2, 8-15``; empty: all took part.

    ``rank``, ``world_size``, ``node`` and ``nodes`` count only the ranks and the VMs that took part.
    """
    version: Version = VERSION

    def encode(self) -> bytes:
        """Return the content of the file.

        Raises:
            ProtocolError: the manifest lists too many files, or a field has the wrong type.
        """
        return json.dumps(_fitted(self), indent=1, allow_nan=False).encode()

    @classmethod
    def decode(cls, data: bytes) -> RankManifest:
        """Parse the content of the file.

        Raises:
            ProtocolError: the content is malformed, or contains an unsafe path.
        """
        body = _parse_object(data, RANK_MANIFEST_MAX_BYTES, "rank manifest")
        manifest: RankManifest = _build(cls, body, "rank manifest")
        return manifest


# ---------------------------------------------------------------- ranges of the fields


@dataclass(frozen=True)
class _FieldType:
    check: Callable[[Any, str], Any]
    """Takes value and name of a field; returns the value, or raises BoundsError."""
    fit: Callable[[Any], Any] = lambda value: value
    """Clamps a value of the sender to the range; returns None if that is impossible."""


def _integer(low: int, high: int) -> _FieldType:
    return _FieldType(lambda value, name: bounds.integer(value, name, low, high))


def _clamped_integer(low: int, high: int) -> _FieldType:
    return _FieldType(
        lambda value, name: bounds.integer(value, name, low, high),
        lambda value: min(max(operator.index(value), low), high),
    )


def _clamped_number(low: float, high: float) -> _FieldType:
    return _FieldType(
        lambda value, name: bounds.number(value, name, low, high),
        lambda value: _clamp(value, low, high),
    )


def _clamp(value: Any, low: float, high: float) -> float | None:
    try:
        number = float(value)
    except OverflowError:  # an integer beyond all floats
        number = math.inf if value > 0 else -math.inf
    return None if math.isnan(number) else min(max(number, low), high)


def _clamped_text(max_chars: int) -> _FieldType:
    return _FieldType(
        lambda value, name: bounds.text(value, name, max_chars),
        lambda value: _cut(value, max_chars),
    )


def _cut(text: str, max_chars: int) -> str:
    """Cut a text to ``max_chars`` characters, and replace lone surrogates, which file names may contain."""
    return text[:max_chars].encode(errors="replace").decode()


def _check_start_id(value: Any, name: str) -> str:
    start_id = bounds.identifier(value, name)
    if start_id.startswith(PROCESS_PREFIX):
        raise BoundsError(
            f"{name} is {bounds.shown(value)}, and only the daemon draws {PROCESS_PREFIX}*"
        )
    return start_id


def _check_capabilities(value: Any, name: str) -> list[str]:
    found = bounds.items(value, name, _CAPABILITIES_MAX)
    return [bounds.identifier(each, f"{name}[{number}]") for number, each in enumerate(found)]


def _check_prefixes(value: Any, name: str) -> list[str]:
    found = bounds.items(value, name, PREFIXES_MAX)
    return [bounds.prefix(each, f"{name}[{number}]") for number, each in enumerate(found)]


def _fit_metrics(metrics: dict[str, Any]) -> dict[str, float]:
    # The daemon reads these two names, so they come first if there are too many.
    names = sorted(metrics, key=lambda name: name not in ("loss", "loss_is_finite"))
    limit = bounds.METRIC_MAX
    fitted = {
        _cut(name, bounds.ID_CHARS_MAX): number
        for name in names
        if (number := _clamp(metrics[name], -limit, limit)) is not None
    }
    return dict(list(fitted.items())[: bounds.METRICS_MAX])


def _fit_files(files: list[FileEntry]) -> list[dict[str, Any]]:
    return [_fitted(each) for each in bounds.items(files, "files", bounds.FILES_MAX)]


def _check_files(value: Any, name: str) -> list[FileEntry]:
    return [
        _build(FileEntry, bounds.mapping(each, f"{name}[{number}]", _KEYS_MAX), f"{name}[{number}]")
        for number, each in enumerate(bounds.items(value, name, bounds.FILES_MAX))
    ]


_FIELD_TYPES = {
    "Step": _clamped_integer(-1, bounds.STEP_MAX),
    "Generation": _integer(-1, bounds.GENERATION_MAX),
    "Rank": _integer(0, bounds.RANKS_MAX),
    "Ranks": _integer(1, bounds.RANKS_MAX),
    "Node": _integer(0, bounds.NODES_MAX),
    "Nodes": _integer(1, bounds.NODES_MAX),
    "Count": _integer(0, 2**31 - 1),
    "Version": _integer(0, 2**31 - 1),
    "Bytes": _clamped_integer(0, bounds.BYTES_MAX),
    "Seconds": _clamped_number(0.0, bounds.SECONDS_MAX),
    "Metric": _clamped_number(-bounds.METRIC_MAX, bounds.METRIC_MAX),
    "Flag": _FieldType(bounds.boolean),
    "Id": _FieldType(bounds.identifier),
    "StartId": _FieldType(_check_start_id),
    "Text": _clamped_text(bounds.TEXT_CHARS_MAX),
    "PathText": _clamped_text(bounds.TEXT_CHARS_MAX),
    "ShardPath": _FieldType(bounds.path),
    "Capabilities": _FieldType(_check_capabilities),
    "Prefixes": _FieldType(_check_prefixes),
    "Metrics": _FieldType(bounds.metrics, _fit_metrics),
    "Report": _FieldType(lambda value, name: bounds.mapping(value, name, _KEYS_MAX)),
    "list[FileEntry]": _FieldType(_check_files, _fit_files),
}
"""By the name of the alias in a field's annotation, which is a string because of the __future__ import."""


def _field_type(item: dataclasses.Field[Any]) -> tuple[_FieldType, bool]:
    """Return the type of a field, and whether the field may be None."""
    annotation = str(item.type)
    name = annotation.removesuffix(" | None")
    return _FIELD_TYPES[name], name != annotation


def _build(kind: type[Any], body: dict[str, Any], what: str) -> Any:
    """Build a message or manifest from a JSON object.

    Raises:
        ProtocolError: a field is missing, has the wrong type, or is out of range.
    """
    values: dict[str, Any] = {}
    for item in dataclasses.fields(kind):
        if item.name in body:
            field_type, is_optional = _field_type(item)
            value = body[item.name]
            try:
                is_null = is_optional and value is None
                values[item.name] = None if is_null else field_type.check(value, item.name)
            except (BoundsError, ProtocolError) as error:
                raise ProtocolError(f"{what}: {error}") from None
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise ProtocolError(f"{what}: {item.name} is missing")
    return kind(**values)


def _fitted(sent: Any) -> dict[str, Any]:
    """Return the fields of a message or manifest, with measurements and texts clamped to their ranges.

    Raises:
        ProtocolError: a field has the wrong type.
    """
    body: dict[str, Any] = {}
    for item in dataclasses.fields(sent):
        field_type, is_optional = _field_type(item)
        value = getattr(sent, item.name)
        try:
            value = value if value is None else field_type.fit(value)
        except BoundsError as error:
            raise ProtocolError(str(error)) from None
        except (TypeError, AttributeError) as error:
            raise ProtocolError(f"{item.name} is {bounds.shown(value)}: {error}") from None
        # Only seconds of NaN cannot be clamped.
        body[item.name] = 0.0 if value is None and not is_optional else value
    return body
