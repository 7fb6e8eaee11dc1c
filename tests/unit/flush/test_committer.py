# SPDX-License-Identifier: Apache-2.0
"""The committer with a directory as its store: claims, commits and farewells."""

from __future__ import annotations

import json
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from swansong import bounds
from swansong_bucket.errors import NotFound, Stopped
from swansong_bucket.format import manifest
from swansong_bucket.format.claim import ClaimObject
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.loss_records import EvacuationRecord
from swansong_bucket.model import GPU_IS_SOUND, CommitRef, Health, Verdict
from swansong_bucket.runs import catalog, commit
from swansong_bucket.runs.signing import signed
from swansong_bucket.stores.base import ObjectInfo, ObjectStore
from swansong_bucket.stores.file.store import FileStore
from swansongd.core.events import (
    CheckComplete,
    ClaimGeneration,
    CommitDone,
    CommitFailed,
    CommitManifest,
    Conclude,
    FenceFound,
    GenerationClaimed,
    HistoryRead,
    PartsCounted,
    RunRead,
    SourceChanged,
)
from swansongd.flush import committer as committers
from swansongd.flush.background import Background
from swansongd.flush.claim_record import STARTS_MAX, ClaimRecord, RecordedStart
from swansongd.flush.claimant import Claimant
from swansongd.flush.committer import FAREWELLS_MAX, Committer
from swansongd.flush.known import KnownChunks
from swansongd.flush.store_health import StoreHealth
from swansongd.observe.facts import NewestDated, Observed

from testkit import committed
from testkit.other_users import needs_root
from testkit.records import KEY
from testkit.story import a_set
from testkit.waiting import until

KEYS = RunKeys("r")
NOW = "2030-01-01T00:00:00Z"
START = "start"


class CommitterRig:
    """A store, the daemon's own directory, and the committers that use them one after another."""

    def __init__(self, directory: Path) -> None:
        self.bucket = directory / "bucket"
        self.bucket.mkdir()
        self.own = directory / "own"
        self.own.mkdir()
        self.store = committed.file_store(self.bucket)
        self.events: queue.Queue[Observed] = queue.Queue()
        self.later_s = 0.0
        self.known = KnownChunks(
            self.own,
            run="r",
            store_url=self.store.url,
            is_data=KEYS.is_data,
            boottime=lambda: time.monotonic() + self.later_s,
        )
        self.health: list[Health] = []
        self.reason = ""
        self.now = NOW
        self.was_found = False
        """Whether the last claim that :meth:`next` returned had been made earlier."""
        self.is_urgent = False
        """Whether an evacuation is open."""
        self.tries = 0
        """Number of listings of the claims and of the commits."""
        self.before_put: Callable[[str], None] = lambda _key: None
        """Called by the committer's store with each key before it is written."""

    @contextmanager
    def committer(
        self,
        *,
        boot: str = "boot-1",
        store: ObjectStore | None = None,
        keys: RunKeys = KEYS,
        then: Callable[[Committer, Observed], None] = lambda _committer, _event: None,
    ) -> Iterator[Committer]:
        """A committer that runs; ``then`` is called with each event, in its thread."""

        def note(event: Observed) -> None:
            assert isinstance(event, SourceChanged)
            self.health.append(event.status.health)
            self.reason = event.status.reason

        def post(event: Observed) -> None:
            events.put(event)
            then(committer, event)

        opened = store or self._hooked()
        events = self.events = queue.Queue()  # an earlier committer may still post
        committer = Committer(
            opened,
            Background(opened, lambda: self.is_urgent),
            keys,
            post,
            Claimant(opened, keys, self.own, boot_id=boot, vm=boot, wall=lambda: self.now),
            known=self.known,
            wall=lambda: self.now,
            health=StoreHealth(note),
        )
        committer.start()
        try:
            yield committer
        finally:
            committer.close()

    def _hooked(self) -> ObjectStore:
        rig = self

        class Hooked(FileStore):
            def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
                rig.before_put(key)
                super().put(key, data, if_absent=if_absent)

            def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
                rig.tries += prefix in (KEYS.commits, KEYS.generations)
                return super().list(prefix, after=after)

        return Hooked(self.store.url)

    def is_failing(self) -> bool:
        """Whether the health of the store is not OK."""
        return bool(self.health) and self.health[-1] is not Health.OK

    def next(self) -> Observed:
        """The next event, except those that report earlier generations."""
        while True:
            event = self.events.get(timeout=60)
            if isinstance(event, GenerationClaimed):
                self.was_found = event.is_found
                return replace(event, is_found=False)
            if not isinstance(event, RunRead | HistoryRead | NewestDated):
                return event

    def claim(self, committer: Committer, start_id: str = START) -> GenerationClaimed:
        """Claim for a start; returns the answer, without those for other starts."""
        committer.claim(ClaimGeneration(start_id))
        while True:
            event = self.next()
            assert isinstance(event, GenerationClaimed), event
            if event.start_id == start_id:
                return event

    @contextmanager
    def outage(self) -> Iterator[None]:
        """Replace the directory of the store by a file for a while."""
        hidden = self.bucket.with_name("hidden")
        os.rename(self.bucket, hidden)
        self.bucket.touch()
        yield
        self.bucket.unlink()
        os.rename(hidden, self.bucket)

    def claimed(self, start_id: str = START, **options: Any) -> int:
        """Start a committer, claim for this start, and close the committer."""
        with self.committer(**options) as committer:
            return self.claim(committer, start_id).generation

    def started(self, **options: Any) -> list[Observed]:
        """The events of a committer that gets no request."""
        with self.committer(**options) as committer:
            assert committer.drain(10)
        found = []
        while not self.events.empty():
            found.append(self.events.get())
        return [event for event in found if not isinstance(event, HistoryRead | NewestDated)]

    def record(self, *starts: RecordedStart) -> None:
        """Replace the record by that of an earlier daemon."""
        ClaimRecord("r", self.store.url, starts).save(self.own)

    def recorded(self) -> tuple[RecordedStart, ...]:
        found = ClaimRecord.load(self.own)
        assert found is not None
        return found.starts


@pytest.fixture
def rig(tmp_path: Path) -> CommitterRig:
    return CommitterRig(tmp_path)


LOST = Conclude("e1", Verdict.LOST, "nothing was staged", None, 0.0)
OPENED = EvacuationRecord(opened_wall_s=1893456000.0)
SAFE = Conclude("e1", Verdict.SAFE, "it is committed", CommitRef(1, 10), 1.0)


