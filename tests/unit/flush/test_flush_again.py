# SPDX-License-Identifier: Apache-2.0
"""No byte is sent twice: after another set, under the sealed name, after a restart, after a commit.

A manifest names only chunks that this VM has created, or that the newest commit names.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from swansong_bucket.errors import Exists, Permanent, Transient
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.model import CommitRef
from swansongd.core.events import Flushed, FlushFailed, FlushProgress
from swansongd.flush import sender
from swansongd.flush.sender import chunk_nonce

from testkit.flush_rig import CHUNK, SET, FlushRig, found_set, keys_of, noise, staged_set
from testkit.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_is_late")

PARTIAL = f"{SET}.partial"
HOUR_S = 3600.0


def files() -> dict[str, bytes]:
    """47 chunks: a large file, four files of two chunks and eight small ones."""
    made = {"large": noise(30 * CHUNK + 7)}
    made |= {f"two-{number}": noise(2 * CHUNK - number, 10 + number) for number in range(4)}
    return made | {f"small-{number}": noise(100 + number, 20 + number) for number in range(8)}


def changed(data: bytes, *chunks: int) -> bytes:
    """The data with a different byte at the end of each of these chunks."""
    result = bytearray(data)
    for index in chunks:
        result[min((index + 1) * CHUNK, len(data)) - 1] ^= 1
    return bytes(result)


def step_set(flush: FlushRig, files: dict[str, bytes], step: int) -> str:
    directory = f"s-{step}.abc"
    staged_set(flush.run_directory, files, step=step, directory=directory)
    return directory


# ---------------------------------------------------------------------- in one daemon


def test_an_interrupted_set_resumes_after_another_set(flush: FlushRig) -> None:
    first = staged_set(flush.run_directory, files())
    other = staged_set(flush.run_directory, {"o": noise(5 * CHUNK, 99)}, step=6, directory="s-6")
    held = flush.hold(20)
    flush.started(first)
    flush.wait_for_creates(22)
    flush.started(other, flush_id="other")
    held.set()
    flush.store.before = lambda *_: None
    done = flush.outcome()
    assert isinstance(done, Flushed)
    assert done.flush_id == "other"
    flush.flushed(first)
    assert flush.store.bytes_sent == first.size_bytes + other.size_bytes
    assert flush.store.count("head") == 0, "the same daemon needs no confirmation"


def test_a_set_arrives_whole_after_many_cancelled_flushes(flush: FlushRig) -> None:
    """Each flush is cancelled at another request."""
    staged = staged_set(flush.run_directory, files())
    total = 0
    for number in range(40):
        flush.started(staged, flush_id=f"f{number}")
        until(lambda total=total: len(flush.store.requests) > total or not flush.events.empty())
        flush.engine.cancel(f"f{number}")
        total = len(flush.store.requests)
        while not flush.events.empty():
            flush.events.get()
    flush.flushed(staged)
    assert flush.store.bytes_sent == staged.size_bytes


@pytest.mark.fault("O70")
@pytest.mark.parametrize("error", [Transient("503"), Permanent("403")])
@pytest.mark.parametrize("small_bytes_max", [0, CHUNK])
def test_after_a_failure_only_missing_bytes_are_sent(
    tmp_path: Path, error: Exception, small_bytes_max: int
) -> None:
    """The failure is posted once, and voids no set.  The next flush begins with the bytes stored before."""
    flush = FlushRig(tmp_path, small_bytes_max=small_bytes_max)
    staged = staged_set(flush.run_directory, files())
    numbers = itertools.count(1)

    def before(what: str, key: str) -> None:
        if next(numbers) >= 25:
            raise error

    flush.store.before = before
    assert not flush.failure(staged).void
    flush.store.before = lambda *_: None
    flush.wait_until_idle()
    sent = flush.store.bytes_sent
    assert sent > 20 * CHUNK
    assert not any(isinstance(e, Flushed | FlushFailed) for e in flush.events.queue)
    flush.started(staged, flush_id="g")
    assert flush.events.get(timeout=60) == FlushProgress("g", sent, 0)
    assert isinstance(flush.outcome(), Flushed)
    assert flush.store.bytes_sent == staged.size_bytes


def test_files_of_a_growing_set_are_not_sent_again_under_its_sealed_name(flush: FlushRig) -> None:
    """Files are sent while others are written; the sealed set sends the others."""
    early = {"a": noise(20 * CHUNK), "b": b"b"}
    flush.started(staged_set(flush.run_directory, early, directory=PARTIAL), is_sealed=False)
    until(lambda: flush.store.bytes_sent == 20 * CHUNK + 1)
    flush.wait_until_idle()
    more = staged_set(flush.run_directory, {"c": noise(7 * CHUNK, 1)}, directory=PARTIAL)
    flush.started(more, flush_id="more", is_sealed=False)
    until(lambda: flush.store.bytes_sent == 27 * CHUNK + 1)
    os.rename(flush.run_directory / PARTIAL, flush.run_directory / SET)
    staged = found_set(flush.run_directory)
    done = flush.flushed(staged)
    assert done.bytes_sent == 0, "the flushes before it have sent them"
    assert all(isinstance(event, FlushProgress) for event in flush.events.queue)
    assert flush.store.bytes_sent == staged.size_bytes


def test_sealing_interrupts_no_request_in_flight(tmp_path: Path) -> None:
    """Its bytes count for the flush that continues it: else the link would look idle."""
    flush = FlushRig(tmp_path, connections=4)
    staged = staged_set(flush.run_directory, {"a": noise(3 * CHUNK)}, directory=PARTIAL)
    held = flush.hold()
    flush.started(staged, is_sealed=False)
    flush.wait_for_creates(3)
    os.rename(flush.run_directory / PARTIAL, flush.run_directory / SET)
    sealed = staged_set(flush.run_directory, {"b": noise(6 * CHUNK, 1)})
    flush.started(sealed, flush_id="sealed")
    until(lambda: (now := flush.engine._active) and now.is_sealed)
    held.set()
    done = flush.outcome()
    assert isinstance(done, Flushed), done
    flush.expect_whole(sealed, done)
    assert done.bytes_sent == flush.store.bytes_sent == sealed.size_bytes


def test_a_missing_file_does_not_void_an_unsealed_set(flush: FlushRig) -> None:
    """A set that is being written may change, so no failure is posted; the sealed set is checked again."""
    content = {"a": noise(3 * CHUNK), "b": b"b"}
    staged = staged_set(flush.run_directory, content, directory=PARTIAL)
    (flush.run_directory / PARTIAL / "a").unlink()
    flush.started(staged, is_sealed=False)
    until(lambda: flush.store.bytes_sent == 1)
    flush.wait_until_idle()
    flush.flushed(staged_set(flush.run_directory, content))
    assert all(isinstance(event, FlushProgress) for event in flush.events.queue)


def test_one_of_two_equal_chunks_that_are_created_at_once_is_named(
    flush: FlushRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The set is complete then: no chunk is read again."""
    reads, read = itertools.count(), os.preadv
    monkeypatch.setattr(os, "preadv", lambda *arguments: (next(reads), read(*arguments))[1])
    held = flush.hold()
    flush.started(staged_set(flush.run_directory, {"a": bytes(CHUNK), "b": bytes(CHUNK)}))
    flush.wait_for_creates(2)
    held.set()
    done = flush.outcome()
    assert isinstance(done, Flushed)
    assert len(set(keys_of(done))) == 1
    assert next(reads) == 2
    assert flush.known.holds(e.chunk for shard in done.shards for e in shard.extents)


