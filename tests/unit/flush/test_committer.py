# SPDX-License-Identifier: Apache-2.0
"""The committer against a real directory as store: what it claims, commits and leaves behind."""

from __future__ import annotations

import itertools
import json
import os
import queue
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from swansong import bounds
from swansongd.bucket import manifest
from swansongd.bucket.keys import RunKeys
from swansongd.bucket.signing import Signer
from swansongd.core.events import (
    ClaimGeneration,
    CommitDone,
    CommitFailed,
    CommitManifest,
    Conclude,
    Event,
    FenceFound,
    GenerationClaimed,
    HistoryRead,
    NewestDated,
    SourceChanged,
)
from swansongd.errors import NotFound
from swansongd.flush import committer as committers
from swansongd.flush.claim_record import ClaimRecord
from swansongd.flush.claimant import Claimant
from swansongd.flush.committer import Committer
from swansongd.flush.journal import ShardRecord, UploadJournal
from swansongd.flush.store_health import StoreHealth
from swansongd.model import CheckpointId, CommitRef, Health, StagedFile, Verdict
from swansongd.stores.base import ObjectInfo, ObjectStore
from swansongd.stores.file.store import FileStore

from testkit import committed
from testkit.story import a_set
from testkit.waiting import until

KEYS = RunKeys("r")
NOW = "2030-01-01T00:00:00Z"


class Desk:
    """A store, the daemon's own directory, and the committers that come and go there."""

    def __init__(self, directory: Path) -> None:
        self.bucket = directory / "bucket"
        self.bucket.mkdir()
        self.own = directory / "own"
        self.own.mkdir()
        self.store = committed.file_store(self.bucket)
        self.events: queue.Queue[Event] = queue.Queue()
        self.journal = UploadJournal(self.own, run="r", store_url=self.store.url)
        self.health: list[Health] = []
        self.reason = ""
        self.now = NOW
        self.tries = 0
        """How often the store was asked for its commits."""

    @contextmanager
    def committer(
        self, *, boot: str = "boot-1", store: ObjectStore | None = None, keys: RunKeys = KEYS
    ) -> Iterator[Committer]:
        def note(event: Event) -> None:
            assert isinstance(event, SourceChanged)
            self.health.append(event.status.health)
            self.reason = event.status.reason

        opened = store or self._counting()
        committer = Committer(
            opened,
            keys,
            self.events.put,
            Claimant(opened, keys, self.own, boot_id=boot, wall=lambda: self.now),
            journal=self.journal,
            wall=lambda: self.now,
            health=StoreHealth(note),
        )
        committer.start()
        try:
            yield committer
        finally:
            committer.close()

    def _counting(self) -> ObjectStore:
        desk = self

        class Counting(FileStore):
            def list(self, prefix: str) -> Iterator[ObjectInfo]:
                desk.tries += prefix == KEYS.commits
                return super().list(prefix)

        return Counting(self.store.url)

    def next(self) -> Event:
        """The next one, but for what is read of earlier generations whenever one was claimed."""
        while True:
            event = self.events.get(timeout=10)
            if not isinstance(event, HistoryRead | NewestDated):
                return event

    @contextmanager
    def outage(self) -> Iterator[None]:
        """A plain file lies where the store was."""
        hidden = self.bucket.with_name("hidden")
        os.rename(self.bucket, hidden)
        self.bucket.touch()
        yield
        self.bucket.unlink()
        os.rename(hidden, self.bucket)

    def claimed(self, **options: Any) -> int:
        """Start a committer, and end it when it has its generation."""
        with self.committer(**options):
            event = self.next()
        assert isinstance(event, GenerationClaimed), event
        return event.generation


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


LOST = Conclude("e1", Verdict.LOST, "nothing was staged", None, 0.0)
SAFE = Conclude("e1", Verdict.SAFE, "it is committed", CommitRef(1, 10), 1.0)


def an_order(step: int = 10, nonce: str = "abc", *, generation: int = 1) -> CommitManifest:
    return CommitManifest(f"f{step}", a_set(step, nonce), (), generation, None)


def stored(desk: Desk, below: str) -> list[str]:
    return [info.key for info in desk.store.list(below)]


# ---------------------------------------------------------------- the claim


