# SPDX-License-Identifier: Apache-2.0
"""Stories of one VM among several: a shared generation, requests of other VMs, and whole checkpoints."""

from __future__ import annotations

from dataclasses import replace

import pytest
from swansong.protocol import Committed, Fenced, Finished, Request, Target, Withdrawn
from swansong_bucket.model import (
    UNKNOWN_PARENT,
    CommitRef,
    GpuHealth,
    Parent,
    Staged,
    Start,
    VmPart,
)
from swansongd.core import machine
from swansongd.core.evacuation import evacuation_id
from swansongd.core.events import (
    CancelFlush,
    CheckComplete,
    CheckFence,
    ClaimGeneration,
    CommitDone,
    CommitManifest,
    Conclude,
    Exit,
    FenceFound,
    FinishAsked,
    GenerationClaimed,
    Log,
    Mark,
    NoticeRaised,
    PartsCounted,
    PeerRequested,
    Prune,
    RestoreAsked,
    RunRead,
    Send,
    SetAside,
    StartBegun,
    StartFlush,
    TrainerAgreed,
    TrainerFailed,
)
from swansongd.core.starts import FINISH_S, FINISH_S_MAX
from swansongd.core.state import Settings, State
from swansongd.observe.build_status import status_line
from swansongd.observe.phase import Phase, phase_of
from swansongd.observe.status import CommitStatus, LagStatus, PartStatus

from testkit.story import Story, a_notice, a_set


class Node(Story):
    """The VM with rank 0 of two VMs with one rank each."""

    def __init__(
        self, *, staged: tuple[Staged, ...] = (), recorded: tuple[Start, ...] = ()
    ) -> None:
        super().__init__(generation=3, staged=staged, recorded=recorded)

    def begin(self, start_id: str = "first", *, step: int = 7) -> None:
        """A trainer connects and reports its start, whose claim the VMs share."""
        self.join_one_of(2, step=step)
        self.tell(StartBegun(1, start_id))

    def begin_again(self, start_id: str = "second", *, nodes: int = 2) -> None:
        """The job starts again, with other processes."""
        self.leave()
        self.join_one_of(nodes, pid=200)
        self.tell(StartBegun(1, start_id))

    def join_one_of(self, nodes: int, *, step: int = 7, pid: int = 100, start_id: str = "") -> None:
        self.join(ranks=1, nodes=nodes, step=step, pid=pid, start_id=start_id)

    def seal_part(self, step: int, request_id: str = "") -> None:
        start = self.state.start
        start_id = "first" if start is None else start.id
        self.staging.append(a_set(step, request_id=request_id, start_id=start_id, nodes=2))
        self.scan()

    def agree(self, step: int) -> None:
        """The ranks of all VMs agree on this step for the newest request, and seal their parts."""
        self.tell(TrainerAgreed(self.request_id, step))
        self.seal_part(step, self.request_id)

    def counted(self, ref: CommitRef, committed: int) -> None:
        """The store lists the parts of this number of VMs."""
        self.tell(PartsCounted(ref, committed, ref if committed == 2 else None))

    @property
    def final(self) -> list[str]:
        """The verdicts, without farewells about this VM's part."""
        return [f"{c.verdict.value} {c.commit}" for c in self.all(Conclude) if c.is_final]

    def commit_own_part(self) -> CommitRef:
        self.flushed()
        return self.committed_ref()

    def complete(self) -> None:
        """This VM's part is stored, and so is that of the other VM."""
        self.counted(self.commit_own_part(), 2)

    def committed_ref(self) -> CommitRef:
        """The manifest of this VM's part is written."""
        order = self.last(CommitManifest)
        ref = CommitRef(order.generation, order.staged.id.step)
        self.tell(CommitDone(order.flush_id, ref))
        return ref


def started() -> Node:
    """The start of the job has its generation."""
    node = Node()
    node.begin()
    return node


@pytest.mark.parametrize("nodes", [2, 1])
def test_a_fence_between_two_starts_does_not_end_the_daemon(nodes: int) -> None:
    """The daemon stops writing, and waits for its ranks: the job's launcher decides who trains next.

    Another VM may join the next start first, or this VM alone is left of the job.
    """
    node = started()
    node.seal_part(10)
    node.tell(FenceFound(4))
    assert not node.all(Exit)
    assert node.all(CancelFlush)
    node.wait(60)
    assert node.flushes == [10]
    node.begin_again(nodes=nodes)
    node.seal_part(11)
    assert node.last(StartFlush).generation == 4
    assert node.state.starts.fenced_by is None


