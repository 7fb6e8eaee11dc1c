# SPDX-License-Identifier: Apache-2.0
"""The committer with a directory as its store: claims, commits and farewells."""

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
from swansongd.core.ledger import EvacuationRecord
from swansongd.errors import NotFound
from swansongd.flush import committer as committers
from swansongd.flush.claim_record import ClaimRecord
from swansongd.flush.claimant import Claimant
from swansongd.flush.committer import Committer
from swansongd.flush.journal import UploadJournal
from swansongd.flush.records import ShardRecord
from swansongd.flush.store_health import StoreHealth
from swansongd.model import CheckpointId, CommitRef, Health, StagedFile, Verdict
from swansongd.stores.base import ObjectInfo, ObjectStore
from swansongd.stores.file.store import FileStore

from testkit import committed
from testkit.story import a_set
from testkit.waiting import until

KEYS = RunKeys("r")
NOW = "2030-01-01T00:00:00Z"


class CommitterRig:
    """A store, the daemon's own directory, and the committers that use them one after another."""

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
        """Number of listings of the commits."""

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
        rig = self

        class Counting(FileStore):
            def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
                rig.tries += prefix == KEYS.commits
                return super().list(prefix, after=after)

        return Counting(self.store.url)

    def next(self) -> Event:
        """The next event, except those that report earlier generations."""
        while True:
            event = self.events.get(timeout=10)
            if not isinstance(event, HistoryRead | NewestDated):
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

    def claimed(self, **options: Any) -> int:
        """Start a committer, and close it when it has claimed a generation."""
        with self.committer(**options):
            event = self.next()
        assert isinstance(event, GenerationClaimed), event
        return event.generation


@pytest.fixture
def rig(tmp_path: Path) -> CommitterRig:
    return CommitterRig(tmp_path)


LOST = Conclude("e1", Verdict.LOST, "nothing was staged", None, 0.0)
OPENED = EvacuationRecord(opened_wall_s=1893456000.0)
SAFE = Conclude("e1", Verdict.SAFE, "it is committed", CommitRef(1, 10), 1.0)


def a_request(step: int = 10, nonce: str = "abc", *, generation: int = 1) -> CommitManifest:
    return CommitManifest(f"f{step}", a_set(step, nonce), (), generation, None)


def stored(rig: CommitterRig, below: str) -> list[str]:
    return [info.key for info in rig.store.list(below)]


# ---------------------------------------------------------------- claims


def test_a_restarted_daemon_continues_under_its_generation(rig: CommitterRig) -> None:
    """Same boot, URL and run: the recorded claim is used again, and nothing new is claimed."""
    assert rig.claimed() == 1
    assert rig.claimed() == 1
    assert stored(rig, KEYS.generations) == [KEYS.generation(1)]


def test_the_claim_reports_the_newest_whole_commit(rig: CommitterRig) -> None:
    """GenerationClaimed contains the newest whole commit, of any generation."""
    committed.commit(rig.store, {"w": b"1"}, generation=4, step=70)
    rig.store.put(KEYS.generation(4), b"{}")
    with rig.committer():
        assert rig.next() == GenerationClaimed(5, CommitRef(4, 70))


@pytest.mark.parametrize(
    ("now", "age_s"), [("2030-01-01T01:00:00Z", 3600.0), ("2029-01-01T00:00:00Z", 0.0)]
)
def test_the_age_of_the_newest_commit_is_posted_after_the_claim(
    rig: CommitterRig, now: str, age_s: float
) -> None:
    """NewestDated contains the age according to the manifest; 0 if the clocks make it negative."""
    committed.commit(rig.store, {"w": b"1"}, generation=4, step=70)
    rig.now = now
    with rig.committer():
        events = iter(lambda: rig.events.get(timeout=10), None)
        dated = next(event for event in events if isinstance(event, NewestDated))
    assert dated == NewestDated(CommitRef(4, 70), age_s)


def test_another_boot_claims_another_generation(rig: CommitterRig) -> None:
    """A claim belongs to one boot: a VM with a cloned disk must not use the generation of the original."""
    assert rig.claimed() == 1
    assert rig.claimed(boot="boot-2") == 2
    assert rig.claimed(boot="boot-2") == 2


