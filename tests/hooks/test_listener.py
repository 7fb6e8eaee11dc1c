# SPDX-License-Identifier: Apache-2.0
"""The hooks trust only the daemon's user on the socket, and only its directories."""

from __future__ import annotations

import logging
import os
import pwd
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import swansong
from swansong._daemon import daemon_channel

from testkit.fake_daemon import FakeDaemon
from testkit.other_users import (
    OUTSIDER,
    OUTSIDERS,
    UserProcess,
    needs_root,
    reachable_directory,
)
from testkit.training_parts import Attach, Counter
from testkit.waiting import until

LISTEN = """
daemon = FakeDaemon(Path(arguments[0]))
os.chmod(daemon.path, 0o777)
os.chmod(daemon.staging, 0o777)
written = write_checkpoint(
    str(daemon.staging),
    "n",
    RankManifest(run="run", step=66, kind="final", files=[]),
    Bundle({"counter": Counter(66)}).save,
)
daemon.restorable = lambda: (daemon.staging / written.directory, 66)
show(daemon.path)
while wait():
    show([type(message).__name__ for message in daemon.received])
"""


@pytest.fixture
def outsider() -> Iterator[UserProcess]:
    """A process of another user that acts as a daemon; the value True makes it show what it has received."""
    with reachable_directory() as place:
        os.chown(place, OUTSIDER, OUTSIDERS)
        with UserProcess(LISTEN, str(place), uid=OUTSIDER, gid=OUTSIDERS) as process:
            yield process