def a_request(
    step: int = 10, nonce: str = "abc", *, generation: int = 1, nodes: int = 1
) -> CommitManifest:
    staged = replace(a_set(step, nonce), nodes=nodes)
    return CommitManifest(f"f{step}", staged, (), generation, None)


def of_another_vm(rig: CommitterRig, start_id: str = "elsewhere") -> int:
    """Claim the next generation for a start of another VM."""
    return commit.claim_generation(rig.store, KEYS, start_id=start_id, identity={}).generation


def stored(rig: CommitterRig, below: str) -> list[str]:
    return [info.key for info in rig.store.list(below)]


# ---------------------------------------------------------------- claims


def test_without_a_request_nothing_is_claimed(rig: CommitterRig) -> None:
    """A daemon without training writes no object, whatever the run has."""
    assert rig.started() == [RunRead(None)]
    of_another_vm(rig)
    committed.commit(rig.store, {"w": b"1"}, step=70)
    before = committed.tree(rig.bucket)
    assert rig.started() == [RunRead(CommitRef(1, 70), "elsewhere")]
    assert committed.tree(rig.bucket) == before


def test_each_start_claims_a_generation(rig: CommitterRig) -> None:
    """In the order of the requests; a repeated request finds the generation of its start."""
    with rig.committer() as committer:
        assert rig.claim(committer, "a") == GenerationClaimed("a", 1, None)
        assert rig.claim(committer, "b") == GenerationClaimed("b", 2, None)
        assert not rig.was_found
        assert rig.claim(committer, "b") == GenerationClaimed("b", 2, None)
        assert not rig.was_found, "it is in the record"
    assert stored(rig, KEYS.generations) == [KEYS.generation(1), KEYS.generation(2)]


def test_without_its_record_an_early_start_gets_no_second_generation(rig: CommitterRig) -> None:
    """A start that is known from its sets only may have claimed long ago: it keeps its place."""
    with rig.committer() as committer:
        for number in range(1, 11):
            assert rig.claim(committer, f"start-{number}").generation == number
    (rig.own / "claim.json").unlink()
    with rig.committer() as committer:
        committer.claim(ClaimGeneration("start-1", is_live=False))
        assert rig.next() == GenerationClaimed("start-1", 1, None)
        committer.claim(ClaimGeneration("unclaimed", is_live=False, later=("start-10",)))
        assert rig.next() == FenceFound(10, start_id="unclaimed")
        committer.claim(ClaimGeneration("start-9", is_live=False, later=("start-10",)))
        assert rig.next() == GenerationClaimed("start-9", 9, None)
        assert rig.claim(committer, "start-10").generation == 10
        assert rig.was_found
    assert len(stored(rig, KEYS.generations)) == 10


@pytest.mark.parametrize("nodes", [1, 2])
def test_only_a_job_over_several_vms_takes_the_run_back(rig: CommitterRig, nodes: int) -> None:
    """A trainer that starts again on an overtaken VM is fenced, so two VMs never take turns."""
    with rig.committer() as committer:
        assert rig.claim(committer, "a") == GenerationClaimed("a", 1, None)
        assert of_another_vm(rig) == 2
        committer.claim(ClaimGeneration("b", nodes))
        if nodes == 1:
            assert rig.next() == FenceFound(2, start_id="b")
        else:
            assert rig.next() == GenerationClaimed("b", 3, None)


def test_without_its_record_a_vm_is_not_fenced_by_its_own_claim(rig: CommitterRig) -> None:
    """The later start is known from its claim only, which names this VM: the earlier one claims and commits.

    Another boot is another VM.
    """
    with rig.committer() as committer:
        assert [rig.claim(committer, start).generation for start in ("a", "b")] == [1, 2]
    (rig.own / "claim.json").unlink()
    with rig.committer() as committer:
        assert rig.claim(committer, "a") == GenerationClaimed("a", 1, None)
        committer.commit(a_request())
        assert rig.next() == CommitDone("f10", CommitRef(1, 10))
    (rig.own / "claim.json").unlink()
    with rig.committer(boot="boot-2") as committer:
        committer.claim(ClaimGeneration("a"))
        assert rig.next() == FenceFound(2, start_id="a")


def test_without_its_record_a_vm_is_not_a_lost_one(rig: CommitterRig) -> None:
    """The history counts the other VM alone."""
    assert of_another_vm(rig) == 1
    assert rig.claimed() == 2
    (rig.own / "claim.json").unlink()
    with rig.committer():
        events = iter(lambda: rig.events.get(timeout=60), None)
        history = next(event for event in events if isinstance(event, HistoryRead))
    assert history == HistoryRead(0.0, 1)


def test_a_withdrawn_claim_is_not_retried(rig: CommitterRig) -> None:
    """The training has ended during an outage; the same start may claim later."""
    with rig.committer() as committer:
        assert committer.drain(10)
        with rig.outage():
            committer.claim(ClaimGeneration("a"))
            until(rig.is_failing, what="the first failure")
            committer.withdraw_claim()
            assert committer.drain(10)
        assert not rig.is_failing(), "nothing needs the claim"
        assert not stored(rig, KEYS.generations)
        assert rig.claim(committer, "a") == GenerationClaimed("a", 1, None)


def test_a_claim_that_is_withdrawn_during_its_create_gets_no_further_number(
    rig: CommitterRig,
) -> None:
    """The create is late: another VM has the run by then, which a further claim would fence."""

    def create_late(_key: str) -> None:
        rig.before_put = lambda _key: None
        assert of_another_vm(rig) == 1
        committer.withdraw_claim()

    rig.before_put = create_late
    with rig.committer() as committer:
        committer.claim(ClaimGeneration("a"))
        assert committer.drain(10)
        assert stored(rig, KEYS.generations) == [KEYS.generation(1)]
        assert rig.claim(committer, "a") == GenerationClaimed("a", 2, None)


def test_the_claim_reports_the_newest_whole_commit_and_its_start(rig: CommitterRig) -> None:
    """Of any generation; the start is unknown if its claim cannot be read."""
    of_another_vm(rig)
    committed.commit(rig.store, {"w": b"1"}, generation=1, step=70)
    with rig.committer() as committer:
        assert rig.claim(committer, "a") == GenerationClaimed("a", 2, CommitRef(1, 70), "elsewhere")
        rig.store.delete(KEYS.generation(1))
        rig.store.put(KEYS.generation(1), b"{}")
        assert rig.claim(committer, "b") == GenerationClaimed("b", 3, CommitRef(1, 70), "")