def test_another_run_or_store_claims_another_generation(rig: CommitterRig, tmp_path: Path) -> None:
    """The record is valid for one run and one store URL."""
    rig.store.put(KEYS.generation(6), b"{}")
    assert rig.claimed() == 7
    assert rig.claimed(keys=RunKeys("other")) == 1
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert rig.claimed(store=FileStore(f"file://{elsewhere}")) == 1


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
def test_an_invalid_record_is_ignored(rig: CommitterRig, content: bytes) -> None:
    """The daemon claims a generation, whatever the file contains."""
    url = rig.store.url.encode()
    (rig.own / "claim.json").write_bytes(content.replace(b"URL", url))
    assert rig.claimed() == 1
    record = ClaimRecord.load(rig.own)
    assert record is not None
    assert replace(record, nonce="") == ClaimRecord("r", rig.store.url, "boot-1", 1, "")


def a_record(rig: CommitterRig, **changes: Any) -> ClaimRecord:
    """The record of an earlier daemon of this boot, with changes."""
    made = ClaimRecord("r", rig.store.url, "boot-1", 1, "forged")
    return replace(made, **changes)


@pytest.mark.fault("S25")
def test_a_record_counts_only_if_the_claim_in_the_store_carries_its_nonce(
    rig: CommitterRig,
) -> None:
    """A forged record leads to a new generation and a log line, not to the generation of another VM."""
    with rig.committer(boot="another VM"):
        assert rig.next() == GenerationClaimed(1, None)
    a_record(rig).save(rig.own)
    with capture_logs() as logs:
        assert rig.claimed() == 2
    (line,) = [line for line in logs if line["event"] == "claim_record_refused"]
    assert line["claim"] == f"{rig.store.url}/{KEYS.generation(1)}"
    assert rig.claimed() == 2


@pytest.mark.parametrize("content", [b"{}", b"{", b"\xff", b'{"nonce": "forged"}'])
def test_a_record_of_an_invalid_claim_is_ignored(rig: CommitterRig, content: bytes) -> None:
    """The claim must contain the run, the generation and the nonce of the record."""
    rig.store.put(KEYS.generation(1), content)
    a_record(rig).save(rig.own)
    assert rig.claimed() == 2


def test_a_record_is_ignored_after_the_bucket_was_emptied(rig: CommitterRig) -> None:
    """All objects were deleted while the daemon was stopped: the daemon claims the first generation again."""
    assert rig.claimed() == 1
    rig.store.delete(KEYS.generation(1))
    assert rig.claimed() == 1
    assert stored(rig, KEYS.generations) == [KEYS.generation(1)]
    assert rig.claimed() == 1


def test_a_record_is_kept_during_an_outage_of_the_store(rig: CommitterRig) -> None:
    """After the outage the daemon continues under the recorded generation."""
    assert rig.claimed() == 1
    with ExitStack() as committer:
        with rig.outage():
            working = committer.enter_context(rig.committer())
            until(lambda: rig.health, what="the first failure")
        working.expedite()
        assert rig.next() == GenerationClaimed(1, None)


@pytest.mark.fault("S1", "S3")
@pytest.mark.parametrize("plant", ["link", "hard link", "directory"])
def test_a_record_that_this_user_did_not_write_is_ignored(
    rig: CommitterRig, tmp_path: Path, plant: str
) -> None:
    """Links are not followed, and the daemon claims a new generation."""
    assert rig.claimed() == 1
    elsewhere = tmp_path / "elsewhere"
    os.rename(rig.own / "claim.json", elsewhere)
    if plant == "link":
        (rig.own / "claim.json").symlink_to(elsewhere)
    elif plant == "hard link":
        os.link(elsewhere, rig.own / "claim.json")
    else:
        (rig.own / "claim.json").mkdir()
    before = elsewhere.read_bytes()
    assert rig.claimed() == 2
    assert elsewhere.read_bytes() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_a_record_of_another_user_is_ignored(rig: CommitterRig) -> None:
    """So is a record in a directory of another user."""
    assert rig.claimed() == 1
    os.chown(rig.own / "claim.json", 65534, 65534)
    assert rig.claimed() == 2
    assert rig.claimed() == 2
    os.chown(rig.own, 65534, 65534)
    assert rig.claimed() == 3


