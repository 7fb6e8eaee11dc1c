# SPDX-License-Identifier: Apache-2.0
"""Shell commands that fix findings: complete, with tools that are installed here.

Commands for root start with ``sudo``; :func:`for_this_shell` adapts a whole fix to the operator's shell.
A fix that cannot run there becomes a comment, so that pasting it never does half of the work.

``doctor --fix`` runs a fix only if it is :class:`Harmless`.  That follows from the function that made the
fix, and never from its text: texts come from the checks that run as the daemon's user, and from servers.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from swansongd.config.config import DEFAULT_PATH

from swansong_tools.doctor.installation import BOOTED, DAEMON_USER, TRAINER_GROUP, account

WRITTEN_BY_RUN = "# Written by swansong run at each start."
PROVISION = "# install the package again, or in a clone of Swansong: sudo packer/provision.sh"

_FIRST = Path("/usr/lib/systemd/system/swansongd.service")
_ADMIN = Path("/etc/systemd/system")
"""Directory of the units and drop-ins of the operator."""
_chosen = _FIRST
_is_by_unit = True
_CLOUD_TOOLS = ("aws", "gcloud", "az")
_BUILT_IN = ("unset",)
_STARTS = re.compile(r"^ExecStart=.* --config[ =](\S+)\s*$", re.MULTILINE)
_SUDO = re.compile(r"(^|&& |\| )sudo ")
_EDITOR = "${EDITOR:-vi}"


class Harmless(str):
    """A fix that starts, creates or enables something, or removes rights, and cannot lose anything."""

    __slots__ = ()


def choose_unit(config: Path, *units: Path) -> None:
    """Let all checks and fixes be for the unit that starts a daemon with this configuration.

    Each job on a VM has its own unit.  If none names a configuration in ``/etc/swansong``, its unit is
    ``swansongd.service``.  Any other configuration has no unit: its daemon is started by ``swansong run``.

    Args:
        units: directories of units; the default are the operator's and the package's.
    """
    global _chosen, _is_by_unit  # noqa: PLW0603 - one doctor checks one daemon
    file = os.path.abspath(config)
    _chosen, _is_by_unit = _FIRST, Path(file).is_relative_to(DEFAULT_PATH.parent)
    places = units or (_ADMIN, _FIRST.parent)
    for unit in (each for place in places for each in sorted(place.glob("swansongd*.service"))):
        with suppress(OSError, UnicodeDecodeError):  # a unit that cannot be read is another's
            for named in _STARTS.findall(unit.read_text(encoding="utf-8")):
                if (job := _job(named, file, is_template="@." in unit.name)) is not None:
                    _chosen = unit.with_name(unit.name.replace("@.", f"@{job}."))
                    _is_by_unit = True
                    return


def _job(named: str, file: str, *, is_template: bool) -> str | None:
    """The instance that starts with this file, empty for a unit that is no template; None if none does.

    Args:
        named: the file that the unit names, with ``%i`` for the instance.
    """
    if not is_template:
        return "" if os.path.normpath(named.replace("%i", "")) == file else None
    before, has_instance, after = named.partition("%i")
    job = file.removeprefix(before).removesuffix(after)
    return job if has_instance and file == f"{before}{job}{after}" and "/" not in job else None


def has_unit() -> bool:
    """Whether a unit starts the daemon, rather than ``swansong run`` or its user."""
    return _is_by_unit


def has_daemon_user() -> bool:
    """Whether the daemon runs as the user of its package."""
    return _is_by_unit and account(DAEMON_USER) is not None


def unit() -> Path:
    """The file of the daemon's unit; an instance may have none, see :func:`unit_file`."""
    return _chosen


def unit_file() -> Path:
    """The file of the daemon's unit, or the template of an instance."""
    name, is_instance, _ = _chosen.stem.partition("@")
    return _chosen if not is_instance or _chosen.exists() else _chosen.with_name(f"{name}@.service")


def drop_ins() -> Path:
    """The directory for the operator's drop-ins of the daemon's unit."""
    return _ADMIN / f"{unit().name}.d"


def log(options: str) -> str:
    """Show the log of the daemon's unit."""
    return f"journalctl -u {unit().stem} {options} -o cat"


def as_root(command: str) -> str:
    """Run the command as root."""
    return f"sudo {command}"


def harmless(command: str) -> Harmless:
    """Run the command as root, also by ``doctor --fix``."""
    return Harmless(as_root(command))


