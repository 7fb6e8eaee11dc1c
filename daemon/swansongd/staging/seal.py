# SPDX-License-Identifier: Apache-2.0
"""Recognises complete checkpoints in the staging directory of a run.

A set of the hooks is complete when it has its sealed name, and a rank manifest of each local rank that lists
each file with its size.  Layouts of other frameworks are adopted by the rules in :data:`ADOPTED` after they
have settled: they are unchanged for a time, and no file is open for writing.

A set that the hooks are still writing may have final files, which a rank has moved into its final directory.
The daemon may upload them early, but they are part of no commit before the set is sealed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import signal
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from swansong import openat
from swansong.fields import VERSION, ProtocolError
from swansong.layout import (
    RANK_MANIFEST_MAX_BYTES,
    RankManifest,
    is_final,
    is_private_name,
    is_rank_begun,
    is_rank_manifest,
    is_writing_directory,
    parse_adopted_name,
    parse_partial_name,
    parse_sealed_name,
    rank_begun_name,
    rank_manifest_name,
)
from swansong_bucket.errors import StagingError
from swansong_bucket.model import CheckpointId, CheckpointKind, Staged, StagedFile, merged_health

from swansongd.core.events import Scanned
from swansongd.staging import scan
from swansongd.util import birth


@dataclass(frozen=True, slots=True)
class FrameworkLayout:
    """The layout of a framework's checkpoints, and its sign of completion."""

    framework: str
    """Key of :data:`swansong.layout.ADOPTED_NAMES`."""
    is_one_file: bool = False
    needs: frozenset[str] = frozenset()
    """Files that identify the layout."""
    last: tuple[str, str] | None = None
    """(a, b): a set with ``a`` is complete only if it has ``b``."""
    markers: frozenset[str] = frozenset()


ADOPTED = (
    FrameworkLayout(  # Hugging Face: training_args.bin is written with the model, trainer_state.json last
        "checkpoint-n",
        last=("training_args.bin", "trainer_state.json"),
        markers=frozenset({"trainer_state.json"}),
    ),
    FrameworkLayout(  # PyTorch DCP: the coordinator renames .metadata after all ranks have written
        "dcp",
        needs=frozenset({".metadata"}),
        markers=frozenset({".metadata"}),
    ),
    FrameworkLayout("ckpt", is_one_file=True),  # Lightning
)
"""In order of precedence."""

SETS_MAX = 500
"""Sets, partial or sealed, that one scan examines: those with the highest steps."""
REJECTIONS_MAX = 20
"""Rejections that one scan reports; each is a line of the log."""
MANIFESTS_MAX_BYTES = 32 * 2**20
"""Limit for the sum of all rank manifests of one set."""
ALL = "*"
"""In place of the directory, in a rejection of several entries."""


@dataclass(frozen=True, slots=True)
class _EntryState:
    """The state of one entry of the staging directory."""

    files: tuple[StagedFile, ...] | None
    """None if they could not be listed."""
    since_mono_s: float
    scan_mono_s: float
    """Start of the scan that first found these files."""
    outcome: Staged | str | None = None
    """The set, or the reason of its rejection; None until it has settled."""


