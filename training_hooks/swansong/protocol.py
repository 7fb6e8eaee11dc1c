# SPDX-License-Identifier: Apache-2.0
"""What trainer and daemon say to each other, and how a checkpoint lies in staging.

The one shared truth of the two distributions: the hooks use it, and the daemon imports it.  Standard
library only, Python 3.10 and later.

The channel is a Unix socket of type ``SOCK_SEQPACKET``: one JSON object per message, at most
:data:`MAX_MESSAGE_BYTES`, ``{"type": "hello", ...}``.  Unknown *fields* are ignored, so that either
side may be upgraded first; an unknown type, a missing field or a wrong type is a
:class:`ProtocolError`.  Every message is idempotent: after a reconnect both sides may say all again.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, ClassVar

VERSION = 1
MAX_MESSAGE_BYTES = 65536
DEFAULT_SOCKET = "/run/swansong/trainer.sock"
SOCKET_ENV = "SWANSONG_SOCKET"
"""Environment variable that names another socket for the hooks."""


class ProtocolError(ValueError):
    """A message or a rank manifest that cannot be understood; says which field and why."""


@dataclass(frozen=True)
class Message:
    """Base of all messages.  ``TYPE`` is its name on the wire."""

    TYPE: ClassVar[str] = ""


# ---------------------------------------------------------------- trainer -> daemon


@dataclass(frozen=True)
class Hello(Message):
    """First message of a rank, again after each reconnect."""

    TYPE: ClassVar[str] = "hello"
    run: str
    """Name of the run, or empty to take the daemon's."""
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node: int = 0
    nodes: int = 1
    attempt: str = ""
    """Identity of this incarnation of the trainer, for example ``run-id/restart-count``."""
    capabilities: list[str] = field(default_factory=list)
    """``periodic``: takes periodic checkpoints when the daemon asks, and plans none itself."""
    step: int = -1
    version: int = VERSION


@dataclass(frozen=True)
class Progress(Message):
    """What the trainer measured; sent at most about once a second, while it steps or polls."""

    TYPE: ClassVar[str] = "progress"
    step: int
    loss: float | None = None
    loss_is_finite: bool | None = None
    """None when the loss is not known."""
    step_s: float | None = None
    save_s: float | None = None
    save_bytes: int | None = None
    snapshot_s: float | None = None
    """The part of ``save_s`` for which the training loop stood still."""


@dataclass(frozen=True)
class Accepted(Message):
    """The rank will save; ``step`` is the last one that it has completed.

    From here until it is told a target (or gives up) it begins no further step.
    """

    TYPE: ClassVar[str] = "accepted"
    request_id: str
    step: int


@dataclass(frozen=True)
class Agreed(Message):
    """The ranks of all VMs have agreed: they save as soon as they have completed a step ``>= step``."""

    TYPE: ClassVar[str] = "agreed"
    request_id: str
    step: int


@dataclass(frozen=True)
class PeerRequest(Message):
    """The daemon of another VM of the job wants a checkpoint at once, because that VM goes away."""

    TYPE: ClassVar[str] = "peer_request"
    request_id: str
    reason: str
    seconds_left: float
    """Until the power of that VM goes, counted from the sending."""


@dataclass(frozen=True)
class Incarnation(Message):
    """What all ranks of this start of a job over several VMs, and no others, have in common."""

    TYPE: ClassVar[str] = "incarnation"
    id: str


@dataclass(frozen=True)
class Sealed(Message):
    """A checkpoint has its sealed name.  ``request_id`` is empty for a periodic one."""

    TYPE: ClassVar[str] = "sealed"
    step: int
    directory: str
    """Relative to the staging directory of the run."""
    save_s: float
    size_bytes: int
    request_id: str = ""


@dataclass(frozen=True)
class Failed(Message):
    """The requested checkpoint could not be taken."""

    TYPE: ClassVar[str] = "failed"
    request_id: str
    step: int
    reason: str


@dataclass(frozen=True)
class Declined(Message):
    """The trainer will not take the requested checkpoint."""

    TYPE: ClassVar[str] = "declined"
    request_id: str
    reason: str


