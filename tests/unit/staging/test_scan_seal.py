# SPDX-License-Identifier: Apache-2.0
"""Complete checkpoints: those of the hooks by their manifests, those of frameworks by rules."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from swansong import layout
from swansong._checkpoint.staging import finish, write_checkpoint
from swansong._ranks.position import own_process
from swansong.layout import FileEntry, RankManifest
from swansong_bucket.errors import StagingError
from swansong_bucket.model import CheckpointId, CheckpointKind, Staged, StagedFile
from swansongd.core.events import Scanned
from swansongd.staging import scan, seal
from swansongd.staging.seal import Scanner
from swansongd.trainers.peers import start_ticks
from swansongd.util import birth, boot

from testkit.staged import ME, Clock, write_files, write_set


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "r1").mkdir()
    return tmp_path / "r1"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def scanner(run: Path, clock: Clock) -> Scanner:
    return Scanner(run, allowed_uids=ME, settle_s=2.0, monotonic=clock)


def settled(scanner: Scanner, clock: Clock) -> tuple[Staged, ...]:
    """All sets after the time that an adopted set needs to settle."""
    scanner.scan()
    clock.now_s += scanner.settle_s
    return scanner.scan().staged


def why_rejected(scanner: Scanner) -> str:
    scanned = scanner.scan()
    assert scanned.staged == ()
    ((_, reason),) = scanned.rejected
    return reason


def test_a_set_without_a_lost_rank_answers_no_request(run: Path, scanner: Scanner) -> None:
    """The position of that rank is unknown, so the set proves nothing about the request."""
    write_set(run, 7, "n1", ranks=2, kind="emergency", request_id="q", without_ranks="2")
    (found,) = scanner.scan().staged
    assert (found.request_id, found.lost_ranks) == ("", {"without_ranks": "2"})


def test_a_sealed_set_needs_no_time_to_settle(run: Path, scanner: Scanner, clock: Clock) -> None:
    """A complete set of the hooks is found by the first scan, with the facts of its manifests."""
    directory = write_set(
        run, 7, "n1", ranks=2, world_size=6, node=1, nodes=3, kind="emergency", request_id="q",
        health={"loss": 2.5}, framework="torch",
    )  # fmt: skip
    (directory / "rank-00000" / ".metadata").write_bytes(b"m")
    scanned = scanner.scan()
    assert scanned.started_mono_s == clock.now_s
    (found,) = scanned.staged
    assert (found.id, found.directory) == (CheckpointId(7, "n1"), "step-000000000007.n1")
    assert (found.kind, found.request_id) == (CheckpointKind.EMERGENCY, "q")
    assert (found.node, found.nodes, found.framework) == (1, 3, "swansong")
    assert found.health == {"loss": 2.5}
    assert found.trainer == {"world_size": 6, "local_world_size": 2, "framework": "torch"}
    assert found.markers == {"rank-00000/.metadata"}
    assert len(found.files) == 5
    assert not scanner.is_settling


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO])
def test_an_error_of_the_system_does_not_void_a_set(
    run: Path, scanner: Scanner, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A set whose manifest cannot be read is examined again; a lack of descriptors rejects no set."""
    write_set(run)

    def fail(*_: object) -> int:
        raise StagingError("cannot be opened") from OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(scan, "open_file", fail)
        scanned = scanner.scan()
    assert (scanned.staged, bool(scanned.rejected)) == ((), code == errno.EIO)
    assert len(scanner.scan().staged) == 1


@pytest.mark.fault("T03")
def test_a_partial_directory_is_pending(run: Path, scanner: Scanner) -> None:
    """The directory of a trainer that died while saving is never taken, however old it is."""
    directory = write_set(run)
    directory.rename(run / layout.partial_name(directory.name))
    scanned = scanner.scan()
    assert (scanned.staged, scanned.rejected) == ((), ())
    assert scanned.pending == (directory.name + ".partial",)


