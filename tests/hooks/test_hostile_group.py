# SPDX-License-Identifier: Apache-2.0
"""Another member of the trainers' group may read a trainer's sets, and cannot change them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from swansong import layout
from swansong._checkpoint.staging import remove_leftovers

from testkit.other_users import (
    DAEMON,
    GROUP,
    MEMBER,
    TRAINER,
    UserProcess,
    make_run_directory,
    needs_root,
    reachable_directory,
    run_as,
)

pytestmark = needs_root

TRAIN = """
staging, umask = arguments
os.umask(umask)

def stop(where):
    show(where)
    wait()

def save(directory):
    (directory / "model").write_bytes(b"m" * 1000)
    os.chmod(directory / "model", 0o666)  # as some frameworks do
    with tempfile.NamedTemporaryFile(dir=directory, delete=False) as file:
        file.write(b"o" * 1000)
    os.rename(file.name, directory / "optimizer")
    (directory / "layers").mkdir()
    (directory / "layers" / "0").write_bytes(b"l")
    stop("writing")
    finish(directory / "model")
    finish(directory / "layers" / "0")
    stop("some files are final")

for rank in (0, 1):
    manifest = RankManifest(
        run="run", step=3, kind="periodic", files=[], rank=rank, world_size=2, local_world_size=2
    )
    written = write_checkpoint(staging, "n", manifest, save)
    stop("sealed" if written.is_sealed else "one rank is done")
"""
STOPS = [
    *("writing", "some files are final", "one rank is done"),
    *("writing", "some files are final", "sealed"),
]

# Tries every attack on the given paths, and shows those that succeeded.
ATTACK = """
(playground,) = arguments
own = Path(playground, "own")

def mine(kind):
    shutil.rmtree(own) if own.is_dir() and not own.is_symlink() else own.unlink(missing_ok=True)
    if kind == "link":
        own.symlink_to("/etc/passwd")
    elif kind == "directory":
        own.mkdir()
    else:
        own.write_bytes(b"evil")
    return own

def write(path, mode):
    with open(path, mode) as file:
        file.write(b"evil")

FILE = {
    "overwrite": lambda path: write(path, "r+b"),
    "append": lambda path: write(path, "ab"),
    "rewrite": lambda path: write(path, "wb"),
    "truncate": lambda path: os.truncate(path, 0),
    "replace": lambda path: os.replace(mine("file"), path),
    "replace by a link": lambda path: os.replace(mine("link"), path),
}
DIRECTORY = {
    "add a file": lambda path: write(path + "/evil", "xb"),
    "add a directory": lambda path: os.mkdir(path + "/evil.d"),
    "add a link": lambda path: os.symlink("/etc/passwd", path + "/evil.link"),
    "add a hard link": lambda path: os.link(mine("file"), path + "/evil.hard"),
    "replace": lambda path: os.rename(mine("directory"), path),
    "remove": os.rmdir,
}
BOTH = {
    "rename": lambda path: os.rename(path, path + ".gone"),
    "take out": lambda path: os.rename(path, Path(playground, "taken")),
    "unlink": os.unlink,
    "open it to all": lambda path: os.chmod(path, 0o777),
    "own it": lambda path: os.chown(path, uid, gid),
    "drop its ACL": lambda path: os.removexattr(path, "system.posix_acl_access"),
}

show("ready")
while True:
    succeeded = []
    for path in wait():
        kinds = DIRECTORY if os.path.isdir(path) else FILE
        for name, attack in {**kinds, **BOTH}.items():
            try:
                attack(path)
            except OSError:
                continue
            succeeded.append([name, path])
    show(succeeded)
"""


@pytest.fixture
def place() -> Iterator[Path]:
    with reachable_directory() as directory:
        yield directory


def snapshot(run: Path) -> dict[str, tuple[Any, ...]]:
    """All facts about sets: inode, type and mode, owner, group, size, content."""
    found: dict[str, tuple[Any, ...]] = {}
    for top in sorted(run.glob("step-*")):
        for path in (top, *sorted(top.rglob("*"))):
            facts = path.lstat()
            content = path.read_bytes() if stat.S_ISREG(facts.st_mode) else b""
            owner = (facts.st_mode, facts.st_uid, facts.st_gid)
            found[str(path)] = (facts.st_ino, *owner, content)
    return found


def attacker(place: Path) -> UserProcess:
    playground = place / "playground"
    playground.mkdir()
    os.chown(playground, MEMBER, GROUP)
    process = UserProcess(ATTACK, str(playground), uid=MEMBER)
    assert process.shown() == "ready"
    return process


@pytest.mark.fault("S5", "T14")
@pytest.mark.parametrize(
    ("user", "has_acl", "umask"),
    # Each pair of values occurs.
    [(0, True, 0o000), (0, False, 0o077), (TRAINER, True, 0o077), (TRAINER, False, 0o000)],
    ids=["root-acl", "root-private", "trainer-acl-private", "trainer"],
)
def test_a_member_of_the_group_changes_nothing(
    place: Path, user: int, has_acl: bool, umask: int
) -> None:
    """Every attack at each stage of a save fails, and the daemon can read and remove the set."""
    run = make_run_directory(place / "run", has_acl=has_acl)
    with attacker(place) as member, UserProcess(TRAIN, str(run), umask, uid=user) as trainer:
        for where in STOPS:
            assert trainer.shown() == where
            before = snapshot(run)
            assert len(before) >= 5
            assert member.ask(list(before)) == [], f"succeeded while {where}"
            assert snapshot(run) == before
            trainer.tell()
    for path, (_, mode, owner, group, _) in snapshot(run).items():
        assert (owner, group) == (user, GROUP), path
        assert mode & 0o007 == 0, f"{path} is open to all"
        assert has_acl or mode & 0o020 == 0, f"{path} is open to the group"
    (sealed,) = run.glob("step-*")
    files = [path for path in sealed.rglob("*") if path.is_file()]
    assert len(files) == 8
    # With an ACL the daemon need not be in the group.
    read = """
