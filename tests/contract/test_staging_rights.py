# SPDX-License-Identifier: Apache-2.0
"""Permissions in staging with real users: the daemon, a trainer, a member of their group, an outsider."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from swansong import layout
from swansong_bucket.errors import StagingError
from swansongd.core.events import Scanned
from swansongd.staging import scan
from swansongd.staging.prepare import open_restored, prepare
from swansongd.staging.seal import ALL, Scanner

from testkit.as_user import DAEMON, GROUP, MEMBER, OUTSIDER, TRAINER, as_user, place_for_all
from testkit.other_users import needs_root
from testkit.staged import write_files, write_set

pytestmark = needs_root


_MS_NOSUID_NODEV, _MNT_DETACH = 6, 2


@pytest.fixture
def staging() -> Iterator[Path]:
    """As tmpfiles.d creates it: owned by the daemon, with the group of the trainers."""
    with place_for_all(DAEMON, mode=0o2750) as path:
        yield path


@pytest.fixture
def run(staging: Path) -> Path:
    """Prepared by a daemon with the umask of its unit."""
    assert as_user(DAEMON, lambda: prepared(staging)) == "prepared"
    return staging / "r1"


def prepared(staging: Path) -> str:
    os.umask(0o077)
    prepare(staging, "r1").release()
    return "prepared"


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_the_run_directory_is_sticky_and_open_to_the_group(staging: Path, umask: int) -> None:
    """It inherits the group, also in the sandbox, which refuses to set the setgid bit, and with any umask."""

    def in_sandbox() -> str:
        chmod = os.fchmod

        def refusing(fd: int, mode: int) -> None:
            if mode & stat.S_ISGID:  # as RestrictSUIDSGID=
                raise PermissionError(errno.EPERM, "not permitted")
            chmod(fd, mode)

        os.fchmod = refusing
        os.umask(umask)
        prepare(staging, "r1").release()
        return f"{os.umask(0):o}"

    assert as_user(DAEMON, in_sandbox) == f"{umask:o}"
    facts = (staging / "r1").stat()
    assert (oct(facts.st_mode & 0o7777), facts.st_gid) == ("0o3770", staging.stat().st_gid)


def scanned(run: Path) -> Scanned:
    uids = frozenset({0, DAEMON, TRAINER})
    return Scanner(run, allowed_uids=uids, settle_s=0.0, monotonic=lambda: 0.0).scan()


def a_set(run: Path, umask: int = 0o022, step: int = 5) -> Path:
    """A set by a trainer that does not care for groups and modes."""

    def write() -> str:
        os.umask(umask)
        return write_set(run, step).name

    return run / str(as_user(TRAINER, write))


ATTEMPTS: dict[str, Callable[[Path], object]] = {
    "overwrite a file": lambda it: os.open(it / "rank-00000" / "model.bin", os.O_WRONLY),
    "cut a file": lambda it: os.truncate(it / "rank-00000" / "model.bin", 0),
    "remove a file": lambda it: os.unlink(it / "rank-00000" / "model.bin"),
    "rename a file": lambda it: os.rename(it / "rank-00000" / "model.bin", it / "rank-00000" / "x"),
    "add a file": lambda it: os.open(it / "rank-00000" / "new", os.O_CREAT | os.O_WRONLY, 0o666),
    "add a file at the top": lambda it: os.open(it / "new", os.O_CREAT | os.O_WRONLY, 0o666),
    "add a directory": lambda it: os.mkdir(it / "new"),
    "rename the set": lambda it: os.rename(it, it.with_name("moved")),
    "change its mode": lambda it: os.chmod(it, 0o777),
    "rename the run": lambda it: os.rename(it.parent, it.parent.with_name("moved")),
    "add beside the run": lambda it: os.mkdir(it.parent.with_name("other")),
    "enter the daemon's own": lambda it: os.listdir(it.with_name(scan.OWN_DIRECTORY)),
    "rename the daemon's own": lambda it: os.rename(
        it.with_name(scan.OWN_DIRECTORY), it.with_name("moved")
    ),
}


def attempted(path: Path) -> dict[str, str]:
    """The type of the error that each attempt raised."""
    found = {}
    for name, attempt in ATTEMPTS.items():
        try:
            attempt(path)
        except OSError as error:
            found[name] = type(error).__name__
    return found


@pytest.mark.fault("S2", "S3", "S5")
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
@pytest.mark.parametrize("who", [MEMBER, OUTSIDER])
def test_only_its_writer_can_change_a_set(run: Path, who: int, umask: int) -> None:
    """Neither a member of the trainers' group nor an outsider, with any umask of the trainer."""
    path = a_set(run, umask)
    done = as_user(who, partial(attempted, path), groups=(GROUP,) if who == MEMBER else ())
    assert done == dict.fromkeys(ATTEMPTS, "PermissionError")
    found = as_user(DAEMON, lambda: [staged.directory for staged in scanned(run).staged])
    assert found == [path.name]