def begun_set(run: Path, *, ranks: int = 2, **facts: Any) -> Path:
    """A set for which rank 0 has written all files, and each other rank one of two."""
    directory = write_set(run, 7, "n1", ranks=ranks, **facts)
    for rank in range(1, ranks):
        manifest = directory / layout.rank_manifest_name(rank)
        manifest.rename(directory / layout.rank_begun_name(rank))
        writing = directory / layout.writing_directory(rank)
        write_files(writing, {"half.bin": b"x", "o|dd": b""})
    return directory.rename(run / layout.partial_name(directory.name))


def test_the_final_files_of_a_growing_set_are_listed(run: Path, scanner: Scanner) -> None:
    """Files that their ranks have finished, and rank manifests; no file that is still being written."""
    directory = begun_set(run, request_id="q", world_size=6, node=2, nodes=3, kind="emergency")
    scanned = scanner.scan()
    (found,) = scanned.growing
    assert (found.id, found.directory) == (CheckpointId(7, "n1"), directory.name)
    assert (found.request_id, found.node, found.nodes) == ("q", 2, 3)
    assert [file.path for file in found.files] == [
        "rank-00000.json",
        "rank-00000/model.bin",
        "rank-00001/model.bin",
    ]
    assert scanned.staged == ()
    assert scanned.pending == (directory.name,)


def test_the_hooks_and_the_scan_agree_on_final_files(run: Path, scanner: Scanner) -> None:
    """During a save exactly the finished file is listed, with all facts that it has after the seal."""
    manifest = RankManifest(
        run="r1", step=7, kind="emergency", files=[], request_id="q", start_id="a"
    )
    early: list[Staged] = []

    def save(directory: Path) -> None:
        write_files(directory, {"layers/0.bin": b"0" * 10, "index": b"half"})
        assert [found.files for found in scanner.scan().growing] == [()]
        finish(directory / "layers" / "0.bin")
        early.extend(scanner.scan().growing)
        write_files(directory, {"index": b"whole"})

    write_checkpoint(str(run), "n1", manifest, save)
    (growing,) = early
    (sealed,) = scanner.scan().staged
    assert (growing.id, growing.request_id) == (sealed.id, "q")
    assert [file.path for file in growing.files] == ["rank-00000/layers/0.bin"]
    assert growing.files[0] in sealed.files
    assert len(sealed.files) == 3


@pytest.mark.parametrize("second_ticks", [1, 0])
def test_a_set_names_when_the_first_process_of_its_ranks_began(
    run: Path, scanner: Scanner, second_ticks: int
) -> None:
    """By the count of the kernel, as the daemon reads it.  It is unknown if one rank does not state it."""
    process = own_process()
    assert process == {"boot_id": boot.boot_id(), "began_ticks": start_ticks(os.getpid())}
    path = write_set(run, **process) / layout.rank_manifest_name(1)
    second = replace(RankManifest.decode(path.read_bytes()), began_ticks=second_ticks)
    path.write_bytes(second.encode())
    (sealed,) = scanner.scan().staged
    assert (sealed.boot_id, sealed.began_ticks) == (process["boot_id"], second_ticks)


def test_a_growing_set_that_is_unreadable_for_a_moment_stays(run: Path, scanner: Scanner) -> None:
    """An unreadable moment is not its end; its removal is."""
    directory = begun_set(run, ranks=1)
    before = scanner.scan().growing
    assert len(before) == 1
    manifest = directory / layout.rank_manifest_name(0)
    manifest.rename(directory / "elsewhere")
    assert scanner.scan().growing == before
    shutil.rmtree(directory)
    assert scanner.scan().growing == ()


def test_a_directory_without_a_rank_is_not_growing(run: Path, scanner: Scanner) -> None:
    """Before a rank has begun to write, its directory belongs to no checkpoint."""
    directory = begun_set(run, ranks=1)
    (directory / layout.rank_manifest_name(0)).unlink()
    assert scanner.scan().growing == ()


