# SPDX-License-Identifier: Apache-2.0
"""Run checks as the daemon, in another process: same user, environment and sandbox.

If systemd manages the daemon, the checks run in a transient unit with the same ``[Service]`` section,
drop-ins included.  They see the daemon's credentials, mounts and limits, whether the daemon runs or not.
Without systemd, the checks run as the user of the running daemon, with its environment.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from swansong_bucket.errors import Unreachable
from swansongd.trainers import peers

from swansong_tools.doctor import fixes
from swansong_tools.doctor.findings import Finding, Judgement, Level, failure, skipped
from swansong_tools.doctor.installation import (
    BOOTED,
    DAEMON_USER,
    Account,
    Installation,
    account,
    tool,
)

LIMIT_S = 400.0
"""Time limit of all checks together; each check also has its own limit."""
_POLL_S = 0.05
_PROPERTIES = (
    "LoadState", "ActiveState", "Result", "ExecMainCode", "ExecMainStatus", "NRestarts", "MemoryMax",
    "NeedDaemonReload", "Type", "TimeoutStopUSec", "WatchdogUSec", "ReadWritePaths", "ProtectSystem",
)  # fmt: skip
# These settings override those of the daemon; user, environment, credentials, limits and sandbox stay.
# systemd removes the runtime directory with the unit, even if the unit is killed.
_INSTEAD = """
Type=oneshot
NotifyAccess=none
Restart=no
RestartPreventExitStatus=
WatchdogSec=0
TimeoutStartSec={limit_s:.0f}s
TimeoutStopSec=5s
KillMode=control-group
FileDescriptorStoreMax=0
RuntimeDirectory=
RuntimeDirectory={directory.name}-scratch
RuntimeDirectoryMode=0700
RuntimeDirectoryPreserve=no
Environment=TMPDIR=%t/{directory.name}-scratch
ExecCondition=
ExecStartPre=
ExecStart=
ExecStart={command}
ExecStartPost=
ExecReload=
ExecStop=
ExecStopPost=
StandardInput=null
StandardOutput=file:{directory}/stdout
StandardError=file:{directory}/stderr
"""


def systemctl(*arguments: str) -> str:
    """The standard output of ``systemctl``."""
    return tool("systemctl", *arguments).stdout.strip()


def properties(unit: str, names: Sequence[str]) -> dict[str, str]:
    """Properties of a unit from ``systemctl show``."""
    shown = systemctl("show", unit, "--property", ",".join(names))
    return dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)


def of_unit() -> dict[str, str]:
    """The properties of the daemon's unit that checks examine."""
    return properties(fixes.unit().name, _PROPERTIES)


def findings(vm: Installation, lacking: str) -> Iterator[Finding]:
    """The findings of a process with the user, the environment and the sandbox of the daemon.

    Args:
        lacking: a check that did not succeed, without which no process can run as the daemon; or empty.
    """
    if vm.by_systemd and os.geteuid() != 0:
        found = (
            "checking store and staging requires root: these checks run in the sandbox of the unit"
        )
        yield as_the_daemon(failure(found, "sudo swansong doctor"))
        return
    if lacking:
        yield as_the_daemon(skipped(f"depends on a check that did not succeed: {lacking}"))
        return
    vm.options = replace(vm.options, operator_file=_operator_file(vm))
    try:
        yield from _in_unit(vm) if vm.by_systemd else _in_process(vm)
    except OSError as error:  # of temporary files: each check handles its own errors
        found = f"checking store and staging failed: {error}"
        yield as_the_daemon(failure(found, "# set TMPDIR to a writable directory"))


def _operator_file(vm: Installation) -> str:
    """Credentials in an operator's home, which the daemon does not read."""
    below = {
        "s3": ".aws/credentials",
        "gs": ".config/gcloud/application_default_credentials.json",
    }.get(vm.config.store.url.partition(":")[0])
    if below is None or not vm.by_systemd:
        return ""
    for name in (os.environ.get("SUDO_USER", ""), "root"):
        try:
            path = Path(pwd.getpwnam(name).pw_dir, below)
            if path.is_file():
                return str(path)
        except (KeyError, OSError):
            continue
    return ""


# ------------------------------------------------------------ with systemd