def test_a_restarted_daemon_goes_on_under_its_number(desk: Desk) -> None:
    """Same boot, URL and run: the recorded claim is used again, and nothing new is claimed."""
    assert desk.claimed() == 1
    assert desk.claimed() == 1
    assert stored(desk, KEYS.generations) == [KEYS.generation(1)]


def test_the_claim_says_what_is_committed(desk: Desk) -> None:
    """GenerationClaimed carries the newest whole commit, of whatever generation."""
    committed.commit(desk.store, {"w": b"1"}, generation=4, step=70)
    desk.store.put(KEYS.generation(4), b"{}")
    with desk.committer():
        assert desk.next() == GenerationClaimed(5, CommitRef(4, 70))


@pytest.mark.parametrize(
    ("now", "age_s"), [("2030-01-01T01:00:00Z", 3600.0), ("2029-01-01T00:00:00Z", 0.0)]
)
def test_the_age_of_the_newest_commit_comes_after_the_claim(
    desk: Desk, now: str, age_s: float
) -> None:
    """NewestDated carries the age by the manifest, and no negative one where a clock is wrong."""
    committed.commit(desk.store, {"w": b"1"}, generation=4, step=70)
    desk.now = now
    with desk.committer():
        events = iter(lambda: desk.events.get(timeout=10), None)
        dated = next(event for event in events if isinstance(event, NewestDated))
    assert dated == NewestDated(CommitRef(4, 70), age_s)


def test_another_boot_claims_anew(desk: Desk) -> None:
    """A claim outlives the daemon and not the boot: a cloned disk must not bring a generation along."""
    assert desk.claimed() == 1
    assert desk.claimed(boot="boot-2") == 2
    assert desk.claimed(boot="boot-2") == 2


def test_another_run_or_store_claims_anew(desk: Desk, tmp_path: Path) -> None:
    """The record counts for the run and the URL that it names."""
    desk.store.put(KEYS.generation(6), b"{}")
    assert desk.claimed() == 7
    assert desk.claimed(keys=RunKeys("other")) == 1
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert desk.claimed(store=FileStore(f"file://{elsewhere}")) == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[1]",
        b"{}",
        b'{"run": "r"',
        b'{"run": "r", "store_url": "URL", "boot_id": "boot-1", "generation": "1"}',
        b'{"run": "r", "store_url": "URL", "boot_id": "boot-1", "generation": true}',
        b'{"run": "r", "store_url": "URL", "boot_id": "boot-1", "generation": 1, "job_start_id": ""}',
        b'{"run": "r", "store_url": "URL", "boot_id": "", "generation": 1, "job_start_id": []}',
        b'{"run": "r", "store_url": "URL", "boot_id": "boot-1", "generation": 1e999}',
        b"[" * 100_000,
        b" " * 20_000 + b"{}",
    ],
)
def test_a_record_that_makes_no_sense_is_no_claim(desk: Desk, content: bytes) -> None:
    """Whatever lies there, the daemon gets a generation."""
    url = desk.store.url.encode()
    (desk.own / "claim.json").write_bytes(content.replace(b"URL", url))
    assert desk.claimed() == 1
    record = ClaimRecord.load(desk.own)
    assert record is not None
    assert replace(record, nonce="") == ClaimRecord("r", desk.store.url, "boot-1", 1, "")


def a_record(desk: Desk, **changes: Any) -> ClaimRecord:
    """The record that a daemon of this boot has left, changed."""
    made = ClaimRecord("r", desk.store.url, "boot-1", 1, "forged")
    return replace(made, **changes)


@pytest.mark.fault("S25")
def test_a_record_counts_only_if_the_claim_in_the_store_carries_its_nonce(desk: Desk) -> None:
    """A forged record leads to a new generation and a line in the log, not to another's generation."""
    with desk.committer(boot="another VM"):
        assert desk.next() == GenerationClaimed(1, None)
    a_record(desk).save(desk.own)
    with capture_logs() as logs:
        assert desk.claimed() == 2
    (line,) = [line for line in logs if line["event"] == "claim_record_refused"]
    assert line["claim"] == f"{desk.store.url}/{KEYS.generation(1)}"
    assert desk.claimed() == 2


