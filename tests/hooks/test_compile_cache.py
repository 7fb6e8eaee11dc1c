# SPDX-License-Identifier: Apache-2.0
"""The compile cache in checkpoints: what travels, and from whom it is taken."""

from __future__ import annotations

import io
import os
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from swansong._ranks.agreement import Ranks
from swansong._torch import compile_cache
from swansong._torch.compile_cache import ARCHIVE, CompileCache
from swansong.torch import TrainingState
from torch import nn
from torch._inductor import cpp_builder, cpu_vec_isa

from testkit.fake_daemon import FakeDaemon
from testkit.training_parts import Attach, save_part
from testkit.waiting import until

KERNELS = {"ab/kernel.so": b"\x7fELF", "fxgraph/cd/entry": b"graph", "triton/0/x.cubin": b"cubin"}


def fill(directory: Path, kernels: dict[str, bytes]) -> None:
    """Write kernels that were compiled a minute ago."""
    before = time.time() - 60
    for name, content in kernels.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        os.utime(path, (before, before))


def contents(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Path]:
    """Name the directory of the cache for the next guard."""

    def use(name: str) -> Path:
        directory = tmp_path / name
        for variable in ("SWANSONG_COMPILE_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            monkeypatch.setenv(variable, str(directory))
        return directory

    return use


def saved(attach: Attach, daemon: FakeDaemon) -> Path:
    """A checkpoint of a new guard."""
    before = set(daemon.sealed())
    guard = attach(TrainingState(nn.Linear(1, 1)))
    guard.step(1)
    until(lambda: guard.save(1), what="the welcome")
    assert guard.wait_saved()
    (checkpoint,) = set(daemon.sealed()) - before
    return checkpoint


def resumed(attach: Attach, daemon: FakeDaemon, checkpoint: Path) -> None:
    daemon.restorable = lambda: (checkpoint, 1)
    assert attach(TrainingState(nn.Linear(1, 1))).restore() == 1


def archive_of(checkpoint: Path) -> Path:
    return checkpoint / "rank-00000" / ARCHIVE


def test_kernels_travel_with_a_signed_checkpoint(
    daemon: FakeDaemon, attach: Attach, use: Callable[[str], Path]
) -> None:
    """torch and Triton of the next process find them in its own directory; kernels that it has stay."""
    daemon.is_signed = True
    fill(use("one"), KERNELS)
    checkpoint = saved(attach, daemon)
    other = use("other")
    fill(other, {"ab/kernel.so": b"mine"})
    other.chmod(0o700)
    resumed(attach, daemon, checkpoint)
    assert contents(other) == {**KERNELS, "ab/kernel.so": b"mine"}
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent == other
    assert os.environ["TRITON_CACHE_DIR"] == str(other / "triton")


@pytest.mark.fault("S25")
def test_code_of_an_unsigned_checkpoint_is_not_used(
    daemon: FakeDaemon,
    attach: Attach,
    use: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor of a directory that the daemon has not verified; an unsigned checkpoint contains none."""
    fill(use("one"), KERNELS)
    assert not archive_of(saved(attach, daemon)).exists()
    daemon.is_signed = True
    checkpoint = saved(attach, daemon)
    assert archive_of(checkpoint).exists()
    daemon.is_signed = False
    other = use("other")
    resumed(attach, daemon, checkpoint)
    assert contents(other) == {}
    daemon.is_signed = True
    monkeypatch.setenv("SWANSONG_RESTORE", str(checkpoint))
    guard = attach(TrainingState(nn.Linear(1, 1)))
    assert guard.restore() == 1
    assert contents(other) == {}
    until(lambda: guard.save(1), what="the welcome")
    assert guard.restore() == 1, "again, after a save into the signed run"
    assert contents(other) == {}


def test_only_complete_kernels_are_archived(tmp_path: Path, use: Callable[[str], Path]) -> None:
    """A kernel that is written now, locks and links stay out; the same kernels give the same bytes."""
    directory = use("one")
    fill(
        directory,
        {**KERNELS, "x.lock": b"", "locks/x": b"", "ab/.3.tmp": b"half", "ab/k.so.1.tmp": b"half"},
    )
    directory.chmod(0o700)
    (directory / "link").symlink_to(directory / "ab/kernel.so")
    later = time.time() + 60
    (directory / "ab/new.so").write_bytes(b"half")
    os.utime(directory / "ab/new.so", (later, later))
    cache = CompileCache(str(directory))
    for place in (tmp_path / "first", tmp_path / "second"):
        place.mkdir()
        cache.snapshot()(place)
        os.utime(directory / "ab/kernel.so", (1, 1))
    first, second = (tmp_path / name / ARCHIVE for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    with tarfile.open(first) as members:
        assert members.getnames() == sorted(KERNELS)


def planted(path: Path, *members: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:") as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(b"\0" * member.size))
    return path


def member(
    name: str, size: int = 1, kind: bytes = tarfile.REGTYPE, target: str = ""
) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.size, made.type, made.linkname = size, kind, target
    return made


@pytest.mark.parametrize(
    "hostile",
    [
        (member("../outside"),),
        (member("/tmp/outside"),),
        (member("ab", 0, tarfile.SYMTYPE, ".."), member("ab/outside")),
        (member("ab", 0, tarfile.LNKTYPE, "/etc/passwd"),),
        (member("ab", 0, tarfile.FIFOTYPE),),
        (member("a" * 5000),),
        (member("large", 2000),),
        tuple(member(f"f{number}", 0) for number in range(12)),
    ],
    ids=["parent", "absolute", "symlink", "hard link", "fifo", "name", "size", "count"],
)
def test_an_archive_of_another_form_is_not_used(
    hostile: tuple[tarfile.TarInfo, ...],
    tmp_path: Path,
    use: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever it contains, nothing outside the directory changes, and the restore continues."""
    monkeypatch.setattr(compile_cache, "SIZE_MAX_BYTES", 1000)
    monkeypatch.setattr(compile_cache, "FILES_MAX", 10)
    directory = use("one")
    CompileCache(str(directory)).load(planted(tmp_path / "a.tar", *hostile))
    assert "the compile cache of the checkpoint is not used" in caplog.text
    assert {path.name for path in tmp_path.iterdir()} == {"one", "a.tar"}
    assert all(path.is_file() for path in directory.iterdir())


@pytest.mark.parametrize("content", [b"", b"junk" * 500, b"\0" * 10240])
def test_a_damaged_archive_is_not_used(
    content: bytes, tmp_path: Path, use: Callable[[str], Path]
) -> None:
    """Each prefix of a whole one, too."""
    directory = use("one")
    cache = CompileCache(str(directory))
    (tmp_path / "a.tar").write_bytes(content)
    cache.load(tmp_path / "a.tar")
    whole = planted(tmp_path / "b.tar", member("kernel", 3000)).read_bytes()
    for end in range(0, 3000, 100):
        (tmp_path / "a.tar").write_bytes(whole[:end])
        cache.load(tmp_path / "a.tar")
    assert contents(directory) == {}


@pytest.mark.parametrize("limit", ["SIZE_MAX_BYTES", "FILES_MAX"])
def test_a_cache_beyond_its_limits_stays_out(
    limit: str,
    tmp_path: Path,
    use: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With one warning; the checkpoint is whole without it."""
    monkeypatch.setattr(compile_cache, limit, 2)
    directory = use("one")
    fill(directory, KERNELS)
    directory.chmod(0o700)
    cache = CompileCache(str(directory))
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        cache.snapshot()(tmp_path / name)
        assert not (tmp_path / name / ARCHIVE).exists()
    (warning,) = caplog.messages
    assert "checkpoints do not contain the compile cache" in warning


def test_a_directory_that_others_can_write_to_is_refused(
    attach: Attach, use: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = use("one")
    directory.mkdir()
    directory.chmod(0o770)
    with pytest.raises(ValueError, match="others can write to it"):
        attach(TrainingState(nn.Linear(1, 1)))
    use("file").write_text("")
    with pytest.raises(ValueError, match=r"others can write|cannot be used"):
        attach(TrainingState(nn.Linear(1, 1)))


def test_one_rank_of_each_vm_writes_and_reads_the_cache(
    tmp_path: Path, use: Callable[[str], Path]
) -> None:
    """The other ones use the same directory."""
    directory = use("one")
    fill(directory, KERNELS)
    directory.chmod(0o700)
    found = []
    for rank in range(4):
        state = TrainingState(nn.Linear(1, 1))
        state.ranks = Ranks(rank, rank % 2, 4, 2)
        state.rehearse()
        state.takes_code = True
        save_part(state, tmp_path, rank)
        found.append((tmp_path / f"rank-{rank:05d}" / ARCHIVE).exists())
    assert found == [True, False, True, False]


def test_a_kind_of_cpu_has_its_own_kernels(
    tmp_path: Path, use: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch compiles for the CPU that it runs on, and would load such a kernel on any other one."""
    monkeypatch.setattr(compile_cache, "_CPU", tmp_path / "cpuinfo")
    found = []
    for content in (
        "flags : avx2 gfni\nMHz : 1\n",
        "flags : avx2\n",
        "Features : sve\n",
        "flags : avx2 gfni\nMHz : 2\n",
    ):
        (tmp_path / "cpuinfo").write_text(content)
        CompileCache(str(use("one")))
        found.append(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert found[0] == found[3]
    assert len(set(found)) == 3


def test_a_check_of_the_cpu_that_succeeded_is_not_repeated(
    daemon: FakeDaemon, attach: Attach, use: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor on the next VM; torch repeats a check that failed, and checks another program or compiler."""
    checked: list[str] = []

    def check(_isa: cpu_vec_isa.VecISA, code: str) -> bool:
        checked.append(code)
        return code != "fails"

    def after(compiler: str, *codes: str) -> list[str]:
        """The checks of a process."""
        checked.clear()
        monkeypatch.setattr(cpp_builder, "get_compiler_version_info", lambda _path: compiler)
        CompileCache(os.environ["SWANSONG_COMPILE_CACHE"])
        for code in codes:
            assert cpu_vec_isa.VecAVX2().check_build(code) == (code != "fails")
        return list(checked)

    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", check)
    one = use("one")
    assert after("g++ 12", "a", "fails", "a") == ["a", "fails"]
    for path in one.rglob("*"):
        os.utime(path, (1, 1))
    daemon.is_signed = True
    checkpoint = saved(attach, daemon)
    use("other")
    resumed(attach, daemon, checkpoint)
    assert after("g++ 12", "a", "fails", "b") == ["fails", "b"]
    assert after("g++ 13", "a") == ["a"]


def test_a_torch_without_these_checks_is_used_as_it_is(
    use: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    use("one")
    monkeypatch.delattr(cpp_builder, "get_compiler_version_info")
    check = cpu_vec_isa.VecISA.check_build
    CompileCache(os.environ["SWANSONG_COMPILE_CACHE"])
    assert cpu_vec_isa.VecISA.check_build is check


def test_without_the_variable_torch_keeps_its_own_directories(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SWANSONG_COMPILE_CACHE", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    attach(TrainingState(torch.nn.Linear(1, 1)))
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/mine"