@pytest.mark.fault("S25")
def test_a_claim_with_the_last_generation_blocks_claims_until_it_is_deleted(
    rig: CommitterRig,
) -> None:
    """The log contains one line, and the health names the object; after its deletion the claim succeeds."""
    planted = KEYS.generation(bounds.GENERATION_MAX)
    rig.store.put(planted, b"{}")
    with capture_logs() as logs, rig.committer() as committer:
        until(lambda: rig.health, what="the first failure")
        committer.expedite()
        until(lambda: rig.tries > 2, what="another try")
        assert rig.events.empty()
        assert stored(rig, "") == [planted]
        assert Health.OK not in rig.health
        assert planted in rig.reason
        rig.store.delete(planted)
        assert rig.next() == GenerationClaimed(1, None)
    (line,) = [line for line in logs if line["event"] == "claim_refused"]
    assert planted in line["hint"]


@pytest.mark.fault("S25", "G16")
def test_an_unknown_object_among_the_commits_uses_up_no_generation(rig: CommitterRig) -> None:
    """The committer retries before the claim, not after it."""
    planted = f"{KEYS.commits}junk"
    rig.store.put(planted, b"")
    with rig.committer() as committer:
        until(lambda: rig.health, what="the first failure")
        committer.expedite()
        until(lambda: rig.tries > 2, what="another try")
        assert stored(rig, "") == [planted]
        rig.store.delete(planted)
        assert rig.next() == GenerationClaimed(1, None)


def test_a_restarted_daemon_is_fenced_by_a_newer_claim(rig: CommitterRig) -> None:
    """It has a recorded generation, so it posts FenceFound and claims nothing."""
    assert rig.claimed() == 1
    rig.store.put(KEYS.generation(2), b"{}")
    with rig.committer():
        assert rig.next() == FenceFound(2)
    assert stored(rig, KEYS.generations)[-1] == KEYS.generation(2)


def test_a_claim_that_cannot_be_recorded_is_still_valid(rig: CommitterRig) -> None:
    """If the record cannot be written, the next daemon claims another generation."""
    shutil.rmtree(rig.own)
    assert rig.claimed() == 1
    assert rig.claimed() == 2


def test_the_claim_is_retried_until_the_directory_of_the_store_exists(
    rig: CommitterRig, tmp_path: Path
) -> None:
    """The store does not create it: its file system may not be mounted yet."""
    with rig.committer(store=FileStore(f"file://{tmp_path}/new")) as committer:
        until(lambda: "does not exist" in rig.reason, what="the first failure")
        assert not (tmp_path / "new").exists()
        (tmp_path / "new").mkdir()
        committer.expedite()
        assert rig.next() == GenerationClaimed(1, None)


def test_the_claim_is_retried_until_the_store_works(rig: CommitterRig) -> None:
    """The health is not OK during the outage, and OK after the claim."""
    with ExitStack() as committer:
        with rig.outage():
            working = committer.enter_context(rig.committer())
            until(lambda: rig.health, what="the first failure")
            assert Health.OK not in rig.health[-1:]
            assert rig.events.empty()
        working.expedite()
        assert rig.next() == GenerationClaimed(1, None)
        assert rig.health[-1:] == [Health.OK]