@pytest.mark.fault("H01", "G17")
@pytest.mark.parametrize("generation", [4, 5])
def test_a_start_that_waits_for_its_claim_is_not_overtaken(generation: int) -> None:
    """A restarted daemon, or a commit of the earlier start, finds the fence of an earlier claim.

    With this number, another VM made the claim for the same start.
    """
    node = Node(recorded=(Start(id="first", generation=3, nodes=2),))
    node.grants = False
    node.begin("second")
    node.tell(FenceFound(4))
    node.tell(GenerationClaimed("second", generation, newest=None))
    node.seal_part(11)
    assert node.last(StartFlush).generation == generation
    assert node.state.starts.fenced_by is None
    assert not node.all(Fenced), "its ranks would make no periodic checkpoints"


@pytest.mark.fault("G04")
def test_the_verdict_of_a_fenced_vm_improves_after_the_claim_of_its_next_start() -> None:
    """It comes at once, because nothing may be committed before; then the ranks are asked."""
    node = Node(recorded=(Start(id="first", generation=3, nodes=2),))
    node.grants = False
    node.begin("second")
    node.tell(FenceFound(4))
    node.notice(in_s=60)
    assert node.final == ["PARTIAL None"]
    assert not node.all(Request)
    node.tell(GenerationClaimed("second", 5, newest=None))
    node.agree(9)
    node.complete()
    assert node.final == ["PARTIAL None", "SAFE generation 5 step 9"]


@pytest.mark.fault("G17")
def test_ranks_of_an_overtaken_start_that_reconnect_to_a_restarted_daemon_are_never_safe() -> None:
    """The last set became whole after the start elsewhere had chosen where to resume."""
    node = Node(recorded=(Start(id="first", generation=3, nodes=2, is_live=False),))
    node.tell(RunRead(CommitRef(3, 17), "first"))
    node.tell(FenceFound(4))
    node.join_one_of(2, step=17, start_id="first")
    node.seal_part(18)
    node.leave(is_goodbye=True)
    node.notice()
    assert node.final == ["PARTIAL generation 3 step 17"]
    assert not node.all(StartFlush)


@pytest.mark.fault("G17")
def test_a_claim_that_is_confirmed_late_ends_no_newer_fence() -> None:
    """A start over several VMs that another one has overtaken commits nothing."""
    node = Node()
    node.grants = False
    node.begin("second")
    node.tell(FenceFound(5))
    node.tell(GenerationClaimed("second", 4, newest=None))
    node.seal_part(11)
    assert not node.all(StartFlush)
    assert node.state.starts.fenced_by == 5
    assert node.sent(Fenced) == [Send(Fenced(5), (1,))]


@pytest.mark.fault("N09")
def test_a_request_of_another_vm_is_as_urgent_as_our_own() -> None:
    """It has the id that the ranks know, an urgent flush and a verdict; repeated, it is one notice."""
    node = started()
    for _ in range(2):
        node.tell(PeerRequested("theirs", "aws.spot: reclaim", 30.0))
    (asked,) = node.all(Request)
    assert asked.id == "theirs"
    assert asked.urgency == "emergency"
    node.tell(TrainerAgreed("theirs", 9))
    assert not node.all(Target)
    node.seal_part(9, request_id="theirs")
    assert node.flushes == [9]
    node.complete()
    assert node.final == ["SAFE generation 3 step 9"]


def test_a_request_of_another_vm_that_outlasts_our_notice_is_made_again_with_our_id() -> None:
    """The ranks would repeat their answer to its own id, and its verdict would be followed by a worse one."""
    node = started()
    node.tell(PeerRequested("theirs", "aws.spot: reclaim", 100.0))
    node.agree(9)
    node.complete()
    node.notice(in_s=8)
    for _ in range(30):
        node.wait(1)
    ids = [ask.id for ask in node.all(Request)]
    assert node.evacuation.verdict is None
    assert len(set(ids)) == len(ids)


@pytest.mark.fault("X09")
@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_checkpoint_with_a_failed_gpu_of_another_vm_is_not_safe(*, is_restarted: bool) -> None:
    """The GPUs of this VM work; the manifest of the other VM has the mark."""
    node = started()
    raised = node.notice()
    node.agree(9)
    ref = node.commit_own_part()
    if is_restarted:
        generation = ref.generation
        node = Node(staged=tuple(node.staging), recorded=(Start(id="first", generation=3),))
        node.tell(RunRead(ref, "first", is_sound=False))
        node.tell(GenerationClaimed("first", generation, ref, "first", is_sound=False))
        node.tell(NoticeRaised(raised))
    else:
        node.tell(PartsCounted(ref, 2, ref, is_sound=False))
    for _ in range(130):
        node.wait(1)
    assert node.final == ["PARTIAL generation 3 step 9"]