class Scanner:
    """Scans the staging directory of a run, and reuses the results for unchanged entries.

    Args:
        run_directory: staging directory of the run.
        run_fd: its descriptor; None opens the path at each scan.
        allowed_uids: users that may own staged files.
        settle_s: time for which an adopted set must be unchanged.
        monotonic: the clock.
    """

    def __init__(
        self,
        run_directory: Path,
        *,
        run_fd: int | None = None,
        allowed_uids: frozenset[int],
        settle_s: float,
        monotonic: Callable[[], float],
    ) -> None:
        self.run_directory = run_directory
        self._directory: int | Path = run_directory if run_fd is None else run_fd
        self.settle_s = settle_s
        self.is_settling = False
        """Whether the last scan found an adopted set that has not settled."""
        self._allowed_uids = allowed_uids
        self._monotonic = monotonic
        self._seen: dict[str, _EntryState] = {}
        self._growing: dict[str, Staged] = {}

    @property
    def is_replaced(self) -> bool:
        """Whether the path leads to another directory than the open one: trainers would save there."""
        if isinstance(self._directory, Path):
            return False
        try:
            return not os.path.samestat(os.fstat(self._directory), os.stat(self.run_directory))
        except OSError as error:
            return error.errno == errno.ENOENT

    def scan(self) -> Scanned:
        """Scan once.

        Raises:
            OSError: the staging directory of the run cannot be read.
        """
        started_mono_s = self._monotonic()
        seen: dict[str, _EntryState] = {}
        staged: list[Staged] = []
        pending: list[str] = []
        growing: dict[str, Staged] = {}
        self.is_settling = False
        with scan.opened(self._directory) as run_fd:
            names, rejected = self._candidates(run_fd)
            for name in names:
                if parse_partial_name(name):
                    pending.append(name)
                    partly = self._examine_partial(run_fd, name)
                    if partly is not None:
                        growing[name] = partly
                    continue
                layout = None
                if not parse_sealed_name(name):
                    layout = _layout_of(run_fd, name)
                    if layout is None:
                        continue
                found = self._examine_entry(run_fd, name, layout, started_mono_s)
                if found is None:
                    continue
                seen[name] = found
                if isinstance(found.outcome, Staged):
                    staged.append(found.outcome)
                elif found.outcome is not None:
                    rejected.append((name, found.outcome))
                else:
                    pending.append(name)
                    self.is_settling = True
        self._seen, self._growing = seen, growing
        return Scanned(
            started_mono_s=started_mono_s,
            staged=tuple(sorted(staged, key=lambda item: (item.id, item.directory))),
            pending=tuple(pending),
            growing=tuple(growing.values()),
            rejected=_limited(rejected),
        )

    def _candidates(self, run_fd: int) -> tuple[list[str], list[tuple[str, str]]]:
        """Names of the newest :data:`SETS_MAX` entries that may be sets, and the reasons for the others.

        Entries of other users are ignored before any of their files is read, with one line for each user,
        so that their number costs neither time nor log.
        """
        steps: dict[str, int] = {}
        foreign_uids: set[int] = set()
        closed: OSError | None = None
        with os.scandir(run_fd) as entries:
            for entry in entries:
                name = entry.name
                if is_private_name(name):
                    continue
                try:
                    uid = entry.stat(follow_symlinks=False).st_uid
                except FileNotFoundError:
                    continue
                except OSError as error:  # a FUSE mount of another user: stat() is refused
                    closed = error
                    continue
                if uid in self._allowed_uids:
                    steps[name] = _step_of(name)
                else:
                    foreign_uids.add(uid)
        rejected = [
            (
                ALL,
                f"entries of user id {uid} are ignored; add that user to trainer.users if it trains",
            )
            for uid in sorted(foreign_uids)
        ]
        if closed is not None:
            reason = f"an entry that cannot be examined is ignored: {closed.strerror}"
            rejected.append((ALL, reason))
        names = sorted(steps, key=lambda name: (steps[name], name))
        if len(names) > SETS_MAX:
            rejected.append((ALL, f"there are more than {SETS_MAX} sets; the oldest are ignored"))
        return sorted(names[-SETS_MAX:]), rejected

    def _examine_partial(self, run_fd: int, name: str) -> Staged | None:
        """The final files of a set that is being written; None if it cannot be read."""
        try:
            files = scan.listing(
                run_fd, name, self._allowed_uids, passing_over=is_writing_directory
            )
            return _growing(run_fd, name, files)
        except (StagingError, ProtocolError):
            # It changes all the time: the last result is valid while the directory exists.
            with suppress(OSError):
                os.stat(name, dir_fd=run_fd, follow_symlinks=False)
                return self._growing.get(name)
            return None

    def _examine_entry(
        self, run_fd: int, name: str, layout: FrameworkLayout | None, scan_mono_s: float
    ) -> _EntryState | None:
        """The current state of an entry; None if it was renamed or removed during the examination.

        :func:`scan.remove_set` renames a set first.  A defect of a set that still has its name is therefore
        never the work of the daemon.
        """
        identity = _identity(run_fd, name)
        try:
            found = self._examine(run_fd, name, layout, scan_mono_s)
        except StagingError as error:
            # A file was removed during the scan, or no descriptor was left: the set may be sound.
            is_passing = isinstance(error.__cause__, FileNotFoundError) or scan.is_out_of_means(
                error
            )
            outcome = None if is_passing else error.line()
            found = _EntryState(None, self._monotonic(), scan_mono_s, outcome)
        except Exception as error:  # one set must not hide the others
            reason = f"cannot be examined: {type(error).__name__}"
            found = _EntryState(None, self._monotonic(), scan_mono_s, reason)
        is_set = isinstance(found.outcome, Staged)
        return found if is_set or _identity(run_fd, name) == identity else None

    def _examine(
        self, run_fd: int, name: str, layout: FrameworkLayout | None, scan_mono_s: float
    ) -> _EntryState:
        """The current state of an entry.

        Raises:
            StagingError: the file system returned an error, so there is no state to reuse.
        """
        now_mono_s = self._monotonic()
        files = scan.listing(run_fd, name, self._allowed_uids)
        seen = self._seen.get(name)
        if seen is None or seen.files != files:
            seen = _EntryState(files, now_mono_s, scan_mono_s)
        if seen.outcome is not None:
            return seen
        try:
            if layout is None:
                return replace(seen, outcome=_sealed(run_fd, self.run_directory.name, name, files))
            if now_mono_s - seen.since_mono_s < self.settle_s or is_written(run_fd, name, files):
                return seen
            created_wall_ns = _created_wall_ns(run_fd, name, files)
            created_mono_s = created_wall_ns / 1e9 + self._wall_to_mono_s()
            begun_mono_s = min(seen.scan_mono_s, created_mono_s)
            adopted = replace(_adopted(name, layout, files), begun_mono_s=begun_mono_s)
            return replace(seen, outcome=adopted)
        except StagingError as error:
            if isinstance(error.__cause__, OSError):
                raise
            return replace(seen, outcome=error.line())

    def _wall_to_mono_s(self) -> float:
        """The monotonic clock minus the wall clock; the thread may be paused between the two readings."""
        return max(self._monotonic() - time.time_ns() / 1e9 for _ in range(3))


