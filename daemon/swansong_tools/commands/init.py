# SPDX-License-Identifier: Apache-2.0
"""``swansong init``: write the configuration of this VM, admit the trainer's user, check the installation."""

from __future__ import annotations

import argparse
import os
import pwd
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from swansong import openat
from swansong_bucket.config.values import path as path_value
from swansong_bucket.config.values import store_url, users
from swansong_bucket.errors import ConfigError, Stopped
from swansongd.config.config import DEFAULT_PATH
from swansongd.trainers.users import uids_of

from swansong_tools.commands import main
from swansong_tools.commands.common import Parser, add_flag, argument, note, run_argument
from swansong_tools.commands.configuring import configured, is_example
from swansong_tools.doctor import fixes
from swansong_tools.doctor.installation import BOOTED, TRAINER_GROUP, group_id

NOTES = """\
On a terminal it asks for each value without an option, and for consent to the changes that it shows.
It replaces no configuration but the unchanged example. All other keys keep the values of the example."""
_STAGING = "/var/lib/swansong/staging"
EXAMPLES = {
    "Answer questions on a terminal.": "sudo swansong init",
    "Set up a VM from a script.": (
        "sudo swansong init --run my-run --store s3://my-bucket/checkpoints --trainer-user ubuntu --yes"
    ),
}


def _user(value: object) -> str:
    """The name of a user, read as one of ``trainer.users``."""
    return str(users([value])[0])


class _Value(NamedTuple):
    """A value that the command asks for."""

    key: str
    metavar: str
    parse: Parser
    text: str
    default: str = ""


_SUDO_USER = os.environ.get("SUDO_USER", "")
_VALUES = {
    "run": _Value("run.name", "RUN", run_argument, "name of the run, the same on all its VMs"),
    "store": _Value("store.url", "URL", argument(store_url), "store, such as s3://bucket/prefix"),
    "trainer-user": _Value(
        "trainer.users",
        "USER",
        argument(_user),
        "user that trains; default: the user who called sudo",
        _SUDO_USER,
    ),
    "staging": _Value(
        "staging.path",
        "DIR",
        argument(path_value),
        f"directory on a local disk; default: {_STAGING}",
        _STAGING,
    ),
}
"""By option."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, value in _VALUES.items():
        parser.add_argument(f"--{name}", type=value.parse, metavar=value.metavar, help=value.text)
    add_flag(parser, "--yes", "do not ask for consent")


def run(args: argparse.Namespace) -> int:
    path: Path = args.config.absolute()
    _refuse_existing(path)
    values = _values(args)
    user = values["trainer-user"]
    keys = {_VALUES[name].key: value for name, value in values.items()}
    text, config = configured({**keys, "trainer.users": [user]})
    uids_of(config.trainer.users)
    joining = _joining(user)
    print(f"This writes {path}:")
    for key, value in keys.items():
        print(f"  {key}: {value}")
    if joining:
        print(f"and lets {user} use the socket of the daemon:\n  {shlex.join(joining)}")
    if not args.yes and _asked("Continue? [y/N]").lower() not in ("y", "yes"):
        raise Stopped("writing the configuration failed: no consent; nothing was changed")
    command = ["sudo", "swansong", *([] if path == DEFAULT_PATH else ["--config", str(path)])]
    options = [word for name, value in values.items() for word in (f"--{name}", value)]
    _write(path, text, shlex.join([*command, "init", *options]))
    if joining:
        _join(joining, user)
    # The daemon is not started yet, and doctor reports that as well.
    main.main(["--config", str(path), "doctor"])
    start = f"swansongd --config {shlex.quote(str(path))}"
    if BOOTED.is_dir():
        start = f"systemctl enable --now {fixes.unit().name}"
    drill = f"{shlex.join(command)} drill --in 120s --wait"
    print(f"Next:\n  sudo {start}\n  {drill}   # while the trainer runs")
    return 0


def _refuse_existing(path: Path) -> None:
    """Raise ConfigError if there is a file, and not the example as it was installed."""
    if os.path.lexists(path) and not is_example(path):
        fix = f"change it with: sudoedit {shlex.quote(str(path))}; or remove it first"
        raise ConfigError([f"writing {path} failed: it exists and is not the example; {fix}"])


def _values(args: argparse.Namespace) -> dict[str, str]:
    """The values by option; those without an option from the terminal, or the defaults."""
    is_terminal = sys.stdin is not None and sys.stdin.isatty()
    values = {}
    for name, (*_, default) in _VALUES.items():
        given = getattr(args, name.replace("-", "_"))
        if given is None and is_terminal and not (args.yes and default):
            given = _answer(_VALUES[name])
        values[name] = str(given or default)
    missing = ", ".join(f"--{name}" for name, value in values.items() if not value)
    if missing:
        raise ConfigError([f"{missing}: missing (got nothing); add a value for each"])
    return values


def _answer(value: _Value) -> str:
    while True:
        try:
            return str(value.parse(_asked(value.text) or value.default))
        except argparse.ArgumentTypeError as error:
            note(str(error))


def _asked(question: str) -> str:
    if sys.stdin is None or not sys.stdin.isatty():
        raise ConfigError(["--yes: missing (got nothing); without a terminal it gives the consent"])
    try:
        return input(f"{question}: ").strip()
    except (EOFError, KeyboardInterrupt):
        raise Stopped("writing the configuration failed: no answer; nothing was changed") from None


def _joining(user: str) -> list[str]:
    """The command that lets the user into the group of the socket; empty if the user needs none."""
    group = group_id(TRAINER_GROUP)
    if group is None:
        return []  # nothing is installed: doctor reports that
    entry = pwd.getpwnam(user)
    if entry.pw_uid == 0 or group in os.getgrouplist(entry.pw_name, entry.pw_gid):
        return []
    return ["usermod", "--append", "--groups", TRAINER_GROUP, entry.pw_name]


def _join(command: list[str], user: str) -> None:
    if os.geteuid() == 0 and subprocess.run(command, check=False).returncode == 0:  # noqa: S603 - shown before
        print(f"{user} is in the group {TRAINER_GROUP}: log in again before you train")
    else:
        note(f"{user} cannot use the socket yet; run: sudo {shlex.join(command)}")


def _write(path: Path, text: str, again: str) -> None:
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with openat.held(openat.open_directory(path.parent)) as fd:
            openat.replace_file(path.name, text.encode(), dir_fd=fd, mode=0o644)
    except OSError as error:
        fix = (
            f"run: {again}"
            if isinstance(error, PermissionError)
            else "fix it, then repeat the command"
        )
        raise ConfigError([f"writing {path} failed: {error.strerror}; {fix}"]) from None
    print(f"wrote {path}")