@pytest.mark.fault("N12")
@pytest.mark.parametrize(("reason", "verdict"), [("finished", "SAFE"), ("RuntimeError", "PARTIAL")])
def test_a_rank_that_ends_in_an_error_states_no_position_of_other_vms(
    reason: str, verdict: str
) -> None:
    """A rank of another VM may have completed a further step, which no commit has."""
    node = started()
    node.seal_part(7)
    node.complete()
    node.leave(is_goodbye=True, reason=reason)
    node.notice(in_s=60)
    for _ in range(70):
        node.wait(1)
    assert node.final == [f"{verdict} generation 3 step 7"]


def test_a_rank_that_has_ended_states_no_position_for_the_others() -> None:
    """Another rank of this VM still trains, so the ranks of other VMs may be a step ahead of it."""
    node = Node()
    for rank in (0, 1):
        node.join(rank + 1, rank=rank, ranks=2, nodes=2, step=7, start_id="" if rank else "first")
    node.tell(StartBegun(2, "first"))
    node.seal_part(7)
    node.complete()
    node.leave(2, is_goodbye=True)
    node.notice(in_s=60)
    node.accept(7)
    for _ in range(70):
        node.wait(1)
    assert node.final == ["PARTIAL generation 3 step 7"]


@pytest.mark.fault("X09")
def test_a_finished_run_in_doubt_waits_for_no_trainer() -> None:
    """A GPU of the other VM had failed: no trainer comes whose checkpoint could improve the verdict."""
    node = started()
    node.seal(9, "end", start_id="first", nodes=2, is_final=True)
    node.flushed()
    node.committed()
    ref = CommitRef(3, 9, is_final=True)
    node.tell(PartsCounted(ref, 2, ref, is_sound=False))
    node.leave(is_goodbye=True)
    node.notice()
    node.scan()
    assert node.final == ["PARTIAL generation 3 step 9 (final)"]


def test_the_deadline_of_another_vm_does_not_replace_ours() -> None:
    """While this VM has a deadline, that one counts."""
    node = started()
    raised = node.notice(in_s=120)
    for left_s in (20.0, 5.0):  # each rank of this VM reports it
        node.tell(PeerRequested("theirs", "sooner", left_s))
        assert node.evacuation.deadline_mono_s == raised.deadline_mono_s
    assert node.state.notices.live["peer"].deadline_mono_s == node.now + 20.0


def test_identical_notices_on_two_vms_have_different_request_ids() -> None:
    """Two VMs may see the same text at the same instant; their requests differ."""
    notice = a_notice(deadline_mono_s=1.0)
    settings = [Settings(reserve_s=1, signals_trainer=False, vm=vm) for vm in ("vm0", "vm1")]
    assert len({evacuation_id(notice, State(settings=each), 1.0) for each in settings}) == 2


@pytest.mark.fault("T04", "T12")
def test_the_ranks_of_all_vms_agree_among_themselves_in_bounded_time() -> None:
    """The daemon sends no target, and the request fails after twice their time."""
    node = started()
    node.notice(in_s=60)
    node.accept(7)
    node.wait(9.9)
    assert not node.all(Target)
    assert not node.all(Withdrawn)
    node.wait(0.2)
    assert node.all(Withdrawn)


@pytest.mark.fault("T12", "T04")
def test_a_failed_request_is_repeated_while_a_checkpoint_fits() -> None:
    """One rank hung for a moment: the next request has another id, and its checkpoint is the answer."""
    node = started()
    node.notice(in_s=60)
    first = node.request_id
    node.tell(TrainerFailed(1, first, "declined: rank 0 waited 4.0 s"))
    node.scan()
    assert node.final == []
    node.wait(0.5)
    assert node.request_id == first
    node.wait(0.6)
    assert node.request_id not in ("", first)
    node.tell(PeerRequested(node.request_id, "the same", 50.0))
    assert "peer" not in node.state.notices.live, "another rank reports our own request"
    node.agree(9)
    node.complete()
    assert node.final == ["SAFE generation 3 step 9"]


def test_only_the_vm_with_the_notice_repeats_its_request() -> None:
    """Its repeated request is not a second notice on the other VMs."""
    node = started()
    node.tell(PeerRequested("theirs", "aws.spot: reclaim", 60.0))
    node.tell(TrainerFailed(1, "theirs", "declined: rank 0 waited 4.0 s"))
    node.scan()
    node.wait(2.0)
    assert [ask.id for ask in node.all(Request)] == ["theirs"]
    node.tell(PeerRequested("theirs.again-1", "aws.spot: reclaim", 55.0))
    assert [ask.id for ask in node.all(Request)] == ["theirs"]