def test_the_claim_reports_a_commit_that_was_made_until_the_claim(rig: CommitterRig) -> None:
    """An earlier VM commits while this one claims: the choice of the checkpoint must not miss it."""

    def commit_late(key: str) -> None:
        if key == KEYS.generation(2):
            committed.commit(rig.store, {"w": b"1"}, generation=1, step=80)

    of_another_vm(rig)
    rig.before_put = commit_late
    with rig.committer() as committer:
        assert rig.claim(committer).newest == CommitRef(1, 80)


@pytest.mark.parametrize(
    ("now", "age_s"), [("2030-01-01T01:00:00Z", 3600.0), ("2029-01-01T00:00:00Z", 0.0)]
)
def test_the_age_of_the_newest_commit_is_posted(rig: CommitterRig, now: str, age_s: float) -> None:
    """NewestDated contains the age according to the manifest; 0 if the clocks make it negative."""
    committed.commit(rig.store, {"w": b"1"}, generation=4, step=70)
    rig.now = now
    with rig.committer():
        events = iter(lambda: rig.events.get(timeout=60), None)
        dated = next(event for event in events if isinstance(event, NewestDated))
    assert dated == NewestDated(CommitRef(4, 70), age_s)


@pytest.mark.parametrize(("read", "posted"), [("history", HistoryRead), ("load_node", NewestDated)])
def test_a_notice_only_defers_the_reads_of_earlier_commits(
    rig: CommitterRig, monkeypatch: pytest.MonkeyPatch, read: str, posted: type[Observed]
) -> None:
    """They wait for the end of the evacuation, and one that a notice has ended is repeated."""
    committed.commit(rig.store, {"w": b"1"})
    if posted is HistoryRead:
        of_another_vm(rig)
    monkeypatch.setattr(committers, "_READ_RETRY_S", 0.01)
    waits: list[float | None] = []
    get, reads = queue.Queue.get, getattr(catalog, read)

    def wait(jobs: Any, block: bool = True, timeout: float | None = None) -> Any:
        waits.append(timeout)
        return get(jobs, block, timeout)

    def stopped_once(*args: Any) -> Any:
        monkeypatch.setattr(catalog, read, reads)
        raise Stopped("a notice")

    monkeypatch.setattr(queue.Queue, "get", wait)
    rig.is_urgent = True
    with rig.committer():
        until(lambda: 0.01 in waits, what="the wait for the end of the evacuation")
        monkeypatch.setattr(catalog, read, stopped_once)
        rig.is_urgent = False
        while not isinstance(rig.events.get(timeout=60), posted):
            pass
    assert getattr(catalog, read) is reads


def test_a_trainer_waits_for_no_history(rig: CommitterRig) -> None:
    """A claim that is requested while the run is read comes before the reads of earlier commits."""
    of_another_vm(rig)
    committed.commit(rig.store, {"w": b"1"}, generation=1, step=70)
    assert rig.claimed("before") == 2

    def restart(committer: Committer, event: Observed) -> None:
        if isinstance(event, GenerationClaimed) and event.start_id == "before":
            committer.claim(ClaimGeneration(START))

    with rig.committer(then=restart):
        events = [rig.events.get(timeout=60) for _ in range(4)]
    kinds = [type(event) for event in events]
    assert kinds == [RunRead, GenerationClaimed, GenerationClaimed, HistoryRead]


def test_a_newer_request_ends_the_retries_of_an_older_one(rig: CommitterRig) -> None:
    """The training was started again during an outage: only the newer start claims."""
    with rig.committer() as committer:
        assert committer.drain(10)
        with rig.outage():
            committer.claim(ClaimGeneration("a"))
            until(rig.is_failing, what="the first failure")
            committer.claim(ClaimGeneration("b"))
        committer.expedite()
        assert rig.next() == GenerationClaimed("b", 1, None)
        assert committer.drain(10)
        assert not any(isinstance(event, GenerationClaimed) for event in rig.events.queue)


# ---------------------------------------------------------------- the record of claims


def test_a_restarted_daemon_continues_under_its_generation(rig: CommitterRig) -> None:
    """Same boot, URL and run: the recorded claim is used again, also at the next request of its start."""
    assert rig.claimed() == 1
    assert rig.started() == [RunRead(None), GenerationClaimed(START, 1, None)]
    assert rig.claimed() == 1
    assert stored(rig, KEYS.generations) == [KEYS.generation(1)]


def test_the_starts_are_recorded_in_order(rig: CommitterRig) -> None:
    """The newest last, with their boots; the oldest of too many are forgotten."""
    many = [RecordedStart(f"old-{number}", "boot-0", number) for number in range(1, STARTS_MAX + 1)]
    rig.record(*many)
    commit.claim_generation(rig.store, KEYS, start_id=many[-1].id, identity={}, gap=STARTS_MAX - 1)
    generation = rig.claimed()
    assert rig.recorded() == (*many[1:], RecordedStart(START, "boot-1", generation))
    with rig.committer() as committer:
        last = committer.starts[-1]
        assert (last.id, last.generation, last.is_of_boot) == (START, generation, True)
        assert not any(start.is_of_boot for start in committer.starts[:-1])


def test_a_start_that_was_overtaken_before_its_claim_gets_none_after_a_restart(
    rig: CommitterRig,
) -> None:
    """Its generation would be greater than that of the later start, whose training it precedes."""
    assert rig.claimed("first") == 1
    rig.record(*rig.recorded(), RecordedStart("overtaken", "boot-1"))
    assert rig.claimed("last") == 2
    assert [each.id for each in rig.recorded()] == ["first", "overtaken", "last"]
    with rig.committer() as committer:
        assert [start.is_open for start in committer.starts] == [True, False, True]


def test_a_claim_that_is_found_late_is_recorded_at_its_place(rig: CommitterRig) -> None:
    """The record of an earlier start was lost, and its sets are still in staging."""
    assert [rig.claimed("before"), rig.claimed()] == [1, 2]
    rig.record(RecordedStart(START, "boot-1", 2))
    assert rig.claimed("before") == 1
    assert [each.id for each in rig.recorded()] == ["before", START]