show([len(Path(path).read_bytes()) for path in arguments])
"""
    sizes = run_as(read, *map(str, files), uid=DAEMON, gid=DAEMON if has_acl else GROUP)
    assert sizes == [path.stat().st_size for path in files]
    if has_acl:
        remove(sealed)


def remove(directory: Path) -> None:
    """Remove a set as the daemon does."""
    script = """
openat.remove_tree(arguments[1], dir_fd=openat.open_directory(arguments[0]))
show("removed")
"""
    run_as(script, str(directory.parent), directory.name, uid=DAEMON, gid=DAEMON)
    assert not directory.exists()


def test_the_daemon_can_remove_what_a_trainer_left_when_it_died(place: Path) -> None:
    """A partial set includes the files that were being written."""
    run = make_run_directory(place / "run", has_acl=True)
    with UserProcess(TRAIN, str(run), 0o077, uid=TRAINER) as trainer:
        assert trainer.shown() == "writing"
    (partial,) = run.glob("step-*")
    remove(partial)


SQUAT = """
path, kind, target = arguments
if kind == "directory":
    os.mkdir(path)
    os.chmod(path, 0o777)
    for name in ("rank-00000", "rank-00000.writing", "rank-00000.json", "rank-00000.begun"):
        os.symlink(target + "/" + name, path + "/" + name)
elif kind == "empty directory":
    os.mkdir(path)
    os.chmod(path, 0o777)
elif kind == "link":
    os.symlink(target, path)
else:
    Path(path).touch()
show(kind)
"""
# The kernel restricts a trainer more than root.
TAKEN = [("directory", TRAINER), ("directory", 0), ("empty directory", 0), ("link", 0), ("file", 0)]


SAVE = """
staging, nonce = arguments
manifest = RankManifest(run="run", step=3, kind="periodic", files=[])
try:
    written = write_checkpoint(
        staging, nonce, manifest, lambda directory: (directory / "model").touch()
    )
    show([written.is_sealed, written.directory])
except OSError as error:
    show(str(error))
"""


@pytest.mark.fault("S1", "S2")
@pytest.mark.parametrize(("kind", "user"), TAKEN)
def test_a_partial_set_of_another_user_is_not_written_to(place: Path, kind: str, user: int) -> None:
    """The save fails with the owner's user id, and writes neither there nor to the targets of links."""
    run = make_run_directory(place / "run", has_acl=True)
    target = place / "target"
    target.mkdir()
    os.chown(target, user, GROUP)
    partial = run / layout.partial_name(layout.sealed_name(3, "n"))
    run_as(SQUAT, str(partial), kind, str(target), uid=MEMBER)
    before = snapshot(run)
    error = run_as(SAVE, str(run), "n", uid=user)
    assert f"belongs to user id {MEMBER}; run all ranks of this VM as one user" in error
    assert snapshot(run) == before
    assert list(target.iterdir()) == []
    assert run_as(SAVE, str(run), "other", uid=user)[0], "another set is saved all the same"


@pytest.mark.fault("S1", "S2")
@pytest.mark.parametrize(("kind", "user"), TAKEN)
def test_a_sealed_name_that_another_user_took_costs_no_checkpoint(
    place: Path, kind: str, user: int
) -> None:
    """The partial name shows the sealed name to all users; a taken name gets another nonce."""
    run = make_run_directory(place / "run", has_acl=True)
    taken = run / layout.sealed_name(3, "n")
    run_as(SQUAT, str(taken), kind, str(place), uid=MEMBER)
    is_sealed, name = run_as(SAVE, str(run), "n", uid=user)
    assert is_sealed
    parsed = layout.parse_sealed_name(name)
    assert parsed is not None
    assert parsed[0] == 3
    assert (run / name).stat().st_uid == user
    assert (run / name / "rank-00000" / "model").is_file()


@pytest.mark.fault("D12")
def test_leftovers_of_other_users_stay(place: Path) -> None:
    """A starting trainer removes only the files of its own user, even as root."""
    run = make_run_directory(place / "run", has_acl=True)
    with UserProcess(TRAIN, str(run), 0o000, uid=TRAINER) as trainer:
        assert trainer.shown() == "writing"
    before = snapshot(run)
    remove_leftovers(str(run), 0)
    assert snapshot(run) == before
    script = "remove_leftovers(arguments[0], 0); show(os.listdir(arguments[0]))"
    assert run_as(script, str(run), uid=TRAINER) == []
