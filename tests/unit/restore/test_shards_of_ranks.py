# SPDX-License-Identifier: Apache-2.0
"""A VM fetches the shards that its ranks read, and none that it has: real directories, stores that count."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from swansong.protocol import Restored, RestoreQuery
from swansong_bucket.errors import Permanent
from swansong_bucket.model import CommitRef
from swansongd.core.events import Prune, SetAside
from swansongd.restore.wish import COMMON_BYTES_MAX, PREFIXES_MAX, covers, union
from swansongd.staging import scan

from testkit import committed
from testkit.odd_store import OddStore
from testkit.restore_rig import RestoreRig
from testkit.staged import write_files
from testkit.story import Story, a_set
from testkit.waiting import until

NODES = 4


def part_of(node: int) -> dict[str, bytes]:
    """The files of the only rank of a VM."""
    return {
        f"rank-{node:05d}/model.bin": random.Random(node).randbytes(5120),
        f"rank-{node:05d}.json": b"{}" + bytes([node]),
    }


def prefixes_of(*ranks: int) -> list[str]:
    """As the hooks name them; the manifest of a rank belongs to its directory."""
    return [f"rank-{rank:05d}/" for rank in ranks]


class Vm(RestoreRig[OddStore]):
    """One VM of a job over four, with its own view of the store."""

    def __init__(self, directory: Path, bucket: Path) -> None:
        super().__init__(directory, OddStore(bucket), story=Story(claimed=False))
        self.story.grants = False

    def train(self, node: int) -> None:
        """Take part in the first start, and seal the part of step 100, which all VMs commit."""
        self.begin("first", generation=1, newest=None)
        write_files(self.run.path / "step-000000000100.abc", part_of(node))
        files = scan.listing(self.run.fd, "step-000000000100.abc")
        made = a_set(100, start_id="first", nodes=NODES)
        self.story.staging = [replace(made, files=files)]
        self.story.scan()
        ref = CommitRef(1, 100)
        self.story.state = replace(
            self.story.state, commits=replace(self.story.state.commits, last_complete=ref)
        )

    def begin(self, start_id: str, *, generation: int, newest: CommitRef | None) -> None:
        """The rank of this VM connects as a rank of this start, which claims this generation."""
        self.story.next_generation = generation
        for action in self.story.join(start_id=start_id, nodes=NODES):
            if isinstance(action, Prune):
                for name in action.directories:
                    scan.remove_set(self.run.fd, name)
            if isinstance(action, SetAside):
                for name in action.directories:
                    scan.set_aside(self.run.fd, name)
                self.story.staging.clear()
        self.story.grant(start_id, newest)
        self.story.scan()

    def answer(self, query: RestoreQuery) -> Restored:
        return self.ask(query).answer()


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    """A store with one checkpoint of four VMs."""
    store = committed.file_store(tmp_path / "bucket")
    for node in range(NODES):
        committed.commit(store, part_of(node), node=node, nodes=NODES, nonce=f"a{node}")
    return tmp_path / "bucket"


@pytest.fixture
def vm(tmp_path: Path, bucket: Path) -> Vm:
    return Vm(tmp_path / "vm", bucket)


def named(*ranks: int) -> RestoreQuery:
    return RestoreQuery("q", generation=1, step=100, prefixes=prefixes_of(*ranks))


def test_after_one_of_four_vms_is_replaced_the_others_fetch_nothing(
    tmp_path: Path, bucket: Path
) -> None:
    """Each daemon set the part of its VM aside when the job was started again, and copies it.  The new VM
    fetches the shards of its own rank only."""
    vms = [Vm(tmp_path / f"vm{node}", bucket) for node in range(NODES)]
    for node, vm in enumerate(vms[:3]):
        vm.train(node)
    for vm in vms:
        vm.begin("second", generation=2, newest=CommitRef(1, 100))
    chosen = vms[0].answer(RestoreQuery("q", start_id="second", prefixes=prefixes_of(0)))
    assert (chosen.generation, chosen.step) == (1, 100)
    answers = [chosen, *(vms[node].answer(named(node)) for node in (1, 2, 3))]
    for node, answer in enumerate(answers):
        assert committed.tree(Path(answer.path)) == part_of(node)
    assert [vm.store.given_bytes for vm in vms] == [0, 0, 0, 5123]


def test_a_rank_that_asks_later_gets_further_files_in_the_same_directory(vm: Vm) -> None:
    """The files of the first rank are neither moved nor fetched again."""
    first = vm.answer(named(0))
    model = Path(first.path, "rank-00000/model.bin")
    inode, read_bytes = model.stat().st_ino, vm.store.given_bytes
    second = vm.answer(named(1))
    assert second.path == first.path
    assert committed.tree(Path(first.path)) == part_of(0) | part_of(1)
    assert (model.stat().st_ino, vm.store.given_bytes) == (inode, 2 * read_bytes)
    again = vm.answer(named(0))
    assert (again.path, vm.store.given_bytes) == (first.path, 2 * read_bytes)
    everything = vm.answer(named())
    assert everything.path == first.path
    assert set(committed.tree(Path(first.path))) == {path for n in range(4) for path in part_of(n)}


@pytest.mark.fault("G32")
def test_a_rank_that_the_commit_does_not_have_gets_the_other_files_afterwards(vm: Vm) -> None:
    """A job that has grown asks for its own files, of which there are none, and then for all."""
    first = vm.answer(named(NODES))
    assert committed.tree(Path(first.path)) == {}
    everything = vm.answer(named())
    assert everything.path == first.path
    assert set(committed.tree(Path(first.path))) == {path for n in range(4) for path in part_of(n)}


def test_ranks_that_ask_together_share_one_download(vm: Vm) -> None:
    """The wishes of all ranks that wait are fetched at once."""
    release = threading.Event()
    vm.store.instead = lambda *_: release.wait(30)
    held = vm.ask(named(3))
    until(lambda: vm.store.given, what="the first download")
    others = [vm.ask(named(rank)) for rank in (0, 1)]
    release.set()
    assert {each.answer().path for each in [held, *others]} == {held_path(vm)}
    assert set(committed.tree(Path(held_path(vm)))) == {
        path for node in (0, 1, 3) for path in part_of(node)
    }


def held_path(vm: Vm) -> str:
    (directory,) = vm.restored.iterdir()
    return str(directory)


@pytest.mark.fault("G33")
def test_an_interrupted_extension_is_continued(vm: Vm) -> None:
    """The store fails during the second rank's download: the directory stays as it was, and the next query
    fetches the rest."""
    first = vm.answer(named(0))

    last = committed.chunk_of(part_of(1)["rank-00001/model.bin"][5000:], nonce="a1").key

    def fail(key: str, _offset: int, _window: memoryview) -> None:
        if key == last:
            raise Permanent("access denied")

    vm.store.instead = fail
    assert "access denied" in vm.answer(named(1)).error
    assert committed.tree(Path(first.path)) == part_of(0)
    vm.store.instead = lambda *_: None
    assert vm.answer(named(1)).path == first.path
    assert committed.tree(Path(first.path)) == part_of(0) | part_of(1)


def damage(bucket: Path, content: bytes) -> None:
    """Change one byte of the chunk with the first bytes of this content."""
    start = content[: committed.CHUNK_BYTES]
    (stored,) = (path for path in bucket.rglob("*") if data_of(path) == start)
    stored.write_bytes(bytes([255 - content[0]]) + stored.read_bytes()[1:])


def test_a_damaged_shard_fails_the_query_of_the_rank_that_reads_it(vm: Vm, bucket: Path) -> None:
    """The error names the shard.  A rank that does not read the shard gets its files."""
    damage(bucket, part_of(3)["rank-00003/model.bin"])
    assert committed.tree(Path(vm.answer(named(0)).path)) == part_of(0)
    reply = vm.answer(named(3))
    assert "rank-00003/model.bin" in reply.error
    assert reply.error.endswith("See: swansong verify")
    assert reply.is_damaged


def newer_of(node: int) -> dict[str, bytes]:
    """The files of the only rank of a VM, 100 steps later."""
    return {path: bytes([100]) + content for path, content in part_of(node).items()}


@pytest.fixture
def damaged(bucket: Path) -> Path:
    """The store with a newer checkpoint, step 200, whose shard of rank 3 is damaged."""
    store = committed.file_store(bucket)
    for node in range(NODES):
        committed.commit(store, newer_of(node), step=200, node=node, nodes=NODES, nonce=f"b{node}")
    damage(bucket, newer_of(3)["rank-00003/model.bin"])
    return bucket


def refused(step: int = 200, start_id: str = "start") -> RestoreQuery:
    """The query of rank 0 after another VM has found damage."""
    return RestoreQuery(
        "q",
        generation=1,
        step=step,
        refused="rank 3: no digest",
        start_id=start_id,
        prefixes=prefixes_of(0),
    )


@pytest.mark.fault("G30")
def test_after_a_refusal_the_answer_is_the_next_older_whole_commit(vm: Vm, damaged: Path) -> None:
    """The daemon of rank 0 found no damage.  It refuses the commit until the job is started again."""
    assert damaged.is_dir()
    vm.begin("start", generation=2, newest=CommitRef(1, 200))
    newest = RestoreQuery("q", start_id="start", prefixes=prefixes_of(0))
    assert committed.tree(Path(vm.answer(newest).path)) == newer_of(0)
    with capture_logs() as logs:
        for query in (
            refused(),
            refused(),
            newest,
            named(0),
        ):  # a query is repeated after a reconnect
            answer = vm.answer(query)
            assert (answer.generation, answer.step) == (1, 100)
            assert committed.tree(Path(answer.path)) == part_of(0)
    (line,) = (line for line in logs if line["event"] == "commit_refused")
    assert line["reason"] == "rank 3: no digest"
    assert vm.answer(replace(named(0), step=200)).is_damaged
    vm.begin("again", generation=3, newest=CommitRef(1, 200))
    answer = vm.answer(replace(newest, start_id="again"))
    assert committed.tree(Path(answer.path)) == newer_of(0)


@pytest.mark.fault("G30")
def test_a_damaged_commit_is_fetched_once_for_all_ranks_of_a_vm(vm: Vm, damaged: Path) -> None:
    """The second rank gets the same refusal at once.  Then both get the older commit."""
    assert damaged.is_dir()
    vm.begin("start", generation=2, newest=CommitRef(1, 200))
    for rank in (3, 2):
        reply = vm.answer(replace(named(rank), step=200))
        assert reply.is_damaged
        assert "rank-00003/model.bin" in reply.error
        if rank == 3:
            read_bytes = vm.store.given_bytes
    assert vm.store.given_bytes == read_bytes
    assert committed.tree(Path(vm.answer(named(3)).path)) == part_of(3)


def test_a_refusal_of_the_oldest_commit_is_no_fresh_run(vm: Vm) -> None:
    """The error names the refused commit and the reason, so no rank trains from step 0 by mistake."""
    vm.begin("start", generation=2, newest=CommitRef(1, 100))
    reply = vm.answer(refused(step=100))
    assert "no whole commit before generation 1 step 100" in reply.error
    assert "rank 3: no digest" in reply.error


@pytest.mark.fault("G31")
def test_a_rank_that_dies_during_the_download_delays_no_other_rank(vm: Vm) -> None:
    """Its shards are fetched too, and its successor gets them without another request."""
    release = threading.Event()
    vm.store.instead = lambda *_: release.wait(30)

    def is_dead(*_: object) -> None:
        raise BrokenPipeError

    vm.resume.ask(named(2), is_dead, lambda _: None)
    until(lambda: vm.store.given, what="the first download")
    other = vm.ask(named(1))
    release.set()
    assert part_of(1).items() <= committed.tree(Path(other.answer().path)).items()
    read_bytes = vm.store.given_bytes
    assert part_of(2).items() <= committed.tree(Path(vm.answer(named(2)).path)).items()
    assert vm.store.given_bytes == read_bytes


def data_of(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def test_files_of_no_rank_are_for_all_ranks_if_they_are_small(tmp_path: Path) -> None:
    store = committed.file_store(tmp_path / "bucket")
    others = {"config.json": b"{}", "dump.bin": bytes(COMMON_BYTES_MAX + 1)}
    committed.commit(store, part_of(0) | part_of(1) | others, chunk_bytes=2**20)
    vm = Vm(tmp_path / "vm", tmp_path / "bucket")
    answer = vm.answer(named(1))
    assert set(committed.tree(Path(answer.path))) == {*part_of(1), "config.json"}


@pytest.mark.fault("S12")
def test_wishes_are_united_up_to_a_limit() -> None:
    """A rank without prefixes reads all shards; with too many prefixes, all are fetched."""
    assert union([frozenset({"a"}), frozenset({"b"})]) == {"a", "b"}
    assert union([frozenset({"a"}), frozenset()]) == frozenset()
    assert not union([frozenset(str(n) for n in range(PREFIXES_MAX + 1))])
    assert covers(frozenset(), frozenset({"a"}))
    assert covers(frozenset({"a", "b"}), frozenset({"ab"}))
    assert not covers(frozenset({"a"}), frozenset({"a", "b"}))
    assert not covers(frozenset({"a"}), frozenset())