@pytest.mark.parametrize("content", [b"{}", b"{", b"\xff", b'{"nonce": "forged"}'])
def test_a_record_of_a_claim_that_makes_no_sense_does_not_count(desk: Desk, content: bytes) -> None:
    """Run and generation have to be right, too."""
    desk.store.put(KEYS.generation(1), content)
    a_record(desk).save(desk.own)
    assert desk.claimed() == 2


def test_a_record_outlived_by_its_bucket_does_not_count(desk: Desk) -> None:
    """The prefix was wiped while the daemon was down: the run begins again, with a claim."""
    assert desk.claimed() == 1
    desk.store.delete(KEYS.generation(1))
    assert desk.claimed() == 1
    assert stored(desk, KEYS.generations) == [KEYS.generation(1)]
    assert desk.claimed() == 1


def test_a_record_waits_for_a_store_that_fails(desk: Desk) -> None:
    """An outage says nothing about the claim: the number is kept."""
    assert desk.claimed() == 1
    with ExitStack() as committer:
        with desk.outage():
            working = committer.enter_context(desk.committer())
            until(lambda: desk.health, what="the first failure")
        working.expedite()
        assert desk.next() == GenerationClaimed(1, None)


@pytest.mark.fault("S1", "S3")
@pytest.mark.parametrize("plant", ["link", "hard link", "directory"])
def test_a_record_that_this_user_did_not_write_does_not_count(
    desk: Desk, tmp_path: Path, plant: str
) -> None:
    """Any entry under its name: no link is followed, and the daemon claims and continues."""
    assert desk.claimed() == 1
    elsewhere = tmp_path / "elsewhere"
    os.rename(desk.own / "claim.json", elsewhere)
    if plant == "link":
        (desk.own / "claim.json").symlink_to(elsewhere)
    elif plant == "hard link":
        os.link(elsewhere, desk.own / "claim.json")
    else:
        (desk.own / "claim.json").mkdir()
    before = elsewhere.read_bytes()
    assert desk.claimed() == 2
    assert elsewhere.read_bytes() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_a_record_of_another_user_does_not_count(desk: Desk) -> None:
    """Nor does one in a directory of another user."""
    assert desk.claimed() == 1
    os.chown(desk.own / "claim.json", 65534, 65534)
    assert desk.claimed() == 2
    assert desk.claimed() == 2
    os.chown(desk.own, 65534, 65534)
    assert desk.claimed() == 3


@pytest.mark.fault("S25")
def test_a_claim_beyond_the_format_is_refused_loudly_and_the_daemon_stays(desk: Desk) -> None:
    """One planted object: one line in the log, the way out in the health; gone, the claim is made."""
    planted = KEYS.generation(bounds.GENERATION_MAX)
    desk.store.put(planted, b"{}")
    with capture_logs() as logs, desk.committer() as committer:
        until(lambda: desk.health, what="the first failure")
        committer.expedite()
        until(lambda: desk.tries > 2, what="another try")
        assert desk.events.empty()
        assert stored(desk, "") == [planted]
        assert Health.OK not in desk.health
        assert planted in desk.reason
        desk.store.delete(planted)
        assert desk.next() == GenerationClaimed(1, None)
    (line,) = [line for line in logs if line["event"] == "claim_refused"]
    assert planted in line["hint"]


@pytest.mark.fault("S25", "G16")
def test_an_unknown_object_among_the_commits_costs_no_generation(desk: Desk) -> None:
    """The claim waits, instead of taking a number at each try."""
    planted = f"{KEYS.commits}junk"
    desk.store.put(planted, b"")
    with desk.committer() as committer:
        until(lambda: desk.health, what="the first failure")
        committer.expedite()
        until(lambda: desk.tries > 2, what="another try")
        assert stored(desk, "") == [planted]
        desk.store.delete(planted)
        assert desk.next() == GenerationClaimed(1, None)


def test_a_daemon_that_was_overtaken_hears_so_when_it_comes_back(desk: Desk) -> None:
    """Its own number is recorded, a newer one is claimed: FenceFound, and nothing is claimed."""
    assert desk.claimed() == 1
    desk.store.put(KEYS.generation(2), b"{}")
    with desk.committer():
        assert desk.next() == FenceFound(2)
    assert stored(desk, KEYS.generations)[-1] == KEYS.generation(2)