@pytest.mark.fault("T12")
def test_a_newer_whole_checkpoint_improves_the_commit_and_not_the_word() -> None:
    """The verdict is announced again, and stays PARTIAL: no rank has stated its step."""
    node = started()
    node.seal_part(5)
    node.complete()
    node.tell(PeerRequested("theirs", "aws.spot: reclaim", 60.0))
    node.tell(TrainerFailed(1, "theirs", "declined: rank 0 waited 4.0 s"))
    node.scan()
    node.seal_part(7)  # begun before the notice: the job may be beyond step 7
    node.complete()
    assert node.final == ["PARTIAL generation 3 step 5", "PARTIAL generation 3 step 7"]


def test_a_job_start_during_an_evacuation_gets_a_request() -> None:
    """The ranks of the new start do not know the earlier request."""
    node = started()
    node.notice(in_s=100)
    first = node.request_id
    node.begin_again()
    node.wait(0.1)
    assert node.request_id != first
    node.agree(9)
    node.complete()
    assert node.final == ["SAFE generation 4 step 9"]


@pytest.mark.fault("G17")
def test_safe_means_the_whole_checkpoint() -> None:
    """With this VM's part alone, nothing is safe, pruned, reported or used as a parent."""
    node = started()
    node.seal_part(5)
    first = node.commit_own_part()
    node.counted(first, 2)
    assert [told.step for told in node.all(Committed)] == [5]
    node.notice(in_s=60)
    node.agree(9)
    node.flushed()
    order = node.last(CommitManifest)
    assert order.parent == first
    second = CommitRef(3, 9)
    node.tell(CommitDone(order.flush_id, second))
    assert node.final == []
    status = node.status
    assert (status.state, status.verdict) == ("WAITING_FOR_PEERS", None)
    assert status.last_commit == CommitStatus(generation=3, step=5, age_s=0.0)
    assert status.part == PartStatus(generation=3, step=9, nodes=2, nodes_committed=1)
    assert status.replication_lag == LagStatus(steps=4, seconds=0.0)
    line = status_line(node.state, node.now)
    assert "last commit generation 3 step 5; this VM's part of generation 3 step 9" in line
    assert [told.step for told in node.all(Committed)] == [5]
    assert not any(prune.directories for prune in node.all(Prune))
    node.counted(second, 1)
    assert phase_of(node.state) is Phase.WAITING_FOR_PEERS
    node.wait(0.3)
    node.counted(second, 2)
    assert node.final == ["SAFE generation 3 step 9"]
    assert node.last(Conclude).part is None
    assert node.last(Committed) == Committed(second.generation, second.step)
    assert len(node.last(Prune).directories) == 1
    assert node.status.part is None
    node.counted(second, 2)  # a look that was answered late
    node.wait(5)
    assert node.final == ["SAFE generation 3 step 9"]


@pytest.mark.fault("G17")
@pytest.mark.parametrize(("whole_before", "word"), [(True, "PARTIAL"), (False, "LOST")])
def test_a_part_alone_is_not_safe_at_the_deadline(whole_before: bool, word: str) -> None:
    """The verdict has the older whole commit and the part; it improves if the other parts arrive late."""
    node = started()
    stands = None
    if whole_before:
        node.seal_part(5)
        stands = node.commit_own_part()
        node.counted(stands, 2)
    node.notice(in_s=60)
    node.agree(9)
    ref = node.commit_own_part()
    # The power may be cut before the deadline: one farewell with the facts so far is written immediately.
    (early,) = node.all(Conclude)
    assert (early.is_final, early.verdict, early.commit) == (False, word, stands)
    for _ in range(59):
        node.wait(1.0)
        node.counted(ref, 1)
    assert node.all(Conclude) == [early]
    node.wait(2.0)
    assert node.final == [f"{word} {stands}"]
    last = node.last(Conclude)
    assert last.part == VmPart(ref, 2, 1)
    assert "this VM's part of generation 3 step 9 is committed (1 of 2 VMs)" in last.reason
    node.counted(ref, 2)
    assert node.final[1:] == ["SAFE generation 3 step 9"]


