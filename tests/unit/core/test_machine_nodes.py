# SPDX-License-Identifier: Apache-2.0
"""Stories of one VM among several: a shared generation, requests of other VMs, and whole checkpoints."""

from __future__ import annotations

from dataclasses import replace

import pytest
from swansongd.core import machine
from swansongd.core.evacuation import evacuation_id
from swansongd.core.events import (
    AskTrainers,
    CancelFlush,
    CheckComplete,
    CommitDone,
    CommitManifest,
    Conclude,
    Exit,
    FenceFound,
    FinishAsked,
    GenerationClaimed,
    GpusRead,
    JobStarted,
    JoinGeneration,
    Log,
    Mark,
    PartsCounted,
    PeerRequested,
    Prune,
    SendTarget,
    SetAside,
    StartFlush,
    TellCommitted,
    TellFinished,
    TrainerAgreed,
    TrainerFailed,
    TrainerJoined,
    TrainerLeft,
    TrainerProgress,
    WithdrawRequest,
)
from swansongd.core.nodes import FINISH_S, FINISH_S_MAX, REQUESTS_MAX, is_alone
from swansongd.core.state import Phase, Settings, State
from swansongd.model import (
    CheckpointId,
    CommitRef,
    GpuHealth,
    GpuStatus,
    Staged,
    TrainerView,
    VmPart,
)
from swansongd.observe.report import status_line, status_report

from testkit.story import Story, a_notice, a_set


class Node(Story):
    """The VM with rank 0 of two VMs with one rank each."""

    def __init__(
        self,
        *,
        staged: tuple[Staged, ...] = (),
        resumed_job_start_id: str = "",
        abandoned: tuple[CheckpointId, ...] = (),
    ) -> None:
        super().__init__(claimed=False, staged=staged)
        settings = Settings(
            reserve_s=5.0,
            signals_trainer=False,
            several_vms=True,
            vm="vm0",
            resumed_job_start_id=resumed_job_start_id,
        )
        self.state = replace(
            self.state,
            settings=settings,
            job_start_id=resumed_job_start_id,
            abandoned=frozenset(abandoned),
            unusable=frozenset(abandoned),
        )
        self.scan()

    def begin(self, job_start_id: str = "first", generation: int = 3, step: int = 7) -> None:
        """A trainer connects and reports its job start; the claim is shared."""
        self.join_one_of(2, step=step)
        self.tell(JobStarted(job_start_id))
        self.tell(GenerationClaimed(generation, None, is_rollback=True))

    def join_one_of(self, nodes: int, *, step: int = 7, pid: int = 100) -> None:
        view = TrainerView(
            connection=1, pid=pid, rank=0, world_size=nodes, local_world_size=1, nodes=nodes, step=step
        )  # fmt: skip
        self.tell(TrainerJoined(view))

    def seal_part(self, step: int, request_id: str = "") -> None:
        self.staging.append(replace(a_set(step, request_id=request_id), nodes=2))
        self.scan()

    def counted(self, ref: CommitRef, committed: int) -> None:
        """The store lists the parts of this number of VMs."""
        self.tell(PartsCounted(ref, committed, ref if committed == 2 else None))

    @property
    def final(self) -> list[str]:
        """The verdicts, without farewells about this VM's part."""
        return [f"{c.verdict.value} {c.commit}" for c in self.all(Conclude) if c.is_final]

    def commit_own_part(self) -> CommitRef:
        self.flushed()
        order = self.last(CommitManifest)
        ref = CommitRef(order.generation, order.staged.id.step)
        self.tell(CommitDone(order.flush_id, ref))
        return ref


def test_nothing_is_claimed_before_the_ranks_report_their_job_start() -> None:
    """Separate claims would fence the other VMs; one job start, reported by all ranks, is joined once."""
    node = Node()
    node.join_one_of(2)
    assert not node.all(JoinGeneration)
    node.tell(JobStarted("first"))
    node.tell(JobStarted("first"))
    assert [order.job_start_id for order in node.all(JoinGeneration)] == ["first"]


def test_a_job_with_one_vm_left_is_another_job_start() -> None:
    """The ranks need not report it; it counts once for all ranks, and again after the job had grown."""
    node = Node()
    node.join_one_of(1)
    node.join_one_of(1, pid=101)
    assert len(node.all(JoinGeneration)) == 1
    node.tell(GenerationClaimed(4, None, is_rollback=True))
    node.begin("grown", generation=5)
    node.join_one_of(1)
    names = [order.job_start_id for order in node.all(JoinGeneration)]
    assert len(set(names)) == len(names) == 3


