# SPDX-License-Identifier: Apache-2.0
"""``swansong init``: a configuration that the daemon accepts, written only with consent."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import tomllib
from pathlib import Path

import pytest
from swansong_tools.commands import init, main
from swansong_tools.commands.configuring import EXAMPLE

from testkit.rig import BIN
from testkit.waiting import until


def arguments(path: Path, **values: str) -> list[str]:
    """A complete command line, with a store and a staging directory that exist."""
    given = {
        "run": "r",
        "store": f"file://{path.parent}/store",
        "trainer-user": "root",
        "staging": "",
    }
    given |= {"staging": f"{path.parent}/staging"} | {
        k.replace("_", "-"): v for k, v in values.items()
    }
    for name in ("store", "staging"):
        (path.parent / name).mkdir(exist_ok=True)
    options = [word for name, value in given.items() if value for word in (f"--{name}", value)]
    return ["--config", str(path), "init", *options]


def called(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    """The end of a program without a terminal."""
    return subprocess.run(
        [str(BIN / program), *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())


def test_the_daemon_accepts_what_is_written(tmp_path: Path) -> None:
    """The comments of the example are kept, doctor runs, and a second call changes nothing.

    The unchanged example, as it is installed, is replaced.
    """
    config = tmp_path / "swansong.toml"
    config.write_bytes(EXAMPLE.read_bytes())
    done = called("swansong", *arguments(config), "--yes")
    said = done.stdout
    assert done.returncode == 0, done.stderr
    assert "store.url: file://" in said
    assert "configuration: " in said
    assert f"{config} drill --in 120s --wait" in said
    text = config.read_text()
    written = tomllib.loads(text)
    assert (written["run"]["name"], written["trainer"]["users"]) == ("r", ["root"])
    assert written["staging"]["path"] == f"{tmp_path}/staging"
    changed = set(text.splitlines()) ^ set(EXAMPLE.read_text().splitlines())
    assert len(changed) == 2 * 4
    assert called("swansongd", "--config", str(config), "--check").returncode == 0

    again = called("swansong", *arguments(config, run="other"), "--yes")
    assert again.returncode == 2
    assert "sudoedit" in again.stderr
    assert config.read_text() == text


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"run": "", "trainer_user": ""}, "--run, --trainer-user: missing"),
        (
            {"trainer_user": "no-such-user"},
            "trainer.users: user 'no-such-user' does not exist; create",
        ),
        (
            {"store": "s4://x"},
            "--store: 's4://x' does not start with s3://, gs://, az:// or file:///; give",
        ),
        (
            {"store": "file:///x/y", "staging": "/x"},
            "store.url: overlaps staging.path (got 'file:///x/y')",
        ),
        ({}, "--yes: missing"),
    ],
)
def test_nothing_is_written_with_a_value_that_is_not_valid(
    values: dict[str, str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each error names the option or key, the value, and the fix."""
    monkeypatch.delitem(os.environ, "SUDO_USER", raising=False)
    config = tmp_path / "swansong.toml"
    consent = [] if not values else ["--yes"]
    try:
        code = main.main([*arguments(config, **values), *consent])
    except SystemExit as error:  # of argparse
        code = int(str(error.code))
    assert code == 2
    assert said in capsys.readouterr().err
    assert not config.exists()


def test_the_trainers_user_is_let_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root runs usermod, as shown before; another user is told to."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "usermod").write_text('#!/bin/sh\necho "$@" >"$0.called"\n')
    (tools / "usermod").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setattr(init, "TRAINER_GROUP", "games")
    monkeypatch.setattr(main, "main", lambda _: 0)  # no doctor
    config = tmp_path / "swansong.toml"
    words = [*arguments(config, trainer_user="daemon"), "--yes"]
    wanted = "--append --groups games daemon"
    for uid, calls in ((1000, 0), (0, 1)):
        monkeypatch.setattr("os.geteuid", lambda uid=uid: uid)
        assert init.run(main.parser(words).parse_args(words)) == 0
        said = capsys.readouterr()
        assert f"usermod {wanted}" in said.out
        assert (f"sudo usermod {wanted}" in said.err) == (not calls)
        assert (tools / "usermod.called").exists() == bool(calls)
        config.unlink()


def test_a_terminal_is_asked_until_the_answers_are_valid(tmp_path: Path) -> None:
    """Without consent nothing is written."""
    config = tmp_path / "swansong.toml"
    ours, its = pty.openpty()
    with subprocess.Popen(
        [str(BIN / "swansong"), *arguments(config, run="")], stdin=its, stdout=its, stderr=its
    ) as command:
        os.close(its)
        screen = b""

        def shows(text: bytes) -> bool:
            nonlocal screen
            screen += os.read(ours, 4096)
            return text in screen

        for shown, answer in (
            (b"name of the run", b"a/b"),
            (b"invalid format", b"good"),
            (b"[y/N]", b"n"),
        ):
            until(lambda: shows(shown), what=shown.decode())  # noqa: B023
            os.write(ours, answer + b"\n")
        assert command.wait(60) == 9
    os.close(ours)
    assert b"run.name: good" in screen
    assert not config.exists()