@pytest.mark.fault("G05")
def test_a_daemon_that_was_killed_during_its_claim_finds_it(rig: CommitterRig) -> None:
    """The claim was made, and recorded as requested only: the next request finds it, and uses up no number.

    Until then it does not fence the start before.
    """
    assert rig.claimed("before") == 1
    rig.record(*rig.recorded(), RecordedStart(START, "boot-1"))
    assert of_another_vm(rig, START) == 2
    assert rig.started() == [RunRead(None), GenerationClaimed("before", 1, None)]
    assert rig.claimed() == 2
    assert rig.recorded()[-1] == RecordedStart(START, "boot-1", 2)


def test_a_start_is_recorded_before_its_claim(rig: CommitterRig) -> None:
    """A daemon that is killed in between knows the start as one of this VM."""

    before: list[tuple[RecordedStart, ...]] = []
    rig.before_put = lambda _key: before.append(rig.recorded())
    with rig.committer() as committer:
        committer.claim(ClaimGeneration(START, nodes=2))
        assert rig.next() == GenerationClaimed(START, 1, None)
    assert before[0] == (RecordedStart(START, "boot-1", nodes=2),)


def test_a_requested_claim_is_left_to_its_ranks(rig: CommitterRig) -> None:
    """Their training may have ended, and another VM taken over: a restart alone fences no VM.

    Meanwhile the sets of the start before may be committed, unless the job has several VMs.
    """
    assert rig.claimed("a") == 1
    claimed = rig.recorded()
    rig.record(*claimed, RecordedStart("b", "boot-1"))
    assert rig.started() == [RunRead(None), GenerationClaimed("a", 1, None)]
    rig.record(*claimed, RecordedStart("b", "boot-1", nodes=2))
    assert rig.started() == [RunRead(None)]
    assert stored(rig, KEYS.generations) == [KEYS.generation(1)]


def test_the_starts_of_an_earlier_boot_resume_only_if_nothing_newer_was_claimed(
    rig: CommitterRig,
) -> None:
    """Their sets survived on the disk; a disk may also be a copy, and its VM may run."""
    assert rig.claimed() == 1
    with rig.committer(boot="boot-2") as committer:
        assert rig.next() == GenerationClaimed(START, 1, None)
        committer.commit(a_request())
        assert rig.next() == CommitDone("f10", CommitRef(1, 10))
    assert of_another_vm(rig) == 2
    assert rig.started(boot="boot-2") == [RunRead(CommitRef(1, 10), START)]
    assert rig.claimed("next", boot="boot-2") == 3


def test_another_run_or_store_claims_another_generation(rig: CommitterRig, tmp_path: Path) -> None:
    """The record is valid for one run and one store URL."""
    rig.store.put(KEYS.generation(6), b"{}")
    assert rig.claimed() == 7
    assert rig.claimed(keys=RunKeys("other")) == 1
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert rig.claimed(store=FileStore(f"file://{elsewhere}")) == 1


def a_body(**changes: Any) -> bytes:
    """A record of a claim that the store has, with changes of the start."""
    start: dict[str, Any] = {"id": "s", "boot_id": "boot-1", "generation": 1, "nodes": 1}
    start |= {"process_ns": 0, "began_ticks": 0}
    body = {"run": "r", "store_url": "URL", "store_id": "", "starts": [start | changes]}
    return json.dumps(body).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[1]",
        b"{}",
        b'{"run": "r"',
        b'{"run": "r", "store_url": "URL", "starts": 7}',
        b'{"run": "r", "store_url": "URL", "starts": [7]}',
        b'{"run": "r", "store_url": "URL", "starts": [{}]}',
        a_body(id=""),
        a_body(id="x" * 1000),
        a_body(id=None),
        a_body(boot_id=7),
        a_body(generation="1"),
        a_body(generation=True),
        a_body(generation=-1),
        a_body(generation=10**400),
        a_body(nodes=0),
        a_body(began_ticks=-1),
        a_body().replace(b'"starts": [', b'"starts": [' + b"{}," * STARTS_MAX),
        a_body().replace(b": 1", b": 1e999"),
        b"[" * 100_000,
        b" " * 70_000 + b"{}",
    ],
)
def test_an_invalid_record_counts_as_none(rig: CommitterRig, content: bytes) -> None:
    """The daemon resumes no claim, whatever the file contains, and the next claim replaces the file."""
    assert of_another_vm(rig, "s") == 1
    (rig.own / "claim.json").write_bytes(content.replace(b"URL", rig.store.url.encode()))
    assert rig.started() == [RunRead(None)]
    assert rig.claimed() == 2
    assert rig.recorded() == (RecordedStart(START, "boot-1", 2),)


def test_a_valid_record_resumes_its_claim(rig: CommitterRig) -> None:
    """So each invalid one above differs from it by its fault alone."""
    assert of_another_vm(rig, "s") == 1
    (rig.own / "claim.json").write_bytes(a_body().replace(b"URL", rig.store.url.encode()))
    assert rig.started() == [RunRead(None), GenerationClaimed("s", 1, None)]


@pytest.mark.fault("S25")
def test_a_record_counts_only_if_the_claim_in_the_store_names_its_start(rig: CommitterRig) -> None:
    """A forged record leads to a new generation and a log line, not to the generation of another VM."""
    of_another_vm(rig)
    rig.record(RecordedStart("forged", "boot-1", 1))
    with capture_logs() as logs:
        assert rig.started() == [RunRead(None), GenerationClaimed("forged", 2, None)]
    (line,) = [line for line in logs if line["event"] == "claim_record_refused"]
    assert line["claim"] == f"{rig.store.url}/{KEYS.generation(1)}"
    assert rig.claimed("forged") == 2


@pytest.mark.parametrize("content", [b"{}", b"{", b"\xff", b'{"start": "start"}'])
def test_a_record_of_an_invalid_claim_is_refused(rig: CommitterRig, content: bytes) -> None:
    """The claim must contain the run, the generation and the start of the record."""
    rig.store.put(KEYS.generation(1), content)
    rig.record(RecordedStart(START, "boot-1", 1))
    assert rig.claimed() == 2


def test_a_record_is_refused_after_the_bucket_was_emptied(rig: CommitterRig) -> None:
    """All objects were deleted while the daemon was stopped: its start claims the first generation again.

    A commit that was requested under the old number is repeated under the new one.
    """
    of_another_vm(rig)
    assert rig.claimed() == 2
    for key in stored(rig, ""):
        rig.store.delete(key)
    with rig.committer() as committer:
        assert rig.next() == GenerationClaimed(START, 1, None)
        committer.commit(a_request(generation=2))
        failed = rig.next()
        assert isinstance(failed, CommitFailed)
        assert not failed.conflict
        committer.commit(a_request(generation=1))
        assert rig.next() == CommitDone("f10", CommitRef(1, 10))
    assert rig.claimed() == 1