# ---------------------------------------------------------------------- planted objects


@pytest.mark.fault("O09", "O13")
def test_a_key_with_other_bytes_is_not_used_again(flush: FlushRig) -> None:
    """The store replaces no object: the chunk gets another nonce.  Refused bytes do not count as sent."""
    staged = staged_set(flush.run_directory, {"a": noise(10), "b": noise(20)})
    taken: list[str] = []

    def before(what: str, key: str) -> None:
        if not taken:
            taken.append(key)
            flush.store.objects[key] = b"other bytes"

    flush.store.before = before
    done = flush.flushed(staged)
    assert done.bytes_sent == 30
    assert not set(keys_of(done)) & set(taken)
    assert flush.store.count("create") == 3
    del flush.store.objects[taken[0]]  # all others have the bytes of their names


def test_a_store_that_has_every_key_fails_the_flush(flush: FlushRig) -> None:
    """The number of new keys is limited, and the set is not void."""

    def before(what: str, key: str) -> None:
        raise Exists(key)

    flush.store.before = before
    assert not flush.failure(staged_set(flush.run_directory, {"a": noise(10)})).void
    assert flush.store.count("create") == 2


@pytest.mark.fault("S25")
def test_an_object_that_someone_else_created_is_never_named(flush: FlushRig) -> None:
    """Its name has the digest of bytes that can be predicted, such as frozen weights, and it has other bytes.

    It is under the first nonce of the daemon, and under others.
    """
    data = noise(2 * CHUNK)
    for part in (data[:CHUNK], data[CHUNK:]):
        for nonce in ("n1", "n2", "x"):
            key = RunKeys("r").chunk(1, blake3(part).digest(), nonce)
            flush.store.objects[key] = noise(CHUNK, 99)
    planted = set(flush.store.objects)
    staged = staged_set(flush.run_directory, {"a": data})
    for _ in range(3):  # the first flush meets n2
        flush.started(staged)
        done = flush.outcome()
        flush.wait_until_idle()
    assert isinstance(done, Flushed)
    flush.expect_whole(staged, done)
    assert not set(keys_of(done)) & planted
    flush.start_daemon()
    assert not set(keys_of(flush.flushed(staged))) & planted
    for key in planted:
        del flush.store.objects[key]


