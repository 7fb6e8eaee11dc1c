# SPDX-License-Identifier: Apache-2.0
"""The records of the bucket about the VM that this one replaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from swansong.protocol import Restoring
from swansong_bucket.errors import Permanent, Transient
from swansong_bucket.format import claim as claims
from swansong_bucket.format import farewell as farewells
from swansong_bucket.format import wall
from swansong_bucket.format.claim import ClaimObject
from swansong_bucket.format.farewell import Farewell
from swansong_bucket.loss_records import Conclusion, EvacuationRecord, LastReport, NoticeRecord
from swansong_bucket.model import CommitRef, Verdict
from swansongd.core.events import PredecessorDenied, PredecessorFound
from swansongd.core.starts import PREDECESSOR_SILENCE_S
from swansongd.core.state import Predecessor
from swansongd.restore import predecessor
from swansongd.restore.downloads import BUDGET_S
from swansongd.restore.predecessor import PredecessorWatch

from testkit import committed
from testkit.memory_store import MemoryStore
from testkit.restore_rig import RestoreRig
from testkit.story import Story
from testkit.waiting import until

pytestmark = pytest.mark.fault("OE04")

NOW_S = 1_795_000_000.0
TRAINS = LastReport(
    step=40, wall_s=NOW_S, step_s=1.0, ranks=1, saves_s=0.0, stall_s=0.0, is_over=False
)


class Vm(RestoreRig[MemoryStore]):
    """A daemon that has just started on the next VM; its clock stands still unless a test moves it."""

    def __init__(self, directory: Path) -> None:
        story = Story(claimed=False, handover=True)
        starts = replace(story.state.starts, predecessor=Predecessor())
        story.state = replace(story.state, starts=starts)
        self.now_mono_s = story.now
        self.found: list[PredecessorFound] = []
        self.own: set[str] = set()
        self.waits: list[str] = []
        self.denied: list[str] = []
        super().__init__(
            directory / "staging",
            MemoryStore(),
            story=story,
            monotonic=lambda: self.now_mono_s,
            post=self._post,
        )
        self.watch = PredecessorWatch(
            self.context,
            lambda claim: claim.start in self.own,
            self.waits.append,
            wall=lambda: NOW_S,
        )

    def _post(self, event: Any) -> None:
        if isinstance(event, PredecessorDenied):
            self.denied.append(event.reason)
        else:
            self.found.append(event)
        self.story.tell(event)

    def claim(self, generation: int = 1, vm: str = "") -> None:
        identity = {"vm": vm} if vm else {}
        claim = ClaimObject(
            run="r", generation=generation, start=f"s{generation}", identity=identity
        )
        self.store.put(self.context.keys.generation(generation), claims.encode(claim))

    def says(self, stamp: str = "1", generation: int = 1, **facts: Any) -> None:
        """The VM of a generation wrote a farewell."""
        record: dict[str, Any] = {"opened_wall_s": NOW_S - 20.0, "deadline_s": 120.0}
        record |= {"is_assumed": False, "is_ended": False, "timeline": ()}
        record |= {name: facts.pop(name) for name in tuple(facts) if name in record}
        notice = NoticeRecord(facts.pop("source", "aws.spot"), "terminate")
        evacuation = facts.pop("evacuation_id", "e")
        made = Farewell(
            run="r",
            generation=generation,
            conclusion=Conclusion(
                evacuation, Verdict.SAFE, "", CommitRef(1, 40), facts.pop("slack_s", 100.0)
            ),
            evacuation=EvacuationRecord(notices=(notice,), **record),
            training=TRAINS,
            written=wall.text(facts.pop("written_wall_s", NOW_S)),
        )
        assert not facts
        key = self.context.keys.farewell(generation, f"20261129T000000Z-{stamp}")
        self.store.put(key, farewells.encode(made))

    def look(self) -> PredecessorFound:
        return self.watch._look()


@pytest.fixture
def vm(tmp_path: Path) -> Iterator[Vm]:
    vm = Vm(tmp_path)
    yield vm
    vm.stop.set()


def test_a_vm_with_a_notice_trains_until_its_deadline(vm: Vm) -> None:
    """The newest commit is told with it."""
    vm.claim()
    committed.commit(vm.store, {"w": b"1"}, step=40)
    vm.says()
    assert vm.look() == PredecessorFound(1000.0, 1, 100.0, newest=CommitRef(1, 40))


@pytest.mark.parametrize(
    "history",
    [
        lambda vm: None,
        lambda vm: vm.claim(),
        lambda vm: (vm.claim(), vm.says(opened_wall_s=NOW_S - 121.0)),
        lambda vm: (vm.claim(), vm.says(is_ended=True)),
        lambda vm: (vm.claim(), vm.says(source="drill")),
        lambda vm: (vm.claim(), vm.says(evacuation_id="drill-1", source="peer")),
        lambda vm: (vm.claim(), vm.says(), vm.own.add("s1")),
        lambda vm: (vm.claim(), vm.says(), vm.claim(2)),
        lambda vm: (vm.claim(), vm.store.put(vm.context.keys.farewell(1, "x"), b"{}")),
    ],
    ids=[
        *("fresh run", "no notice", "deadline passed", "training over", "drill"),
        *("drill of a peer", "own start", "newer start", "damaged"),
    ],
)
def test_nothing_is_awaited(vm: Vm, history: Callable[[Vm], object]) -> None:
    """Nothing shows that another VM may still commit."""
    history(vm)
    assert vm.look() == PredecessorFound(vm.now_mono_s)


def test_farewells_of_one_second_have_an_order(vm: Vm) -> None:
    """Their own times have whole seconds, and their keys end at random: the time left counts."""
    vm.claim()
    for stamp, slack_s in (("9", 100.0), ("1", 99.9), ("5", 100.5)):
        vm.says(stamp, slack_s=slack_s, is_ended=slack_s == 99.9)
    assert vm.look() == PredecessorFound(vm.now_mono_s)


def test_a_vm_does_not_await_itself(vm: Vm) -> None:
    """Its record of claims may be lost: its trainer connects again with the start of the newest claim."""
    vm.claim()
    vm.says()
    vm.story.grants = False
    vm.story.scan()
    vm.story.join(start_id="s1")
    assert vm.look().left_s == 0.0


@pytest.mark.parametrize(("vms", "left_s"), [("aaa", 100.0), ("aba", 0.0), ("ab", 0.0), ("", 0.0)])
def test_a_trainer_that_started_again_is_awaited(vm: Vm, vms: str, left_s: float) -> None:
    """Its generation has no farewell: the last one of the same VM counts."""
    for generation, name in enumerate(vms or "  ", 1):
        vm.claim(generation, name.strip())
    vm.says(is_ended=True)  # no more: it trains again
    assert vm.look().left_s == left_s


def test_a_notice_during_a_drill_is_real(vm: Vm) -> None:
    """The evacuation keeps the id of the drill."""
    vm.claim()
    vm.says(evacuation_id="drill-1", source="aws.spot")
    assert vm.look().left_s == 100.0


def test_drills_hide_no_withdrawn_notice(vm: Vm) -> None:
    """A drill leaves a farewell each second after its deadline."""
    vm.claim()
    vm.says("0", deadline_s=None)
    for number in range(1, 30):
        vm.says(f"{number:02}", source="drill", evacuation_id="drill-1")
    assert not vm.look().is_leaving


def test_a_step_of_the_clock_changes_no_order(vm: Vm) -> None:
    """The opening is computed again for each farewell, from the clock of that moment."""
    vm.claim()
    vm.says("1", timeline=[{"phase": "notice", "at_s": 0.0}])
    entries = [{"phase": "notice", "at_s": 0.0}, {"phase": "withdrawn", "at_s": 1.0}]
    vm.says("2", deadline_s=None, timeline=entries, opened_wall_s=NOW_S - 20.001)
    assert not vm.look().is_leaving


def test_a_farewell_that_may_not_be_read_is_left_out(vm: Vm) -> None:
    """A missing right for one object must not block every start."""
    vm.claim()
    vm.says("1")
    vm.says("2", is_ended=True)

    def refuses(*words: str) -> None:
        if any(word.endswith("-2.json") for word in words):
            raise Permanent("403")

    vm.store.before = refuses
    assert vm.look().left_s == 100.0


def test_a_listing_that_is_refused_ends_the_wait(vm: Vm) -> None:
    """A wait for a missing right would block every start."""

    def refuses(*_: str) -> None:
        raise Permanent("403")

    vm.store.before = refuses
    vm.watch.start()
    until(lambda: vm.denied, what="the end")
    assert "403" in vm.denied[0]


def test_a_withdrawn_notice_leaves_no_deadline(vm: Vm) -> None:
    """The other VM is awaited while it writes records."""
    vm.claim()
    vm.says(deadline_s=None)
    assert vm.look() == PredecessorFound(1000.0, 1, PREDECESSOR_SILENCE_S, is_leaving=False)
    vm.now_mono_s += PREDECESSOR_SILENCE_S - 1
    assert vm.look().left_s == 1.0
    committed.commit(vm.store, {"w": b"1"}, step=40)
    assert vm.look().left_s == PREDECESSOR_SILENCE_S
    vm.now_mono_s += PREDECESSOR_SILENCE_S + 1
    assert vm.look() == PredecessorFound(vm.now_mono_s)


@pytest.mark.parametrize(("age_s", "left_s"), [(600.0, 300.0), (1000.0, 0.0), (-1e6, 900.0)])
def test_a_vm_that_died_long_ago_is_not_awaited(vm: Vm, age_s: float, left_s: float) -> None:
    """The silence began before the first look.  A record of the future counts from that look."""
    vm.claim()
    vm.says(deadline_s=None, written_wall_s=NOW_S - age_s)
    assert vm.look().left_s == left_s


def test_a_vm_that_outlives_an_assumed_deadline_is_awaited_while_it_reports_steps(vm: Vm) -> None:
    """As on GCP: a claim would fence a VM that trains for some more seconds."""
    vm.claim()
    vm.says(opened_wall_s=NOW_S - 121.0, written_wall_s=NOW_S - 1.0, is_assumed=True)
    assert vm.look().left_s == 2.0


def test_a_forged_deadline_is_limited(vm: Vm) -> None:
    """An attacker who may create objects can claim as well, but no error blocks a run for a year."""
    vm.claim()
    vm.says(deadline_s=3e7)
    assert vm.look().left_s == PREDECESSOR_SILENCE_S


def test_the_thread_looks_until_the_claim(vm: Vm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also through errors of the store: no claim succeeds meanwhile either."""
    monkeypatch.setattr(predecessor, "_LOOK_INTERVAL_S", 0.0)
    refused: list[str] = []

    def down(key: str, *_: str) -> None:
        refused.append(key)
        raise Transient("503")

    vm.claim()
    vm.says()
    vm.watch.start()
    until(lambda: "generation 1" in "".join(vm.waits[-1:]), what="a wait")
    vm.store.before = down
    until(lambda: len(refused) >= 2, what="two looks that fail")
    assert vm.state.starts.predecessor is not None
    vm.store.before = lambda *_: None
    vm.says("2", slack_s=1.0, is_ended=True)
    until(lambda: not vm.found[-1].generation, what="the end")
    looks = len(vm.found)
    vm.now_mono_s = vm.story.now = vm.story.now + 1
    vm.story.scan()
    vm.story.join()
    until(lambda: len(vm.found) > looks, what="another look")
    until(lambda: vm.state.starts.predecessor is None, what="the claim")


def test_a_trainer_waits_as_long_as_the_other_vm_trains(vm: Vm) -> None:
    """It learns what it waits for, and has the usual time for its claim afterwards."""
    vm.story.grants = False
    vm.story.scan()
    vm.story.join(start_id="a")
    asked = vm.ask(start_id="a")
    for _ in range(3):
        vm.resume.wait_for("generation 1")
        message = asked.messages.get(timeout=30)
        assert isinstance(message, Restoring)
        assert "generation 1" in message.waits_for
        vm.now_mono_s += 0.9 * BUDGET_S
        vm.ask().answer()  # the thread has looked at the query before
        assert asked.messages.empty()
    vm.now_mono_s += 0.2 * BUDGET_S
    assert "no generation" in asked.answer().error


def test_a_fault_ends_the_wait(vm: Vm, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim is the better error: it names what is wrong with the bucket."""

    def breaks() -> PredecessorFound:
        raise RuntimeError

    monkeypatch.setattr(vm.watch, "_look", breaks)
    vm.watch.start()
    until(lambda: vm.denied == ["RuntimeError: "], what="the end")
