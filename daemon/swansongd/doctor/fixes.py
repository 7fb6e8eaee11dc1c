# SPDX-License-Identifier: Apache-2.0
"""Commands that fix what doctor found: complete, and of tools that are on this machine.

Commands for root begin with ``sudo`` everywhere; :func:`for_this_shell` adapts a whole fix to the shell that
it is pasted into.  A fix that cannot run there becomes a comment: pasted, it never does half of something.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

from swansongd.doctor.accounts import DAEMON_USER, TRAINER_GROUP, account

DAEMON = "swansongd.service"
BOOTED = Path("/run/systemd/system")
PROVISION = "# in a clone of Swansong: sudo packer/provision.sh"

_DROP_INS = Path("/etc/systemd/system") / f"{DAEMON}.d"
_CLOUD_TOOLS = ("aws", "gcloud")
_BUILT_IN = ("unset",)
_SUDO = re.compile(r"(^|&& |\| )sudo ")
_EDITOR = "${EDITOR:-vi}"


def as_root(command: str) -> str:
    """The command as root."""
    return f"sudo {command}"


def then(*commands: str) -> str:
    """The commands one after the other, as long as they succeed; empty ones are left out."""
    return " && ".join(command for command in commands if command)


def write(path: Path, *lines: str) -> str:
    """Writes a small file of root's, and makes the directory that it lies in."""
    text = " ".join(shlex.quote(line) for line in lines)
    return then(
        as_root(f"install -d {quoted(path.parent)}"),
        f"printf '%s\\n' {text} | {as_root(f'tee {quoted(path)}')} >/dev/null",
    )


def drop_in(name: str, *lines: str) -> str:
    """Gives the unit of the daemon a drop-in with these lines of ``[Service]``, and restarts the daemon.

    Its name sorts last: a drop-in of the operator would win otherwise.
    """
    return then(
        write(_DROP_INS / f"zz-swansong-{name}.conf", "[Service]", *lines),
        as_root("systemctl daemon-reload"),
        restart(),
    )


def more_memory() -> str:
    """Takes the limits of memory away from the unit of the daemon."""
    return drop_in("memory", "MemoryMax=infinity", "MemoryHigh=infinity")


def restart() -> str:
    """Starts the daemon, or restarts it; empty where systemd does not run."""
    return as_root(f"systemctl restart {DAEMON}") if BOOTED.is_dir() else ""


def start(config: Path) -> str:
    """Starts the daemon, by hand where systemd does not run."""
    program = Path(sys.prefix, "bin", "swansongd")
    return restart() or f"{quoted(program)} --config {quoted(config)} &"


def directory(path: Path, mode: str, *, installed: bool = False) -> str:
    """Makes a directory of the daemon's, or sets its owner and mode.

    Args:
        installed: the daemon has a user of its own, or will have when this runs.
    """
    has_user = installed or account(DAEMON_USER) is not None
    owner = f" -o {DAEMON_USER} -g {TRAINER_GROUP}" if has_user else ""
    return as_root(f"install -d -m {mode}{owner} {quoted(path)}")


def edit(path: Path) -> str:
    """Opens a file of root's in an editor."""
    return f"sudoedit {quoted(path)}"


def quoted(path: Path | str) -> str:
    return shlex.quote(str(path))


def for_this_shell(command: str) -> str:
    """The fix as the person in front of this machine can paste it.

    Root needs no sudo, which may not be installed, unless sudo is what made this process root's.  Commands
    of a cloud's own tool need rights on the account, which no VM has.
    """
    if not command or command.startswith("#"):
        return command
    if os.geteuid() == 0 and "SUDO_USER" not in os.environ:
        command = _SUDO.sub(r"\1", command.replace("sudoedit ", f'"{_EDITOR}" '))
    words = command.split()
    tool = words[1] if words[0] == "sudo" else words[0]
    if tool in _CLOUD_TOOLS:
        return f"# with rights on the account: {command}"
    if _EDITOR in tool or tool in _BUILT_IN or shutil.which(tool):
        has_sudo = words[0] != "sudo" or shutil.which("sudo")
        plain = _SUDO.sub(r"\1", command)
        return command if has_sudo else f"# as root: {plain}"
    return f"# {tool} is not on this machine: {command}"