def test_sets_of_an_earlier_start_are_not_committed_by_a_later_one() -> None:
    """The job may have continued from another state; the flush of such a set ends too."""
    node = Node()
    node.begin()
    node.seal_part(10)
    assert node.flushes == [10]
    node.tell(JobStarted("second"))
    assert node.all(CancelFlush)
    node.tell(GenerationClaimed(4, None, is_rollback=True))
    node.seal_part(8)
    assert node.flushes == [10, 8]
    assert node.last(StartFlush).generation == 4


@pytest.mark.parametrize(
    ("resumed_job_start_id", "flushed"), [("first", [10]), ("", []), ("zeroth", [])]
)
def test_sets_of_the_first_scan_belong_to_the_resumed_job_start(
    resumed_job_start_id: str, flushed: list[int]
) -> None:
    """A restarted daemon continues; on a disk from an earlier boot or start no set is ours."""
    node = Node(staged=(replace(a_set(10), nodes=2),), resumed_job_start_id=resumed_job_start_id)
    if resumed_job_start_id:
        node.tell(GenerationClaimed(3, None))
    node.begin()
    in_flight = [] if node.state.flight is None else [node.state.flight.staged.id.step]
    assert in_flight == flushed


def test_a_fence_between_two_starts_does_not_end_the_daemon() -> None:
    """Another VM may join the next start first: the daemon stops writing, and waits for its ranks."""
    node = Node()
    node.begin()
    node.seal_part(10)
    node.tell(FenceFound(4))
    assert not node.all(Exit)
    assert node.all(CancelFlush)
    assert node.state.generation is None
    node.tell(JobStarted("second"))
    node.tell(FenceFound(4))
    node.tell(GenerationClaimed(4, None, is_rollback=True))
    node.seal_part(11)
    assert node.last(StartFlush).generation == 4


@pytest.mark.fault("N09")
def test_a_request_of_another_vm_is_as_urgent_as_our_own() -> None:
    """It has the id that the ranks know, an urgent flush and a verdict; repeated, it is one notice."""
    node = Node()
    node.begin()
    for _ in range(2):
        node.tell(PeerRequested("theirs", "aws.spot: reclaim", 30.0))
    (asked,) = node.all(AskTrainers)
    assert asked.request_id == "theirs"
    assert asked.is_urgent
    node.tell(TrainerAgreed("theirs", 9))
    assert not node.all(SendTarget)
    node.seal_part(9, request_id="theirs")
    assert node.flushes == [9]
    node.counted(node.commit_own_part(), 2)
    assert node.final == ["SAFE generation 3 step 9"]


def test_our_own_request_from_another_rank_is_not_a_notice() -> None:
    """Another rank of this VM may report it first."""
    node = Node()
    node.begin()
    raised = node.notice()
    node.tell(PeerRequested(node.request_id, "the same", 60.0))
    assert set(node.state.notices) == {raised.source}


def test_the_deadline_of_another_vm_does_not_replace_ours() -> None:
    """While this VM has a deadline, that one counts."""
    node = Node()
    node.begin()
    raised = node.notice(in_s=120)
    node.tell(PeerRequested("theirs", "sooner", 20.0))
    assert node.state.evacuation is not None
    assert node.state.evacuation.deadline_mono_s == raised.deadline_mono_s


def test_identical_notices_on_two_vms_have_different_request_ids() -> None:
    """Two VMs may see the same text at the same instant; their requests differ."""
    notice = a_notice(deadline_mono_s=1.0)
    settings = [Settings(reserve_s=1, signals_trainer=False, vm=vm) for vm in ("vm0", "vm1")]
    assert len({evacuation_id(notice, State(settings=each), 1.0) for each in settings}) == 2


@pytest.mark.fault("T04", "T12")
def test_the_ranks_of_all_vms_agree_among_themselves_in_bounded_time() -> None:
    """The daemon sends no target, and the request fails after twice their time."""
    node = Node()
    node.begin()
    node.notice(in_s=60)
    node.accept(7)
    node.wait(9.9)
    assert not node.all(SendTarget)
    assert not node.all(WithdrawRequest)
    node.wait(0.2)
    assert node.all(WithdrawRequest)