@pytest.mark.fault("S1", "S4")
def test_a_forbidden_entry_voids_a_growing_set(run: Path, scanner: Scanner) -> None:
    """The rules of a sealed set: no link, no FIFO, no file of another user."""
    directory = begun_set(run, ranks=1)
    (directory / "rank-00000" / "link").symlink_to("/etc/passwd")
    assert scanner.scan().growing == ()


class AtCall:
    """Calls a function just before the n-th access to the file system.

    Args:
        number: of the access, from 1.
        act: the function.
    """

    def __init__(self, number: int, act: Callable[[], object]) -> None:
        self._number = number
        self._act = act
        self.calls = 0

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("stat", "fstat", "open", "access", "scandir"):
            patch.setattr(os, name, partial(self._call, getattr(os, name)))

    def _call(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls == self._number:
            self._act()
        return call(*args, **options)


def scans_with(
    new_scanner: Callable[[], Scanner], make: Callable[[], object], act: Callable[[], object]
) -> Iterator[Scanned]:
    """One scan for each access, with ``act`` just before that access."""
    for number in itertools.count(1):
        make()
        at_call = AtCall(number, act)
        scanner = new_scanner()
        with pytest.MonkeyPatch.context() as patch:
            at_call.install(patch)
            scanned = scanner.scan()
        yield scanned
        if at_call.calls < number:
            return
        assert scanner.scan().rejected == ()


def test_a_set_that_is_pruned_during_the_scan_is_not_rejected(run: Path, clock: Clock) -> None:
    """At any time of the removal, the set is found or missing, and no error is reported."""

    def new_scanner() -> Scanner:
        return Scanner(run, allowed_uids=ME, settle_s=2.0, monotonic=clock)

    def make() -> None:
        if not (run / layout.sealed_name(5, "abc")).exists():
            write_set(run)

    def prune() -> None:
        scan.remove_set(run, layout.sealed_name(5, "abc"))

    scans = list(scans_with(new_scanner, make, prune))
    assert [scanned.rejected for scanned in scans] == [()] * len(scans)
    assert scans[0].staged == ()
    assert len(scans[-1].staged) == 1
    assert len(scans) > 20


def test_a_set_that_loses_its_files_during_the_scan_is_not_rejected(
    run: Path, clock: Clock
) -> None:
    """A framework deletes its old checkpoints file by file: that is a change, and not an error."""
    directory = run / "checkpoint-5"

    def make() -> None:
        write_files(directory, {"trainer_state.json": b"1", "model": b"2", "a/b": b"3"})

    def settled_scanner() -> Scanner:
        scanner = Scanner(run, allowed_uids=ME, settle_s=2.0, monotonic=clock)
        assert len(settled(scanner, clock)) == 1
        return scanner

    def remove() -> None:
        shutil.rmtree(directory, ignore_errors=True)

    scans = list(scans_with(settled_scanner, make, remove))
    assert [scanned.rejected for scanned in scans] == [()] * len(scans)
    assert len(scans) > 10


SHARD = "rank-00001/model.bin"
MANIFEST = "rank-00001.json"


def lose_manifests(directory: Path) -> None:
    for rank in range(2):
        (directory / layout.rank_manifest_name(rank)).unlink()


def link_shard(directory: Path) -> None:
    (directory / SHARD).unlink()
    (directory / SHARD).symlink_to("/etc/shadow")


def cut(path: str, size_bytes: int = 50) -> Callable[[Path], None]:
    """Give this file of a set another size."""
    return lambda directory: os.truncate(directory / path, size_bytes)


@pytest.mark.fault("T06", "D06", "S1")
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda set_: (set_ / SHARD).unlink(), "rank-00001/model.bin is missing"),
        (cut(SHARD), "has 50 bytes, not 101"),
        (lambda set_: (set_ / MANIFEST).unlink(), "1 of 2 rank manifests"),
        (lose_manifests, "no rank manifest"),
        (cut(MANIFEST), "rank-00001.json: rank manifest is not JSON"),
        (
            lambda set_: (set_ / MANIFEST).rename(set_ / "rank-00007.json"),
            "is the manifest of rank 1",
        ),
        (link_shard, "symbolic link"),
        (cut(MANIFEST, layout.RANK_MANIFEST_MAX_BYTES + 1), "has over"),
    ],
)
def test_a_torn_set_is_rejected_with_its_reason(
    run: Path, scanner: Scanner, spoil: Callable[[Path], object], words: str
) -> None:
    """It has the sealed name but is not complete: it is rejected, and the defect is named."""
    spoil(write_set(run))
    assert words in why_rejected(scanner)


