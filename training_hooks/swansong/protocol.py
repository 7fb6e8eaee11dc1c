# SPDX-License-Identifier: Apache-2.0
"""The messages between trainer and daemon.

Both distributions use this module: it belongs to the hooks, and the daemon imports it.  Standard library
only, Python 3.10 and later.

The channel is a Unix socket of type ``SOCK_SEQPACKET``: one JSON object per message, at most
:data:`MAX_MESSAGE_BYTES`, ``{"type": "hello", ...}``.  Unknown *fields* are ignored, so that either side
may be upgraded first.  An unknown type, a missing field, a wrong type or a value out of range is a
:class:`ProtocolError`.  Every message is idempotent: after a reconnect both sides may repeat all messages.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import ClassVar

from swansong import bounds
from swansong.fields import (
    VERSION,
    Bytes,
    Capabilities,
    Count,
    Flag,
    Generation,
    GivenId,
    Id,
    Metric,
    Node,
    Nodes,
    PathText,
    Prefixes,
    ProtocolError,
    Rank,
    Ranks,
    Report,
    Seconds,
    ShardPath,
    StartId,
    Step,
    StepDigests,
    Text,
    Version,
    build,
    fitted,
    parse_object,
)

MAX_MESSAGE_BYTES = 65536
DEFAULT_SOCKET = "/run/swansong/trainer.sock"
SOCKET_ENV = "SWANSONG_SOCKET"
"""Environment variable with the path of another socket for the hooks."""
CHECK_ENV = "SWANSONG_CHECK"
"""Asks a fresh run to check that it can be resumed.  In the processes of that check, and of
:func:`swansong.testing.check_resume`, it is the path of a socket, which overrides all others."""


SIGTERM_LIMIT_S = 25.0
"""Longest time from SIGTERM to the end of a rank; torchrun and pods send SIGKILL after 30 s."""
EXIT_SAVED = 75
"""Exit code for a trainer that ends because :attr:`swansong.Guard.should_stop` is set: saved, restart it
elsewhere.  ``EX_TEMPFAIL`` of sysexits.h, which torchrun and schedulers do not take for success."""
PARENT_NONE = "none"
PARENT_UNKNOWN = "unknown"


@dataclass(frozen=True)
class Message:
    """Base of all messages.  ``TYPE`` is the name of the class on the wire: ``peer_request``."""

    TYPE: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        cls.TYPE = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


class ToDaemon(Message):
    """A message of a trainer or an operator."""


class FromDaemon(Message):
    """A message of the daemon."""


# ---------------------------------------------------------------- trainer -> daemon


@dataclass(frozen=True)
class Hello(ToDaemon):
    """First message of a rank on each connection."""

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
class Progress(ToDaemon):
    """Measurements of the trainer; sent at most about once a second, while it steps or polls."""

    step: Step
    loss: Metric | None = None
    loss_is_finite: Flag | None = None
    """None if the loss is unknown."""
    loss_is_usual: Flag | None = None
    """False while losses are not finite or, several in a row, far above those before; None if unknown."""
    step_s: Seconds | None = None
    own_s: Seconds | None = None
    """Part of ``step_s`` in which the rank waits for no other: from a step to the end of the forward pass."""
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
class Accepted(ToDaemon):
    """The rank will save; ``step`` is the last step that it has completed.

    It begins no further step until it receives a target, or declines.
    """

    request_id: Id
    step: Step


@dataclass(frozen=True)
class Agreed(ToDaemon):
    """The ranks of all VMs have agreed: they save as soon as they have completed a step ``>= step``."""

    request_id: Id
    step: Step


@dataclass(frozen=True)
class PeerRequest(ToDaemon):
    """The daemon of another VM of the job requests a checkpoint, because that VM will be terminated."""

    request_id: GivenId
    reason: Text
    seconds_left: Seconds
    """Time until that VM is terminated, from the moment of sending."""


@dataclass(frozen=True)
class Finish(ToDaemon):
    """All ranks of a new start over several VMs have met: commit what earlier starts have sealed.

    The daemon replies with :class:`Finished` after its own commits.  If another VM's share is missing then,
    it replies again once the checkpoint is whole, or after its time limit.
    """

    start_id: StartId
    """Id of the start that will begin."""


@dataclass(frozen=True)
class Begin(ToDaemon):
    """This rank belongs to a start that begins now; all its ranks send the same id.

    Over several VMs it follows the rendezvous.  On one VM it announces further starts of the same processes,
    such as a rollback.  If this rank cannot load the checkpoint that it has asked for, it sends the id again:
    the start begins over, and has loaded nothing.
    """

    start_id: StartId


@dataclass(frozen=True)
class RequestQuery(ToDaemon):
    """Query of a rank that got SIGTERM, and ends within :data:`SIGTERM_LIMIT_S`.

    ``step`` is the last step that it has completed.  The answer is the :class:`Request` of its last
    checkpoint, or :class:`NotRequested`.
    """

    step: Step


@dataclass(frozen=True)
class Sealed(ToDaemon):
    """A set has its sealed name.  ``request_id`` is empty for a periodic checkpoint."""

    step: Step
    directory: PathText
    """Relative to the staging directory of the run."""
    save_s: Seconds
    size_bytes: Bytes
    request_id: Id = ""


@dataclass(frozen=True)
class Failed(ToDaemon):
    """A checkpoint could not be taken."""

    request_id: Id
    """Empty for a checkpoint that the trainer scheduled itself."""
    step: Step
    reason: Text


@dataclass(frozen=True)
class Declined(ToDaemon):
    """The trainer will not take the requested checkpoint."""

    request_id: Id
    reason: Text


@dataclass(frozen=True)
class RestoreQuery(ToDaemon):
    """Query for the newest whole checkpoint as a local directory."""

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
class ShardsTaken(ToDaemon):
    """The rank has loaded shards; the daemon sends only a few ahead of this message."""

    query_id: Id
    download: Id
    count: Count
    """Number of :class:`ShardVerified` messages of this download that the rank has handled."""


@dataclass(frozen=True)
class Digested(ToDaemon):
    """Digests of steps that this rank has completed since the last of these messages."""

    digests: StepDigests


@dataclass(frozen=True)
class RedoneQuery(ToDaemon):
    """Query for the digests of the start whose checkpoint this rank has loaded; the answer is Redone."""

    rank: Rank
    parent: Id
    """That start."""
    generation: Generation = -1
    """Its generation, as in Restored."""


@dataclass(frozen=True)
class Compared(ToDaemon):
    """Result of the comparison of redone steps with the interrupted start."""

    first: Step
    last: Step
    differs: Flag
    text: Text
    """The result in words."""


@dataclass(frozen=True)
class Bye(ToDaemon):
    """The trainer disconnects on purpose."""

    reason: Text = "finished"


# ---------------------------------------------------------------- daemon -> trainer


@dataclass(frozen=True)
class Welcome(FromDaemon):
    """Answer to Hello."""

    run: Text
    staging: PathText
    """Absolute path of the staging directory of the run, to which the hooks write."""
    generation: Generation | None = None
    """None until the daemon has reached the store and claimed a generation."""
    grace_s: Seconds = 0.0
    """Shortest grace period to expect on this VM; 0 if unknown."""
    takes_digests: Flag = False
    """Whether the daemon knows Digested, RedoneQuery and Compared; an older one would refuse them."""
    takes_request_query: Flag = False
    """Whether the daemon knows RequestQuery; an older one would refuse it."""
    is_signed: Flag = False
    """Whether the daemon restores only checkpoints with a signature of the run's key."""
    naming_secret: Id = ""
    """Part of the names of sets that several ranks write, so that other users cannot compute them."""
    version: Version = VERSION