def test_a_nonce_cannot_be_predicted() -> None:
    """Of 2**32, and a valid part of a key."""
    nonces = {chunk_nonce() for _ in range(1000)}
    assert len(nonces) > 990
    assert all(RunKeys("r").is_data(RunKeys("r").chunk(1, bytes(32), nonce)) for nonce in nonces)
    assert min(map(len, nonces)) == 8


@pytest.mark.fault("O11")
def test_a_chunk_whose_reply_was_lost_is_not_named(flush: FlushRig) -> None:
    """It is created again under another nonce, and is an orphan; no other chunk is sent again."""
    staged = staged_set(flush.run_directory, {"a": noise(3 * CHUNK)})
    lost: list[str] = []

    def after(what: str, key: str) -> None:
        if not lost:
            lost.append(key)
            raise Transient("lost")

    flush.store.after = after
    flush.failure(staged)
    flush.wait_until_idle()
    done = flush.flushed(staged)
    assert lost[0] not in keys_of(done)
    assert flush.store.bytes_sent == staged.size_bytes + CHUNK


# ---------------------------------------------------------------------- in a restarted daemon


@pytest.mark.fault("H01", "O61", "O70")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("small_bytes_max", [0, CHUNK])
def test_a_restarted_daemon_resumes_after_any_request(
    tmp_path: Path, when: str, small_bytes_max: int
) -> None:
    """For each request: the daemon ends there, and the next one sends what no daemon has stored.

    The newest commit of another VM has some of the chunks.
    """

    def stopped_at(directory: Path, request: int) -> bool:
        """False if the flush needs fewer requests."""
        directory.mkdir()
        flush = FlushRig(directory, connections=1, small_bytes_max=small_bytes_max)
        data = noise(4 * CHUNK + 1)
        flush.known.seed(CommitRef(1, 1), flush.saved({"a": data}, 1).shards)
        content = {"a": changed(data, 1, 3), "c": noise(3 * CHUNK, 2)}
        content |= {f"{n}": noise(200, n) for n in range(5)}
        name = step_set(flush, content, 2)
        staged = found_set(flush.run_directory, step=2, directory=name)
        sent, numbers, dead = flush.store.bytes_sent, itertools.count(1), threading.Event()

        def die(what: str, key: str) -> None:
            if next(numbers) >= request:
                dead.set()
                threading.Event().wait()  # this daemon gets no reply any more

        setattr(flush.store, when, die)
        flush.started(staged)
        until(lambda: dead.is_set() or any(isinstance(e, Flushed) for e in flush.events.queue))
        if not dead.is_set():
            return False
        setattr(flush.store, when, lambda *_: None)
        flush.start_daemon()
        flush.flushed(staged, generation=2)
        # At most one create got no reply.  The restarted daemon has not read the commit.
        assert flush.store.bytes_sent - sent <= staged.size_bytes + CHUNK
        return True

    requests = 1
    while stopped_at(tmp_path / str(requests), requests):
        requests += 1
    assert requests > 6