def test_a_claim_that_cannot_be_recorded_counts_all_the_same(desk: Desk) -> None:
    """Staging is full or gone: the generation is ours, and the next start takes another one."""
    shutil.rmtree(desk.own)
    assert desk.claimed() == 1
    assert desk.claimed() == 2


def test_the_claim_waits_for_the_directory_of_a_store(desk: Desk, tmp_path: Path) -> None:
    """The store does not make it: its file system may not be mounted yet."""
    with desk.committer(store=FileStore(f"file://{tmp_path}/new")) as committer:
        until(lambda: "does not exist" in desk.reason, what="the first failure")
        assert not (tmp_path / "new").exists()
        (tmp_path / "new").mkdir()
        committer.expedite()
        assert desk.next() == GenerationClaimed(1, None)


def test_the_claim_waits_for_the_store(desk: Desk) -> None:
    """Health says that the store fails while it does; then the generation is claimed, and health is ok."""
    with ExitStack() as committer:
        with desk.outage():
            working = committer.enter_context(desk.committer())
            until(lambda: desk.health, what="the first failure")
            assert Health.OK not in desk.health[-1:]
            assert desk.events.empty()
        working.expedite()
        assert desk.next() == GenerationClaimed(1, None)
        assert desk.health[-1:] == [Health.OK]


