# SPDX-License-Identifier: Apache-2.0
"""Only the parts of a file that changed since the newest commit are sent; every extent holds its bytes."""

from __future__ import annotations

import itertools
import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swansongd.core.events import Flushed, FlushFailed, FlushProgress
from swansongd.errors import NotFound, Transient
from swansongd.flush import known_parts
from swansongd.flush.body import FileBody, part_size_for
from swansongd.flush.delta import SAMPLES_MAX, sample_of
from swansongd.flush.known_parts import KnownParts, merged
from swansongd.model import CommitRef, Extent, StoredObject, StoredShard

from testkit.committed import digests_of
from testkit.flush_rig import PART, FlushRig, found_set, staged_set
from testkit.waiting import until


def noise(size_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


def changed(data: bytes, *parts: int, seed: int = 1) -> bytes:
    """The data with a different byte at the end of each of these parts."""
    result = bytearray(data)
    for index in parts:
        at = min((index + 1) * PART, len(data)) - 1
        result[at] = (result[at] + seed) % 256
    return bytes(result)


class DeltaRun:
    """A run that saves files, and commits each set."""

    def __init__(self, tmp_path: Path, *, connections: int = 3) -> None:
        self.flush = FlushRig(tmp_path, connections=connections)
        self.steps = itertools.count(1)

    def save(self, files: dict[str, bytes], *, commits: bool = True) -> Flushed:
        step = next(self.steps)
        staged = staged_set(self.flush.run_directory, files, step=step, directory=f"s-{step}.abc")
        done = self.flush.flushed(staged)
        if commits:
            self.flush.journal.committed(str(staged.id), done.shards, CommitRef(1, step))
        return done

    def sent_bytes(self, files: dict[str, bytes]) -> int:
        """Bytes that a set with these files sends."""
        before = self.flush.store.bytes_sent
        done = self.save(files)
        sent_bytes = self.flush.store.bytes_sent - before
        assert sent_bytes + done.bytes_referenced == sum(map(len, files.values()))
        return sent_bytes


@pytest.fixture
def run(tmp_path: Path) -> Iterator[DeltaRun]:
    made = DeltaRun(tmp_path)
    yield made
    until(lambda: not made.flush.open_files(), what="every staged file to be closed")


# ---------------------------------------------------------------------- any sequence of commits

contents = st.lists(st.integers(0, 3), max_size=6)
"""A file: its parts by number; parts with the same number are equal."""
sets = st.dictionaries(
    st.sampled_from("abc"), st.tuples(contents, st.integers(0, PART - 1)), min_size=1
)


def content_of(parts: list[int], rest_bytes: int) -> bytes:
    return b"".join(noise(PART, number) for number in parts) + noise(rest_bytes, 9)


def parts_of(data: bytes) -> list[bytes]:
    return [data[start : start + PART] for start in range(0, len(data), PART)]


@settings(max_examples=40, deadline=None)
@given(
    history=st.lists(
        st.tuples(sets, st.sampled_from(["commit", "drop", "restart", "delete"])), max_size=6
    )
)
def test_any_sequence_of_commits_sends_only_what_the_newest_commit_lacks(
    history: list[tuple[dict[str, tuple[list[int], int]], str]],
) -> None:
    """Sets are committed or not, daemons restart, objects of old commits are deleted.

    The bytes in the extents equal the staged bytes (``flushed`` compares them).  No part is sent that the
    newest commit has.  No object of an older commit is needed: those that the newest one lacks are deleted.
    """
    with tempfile.TemporaryDirectory() as name:
        run = DeltaRun(Path(name))
        store, known, objects = run.flush.store, set[bytes](), set[str]()
        for files, event in history:
            data = {path: content_of(*parts) for path, parts in files.items()}
            unknown = [
                part for each in data.values() for part in parts_of(each) if part not in known
            ]
            before = store.bytes_sent
            done = run.save(data, commits=event != "drop")
            assert store.bytes_sent - before == sum(map(len, unknown))
            if event != "drop":
                known = {part for each in data.values() for part in parts_of(each)}
                objects = {e.object.key for shard in done.shards for e in shard.extents}
            if event == "restart":
                run.flush.start_daemon()
            if event == "delete":
                for key in set(store.objects) - objects:
                    del store.objects[key]
            for shard in done.shards:
                assert merged(shard.extents) == shard.extents


# ---------------------------------------------------------------------- one file


@pytest.mark.parametrize("parts", [(0,), (39,), (3, 4, 20), tuple(range(0, 40, 8)), ()])
def test_only_changed_parts_of_a_file_are_sent(run: DeltaRun, parts: tuple[int, ...]) -> None:
    """As one object that has only these parts; the last part is shorter."""
    data = noise(39 * PART + 7)
    run.save({"a": data})
    begun, heads = run.flush.store.count("begin"), run.flush.store.count("head")
    expected = sum(len(parts_of(data)[index]) for index in parts)
    assert run.sent_bytes({"a": changed(data, *parts)}) == expected
    assert run.flush.store.count("begin") - begun == (len(parts) > 1)
    assert run.flush.store.count("head") - heads == 1, "one request for each referenced object"


def test_a_file_without_a_known_part_is_not_read_twice(
    run: DeltaRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first bytes of its parts exclude them all."""
    run.save({"a": noise(40 * PART)})
    monkeypatch.setattr(FileBody, "read_all", lambda _: pytest.fail("a part was compared"))
    assert run.sent_bytes({"a": noise(40 * PART, 1)}) == 40 * PART


def test_parts_with_equal_first_bytes_are_compared_whole(
    run: DeltaRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 40 parts with known first bytes, the sample shows that none is equal, and only it is read."""
    monkeypatch.setattr(known_parts, "HEAD_BYTES", 10)
    data = noise(40 * PART)
    run.save({"a": data})
    compared = hook_comparisons(monkeypatch)
    assert run.sent_bytes({"a": changed(data, *range(40))}) == 40 * PART
    assert len(compared) == len(sample_of(range(40)))
    assert run.sent_bytes({"a": changed(data, *range(40), 5, seed=1)}) == PART


def hook_comparisons(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    compared: list[int] = []
    read_all = FileBody.read_all
    monkeypatch.setattr(
        FileBody, "read_all", lambda body: (compared.append(body.size_bytes), read_all(body))[1]
    )
    return compared


def test_on_a_new_vm_a_sample_decides_whether_a_file_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest has digests of whole parts only.  A file in which all parts differ is hardly read."""
    data = {"same": noise(40 * PART), "part": noise(40 * PART, 1), "new": noise(40 * PART, 2)}
    run = DeltaRun(tmp_path)
    done = run.save(data, commits=False)
    run.flush.journal.seed(CommitRef(1, 1), done.shards)
    compared = hook_comparisons(monkeypatch)
    data |= {"part": changed(data["part"], *range(20)), "new": noise(40 * PART, 3)}
    assert run.sent_bytes(data) == 60 * PART
    assert len(compared) == 80 + len(sample_of(range(40)))
    assert run.sent_bytes(data | {"renamed": data.pop("same")}) == 0, (
        "this VM knows the first bytes"
    )


def test_a_renamed_or_moved_part_is_not_sent(run: DeltaRun) -> None:
    """A part is known by its bytes, wherever it was."""
    data = noise(10 * PART)
    run.save({"a": data})
    assert run.sent_bytes({"b": data[5 * PART :] + data[: 5 * PART], "c": data[:PART]}) == 0
    assert run.sent_bytes({"b": noise(3 * PART, 1) + data[:PART]}) == 3 * PART


def test_a_file_that_grows_or_shrinks_sends_its_end(run: DeltaRun) -> None:
    data = noise(20 * PART + 5)
    run.save({"a": data})
    assert run.sent_bytes({"a": data + noise(2 * PART, 1)}) == 2 * PART + 5
    assert run.sent_bytes({"a": data[: 3 * PART + 1]}) == 1


def test_every_extent_leads_to_the_object_with_the_bytes(run: DeltaRun) -> None:
    """After five commits, the shard has extents in five objects, and its manifest names all of them."""
    data = noise(10 * PART)
    run.save({"a": data})
    for index in range(4):
        data = changed(data, index)
        done = run.save({"a": data})
    (shard,) = done.shards
    assert [extent.size_bytes for extent in shard.extents] == [PART] * 4 + [6 * PART]
    assert len({extent.object for extent in shard.extents}) == 5
    heads = run.flush.store.count("head")
    assert run.sent_bytes({"a": data}) == 0
    assert run.flush.store.count("head") - heads == 5, "each object is confirmed once"


def test_files_in_one_object_are_confirmed_by_one_request(run: DeltaRun) -> None:
    """Ten files share an object, as small files do."""
    data = noise(10 * PART)
    run.save({"a": data})
    run.save({str(n): part for n, part in enumerate(parts_of(data))})
    heads = run.flush.store.count("head")
    assert run.sent_bytes({str(n): part for n, part in enumerate(parts_of(data))}) == 0
    assert run.flush.store.count("head") - heads == 1


@pytest.mark.fault("O60")
def test_parts_of_a_deleted_object_are_sent(run: DeltaRun) -> None:
    """One of two referenced objects was deleted, or has another size: only its parts are sent."""
    data = noise(10 * PART)
    run.save({"a": data})
    data = changed(data, 2, 3)
    done = run.save({"a": data})
    second = done.shards[0].extents[1].object
    del run.flush.store.objects[second.key]
    assert run.sent_bytes({"a": changed(data, 9)}) == 3 * PART
    (first,) = (e.object.key for e in done.shards[0].extents[:1])
    run.flush.store.objects[first] += b"x"
    assert run.sent_bytes({"a": changed(data, 9)}) == 7 * PART


def test_another_part_size_sends_the_file_whole(run: DeltaRun) -> None:
    """No part is equal then; so the part size of a path stays."""
    assert part_size_for(10**4, wanted_bytes=1000, least_bytes=1, known_bytes=2000) == 2000
    assert part_size_for(10**4, wanted_bytes=1000, least_bytes=1, known_bytes=500) == 500
    assert part_size_for(10**4, wanted_bytes=1000, least_bytes=600, known_bytes=500) == 1000
    assert part_size_for(10**4, wanted_bytes=1000, least_bytes=1, known_bytes=4000) == 1000
    assert part_size_for(2 * 10**7, wanted_bytes=2000, least_bytes=1, known_bytes=1000) == 2000


# ---------------------------------------------------------------------- interruptions


@pytest.mark.fault("H01", "O61")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_restarted_daemon_resumes_a_delta_after_any_request(tmp_path: Path, when: str) -> None:
    """For each request and each comparison: the daemon ends there, and the next one sends what is missing."""
    requests = 1
    while stopped_at(tmp_path / str(requests), requests, when):
        requests += 1
    assert requests > 6


def stopped_at(directory: Path, request: int, when: str) -> bool:
    """False if the flush needs fewer requests."""
    directory.mkdir()
    run = DeltaRun(directory, connections=1)
    data = noise(20 * PART)
    run.save({"a": data, "b": data[:PART], "c": noise(PART, 1)})
    flush = run.flush
    files = {"a": changed(data, 1, 2, 19), "b": noise(PART, 2), "c": noise(PART, 1)}
    staged = staged_set(flush.run_directory, files, step=9, directory="s-9.abc")
    before, numbers, dead = flush.store.bytes_sent, itertools.count(1), threading.Event()

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
    assert flush.store.bytes_sent - before <= 5 * PART
    return True


@pytest.mark.fault("O60")
def test_a_restarted_daemon_confirms_the_objects_that_its_predecessor_compared_with(
    run: DeltaRun,
) -> None:
    """The object is deleted while no daemon runs: the parts are compared again, and sent."""
    data = noise(10 * PART)
    (first,) = run.save({"a": data}).shards
    held = hold(run.flush, lambda what, _: what == "complete")
    files = {"a": changed(data, 1, 2)}
    staged = staged_set(run.flush.run_directory, files, step=9, directory="s-9.abc")
    run.flush.engine.start("f", staged, 1)
    until(lambda: run.flush.store.count("complete") == 2, what="the completion")
    held.set()
    assert isinstance(run.flush.outcome(), FlushFailed)
    del run.flush.store.objects[first.extents[0].object.key]
    run.flush.store.before = lambda *_: None
    run.flush.start_daemon()
    before = run.flush.store.bytes_sent
    assert run.flush.flushed(staged).bytes_referenced == 0
    assert run.flush.store.bytes_sent - before == 10 * PART


def hold(flush: FlushRig, is_held: Callable[[str, str], bool]) -> threading.Event:
    """Hold these requests until the event is set; then they fail."""
    held = threading.Event()

    def before(what: str, key: str) -> None:
        if is_held(what, key):
            assert held.wait(20)
            raise Transient("let go")

    flush.store.before = before
    return held


def test_a_lost_upload_of_changed_parts_is_restarted(run: DeltaRun) -> None:
    """Only the changed parts are sent again, under a new key."""
    data = noise(30 * PART)
    run.save({"a": data})
    lost: list[str] = []

    def after(what: str, key: str) -> None:
        if what == "put_part" and not lost:
            lost.append(key)
            run.flush.store.open.clear()
            raise NotFound("the upload")

    run.flush.store.after = after
    before = run.flush.store.bytes_sent
    done = run.save({"a": changed(data, *range(5))})
    assert run.flush.store.bytes_sent - before <= 10 * PART
    assert lost[0] not in {extent.object.key for extent in done.shards[0].extents}


def test_a_cancelled_comparison_continues_in_the_next_flush(
    run: DeltaRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that were compared are not compared again."""
    data = noise(40 * PART)
    run.save({"a": data})
    files = {"a": changed(data, 7)}
    staged = staged_set(run.flush.run_directory, files, step=9, directory="s-9.abc")
    compared = hook_comparisons(monkeypatch)
    counted, released = FileBody.read_all, threading.Event()

    def read_all(body: FileBody) -> int:
        if len(compared) >= 10:
            assert released.wait(20)
        return counted(body)

    monkeypatch.setattr(FileBody, "read_all", read_all)
    run.flush.engine.start("f", staged, 1)
    until(lambda: len(compared) >= 10, what="ten comparisons")
    run.flush.engine.cancel("f")
    released.set()
    done = run.flush.flushed(staged)
    assert done.bytes_referenced == 39 * PART
    assert len(compared) <= 39 + 3, "at most the parts in flight are compared twice"


def test_early_shards_send_only_changed_parts(run: DeltaRun) -> None:
    """Also while the set is still being written; sealing sends nothing again."""
    data = noise(10 * PART)
    run.save({"a": data})
    flush, partial = run.flush, "s-9.abc.partial"
    before = flush.store.bytes_sent
    early = staged_set(flush.run_directory, {"a": changed(data, 0, 5)}, step=9, directory=partial)
    flush.engine.start("early", early, 1, is_sealed=False)
    until(lambda: flush.store.bytes_sent - before == 2 * PART)
    (flush.run_directory / partial).rename(flush.run_directory / "s-9.abc")
    flush.flushed(found_set(flush.run_directory, step=9, directory="s-9.abc"))
    assert flush.store.bytes_sent - before == 2 * PART


def test_a_file_that_changes_after_the_comparison_voids_the_set(run: DeltaRun) -> None:
    """Between the comparison and the sending of the changed parts."""
    data = noise(10 * PART)
    run.save({"a": data})
    files = {"a": changed(data, 0, 5)}
    staged = staged_set(run.flush.run_directory, files, step=9, directory="s-9.abc")

    def before(what: str, key: str) -> None:
        if what == "begin":
            path = run.flush.run_directory / "s-9.abc" / "a"
            path.unlink()
            path.write_bytes(data)

    run.flush.store.before = before
    run.flush.engine.start("f", staged, 1)
    failed = run.flush.outcome()
    assert isinstance(failed, FlushFailed)
    assert failed.void


@pytest.mark.fault("O62")
def test_a_commit_in_between_makes_references_to_the_older_commit_obsolete(run: DeltaRun) -> None:
    """A cleanup may delete what only the older commit has; the first set commits last."""
    data, other = noise(10 * PART), noise(10 * PART, 1)
    run.save({"a": data})
    flush = run.flush
    first = staged_set(flush.run_directory, {"a": other}, step=8, directory="s-8.abc")
    shards = flush.flushed(first).shards
    second = staged_set(flush.run_directory, {"a": changed(data, 0)}, step=9, directory="s-9.abc")
    assert flush.flushed(second).bytes_referenced == 9 * PART
    assert flush.journal.is_current(str(second.id))
    flush.journal.committed(str(first.id), shards, CommitRef(1, 8))
    assert not flush.journal.is_current(str(second.id))
    done = flush.flushed(second)
    assert done.bytes_referenced == 0
    assert flush.journal.is_current(str(second.id))


@pytest.mark.fault("O62")
def test_a_commit_during_a_flush_makes_its_references_obsolete(run: DeltaRun) -> None:
    """The set is not reported as stored before its parts are sent."""
    data, other = noise(10 * PART), noise(10 * PART, 1)
    run.save({"a": data})
    flush = run.flush
    first = staged_set(flush.run_directory, {"a": other}, step=8, directory="s-8.abc")
    shards = flush.flushed(first).shards
    files = {"a": changed(data, 0, 1)}
    second = staged_set(flush.run_directory, files, step=9, directory="s-9.abc")

    def before(what: str, key: str) -> None:
        if what == "complete":
            flush.store.before = lambda *_: None
            flush.journal.committed(str(first.id), shards, CommitRef(1, 8))

    flush.store.before = before
    assert flush.flushed(second).bytes_referenced == 0


def test_progress_counts_equal_parts_as_stored_and_not_as_sent(run: DeltaRun) -> None:
    """Before the first byte is sent, the forecast knows how many are left."""
    data = noise(20 * PART)
    run.save({"a": data})
    flush = run.flush
    files = {"a": changed(data, 3, 4)}
    staged = staged_set(flush.run_directory, files, step=9, directory="s-9.abc")
    held = hold(flush, lambda what, _: what == "put_part")
    flush.engine.start("f", staged, 1)
    latest: list[FlushProgress] = []

    def has_compared() -> bool:
        event = flush.events.get(timeout=20)
        assert isinstance(event, FlushProgress)
        latest.append(event)
        return event.bytes_stored > 0

    until(has_compared, what="the end of the comparison")
    assert latest[-1].bytes_stored - latest[-1].bytes_sent == 18 * PART - latest[-1].bytes_sent
    assert latest[-1].bytes_compared == 18 * PART
    assert latest[-1].bytes_sent <= 2 * PART
    held.set()
    assert isinstance(flush.outcome(), FlushFailed)


# ---------------------------------------------------------------------- the index


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    part_size_bytes=st.integers(1, 40),
)
def test_a_part_is_found_whatever_the_extents_of_its_shard(
    sizes: list[int], part_size_bytes: int
) -> None:
    """Another writer may split a shard anywhere."""
    data = noise(sum(sizes))
    extents, offset, objects = [], 0, {}
    for number, size_bytes in enumerate(sizes):
        objects[str(number)] = b"--" + data[offset : offset + size_bytes]
        extents.append(Extent(StoredObject(str(number), size_bytes + 2), 2, size_bytes))
        offset += size_bytes
    shard = StoredShard(
        path="a",
        size_bytes=len(data),
        part_size_bytes=part_size_bytes,
        part_digests=digests_of(data, part_size_bytes),
        crc32c=0,
        extents=tuple(extents),
    )
    known = KnownParts([(shard, b"")])
    for start in range(0, len(data), part_size_bytes):
        part = data[start : start + part_size_bytes]
        found = known.find(digests_of(part, part_size_bytes), len(part))
        assert (
            b"".join(objects[e.object.key][e.offset_bytes :][: e.size_bytes] for e in found) == part
        )
        assert not known.find(digests_of(part, part_size_bytes), len(part) + 1)


@given(st.integers(0, 5000))
def test_a_sample_is_small_and_spread(count: int) -> None:
    """A sixteenth of the parts, at most 16 of them; a run of an eighth of a large file is never missed."""
    sample = sample_of(range(count))
    assert (
        len(set(sample)) == len(sample) == min(count, max(1, min(SAMPLES_MAX, round(count / 16))))
    )
    gaps = [after - before for before, after in itertools.pairwise([-1, *sample, count])]
    assert count < 256 or max(gaps) <= count / 8 + 2


@pytest.mark.parametrize("period", [2, 4, 8, 16])
def test_a_sample_finds_the_equal_parts_of_a_file_that_changed_at_intervals(period: int) -> None:
    """Also when the intervals divide the number of parts."""
    for count in (64, 256, 4096):
        assert any(index % period for index in sample_of(range(count)))