def interrupt_and_restart(flush: FlushRig) -> int:
    """Stop the daemon during a flush of ``files()``, and start another one; returns the bytes stored."""
    held = flush.hold(30, fails=True)
    flush.started(staged_set(flush.run_directory, files()))
    flush.wait_for_creates(32)
    held.set()
    outcome = flush.outcome()
    assert isinstance(outcome, FlushFailed)
    assert outcome.kind == "transient"
    flush.store.before = lambda *_: None
    flush.wait_until_idle()
    flush.start_daemon()
    return sum(map(len, flush.store.objects.values()))


@pytest.mark.fault("H01")
def test_a_restarted_daemon_confirms_each_chunk_once_and_sends_the_others(flush: FlushRig) -> None:
    """Also under another generation, and with a file of known chunks that lost its last line."""
    interrupt_and_restart(flush)
    stored = set(flush.store.objects)
    done = flush.flushed(found_set(flush.run_directory), generation=2)
    assert {key.split("/")[2] for key in keys_of(done)} == {"00000001", "00000002"}
    assert stored < set(keys_of(done))
    assert flush.store.bytes_sent == found_set(flush.run_directory).size_bytes
    assert sorted(key for what, key in flush.store.requests if what == "head") == sorted(stored)
    path = flush.own_directory / "chunks"
    path.write_bytes(path.read_bytes()[:-5])
    flush.start_daemon()
    flush.flushed(found_set(flush.run_directory))
    assert flush.store.bytes_sent <= found_set(flush.run_directory).size_bytes + CHUNK


@pytest.mark.fault("O60")
@pytest.mark.parametrize("loss", ["gone", "truncated", "longer"])
def test_a_restarted_daemon_creates_lost_chunks_again(flush: FlushRig, loss: str) -> None:
    stored = interrupt_and_restart(flush)
    for key, data in list(flush.store.objects.items())[:5]:
        if loss == "gone":
            del flush.store.objects[key]
        else:
            flush.store.objects[key] = data[:-1] if loss == "truncated" else data + b"x"
        stored -= len(data)
    sent, lost = flush.store.bytes_sent, list(flush.store.objects)[:5]
    staged = found_set(flush.run_directory)
    done = flush.flushed(staged)
    assert flush.store.bytes_sent - sent == staged.size_bytes - stored
    if loss != "gone":
        assert not set(keys_of(done)) & set(lost)
        for key in lost:
            del flush.store.objects[key]


@pytest.mark.fault("G14")
@pytest.mark.parametrize(("later_s", "is_named"), [(11 * HOUR_S, True), (13 * HOUR_S, False)])
@pytest.mark.parametrize("restarts", [True, False])
def test_a_chunk_without_a_commit_is_named_up_to_an_age(
    flush: FlushRig, later_s: float, *, is_named: bool, restarts: bool
) -> None:
    """Prune may delete it before a manifest names it.  By the store's clock after a restart."""
    stored = interrupt_and_restart(flush)
    before = set(flush.store.objects)
    staged = found_set(flush.run_directory)
    if not restarts:  # this daemon has confirmed them when they were young, and is interrupted, too
        held = flush.hold(5, fails=True)
        flush.started(staged)
        flush.wait_for_creates(7)
        held.set()
        assert isinstance(flush.outcome(), FlushFailed)
        flush.store.before = lambda *_: None
        flush.wait_until_idle()
        stored = sum(map(len, flush.store.objects.values()))
    flush.later_s += later_s
    sent = flush.store.bytes_sent
    done = flush.flushed(staged)
    assert flush.store.bytes_sent - sent == staged.size_bytes - (stored if is_named else 0)
    assert bool(set(keys_of(done)) & before) == is_named