@pytest.mark.fault("T12", "T04")
def test_a_failed_request_is_repeated_while_a_checkpoint_fits() -> None:
    """One rank hung for a moment: the next request has another id, and its checkpoint is the answer."""
    node = Node()
    node.begin()
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
    assert "peer" not in node.state.notices, "another rank reports our own request"
    node.tell(TrainerAgreed(node.request_id, 9))
    node.seal_part(9, request_id=node.request_id)
    node.counted(node.commit_own_part(), 2)
    assert node.final == ["SAFE generation 3 step 9"]


def test_requests_that_all_fail_end_with_the_reason_of_the_last() -> None:
    """Each has another id, the pauses grow, and no request is made that would not fit."""
    node = Node()
    node.begin()
    node.notice(in_s=100)
    for _ in range(1200):
        if node.state.evacuation is not None and node.state.evacuation.request.is_waiting:
            node.tell(TrainerFailed(1, node.request_id, "declined: rank 0 waited 4.0 s"))
        node.scan()
        node.wait(0.1)
    ids = [ask.request_id for ask in node.all(AskTrainers)]
    assert len(set(ids)) == len(ids) == REQUESTS_MAX
    assert node.final == ["LOST None"]
    assert "rank 0 waited" in node.last(Conclude).reason


def test_only_the_vm_with_the_notice_repeats_its_request() -> None:
    """Its repeated request is not a second notice on the other VMs."""
    node = Node()
    node.begin()
    node.tell(PeerRequested("theirs", "aws.spot: reclaim", 60.0))
    node.tell(TrainerFailed(1, "theirs", "declined: rank 0 waited 4.0 s"))
    node.scan()
    node.wait(2.0)
    assert [ask.request_id for ask in node.all(AskTrainers)] == ["theirs"]
    node.tell(PeerRequested("theirs.again-1", "aws.spot: reclaim", 55.0))
    assert [ask.request_id for ask in node.all(AskTrainers)] == ["theirs"]


@pytest.mark.fault("T12")
def test_a_newer_whole_checkpoint_replaces_a_failed_request() -> None:
    """A set sealed after the notice suffices, also after a first verdict."""
    node = Node()
    node.begin()
    node.seal_part(5)
    node.counted(node.commit_own_part(), 2)
    node.tell(PeerRequested("theirs", "aws.spot: reclaim", 60.0))
    node.tell(TrainerFailed(1, "theirs", "declined: rank 0 waited 4.0 s"))
    node.scan()
    node.seal_part(7)  # begun before the notice: the job was at step 7 already
    node.counted(node.commit_own_part(), 2)
    assert node.final == ["PARTIAL generation 3 step 5", "PARTIAL generation 3 step 7"]
    node.seal_part(12)
    node.counted(node.commit_own_part(), 2)
    assert node.final[2:] == ["SAFE generation 3 step 12"]


def test_a_job_start_during_an_evacuation_gets_a_request() -> None:
    """The ranks of the new start do not know the earlier request."""
    node = Node()
    node.begin()
    node.notice(in_s=100)
    first = node.request_id
    node.leave()
    node.tell(JobStarted("second"))
    node.join_one_of(2, pid=200)
    node.tell(GenerationClaimed(4, None, is_rollback=True))
    node.wait(1.5)
    assert node.request_id != first
    node.tell(TrainerAgreed(node.request_id, 9))
    node.seal_part(9, request_id=node.request_id)
    node.counted(node.commit_own_part(), 2)
    assert node.final == ["SAFE generation 4 step 9"]