@pytest.mark.fault("T06", "S6", "S9")
@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"manifest_step": 8}, "of step 8"),
        ({"run": "other"}, "belongs to run 'other'"),
        ({"kind": "weird"}, "unknown kind 'weird'"),
        ({"world_size": 3}, "is impossible"),
        ({"local_world_size": 0}, "local_world_size is 0"),
        ({"node": 1}, "is impossible"),
        ({"version": 9}, "version 9"),
        ({"files": [FileEntry("../../etc/shadow", 1)]}, "which is reserved"),
        ({"files": [FileEntry("/etc/shadow", 1)]}, "which is reserved"),
    ],
)
def test_an_impossible_manifest_is_rejected(
    run: Path, scanner: Scanner, facts: dict[str, Any], words: str
) -> None:
    """A manifest must fit its directory, its run and the other manifests, and name only safe paths."""
    directory = write_set(run, 5, "abc", **facts)
    assert directory.name == "step-000000000005.abc"
    assert words in why_rejected(scanner)


def test_ranks_that_disagree_are_rejected(run: Path, scanner: Scanner) -> None:
    """Manifests of different world sizes make no set."""
    directory = write_set(run, ranks=2)
    other = write_set(run / "elsewhere" / "r1", ranks=2, world_size=4)
    shutil.copy(other / "rank-00001.json", directory / "rank-00001.json")
    shutil.rmtree(run / "elsewhere")
    assert "other ranks or nodes took part" in why_rejected(scanner)


def test_a_repaired_set_is_accepted(run: Path, scanner: Scanner) -> None:
    """A rejection lasts as long as its cause."""
    directory = write_set(run)
    cut(SHARD)(directory)
    assert "bytes" in why_rejected(scanner)
    (directory / SHARD).write_bytes(b"x" * 101)
    assert len(scanner.scan().staged) == 1


def test_restored_and_hidden_directories_are_ignored(
    run: Path, scanner: Scanner, clock: Clock
) -> None:
    """A directory that the daemon restored is not a new checkpoint; other directories are ignored."""
    write_files(run / "restored" / "checkpoint-5", {"a": b"1"})
    write_files(run / ".removing.checkpoint-6", {"a": b"1"})
    write_files(run / ".swansongd", {".metadata": b"1"})
    write_files(run / "logs-5", {"events": b"1"})
    (run / "latest").symlink_to("checkpoint-5")
    (run / "last.ckpt").write_bytes(b"1")
    assert settled(scanner, clock) == ()
    scanned = scanner.scan()
    assert (scanned.pending, scanned.rejected) == ((), ())