@pytest.mark.fault("T14")
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_the_daemon_reads_and_deletes_the_sets_of_a_trainer(run: Path, umask: int) -> None:
    """With any umask of the trainer, although the daemon is neither root nor the owner."""
    path = a_set(run, umask)

    def read_and_prune() -> list[object]:
        (staged,) = scanned(run).staged
        fd = scan.open_file(run, staged.directory, staged.files[0])
        content = os.read(fd, 1000).decode()
        os.close(fd)
        scan.remove_set(run, staged.directory)
        return [content, sorted(os.listdir(run))]

    content, left = as_user(DAEMON, read_and_prune)
    assert content
    assert left == [scan.OWN_DIRECTORY]
    assert not path.exists()


@pytest.mark.fault("S24")
def test_a_trainer_can_read_and_not_change_restored_files(run: Path) -> None:
    """The daemon owns the directory; the group may read and enter."""

    def restored() -> str:
        fd = os.open(run, os.O_RDONLY)
        os.close(open_restored(fd))
        return str(stat.S_IMODE(os.stat(run / layout.RESTORED_DIRECTORY).st_mode))

    assert as_user(DAEMON, restored) == str(0o750)
    directory = run / layout.RESTORED_DIRECTORY
    for attempt in (
        lambda: os.mkdir(directory / "planted"),
        lambda: os.symlink("/etc", directory / "planted"),
        lambda: os.rename(directory, run / "moved"),
        lambda: os.rmdir(directory),
    ):
        assert str(as_user(TRAINER, attempt)).startswith("PermissionError")
    assert as_user(TRAINER, lambda: os.listdir(directory)) == []


@pytest.mark.fault("S24")
def test_entries_of_a_trainer_under_the_daemons_names_are_moved_aside(staging: Path) -> None:
    """A directory or a link that existed before the daemon is not used, and stays unchanged."""
    run = staging / "r1"
    run.mkdir()
    os.chown(run, DAEMON, GROUP)
    run.chmod(0o1770)

    def plant() -> None:
        os.mkdir(run / scan.OWN_DIRECTORY)
        (run / scan.OWN_DIRECTORY / "claim.json").write_text("forged")
        os.symlink("/etc", run / layout.RESTORED_DIRECTORY)

    as_user(TRAINER, plant)

    def start() -> list[object]:
        held = prepare(staging, "r1")
        os.close(open_restored(held.fd))
        return [os.listdir(held.own), (run / layout.RESTORED_DIRECTORY).is_symlink()]

    assert as_user(DAEMON, start) == [[], False]
    planted = [path for path in run.iterdir() if path.name.startswith(".displaced.")]
    assert len(planted) == 2


@pytest.mark.fault("S24", "S8")
def test_a_directory_of_mode_0700_under_the_daemons_names_is_moved_aside(staging: Path) -> None:
    """The daemon cannot open the member's directory to read its owner, and still works."""
    run = staging / "r1"
    run.mkdir()
    os.chown(run, DAEMON, GROUP)
    run.chmod(0o1770)

    def plant() -> None:
        for name in (scan.OWN_DIRECTORY, layout.RESTORED_DIRECTORY):
            os.mkdir(run / name, 0o700)

    as_user(MEMBER, plant)

    def start() -> str:
        held = prepare(staging, "r1")
        os.close(open_restored(held.fd))
        return "ready"

    assert as_user(DAEMON, start) == "ready"
    assert (run / layout.RESTORED_DIRECTORY).stat().st_uid == DAEMON