@pytest.mark.fault("G17", "O03")
def test_an_older_checkpoint_becomes_whole_after_many_newer_parts() -> None:
    """A slower VM may skip sets: each part since the last whole checkpoint may be the one that it has too."""
    node = started()
    refs = []
    for step in range(5, 105, 5):
        node.seal_part(step)
        refs.append(node.commit_own_part())
    node.tell(PartsCounted(refs[0], 1, None))
    node.wait(1)
    assert node.last(CheckComplete) == CheckComplete(refs[-1], 2)
    node.tell(PartsCounted(refs[-1], 1, refs[1]))
    assert node.last(Committed) == Committed(refs[1].generation, refs[1].step)
    assert node.state.part == VmPart(refs[-1], 2, 1)
    node.wait(40)
    assert node.last(CheckComplete) == CheckComplete(refs[-1], 2, refs[1])


@pytest.mark.fault("G17")
def test_a_part_of_an_earlier_start_of_the_job_is_never_safe() -> None:
    """The ranks belong to another start: its generation counts, and the old part does not."""
    node = started()
    node.notice(in_s=60)
    node.agree(9)
    node.commit_own_part()
    node.tell(FenceFound(4))
    node.wait(61)
    assert node.final == ["PARTIAL None"]


def test_a_vm_that_its_job_has_left_behind_does_not_say_lost() -> None:
    """It knows of no commit, and looks at its notice: the VMs that continue the run may have made one."""
    node = started()
    node.notice(in_s=60)
    assert node.all(CheckFence)
    node.tell(FenceFound(4))
    node.wait(61)
    assert node.final == ["PARTIAL None"]


def test_looks_for_the_parts_of_other_vms_back_off() -> None:
    """They may never arrive; the cost is one listing every half minute."""
    node = started()
    node.seal_part(5)
    ref = node.commit_own_part()
    node.counted(ref, 1)
    for _ in range(3600):
        if node.wait(1.0):
            node.counted(ref, 1)
    assert 100 < len(node.all(CheckComplete)) < 140


def test_looks_for_parts_do_not_overlap() -> None:
    """A store that does not respond gets one request; a manifest that is due does not queue behind a look."""
    node = started()
    node.notice(in_s=60)
    node.agree(9)
    ref = node.commit_own_part()
    for _ in range(20):
        node.wait(0.3)
    assert len(node.all(CheckComplete)) == 1
    node.tell(PartsCounted(ref, 0, None))
    node.seal_part(12)
    node.flushed()
    node.wait(1)
    assert len(node.all(CheckComplete)) == 1
    node.commit_fails()
    assert len(node.all(CheckComplete)) == 2


# ---------------------------------------------------------------- another start of the job


def finished(node: Node) -> list[str]:
    """The starts that may begin: no share of another VM is waited for."""
    return [told.start_id for told in node.all(Finished) if not told.waits]


@pytest.mark.fault("N09", "G17")
def test_sealed_sets_are_committed_before_another_start_begins() -> None:
    """The other VM has committed its part and ended: this part is flushed, committed and found whole."""
    node = started()
    node.tell(PeerRequested("theirs", "aws.spot: reclaim", 60.0))
    node.agree(9)
    assert node.flushes == [9]
    node.leave()
    node.now += 1
    node.tell(FinishAsked("second"))
    node.join_one_of(2, pid=200)
    node.tell(FinishAsked("second"))
    node.scan()
    node.wait(40)
    assert not node.all(CancelFlush)
    assert not finished(node)
    ref = node.commit_own_part()
    assert not finished(node)
    node.counted(ref, 2)
    assert finished(node) == ["second"]
    assert len(node.all(ClaimGeneration)) == 1, "a claim would fence VMs that have not finished"
    node.tell(FinishAsked("second"))
    assert finished(node) == ["second", "second"], (
        "a rank that connected late gets the message as well"
    )
    node.tell(StartBegun(1, "second"))
    assert node.last(ClaimGeneration) == ClaimGeneration("second", nodes=2, began_ticks=1200)
    node.tell(FinishAsked("second"))
    assert finished(node) == ["second"] * 3, "also once the start has begun"


def test_a_daemon_answers_when_its_own_share_is_committed() -> None:
    """It names its place in the earlier start: the ranks know whether all VMs of that start have answered."""
    node = started()
    node.seal_part(9)
    node.leave()
    node.now += 1
    node.tell(FinishAsked("second"))
    node.scan()
    assert not node.all(Finished), "its own share is not committed"
    ref = node.commit_own_part()
    first = node.state.starts.known[-1].id
    waits = Finished("second", earlier=first, first_rank=0, nodes=2, waits=True)
    assert node.all(Finished) == [waits]
    node.tell(FinishAsked("second"))
    assert node.all(Finished) == [waits, waits], "a rank that connected late"
    node.counted(ref, 2)
    assert node.last(Finished) == replace(waits, waits=False)