@pytest.mark.fault("G17")
def test_safe_means_the_whole_checkpoint() -> None:
    """With this VM's part alone, nothing is safe, pruned, reported or used as a parent."""
    node = Node()
    node.begin()
    node.seal_part(5)
    first = node.commit_own_part()
    node.counted(first, 2)
    assert [tell.ref.step for tell in node.all(TellCommitted)] == [5]
    node.notice(in_s=60)
    node.tell(TrainerAgreed(node.request_id, 9))
    node.seal_part(9, request_id=node.request_id)
    node.flushed()
    order = node.last(CommitManifest)
    assert order.parent == first
    second = CommitRef(3, 9)
    node.tell(CommitDone(order.flush_id, second))
    assert node.final == []
    report = status_report(node.state, node.now)
    assert (report["state"], report["verdict"]) == ("WAITING_FOR_PEERS", None)
    assert report["last_commit"] == {"generation": 3, "step": 5, "is_final": False, "age_s": 0.0}
    assert report["part"] == {"generation": 3, "step": 9, "nodes": 2, "nodes_committed": 1}
    assert report["replication_lag"] == {"steps": 4, "seconds": 0.0, "bytes": 0}
    line = status_line(node.state, node.now)
    assert "last commit generation 3 step 5; this VM's part of generation 3 step 9" in line
    assert [tell.ref.step for tell in node.all(TellCommitted)] == [5]
    assert not node.all(Prune)
    node.counted(second, 1)
    assert node.state.phase is Phase.WAITING_FOR_PEERS
    node.wait(0.3)
    node.counted(second, 2)
    assert node.final == ["SAFE generation 3 step 9"]
    assert node.last(Conclude).part is None
    assert node.last(TellCommitted).ref == second
    assert len(node.last(Prune).directories) == 1
    assert status_report(node.state, node.now)["part"] is None
    node.wait(5)
    assert node.final == ["SAFE generation 3 step 9"]


@pytest.mark.fault("G17")
@pytest.mark.parametrize(("whole_before", "word"), [(True, "PARTIAL"), (False, "LOST")])
def test_a_part_alone_is_not_safe_at_the_deadline(whole_before: bool, word: str) -> None:
    """The verdict has the older whole commit and the part; it improves if the other parts arrive late."""
    node = Node()
    node.begin()
    stands = None
    if whole_before:
        node.seal_part(5)
        stands = node.commit_own_part()
        node.counted(stands, 2)
    node.notice(in_s=60)
    node.tell(TrainerAgreed(node.request_id, 9))
    node.seal_part(9, request_id=node.request_id)
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


def test_a_set_sealed_meanwhile_does_not_wait_for_the_other_vms() -> None:
    """Training continues after the save: later sets are flushed while the other VMs are slow."""
    node = Node()
    node.begin()
    node.notice(in_s=60)
    node.tell(TrainerAgreed(node.request_id, 9))
    node.seal_part(9, request_id=node.request_id)
    node.commit_own_part()
    node.seal_part(12)
    assert node.flushes == [9, 12]


def test_an_older_checkpoint_becomes_whole_after_a_newer_part() -> None:
    """A slower VM may skip sets: each of our last parts may be the one that it has too."""
    node = Node()
    node.begin()
    refs = []
    for step in (5, 10, 15):
        node.seal_part(step)
        refs.append(node.commit_own_part())
    node.tell(PartsCounted(refs[0], 1, None))
    node.wait(1)
    assert node.last(CheckComplete) == CheckComplete(tuple(reversed(refs)), 2)
    node.tell(PartsCounted(refs[2], 1, refs[1]))
    assert node.last(TellCommitted).ref == refs[1]
    assert node.state.part == VmPart(refs[2], 2, 1)
    node.wait(40)
    assert node.last(CheckComplete) == CheckComplete((refs[2],), 2)


@pytest.mark.fault("G17")
def test_a_part_of_an_earlier_start_of_the_job_is_never_safe() -> None:
    """The ranks belong to another start: its generation counts, and the old part does not."""
    node = Node()
    node.begin()
    node.notice(in_s=60)
    node.tell(TrainerAgreed(node.request_id, 9))
    node.seal_part(9, request_id=node.request_id)
    node.commit_own_part()
    node.tell(FenceFound(4))
    node.wait(61)
    assert node.final == ["LOST None"]


@pytest.mark.fault("G17")
def test_a_part_alone_is_lost_at_the_deadline() -> None:
    """Only this VM has committed, and its newer set fails: the verdict is LOST."""
    node = Node()
    node.begin()
    node.seal_part(5)
    node.commit_own_part()
    node.notice(in_s=60)
    node.tell(TrainerFailed(1, node.request_id, "no"))
    node.scan()
    node.wait(61)
    assert node.last(Conclude).verdict.value == "LOST"
    assert node.last(Conclude).commit is None


def test_looks_for_the_parts_of_other_vms_back_off() -> None:
    """They may never arrive; the cost is one listing every half minute."""
    node = Node()
    node.begin()
    node.seal_part(5)
    ref = node.commit_own_part()
    node.counted(ref, 1)
    for _ in range(3600):
        if node.wait(1.0):
            node.counted(ref, 1)
    assert 100 < len(node.all(CheckComplete)) < 140


