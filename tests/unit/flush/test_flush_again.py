# SPDX-License-Identifier: Apache-2.0
"""Stored bytes are not sent again: after another set, after a restart, if another set has the same bytes."""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from swansongd.core.events import Flushed, FlushFailed, FlushProgress
from swansongd.errors import Exists, Permanent, Transient
from swansongd.flush.body import FileBody
from swansongd.model import CommitRef

from testkit.flush_rig import PART, SET, FlushRig, found_set, keys_of, staged_set
from testkit.waiting import until

PARTIAL = f"{SET}.partial"


@pytest.fixture
def flush(tmp_path: Path) -> Iterator[FlushRig]:
    made = FlushRig(tmp_path)
    yield made
    until(lambda: not made.open_files(), what="every staged file to be closed")
    assert not made.store.overwritten, "no key is written twice with different bytes"


def noise(size_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


def files() -> dict[str, bytes]:
    """A large file, four files of two parts and eight small ones: 47 requests for parts and shards."""
    made = {"large": noise(30 * PART + 7)}
    made |= {f"two-{number}": noise(2 * PART - number, number) for number in range(4)}
    return made | {f"small-{number}": noise(100 + number) for number in range(8)}


def stop_at(
    flush: FlushRig, request: int, *, what: tuple[str, ...] = ("put_part", "put_shard")
) -> threading.Event:
    """Hold the request with this number and all later ones until the event is set; then they fail."""
    held = threading.Event()
    numbers = itertools.count(1)

    def before(kind: str, key: str) -> None:
        if kind in what and next(numbers) >= request:
            assert held.wait(20)
            raise Transient("let go")

    flush.store.before = before
    return held


# ---------------------------------------------------------------------- in one daemon


def test_an_interrupted_set_resumes_after_another_set(flush: FlushRig) -> None:
    """No byte is sent twice, and no upload is begun twice."""
    first = staged_set(flush.run_directory, files())
    other = staged_set(flush.run_directory, {"o": noise(5 * PART)}, step=6, directory="step-6.abc")
    held = stop_at(flush, 20)
    flush.engine.start("first", first, 1)
    until(lambda: len([r for r in flush.store.requests if r[0] in ("put_part", "put_shard")]) >= 22)
    flush.engine.start("other", other, 1)
    held.set()
    flush.store.before = lambda *_: None
    done = flush.outcome()
    assert isinstance(done, Flushed)
    assert done.flush_id == "other"
    flush.flushed(first)
    assert flush.store.bytes_sent == first.size_bytes + other.size_bytes
    assert flush.store.count("begin") == 6
    assert flush.store.count("parts") == 0, "the records of the same daemon need no confirmation"


@pytest.mark.parametrize("times", [3, 40])
def test_a_set_arrives_whole_after_many_cancelled_flushes(flush: FlushRig, times: int) -> None:
    """Each flush is cancelled at another request."""
    staged = staged_set(flush.run_directory, files())
    total = len(flush.store.requests)
    for number in range(times):
        flush.engine.start(f"f{number}", staged, 1)
        until(lambda total=total: len(flush.store.requests) > total or not flush.events.empty())
        flush.engine.cancel(f"f{number}")
        total = len(flush.store.requests)
        while not flush.events.empty():
            flush.events.get()
    flush.flushed(staged)


@pytest.mark.parametrize("error", [Transient("503"), Permanent("403")])
def test_after_a_failure_only_missing_bytes_are_sent(flush: FlushRig, error: Exception) -> None:
    """The first progress event of the next flush contains the bytes stored before the failure."""
    staged = staged_set(flush.run_directory, files())
    numbers = itertools.count(1)

    def before(kind: str, key: str) -> None:
        if kind == "put_part" and next(numbers) == 25:
            raise error

    flush.store.before = before
    flush.engine.start("f", staged, 1)
    failed = flush.outcome()
    assert isinstance(failed, FlushFailed)
    assert not failed.void
    flush.store.before = lambda *_: None
    until(lambda: flush.engine._idle == 3, what="the workers to leave the failed flush")
    sent = flush.store.bytes_sent
    assert sent > 20 * PART
    flush.engine.start("g", staged, 1)
    progress = flush.events.get(timeout=20)
    assert progress == FlushProgress("g", sent, 0)
    done = flush.outcome()
    assert isinstance(done, Flushed)
    flush.expect_whole(staged, done)
    assert flush.store.bytes_sent == staged.size_bytes


def test_shards_of_an_unsealed_set_are_not_sent_again(flush: FlushRig) -> None:
    """Files are sent while others are written; the sealed set sends the others, and markers last."""
    early = {"a": noise(20 * PART), "b": b"b", ".metadata": b"early"}
    staged = staged_set(flush.run_directory, early, (".metadata",), directory=PARTIAL)
    flush.engine.start("early", staged, 1, is_sealed=False)
    until(lambda: flush.store.bytes_sent == 20 * PART + 1)
    until(lambda: flush.engine._idle == 3, what="the workers to find no further task")
    assert not [key for key in flush.store.objects if key.endswith(".metadata")]
    staged = staged_set(flush.run_directory, {"c": noise(7 * PART, 1)}, directory=PARTIAL)
    flush.engine.start("more", staged, 1, is_sealed=False)
    until(lambda: flush.store.bytes_sent >= 27 * PART)
    os.rename(flush.run_directory / PARTIAL, flush.run_directory / SET)
    staged = found_set(flush.run_directory, (".metadata",))
    done = flush.flushed(staged)
    assert done.bytes_sent == 0, "the flushes before it have sent them"
    events = [event for event in flush.events.queue if not isinstance(event, FlushProgress)]
    assert not events
    assert flush.store.bytes_sent == staged.size_bytes


def test_sealing_interrupts_no_part_in_flight(flush: FlushRig) -> None:
    """The directory is renamed while parts are in flight: they are stored, and no further one fails."""
    staged = staged_set(flush.run_directory, {"a": noise(9 * PART)}, directory=PARTIAL)
    held = threading.Event()
    flush.store.before = lambda what, _: what == "put_part" and held.wait(20)
    flush.engine.start("early", staged, 1, is_sealed=False)
    until(lambda: flush.store.count("put_part") == 3)
    os.rename(flush.run_directory / PARTIAL, flush.run_directory / SET)
    sealed = found_set(flush.run_directory)
    flush.engine.start("sealed", sealed, 1)
    held.set()
    done = flush.outcome()
    assert isinstance(done, Flushed), done
    flush.expect_whole(sealed, done)
    assert flush.store.count("begin") == 1
    assert flush.store.bytes_sent == sealed.size_bytes


def test_parts_in_flight_count_for_the_flush_that_continues_them(flush: FlushRig) -> None:
    """Otherwise the link would look idle whenever a growing set is ordered again."""
    staged = staged_set(flush.run_directory, {"a": noise(3 * PART)})
    held = threading.Event()
    flush.store.before = lambda what, _: what == "put_part" and held.wait(20)
    flush.engine.start("early", staged, 1, is_sealed=False)
    until(lambda: flush.store.count("put_part") == 3)
    flush.engine.start("sealed", staged, 1)
    active = until(
        lambda: (now := flush.engine._active) and now.is_sealed and now,
        what="the sealed set to be flushed",
    )
    held.set()
    done = flush.outcome()
    assert isinstance(done, Flushed)
    assert done.bytes_sent == active.sent_bytes == staged.size_bytes


def test_a_missing_file_does_not_void_an_unsealed_set(flush: FlushRig) -> None:
    """A set that is being written may change, so no failure is posted; the sealed set is checked again."""
    staged = staged_set(flush.run_directory, {"a": noise(3 * PART), "b": b"b"}, directory=PARTIAL)
    (flush.run_directory / PARTIAL / "a").unlink()
    flush.engine.start("early", staged, 1, is_sealed=False)
    until(lambda: flush.store.bytes_sent == 1)
    until(lambda: flush.engine._idle == 3, what="the workers to defer the file")
    staged = staged_set(flush.run_directory, {"a": noise(4 * PART), "b": b"b"})
    flush.flushed(staged)
    assert all(isinstance(event, FlushProgress) for event in flush.events.queue)


@pytest.mark.fault("D09")
def test_a_changed_file_gets_another_key(flush: FlushRig) -> None:
    """Other bytes under the same path are written to a new key; the object under the old key stays."""
    old = staged_set(flush.run_directory, {"a": noise(1500), "b": b"same"}, directory=PARTIAL)
    flush.engine.start("early", old, 1, is_sealed=False)
    until(lambda: len(flush.store.objects) == 2)
    (flush.run_directory / PARTIAL / "a").unlink()
    staged_set(flush.run_directory, {"a": noise(1500, 1)}, directory=PARTIAL)
    os.rename(flush.run_directory / PARTIAL, flush.run_directory / SET)
    done = flush.flushed(found_set(flush.run_directory))
    assert len(flush.store.objects) == 3
    assert flush.store.bytes_sent == 1500 + 1500 + 4
    assert len(done.shards) == 2


def test_a_lost_upload_is_restarted_under_a_new_key(flush: FlushRig) -> None:
    """The store loses the upload of one shard after ten parts; other shards are not sent again."""
    staged = staged_set(flush.run_directory, {"a": noise(20 * PART), "b": noise(5 * PART)})
    lost: list[str] = []

    def after(what: str, key: str) -> None:
        is_late = flush.store.count("put_part") > 10
        if what == "put_part" and key.endswith("/a") and is_late and not lost:
            lost.append(key)
            flush.store.open = {
                upload_id: known
                for upload_id, known in flush.store.open.items()
                if known.upload.key != key
            }

    flush.store.after = after
    done = flush.flushed(staged)
    assert lost
    assert lost[0] not in keys_of(done)
    assert flush.store.bytes_sent <= staged.size_bytes + 20 * PART


def test_a_store_that_loses_every_upload_fails_the_flush(flush: FlushRig) -> None:
    """The number of restarts is limited."""
    flush.store.after = lambda what, _: what == "begin" and flush.store.open.clear()
    flush.engine.start("f", staged_set(flush.run_directory, {"a": noise(3 * PART)}), 1)
    failed = flush.outcome()
    assert isinstance(failed, FlushFailed)
    assert not failed.void
    assert flush.store.count("begin") == 4


@pytest.mark.fault("O09", "O13")
def test_a_key_with_other_bytes_is_not_used_again(flush: FlushRig) -> None:
    """The store has other bytes under the key, and replaces no object: the shard gets another key."""
    staged = staged_set(flush.run_directory, {"a": noise(10), "b": noise(20)})
    taken: list[str] = []

    def before(what: str, key: str) -> None:
        if what == "put_shard" and len(taken) < 3 and key.endswith("a"):
            taken.append(key)
            raise Exists(key)

    flush.store.before = before
    done = flush.flushed(staged)
    assert len(set(taken)) == 3
    assert not set(keys_of(done)) & set(taken)


def test_a_store_that_has_every_key_fails_the_flush(flush: FlushRig) -> None:
    """The number of new keys is limited, and the set is not void."""

    def before(what: str, key: str) -> None:
        if what == "put_shard":
            raise Exists(key)

    staged = staged_set(flush.run_directory, {"a": noise(10)})
    flush.store.before = before
    flush.engine.start("f", staged, 1)
    failed = flush.outcome()
    assert isinstance(failed, FlushFailed)
    assert not failed.void
    assert flush.store.count("put_shard") == 4


@pytest.mark.fault("O11")
def test_a_completion_with_a_lost_reply_is_not_repeated(flush: FlushRig) -> None:
    """The flush fails; the next one finds the object, and sends nothing."""
    staged = staged_set(flush.run_directory, {"a": noise(3 * PART)})

    def after(what: str, key: str) -> None:
        if what == "complete":
            raise Transient("lost")

    flush.store.after = after
    flush.engine.start("f", staged, 1)
    assert isinstance(flush.outcome(), FlushFailed)
    flush.store.after = lambda *_: None
    flush.flushed(staged)
    assert flush.store.bytes_sent == staged.size_bytes


# ---------------------------------------------------------------------- in a restarted daemon


@pytest.mark.fault("H01")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_restarted_daemon_resumes_after_any_request(tmp_path: Path, when: str) -> None:
    """For each request: the daemon ends there, and the next one sends only the missing bytes."""
    requests = 1
    while stopped_at(tmp_path / str(requests), requests, when):
        requests += 1
    assert requests > 12


def stopped_at(directory: Path, request: int, when: str) -> bool:
    """False if the flush needs fewer requests."""
    directory.mkdir()
    flush = FlushRig(directory, connections=1)
    content = {"a": noise(4 * PART + 1), "b": b"b", "c": noise(3 * PART)}
    staged = staged_set(flush.run_directory, content)
    numbers = itertools.count(1)
    dead = threading.Event()

    def die(what: str, key: str) -> None:
        if next(numbers) >= request:
            dead.set()
            threading.Event().wait()  # this daemon gets no reply any more

    setattr(flush.store, when, die)
    flush.engine.start("f", staged, 1)
    until(lambda: dead.is_set() or any(isinstance(e, Flushed) for e in flush.events.queue))
    if not dead.is_set():
        return False
    setattr(flush.store, when, lambda *_: None)
    flush.start_daemon()
    flush.flushed(staged, generation=2)
    # At most one request got no reply.
    assert flush.store.bytes_sent <= staged.size_bytes + PART
    return True


def interrupt_and_restart(flush: FlushRig) -> None:
    """Stop the daemon in the middle of a flush, and start another one."""
    staged = staged_set(flush.run_directory, files())
    held = stop_at(flush, 30)
    flush.engine.start("f", staged, 1)
    until(lambda: len([r for r in flush.store.requests if r[0] in ("put_part", "put_shard")]) >= 32)
    held.set()
    assert isinstance(flush.outcome(), FlushFailed)
    flush.store.before = lambda *_: None
    until(lambda: flush.engine._idle == 3, what="the workers to leave the failed flush")
    flush.start_daemon()


@pytest.mark.fault("G14")
@pytest.mark.parametrize(("age_s", "is_resumed"), [(11 * 3600.0, True), (13 * 3600.0, False)])
def test_a_flush_that_was_left_alone_for_long_begins_again(
    flush: FlushRig, monkeypatch: pytest.MonkeyPatch, age_s: float, *, is_resumed: bool
) -> None:
    """Prune may delete what the earlier daemon has stored, before a manifest names it."""
    interrupt_and_restart(flush)
    store = flush.store
    now_s = store.clock() + age_s
    store.clock = lambda: now_s
    before = {known.upload.key for known in store.open.values()} | set(store.objects)
    uploads = store.uploads
    monkeypatch.setattr(
        store, "uploads", lambda prefix: (replace(each, age_s=age_s) for each in uploads(prefix))
    )
    sent = store.bytes_sent
    done = flush.flushed(found_set(flush.run_directory))
    total = sum(len(data) for data in files().values())
    named = {extent.object.key for shard in done.shards for extent in shard.extents}
    assert bool(named & before) == is_resumed
    assert (store.bytes_sent - sent < total) == is_resumed


def test_a_new_generation_references_what_the_old_one_stored(flush: FlushRig) -> None:
    """After a reboot with the same disk, uploads resume under their earlier keys."""
    interrupt_and_restart(flush)
    done = flush.flushed(found_set(flush.run_directory), generation=2)
    assert {key.split("/")[2] for key in keys_of(done)} == {"00000001", "00000002"}
    assert flush.store.bytes_sent == found_set(flush.run_directory).size_bytes


def test_parts_that_differ_in_the_store_are_sent_again(flush: FlushRig) -> None:
    """A part with another ETag or checksum, or a missing part, is sent again; the others are not."""
    interrupt_and_restart(flush)
    (open_,) = [o for o in flush.store.open.values() if o.upload.key.endswith("large")]
    numbers = sorted(open_.parts)
    assert len(numbers) > 3
    one, two, three = numbers[:3]
    receipt, data = open_.parts[one]
    open_.parts[one] = replace(receipt, etag="another"), data
    receipt, data = open_.parts[two]
    open_.parts[two] = replace(receipt, crc32c=receipt.crc32c ^ 1), data
    del open_.parts[three]
    before = flush.store.bytes_sent
    staged = found_set(flush.run_directory)
    flush.flushed(staged)
    assert flush.store.bytes_sent == staged.size_bytes + 3 * PART
    assert flush.store.bytes_sent > before


@pytest.mark.fault("H01")
def test_without_list_parts_unfinished_shards_are_sent_again(flush: FlushRig) -> None:
    """The store or the role refuses ListParts, so the shards get new keys."""
    interrupt_and_restart(flush)
    first_keys = {upload.upload.key for upload in flush.store.open.values()}

    def before(what: str, key: str) -> None:
        if what == "parts":
            raise Permanent("405 MethodNotAllowed")

    flush.store.before = before
    done = flush.flushed(found_set(flush.run_directory), generation=2)
    assert first_keys
    assert not set(keys_of(done)) & first_keys


def test_a_store_that_refuses_every_request_loses_no_upload(flush: FlushRig) -> None:
    """If HEAD is refused too, for example for invalid credentials, the uploads are kept."""
    interrupt_and_restart(flush)

    def before(what: str, key: str) -> None:
        if what in ("parts", "head"):
            raise Permanent("403 InvalidAccessKeyId")

    flush.store.before = before
    staged = found_set(flush.run_directory)
    flush.engine.start("f", staged, 2)
    assert isinstance(flush.outcome(), FlushFailed)
    flush.store.before = lambda *_: None
    flush.flushed(staged, generation=2)
    assert flush.store.bytes_sent == staged.size_bytes


def test_an_emptied_store_gets_all_shards_again(flush: FlushRig) -> None:
    """The store has lost all uploads and objects: all shards are sent under new keys."""
    interrupt_and_restart(flush)
    flush.store.open.clear()
    flush.store.objects.clear()
    sent = flush.store.bytes_sent
    staged = found_set(flush.run_directory)
    flush.flushed(staged)
    assert flush.store.bytes_sent == sent + staged.size_bytes


def test_a_file_that_changed_before_the_restart_is_sent_whole(flush: FlushRig) -> None:
    """A record of the journal is valid for one inode, size and modification time."""
    interrupt_and_restart(flush)
    path = flush.run_directory / SET / "large"
    content = noise(30 * PART + 7, 99)
    path.unlink()
    path.write_bytes(content)
    flush.flushed(found_set(flush.run_directory))


@pytest.mark.fault("D02")
def test_a_flush_succeeds_without_a_writable_journal(
    flush: FlushRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full; the flush uses the records in memory."""
    monkeypatch.setattr("swansong.openat.write_all", no_space)
    flush.flushed(staged_set(flush.run_directory, files()))


def no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")


# ---------------------------------------------------------------------- references


class LoraRun:
    """A LoRA-like run: the frozen weights never change, the adapters always do."""

    def __init__(self, flush: FlushRig, *, frozen_bytes: int, adapter_bytes: int) -> None:
        self.flush = flush
        self.frozen = noise(frozen_bytes)
        self.adapter_bytes = adapter_bytes

    def step(self, step: int) -> Flushed:
        """Save, flush and commit."""
        staged = staged_set(
            self.flush.run_directory,
            {"model.bin": self.frozen, "adapter.bin": noise(self.adapter_bytes, step)},
            step=step,
            directory=f"step-{step}.abc",
        )
        done = self.flush.flushed(staged)
        self.flush.journal.committed(str(staged.id), done.shards, CommitRef(1, step))
        return done


def test_frozen_weights_are_sent_once(flush: FlushRig) -> None:
    """Five commits, with a restart in between, send the weights once."""
    run = LoraRun(flush, frozen_bytes=200 * PART, adapter_bytes=2 * PART)
    assert run.step(1).bytes_referenced == 0
    for step in range(2, 6):
        done = run.step(step)
        assert done.bytes_referenced == 200 * PART
        if step == 3:
            flush.start_daemon()
    assert flush.store.bytes_sent == 200 * PART + 5 * 2 * PART
    assert flush.store.count("head") == 4, "one HEAD request for each reference"


def test_a_file_that_differs_is_not_hashed(
    flush: FlushRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first bytes of each part show the difference."""
    run = LoraRun(flush, frozen_bytes=PART, adapter_bytes=100 * PART)
    run.step(1)
    hashed: list[int] = []
    read_all = FileBody.read_all
    monkeypatch.setattr(
        FileBody, "read_all", lambda body: (hashed.append(body.size_bytes), read_all(body))[1]
    )
    run.step(2)
    assert hashed == [PART], "only the weights"


def test_only_the_part_with_a_different_bit_is_sent(flush: FlushRig) -> None:
    """The last byte differs."""
    run = LoraRun(flush, frozen_bytes=20 * PART, adapter_bytes=10)
    run.step(1)
    frozen = bytearray(run.frozen)
    frozen[-1] ^= 1
    run.frozen = bytes(frozen)
    assert run.step(2).bytes_referenced == 19 * PART


def test_a_deleted_object_is_not_referenced(flush: FlushRig) -> None:
    """The shard is sent again."""
    run = LoraRun(flush, frozen_bytes=20 * PART, adapter_bytes=10)
    done = run.step(1)
    del flush.store.objects[next(key for key in keys_of(done) if key.endswith("/model.bin"))]
    assert run.step(2).bytes_referenced == 0


def test_an_uncommitted_shard_is_not_referenced(flush: FlushRig) -> None:
    """Only objects of a manifest are protected from deletion."""
    for step in (1, 2):
        staged = staged_set(
            flush.run_directory, {"a": noise(3 * PART)}, step=step, directory=f"step-{step}.abc"
        )
        assert flush.flushed(staged).bytes_referenced == 0


def test_a_new_vm_references_the_newest_commit(tmp_path: Path) -> None:
    """The manifest of the earlier VM has the digests of the parts."""
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    old = FlushRig(tmp_path / "old")
    done = LoraRun(old, frozen_bytes=20 * PART, adapter_bytes=10).step(1)
    new = FlushRig(tmp_path / "new")
    new.store = old.store
    new.start_daemon()
    new.journal.seed(CommitRef(1, 1), done.shards)
    referenced = LoraRun(new, frozen_bytes=20 * PART, adapter_bytes=10).step(2).bytes_referenced
    assert referenced == 20 * PART


def test_the_journal_contains_uploads_until_the_set_is_committed(flush: FlushRig) -> None:
    """The sweeper must not abort them."""
    interrupt_and_restart(flush)
    assert flush.store.open
    for upload_id in flush.store.open:
        assert flush.journal.holds_upload(upload_id)
    assert not flush.journal.holds_upload("another")
    staged = found_set(flush.run_directory)
    done = flush.flushed(staged)
    flush.journal.committed(str(staged.id), done.shards, CommitRef(1, 5))