def test_a_flush_may_last_longer_than_that_age(flush: FlushRig) -> None:
    """Else its first chunks would be sent again at its end, and then the next ones."""
    numbers = itertools.count(1)

    def before(what: str, key: str) -> None:
        if next(numbers) == 15:
            flush.later_s += 14 * HOUR_S

    flush.store.before = before
    staged = staged_set(flush.run_directory, files())
    flush.flushed(staged)
    assert flush.store.bytes_sent == staged.size_bytes


# ---------------------------------------------------------------------- after a commit


contents = st.lists(st.integers(0, 3), max_size=6)
"""A file: its chunks by number; chunks with the same number are equal."""
sets = st.dictionaries(
    st.sampled_from("abc"), st.tuples(contents, st.integers(0, CHUNK - 1)), min_size=1
)


def chunks_of(numbers: list[int], rest_bytes: int) -> list[bytes]:
    chunks = [noise(CHUNK, number) for number in numbers] + [noise(rest_bytes, 9)]
    return [chunk for chunk in chunks if chunk]


@settings(max_examples=40, deadline=None)
@given(
    history=st.lists(
        st.tuples(sets, st.sampled_from(["commit", "drop", "restart", "delete", "superseded"])),
        max_size=6,
    )
)
def test_any_history_of_commits_sends_only_what_is_not_stored(
    history: list[tuple[dict[str, tuple[list[int], int]], str]],
) -> None:
    """Sets are committed or not, daemons restart, other VMs commit, chunks of old commits are deleted.

    No chunk is sent that the newest commit has, or that this VM has created since.  No chunk that only an
    older commit has is named: it is deleted, and ``flushed`` compares the bytes.
    """
    with tempfile.TemporaryDirectory() as name:
        flush = FlushRig(Path(name), connections=1)
        store, named, created = flush.store, set[bytes](), set[bytes]()
        for step, (files, event) in enumerate(history, 1):
            pieces = {path: chunks_of(*parts) for path, parts in files.items()}
            content = {path: b"".join(parts) for path, parts in pieces.items()}
            chunks = {chunk for parts in pieces.values() for chunk in parts}
            staged = staged_set(flush.run_directory, content, step=step, directory=f"s-{step}")
            before = store.bytes_sent
            done = flush.flushed(staged)
            assert store.bytes_sent - before == sum(map(len, chunks - named - created))
            referenced = [len(c) for parts in pieces.values() for c in parts if c in named]
            assert done.bytes_referenced == sum(referenced)
            created |= chunks - named
            if event != "drop":
                flush.known.committed(done.shards, CommitRef(1, step))
                named, created = chunks, created - chunks
            if event == "superseded":
                flush.known.superseded(CommitRef(1, step, is_final=True))
                named = set()
            if event == "restart":
                flush.start_daemon()  # it has not read the newest commit
            for key in list(store.objects):
                if event == "delete" and blake3(store.objects[key]).digest() not in {
                    blake3(chunk).digest() for chunk in named | created
                }:
                    del store.objects[key]


def test_small_files_are_named_within_their_chunks(tmp_path: Path) -> None:
    """Their neighbours in a shared chunk change.  A file that seems unchanged is sent once more, then named.

    The store confirms each chunk once.
    """
    flush = FlushRig(tmp_path, small_bytes_max=CHUNK)
    content = {f"d/{n:03d}": noise(100, n) for n in range(40)}
    flush.saved(content, 1)
    content |= {"d/007": noise(100, 98), "d/039": noise(10, 98)}
    second = flush.saved(content, 2)
    assert (second.bytes_sent, second.bytes_referenced) == (1910, 2000)  # the chunks of both files
    content |= {"d/007": noise(100, 99), "d/039": noise(10, 99)}
    flush.store.requests.clear()
    third = flush.saved(content, 3)
    assert (third.bytes_sent, third.bytes_referenced) == (110, 3800)
    heads = [key for what, key in flush.store.requests if what == "head"]
    assert sorted(heads) == sorted(set(keys_of(second)))
    fourth = flush.saved(content, 4)
    assert fourth.bytes_sent == 0
    assert set(keys_of(fourth)) == set(keys_of(third))