def test_looks_for_parts_do_not_overlap() -> None:
    """A store that does not respond gets one request; a manifest that is due does not queue behind a look."""
    node = Node()
    node.begin()
    node.notice(in_s=60)
    node.tell(TrainerAgreed(node.request_id, 9))
    node.seal_part(9, request_id=node.request_id)
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
    return [told.job_start_id for told in node.all(TellFinished)]


@pytest.mark.fault("N09", "G17")
def test_sealed_sets_are_committed_before_another_start_begins() -> None:
    """The other VM has committed its part and ended: this part is flushed, committed and found whole."""
    node = Node()
    node.begin()
    node.tell(PeerRequested("theirs", "aws.spot: reclaim", 60.0))
    node.tell(TrainerAgreed("theirs", 9))
    node.seal_part(9, request_id="theirs")
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
    assert len(node.all(JoinGeneration)) == 1, "a claim would fence VMs that have not finished"
    node.tell(FinishAsked("second"))
    assert finished(node) == ["second", "second"], (
        "a rank that connected late gets the message as well"
    )
    node.tell(JobStarted("second"))
    assert node.last(JoinGeneration).job_start_id == "second"


@pytest.mark.parametrize(
    ("in_s", "limit_s"), [(None, FINISH_S), (52.0, 52.0), (600.0, FINISH_S_MAX)]
)
def test_another_start_waits_for_a_limited_time(in_s: float | None, limit_s: float) -> None:
    """Until the deadline of an evacuation, else half a minute; then no old set is committed."""
    node = Node()
    node.begin()
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
    node.tell(JobStarted("second"))
    node.tell(GenerationClaimed(4, None, is_rollback=True))
    assert node.all(CancelFlush)
    assert node.state.flight is None
    assert not node.state.candidates


def test_a_start_begins_immediately_with_nothing_left_to_commit() -> None:
    """After a scan that began later than the question: an older one may have missed the last set."""
    node = Node()
    node.begin()
    node.now += 1
    node.tell(FinishAsked("second"))
    assert not finished(node)
    node.seal_part(9)
    assert not finished(node)
    node.counted(node.commit_own_part(), 2)
    assert finished(node) == ["second"]


def test_a_daemon_that_took_part_in_no_start_has_nothing_to_finish() -> None:
    """Sets on a disk of an earlier boot delay no start."""
    node = Node(staged=(replace(a_set(10), nodes=2),))
    node.now += 1
    node.tell(FinishAsked("first"))
    assert finished(node) == ["first"]


def test_a_job_with_one_vm_left_finishes_first_and_then_begins_by_itself() -> None:
    """Its rank reports no start: the daemon claims when the old one is whole."""
    node = Node()
    node.begin()
    node.seal_part(9)
    node.now += 1
    node.join_one_of(1)
    node.scan()
    assert len(node.all(JoinGeneration)) == 1
    node.counted(node.commit_own_part(), 2)
    assert len(node.all(JoinGeneration)) == 2
    assert is_alone(node.last(JoinGeneration).job_start_id)


def test_sets_of_a_new_start_are_never_committed_under_the_old_generation() -> None:
    """Ranks that do not query a checkpoint train immediately: their first set begins their start."""
    node = Node()
    node.begin()
    node.seal_part(9)
    node.now += 1
    node.tell(FinishAsked("second"))
    node.scan()
    node.seal_part(3)
    assert node.last(JoinGeneration).job_start_id == "second"
    assert node.all(CancelFlush)
    node.tell(GenerationClaimed(4, None, is_rollback=True))
    assert [(o.staged.id.step, o.generation) for o in node.all(StartFlush)] == [(9, 3), (3, 4)]


def test_the_set_of_the_newest_checkpoint_is_set_aside_for_the_next_start() -> None:
    """The job resumes from it, and its bytes need not be fetched; the next whole commit deletes it."""
    node = Node()
    node.begin()
    for step in (43, 44, 45):
        node.seal_part(step)
        if step < 45:
            node.counted(node.commit_own_part(), 2)
    node.tell(JobStarted("second"))
    assert node.last(SetAside).directories == (node.staging[1].directory,)
    pruned = node.last(Prune)
    assert set(pruned.directories) == {node.staging[0].directory, node.staging[2].directory}
    assert pruned.keeps_aside
    node.staging.clear()
    node.tell(GenerationClaimed(4, CommitRef(3, 44), is_rollback=True))
    node.scan()
    node.seal_part(50)
    node.counted(node.commit_own_part(), 2)
    assert not node.last(Prune).keeps_aside