@dataclass(frozen=True)
class Refused(FromDaemon):
    """The daemon refuses this peer, and then closes the connection."""

    reason: Text


@dataclass(frozen=True)
class Request(FromDaemon):
    """Request for a checkpoint at the next step boundary."""

    id: Id
    reason: Text
    seconds_left: Seconds
    """Time until the VM is terminated, from the moment of sending."""
    urgency: Id = "emergency"


@dataclass(frozen=True)
class NotRequested(FromDaemon):
    """Answer to RequestQuery: no checkpoint will come; nothing was trained, or not all ranks can save."""


@dataclass(frozen=True)
class Target(FromDaemon):
    """All ranks save as soon as they have completed a step ``>= step``."""

    request_id: Id
    step: Step


@dataclass(frozen=True)
class Withdrawn(FromDaemon):
    """The daemon has withdrawn the request; several ranks that have a target save there all the same."""

    request_id: Id
    reason: Text


@dataclass(frozen=True)
class Committed(FromDaemon):
    """A checkpoint of this run is committed in the object store."""

    generation: Generation
    step: Step
    is_final: Flag = False
    """The checkpoint is the end of the run."""


@dataclass(frozen=True)
class Fenced(FromDaemon):
    """Another VM has taken the run over; nothing from this VM is committed any more."""

    generation: Generation