@pytest.mark.parametrize(
    ("directory", "files", "step", "framework", "markers"),
    [
        ("checkpoint-500", ["model.safetensors"], 500, "checkpoint-n", set()),
        (
            "checkpoint-500",
            ["training_args.bin", "trainer_state.json", "opt.pt"],
            500,
            "checkpoint-n",
            {"trainer_state.json"},
        ),
        ("v2-step_0042", [".metadata", "__0_0.distcp"], 42, "dcp", {".metadata"}),
        ("7", [".metadata"], 7, "dcp", {".metadata"}),
    ],
)
def test_layouts_of_frameworks_are_adopted(  # noqa: PLR0917 - the table above
    run: Path, scanner: Scanner, clock: Clock,
    directory: str, files: list[str], step: int, framework: str, markers: set[str],
) -> None:  # fmt: skip
    """Settled Hugging Face and DCP directories are checkpoints, with step and markers."""
    write_files(run / directory, dict.fromkeys(files, b"1"))
    first = scanner.scan()
    assert (first.staged, first.pending) == ((), (directory,))
    assert scanner.is_settling
    clock.now_s += 1.9
    assert scanner.scan().staged == ()
    clock.now_s += 0.1
    (found,) = scanner.scan().staged
    assert (found.id.step, found.directory, found.framework) == (step, directory, framework)
    assert found.markers == markers
    assert found.kind is CheckpointKind.PERIODIC
    assert len(found.id.nonce) == 12
    assert not scanner.is_settling
    assert scanner.scan().staged == (found,)


@pytest.mark.parametrize("name", ["epoch=1-step=300.ckpt", "step=300.ckpt", "x_step=300-v1.ckpt"])
def test_lightning_files_are_adopted(run: Path, scanner: Scanner, clock: Clock, name: str) -> None:
    """A file is a set of one file, with its own name."""
    (run / name).write_bytes(b"123")
    (found,) = settled(scanner, clock)
    assert (found.id.step, found.directory, found.framework) == (300, name, "ckpt")
    assert [file.path for file in found.files] == [name]


@pytest.mark.parametrize("name", ["model", "run-20250101123000"])
def test_a_directory_without_a_step_is_rejected(
    run: Path, scanner: Scanner, clock: Clock, name: str
) -> None:
    """A DCP checkpoint without a step in its name is reported; a time is not a step."""
    write_files(run / name, {".metadata": b"1"})
    assert settled(scanner, clock) == ()
    assert "no step number" in why_rejected(scanner)


def test_a_hugging_face_checkpoint_without_its_last_file_is_incomplete(
    run: Path, scanner: Scanner, clock: Clock
) -> None:
    """trainer_state.json comes after the optimizer: a pause before it is not the end."""
    directory = write_files(run / "checkpoint-5", {"training_args.bin": b"1", "model": b"2"})
    assert settled(scanner, clock) == ()
    assert "trainer_state.json is missing" in why_rejected(scanner)
    write_files(directory, {"optimizer.pt": b"1", "trainer_state.json": b"{}"})
    assert len(settled(scanner, clock)) == 1


@pytest.mark.fault("S1")
def test_links_under_adopted_names_are_rejected(run: Path, scanner: Scanner, clock: Clock) -> None:
    """Neither a linked directory nor a linked file is read."""
    outside = write_files(run.parent / "outside", {"a": b"1"})
    (run / "checkpoint-5").symlink_to(outside)
    (run / "step=5.ckpt").symlink_to(outside / "a")
    assert settled(scanner, clock) == ()
    assert [reason for _, reason in scanner.scan().rejected] == ["is a symbolic link"] * 2


@pytest.mark.fault("D09")
def test_every_change_restarts_the_settle_time(run: Path, scanner: Scanner, clock: Clock) -> None:
    """A set that keeps changing is not taken; one that changes later is another set."""
    file = run / "checkpoint-5" / "model"
    write_files(file.parent, {"model": b""})
    for _ in range(5):
        file.write_bytes(file.read_bytes() + b"1")
        assert scanner.scan().staged == ()
        clock.now_s += 1.9
        assert scanner.scan().staged == ()
    (before,) = settled(scanner, clock)
    file.write_bytes(b"changed")
    assert scanner.scan().staged == ()
    (after,) = settled(scanner, clock)
    assert before.id.step == after.id.step
    assert before.id.nonce != after.id.nonce