def with_another_launch(*, asks: bool = False) -> Node:
    """The job was launched again while this VM commits step 9.  A process of another launch connects, too.

    That process began after the ranks of the first start, and before the ranks of the new launch.

    Args:
        asks: its start has yet to begin.
    """
    node = started()
    node.seal_part(9)
    node.now += 1
    node.leave()
    node.join_one_of(2, pid=300)
    node.tell(FinishAsked("second", 1))
    node.scan()
    node.join(2, rank=1, nodes=2, pid=200, start_id="" if asks else "abandoned")
    return node


def test_a_launch_began_with_the_first_of_its_processes() -> None:
    """The ranks of one launch ask in any order; one whose processes began in between is newer."""
    node = started()
    node.seal_part(9)
    node.now += 1
    node.leave()
    for connection, rank, pid in ((1, 0, 300), (2, 1, 320), (3, 1, 310)):
        node.join(connection, rank=rank, nodes=2, pid=pid, start_id="")
        node.tell(FinishAsked("newest" if connection == 3 else "second", connection))
    node.scan()
    node.complete()
    assert finished(node) == ["newest"]


@pytest.mark.fault("H01", "T09")
@pytest.mark.parametrize("asks", [True, False])
def test_a_process_of_an_abandoned_launch_takes_nothing_from_the_launch_that_waits(
    *, asks: bool
) -> None:
    """Whether its start has begun or not: the sets are committed, and only the newest launch begins."""
    node = with_another_launch(asks=asks)
    if asks:
        node.tell(FinishAsked("abandoned", 2))
    node.wait(1)
    assert not node.all(CancelFlush)
    node.complete()
    assert finished(node) == ["second"]
    assert len(node.all(ClaimGeneration)) == 1, "a claim would fence the VMs of the new launch"
    node.tell(StartBegun(1, "second"))
    assert node.last(ClaimGeneration).start_id == "second"
    assert node.state.commits.last_complete == CommitRef(3, 9)


def test_a_process_of_an_abandoned_launch_takes_nothing_when_it_reconnects() -> None:
    """Also while no rank of the newest launch is connected."""
    node = with_another_launch()
    node.leave(1)
    node.leave(2, exited=False)
    node.join(3, rank=1, nodes=2, pid=200, start_id="abandoned")
    assert not node.all(CancelFlush)
    assert len(node.all(ClaimGeneration)) == 1


def test_a_job_with_one_vm_left_finishes_first_and_then_begins() -> None:
    """Its rank does not ask, and a process of an abandoned launch does.

    The daemon claims when the part of the earlier start is whole.
    """
    node = started()
    node.seal_part(9)
    node.now += 1
    node.leave()
    node.join_one_of(1, pid=300, start_id="alone")
    node.join(2, rank=1, nodes=2, pid=200, start_id="")
    node.tell(FinishAsked("abandoned", 2))
    assert len(node.all(ClaimGeneration)) == 1
    node.scan()
    node.complete()
    assert node.last(ClaimGeneration) == ClaimGeneration("alone", began_ticks=1300)
    assert node.state.commits.last_complete == CommitRef(3, 9)


def test_a_start_that_has_ended_before_it_could_begin_claims_nothing() -> None:
    """The job has left this VM: a claim would fence the VM on which the job runs by then."""
    node = started()
    node.seal_part(9)
    node.leave()
    node.join_one_of(1, pid=300, start_id="alone")
    node.wait(FINISH_S - 1)
    node.leave()
    node.wait(2)
    node.wait(60)
    assert [claim.start_id for claim in node.all(ClaimGeneration)] == ["first"]


def test_the_newest_launch_takes_the_place_of_one_that_was_abandoned() -> None:
    """In the order in which their processes began; an older one may ask once the newer ones have ended."""
    node = with_another_launch(asks=True)
    node.leave(1)
    node.tell(FinishAsked("again", 2))
    node.join(3, nodes=2, pid=400, start_id="")
    node.tell(FinishAsked("newest", 3))
    node.scan()
    node.complete()
    assert finished(node) == ["newest"]


@pytest.mark.parametrize(
    ("in_s", "limit_s"), [(None, FINISH_S), (52.0, 52.0), (600.0, FINISH_S_MAX)]
)
def test_another_start_waits_for_a_limited_time(in_s: float | None, limit_s: float) -> None:
    """Until the deadline of an evacuation, else half a minute; then no old set is committed."""
    node = started()
    if in_s is not None:
        node.tell(PeerRequested("theirs", "aws.spot: reclaim", in_s))
        node.tell(TrainerAgreed("theirs", 9))
    node.seal_part(9, request_id="theirs")
    node.tell(FinishAsked("second"))
    node.scan()
    node.wait(limit_s - 0.1)
    assert not finished(node)
    node.wait(0.2)
    assert finished(node) == ["second"]
    node.tell(StartBegun(1, "second"))
    assert node.all(CancelFlush)
    assert node.state.flush.flight is None
    assert not node.state.candidates
    assert node.state.notices.peer_end_mono_s is None, "the VM that ends may have left the job"