@dataclass(frozen=True)
class Finished(FromDaemon):
    """Answer to :class:`Finish`: this VM has committed all that it has sealed.

    It also names the VM within the earlier start.  When all VMs of that start have answered, no share of it
    is still to come.
    """

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
class StartDrawn(FromDaemon):
    """The start of a job on one VM, as its rank 0 has drawn it: for ranks that no store has given it to."""

    start_id: StartId


@dataclass(frozen=True)
class Restoring(FromDaemon):
    """Progress of the answer to RestoreQuery."""

    query_id: Id
    bytes_done: Bytes
    bytes_total: Bytes
    waits_for: Text = ""
    """The answer has to wait for this, however little the progress is."""


@dataclass(frozen=True)
class ShardVerified(FromDaemon):
    """A file of the checkpoint that is being fetched matches its digest.

    The message passes a read-only descriptor of the file (``SCM_RIGHTS``), if the daemon could pass one.  The
    checkpoint may still turn out to be damaged: only Restored, with the same ``download``, confirms it.
    """

    query_id: Id
    download: Id
    """Id of one attempt to fetch one commit."""
    path: ShardPath


@dataclass(frozen=True)
class Restored(FromDaemon):
    """Answer to RestoreQuery.  An empty ``path`` with an empty ``error`` means a fresh run."""

    query_id: Id
    path: PathText = ""
    step: Step = -1
    generation: Generation = -1
    error: Text = ""
    is_damaged: Flag = False
    """With ``error``: the commit that the query names is damaged, and an older one may be whole."""
    age_s: Seconds | None = field(default=None, compare=False)
    """Time since the checkpoint was saved or committed, if it is known."""
    download: Id = ""
    """The download that fetched these files; the :class:`ShardVerified` messages of all others are void."""


@dataclass(frozen=True)
class Redone(FromDaemon):
    """Answer to RedoneQuery: the digests that are known, in the order of their steps."""

    parent: Id
    digests: StepDigests = field(default_factory=list)


# ---------------------------------------------------------------- operator <-> daemon


@dataclass(frozen=True)
class StatusQuery(ToDaemon):
    """Query of ``swansong status``."""


@dataclass(frozen=True)
class Status(FromDaemon):
    """The daemon's state; docs/reference/status.md describes ``report``."""

    report: Report


@dataclass(frozen=True)
class Notify(ToDaemon):
    """Manual notice of ``swansong notify``.  Only root and the daemon's own user may send it."""

    nonce: Id
    """Random for each notice.  Two messages with the same nonce are one notice."""
    seconds_left: Seconds
    """Time until the VM is terminated, from the moment of sending."""
    reason: Text = ""
    drill: Flag = False
    """A rehearsal."""


@dataclass(frozen=True)
class NotifyWithdrawn(ToDaemon):
    """Withdrawal of the manual notice, by ``swansong notify --withdraw``."""

    reason: Text = ""


@dataclass(frozen=True)
class TakeOver(ToDaemon):
    """The VM that this one replaces has ended, by ``swansong takeover``."""


@dataclass(frozen=True)
class Noted(FromDaemon):
    """Answer to Notify, NotifyWithdrawn and TakeOver; :class:`Status` shows the effect."""


FROM_OPERATOR = (Notify, NotifyWithdrawn, TakeOver)
FROM_TRAINER = tuple(ToDaemon.__subclasses__())
FROM_DAEMON = tuple(FromDaemon.__subclasses__())
_BY_TYPE = {kind.TYPE: kind for kind in (*FROM_TRAINER, *FROM_DAEMON)}


def encode(message: Message) -> bytes:
    """Return the message as one datagram, with measurements and texts clamped to their ranges.

    Raises:
        ProtocolError: the datagram would exceed :data:`MAX_MESSAGE_BYTES`, or a field has the wrong type.
    """
    body = {"type": message.TYPE, **fitted(message)}
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
    body = parse_object(data, MAX_MESSAGE_BYTES, "message")
    name = body.get("type")
    kind = _BY_TYPE.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ProtocolError(f"unknown message type {bounds.shown(name)}")
    message: Message = build(kind, body, kind.TYPE)
    return message