@dataclass(frozen=True)
class RestoreQuery(Message):
    """Asks for the newest whole checkpoint as a local directory."""

    TYPE: ClassVar[str] = "restore_query"
    query_id: str
    rollback: int = 0
    """0: to start from.  Else the running trainer goes back, for the so many-th time, to the newest
    checkpoint that is healthy; every rank asks."""
    before_step: int = -1
    """In a rollback: only a checkpoint of an earlier step will do."""
    generation: int = -1
    step: int = -1
    """With ``generation``: this commit and no other, for so the job's first rank has decided."""
    incarnation: str = ""
    """Answer only when this :class:`Incarnation` has begun at the daemon as well."""


@dataclass(frozen=True)
class Bye(Message):
    """The trainer ends by itself."""

    TYPE: ClassVar[str] = "bye"
    reason: str = "finished"


# ---------------------------------------------------------------- daemon -> trainer


@dataclass(frozen=True)
class Welcome(Message):
    """Answer to Hello."""

    TYPE: ClassVar[str] = "welcome"
    run: str
    staging: str
    """Absolute path of the staging directory of the run, where the hooks write."""
    generation: int | None = None
    """None until the store has been reached and a generation claimed."""
    grace_s: float = 0.0
    """Shortest notice that is to be expected here; 0 when nobody knows."""
    version: int = VERSION


@dataclass(frozen=True)
class Refused(Message):
    """The daemon will not talk with this peer; it closes the connection after this."""

    TYPE: ClassVar[str] = "refused"
    reason: str


@dataclass(frozen=True)
class Request(Message):
    """Take a checkpoint at the next step boundary, please."""

    TYPE: ClassVar[str] = "request"
    id: str
    reason: str
    seconds_left: float
    """Until the power goes, counted from the sending."""
    urgency: str = "emergency"


@dataclass(frozen=True)
class Target(Message):
    """All ranks save as soon as they have completed a step ``>= step``."""

    TYPE: ClassVar[str] = "target"
    request_id: str
    step: int


@dataclass(frozen=True)
class Withdrawn(Message):
    """The request no longer stands; go on training."""

    TYPE: ClassVar[str] = "withdrawn"
    request_id: str
    reason: str


@dataclass(frozen=True)
class Committed(Message):
    """A checkpoint of this run is committed in the object store."""

    TYPE: ClassVar[str] = "committed"
    generation: int
    step: int


@dataclass(frozen=True)
class Fenced(Message):
    """Another VM has taken the run over; nothing from here will be committed any more."""

    TYPE: ClassVar[str] = "fenced"
    generation: int


@dataclass(frozen=True)
class Restoring(Message):
    """The answer to RestoreQuery is on its way."""

    TYPE: ClassVar[str] = "restoring"
    query_id: str
    bytes_done: int
    bytes_total: int


@dataclass(frozen=True)
class Restored(Message):
    """Answer to RestoreQuery.  An empty ``path`` with an empty ``error`` means a fresh run."""

    TYPE: ClassVar[str] = "restored"
    query_id: str
    path: str = ""
    step: int = -1
    generation: int = -1
    error: str = ""


# ---------------------------------------------------------------- operator <-> daemon


@dataclass(frozen=True)
class StatusQuery(Message):
    """``swansong status`` asks."""

    TYPE: ClassVar[str] = "status_query"


@dataclass(frozen=True)
class Status(Message):
    """The daemon's state; docs/operations.md describes ``report``."""

    TYPE: ClassVar[str] = "status"
    report: dict[str, Any]


@dataclass(frozen=True)
class Notify(Message):
    """``swansong notify``: the VM will go away.  Only root and the daemon's own user may say so."""

    TYPE: ClassVar[str] = "notify"
    nonce: str
    """Made anew for each notice; the same one said twice is one notice."""
    seconds_left: float
    """Until the power goes, counted from the sending."""
    reason: str = ""
    drill: bool = False
    """A rehearsal."""