@pytest.mark.parametrize("moved_s", [-50, +50])
def test_an_adopted_set_began_with_its_oldest_file(
    run: Path, scanner: Scanner, clock: Clock, moved_s: int
) -> None:
    """Neither a later write nor a late scan makes a save look younger, which decides whether it answers."""
    write_files(run / "checkpoint-5", {"a": b"1", "b": b"2"})
    moved_ns = time.time_ns() + moved_s * 10**9
    os.utime(run / "checkpoint-5" / "a", ns=(moved_ns, moved_ns))
    first_s = clock.now_s
    (found,) = settled(scanner, clock)
    assert found.begun_mono_s is not None
    assert found.begun_mono_s <= first_s + min(0, moved_s) + scanner.settle_s


def test_a_slow_examination_makes_no_save_look_older(
    run: Path, scanner: Scanner, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A set of many files on a busy machine takes seconds, and would no longer answer its signal."""
    wall_ns, slow_s = time.time_ns, 0.0

    def is_written(*_: object) -> bool:
        nonlocal slow_s
        slow_s += 5.0
        clock.now_s += 5.0
        return False

    monkeypatch.setattr(seal, "is_written", is_written)
    monkeypatch.setattr(seal.time, "time_ns", lambda: wall_ns() + round(slow_s * 1e9))
    write_files(run / "checkpoint-5", {"a": b"1"})
    first_s = clock.now_s
    (found,) = settled(scanner, clock)
    assert found.begun_mono_s == first_s


def test_the_creation_of_a_file_is_not_its_last_write(tmp_path: Path) -> None:
    """A save of one file is as old as the file, however late its last byte is written."""
    before_ns = time.time_ns() - 10**8  # the clock of files ticks less often
    path = tmp_path / "file"
    path.write_bytes(b"1")
    after_ns = time.time_ns()
    os.utime(path, ns=(after_ns + 10**12, after_ns + 10**12))
    with open(path, "ab") as file:
        created_ns = birth.created_wall_ns(file.fileno())
    if created_ns is None:
        pytest.skip("no creation times on this file system")
    assert before_ns <= created_ns <= after_ns


def can_lease(directory: Path) -> bool:
    """Whether the kernel reports writers here, which it does not over NFS, for example."""
    with open(directory / "probe", "wb"):
        return seal.is_written(directory.parent, directory.name, _files(directory))


def _files(directory: Path) -> tuple[StagedFile, ...]:
    return scan.listing(directory.parent, directory.name)


SLOW_WRITER = """
import sys
for name in ("model", "optimizer"):
    with open(sys.argv[1] + "/" + name, "wb", buffering=0) as file:
        for piece in range(3):
            file.write(b"x")
            print("wrote", flush=True)
            sys.stdin.readline()
"""


@pytest.mark.fault("D09", "T03")
def test_a_set_with_an_open_writer_has_not_settled(
    run: Path, scanner: Scanner, clock: Clock
) -> None:
    """While a file is open for writing, the set is not taken, with any pauses between the writes."""
    directory = run / "checkpoint-5"
    directory.mkdir()
    if not can_lease(directory):
        pytest.skip("no leases on this file system")
    (directory / "probe").unlink()
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", SLOW_WRITER, str(directory)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as writer:  # fmt: skip
        assert writer.stdin is not None
        assert writer.stdout is not None
        while writer.stdout.readline():
            for _ in range(3):
                clock.now_s += 1000
                scanned = scanner.scan()
                assert (scanned.staged, scanned.pending) == ((), ("checkpoint-5",))
            writer.stdin.write(b"\n")
            writer.stdin.flush()
        writer.stdin.close()
    (found,) = settled(scanner, clock)
    assert [(file.path, file.size_bytes) for file in found.files] == [
        ("model", 3),
        ("optimizer", 3),
    ]


def test_the_check_for_writers_harms_neither_side(run: Path) -> None:
    """A writer that opens the file during the check is not delayed, and the daemon is not killed."""
    write_files(run / "checkpoint-5", {"a": b"1"})
    files = _files(run / "checkpoint-5")
    ended: list[int] = []
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            os.close(os.open(run / "checkpoint-5" / "a", os.O_WRONLY))

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    handler = signal.signal(signal.SIGIO, lambda *_: ended.append(1))
    try:
        answers = {seal.is_written(run, "checkpoint-5", files) for _ in range(3000)}
    finally:
        stop.set()
        writer.join(60)
        signal.signal(signal.SIGIO, handler)
    assert False in answers
    assert ended == []


# ---------------------------------------------------------------- hostile sets


@pytest.mark.fault("S13")
@pytest.mark.parametrize("value", ["1" + "0" * 400, "1e999", "NaN", '"high"', "[1]", "true"])
def test_a_metric_that_is_not_a_number_voids_its_set_alone(
    run: Path, scanner: Scanner, value: str
) -> None:
    """An integer of 400 digits is not a valid float: that set is rejected, and the others are found."""
    write_set(run, 5, "good")
    bad = write_set(run, 6, "bad") / "rank-00000.json"
    text = bad.read_text()
    assert '"health": {}' in text
    bad.write_text(text.replace('"health": {}', f'"health": {{"loss": {value}}}'))
    scanned = scanner.scan()
    assert [staged.id.step for staged in scanned.staged] == [5]
    assert [name for name, _ in scanned.rejected] == [bad.parent.name]


def test_a_fault_in_one_set_does_not_hide_the_others(
    run: Path, scanner: Scanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unexpected error affects one set only."""
    write_set(run, 5, "good")
    write_set(run, 6, "bad")
    listing = scan.listing

    def faulty(run_fd: int, name: str, *arguments: object, **options: object) -> object:
        if name.endswith("bad"):
            raise ZeroDivisionError("unforeseen")
        return listing(run_fd, name, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(scan, "listing", faulty)
    scanned = scanner.scan()
    assert [staged.id.step for staged in scanned.staged] == [5]
    ((_, reason),) = scanned.rejected
    assert "ZeroDivisionError" in reason


@pytest.mark.fault("S7")
def test_rank_manifests_are_counted_before_they_are_read(
    run: Path, scanner: Scanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A set of one rank with 200 manifests is rejected after the first."""
    directory = write_set(run, ranks=1)
    for rank in range(1, 200):
        (directory / f"rank-{rank:05d}.json").write_bytes(b"[" * 1000)
    read: list[str] = []
    open_file = scan.open_file

    def counting(run_fd: int, name: str, file: StagedFile) -> int:
        read.append(file.path)
        return open_file(run_fd, name, file)

    monkeypatch.setattr(scan, "open_file", counting)
    assert "200 of 1 rank manifests" in why_rejected(scanner)
    assert read == ["rank-00000.json"]


@pytest.mark.fault("S7")
def test_the_manifests_of_a_set_have_a_common_limit(
    run: Path, scanner: Scanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One may be large, but not all of them: memory is bounded for each set."""
    monkeypatch.setattr(seal, "MANIFESTS_MAX_BYTES", 300)
    write_set(run, ranks=2)
    assert "over 300 bytes together" in why_rejected(scanner)


@pytest.mark.fault("S7")
def test_only_the_newest_sets_are_examined(
    run: Path, scanner: Scanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of too many entries those with the highest steps count, and one line reports the rest."""
    monkeypatch.setattr(seal, "SETS_MAX", 3)
    for step in range(1, 6):
        write_set(run, step)
    scanned = scanner.scan()
    assert [staged.id.step for staged in scanned.staged] == [3, 4, 5]
    ((name, reason),) = scanned.rejected
    assert (name, "oldest are ignored" in reason) == (seal.ALL, True)


@pytest.mark.fault("S14")
def test_many_rejections_are_few_lines(run: Path, scanner: Scanner) -> None:
    """Each rejection is a line of the log: at most 20 for one scan, and one for the rest."""
    for step in range(60):
        (run / layout.sealed_name(step, "empty")).mkdir()
    scanned = scanner.scan()
    assert len(scanned.rejected) == seal.REJECTIONS_MAX + 1
    assert scanned.rejected[-1] == (seal.ALL, "further entries are rejected as well")
