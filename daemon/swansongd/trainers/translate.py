# SPDX-License-Identifier: Apache-2.0
"""Translates messages of the trainer channel to events.  Pure."""

from __future__ import annotations

from swansong import fields, protocol
from swansong.protocol import Message
from swansong_bucket.model import UNKNOWN_PARENT, Parent, TrainerView, measures_of
from swansong_bucket.util.printable import printable

from swansongd.core.events import (
    FinishAsked,
    PeerRequested,
    RequestAsked,
    StartBegun,
    TrainerAccepted,
    TrainerAgreed,
    TrainerFailed,
    TrainerProgress,
    TrainerSealed,
)
from swansongd.observe.facts import Observed, StepsCompared, StepsDigested

_TEXT_CHARS_MAX = 500


def event_of(connection: int, message: Message) -> Observed:
    """The event for a trainer's message, except messages that the channel itself handles."""
    match message:
        case protocol.Progress():
            return TrainerProgress(
                connection,
                message.step,
                **measures_of(message),
                start_id=message.start_id,
                parent=_parent_of(message),
            )
        case protocol.Accepted():
            return TrainerAccepted(connection, message.request_id, message.step)
        case protocol.Sealed():
            return TrainerSealed(
                connection, message.request_id, message.step, message.save_s, message.size_bytes
            )
        case protocol.Agreed():
            return TrainerAgreed(message.request_id, message.step)
        case protocol.PeerRequest():
            return PeerRequested(message.request_id, short(message.reason), message.seconds_left)
        case protocol.RequestQuery():
            return RequestAsked(connection, message.step)
        case protocol.Finish():
            return FinishAsked(message.start_id, connection)
        case protocol.Begin():
            return StartBegun(connection, message.start_id)
        case protocol.Digested():
            return StepsDigested(connection, tuple(message.digests))
        case protocol.Compared():
            text = str(printable(short(message.text)))
            return StepsCompared(connection, message.differs, text)
        case protocol.Failed():
            return TrainerFailed(
                connection, message.request_id, short(message.reason), message.step
            )
        case protocol.Declined():
            reason = short(f"declined: {message.reason}")
            return TrainerFailed(connection, message.request_id, reason)
    raise AssertionError(f"no event for {message.TYPE}")


def _parent_of(message: protocol.Hello | protocol.Progress) -> Parent:
    if message.parent in (protocol.PARENT_UNKNOWN, ""):
        return UNKNOWN_PARENT
    if message.parent == protocol.PARENT_NONE:
        return Parent("", 0)
    return Parent(message.parent, message.parent_step)


def view_of(
    connection: int,
    pid: int,
    hello: protocol.Hello,
    *,
    greeted_mono_s: float,
    process_start: int = 0,
) -> TrainerView:
    """The view of a rank, from its hello."""
    return TrainerView(
        connection=connection,
        pid=pid,
        process_start=process_start,
        rank=hello.rank,
        world_size=hello.world_size,
        local_world_size=hello.local_world_size,
        node=hello.node,
        nodes=hello.nodes,
        step=hello.step,
        takes_periodic="periodic" in hello.capabilities,
        takes_follow_ups="follow_ups" in hello.capabilities,
        start_id=hello.start_id,
        parent=_parent_of(hello),
        greeted_mono_s=greeted_mono_s,
    )


def problem_with(hello: protocol.Hello, run: str) -> str:
    """Why a trainer may not join ``run``, and the fix; empty if it may."""
    if hello.version != fields.VERSION:
        return (
            f"the hooks use protocol version {hello.version}, the daemon {fields.VERSION}: "
            "install matching versions"
        )
    if hello.run not in ("", run):
        return (
            f"the trainer names run {hello.run!r:.100}, the daemon serves {run!r}: "
            "remove the run from the trainer, or change run.name in the configuration"
        )
    if not (0 <= hello.rank < hello.world_size and 1 <= hello.local_world_size <= hello.world_size):
        return (
            f"rank {hello.rank} of {hello.world_size} ({hello.local_world_size} on this VM) "
            "is impossible: check RANK, WORLD_SIZE and LOCAL_WORLD_SIZE"
        )
    if not 0 <= hello.node < hello.nodes:
        return f"VM {hello.node} of {hello.nodes} is impossible: check GROUP_RANK and NNODES"
    return ""


def change_of(before: protocol.Hello, hello: protocol.Hello) -> str:
    """Why a connection may not send this hello after an earlier one; empty if it may."""
    if _ranks_of(before) != _ranks_of(hello):
        return (
            f"the connection belongs to rank {before.rank} of {before.world_size}, not to rank "
            f"{hello.rank} of {hello.world_size}: connect once for each rank"
        )
    return ""


def are_in_conflict(hello: protocol.Hello, other: protocol.Hello) -> bool:
    """Whether two processes cannot be ranks of one job: they have the same rank, or another number of ranks.

    A rank that took itself for the whole job would write a set of its own at each step.
    """
    job, other_job = (hello.world_size, hello.nodes), (other.world_size, other.nodes)
    return hello.rank == other.rank or job != other_job


def conflict(hello: protocol.Hello, other: protocol.Hello, pid: int) -> str:
    """Why a rank may not join while another process is connected, and the fix."""
    own = f"rank {hello.rank} of {hello.world_size}"
    found = f"{own} is connected already, as process {pid}"
    if hello.world_size != other.world_size:
        found = (
            f"{own} cannot join, because process {pid} is rank {other.rank} of {other.world_size}"
        )
    return (
        f"{found}: a daemon serves one job. If these are ranks of one job, call swansong.attach() after "
        "init_process_group(), or start them with torchrun; if they are two jobs, give the second one its "
        "own daemon, with another trainer.socket and run.name"
    )


def _ranks_of(hello: protocol.Hello) -> tuple[int, ...]:
    return hello.rank, hello.world_size, hello.local_world_size, hello.node, hello.nodes


def refused(reason: str) -> bytes:
    """The last message to a refused peer."""
    return protocol.encode(protocol.Refused(short(reason)))


def short(text: str) -> str:
    """``text``, cut for one log line."""
    return text if len(text) <= _TEXT_CHARS_MAX else f"{text[:_TEXT_CHARS_MAX]}..."