@dataclass(frozen=True)
class NotifyWithdrawn(Message):
    """``swansong notify --withdraw``: what was said by Notify does not stand any more."""

    TYPE: ClassVar[str] = "notify_withdrawn"
    reason: str = ""


@dataclass(frozen=True)
class Noted(Message):
    """Answer to Notify and NotifyWithdrawn; StatusQuery shows what came of it."""

    TYPE: ClassVar[str] = "noted"


FROM_TRAINER: tuple[type[Message], ...] = (
    Hello, Progress, Accepted, Agreed, PeerRequest, Incarnation, Sealed, Failed, Declined, RestoreQuery,
    Bye, StatusQuery, Notify, NotifyWithdrawn,
)  # fmt: skip
FROM_DAEMON: tuple[type[Message], ...] = (
    Welcome, Refused, Request, Target, Withdrawn, Committed, Fenced, Restoring, Restored, Status,
    Noted,
)  # fmt: skip
_BY_TYPE = {kind.TYPE: kind for kind in (*FROM_TRAINER, *FROM_DAEMON)}

# What the annotation of a field (a string, see the __future__ import) allows.
_CHECKS: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "an integer"),
    "float": ((int, float), "a number"),
    "str": ((str,), "a string"),
    "bool": ((bool,), "true or false"),
    "list[str]": ((list,), "a list of strings"),
    "dict[str, Any]": ((dict,), "an object"),
    "dict[str, float]": ((dict,), "an object of numbers"),
    "list[FileEntry]": ((list,), "a list of files"),
}


def encode(message: Message) -> bytes:
    """The message as one datagram.

    Raises:
        ProtocolError: it would be larger than :data:`MAX_MESSAGE_BYTES`.
    """
    body = {"type": message.TYPE, **dataclasses.asdict(message)}
    data = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(
            f"message {message.TYPE} has {len(data)} bytes; the limit is {MAX_MESSAGE_BYTES}"
        )
    return data


def decode(data: bytes) -> Message:
    """Parse one datagram.

    Raises:
        ProtocolError: it is too large, no JSON object, of unknown type, or a field is missing or wrong.
    """
    body = _parse_object(data, MAX_MESSAGE_BYTES, "message")
    name = body.get("type")
    kind = _BY_TYPE.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ProtocolError(f"unknown message type {name!r:.60}")
    message: Message = _build(kind, body)
    return message


def _parse_object(data: bytes, limit_bytes: int, what: str) -> dict[str, Any]:
    if len(data) > limit_bytes:
        raise ProtocolError(f"{what} has over {limit_bytes} bytes")

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ProtocolError(f"{what} names a key twice")
        return result

    def no_constant(name: str) -> None:
        raise ProtocolError(f"{what} holds {name}, which is no JSON number")

    try:
        body = json.loads(data, object_pairs_hook=no_duplicates, parse_constant=no_constant)
    except ProtocolError:
        raise
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{what} is not JSON: {error!s:.120}") from None
    if not isinstance(body, dict):
        raise ProtocolError(f"{what} is not a JSON object")
    return body


def _build(kind: type[Any], body: dict[str, Any]) -> Any:
    values: dict[str, Any] = {}
    for item in dataclasses.fields(kind):
        if item.name not in body:
            no_default = item.default is dataclasses.MISSING
            if no_default and item.default_factory is dataclasses.MISSING:
                raise ProtocolError(f"{kind.__name__}: field {item.name!r} is missing")
            continue
        values[item.name] = _checked(kind, item.name, str(item.type), body[item.name])
    return kind(**values)