def test_a_part_that_is_confirmed_after_its_start_is_no_whole_checkpoint() -> None:
    """The job continues on this VM alone, after a limited wait for the reply of the store."""
    node = started()
    node.seal_part(9)
    node.flushed()
    node.grants = False
    node.leave()
    node.join_one_of(1, pid=200, start_id="alone")
    node.scan()
    node.wait(FINISH_S + 0.1)
    node.tell(StartBegun(1, "alone"))
    assert not node.state.commits.stored
    node.committed_ref()
    assert node.state.commits.last is None


def test_a_start_begins_immediately_with_nothing_left_to_commit() -> None:
    """After a scan that began later than the question: an older one may have missed the last set."""
    node = started()
    node.now += 1
    node.tell(FinishAsked("second"))
    assert not finished(node)
    node.seal_part(9)
    assert not finished(node)
    node.complete()
    assert finished(node) == ["second"]


def test_a_job_with_one_vm_left_that_was_overtaken_starts_here() -> None:
    """Fences are found while the daemon still commits a set of the earlier start."""
    node = started()
    node.seal_part(9)
    node.leave()
    node.grants = False
    node.join_one_of(1, pid=200, start_id="alone")
    node.tell(FenceFound(4))
    node.tell(FenceFound(5))
    assert not node.all(Exit)
    assert node.last(ClaimGeneration).start_id == "alone"


def test_a_part_that_is_not_whole_in_time_ends_with_its_job() -> None:
    """The other VM is gone: the start on one VM waits for a limited time, and then commits alone."""
    node = started()
    node.seal_part(9)
    node.leave()
    node.join_one_of(1, pid=200, start_id="alone")
    node.wait(FINISH_S + 1)
    assert node.all(CancelFlush)
    node.commit(2, "own", start_id="alone")
    assert node.state.commits.last_complete == CommitRef(4, 2)


def test_sets_of_a_new_start_are_never_committed_under_the_old_generation() -> None:
    """Ranks that do not query a checkpoint train immediately: their first set ends the wait."""
    node = started()
    node.seal_part(9)
    node.now += 1
    node.tell(FinishAsked("second"))
    node.scan()
    node.staging.append(a_set(3, start_id="second", nodes=2))
    node.scan()
    assert finished(node) == ["second"]
    node.begin_again()
    assert node.all(CancelFlush)
    assert [(o.staged.id.step, o.generation) for o in node.all(StartFlush)] == [(9, 3), (3, 4)]


def test_the_set_of_the_newest_checkpoint_is_set_aside_for_the_next_start() -> None:
    """The job resumes from it, and its bytes need not be fetched; the next whole commit deletes it."""
    node = started()
    for step in (43, 44, 45):
        node.seal_part(step)
        if step < 45:
            node.complete()
    node.begin_again()
    assert node.last(SetAside).directories == (node.staging[1].directory,)
    pruned = node.last(Prune)
    assert set(pruned.directories) == {node.staging[0].directory, node.staging[2].directory}
    assert pruned.keeps_aside
    node.starts(44, start_id="second", parent=Parent("first", 44))
    assert len(node.all(SetAside)) == 1, "once, when the start begins"
    node.staging.clear()
    node.scan()
    node.seal_part(50)
    node.complete()
    assert not node.last(Prune).keeps_aside


@pytest.mark.fault("H01", "G17")
def test_a_restarted_daemon_commits_no_set_of_an_earlier_start() -> None:
    """Whether its ranks have connected again or not; the record does not name the number of VMs."""
    recorded = (Start(id="first", generation=3), Start(id="second", generation=4))
    staged = (a_set(43, "old", start_id="first", nodes=2), a_set(10, start_id="second", nodes=2))
    again = Node(staged=staged, recorded=recorded)
    again.commit_own_part()
    again.begin("second")
    again.wait(60)
    assert again.flushes == [10]


# ---------------------------------------------------------------- a VM that the job has left behind