def test_no_start_of_an_earlier_boot_claims_after_the_bucket_was_emptied(rig: CommitterRig) -> None:
    """Its training has ended with that boot."""
    assert rig.claimed() == 1
    rig.store.delete(KEYS.generation(1))
    assert rig.started(boot="boot-2") == [RunRead(None)]
    assert stored(rig, "") == []


def test_a_record_is_kept_during_an_outage_of_the_store(rig: CommitterRig) -> None:
    """After the outage the daemon continues under the recorded generation."""
    assert rig.claimed() == 1
    with ExitStack() as committer:
        with rig.outage():
            working = committer.enter_context(rig.committer())
            until(lambda: rig.health, what="the first failure")
        working.expedite()
        assert rig.next() == GenerationClaimed(START, 1, None)


@needs_root
def test_a_record_of_another_user_counts_as_none(rig: CommitterRig) -> None:
    """So does a record in a directory of another user."""
    assert rig.claimed() == 1
    os.chown(rig.own / "claim.json", 65534, 65534)
    assert rig.started() == [RunRead(None)]
    assert rig.claimed() == 1
    os.chown(rig.own, 65534, 65534)
    assert rig.started() == [RunRead(None)]


def test_a_restarted_daemon_is_fenced_by_a_newer_claim_of_another_vm(rig: CommitterRig) -> None:
    """It has claimed in this boot, so it posts FenceFound and claims nothing."""
    assert rig.claimed() == 1
    assert of_another_vm(rig) == 2
    assert rig.started() == [FenceFound(2), RunRead(None)]
    assert stored(rig, KEYS.generations)[-1] == KEYS.generation(2)


def test_a_job_over_several_vms_may_continue_alone_on_an_overtaken_vm(rig: CommitterRig) -> None:
    """Its launcher decides who trains, so the next start claims, also after a restart of the daemon."""
    with rig.committer() as committer:
        committer.claim(ClaimGeneration(START, nodes=2))
        assert rig.next() == GenerationClaimed(START, 1, None)
    assert of_another_vm(rig) == 2
    with rig.committer() as committer:
        assert rig.next() == FenceFound(2)
        assert rig.claim(committer, "alone").generation == 3


def test_a_claim_that_cannot_be_recorded_is_still_valid(rig: CommitterRig) -> None:
    """The next daemon does not know the start until its ranks ask again."""
    shutil.rmtree(rig.own)
    assert rig.claimed() == 1
    assert rig.started() == [RunRead(None)]
    assert rig.claimed() == 1


# ---------------------------------------------------------------- claims that fail