@pytest.mark.fault("H01", "G17")
def test_a_restarted_daemon_knows_the_sets_of_earlier_starts() -> None:
    """They are pruned when another start begins; a remaining one is never committed."""
    node = Node()
    node.begin()
    node.seal_part(43)
    node.tell(JobStarted("second"))
    old = node.staging[0]
    order = node.last(JoinGeneration)
    assert order.abandoned == (old.id,)
    assert node.last(Prune).directories == (old.directory,)
    node.seal_part(10)
    again = Node(
        staged=tuple(node.staging), resumed_job_start_id="second", abandoned=order.abandoned
    )
    again.tell(GenerationClaimed(4, None))
    again.begin("second", generation=4)
    assert again.flushes == [10]


# ---------------------------------------------------------------- a VM that the job has left behind


@pytest.mark.fault("G04")
def test_a_fenced_vm_concludes_a_notice_immediately() -> None:
    """State and verdict show the newer generation; no request is made, and the daemon does not wait."""
    node = Node()
    node.begin()
    node.tell(FenceFound(4))
    report = status_report(node.state, node.now)
    assert (report["state"], report["generation"], report["newer_generation"]) == (
        "FENCED",
        None,
        4,
    )
    assert "generation 4" in status_line(node.state, node.now)
    node.notice(in_s=60)
    assert node.final == ["LOST None"]
    assert "generation 4" in node.last(Conclude).reason
    assert not node.all(AskTrainers)
    assert node.last(Mark).evacuation_id
    for _ in range(3):
        node.tell(FenceFound(4))
    fences = [line for line in node.all(Log) if line.event == "fenced"]
    assert len(fences) == 1
    node.tell(JobStarted("second"))
    node.tell(GenerationClaimed(4, None, is_rollback=True))
    assert status_report(node.state, node.now)["newer_generation"] is None
    assert node.state.phase is not Phase.FENCED


@pytest.mark.fault("G18")
def test_another_start_with_our_number_fences_too() -> None:
    """The prefix was emptied, and another start of the job claimed the number."""
    node = Node()
    node.begin()
    own = node.state.generation
    assert own is not None
    node.tell(FenceFound(own))
    assert node.state.phase is not Phase.FENCED
    node.tell(FenceFound(own, is_same_number=True))
    assert node.state.phase is Phase.FENCED


def test_a_vm_that_finds_its_start_overtaken_is_fenced() -> None:
    """It wanted a generation, and another start had claimed the run."""
    node = Node()
    node.join_one_of(2)
    node.tell(JobStarted("first"))
    node.tell(FenceFound(7))
    assert node.state.phase is Phase.FENCED


def with_a_part_on_its_way() -> Node:
    """Step 8 is whole; the manifest of this VM's part of step 20 is being written."""
    node = Node()
    node.begin()
    node.tell(TrainerProgress(1, 7, start_id="a"))
    node.seal_part(8)
    node.counted(node.commit_own_part(), 2)
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
        node.tell(JobStarted("second") if how == "another start" else FenceFound(4))
    node.tell(CommitDone(order.flush_id, CommitRef(3, 20)))
    assert node.state.last_complete == CommitRef(3, 8)


@pytest.mark.parametrize("claim_first", [True, False])
def test_a_job_that_begins_behind_the_newest_commit_owes_one(*, claim_first: bool) -> None:
    """Whether the ranks report their step before or after the claim."""
    node = Node()
    node.join_one_of(2, step=-1)
    node.tell(JobStarted("first"))
    events = [
        TrainerProgress(1, 4, start_id="a"),
        GenerationClaimed(3, CommitRef(2, 9), is_rollback=True),
    ]
    for event in events[::-1] if claim_first else events:
        node.tell(event)
    assert node.state.owes_checkpoint