@pytest.mark.fault("G04")
def test_a_fenced_vm_concludes_a_notice_immediately() -> None:
    """State and verdict show the newer generation; no request is made, and the daemon does not wait."""
    node = started()
    node.tell(FenceFound(4))
    assert (node.status.state, node.status.newer_generation) == ("FENCED", 4)
    assert "generation 4" in status_line(node.state, node.now)
    node.notice(in_s=60)
    assert node.final == ["PARTIAL None"]
    assert "generation 4" in node.last(Conclude).reason
    assert not node.all(Request)
    assert node.last(Mark).evacuation_id
    for _ in range(3):
        node.tell(FenceFound(4))
    fences = [line for line in node.all(Log) if line.event == "fenced"]
    assert len(fences) == 1
    node.begin_again()
    assert node.status.newer_generation is None
    assert phase_of(node.state) is not Phase.FENCED


def with_a_part_on_its_way() -> Node:
    """Step 8 is whole; the manifest of this VM's part of step 20 is being written."""
    node = started()
    node.seal_part(8)
    node.complete()
    node.seal_part(20)
    node.flushed()
    return node


@pytest.mark.parametrize("how", ["another start", "rebuilt", "fenced"])
def test_a_part_that_is_written_late_is_not_whole(how: str) -> None:
    """Its number of VMs is not known any more, so only a count or a claim can show that it is whole."""
    node = with_a_part_on_its_way()
    order = node.last(CommitManifest)
    if how == "rebuilt":
        node.state = machine.rebuilt(node.state)
    else:
        node.tell(StartBegun(1, "second") if how == "another start" else FenceFound(4))
    node.tell(CommitDone(order.flush_id, CommitRef(3, 20)))
    assert node.state.commits.last_complete == CommitRef(3, 8)


@pytest.mark.parametrize("says", [True, False])
def test_a_start_from_an_older_checkpoint_is_safe_with_its_own_commit_only(*, says: bool) -> None:
    """The newest whole commit is of a greater step; the start may not even name what it loaded."""
    node = with_a_part_on_its_way()
    node.counted(node.committed_ref(), 2)
    node.begin_again()
    parent = Parent("first", 8) if says else UNKNOWN_PARENT
    node.starts(8, start_id="second", parent=parent)
    node.notice(60)
    node.accept(8)
    node.scan()
    assert node.final == []
    node.agree(9)
    node.complete()
    assert node.final == ["SAFE generation 4 step 9"]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_part_of_an_earlier_start_may_still_become_whole(*, is_first: bool) -> None:
    """The other VM had sent its part, and the claim of the next start preceded its arrival.

    The next VM would resume from that checkpoint: nothing is SAFE or LOST before this start has committed.
    """
    node = started()
    if not is_first:
        node.seal_part(8)
        node.complete()
    node.seal_part(20)
    node.commit_own_part()
    node.begin_again()
    parent = Parent("", 0) if is_first else Parent("first", 8)
    node.starts(max(parent.step, 0), start_id="second", parent=parent)
    node.notice(20)
    for _ in range(25):
        node.scan()
        node.accept(max(parent.step, 0))
        node.tell(TrainerAgreed(node.request_id, max(parent.step, 0) + 1))
        node.wait(1)
    assert node.final == ["PARTIAL None" if is_first else "PARTIAL generation 3 step 8"]


@pytest.mark.parametrize(("target", "word"), [(8, "SAFE"), (10, "PARTIAL")])
def test_the_ranks_of_other_vms_may_be_a_step_ahead(target: int, word: str) -> None:
    """The agreed step shows it: this rank accepted at 7, and the newest whole commit is of step 7."""
    node = started()
    node.seal_part(7)
    node.complete()
    node.notice(60)
    node.accept(7)
    node.tell(TrainerAgreed(node.request_id, target))
    node.tell(TrainerFailed(1, node.request_id, "disk full"))
    while not node.final:
        node.scan()
        node.accept(7)
        node.tell(TrainerAgreed(node.request_id, target))
        node.tell(TrainerFailed(1, node.request_id, "disk full"))
        node.wait(1)
    assert node.final == [f"{word} generation 3 step 7"]


@pytest.mark.fault("X01")
def test_a_doubtful_part_that_becomes_whole_at_a_claim_stays_doubtful() -> None:
    """This VM's GPU had failed before it was sealed: its manifest has the mark."""
    node = started()
    node.read_gpus(GpuHealth.LOST)
    node.seal_part(20)
    ref = node.commit_own_part()
    node.grants = False
    node.begin_again()
    node.tell(GenerationClaimed("second", 4, ref, "first", is_sound=False))
    node.tell(RestoreAsked("second"))
    node.staging.clear()
    node.notice(20)
    node.accept(-1)
    for _ in range(25):
        node.scan()
        node.wait(1)
    assert node.final == ["PARTIAL generation 3 step 20"]
    assert "had failed before" in node.last(Conclude).reason
