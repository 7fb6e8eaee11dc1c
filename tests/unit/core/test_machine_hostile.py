# SPDX-License-Identifier: Apache-2.0
"""The state machine and hostile trainers: no message raises, and none costs more than a few checkpoints."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swansong import bounds, protocol
from swansong.protocol import Committed, Message, Request
from swansong_bucket.model import CommitRef, TrainerView
from swansongd.core import machine
from swansongd.core.events import (
    ClaimGeneration,
    Conclude,
    Exit,
    FlushProgress,
    HistoryRead,
    Log,
    PeerRequested,
    Prune,
    RestoreAsked,
    RolledBack,
    SignalTrainer,
    StartBegun,
    StartFlush,
    TrainerAgreed,
    TrainerJoined,
    TrainerLeft,
    TrainerProgress,
)
from swansongd.core.notices import AT_ONCE
from swansongd.core.starts import CLAIMS_MAX, EVACUATION_CLAIMS_MAX, STARTS_MAX, WINDOW_S
from swansongd.observe.build_status import status_line
from swansongd.observe.status import from_json, to_json
from swansongd.trainers import translate

from testkit.story import Story, a_set, joined

# ---------------------------------------------------------------- whatever is said

IDS = ("q", "periodic-1000.000", "other", "")
CONNECTIONS = st.integers(1, 3)
EDGES: dict[str, st.SearchStrategy[Any]] = {
    "Step": st.sampled_from([-1, 0, 1, 7, bounds.STEP_MAX]),
    "Seconds": st.sampled_from([0.0, 1e-300, 0.5, 30.0, bounds.SECONDS_MAX]),
    "Bytes": st.sampled_from([0, 1, 2**30, bounds.BYTES_MAX]),
    "Metric": st.sampled_from([0.0, -bounds.METRIC_MAX, bounds.METRIC_MAX, 1.5]),
    "Flag": st.booleans(),
    "Text": st.sampled_from(["", "why", "x" * bounds.TEXT_CHARS_MAX]),
    "PathText": st.just("step-1"),
    "Id": st.sampled_from(IDS),
    "GivenId": st.sampled_from([each for each in IDS if each]),
    "StartId": st.sampled_from(IDS),
}
SAID = (
    protocol.Progress,
    protocol.Accepted,
    protocol.Agreed,
    protocol.PeerRequest,
    protocol.RequestQuery,
    protocol.Begin,
    protocol.Sealed,
    protocol.Failed,
    protocol.Declined,
)


@st.composite
def said(draw: st.DrawFn) -> Message:
    """A message with fields at the edges of their ranges."""
    kind = draw(st.sampled_from(SAID))
    fields = {}
    for item in dataclasses.fields(kind):
        name = str(item.type)
        strategy = EDGES[name.removesuffix(" | None")]
        fields[item.name] = draw(st.none() | strategy if name.endswith("None") else strategy)
    return kind(**fields)


@st.composite
def hellos(draw: st.DrawFn) -> protocol.Hello:
    world_size = draw(st.sampled_from([1, 2, 8, bounds.RANKS_MAX]))
    return protocol.Hello(
        "r",
        rank=draw(st.integers(0, world_size - 1)),
        world_size=world_size,
        local_world_size=draw(st.integers(1, world_size)),
        nodes=draw(st.sampled_from([1, 2, bounds.NODES_MAX])),
        capabilities=draw(st.sampled_from([[], ["periodic"]])),
        step=draw(EDGES["Step"]),
        start_id=draw(EDGES["StartId"]),
    )


SIZES = st.sampled_from([0, 1, 2**20, bounds.BYTES_MAX])
STEPS = st.one_of(
    st.tuples(st.just("say"), CONNECTIONS, said()),
    st.tuples(st.just("join"), CONNECTIONS, hellos()),
    st.tuples(st.just("leave"), CONNECTIONS, st.booleans()),
    st.tuples(st.just("seal"), EDGES["Step"], SIZES),
    st.tuples(st.just("notice"), st.floats(-10, 1e5), st.sampled_from("abc")),
    st.tuples(st.just("wait"), st.sampled_from([0.0, 0.1, 1.0, 61.0, 700.0, 1e4])),
    st.tuples(st.just("store")),
    st.tuples(st.just("send"), SIZES),
    st.tuples(st.just("fail")),
    st.tuples(st.just("withdraw")),
    st.tuples(st.just("history"), EDGES["Seconds"], st.integers(0, 10**6)),
    st.tuples(st.just("rollback"), EDGES["Step"]),
    st.tuples(st.just("claims"), st.booleans()),
    st.tuples(st.just("restoring"), EDGES["Id"]),
    st.tuples(st.just("process"), st.sampled_from(["", "process-a", "process-b"])),
    st.tuples(st.just("rebuild")),
)


def happen(story: Story, what: str, *facts: Any) -> None:  # noqa: PLR0915 - one case for each
    """One step of a story, as far as the state permits it."""
    match what, *facts:
        case "say", connection, message:
            heard = protocol.decode(protocol.encode(message))
            event = translate.event_of(connection, heard)
            asked = story.all(Request)
            if asked and getattr(event, "request_id", "") == "q":  # the request that is out
                event = replace(event, request_id=asked[-1].id)  # type: ignore[call-arg]
            story.tell(event)
        case "join", connection, hello:
            heard = protocol.decode(protocol.encode(hello))
            assert isinstance(heard, protocol.Hello)
            if not translate.problem_with(heard, "r"):
                story.tell(
                    TrainerJoined(
                        translate.view_of(
                            connection, 100 + connection, heard, greeted_mono_s=story.now
                        )
                    )
                )
        case "leave", connection, exited:
            story.tell(TrainerLeft(connection, exited, "gone"))
        case "seal", step, size_bytes:
            asked = story.all(Request)
            request_id = asked[-1].id if asked and size_bytes else ""
            story.staging = story.staging[-3:]
            story.seal(
                max(0, step), f"n{len(story.actions)}", size_bytes=size_bytes, request_id=request_id
            )
        case "notice", in_s, identity:
            story.notice(in_s, identity=identity)
        case "wait", seconds:
            story.wait(seconds)
        case ("store",):
            if story.state.flush.flight is not None and story.flight.is_sealed:
                story.flushed()
            if any(item.is_asked for item in story.state.commits.stored):
                story.committed()
        case "send", sent_bytes:
            if story.state.flush.flight is not None:
                story.tell(FlushProgress(story.flight.flush_id, sent_bytes, sent_bytes))
        case ("fail",):
            if any(item.is_asked for item in story.state.commits.stored):
                story.commit_fails()
        case ("withdraw",):
            story.withdraw()
        case "history", observed_s, uncovered:
            story.tell(HistoryRead(observed_s, uncovered))
        case "rollback", step:
            story.tell(RolledBack(step))
        case "claims", grants:
            story.grants = grants
            if grants and story.state.starts.claiming:
                story.grant(story.state.starts.claiming)
        case "restoring", start_id:
            story.tell(RestoreAsked(start_id))
        case "process", start_id:
            story.process(start_id, pid=101)
        case ("rebuild",):
            story.state = machine.rebuilt(story.state)
            story.scan()


@pytest.mark.fault("S13", "H09")
@settings(max_examples=150, deadline=None)
@given(st.lists(STEPS, max_size=30))
def test_no_sequence_of_messages_raises(steps: list[tuple[Any, ...]]) -> None:
    """Any messages of trainers, in any order, between any other events; a command can read the status."""
    story = Story()
    for step in steps:
        happen(story, *step)
        sent = protocol.decode(protocol.encode(protocol.Status(to_json(story.status))))
        assert isinstance(sent, protocol.Status)
        assert from_json(sent.report) == story.status
        assert status_line(story.state, story.now)
    assert not story.all(SignalTrainer)
    notices = sum(step[0] == "notice" for step in steps)  # each may exceed the limit by one
    windows = 1 + (story.now - 1000.0) / WINDOW_S
    assert len(story.all(ClaimGeneration)) <= CLAIMS_MAX * windows + EVACUATION_CLAIMS_MAX * notices


@pytest.mark.fault("S13")
def test_the_report_of_many_trainers_fits_into_a_message() -> None:
    """It lists the first hundred, each here with the longest values, and counts the others."""
    story = Story()
    for pid in range(150):
        view = TrainerView(
            connection=10**9 + pid, pid=4_000_000 + pid, rank=pid, world_size=99_999, local_world_size=1
        )  # fmt: skip
        story.tell(TrainerJoined(view))
        story.tell(
            TrainerProgress(
                10**9 + pid,
                bounds.STEP_MAX,
                save_s=1 / 3,
                save_bytes=2**60,
                snapshot_s=1 / 3,
                step_s=1 / 3,
                own_s=1 / 3 + pid % 2,
                loss=-1.2345678901234567e300,
                loss_is_finite=False,
                loss_is_usual=False,
            )
        )
    assert story.status.trainers_not_shown == 50
    protocol.encode(protocol.Status(to_json(story.status)))


# ---------------------------------------------------------------- what a flood costs


def node(nodes: int = 2) -> Story:
    """One VM of a job over several VMs."""
    story = Story(signals_trainer=True)
    story.join(nodes=nodes, step=7, start_id="")
    return story


@pytest.mark.fault("S12", "G04")
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_flood_of_starts_makes_a_handful_of_claims_and_the_last_one_counts(nodes: int) -> None:
    """300 starts in 10 s: a claim is never deleted.  The start that remains gets its own generation."""
    story = node(nodes)
    for number in range(300):
        story.now += 1 / 30
        story.tell(StartBegun(1, f"start-{number}"))
    assert [order.start_id for order in story.all(ClaimGeneration)] == [
        f"start-{number}" for number in range(CLAIMS_MAX)
    ]
    assert len(story.state.starts.known) == STARTS_MAX
    story.wait(WINDOW_S)
    assert [order.start_id for order in story.all(ClaimGeneration)][CLAIMS_MAX:] == ["start-299"]


@pytest.mark.fault("S19")
def test_forged_requests_of_other_vms_cost_a_few_checkpoints_and_never_a_kill() -> None:
    """149 requests in 9 s, each with a deadline in the past: a few evacuations, and training continues."""
    story = node()
    story.tell(StartBegun(1, "start"))
    before = len(story.all(Conclude))
    for number in range(149):
        story.now += 9 / 149
        story.tell(PeerRequested(f"forged-{number}", "made up", 0.0 if number % 2 else 1e9))
        story.scan()
    asked = {action.id for action in story.all(Request)}
    assert len(asked) <= AT_ONCE
    assert [line.event for line in story.all(Log)].count("notice") <= AT_ONCE
    assert len(story.all(Conclude)) - before <= 2 * AT_ONCE
    assert not story.all(SignalTrainer)
    assert not story.all(Exit)
    story.wait(3700.0)
    story.wait(1.0)
    assert story.state.evacuation is None, "the VM has outlived the forged deadline"


@pytest.mark.fault("S19", "N09")
def test_a_repeated_request_of_another_vm_does_not_move_the_deadline() -> None:
    """Each rank reports it, and again after each reconnect; none of that moves the deadline."""
    story = node()
    story.tell(PeerRequested("theirs", "aws.spot: reclaim", 100.0))
    evacuation = story.evacuation
    for left_s in (90.0, 50.0, 1.0, 0.0):
        story.tell(PeerRequested("theirs", "aws.spot: reclaim", left_s))
    assert story.evacuation.deadline_mono_s == evacuation.deadline_mono_s
    assert len(story.all(Request)) == 1


@pytest.mark.fault("S19")
@pytest.mark.parametrize("nodes", [1, 2])
def test_without_another_vm_a_peer_request_is_ignored(nodes: int) -> None:
    """A rank of a job on one VM opens no evacuation and sets no target."""
    story = node(nodes)
    story.tell(PeerRequested("forged", "made up", 30.0))
    assert bool(story.all(Request)) is (nodes == 2)
    alone = joined()
    alone.notice(60.0)
    alone.tell(TrainerAgreed(alone.request_id, 12345))
    assert alone.evacuation.request is not None
    assert alone.evacuation.request.target is None


@pytest.mark.fault("S19")
def test_a_forged_notice_costs_one_checkpoint_and_training_continues() -> None:
    """One request, no signal, and after the deadline the state is as before."""
    story = Story(signals_trainer=True)
    story.join(step=7)
    for _ in range(100):  # at each poll
        story.notice(60.0, identity="forged")
    assert len(story.all(Request)) == 1
    story.serve(7)
    story.wait(120.0)
    story.wait(1.0)
    assert story.verdicts == ["SAFE generation 2 step 8"]
    assert story.state.evacuation is None
    assert not story.all(SignalTrainer)
    assert not story.all(Exit)
    story.notice(-60.0, identity="forged")
    assert len(story.all(Request)) == 1, "an outlived notice opens no evacuation again"


# ---------------------------------------------------------------- what is left after a fault


def test_only_a_rank_that_joins_gets_the_newest_commit() -> None:
    """Otherwise each hello would cause a message to every rank."""
    story = Story(newest=CommitRef(1, 5))
    story.join(1, rank=0, ranks=2, pid=1)
    story.join(2, rank=1, ranks=2, pid=2)
    told = [sent.connections for sent in story.sent(Committed)]
    assert told == [None, (1,), None, (2,)], "to all: when the run is read, and with the claim"


@pytest.mark.fault("H09")
def test_a_rebuilt_state_evacuates_again_with_the_same_request() -> None:
    """Notices, generation and commits stay; the request has the same id."""
    story = Story(staged=[a_set(5)])
    story.join(step=7, save_s=1.0)
    story.notice(100.0)
    request_id = story.request_id
    story.accept(7)
    flushes = story.state.flush.flushes
    story.state = machine.rebuilt(story.state)
    assert story.state.evacuation is None
    assert story.state.measured.save_s is None, "the report may have caused the fault"
    assert story.state.generation == 2
    story.scan()
    assert [action.id for action in story.all(Request)] == [request_id] * 2
    story.serve(7)
    assert story.verdicts[-1].startswith("SAFE")
    assert not story.all(Prune) or story.state.commits.last_complete is not None
    flush_ids = [action.flush_id for action in story.all(StartFlush)]
    assert len(flush_ids) == len(set(flush_ids)), "an old flush must not count as a new one"
    assert story.state.flush.flushes > flushes