@pytest.mark.fault("S7", "S8")
def test_a_mount_that_refuses_the_daemon_does_not_hide_the_sets(run: Path) -> None:
    """stat() of a FUSE mount fails for all users but the one that mounted it."""
    path = a_set(run)
    as_user(MEMBER, lambda: os.mkdir(run / "x"))
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        device = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        pytest.skip(f"no FUSE: {error}")
    place = os.fsencode(run / "x")
    options = f"fd={device},rootmode=40000,user_id={MEMBER},group_id={GROUP}".encode()
    try:
        if libc.mount(b"x", place, b"fuse", _MS_NOSUID_NODEV, options) != 0:
            pytest.skip(f"cannot mount: {os.strerror(ctypes.get_errno())}")
        try:

            def scan_as_daemon() -> list[object]:
                found = scanned(run)
                return [[each.directory for each in found.staged], list(found.rejected)]

            names, rejected = as_user(DAEMON, scan_as_daemon)
        finally:
            libc.umount2(place, _MNT_DETACH)
    finally:
        os.close(device)
    assert names == [path.name]
    assert rejected == [[ALL, "an entry that cannot be examined is ignored: Permission denied"]]


@pytest.mark.fault("S7", "S8")
def test_entries_of_other_users_cost_one_line_for_each_user(run: Path) -> None:
    """2,000 directories of a member: none is examined, and the set of the trainer is found."""
    path = a_set(run)

    def flood() -> None:
        for number in range(2000):
            os.mkdir(run / layout.sealed_name(10**11 + number, "abc"))

    as_user(MEMBER, flood)
    found = as_user(
        DAEMON,
        lambda: [[s.directory for s in scanned(run).staged], list(scanned(run).rejected)],
    )
    assert found[0] == [path.name]
    assert found[1] == [
        [
            ALL,
            f"entries of user id {MEMBER} are ignored; add that user to trainer.users if it trains",
        ]
    ]


@pytest.mark.fault("S3")
def test_a_member_cannot_add_a_hard_link_to_a_file_of_a_set(run: Path) -> None:
    """A hard link would void the set; if the kernel does not protect hard links, the directory does."""
    path = a_set(run)
    attempts: list[Callable[[], object]] = [
        lambda: os.link(path / "rank-00000.json", run / "stolen"),
        lambda: os.listdir(path),
        lambda: os.open(path / "rank-00000.json", os.O_RDONLY),
    ]
    for attempt in attempts:
        assert str(as_user(MEMBER, attempt)).startswith("PermissionError")


@pytest.mark.fault("S6")
def test_only_the_ranks_of_one_user_can_compute_the_names_of_their_sets(staging: Path) -> None:
    """The secret differs by user, and survives a restart of the daemon."""

    def secrets_of() -> list[str]:
        held = prepare(staging, "r1")
        return [held.naming_secret(TRAINER), held.naming_secret(MEMBER)]

    first, again = as_user(DAEMON, secrets_of), as_user(DAEMON, secrets_of)
    assert first == again
    assert len(set(first)) == 2
    assert all(len(secret) == 32 for secret in first)
    key = staging / "r1" / scan.OWN_DIRECTORY / "naming.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600


@pytest.mark.fault("H10")
def test_a_trainer_cannot_hold_the_lock_of_the_run(run: Path) -> None:
    """Only the daemon's user can open the locked directory."""
    refused = as_user(TRAINER, lambda: os.open(run / scan.OWN_DIRECTORY, os.O_RDONLY))
    assert str(refused).startswith("PermissionError")


def test_a_run_directory_of_a_trainer_is_refused(staging: Path) -> None:
    """If trainers may create it, the daemon refuses it with the fix."""
    staging.chmod(0o2770)
    as_user(TRAINER, lambda: write_files(staging / "r1" / "x", {"a": b"1"}) and None)

    def start() -> str:
        try:
            prepare(staging, "r1")
        except StagingError as error:
            return error.line()
        return "started"

    assert f"belongs to user id {TRAINER}" in str(as_user(DAEMON, start))
