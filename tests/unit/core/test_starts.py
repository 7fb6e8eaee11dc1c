# SPDX-License-Identifier: Apache-2.0
"""Each start of the training claims one generation; the claims have the order of the starts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from swansong.protocol import Fenced, RestoreQuery, StartDrawn
from swansong_bucket.model import UNKNOWN_PARENT, CommitRef, Parent, Staged, Start
from swansongd.core import machine, resume
from swansongd.core.arrival import RECONNECT_S
from swansongd.core.events import (
    ClaimGeneration,
    CommitManifest,
    Exit,
    FenceFound,
    GenerationClaimed,
    ProcessFound,
    Prune,
    RunRead,
    Send,
    StartBegun,
    WithdrawClaim,
)
from swansongd.core.starts import CLAIMS_MAX, STARTS_MAX, WINDOW_S
from swansongd.restore.downloads import BUDGET_S

from testkit.story import Story, a_set, joined

pytestmark = pytest.mark.fault("T09")


def claims(story: Story) -> list[str]:
    return [order.start_id for order in story.all(ClaimGeneration)]


def generations(story: Story) -> dict[str, int | None]:
    return {start.id: start.generation for start in story.state.starts.known}


def manifests(story: Story) -> list[tuple[int, int]]:
    """(generation, step) of each manifest that was ordered."""
    return [(order.generation, order.staged.id.step) for order in story.all(CommitManifest)]


def again(story: Story, start_id: str, *, step: int = 0, parent: Parent | None = None) -> None:
    """The trainer ends, and another one starts in a new process."""
    connected = story.state.connected
    for trainer in connected:
        story.leave(trainer.connection)
    story.now += 5
    number = 1 + max((trainer.connection for trainer in connected), default=1)
    story.join(number, pid=100 + number, start_id=start_id)
    story.starts(step, number, start_id=start_id, parent=parent)


# ---------------------------------------------------------------- one VM


def test_each_start_claims_once_when_it_begins() -> None:
    """Before its first set, so that its choice of a checkpoint sees all commits of earlier starts."""
    story = Story()
    assert claims(story) == []
    story.join(start_id="a")
    assert claims(story) == ["a"]
    story.leave(exited=False)
    story.join(2, start_id="a")
    again(story, "b")
    story.tell(StartBegun(3, "b~1"))
    assert claims(story) == ["a", "b", "b~1"]
    assert generations(story) == {"a": 2, "b": 3, "b~1": 4}
    assert story.state.start_of("b~1").parent == UNKNOWN_PARENT  # type: ignore[union-attr]


def test_a_vm_without_training_claims_nothing() -> None:
    """Also with sets of an earlier boot.  A process without hooks claims for a set or a farewell."""
    staged = [a_set(5), a_set(6, framework="checkpoint-n")]
    story = Story(claimed=False, staged=staged, booted_wall_ns=2)
    story.scan()
    story.tell(RunRead(CommitRef(1, 9), "earlier"))
    story.notice()
    story.wait(60)
    story.withdraw()
    story.process()
    assert claims(story) == []
    assert not story.flushes
    story.notice()
    assert claims(story) == ["process-a"]


def test_sets_of_an_earlier_start_are_committed_in_its_generation() -> None:
    """After the next start has begun: a sealed set stays what it was."""
    story = joined(start_id="a")
    story.starts(0)
    story.seal(9)
    again(story, "b", step=4, parent=Parent("a", 4))
    story.commit(5, "new", start_id="b")
    assert manifests(story) == [(2, 9), (3, 5)]
    assert story.state.commits.last_complete == CommitRef(3, 5)


@pytest.mark.parametrize("joins_first", [True, False])
def test_a_start_that_is_known_from_its_sets_is_older_than_one_that_runs(
    *, joins_first: bool
) -> None:
    """It ran while no daemon did.  Its claim comes first, whether the hello or the scan does.

    Without a hello it claims once the hooks have had the time to reconnect.
    """
    story = Story(claimed=False, staged=[a_set(40, start_id="old")])
    events = [lambda: story.join(start_id="new"), story.scan]
    for happens in events if joins_first else reversed(events):
        happens()
    assert claims(story) == ["old", "new"]
    later = [order.later for order in story.all(ClaimGeneration)]
    assert later == [("new",), ()], "the new one may have its claim"
    story.store_all()
    assert manifests(story) == [(2, 40)]
    alone = Story(staged=[a_set(40, start_id="old")])
    assert claims(alone) == []
    alone.wait(RECONNECT_S)
    assert claims(alone) == ["old"]


def test_no_start_gets_a_greater_generation_than_a_later_one() -> None:
    """Its first set is found after the later start has its generation: it is not committed."""
    story = Story()
    story.grants = False
    story.join(start_id="a")
    again(story, "b")
    story.grants = True
    story.grant("b")
    story.seal(9, start_id="a")
    assert claims(story) == ["a", "b"]
    story.grant("a")  # the claim was made although another one was ordered
    story.seal(10, "late", start_id="never seen")
    story.wait(60)
    assert claims(story) == ["a", "b"]
    assert not story.flushes
    assert not story.state.uncommitted
    story.commit(1, start_id="b")
    assert story.state.commits.last_complete == CommitRef(2, 1)


def test_no_earlier_start_is_claimed_while_the_claim_of_a_later_one_is_in_flight() -> None:
    """Its first set is found meanwhile.  The reply to the later claim may be lost."""
    story = Story()
    story.grants = False
    story.join(start_id="a")
    again(story, "b")
    story.seal(9, start_id="a")
    story.wait(1)
    assert claims(story) == ["a", "b"]
    story.grant("b")
    story.commit(10, start_id="b")
    assert claims(story) == ["a", "b"]
    assert manifests(story) == [(2, 10)]


@pytest.mark.fault("H01")
def test_a_rank_of_an_earlier_start_that_connects_late_ends_no_later_start() -> None:
    """A restarted daemon without its record sees a dying rank of the start before after the new rank 0.

    Its process began later than rank 0.  The claim that is found for its start shows which one is earlier.
    """
    story = Story(claimed=False)
    story.grants = False
    story.scan()
    story.join(1, start_id="new", ranks=2)
    story.join(2, rank=1, ranks=2, pid=200, step=48, start_id="old")
    story.tell(GenerationClaimed("old", 1, CommitRef(1, 14), "old", is_found=True))
    story.leave(2)
    assert story.last(ClaimGeneration).start_id == "new"
    story.tell(GenerationClaimed("new", 2, CommitRef(1, 14), "old"))
    assert story.state.start == story.state.start_of("new")
    assert story.state.start.is_open


@pytest.mark.fault("H01")
@pytest.mark.parametrize("is_claimed", [False, True])
def test_the_start_whose_processes_began_first_is_the_earlier_one(is_claimed: bool) -> None:
    """A restarted daemon without its record: the late rank of a dead start takes nothing from the new one."""
    story = Story(claimed=False)
    story.grants = False
    story.scan()
    story.join(1, start_id="new", ranks=2, pid=200)
    if is_claimed:
        story.tell(GenerationClaimed("new", 8, None, ""))
    story.join(2, rank=1, ranks=2, pid=101, start_id="old")
    story.leave(2)
    assert claims(story) == ["new"]
    if not is_claimed:
        story.tell(GenerationClaimed("new", 8, None, ""))
    story.grants = True
    story.join(3, rank=1, ranks=2, pid=201, start_id="")
    story.commit(48, start_id="new")
    assert story.state.start == story.state.start_of("new")
    assert story.state.commits.last_complete == CommitRef(8, 48)


def test_a_start_waits_for_its_claim_no_longer_than_its_trainer_does() -> None:
    """The limit of the rate of claims is no reason for which a restore fails."""
    assert WINDOW_S < BUDGET_S


def test_a_start_that_is_known_from_its_sets_ends_no_daemon() -> None:
    """The record of the claims was lost, and a later start of this VM, unknown by now, has overtaken it."""
    story = Story(claimed=False, staged=[a_set(40, start_id="old")])
    story.grants = False
    story.scan()
    story.tell(RunRead(None))
    story.wait(RECONNECT_S)
    assert claims(story) == ["old"]
    story.tell(FenceFound(3, start_id="old"))
    assert not story.all(Exit)
    story.grants, story.next_generation = True, 4
    story.join(start_id="new")
    story.commit(41, "def", start_id="new")
    assert claims(story) == ["old", "new"]
    assert story.state.commits.last_complete == CommitRef(4, 41)


def test_the_claim_of_a_start_that_has_ended_is_withdrawn() -> None:
    """The store is not reachable, and the training continues on another VM: the claim would fence that VM.

    If the same start needs its generation again, the claim is ordered again.
    """
    story = Story()
    story.grants = False
    story.join(start_id="a")
    story.leave(exited=False)
    assert not story.all(WithdrawClaim), "its process runs"
    story.leave()
    assert len(story.all(WithdrawClaim)) == 1
    story.seal(5, start_id="a")
    assert claims(story) == ["a", "a"]
    story.grant("a")
    story.store_all()
    assert manifests(story) == [(2, 5)]
    assert len(story.all(WithdrawClaim)) == 1, "a claim that is made needs no withdrawal"


def test_an_evacuation_exceeds_the_limit_by_two() -> None:
    """A start whose checkpoint is due now does not wait for the limit, and neither does its successor."""
    story = Story()
    for number in range(CLAIMS_MAX + 1):
        story.leave(number)
        story.join(number + 1, pid=number + 1, start_id=f"start-{number}")
    assert len(claims(story)) == CLAIMS_MAX
    story.notice(60)
    assert claims(story)[CLAIMS_MAX:] == [f"start-{CLAIMS_MAX}"]
    for number in range(CLAIMS_MAX + 1, CLAIMS_MAX + 4):
        story.leave(number)
        story.join(number + 1, pid=number + 1, start_id=f"start-{number}")
        story.wait(1)
    assert claims(story)[CLAIMS_MAX:] == [f"start-{CLAIMS_MAX}", f"start-{CLAIMS_MAX + 1}"]


def test_the_newest_start_that_runs_claims_when_the_limit_permits() -> None:
    """The newest one has ended meanwhile, without a claim: the start before it waits for its checkpoint."""
    story = Story()
    for number in range(CLAIMS_MAX):
        story.leave(number)
        story.join(number + 1, pid=number + 1, start_id=f"start-{number}")
    story.leave(CLAIMS_MAX)
    story.join(20, pid=20, start_id="waits")
    story.join(21, pid=21, start_id="ends")
    story.leave(21)
    story.wait(WINDOW_S)
    assert claims(story)[CLAIMS_MAX:] == ["waits"]
    assert resume.may_answer(story.state, RestoreQuery("q", start_id="waits"))


def test_a_verdict_waits_for_no_claim_of_a_start_that_has_ended() -> None:
    """Such a start claims nothing."""
    story = joined(start_id="a")
    story.grants = False
    again(story, "b")
    story.tell(RunRead(None))
    story.leave(2)
    story.notice(60, source="logind")
    story.scan()
    story.wait(RECONNECT_S)
    assert story.verdicts, "also if the claim that was ordered is never made"


def test_any_number_of_starts_forgets_the_oldest_with_its_sets() -> None:
    """A trainer can begin starts without end, while a manifest cannot be written."""
    story = joined(start_id="a")
    story.seal(9)
    story.flushed()
    story.commit_fails()
    for number in range(2 * STARTS_MAX):
        story.tell(StartBegun(1, f"a~{number}"))
    story.wait(60)
    assert len(story.state.starts.known) == STARTS_MAX
    assert not story.state.commits.stored


def test_rank_0_gives_its_start_to_each_rank_once() -> None:
    """In whatever order they connect; another process with the rank belongs to another start.

    Processes of the last start may hang, and rank 0 of the next one is then not the first that is connected.
    """
    story = joined(2, rank=1, ranks=3, start_id="")
    assert not story.all(StartDrawn)
    story.join(1, rank=0, ranks=3, start_id="a")
    story.join(3, rank=2, ranks=3, start_id="")
    assert story.sent(StartDrawn) == [Send(StartDrawn("a"), (2,)), Send(StartDrawn("a"), (3,))]
    story.leave(2)
    story.join(4, rank=1, ranks=3, pid=777, start_id="")
    assert len(story.all(StartDrawn)) == 2, "the next rank 0 has another start for this process"
    story.join(5, rank=0, ranks=3, pid=776, start_id="b")
    assert story.sent(StartDrawn)[2:] == [Send(StartDrawn("b"), (4,))]


def test_of_two_processes_with_one_rank_the_last_one_to_connect_gets_the_start() -> None:
    """The end of the other one is not seen yet."""
    story = joined(2, rank=1, ranks=2, pid=50, start_id="")
    story.join(3, rank=1, ranks=2, pid=101, start_id="")
    story.join(1, rank=0, ranks=2, pid=100, start_id="new")
    assert story.sent(StartDrawn) == [Send(StartDrawn("new"), (3,))]


def test_a_rank_that_knows_its_start_takes_none_of_a_rank_0_that_ends_late() -> None:
    """Rank 0 of the new launch, from which rank 1 has it, connects last."""
    story = joined(1, rank=0, ranks=2, pid=50, start_id="old")
    story.join(3, rank=1, ranks=2, pid=101, start_id="new")
    story.leave(1)
    story.join(4, rank=0, ranks=2, pid=100, start_id="new")
    assert not story.all(StartDrawn)
    assert claims(story) == ["old", "new"]
    assert story.state.start is not None
    assert sorted(story.state.start.members) == [0, 1]


def test_a_rank_whose_connection_ended_before_it_read_its_start_gets_it_again() -> None:
    """Its next hello shows that it does not know its start, without which it seals nothing."""
    story = joined(1, rank=0, ranks=2, start_id="a")
    story.join(2, rank=1, ranks=2, start_id="")
    story.leave(2, exited=False)
    story.join(3, rank=1, ranks=2, start_id="")
    assert story.sent(StartDrawn) == [Send(StartDrawn("a"), (2,)), Send(StartDrawn("a"), (3,))]


@pytest.mark.fault("H01")
def test_a_late_process_of_an_earlier_start_takes_no_place_of_the_recorded_newest_one() -> None:
    """The record names the starts in their order; the newest one waited for its generation."""
    story = Story(claimed=False, recorded=(Start(id="a", generation=2), Start(id="b")))
    story.grants = False
    story.scan()
    story.tell(RunRead(CommitRef(2, 10), "a"))
    story.join(start_id="a", rank=1, ranks=2)
    assert [start.id for start in story.state.starts.known] == ["a", "b"]


@pytest.mark.fault("H01")
def test_a_late_rank_0_gives_its_start_to_no_rank_of_the_newest_one() -> None:
    """The daemon was restarted before rank 1 knew its start, and its rank 0 is the last to reconnect.

    The record names when the newest start began: the late process claims nothing.
    """
    story = Story(recorded=(Start(id="new", generation=2, began_ticks=1200),))
    story.join(1, rank=0, ranks=2, pid=101, start_id="old")
    story.join(2, rank=1, ranks=2, pid=201, start_id="")
    assert not story.all(StartDrawn)
    story.join(3, rank=0, ranks=2, pid=200, start_id="new")
    assert story.sent(StartDrawn) == [Send(StartDrawn("new"), (2,))]
    assert claims(story) == []
    assert story.state.start == story.state.start_of("new")


def test_an_older_process_may_begin_another_start_once_the_newest_has_ended() -> None:
    """A notebook that was opened before the last training attaches after its end."""
    story = Story(recorded=(Start(id="s", generation=2, began_ticks=1200),))
    story.wait(RECONNECT_S + 1)
    story.join(1, pid=100, start_id="notebook")
    assert claims(story) == ["notebook"]
    story.join(2, pid=300, start_id="next")
    story.leave(2)
    story.join(3, pid=101, start_id="again")
    assert claims(story) == ["notebook", "next", "again"]


def test_a_rollback_is_the_newest_start_whichever_of_its_processes_began_first() -> None:
    """The record may name rank 0 for the start before: rank 1 began earlier, and is in the same launch."""
    story = Story(recorded=(Start(id="s", generation=2, began_ticks=1200),))
    story.grants = False
    story.join(1, rank=1, ranks=2, pid=199, start_id="s~1")
    assert claims(story) == ["s~1"]


@pytest.mark.fault("H01")
def test_a_restarted_daemon_deletes_no_set_that_a_recorded_rollback_may_load() -> None:
    """The process has not reconnected, and the commit of a later set of the start before proves nothing."""
    recorded = (Start(id="s", generation=2), Start(id="s~1", generation=3))
    story = Story(claimed=False, recorded=recorded)
    story.staging += [a_set(step, f"n{step}", start_id="s") for step in (9, 12)]
    story.scan()
    story.tell(RunRead(CommitRef(2, 6), "s"))
    story.store_all()
    assert story.state.commits.last_complete == CommitRef(2, 12)
    assert not story.all(Prune)


def test_a_rank_that_attaches_again_after_its_goodbye_waits_for_the_next_start() -> None:
    """A script calls ``finish()`` and ``attach()`` again: rank 1 may be faster than rank 0."""
    story = joined(1, rank=0, ranks=2, start_id="a")
    story.join(2, rank=1, ranks=2, start_id="")
    story.leave(2, is_goodbye=True)
    story.join(3, rank=1, ranks=2, start_id="")
    assert len(story.all(StartDrawn)) == 1
    story.leave(1, is_goodbye=True)
    story.join(4, rank=0, ranks=2, start_id="b")
    assert story.sent(StartDrawn)[-1] == Send(StartDrawn("b"), (3,))


def test_a_rank_0_that_attaches_again_begins_a_start_although_rank_1_began_later() -> None:
    """Rank 1 is connected for the start before, and both processes are of one age."""
    story = joined(1, rank=0, ranks=2, start_id="a")
    story.join(2, rank=1, ranks=2, start_id="")
    story.leave(1, is_goodbye=True)
    story.join(3, rank=0, ranks=2, start_id="b")
    assert claims(story) == ["a", "b"]


def test_the_ranks_of_a_start_whose_claim_was_refused_learn_that_it_is_over() -> None:
    """Another VM of its job had claimed for it, and a later start has taken the run over."""
    story = Story()
    story.grants = False
    story.join(nodes=2, start_id="late")
    story.tell(FenceFound(9, start_id="late"))
    assert story.sent(Fenced) == [Send(Fenced(9), (1,))]
    assert not story.all(Exit)


# ---------------------------------------------------------------- trainers without hooks


def adopted(step: int, written_ns: int) -> Staged:
    return a_set(step, f"x{step}", framework="checkpoint-n", written_ns=written_ns)


def scan(story: Story, sets: Iterable[Staged]) -> None:
    story.staging += sets
    story.scan()


def test_each_process_without_hooks_is_one_start() -> None:
    """It claims with its first set.  A set that was written before it is that of the process before."""
    story = Story()
    story.tell(ProcessFound("process-a", 900, started_wall_ns=10))
    assert claims(story) == []
    scan(story, [adopted(5, 20)])
    story.store_all()
    story.tell(ProcessFound("process-b", 901, started_wall_ns=40))
    scan(story, [adopted(6, 30), adopted(3, 50)])
    story.store_all()
    assert claims(story) == ["process-a", "process-b"]
    assert sorted(manifests(story)) == [(2, 5), (2, 6), (3, 3)]


def test_a_connected_rank_is_no_process_without_hooks() -> None:
    """A pid file may name it, for a script that has hooks."""
    story = joined(pid=900)
    story.process("process-a", pid=900)
    assert list(generations(story)) == ["a"]
    after = story.restarted()
    after.process("process-a", pid=900)  # before the rank connects again
    after.join(pid=900)
    assert generations(after) == {"a": 2}
    assert after.state.starts.process == ""


def test_a_framework_that_saves_as_well_as_the_hooks_is_no_other_start() -> None:
    """Also for the first scan of a restarted daemon, to which no rank has connected yet."""
    story = joined()
    story.seal(11)
    scan(story, [adopted(7, 70)])
    story.store_all()
    after = story.restarted()
    after.store_all()
    assert list(generations(after)) == ["a"]
    assert after.state.commits.last_complete == CommitRef(2, 11)


@pytest.mark.parametrize("step", [350, 500])
@pytest.mark.parametrize(("written_ns", "is_rewound"), [(1000, True), (1, False)])
def test_no_greater_step_that_is_written_later_is_another_start(
    step: int, written_ns: int, is_rewound: bool
) -> None:
    """Without a pid file the sets alone show it; a set that has settled late is not one."""
    story = Story()
    scan(story, [adopted(300, 300), adopted(500, 500)])
    story.store_all()
    scan(story, [a_set(step, "again", framework="checkpoint-n", written_ns=written_ns)])
    story.store_all()
    assert claims(story) == ["process-vm", "process-vm~1"][: 1 + is_rewound]
    expected = CommitRef(3, step) if is_rewound else CommitRef(2, 500)
    assert story.state.commits.last_complete == expected
    scan(story, [a_set(step, "third", framework="checkpoint-n", written_ns=2000)])
    story.store_all()
    assert claims(story) == ["process-vm", "process-vm~1", "process-vm~2"][: 2 + is_rewound]
    assert story.state.commits.last_complete == CommitRef(3 + is_rewound, step)


@pytest.mark.parametrize("has_process", [True, False])
def test_a_restarted_daemon_gives_adopted_sets_to_the_same_starts(*, has_process: bool) -> None:
    """A set of an earlier step sequence would be the newest commit of the run under the last generation."""
    story = Story()
    if has_process:
        story.tell(ProcessFound("process-a", 900, started_wall_ns=10))
    scan(story, [adopted(300, 300), adopted(500, 500)])
    story.store_all()
    if has_process:
        story.tell(ProcessFound("process-b", 901, started_wall_ns=600))
    scan(story, [adopted(350, 1000)])
    story.store_all()
    story = story.restarted()
    story.store_all()
    assert story.state.commits.last_complete == CommitRef(3, 350)
    scan(story, [adopted(360, 1100)])
    story.store_all()
    assert story.state.commits.last_complete == CommitRef(3, 360)


@pytest.mark.fault("H01")
def test_a_set_is_of_no_process_that_began_after_it() -> None:
    """Also once that process is gone, and the daemon knows it from its record only."""
    recorded = (
        Start(id="process-a", generation=1, process_ns=10),
        Start(id="process-b", generation=2, process_ns=600),
    )
    story = Story(newest=CommitRef(1, 310), recorded=recorded)
    scan(story, [adopted(300, 300)])
    story.store_all()
    assert story.flushes == []
    assert story.state.commits.last_complete == CommitRef(1, 310)


@pytest.mark.fault("H01")
def test_an_adopted_set_that_a_restarted_daemon_has_seen_at_once_is_no_new_start() -> None:
    """It settles after the first scan, and is all that its trainer has kept: it has its commit already."""
    story = Story()
    scan(story, [adopted(300, 300), adopted(500, 500)])
    story.store_all()
    story.staging = []
    story = story.restarted()
    first_mono_s = story.now
    story.wait(2)
    scan(story, [replace(adopted(300, 300), begun_mono_s=first_mono_s)])
    story.store_all()
    assert claims(story) == []
    assert story.state.commits.last_complete == CommitRef(2, 500)


@pytest.mark.fault("H01")
@pytest.mark.parametrize("nonces", [("x", "y"), ("y", "x")])
def test_of_two_adopted_sets_of_one_step_the_later_one_is_committed(
    nonces: tuple[str, str],
) -> None:
    """The process loaded an older state and came to the step again, while no daemon ran."""
    first, again = (
        a_set(500, nonce, framework="checkpoint-n", written_ns=written_ns)
        for nonce, written_ns in zip(nonces, (500, 1000), strict=True)
    )
    story = Story(staged=[first, again])
    story.store_all()
    story.wait(60)
    assert [order.staged.id.nonce for order in story.all(CommitManifest)] == [nonces[1]]


def test_a_rebuilt_state_gives_adopted_sets_to_the_same_start() -> None:
    """The sets that the next scan finds are not written after the newest commit."""
    story = Story()
    scan(story, [adopted(300, 300), adopted(500, 500)])
    story.store_all()
    story.state = machine.rebuilt(story.state)
    story.scan()
    story.store_all()
    assert claims(story) == ["process-vm"]
    assert story.state.commits.last_complete == CommitRef(2, 500)


# ---------------------------------------------------------------- restarts of the daemon


def test_a_restarted_daemon_shares_the_generation_of_its_start() -> None:
    """Also if it was killed before its claim was answered; sealed sets keep their place."""
    story = joined(start_id="a")
    story.commit(9)
    again(story, "b", step=4, parent=Parent("a", 4))
    story.seal(5, "new", start_id="b")
    story = story.restarted()
    story.join(2, pid=102, start_id="b")
    story.store_all()
    assert claims(story) == []
    assert story.state.commits.last_complete == CommitRef(3, 5)
    story.grants = False
    again(story, "c")
    killed = story.restarted()
    killed.join(9, pid=109, start_id="c")
    assert claims(killed) == ["c"]
    assert generations(killed) == {"a": 2, "b": 3, "c": 4}


@pytest.mark.parametrize("has_newer", [False, True])
def test_sets_of_an_earlier_boot_are_committed_only_if_nothing_is_newer(*, has_newer: bool) -> None:
    """The claimant confirms the recorded claim, or another VM has claimed since."""
    recorded = [Start(id="a", generation=2, is_of_boot=False, is_open=False)]
    story = Story(claimed=False, staged=[a_set(9, start_id="a")], recorded=recorded)
    story.scan()
    story.tell(RunRead(CommitRef(3, 1) if has_newer else None, "x" if has_newer else ""))
    if not has_newer:
        story.tell(GenerationClaimed("a", 2, None))
    story.store_all()
    assert manifests(story) == ([] if has_newer else [(2, 9)])
    assert story.state.start is None
    story.next_generation = 4
    story.join(start_id="b")
    assert claims(story) == ["b"]


@pytest.mark.fault("T12")
def test_a_framework_that_saves_beside_our_hooks_proves_nothing() -> None:
    """The hooks of the next VM cannot load its directory, so it is not committed in the start's line."""
    story = joined(step=100)
    story.commit(100)
    story.progress(149)
    story.commit(150, "hf", framework="checkpoint-n", written_ns=10**9)
    assert story.state.commits.last == CommitRef(2, 100)
    story.progress(150)
    story.notice()
    story.accept(150)
    assert "SAFE generation 2 step 150" not in story.verdicts
    story.answer(151)
    story.store_all()
    assert story.verdicts == ["SAFE generation 2 step 151"]