def is_written(run_directory: int | Path, directory: str, files: tuple[StagedFile, ...]) -> bool:
    """Whether a process has a file of the set open for writing; False if the kernel cannot tell.

    The check requests a read lease, which the kernel grants only if there is no writer.  That needs ownership
    of the file or CAP_LEASE, and a file system with leases.
    """
    for file in files:
        try:
            fd = scan.open_file(run_directory, directory, file)
        except StagingError:
            return True  # changed since the listing
        try:
            # If a writer opens the file during the lease, the kernel sends this signal, which is ignored by
            # default.  Without this line it would send SIGIO, which kills by default.
            fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            os.close(fd)
    return False


def _created_wall_ns(
    run_directory: int | Path, directory: str, files: tuple[StagedFile, ...]
) -> int:
    """When the oldest file of the set was created, or last written if the file system tells no more."""
    created_wall_ns: list[int] = []
    for file in files:
        with openat.held(scan.open_file(run_directory, directory, file)) as fd:
            created_wall_ns.append(min(birth.created_wall_ns(fd) or file.mtime_ns, file.mtime_ns))
    return min(created_wall_ns, default=time.time_ns())


def _identity(run_fd: int, name: str) -> tuple[int, int] | None:
    """Device and inode of the entry; None if it does not exist."""
    try:
        facts = os.stat(name, dir_fd=run_fd, follow_symlinks=False)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


def _step_of(name: str) -> int:
    """The step in the name of an entry; -1 without one."""
    of_hooks = parse_sealed_name(name) or parse_partial_name(name)
    if of_hooks is not None:
        return of_hooks[0]
    steps = (parse_adopted_name(layout.framework, name) for layout in ADOPTED)
    return next((step for step in steps if step is not None and step >= 0), -1)