def then(*commands: str) -> str:
    """Run the commands in order until one fails; empty ones are left out.  Harmless if all of them are."""
    given = [command for command in commands if command]
    text = " && ".join(given)
    is_harmless = bool(given) and all(isinstance(each, Harmless) for each in given)
    return Harmless(text) if is_harmless else text


def write(path: Path, *lines: str) -> str:
    """Write a drop-in of ours owned by root, and create its directory."""
    text = " ".join(shlex.quote(line) for line in lines)
    return then(
        harmless(f"install -d {quoted(path.parent)}"),
        Harmless(f"printf '%s\\n' {text} | {as_root(f'tee {quoted(path)}')} >/dev/null"),
    )


def drop_in(name: str, *lines: str) -> str:
    """Add a drop-in with these lines of ``[Service]`` to the daemon's unit, and restart the daemon.

    Empty for a daemon without a unit.
    The name of the drop-in sorts last, so that it overrides the operator's drop-ins.
    """
    if not _is_by_unit:
        return ""
    return then(
        write(drop_ins() / f"zz-swansong-{name}.conf", "[Service]", *lines),
        harmless("systemctl daemon-reload"),
        restart(),
    )


def more_memory() -> str:
    """Remove the memory limits from the daemon's unit."""
    return drop_in("memory", "MemoryMax=infinity", "MemoryHigh=infinity")


def restart() -> str:
    """Start or restart the daemon; empty if systemd does not run it."""
    is_by_systemd = BOOTED.is_dir() and _is_by_unit
    return harmless(f"systemctl restart {unit().name}") if is_by_systemd else ""


def start(config: Path) -> str:
    """Start the daemon, in the background if systemd does not run it.

    A daemon of ``swansong run`` is started only with its trainer.
    """
    if is_of_run(config):
        return "# run the swansong run of this job again, which starts the daemon and the trainer"
    program = Path(sys.prefix, "bin", "swansongd")
    return restart() or f"{quoted(program)} --config {quoted(config)} &"


def is_of_run(config: Path) -> bool:
    """Whether ``swansong run`` wrote the configuration."""
    try:
        return config.read_text(encoding="utf-8", errors="replace").startswith(WRITTEN_BY_RUN)
    except OSError:
        return False


def directory(path: Path, mode: str, *, installed: bool = False) -> str:
    """Create a directory for the daemon, or set its owner and mode.  Only the creation is harmless.

    Args:
        installed: whether the daemon's user exists, or will exist when the command runs.
    """
    has_user = installed or has_daemon_user()
    owner = f" -o {DAEMON_USER} -g {TRAINER_GROUP}" if has_user else ""
    command = as_root(f"install -d -m {mode}{owner} {quoted(path)}")
    return command if os.path.lexists(path) else Harmless(command)


def edit(path: Path) -> str:
    """Open a file of root in an editor; ``swansong run`` would overwrite a change in the file it writes."""
    if is_of_run(path):
        return "# give swansong run other options, or your configuration file with --config"
    return f"sudoedit {quoted(path)}"


def set_key(path: Path, line: str) -> str:
    """Open the configuration, in which the operator puts the line, and restart the daemon."""
    return f"{then(edit(path), restart())}  # set {line}"


def quoted(path: Path | str) -> str:
    return shlex.quote(str(path))


def for_this_shell(command: str) -> str:
    """Adapt a fix to the shell of the operator; a command that runs here stays harmless.

    A root shell needs no sudo, which may not be installed; a process under sudo was not started from a root
    shell.  Commands of a cloud's tool need rights on the account, which no VM has.
    """
    if not command or command.startswith("#"):
        return command
    if os.geteuid() == 0 and "SUDO_USER" not in os.environ:
        kind = type(command)
        command = kind(_SUDO.sub(r"\1", command.replace("sudoedit ", f'"{_EDITOR}" ')))
    words = command.split()
    tool = words[1] if words[0] == "sudo" else words[0]
    if tool in _CLOUD_TOOLS:
        return f"# with rights on the account: {command}"
    if _EDITOR in tool or tool in _BUILT_IN or shutil.which(tool):
        has_sudo = words[0] != "sudo" or shutil.which("sudo")
        plain = _SUDO.sub(r"\1", command)
        return command if has_sudo else f"# as root: {plain}"
    return f"# {tool} is not on this machine: {command}"