@pytest.mark.fault("S25")
def test_a_claim_with_the_last_generation_blocks_claims_until_it_is_deleted(
    rig: CommitterRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log contains one line, and the health names the object; after its deletion the claim succeeds."""
    monkeypatch.setattr(committers, "_CLAIM_RETRY_S", 0.001)
    monkeypatch.setattr(committers, "_CLAIM_RETRY_S_MAX", 0.001)
    planted = KEYS.generation(bounds.GENERATION_MAX)
    rig.store.put(planted, b"{}")
    with capture_logs() as logs, rig.committer() as committer:
        committer.claim(ClaimGeneration(START))
        until(rig.is_failing, what="the first failure")
        tries = rig.tries
        until(lambda: rig.tries > tries + 2, what="another try")
        assert stored(rig, "") == [planted]
        assert planted in rig.reason
        rig.store.delete(planted)
        assert rig.next() == GenerationClaimed(START, 1, None)
    (line,) = [line for line in logs if line["event"] == "claim_refused"]
    assert planted in line["hint"]


def test_the_claim_is_retried_and_a_notice_cuts_its_backoff_short(
    rig: CommitterRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``expedite`` ends a pause of 1000 s.  The health is not OK in the outage, and OK after the claim."""
    monkeypatch.setattr(committers, "_CLAIM_RETRY_S", 1000.0)
    monkeypatch.setattr(committers, "_CLAIM_RETRY_S_MAX", 1000.0)
    with rig.committer() as committer:
        assert committer.drain(10)
        with rig.outage():
            committer.claim(ClaimGeneration(START))
            until(rig.is_failing, what="the first failure")
        committer.expedite()
        assert rig.next() == GenerationClaimed(START, 1, None)
        assert rig.health[-1:] == [Health.OK]


def test_a_claim_is_retried_at_short_intervals_only_during_an_evacuation(rig: CommitterRig) -> None:
    """The backoff grows to 10 s, is 0.5 s while an evacuation is open, and 10 s after its withdrawal."""
    waits: list[float | None] = []

    class Wake(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout)
            rig.is_urgent = len(waits) in (5, 6)
            return super().wait(0.0)

    with rig.committer() as committer:
        assert committer.drain(10)
        committer._wake = Wake()
        with rig.outage():
            committer.claim(ClaimGeneration(START))
            until(lambda: len(waits) > 9, what="the tenth wait")
        assert rig.next() == GenerationClaimed(START, 1, None)
    assert waits[:9] == [2.0, 4.0, 8.0, 10.0, 10.0, 0.5, 0.5, 10.0, 10.0]


# ---------------------------------------------------------------- requests


@pytest.fixture
def working(rig: CommitterRig) -> Iterator[Committer]:
    """A committer that has claimed generation 1."""
    with rig.committer() as committer:
        assert rig.claim(committer) == GenerationClaimed(START, 1, None)
        yield committer


def test_a_commit_creates_the_manifest_and_posts_commit_done(
    rig: CommitterRig, working: Committer
) -> None:
    """The manifest has the values of the request."""
    working.commit(a_request())
    assert rig.next() == CommitDone("f10", CommitRef(1, 10))
    (key,) = stored(rig, KEYS.commits)
    made = manifest.decode(rig.store.get(key))
    assert (made.run, made.generation, made.step, made.nonce) == ("r", 1, 10, "abc")
    assert made.created == NOW


def test_another_set_of_the_same_step_is_a_conflict(rig: CommitterRig, working: Committer) -> None:
    """The first manifest is not replaced."""
    working.commit(a_request())
    rig.next()
    working.commit(a_request(nonce="xyz"))
    event = rig.next()
    assert isinstance(event, CommitFailed)
    assert (event.conflict, event.kind) == (True, "exists")
    (key,) = stored(rig, KEYS.commits)
    assert manifest.decode(rig.store.get(key)).nonce == "abc"


def test_a_failure_of_the_store_is_not_a_conflict(rig: CommitterRig, working: Committer) -> None:
    """CommitFailed without a conflict; after the outage the same request succeeds."""
    with rig.outage():
        working.commit(a_request())
        event = rig.next()
    assert isinstance(event, CommitFailed)
    assert not event.conflict
    assert Health.OK not in rig.health[-1:]
    working.commit(a_request())
    assert rig.next() == CommitDone("f10", CommitRef(1, 10))
    assert rig.health[-1:] == [Health.OK]


def test_a_request_that_raises_an_unexpected_error_gets_an_answer(
    rig: CommitterRig, working: Committer
) -> None:
    """A fault of the daemon fails one commit; the thread continues."""

    def fail(key: str) -> None:
        if key == KEYS.commit(CommitRef(1, 5), 0, 1):
            raise TypeError("a fault in the code")

    rig.before_put = fail
    working.commit(a_request(5))
    event = rig.next()
    assert isinstance(event, CommitFailed)
    assert not event.conflict
    working.commit(a_request(6))
    assert rig.next() == CommitDone("f6", CommitRef(1, 6))


def test_a_set_that_no_manifest_can_contain_is_a_conflict(
    rig: CommitterRig, working: Committer
) -> None:
    """The store gets no object of it; the next set is committed."""
    request = a_request(5)
    working.commit(replace(request, staged=replace(request.staged, health={"loss": float("inf")})))
    event = rig.next()
    assert isinstance(event, CommitFailed)
    assert event.conflict
    assert stored(rig, KEYS.commits) == []
    assert Health.OK in rig.health[-1:]
    working.commit(a_request(6))
    assert rig.next() == CommitDone("f6", CommitRef(1, 6))


def test_the_first_commit_of_a_daemon_is_read_back(rig: CommitterRig) -> None:
    """If the GET of the manifest fails, the commit fails.  After one success, manifests are not read back."""

    class Forgetful(FileStore):
        gets = 0
        forgets = True

        def get(self, key: str) -> bytes:
            self.gets += "commits" in key
            if self.forgets and "commits" in key:
                raise NotFound(key)
            return super().get(key)

    store = Forgetful(rig.store.url)
    with rig.committer(store=store) as committer:
        rig.claim(committer)
        for _ in range(3):
            committer.commit(a_request())
            event = rig.next()
            assert isinstance(event, CommitFailed)
            assert not event.conflict
        store.forgets = False
        committer.commit(a_request())
        assert rig.next() == CommitDone("f10", CommitRef(1, 10))
        gets = store.gets
        committer.commit(a_request(11))
        assert rig.next() == CommitDone("f11", CommitRef(1, 11))
        assert store.gets == gets


@pytest.mark.fault("S25")
def test_with_a_signing_key_unsigned_objects_neither_fence_nor_block(rig: CommitterRig) -> None:
    """A higher claim, an unknown object and a higher commit are logged, and the commit succeeds."""
    view = signed(rig.store, KEY)
    with rig.committer(store=view) as committer, capture_logs() as logs:
        rig.claim(committer)
        rig.store.put(KEYS.generation(bounds.GENERATION_MAX), b"{}")
        rig.store.put(f"{KEYS.generations}junk", b"")
        committed.commit(rig.store, {"w": b"1"}, generation=99_999_999, step=70)
        committer.commit(a_request())
        assert rig.next() == CommitDone("f10", CommitRef(1, 10))
        committer.check_fence()
        assert committer.drain(10)
        assert not any(isinstance(event, FenceFound) for event in rig.events.queue)
    assert any(line["event"] == "unsigned_objects_ignored" for line in logs)
    claimed = GenerationClaimed(START, 1, CommitRef(1, 10), START)
    assert claimed in rig.started(store=view)
    assert rig.claimed("next", store=view) == 2


def test_a_fenced_vm_commits_nothing(rig: CommitterRig, working: Committer) -> None:
    """The committer posts FenceFound, and writes no manifest."""
    rig.store.put(KEYS.generation(3), b"{}")
    working.commit(a_request())
    assert rig.next() == FenceFound(3)
    assert not stored(rig, KEYS.commits)


def test_a_set_of_an_earlier_start_is_committed_in_its_place(
    rig: CommitterRig, working: Committer
) -> None:
    """On one VM, also after a restart of the daemon; below the commits of the later start."""
    rig.claim(working, "next")
    working.commit(a_request(5, generation=2))
    assert rig.next() == CommitDone("f5", CommitRef(2, 5))
    working.commit(a_request(99, generation=1))
    assert rig.next() == CommitDone("f99", CommitRef(1, 99))
    with rig.committer() as restarted:
        assert rig.next() == GenerationClaimed("next", 2, CommitRef(2, 5), "next")
        restarted.commit(a_request(100, generation=1))
        assert rig.next() == CommitDone("f100", CommitRef(1, 100))


def test_over_several_vms_a_set_of_an_earlier_start_is_void(
    rig: CommitterRig, working: Committer
) -> None:
    """The later start of this VM holds the run, so the VM is not fenced."""
    rig.claim(working, "next")
    working.commit(a_request(99, generation=1, nodes=2))
    failed = rig.next()
    assert isinstance(failed, CommitFailed)
    assert failed.conflict
    assert not stored(rig, KEYS.commits)


def test_a_check_of_the_fence_reports_only_newer_generations(
    rig: CommitterRig, working: Committer
) -> None:
    """The generations of the starts of this VM are not reported, and nothing before the first one."""
    rig.claim(working, "next")
    working.check_fence()
    assert working.drain(10)
    assert not any(isinstance(event, FenceFound) for event in rig.events.queue)
    with rig.committer() as restarted:
        assert rig.next() == GenerationClaimed("next", 2, None)
        rig.store.put(KEYS.generation(3), b"{}")
        restarted.check_fence()
        assert rig.next() == FenceFound(3)
    (rig.own / "claim.json").unlink()
    with rig.committer() as idle:
        idle.check_fence()
        assert idle.drain(10)
    assert not any(isinstance(event, FenceFound) for event in rig.events.queue)


def test_the_health_of_the_store_recovers_without_a_commit(
    rig: CommitterRig, working: Committer
) -> None:
    """Looks at other VMs failed in an outage, such as after a suspension, and the training has ended."""
    count = CheckComplete(CommitRef(1, 10), 2, None)
    with rig.outage():
        working.check_complete(count)
        working.check_fence()
        assert working.drain(10)
        assert rig.is_failing()
    working.check_complete(count)
    assert working.drain(10)
    assert not rig.is_failing()


def test_two_farewells_of_one_second_have_different_keys(
    rig: CommitterRig, working: Committer
) -> None:
    """The clock of this test does not advance; both verdicts are stored."""
    for conclusion in (LOST, SAFE):
        working.farewell(1, conclusion, OPENED)
    assert working.drain(10)
    keys = stored(rig, KEYS.farewells)
    bodies = [json.loads(rig.store.get(key)) for key in keys]
    assert {body["verdict"] for body in bodies} == {"LOST", "SAFE"}
    assert all(key.startswith(f"{KEYS.farewells}00000001-20300101T000000Z-") for key in keys)


def test_farewells_without_a_verdict_do_not_queue(rig: CommitterRig) -> None:
    """During an outage a manifest would wait behind all of them: only the newest one is written."""
    with ExitStack() as committer:
        with rig.outage():
            working = committer.enter_context(rig.committer())
            for step in range(5):
                working.farewell(1, replace(LOST, is_final=False, slack_s=-step), OPENED)
        working.expedite()
        assert working.drain(10)
    (key,) = stored(rig, KEYS.farewells)
    assert json.loads(rig.store.get(key))["slack_s"] == -4


def test_the_farewells_of_a_long_outage_are_bounded(rig: CommitterRig) -> None:
    """The newest ones are written once the store answers."""
    with ExitStack() as committer:
        with rig.outage():
            working = committer.enter_context(rig.committer())
            for number in range(FAREWELLS_MAX + 3):
                working.farewell(1, replace(LOST, slack_s=number), OPENED)
        working.expedite()
        assert working.drain(60)
    written = {json.loads(rig.store.get(key))["slack_s"] for key in stored(rig, KEYS.farewells)}
    assert written == set(range(3, FAREWELLS_MAX + 3))


def test_a_manifest_does_not_wait_for_a_farewell_before_any_verdict(
    rig: CommitterRig, working: Committer
) -> None:
    """The store may hold its request up, and the verdict needs the manifest."""
    release = threading.Event()

    def hold(key: str) -> None:
        assert KEYS.farewells not in key or release.wait(60)

    rig.before_put = hold
    working.farewell(1, replace(LOST, is_final=False, is_foretold=True), OPENED)
    working.commit(a_request())
    assert rig.next() == CommitDone("f10", CommitRef(1, 10))
    release.set()
    until(lambda: stored(rig, KEYS.farewells), what="the farewell")


def test_a_failed_farewell_does_not_stop_the_committer(
    rig: CommitterRig, working: Committer
) -> None:
    with rig.outage():
        working.farewell(1, LOST, OPENED)
        assert working.drain(10)
    working.commit(a_request())
    assert rig.next() == CommitDone("f10", CommitRef(1, 10))


def test_drain_waits_for_earlier_requests_until_its_timeout(rig: CommitterRig) -> None:
    """It returns False if the run has not been read by then."""
    with rig.outage(), rig.committer() as committer:
        committer.farewell(1, LOST, OPENED)
        assert not committer.drain(0.05)


@pytest.mark.fault("S25")
def test_the_chunks_of_a_commit_that_this_vm_has_not_fetched_are_not_known(
    rig: CommitterRig,
) -> None:
    """Another writer can plant a commit together with objects that have other bytes than their names say."""
    made = committed.commit(rig.store, {"model": b"m" * 2500})
    with rig.committer():
        until(lambda: isinstance(rig.events.get(timeout=60), NewestDated), what="the newest commit")
    assert not any(map(rig.known.names, made.chunks))


def a_stored_request(rig: CommitterRig) -> CommitManifest:
    """A request to commit a shard whose chunks this daemon has created."""
    shard = committed.named_shard("model", 2500)
    for extent in shard.extents:
        rig.known.created(extent.chunk, {})
    return replace(a_request(), shards=(shard,))


def test_chunks_are_known_as_those_of_a_commit_before_commit_done_is_posted(
    rig: CommitterRig,
) -> None:
    with rig.committer() as committer:
        rig.claim(committer)
        request = a_stored_request(rig)
        committer.commit(request)
        assert isinstance(rig.next(), CommitDone)
        assert all(rig.known.names(extent.chunk) for extent in request.shards[0].extents)


@pytest.mark.fault("O62")
def test_a_set_that_names_chunks_of_an_older_commit_gets_no_manifest(rig: CommitterRig) -> None:
    """Another set was committed since it was stored: a cleanup may delete what only the older commit has."""
    request = a_stored_request(rig)
    shards = request.shards
    rig.known.committed(shards, CommitRef(1, 8))
    rig.known.committed((), CommitRef(1, 9))
    with rig.committer() as committer:
        rig.claim(committer)
        committer.commit(request)
        failed = rig.next()
        assert isinstance(failed, CommitFailed)
        assert failed.is_obsolete
        assert not failed.conflict
        assert not stored(rig, KEYS.commits)
        rig.known.seed(CommitRef(1, 9), shards)
        committer.commit(request)
        assert isinstance(rig.next(), CommitDone)


@pytest.mark.fault("G14")
@pytest.mark.parametrize(("later_s", "is_obsolete"), [(22 * 3600.0, False), (24 * 3600.0, True)])
def test_a_manifest_that_waited_for_a_day_names_no_old_chunk(
    rig: CommitterRig, later_s: float, *, is_obsolete: bool
) -> None:
    """During an outage, or while the VM is suspended, prune may delete chunks that no manifest names."""
    with rig.committer() as committer:
        rig.claim(committer)
        request = a_stored_request(rig)
        rig.later_s = later_s
        committer.commit(request)
        outcome = rig.next()
    assert (isinstance(outcome, CommitFailed) and outcome.is_obsolete) == is_obsolete


def test_the_committer_continues_after_a_damaged_newest_commit(rig: CommitterRig) -> None:
    made = committed.commit(rig.store, {"model": b"m"})
    committed.flip_bit(rig.bucket / KEYS.commit(made.ref, 0, 1), 99)
    with capture_logs() as logs, rig.committer() as committer:
        until(lambda: logs, what="the refusal of the commit")
        assert rig.claim(committer).newest == made.ref
    assert logs[0]["event"] == "newest_commit_not_read"


def test_the_history_of_earlier_vms_is_posted(rig: CommitterRig) -> None:
    """The first VM of a run posts none; the generations of this boot are not those of an earlier VM."""

    committed.commit(rig.store, {"w": b"1"})

    def histories(boot: str) -> list[Observed]:
        with rig.committer(boot=boot):
            events = [rig.events.get(timeout=60)]
            while not isinstance(events[-1], NewestDated):  # posted last
                events.append(rig.events.get(timeout=60))
        return [event for event in events if isinstance(event, HistoryRead)]

    assert histories("first") == []
    rig.claimed("a", boot="first")
    rig.claimed("b", boot="first")
    assert histories("first") == []
    assert histories("second") == [HistoryRead(0.0, 1)]


@pytest.mark.fault("G02", "G03")
def test_a_commit_after_the_claim_of_another_vm_is_not_read_before_the_fence(
    rig: CommitterRig,
) -> None:
    """The daemon was killed between its manifest and the check; the other VM has chosen without it."""
    rig.claimed()
    assert of_another_vm(rig) == 2
    committed.commit(rig.store, {"w": b"1"}, step=70)
    assert rig.started()[:2] == [FenceFound(2), RunRead(CommitRef(1, 70), START)]


@pytest.mark.fault("G03")
def test_a_commit_after_the_claim_of_another_vm_does_not_count_for_an_earlier_claim(
    rig: CommitterRig,
) -> None:
    """The other VM claims, and chooses, before this VM lists the commits under its own claim."""

    puts: list[str] = []

    def overtake(key: str) -> None:
        puts.append(key)
        if puts.count(KEYS.generation(1)) == 2:  # the claim exists, and is tried again
            of_another_vm(rig)

    with rig.committer() as committer:
        rig.before_put = overtake
        committer.claim(ClaimGeneration(START))
        assert rig.next() == FenceFound(2, start_id=START)


# ---------------------------------------------------------------- parts of several VMs

NINE = CommitRef(1, 9)


def put_part(store: ObjectStore, node: int, *, step: int = 9, **options: Any) -> None:
    """Commit the part of this VM, of two."""
    nonce = f"a{step}{node}"
    committed.commit(store, {"w": b"1"}, step=step, node=node, nodes=2, nonce=nonce, **options)


@contextmanager
def committer_of(rig: CommitterRig) -> Iterator[Committer]:
    """A committer whose start holds the generation of step 9."""
    with rig.committer() as committer:
        assert rig.claim(committer).generation == NINE.generation
        yield committer


def counted(rig: CommitterRig, committer: Committer, known: CommitRef | None = None) -> Observed:
    """The answer to a look for the parts of step 9."""
    committer.check_complete(CheckComplete(NINE, 2, known))
    return rig.next()


@pytest.mark.fault("G17")
def test_a_checkpoint_is_complete_with_the_manifests_of_all_vms(rig: CommitterRig) -> None:
    """Of this step and this number of VMs; of several checkpoints, the newest whole one is reported."""
    for step, node in ((9, 0), (8, 1), (8, 0)):
        put_part(rig.store, node, step=step)
    with committer_of(rig) as committer:
        assert counted(rig, committer) == PartsCounted(NINE, 1, CommitRef(1, 8))
        assert counted(rig, committer, CommitRef(1, 8)) == PartsCounted(NINE, 1, None)
        put_part(rig.store, 1)
        assert counted(rig, committer) == PartsCounted(NINE, 2, NINE)


@pytest.mark.fault("X09", "G17")
@pytest.mark.parametrize(
    ("health", "is_sound"), [({}, True), ({GPU_IS_SOUND: 1.0}, True), ({GPU_IS_SOUND: 0.0}, False)]
)
def test_a_failed_gpu_of_another_vm_makes_the_checkpoint_unsound(
    rig: CommitterRig, health: dict[str, float], is_sound: bool
) -> None:
    """The VM with working GPUs reads the mark in the other manifest, at once and after a restart."""
    put_part(rig.store, 0)
    put_part(rig.store, 1, health=health)
    assert rig.started() == [RunRead(NINE, "", is_sound)]
    with committer_of(rig) as committer:
        assert counted(rig, committer) == PartsCounted(NINE, 2, NINE, is_sound)


@pytest.mark.fault("G17")
def test_a_damaged_manifest_makes_no_checkpoint_whole(rig: CommitterRig) -> None:
    """No reader could restore it; a daemon that finds it at its start gives no SAFE for it, and continues."""
    put_part(rig.store, 0)
    rig.store.put(KEYS.commit(NINE, 1, 2), b"{}")
    assert rig.started() == [RunRead(NINE, "", False)]
    with committer_of(rig) as committer:
        assert counted(rig, committer) == PartsCounted(NINE, 2, None)


@pytest.mark.fault("G03", "G17")
def test_a_part_after_the_claim_of_another_start_makes_no_checkpoint_whole(
    rig: CommitterRig,
) -> None:
    """The VM of that part stood still after its own check, and the other start has chosen without it."""
    put_part(rig.store, 0)
    with committer_of(rig) as committer:
        assert of_another_vm(rig) == 2
        put_part(rig.store, 1)
        assert counted(rig, committer) == FenceFound(2)
        assert rig.next() == PartsCounted(NINE, 0, None)


@pytest.mark.fault("G03")
def test_a_look_for_parts_finds_the_commits_of_another_start(rig: CommitterRig) -> None:
    """A VM that waits for other parts does not say that the run has no checkpoint."""
    put_part(rig.store, 0)
    with committer_of(rig) as committer:
        put_part(rig.store, 0, step=1, generation=of_another_vm(rig))
        assert counted(rig, committer) == FenceFound(2)
        assert rig.next() == PartsCounted(NINE, 0, None)


def test_a_look_for_parts_is_always_answered(rig: CommitterRig) -> None:
    """Also when the store fails: the decision loop does not look again before the answer."""
    with committer_of(rig) as committer, rig.outage():
        assert counted(rig, committer) == PartsCounted(NINE, 0, None)


@pytest.mark.fault("S25")
def test_an_unsigned_part_makes_no_checkpoint_whole(rig: CommitterRig) -> None:
    """No reader with the key sees it."""
    view = signed(rig.store, KEY)
    put_part(view, 0)
    put_part(rig.store, 1)
    claim = ClaimObject(run=KEYS.run, generation=1, start=START)
    assert commit.parts_committed(view, KEYS, NINE, 2, claim) == (1, None)
