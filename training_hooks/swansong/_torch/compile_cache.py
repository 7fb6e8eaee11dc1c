# SPDX-License-Identifier: Apache-2.0
"""The compiled kernels of ``torch.compile`` and Triton as a part of the checkpoint.

The caches are code, so a process takes them only from a checkpoint whose signature the daemon has verified.
torch chooses their entries by its own version, the source and the GPU.  It compiles with ``-march=native``
and does not compare the CPU, so each kind of CPU has its own directory.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import io
import os
import platform
import stat
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from swansong import bounds
from swansong._log import log

ENV = "SWANSONG_COMPILE_CACHE"
"""Environment variable with the directory of the caches.  It requests that they travel with checkpoints."""
ARCHIVE = "compile-cache.tar"
SIZE_MAX_BYTES = 1 << 30
FILES_MAX = 50_000
_CLOCK_S = 0.05
"""The times of files are that coarse."""
_OVERHEAD_BYTES = 2048
"""Of each file in the archive, at most, with a short name."""
_CPU = Path("/proc/cpuinfo")


class CompileCache:
    """The directory of the caches of this VM.

    Args:
        directory: where ``torch.compile`` and Triton keep compiled kernels from now on.

    Raises:
        ValueError: the directory cannot be used, or another user can write to it.
    """

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory).absolute()
        self._is_left_out = False
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self._directory.stat()
        except OSError as error:
            raise ValueError(f"{ENV} names a directory that cannot be used: {error}") from error
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise ValueError(
                f"{ENV}={directory!r:.200} belongs to another user, or others can write to it, and the caches"
                " are code: name a directory that is writable for this user alone"
            )
        of_cpu = self._directory / f"cpu-{_instruction_sets()}"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.fspath(of_cpu)
        os.environ["TRITON_CACHE_DIR"] = os.fspath(self._directory / "triton")
        _store_checks(of_cpu / "checks")

    def snapshot(self) -> Callable[[Path], None]:
        """Return a function that writes the caches of this moment into a directory.

        Call it between two steps.  A kernel that is compiled later may be half written, so it is left out.
        """
        before_s = time.time() - _CLOCK_S
        return lambda directory: self._write(directory / ARCHIVE, before_s)

    def load(self, archive: Path) -> None:
        """Add the kernels of a verified checkpoint.  If that fails, log why: torch compiles them again."""
        try:
            with contextlib.suppress(FileNotFoundError), tarfile.open(archive, "r:") as members:
                self._extract(members)
        except (OSError, ValueError, tarfile.TarError) as error:
            log.warning("the compile cache of the checkpoint is not used: %s", error)

    def _write(self, archive: Path, before_s: float) -> None:
        if self._is_left_out:
            return
        try:
            found = list(self._files(before_s))
            if sum(size + _OVERHEAD_BYTES for _, size in found) > SIZE_MAX_BYTES:
                raise ValueError(f"it is larger than {SIZE_MAX_BYTES >> 20} MiB; empty it")
            if len(found) > FILES_MAX:
                raise ValueError(f"it has more than {FILES_MAX} files; empty it")
            if found:
                self._archive(archive, sorted(found))
        except (OSError, ValueError) as error:
            # A checkpoint without the caches is whole.
            self._is_left_out = True
            with contextlib.suppress(OSError):
                archive.unlink(missing_ok=True)
            log.warning(
                "checkpoints do not contain the compile cache %s: %s", self._directory, error
            )

    def _files(self, before_s: float) -> Iterator[tuple[str, int]]:
        """Name and size of each file from before ``before_s``, without those that only a process uses."""
        for parent, directories, names in os.walk(self._directory):
            directories[:] = [each for each in directories if each not in ("locks", "__pycache__")]
            for name in names:
                path = os.path.join(parent, name)
                if name.endswith(".lock") or ".tmp" in name:
                    continue
                with contextlib.suppress(FileNotFoundError):
                    found = os.lstat(path)
                    if stat.S_ISREG(found.st_mode) and found.st_mtime < before_s:
                        yield os.path.relpath(path, self._directory), found.st_size

    def _archive(self, archive: Path, found: list[tuple[str, int]]) -> None:
        # The same files give the same bytes, which are sent only once.
        with tarfile.open(archive, "x:", format=tarfile.GNU_FORMAT) as members:
            for name, size in found:
                try:
                    content = (self._directory / name).read_bytes()
                except FileNotFoundError:
                    continue
                if len(content) == size:  # else it was written again
                    member = tarfile.TarInfo(name)
                    member.size = size
                    members.addfile(member, io.BytesIO(content))

    def _extract(self, members: tarfile.TarFile) -> None:
        size = 0
        for count, member in enumerate(members):
            size += member.size
            if not member.isreg() or count >= FILES_MAX or size > SIZE_MAX_BYTES:
                raise ValueError(f"{member.name!r:.200} is not a regular file, or exceeds a limit")
            path = self._directory / bounds.path(member.name, "a file of the archive")
            content = members.extractfile(member)
            if content is not None and not path.exists():
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
                partial.write_bytes(content.read())
                partial.rename(path)


def _instruction_sets() -> str:
    """Digest of the instruction sets of this CPU."""
    found = platform.machine()
    with contextlib.suppress(OSError):
        lines = _CPU.read_text().splitlines()
        found += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(found.encode()).hexdigest()[:16]


def _store_checks(directory: Path) -> None:
    """Let torch skip a check of an instruction set that succeeded, if compiler, torch and CPU are the same.

    For each check torch starts a Python process, even if the program to load is in the cache.
    """
    try:
        builder = importlib.import_module("torch._inductor.cpp_builder")
        version_of, compiler = builder.get_compiler_version_info, builder.get_cpp_compiler
        kind = builder.VecISA
        check = kind.check_build
    except (ImportError, AttributeError) as error:
        log.info("torch checks the CPU again after each start: %s", error)
        return
    check = getattr(check, "__wrapped__", check)  # of an earlier guard

    @functools.wraps(check)
    def check_once(isa: Any, code: str) -> bool:
        facts = (torch.__version__, version_of(compiler()), isa.build_arch_flags(), code)
        success = directory / hashlib.sha256(repr(facts).encode()).hexdigest()
        if success.exists():
            return True
        is_usable: bool = check(isa, code)
        if is_usable:
            with contextlib.suppress(OSError):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                success.touch()
        return is_usable

    kind.check_build = check_once


def requested_cache() -> CompileCache | None:
    """The caches, if the environment requests them.

    Raises:
        ValueError: see :class:`CompileCache`.
    """
    directory = os.environ.get(ENV, "")
    return CompileCache(directory) if directory else None