def test_a_commit_from_before_the_request_is_no_answer_to_it() -> None:
    """The ranks began again under the same job start, behind a commit of its generation."""
    node = with_a_part_on_its_way()
    node.tell(CommitDone(node.last(CommitManifest).flush_id, CommitRef(3, 20)))
    node.counted(CommitRef(3, 20), 2)
    node.tell(TrainerProgress(1, 4, start_id="b"))
    node.now += 1
    node.notice(60)
    node.scan()
    node.tell(TrainerAgreed(node.request_id, 5))
    node.seal_part(5, request_id=node.request_id)
    node.wait(0.1)
    assert not any(verdict.startswith("SAFE") for verdict in node.final)


def test_ranks_that_began_again_behind_owe_until_they_have_passed_the_commit() -> None:
    """Under the same job start readers take the commit of the greatest step."""
    node = with_a_part_on_its_way()
    node.tell(CommitDone(node.last(CommitManifest).flush_id, CommitRef(3, 20)))
    node.counted(CommitRef(3, 20), 2)
    node.tell(TrainerProgress(1, 4, start_id="b"))
    assert node.state.owes_checkpoint
    node.tell(TrainerProgress(1, 21))
    node.seal_part(21)
    node.counted(node.commit_own_part(), 2)
    assert node.state.last_complete == CommitRef(3, 21)
    assert not node.state.owes_checkpoint


def test_a_job_on_one_vm_that_begins_again_behind_is_another_start() -> None:
    """Else nothing of it would be committed before it passes the newest commit."""
    node = Node()
    node.join_one_of(1, step=-1)
    node.scan()
    node.tell(GenerationClaimed(3, None, is_rollback=True))
    node.tell(TrainerProgress(1, 0, start_id="a"))
    node.tell(TrainerProgress(1, 9))
    node.seal(9, start_id="a")
    node.store_all()
    node.now += 1
    node.tell(TrainerProgress(1, 4, start_id="b"))
    node.scan()
    node.wait(1)
    assert len(node.all(JoinGeneration)) == 2
    node.tell(GenerationClaimed(4, CommitRef(3, 9), is_rollback=True))
    node.staging.clear()
    node.seal(5, "new", start_id="b")
    node.store_all()
    assert node.state.last_complete == CommitRef(4, 5)


def test_a_late_set_of_an_earlier_start_is_abandoned() -> None:
    """A rank of the same process was still writing it when the job began again."""
    node = with_a_part_on_its_way()
    node.tell(CommitDone(node.last(CommitManifest).flush_id, CommitRef(3, 20)))
    node.counted(CommitRef(3, 20), 2)
    node.tell(JobStarted("second"))
    node.tell(GenerationClaimed(4, CommitRef(3, 20), is_rollback=True))
    node.tell(TrainerProgress(1, 20, start_id="b"))
    late = replace(a_set(30, "late", start_id="a"), nodes=2)
    node.staging[:] = [late]
    node.scan()
    assert late.id in node.state.abandoned
    assert node.state.flight is None


@pytest.mark.fault("X01")
def test_a_doubtful_part_that_becomes_whole_at_a_claim_stays_doubtful() -> None:
    """This VM's GPU had failed before it was sealed; the job was started again meanwhile."""
    node = Node()
    node.begin()
    node.tell(TrainerProgress(1, 7, start_id="a"))
    gpu = GpuStatus(
        pci="0000:3b:00", index=0, health=GpuHealth.LOST, reason="Xid 79", since_mono_s=1.0
    )
    node.tell(GpusRead((gpu,)))
    node.staging.append(replace(a_set(20, start_id="a"), nodes=2))
    node.scan()
    ref = node.commit_own_part()
    node.tell(TrainerLeft(1, exited=True, reason="x"))
    node.tell(JobStarted("second"))
    node.tell(GenerationClaimed(4, ref, is_rollback=True))
    node.join_one_of(2, step=-1, pid=300)
    node.staging.clear()
    node.scan()
    node.notice(20)
    node.scan()
    node.wait(25)
    node.wait(0.1)
    assert node.final
    assert not any(verdict.startswith("SAFE") for verdict in node.final)


def test_a_rank_without_a_connection_keeps_its_start_at_a_job_start() -> None:
    """It has lost its connection for a moment; else all sets with its start would be abandoned."""
    node = Node()
    node.begin("first", step=-1)
    node.tell(TrainerProgress(1, 7, start_id="b"))
    node.leave(1, exited=False)
    node.tell(JobStarted("second"))
    assert "b" not in node.state.closed_starts