def _limited(rejected: list[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    if len(rejected) <= REJECTIONS_MAX:
        return tuple(rejected)
    return (*rejected[:REJECTIONS_MAX], (ALL, "further entries are rejected as well"))


def _layout_of(run_fd: int, name: str) -> FrameworkLayout | None:
    try:
        mode = os.stat(name, dir_fd=run_fd, follow_symlinks=False).st_mode
        for layout in ADOPTED:
            # A link with a name that would be adopted is reported; other links are ignored.
            fits = stat.S_ISLNK(mode) or stat.S_ISDIR(mode) != layout.is_one_file
            fits &= parse_adopted_name(layout.framework, name) is not None
            if fits and _holds(run_fd, name, layout.needs):
                return layout
    except OSError:
        pass  # removed since the listing
    return None


def _holds(run_fd: int, name: str, needs: frozenset[str]) -> bool:
    if not needs:
        return True
    with suppress(OSError), openat.held(openat.open_directory(name, dir_fd=run_fd)) as directory_fd:
        return needs.issubset(os.listdir(directory_fd))
    return False


def _adopted(name: str, layout: FrameworkLayout, files: tuple[StagedFile, ...]) -> Staged:
    paths = {file.path for file in files}
    step = parse_adopted_name(layout.framework, name)
    if step is None or step < 0:
        raise StagingError("has no step number of up to 12 digits in its name")
    if not paths:
        raise StagingError("contains no file")
    if layout.last is not None and layout.last[0] in paths and layout.last[1] not in paths:
        raise StagingError(f"is not complete: {layout.last[1]} is missing")
    content = "\n".join(f"{f.path}\t{f.size_bytes}\t{f.mtime_ns}\t{f.inode}" for f in files)
    return Staged(
        id=CheckpointId(step, hashlib.sha256(content.encode()).hexdigest()[:12]),
        directory=name,
        kind=CheckpointKind.PERIODIC,
        files=files,
        markers=layout.markers & paths,
        framework=layout.framework,
    )


def _sealed(run_fd: int, run: str, name: str, files: tuple[StagedFile, ...]) -> Staged:
    named = [file for file in files if is_rank_manifest(file.path)]
    if not named:
        raise StagingError("has no rank manifest")
    # Counted before they are read: a set may contain thousands of large ones.
    first = _read_manifest(run_fd, name, named[0])
    if len(named) != first.local_world_size:
        raise StagingError(f"has {len(named)} of {first.local_world_size} rank manifests")
    _check_total(named)
    sizes = {file.path: file.size_bytes for file in files}
    manifests = []
    for file in named:
        manifest = _read_manifest(run_fd, name, file)
        _check_files(manifest, sizes)
        manifests.append(replace(manifest, files=[]))
    lead = _lead(manifests)
    staged = _of_hooks(name, lead, files, manifests)
    if not lead.start_id:
        raise StagingError(f"rank {lead.rank}: its manifest names no start of the training")
    for manifest in manifests:
        _check_manifest(manifest, lead, run, staged.id.step)
    return staged


def _growing(run_fd: int, name: str, files: tuple[StagedFile, ...]) -> Staged:
    """The final part of a set.  The claims of its ranks are checked when the set is sealed."""
    named = [file for file in files if is_rank_begun(file.path) or is_rank_manifest(file.path)]
    if not named:
        raise StagingError("no rank has begun to write")
    _check_total(named)
    manifests = [replace(_read_manifest(run_fd, name, file), files=[]) for file in named]
    final = tuple(file for file in files if is_final(file.path))
    return _of_hooks(name, _lead(manifests), final, manifests)


def _check_total(named: Sequence[StagedFile]) -> None:
    if sum(file.size_bytes for file in named) > MANIFESTS_MAX_BYTES:
        raise StagingError(f"its rank manifests have over {MANIFESTS_MAX_BYTES} bytes together")


def _lead(manifests: list[RankManifest]) -> RankManifest:
    # Manifests differ only in files and health; one with a request id represents the set.
    return next((manifest for manifest in manifests if manifest.request_id), manifests[0])


def _of_hooks(
    name: str,
    lead: RankManifest,
    files: tuple[StagedFile, ...],
    manifests: Sequence[RankManifest],
) -> Staged:
    parsed = parse_sealed_name(name) or parse_partial_name(name)
    assert parsed is not None
    elsewhere = lead.world_size - lead.local_world_size
    is_possible = elsewhere >= lead.nodes - 1 if lead.nodes > 1 else elsewhere == 0
    if not (0 <= lead.node < lead.nodes and lead.local_world_size >= 1 and is_possible):
        raise StagingError(
            f"node {lead.node} of {lead.nodes} with {lead.local_world_size} of {lead.world_size} ranks"
            " is impossible"
        )
    if lead.kind not in tuple(CheckpointKind):
        raise StagingError(f"rank {lead.rank}: unknown kind {lead.kind!r:.40}")
    return Staged(
        id=CheckpointId(*parsed, is_final=lead.kind == CheckpointKind.FINAL, start=lead.start_id),
        directory=name,
        kind=CheckpointKind(lead.kind),
        files=files,
        markers=frozenset(f.path for f in files if f.path.split("/")[-1] == ".metadata"),
        node=lead.node,
        nodes=lead.nodes,
        # The position of a rank that took no part is unknown: such a set answers no request.
        request_id="" if lead.without_ranks else lead.request_id,
        boot_id=lead.boot_id,
        began_ticks=min(manifest.began_ticks for manifest in manifests),
        health=merged_health([manifest.health for manifest in manifests]),
        trainer={
            "world_size": lead.world_size,
            "local_world_size": lead.local_world_size,
            "framework": lead.framework,
            **({"without_ranks": lead.without_ranks} if lead.without_ranks else {}),
        },
    )


def _check_manifest(manifest: RankManifest, lead: RankManifest, run: str, step: int) -> None:
    rank = f"rank {manifest.rank}"
    if manifest.version != VERSION:
        raise StagingError(f"{rank}: manifest of version {manifest.version}, not {VERSION}")
    if manifest.run != run:
        raise StagingError(f"{rank}: belongs to run {manifest.run!r:.100}, not {run!r}")
    if manifest.step != step:
        raise StagingError(f"{rank}: its manifest is of step {manifest.step}")
    if _world(manifest) != _world(lead) or not 0 <= manifest.rank < manifest.world_size:
        raise StagingError(f"{rank}: other ranks or nodes took part than in rank {lead.rank}")
    if manifest.start_id != lead.start_id:
        raise StagingError(
            f"{rank}: belongs to another start of the training than rank {lead.rank}"
        )
    if manifest.kind not in tuple(CheckpointKind):
        raise StagingError(f"{rank}: unknown kind {manifest.kind!r:.40}")


def _check_files(manifest: RankManifest, sizes: dict[str, int]) -> None:
    rank = f"rank {manifest.rank}"
    for entry in manifest.files:
        found = sizes.get(entry.path)
        if found is None:
            raise StagingError(f"{rank}: {entry.path} is missing")
        if found != entry.size_bytes:
            raise StagingError(f"{rank}: {entry.path} has {found} bytes, not {entry.size_bytes}")


def _world(manifest: RankManifest) -> tuple[int, int, int, int, str]:
    shape = manifest.world_size, manifest.local_world_size, manifest.node, manifest.nodes
    return *shape, manifest.without_ranks


def _read_manifest(run_fd: int, directory: str, file: StagedFile) -> RankManifest:
    if file.size_bytes > RANK_MANIFEST_MAX_BYTES:
        raise StagingError(f"{file.path} has over {RANK_MANIFEST_MAX_BYTES} bytes")
    with os.fdopen(scan.open_file(run_fd, directory, file), "rb") as stream:
        try:
            manifest = RankManifest.decode(stream.read(file.size_bytes))
        except (OSError, ProtocolError) as error:
            raise StagingError(f"{file.path}: {error}") from error
    rank = manifest.rank
    if file.path not in (rank_manifest_name(rank), rank_begun_name(rank)):
        raise StagingError(f"{file.path} is the manifest of rank {manifest.rank}")
    return manifest