def _checked(kind: type[Any], name: str, annotation: str, value: Any) -> Any:
    optional = annotation.endswith(" | None")
    if optional and value is None:
        return None
    base = annotation.removesuffix(" | None")
    allowed, wanted = _CHECKS[base]
    wrong = not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed)
    if base == "list[str]" and not wrong:
        wrong = not all(isinstance(item, str) for item in value)
    if base == "dict[str, float]" and not wrong:
        wrong = not all(
            isinstance(item, (int, float)) and not isinstance(item, bool) for item in value.values()
        )
    if isinstance(value, float) and not math.isfinite(value):
        wrong = True
    if isinstance(value, int) and not isinstance(value, bool) and not -(2**63) <= value < 2**63:
        wrong = True
    if wrong:
        raise ProtocolError(f"{kind.__name__}: field {name!r} is {value!r:.60}, not {wanted}")
    if base == "list[FileEntry]":
        if not all(isinstance(item, dict) for item in value):
            raise ProtocolError(f"{kind.__name__}: field {name!r} holds what is no object")
        return [_build(FileEntry, item) for item in value]
    return value


# ---------------------------------------------------------------- staging
#
# <staging>/<run>/step-<12 digits>.<nonce>.partial/    being written
#     rank-00000.begun                                 rank manifest without files, while the rank writes
#     rank-00000.writing/...                           what the rank may still write to
#     rank-00000/...                                   what it has finished: final, and may be stored early
# <staging>/<run>/step-<12 digits>.<nonce>/            sealed: renamed by whoever found all rank manifests
#     rank-00000.json                                  last file of that rank: what it wrote, and why
#     ...                                              whatever the trainer wrote

PARTIAL_SUFFIX = ".partial"
WRITING_SUFFIX = ".writing"
"""Of a rank's directory, for what it may still change; a finished file moves to the one without it."""
BEGUN_SUFFIX = ".begun"
"""Of the file in which a rank says what it is about to write."""
RESTORED_DIRECTORY = "restored"
"""Where the daemon puts what a trainer asked to restore, below the staging directory of the run."""
RANK_MANIFEST_MAX_BYTES = 16 * 2**20

_SEALED = re.compile(r"step-([0-9]{12})\.([A-Za-z0-9]{1,64})")
_SAFE_PART = re.compile(r"[A-Za-z0-9_+=@,. -]{1,200}")


def sealed_name(step: int, nonce: str) -> str:
    """Name of a sealed checkpoint directory."""
    return f"step-{step:012d}.{nonce}"


def parse_sealed_name(name: str) -> tuple[int, str] | None:
    """(step, nonce) of a sealed checkpoint directory, or None when it is not one."""
    match = _SEALED.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def rank_manifest_name(rank: int) -> str:
    """File name of a rank manifest."""
    return f"rank-{rank:05d}.json"


def rank_directory(rank: int) -> str:
    """Name of the directory, within a set, that holds one rank's files."""
    return f"rank-{rank:05d}"


def is_safe_path(path: str) -> bool:
    """Whether a relative path of a shard is one that we would write to when restoring.

    Strict on purpose: parts of letters, digits and ``_ + = @ , . - space``, none of them ``.`` or
    ``..``, at most 16 deep and 1024 characters long.
    """
    parts = path.split("/")
    return (
        len(path) <= 1024
        and len(parts) <= 16
        and all(_SAFE_PART.fullmatch(part) and part not in (".", "..") for part in parts)
    )


@dataclass(frozen=True)
class FileEntry:
    """One file in a rank manifest."""

    path: str
    size_bytes: int


@dataclass(frozen=True)
class RankManifest:
    """The last file that a rank writes into a checkpoint."""

    run: str
    step: int
    kind: str
    """``periodic``, ``emergency`` or ``final``."""
    files: list[FileEntry]
    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node: int = 0
    nodes: int = 1
    request_id: str = ""
    framework: str = "swansong"
    health: dict[str, float] = field(default_factory=dict)
    version: int = VERSION

    def encode(self) -> bytes:
        return json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False).encode()

    @classmethod
    def decode(cls, data: bytes) -> RankManifest:
        """Parse the content of a ``rank-*.json``.

        Raises:
            ProtocolError: it cannot be understood, or names a path that is not safe.
        """
        manifest: RankManifest = _build(
            cls, _parse_object(data, RANK_MANIFEST_MAX_BYTES, "rank manifest")
        )
        for entry in manifest.files:
            if not is_safe_path(entry.path):
                raise ProtocolError(f"rank manifest names the path {entry.path!r:.100}")
        return manifest