def test_a_small_file_is_never_named_for_its_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of the same size and CRC32C can be made: ``flushed`` finds the bytes of each in the store."""
    monkeypatch.setattr(sender, "crc32c", lambda _: 7)
    flush = FlushRig(tmp_path, small_bytes_max=CHUNK)
    for step in range(1, 5):
        content = {f"d/{n:03d}": noise(100, 100 * step + n) for n in range(20)}
        assert flush.saved(content, step).bytes_sent == 2000


def test_a_new_vm_names_the_whole_chunks_of_the_newest_commit(tmp_path: Path) -> None:
    """A manifest has the digests of chunks: small files are named if all files in their chunk are equal."""
    content = {"model": noise(20 * CHUNK), "0": noise(50, 1), "1": noise(50, 2)}
    (tmp_path / "old").mkdir()
    old = FlushRig(tmp_path / "old", small_bytes_max=CHUNK)
    done = old.saved(content, 1)
    for name, files, sent_bytes in [("equal", content, 0), ("new", content | {"1": b"x"}, 51)]:
        (tmp_path / name).mkdir()
        new = FlushRig(tmp_path / name, small_bytes_max=CHUNK)
        new.store = old.store
        new.start_daemon()
        new.known.seed(CommitRef(1, 1), done.shards)
        assert new.saved(files, 2).bytes_sent == sent_bytes


@pytest.mark.fault("O60")
@pytest.mark.parametrize("small_bytes_max", [0, CHUNK])
def test_a_lost_chunk_of_the_newest_commit_is_sent(tmp_path: Path, small_bytes_max: int) -> None:
    """It was deleted, or has another size; the others are named."""
    flush = FlushRig(tmp_path, small_bytes_max=small_bytes_max)
    content = {f"{n}": noise(200, n) for n in range(10)} | {"model": noise(10 * CHUNK)}
    done = flush.saved(content, 1)
    sizes = {e.chunk.key: e.chunk.size_bytes for s in done.shards for e in s.extents}
    gone, short = min(sizes), max(sizes)
    del flush.store.objects[gone]
    flush.store.objects[short] = flush.store.objects[short][1:]
    again = flush.saved(content, 2)
    assert again.bytes_sent == sizes[gone] + sizes[short]
    assert not {gone, short} & set(keys_of(again))


@pytest.mark.fault("O62")
@pytest.mark.parametrize(
    "commit",
    [
        lambda flush: flush.known.superseded(CommitRef(2, 1)),
        lambda flush: flush.known.committed((), CommitRef(1, 8)),
    ],
    ids=["of another VM", "of this VM"],
)
def test_a_commit_during_a_flush_makes_its_references_obsolete(
    flush: FlushRig, commit: Callable[[FlushRig], None]
) -> None:
    """The set is not reported as stored before their bytes are sent."""
    data = noise(10 * CHUNK)
    flush.saved({"a": data}, 1)
    name = step_set(flush, {"a": data, "b": noise(CHUNK, 1)}, 9)

    def before(what: str, key: str) -> None:
        if what == "create":
            flush.store.before = lambda *_: None
            commit(flush)

    flush.store.before = before
    done = flush.flushed(found_set(flush.run_directory, step=9, directory=name))
    assert (done.bytes_referenced, done.bytes_sent) == (0, 11 * CHUNK)


def test_progress_counts_named_chunks_as_stored_and_not_as_sent(flush: FlushRig) -> None:
    """The forecast knows how many bytes are left."""
    data = noise(20 * CHUNK)
    flush.saved({"a": data}, 1)
    name = step_set(flush, {"a": changed(data, 18, 19)}, 9)
    held = flush.hold(fails=True)
    flush.started(found_set(flush.run_directory, step=9, directory=name))
    compared = FlushProgress("f", 18 * CHUNK, 0, 18 * CHUNK)
    until(lambda: compared in flush.events.queue, what="the chunks to be compared")
    held.set()
    assert isinstance(flush.outcome(), FlushFailed)


@pytest.mark.fault("D02")
def test_a_flush_succeeds_without_a_writable_file_of_known_chunks(
    flush: FlushRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full; the flush uses what is in memory."""

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("swansong.openat.write_all", no_space)
    flush.saved(files(), 1)
    assert flush.saved(files(), 2).bytes_sent == 0