@needs_root
@pytest.mark.fault("S8")
def test_a_listener_of_another_user_gets_no_message_and_is_ignored(
    outsider: UserProcess,
    counter: Counter,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Training continues without checkpoints, and one log line has the user and the fix."""
    path, attempts = outsider.shown(), []
    check = daemon_channel.check_listener

    def counted(*arguments: Any) -> int:
        attempts.append(arguments)
        return check(*arguments)

    monkeypatch.setattr(daemon_channel, "check_listener", counted)
    with swansong.attach({"counter": counter}, socket=path) as guard:
        assert guard.restore() == 0
        assert counter.value == 0
        guard.step(1)
        assert not guard.save(1)
        until(lambda: len(attempts) >= 3, what="three attempts to connect")
        assert outsider.ask(True) == []
    (record,) = [each for each in caplog.records if "from step 0" not in each.message]
    assert record.levelno == logging.WARNING
    assert f"user id {OUTSIDER} listens on {path}" in record.message
    assert f"set SWANSONG_DAEMON_USER={OUTSIDER}" in record.message
    assert "training continues" in record.message


@needs_root
@pytest.mark.parametrize("known_as", ["number", "name", "swansong"])
def test_the_daemons_user_is_configured_or_is_named_swansong(
    outsider: UserProcess, counter: Counter, monkeypatch: pytest.MonkeyPatch, known_as: str
) -> None:
    """The environment has its number or name; the default is the user that the packages create."""
    users = {"swansong" if known_as == "swansong" else "checkpointer": OUTSIDER}
    if known_as == "number":
        monkeypatch.setenv("SWANSONG_DAEMON_USER", str(OUTSIDER))
    elif known_as == "name":
        monkeypatch.setenv("SWANSONG_DAEMON_USER", "checkpointer")
    monkeypatch.setattr(pwd, "getpwnam", lambda name: SimpleNamespace(pw_uid=users[name]))
    with swansong.attach({"counter": counter}, socket=outsider.shown()) as guard:
        assert guard.restore() == 66
        assert counter.value == 66


@needs_root
def test_the_variable_replaces_the_usual_user(
    outsider: UserProcess,
    counter: Counter,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With another user in the variable, a listener that runs as ``swansong`` is a stranger."""
    monkeypatch.setattr(pwd, "getpwnam", lambda _: SimpleNamespace(pw_uid=OUTSIDER))
    monkeypatch.setenv("SWANSONG_DAEMON_USER", str(OUTSIDER + 1))
    with swansong.attach({"counter": counter}, socket=outsider.shown()) as guard:
        assert guard.restore() == 0
    assert "is not user" in caplog.text


# ---------------------------------------------------------------- directories


def saved(daemon: FakeDaemon, attach: Attach, counter: Counter) -> Path:
    """A checkpoint of step 3, which the daemon offers for a restore."""
    guard = attach({"counter": counter})
    guard.restore()
    counter.value = 3
    assert guard.save(3)
    guard.close()
    (sealed,) = daemon.sealed()
    daemon.restorable = lambda: (sealed, 3)
    return sealed


def own(path: Path) -> None:
    os.chown(path, OUTSIDER, OUTSIDERS)


def link(path: Path) -> None:
    moved = path.with_name(f"moved-{path.name}")
    path.rename(moved)
    path.symlink_to(moved)


def hard_link(path: Path) -> None:
    os.link(path, path.with_name(f"other-{path.name}"))


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


PARTS = {
    "set": "",
    "rank": "rank-00000",
    "file": "rank-00000/state.json",
    "manifest": "rank-00000.json",
}


@pytest.mark.fault("S1", "S3", "S4")
@pytest.mark.parametrize(
    ("part", "change", "reason"),
    [
        *(
            pytest.param(part, own, f"belongs to user id {OUTSIDER}", marks=needs_root)
            for part in PARTS
        ),
        *((part, link, "Not a directory|symbolic links") for part in PARTS),
        ("file", hard_link, "2 hard links"),
        ("manifest", hard_link, "2 hard links"),
        ("file", fifo, "not a regular file"),
        ("manifest", fifo, "not a regular file"),
    ],
)
def test_a_restored_directory_that_others_can_change_is_refused(
    *,
    daemon: FakeDaemon,
    attach: Attach,
    counter: Counter,
    part: str,
    change: Callable[[Path], None],
    reason: str,
) -> None:
    """A directory or file of another user, or a link, is not loaded; the error names the directory."""
    sealed = saved(daemon, attach, counter)
    change(sealed / PARTS[part])
    counter.value = 0
    with pytest.raises(swansong.RestoreError, match=reason) as caught:
        attach({"counter": counter}).restore()
    assert str(sealed) in str(caught.value)
    assert counter.value == 0


def test_a_relative_restored_directory_is_refused(
    daemon: FakeDaemon, attach: Attach, counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would depend on the trainer's working directory."""
    sealed = saved(daemon, attach, counter)
    monkeypatch.chdir(sealed.parent)
    daemon.restorable = lambda: (Path(sealed.name), 3)
    with pytest.raises(swansong.RestoreError, match="not an absolute path"):
        attach({"counter": counter}).restore()


def test_a_directory_that_the_user_chose_may_contain_links(
    daemon: FakeDaemon, attach: Attach, counter: Counter
) -> None:
    """There, links and files of other users are the user's own choice."""
    sealed = saved(daemon, attach, counter)
    for part in ("", "rank-00000", "rank-00000.json"):
        link(sealed / part)
    if os.geteuid() == 0:
        own(sealed / "rank-00000/state.json")
    counter.value = 0
    assert attach({"counter": counter}).restore(sealed) == 3
    assert counter.value == 3


def elsewhere(path: Path) -> str:
    return path.name


def foreign(path: Path) -> str:
    own(path)
    return str(path)


def linked(path: Path) -> str:
    link(path)
    return str(path)


@pytest.mark.fault("S1")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param(foreign, f"belongs to user id {OUTSIDER}", marks=needs_root),
        (linked, "Not a directory|symbolic links"),
        (elsewhere, "not an absolute path"),
    ],
)
def test_staging_that_is_not_the_daemons_is_not_written_to(
    *,
    daemon: FakeDaemon,
    attach: Attach,
    counter: Counter,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[Path], str],
    reason: str,
) -> None:
    """A warning has the reason; nothing is saved there."""
    staging = daemon.staging
    monkeypatch.chdir(staging.parent)
    daemon.staging = Path(change(staging))
    guard = attach({"counter": counter})
    until(lambda: "training continues without checkpoints" in caplog.text)
    assert not guard.save(1)
    (record,) = caplog.records
    assert re.search(reason, record.message)
    daemon.staging = staging
    assert list(staging.iterdir()) == []