def _in_unit(vm: Installation) -> Iterator[Finding]:
    """Run the checks in a transient copy of the daemon's unit.  Requires root."""
    vm.options = replace(vm.options, environment_of="the daemon's unit")
    directory = Path(tempfile.mkdtemp(prefix="swansong-doctor-", dir="/run"))
    unit = BOOTED / f"{directory.name}.service"
    try:
        text = unit_text(systemctl("cat", fixes.unit().name), _command(vm), directory)
        unit.write_text(text)
        starting = subprocess.Popen(  # noqa: S603 - our own unit
            ["systemctl", "start", unit.name],  # noqa: S607
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        yield from _followed(directory / "stdout", starting)
        if starting.wait() != 0:
            ended = properties(unit.name, ("Result", "ExecMainStatus"))
            yield as_the_daemon(failed_to_run(ended, _last_line(directory / "stderr")))
    finally:
        systemctl("stop", unit.name)
        systemctl("reset-failed", unit.name)
        unit.unlink(missing_ok=True)
        shutil.rmtree(directory, ignore_errors=True)


def unit_text(cat: str, command: Sequence[str], directory: Path) -> str:
    """The unit file of the transient copy.

    Args:
        cat: output of ``systemctl cat`` for the daemon's unit: its file, then its drop-ins.
        command: command line of the copy.
        directory: directory for its output.
    """
    section, lines = "", ["[Service]"]
    is_continued = False
    for line in cat.splitlines():
        if not is_continued and line.startswith("["):
            section = line.strip()
        elif section == "[Service]":
            lines.append(line)
        is_continued = line.endswith("\\") and not line.lstrip().startswith(("#", ";"))
    quoted = " ".join(_quoted(word) for word in command)
    lines.append(_INSTEAD.format(command=quoted, directory=directory, limit_s=LIMIT_S))
    return "\n".join(lines)


def _quoted(word: str) -> str:
    """Quote a word of ``ExecStart=`` so that systemd expands nothing in it."""
    for special, plain in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        word = word.replace(special, plain)
    return f'"{word}"'


def _followed(path: Path, writer: subprocess.Popen[bytes]) -> Iterator[Finding]:
    """Yield the findings in a file while ``writer`` appends to it."""
    position = 0
    deadline_mono_s = time.monotonic() + LIMIT_S
    while True:
        is_over = writer.poll() is not None
        data = path.read_bytes()[position:] if path.exists() else b""
        for line in data.splitlines(keepends=True):
            if line.endswith(b"\n"):
                position += len(line)
                yield finding_of(line)
        if is_over or time.monotonic() > deadline_mono_s:
            return
        time.sleep(_POLL_S)


def failed_to_run(ended: Mapping[str, str], stderr: str) -> Judgement:
    """The judgement of checks that did not finish.  The daemon would fail in the same way.

    Args:
        ended: properties of the unit after its exit.
        stderr: last line of standard error.
    """
    status, result = ended.get("ExecMainStatus", "?"), ended.get("Result", "?")
    found = f"running a process as the daemon failed: {result}, status {status}"
    fix = f"systemctl cat {fixes.unit().name}" if fixes.has_unit() else ""
    if result == "oom-kill":
        found = "the kernel killed the checks: out of memory within MemoryMax= of the daemon's unit"
        fix = fixes.more_memory()
    return failure(f"{found}; {stderr}" if stderr else found, fix)


def as_the_daemon(judgement: Judgement) -> Finding:
    """The finding about the process itself."""
    return Finding("host", "as the daemon", *judgement)


# ------------------------------------------------------------ without systemd


def _in_process(vm: Installation) -> Iterator[Finding]:
    """Run the checks as the user of the daemon, with its environment."""
    user, environ, whose = _identity(vm)
    vm.options = replace(vm.options, environment_of=whose)
    options: dict[str, Any] = {}
    if os.geteuid() == 0 and user.uid != 0:
        options = {"user": user.uid, "group": user.gid, "extra_groups": user.groups, "cwd": "/"}
    with (
        tempfile.TemporaryDirectory(prefix="swansong-doctor-") as name,
        tempfile.TemporaryDirectory(prefix="swansong-doctor-") as scratch,
    ):
        output, errors = Path(name, "stdout"), Path(name, "stderr")
        os.chown(scratch, user.uid, -1)  # removed by this process: the other one may be killed
        try:
            with output.open("wb") as stdout, errors.open("wb") as stderr:
                process = subprocess.Popen(  # noqa: S603 - our own module
                    _command(vm),
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    env={**environ, "TMPDIR": scratch},
                    **options,
                )
        except OSError as error:
            ended = {"Result": "exec", "ExecMainStatus": "203"}
            yield as_the_daemon(failed_to_run(ended, str(error)))
            return
        try:
            yield from _followed(output, process)
        finally:
            process.kill()
            code = process.wait()
        if code != 0:
            ended = {"Result": "exit-code", "ExecMainStatus": str(code)}
            yield as_the_daemon(failed_to_run(ended, _last_line(errors)))


def _identity(vm: Installation) -> tuple[Account, Mapping[str, str], str]:
    """User and environment of the running daemon, and a description of the environment's owner.

    The user and the environment of this command if the daemon does not run, if its environment cannot be
    read, or if its user is not trusted.  Root's command takes the daemon's user.
    """
    own = account(DAEMON_USER)
    trusted = {0, os.geteuid()} | ({own.uid} if own is not None and os.geteuid() == 0 else set())
    try:
        answer = vm.answer()
        pid, uid = answer.status.pid, answer.uid
        gid, *groups = peers.groups_of(pid)
        started = peers.environment_of(pid)
        # The kernel reports the user of the socket; the process named its id itself.
        is_daemon = peers.uids_of(pid) == {uid} and uid in trusted
    except (Unreachable, OSError):
        is_daemon = False  # another check reports a daemon that does not run
    if not is_daemon:
        whose = "this command (the daemon's environment cannot be read)"
        return vm.user, os.environ, whose
    # Variables of the dynamic loader could run foreign code as this user.
    environ = {name: value for name, value in started.items() if not name.startswith("LD_")}
    found = Account(f"user id {uid}", uid, gid, tuple(groups))
    return found, environ, f"the daemon (process {pid})"


# ------------------------------------------------------------ shared


def _command(vm: Installation) -> list[str]:
    module, options = "swansong_tools.doctor.checks", json.dumps(asdict(vm.options))
    return [sys.executable, "-I", "-m", module, str(vm.path), options]


def finding_of(line: bytes) -> Finding:
    """The finding in a line of the other process.  Its fix is text, which only the operator runs."""
    fields = json.loads(line)
    return Finding(**{**fields, "level": Level(fields["level"])})


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")