def test_a_notice_does_not_wait_for_the_next_try_at_the_claim(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the committer would have slept, ``hurry`` wakes it."""
    monkeypatch.setattr(committers, "_CLAIM_RETRY_S", 1000.0)
    monkeypatch.setattr(committers, "_CLAIM_RETRY_S_MAX", 1000.0)
    with ExitStack() as committer:
        with desk.outage():
            working = committer.enter_context(desk.committer())
            until(lambda: desk.health, what="the first failure")
        working.expedite()
        assert desk.next() == GenerationClaimed(1, None)


# ---------------------------------------------------------------- orders


@pytest.fixture
def working(desk: Desk) -> Iterator[Committer]:
    """A committer that has claimed generation 1."""
    with desk.committer() as committer:
        assert desk.next() == GenerationClaimed(1, None)
        yield committer


def test_a_commit_is_a_manifest_and_word_of_it(desk: Desk, working: Committer) -> None:
    """What lies in the store is what was ordered."""
    working.commit(an_order())
    assert desk.next() == CommitDone("f10", CommitRef(1, 10))
    (key,) = stored(desk, KEYS.commits)
    made = manifest.decode(desk.store.get(key))
    assert (made.run, made.generation, made.step, made.nonce) == ("r", 1, 10, "abc")
    assert made.created == NOW


def test_the_same_commit_twice_is_one(desk: Desk, working: Committer) -> None:
    """A lost reply makes the daemon order it again: its own nonce is found, and that is success."""
    for _ in range(2):
        working.commit(an_order())
        assert desk.next() == CommitDone("f10", CommitRef(1, 10))
    assert len(stored(desk, KEYS.commits)) == 1


def test_another_set_of_that_step_is_a_conflict(desk: Desk, working: Committer) -> None:
    """The first one stands."""
    working.commit(an_order())
    desk.next()
    working.commit(an_order(nonce="xyz"))
    event = desk.next()
    assert isinstance(event, CommitFailed)
    assert event.conflict
    (key,) = stored(desk, KEYS.commits)
    assert manifest.decode(desk.store.get(key)).nonce == "abc"


def test_a_store_that_fails_is_no_conflict(desk: Desk, working: Committer) -> None:
    """CommitFailed without conflict, health not ok; when the store is back, the same order works."""
    with desk.outage():
        working.commit(an_order())
        event = desk.next()
    assert isinstance(event, CommitFailed)
    assert not event.conflict
    assert Health.OK not in desk.health[-1:]
    working.commit(an_order())
    assert desk.next() == CommitDone("f10", CommitRef(1, 10))
    assert desk.health[-1:] == [Health.OK]


def test_an_order_that_cannot_be_carried_out_is_answered(desk: Desk) -> None:
    """A fault in the code costs that commit, and neither the thread nor the answer."""

    class Faulty(FileStore):
        def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
            if key == KEYS.commit(CommitRef(1, 5), 0, 1):
                raise TypeError("a fault in the code")
            super().put(key, data, if_absent=if_absent)

    with desk.committer(store=Faulty(desk.store.url)) as working:
        assert desk.next() == GenerationClaimed(1, None)
        working.commit(an_order(5))
        event = desk.next()
        assert isinstance(event, CommitFailed)
        assert not event.conflict
        working.commit(an_order(6))
        assert desk.next() == CommitDone("f6", CommitRef(1, 6))


@pytest.mark.parametrize(
    "unusable",
    [
        {"health": {"loss": float("inf")}},
        {"health": {"loss": 10**400}},
        {"trainer": {"world": object()}},
        {"framework": "x" * 10_000},
        {"nodes": 10**5},
    ],
)
def test_a_set_that_no_manifest_can_hold_is_given_up_once(
    desk: Desk, working: Committer, unusable: dict[str, Any]
) -> None:
    """One answer that makes the set unusable, no object in the store; the sets beside it are committed."""
    order = an_order(5)
    working.commit(replace(order, staged=replace(order.staged, **unusable)))
    event = desk.next()
    assert isinstance(event, CommitFailed)
    assert event.conflict
    assert stored(desk, KEYS.commits) == []
    assert Health.OK in desk.health[-1:]
    working.commit(an_order(6))
    assert desk.next() == CommitDone("f6", CommitRef(1, 6))


def test_the_first_commit_of_a_life_is_read_back(desk: Desk) -> None:
    """A store that answers 404 to each GET has no commit to report; once one was read, no more are."""

    class Forgetful(FileStore):
        gets = 0
        forgets = True

        def get(self, key: str) -> bytes:
            self.gets += "commits" in key
            if self.forgets and "commits" in key:
                raise NotFound(key)
            return super().get(key)

    store = Forgetful(desk.store.url)
    with desk.committer(store=store) as committer:
        assert desk.next() == GenerationClaimed(1, None)
        for _ in range(3):
            committer.commit(an_order())
            event = desk.next()
            assert isinstance(event, CommitFailed)
            assert not event.conflict
        store.forgets = False
        committer.commit(an_order())
        assert desk.next() == CommitDone("f10", CommitRef(1, 10))
        gets = store.gets
        committer.commit(an_order(11))
        assert desk.next() == CommitDone("f11", CommitRef(1, 11))
        assert store.gets == gets


@pytest.mark.fault("S25")
def test_with_a_key_a_bucket_writer_neither_fences_nor_blocks(desk: Desk) -> None:
    """With a higher claim, junk beside it and a higher commit the committer continues, and logs each."""
    keys = RunKeys("r", Signer(b"k" * 32))
    with desk.committer(keys=keys) as committer, capture_logs() as logs:
        assert desk.next() == GenerationClaimed(1, None)
        desk.store.put(KEYS.generation(bounds.GENERATION_MAX), b"{}")
        desk.store.put(f"{KEYS.generations}junk", b"")
        committed.commit(desk.store, {"w": b"1"}, generation=99_999_999, step=70)
        committer.commit(an_order())
        assert desk.next() == CommitDone("f10", CommitRef(1, 10))
        committer.check_fence()
        assert committer.drain(10)
        assert desk.events.empty()
    assert any(line["event"] == "unsigned_claim_ignored" for line in logs)
    with desk.committer(keys=keys):
        assert desk.next() == GenerationClaimed(1, CommitRef(1, 10))
    with desk.committer(keys=keys, boot="boot-2"):
        assert desk.next() == GenerationClaimed(2, CommitRef(1, 10))


def test_nothing_is_committed_by_who_was_overtaken(desk: Desk, working: Committer) -> None:
    """FenceFound, and no manifest."""
    desk.store.put(KEYS.generation(3), b"{}")
    working.commit(an_order())
    assert desk.next() == FenceFound(3)
    assert not stored(desk, KEYS.commits)


def test_a_look_at_the_fence_speaks_only_of_a_newer_one(desk: Desk, working: Committer) -> None:
    """Our own generation is no fence."""
    working.check_fence()
    assert working.drain(10)
    assert desk.events.empty()
    desk.store.put(KEYS.generation(2), b"{}")
    working.check_fence()
    assert desk.next() == FenceFound(2)


def test_two_verdicts_of_one_second_both_stand(desk: Desk, working: Committer) -> None:
    """The clock stands still here; no farewell takes another's name, and none is lost."""
    for conclusion in (LOST, SAFE):
        working.farewell(1, conclusion, [])
    assert working.drain(10)
    keys = stored(desk, KEYS.farewells)
    bodies = [json.loads(desk.store.get(key)) for key in keys]
    assert {body["verdict"] for body in bodies} == {"LOST", "SAFE"}
    assert all(key.startswith(f"{KEYS.farewells}00000001-20300101T000000Z-") for key in keys)


def test_a_farewell_that_cannot_be_stored_stops_nothing(desk: Desk, working: Committer) -> None:
    with desk.outage():
        working.farewell(1, LOST, [])
        assert working.drain(10)
    working.commit(an_order())
    assert desk.next() == CommitDone("f10", CommitRef(1, 10))


def test_drain_waits_for_what_was_ordered_and_not_for_ever(desk: Desk) -> None:
    """With a store that never lets the committer claim, False comes within the time given."""
    with desk.outage(), desk.committer() as committer:
        committer.farewell(1, LOST, [])
        assert not committer.drain(0.05)


def test_orders_are_carried_out_in_order(desk: Desk, working: Committer) -> None:
    """Twenty commits, ordered at once, answered one after the other."""
    for step in range(1, 21):
        working.commit(an_order(step))
    answers = list(itertools.islice(iter(desk.next, None), 20))
    assert answers == [CommitDone(f"f{step}", CommitRef(1, step)) for step in range(1, 21)]


def test_the_newest_whole_commit_of_an_earlier_vm_is_known(desk: Desk) -> None:
    """What it has stored can be referenced; a commit of which a node is missing is none."""
    old = committed.commit(desk.store, {"model": b"m" * 2500}, step=10)
    committed.commit(desk.store, {"model": b"n" * 2500}, step=20, nodes=2)
    with desk.committer():
        known = until(lambda: desk.journal.known("model"), what="the newest commit to be read")
    assert known.shard == old.shards[0]


def test_what_was_committed_is_known(desk: Desk) -> None:
    """The journal hears of a commit before anybody else does."""
    made = committed.commit(desk.store, {"model": b"m" * 2500}, run="other").shards[0]
    shard = replace(made, key=KEYS.shard(1, CheckpointId(10, "abc"), "a1", 0, "model"))
    file = StagedFile(path="model", size_bytes=2500, mtime_ns=1, inode=1)
    with desk.committer() as committer:
        assert isinstance(desk.next(), GenerationClaimed)
        order = replace(an_order(), shards=(shard,))
        desk.journal.shard_stored(str(order.staged.id), ShardRecord(file, shard, (b"d" * 32,) * 3))
        committer.commit(order)
        assert isinstance(desk.next(), CommitDone)
        known = desk.journal.known("model")
    assert known is not None
    assert known.shard == shard


def test_a_commit_that_cannot_be_read_seeds_nothing(desk: Desk) -> None:
    """The claim stands, and the committer goes on working."""
    made = committed.commit(desk.store, {"model": b"m"})
    committed.flip_bit(desk.bucket / KEYS.commit(made.ref, 0, 1), 99)
    with desk.committer() as committer:
        assert isinstance(desk.next(), GenerationClaimed)
        assert committer.drain(10)
    assert desk.journal.known("model") is None


def test_another_generation_is_claimed_by_order_unless_we_were_overtaken(desk: Desk) -> None:
    """After a rollback, for the same boot; a restarted daemon goes on under it.  Never over a newer VM's."""
    with desk.committer() as committer:
        assert desk.next() == GenerationClaimed(1, None)
        committer.claim_next(ClaimGeneration(1))
        assert desk.next() == GenerationClaimed(2, None, is_rollback=True)
    with desk.committer() as committer:
        assert desk.next() == GenerationClaimed(2, None)
        with desk.committer(boot="other"):
            assert desk.next() == GenerationClaimed(3, None)
        committer.claim_next(ClaimGeneration(2))
        assert desk.next() == FenceFound(3)


def test_what_became_of_earlier_vms_is_told(desk: Desk) -> None:
    """Once for each claim, after it; a first VM has nothing to tell."""
    with desk.committer(boot="first"):
        assert desk.next() == GenerationClaimed(1, None)
    with desk.committer(boot="second"):
        assert desk.next() == GenerationClaimed(2, None)
        assert desk.events.get(timeout=10) == HistoryRead(0.0, 1)