def test_a_notice_cuts_the_backoff_of_the_claim_short(
    rig: CommitterRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``expedite`` ends a pause of 1000 s."""
    monkeypatch.setattr(committers, "_CLAIM_RETRY_S", 1000.0)
    monkeypatch.setattr(committers, "_CLAIM_RETRY_S_MAX", 1000.0)
    with ExitStack() as committer:
        with rig.outage():
            working = committer.enter_context(rig.committer())
            until(lambda: rig.health, what="the first failure")
        working.expedite()
        assert rig.next() == GenerationClaimed(1, None)


# ---------------------------------------------------------------- requests


@pytest.fixture
def working(rig: CommitterRig) -> Iterator[Committer]:
    """A committer that has claimed generation 1."""
    with rig.committer() as committer:
        assert rig.next() == GenerationClaimed(1, None)
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


def test_the_same_commit_twice_creates_one_manifest(rig: CommitterRig, working: Committer) -> None:
    """After a lost reply the request is repeated; it finds its own nonce in the manifest, and succeeds."""
    for _ in range(2):
        working.commit(a_request())
        assert rig.next() == CommitDone("f10", CommitRef(1, 10))
    assert len(stored(rig, KEYS.commits)) == 1


def test_another_set_of_the_same_step_is_a_conflict(rig: CommitterRig, working: Committer) -> None:
    """The first manifest is not replaced."""
    working.commit(a_request())
    rig.next()
    working.commit(a_request(nonce="xyz"))
    event = rig.next()
    assert isinstance(event, CommitFailed)
    assert event.conflict
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


def test_a_request_that_raises_an_unexpected_error_gets_an_answer(rig: CommitterRig) -> None:
    """A fault of the daemon fails one commit; the thread continues."""

    class Faulty(FileStore):
        def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
            if key == KEYS.commit(CommitRef(1, 5), 0, 1):
                raise TypeError("a fault in the code")
            super().put(key, data, if_absent=if_absent)

    with rig.committer(store=Faulty(rig.store.url)) as working:
        assert rig.next() == GenerationClaimed(1, None)
        working.commit(a_request(5))
        event = rig.next()
        assert isinstance(event, CommitFailed)
        assert not event.conflict
        working.commit(a_request(6))
        assert rig.next() == CommitDone("f6", CommitRef(1, 6))


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
def test_a_set_that_no_manifest_can_contain_is_a_conflict(
    rig: CommitterRig, working: Committer, unusable: dict[str, Any]
) -> None:
    """The store gets no object of it; the next set is committed."""
    request = a_request(5)
    working.commit(replace(request, staged=replace(request.staged, **unusable)))
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
        assert rig.next() == GenerationClaimed(1, None)
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
    keys = RunKeys("r", Signer(b"k" * 32))
    with rig.committer(keys=keys) as committer, capture_logs() as logs:
        assert rig.next() == GenerationClaimed(1, None)
        rig.store.put(KEYS.generation(bounds.GENERATION_MAX), b"{}")
        rig.store.put(f"{KEYS.generations}junk", b"")
        committed.commit(rig.store, {"w": b"1"}, generation=99_999_999, step=70)
        committer.commit(a_request())
        assert rig.next() == CommitDone("f10", CommitRef(1, 10))
        committer.check_fence()
        assert committer.drain(10)
        assert rig.events.empty()
    assert any(line["event"] == "unsigned_claim_ignored" for line in logs)
    with rig.committer(keys=keys):
        assert rig.next() == GenerationClaimed(1, CommitRef(1, 10))
    with rig.committer(keys=keys, boot="boot-2"):
        assert rig.next() == GenerationClaimed(2, CommitRef(1, 10))


def test_a_fenced_vm_commits_nothing(rig: CommitterRig, working: Committer) -> None:
    """The committer posts FenceFound, and writes no manifest."""
    rig.store.put(KEYS.generation(3), b"{}")
    working.commit(a_request())
    assert rig.next() == FenceFound(3)
    assert not stored(rig, KEYS.commits)


def test_a_check_of_the_fence_reports_only_newer_generations(
    rig: CommitterRig, working: Committer
) -> None:
    """The generation of this VM is not reported."""
    working.check_fence()
    assert working.drain(10)
    assert rig.events.empty()
    rig.store.put(KEYS.generation(2), b"{}")
    working.check_fence()
    assert rig.next() == FenceFound(2)


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
    with rig.committer() as committer:
        for step in range(5):
            committer.farewell(1, replace(LOST, is_final=False, slack_s=-step), OPENED)
        assert rig.next() == GenerationClaimed(1, None)
        assert committer.drain(10)
    (key,) = stored(rig, KEYS.farewells)
    assert json.loads(rig.store.get(key))["slack_s"] == -4


def test_a_failed_farewell_does_not_stop_the_committer(
    rig: CommitterRig, working: Committer
) -> None:
    with rig.outage():
        working.farewell(1, LOST, OPENED)
        assert working.drain(10)
    working.commit(a_request())
    assert rig.next() == CommitDone("f10", CommitRef(1, 10))


def test_drain_waits_for_earlier_requests_until_its_timeout(rig: CommitterRig) -> None:
    """It returns False if the claim has not succeeded by then."""
    with rig.outage(), rig.committer() as committer:
        committer.farewell(1, LOST, OPENED)
        assert not committer.drain(0.05)


def test_requests_are_carried_out_in_order(rig: CommitterRig, working: Committer) -> None:
    """Twenty commits that were requested together are answered one after another."""
    for step in range(1, 21):
        working.commit(a_request(step))
    answers = list(itertools.islice(iter(rig.next, None), 20))
    assert answers == [CommitDone(f"f{step}", CommitRef(1, step)) for step in range(1, 21)]


def test_the_journal_knows_the_newest_whole_commit_of_an_earlier_vm(rig: CommitterRig) -> None:
    """Its shards can be referenced.  A newer commit without the part of one VM is skipped."""
    old = committed.commit(rig.store, {"model": b"m" * 2500}, step=10)
    committed.commit(rig.store, {"model": b"n" * 2500}, step=20, nodes=2)
    with rig.committer():
        known = until(rig.journal.known_parts, what="the newest commit to be read")
    assert known.objects == {extent.object for extent in old.shards[0].extents}


def test_the_journal_knows_a_commit_before_commit_done_is_posted(rig: CommitterRig) -> None:
    shard = committed.named_shard(
        "model", 2500, KEYS.shard(1, CheckpointId(10, "abc"), "a1", 0, "model")
    )
    file = StagedFile(path="model", size_bytes=2500, mtime_ns=1, inode=1)
    with rig.committer() as committer:
        assert isinstance(rig.next(), GenerationClaimed)
        request = replace(a_request(), shards=(shard,))
        rig.journal.shard_stored(
            str(request.staged.id), ShardRecord(file, shard, sent_key=shard.extents[0].object.key)
        )
        committer.commit(request)
        assert isinstance(rig.next(), CommitDone)
        known = rig.journal.known_parts()
    assert known.objects == {extent.object for extent in shard.extents}


@pytest.mark.fault("O62")
def test_a_set_that_references_an_older_commit_gets_no_manifest(rig: CommitterRig) -> None:
    """Another set was committed since it was stored: a cleanup may delete what only the older commit has."""
    key = KEYS.shard(1, CheckpointId(10, "abc"), "a1", 0, "model")
    shard = committed.named_shard("model", 2500, key)
    file = StagedFile(path="model", size_bytes=2500, mtime_ns=1, inode=1)
    with rig.committer() as committer:
        assert isinstance(rig.next(), GenerationClaimed)
        request = replace(a_request(), shards=(shard,))
        rig.journal.shard_stored(str(request.staged.id), ShardRecord(file, shard))
        committer.commit(request)
        failed = rig.next()
        assert isinstance(failed, CommitFailed)
        assert failed.is_obsolete
        rig.journal.seed(CommitRef(1, 9), [shard])
        committer.commit(request)
        assert isinstance(rig.next(), CommitDone)


def test_a_damaged_commit_is_not_added_to_the_journal(rig: CommitterRig) -> None:
    """The claim is valid, and the committer continues."""
    made = committed.commit(rig.store, {"model": b"m"})
    committed.flip_bit(rig.bucket / KEYS.commit(made.ref, 0, 1), 99)
    with rig.committer() as committer:
        assert isinstance(rig.next(), GenerationClaimed)
        assert committer.drain(10)
    assert not rig.journal.known_parts()


def test_the_next_generation_is_claimed_on_request_unless_fenced(rig: CommitterRig) -> None:
    """A restarted daemon continues under it.  If a newer VM has claimed one, FenceFound is posted."""
    with rig.committer() as committer:
        assert rig.next() == GenerationClaimed(1, None)
        committer.claim_next(ClaimGeneration(1))
        assert rig.next() == GenerationClaimed(2, None, is_rollback=True)
    with rig.committer() as committer:
        assert rig.next() == GenerationClaimed(2, None)
        with rig.committer(boot="other"):
            assert rig.next() == GenerationClaimed(3, None)
        committer.claim_next(ClaimGeneration(2))
        assert rig.next() == FenceFound(3)


def test_the_history_of_earlier_vms_is_posted_after_the_claim(rig: CommitterRig) -> None:
    """The first VM of a run posts none."""
    with rig.committer(boot="first"):
        assert rig.next() == GenerationClaimed(1, None)
    with rig.committer(boot="second"):
        assert rig.next() == GenerationClaimed(2, None)
        assert rig.events.get(timeout=10) == HistoryRead(0.0, 1)
