# SPDX-License-Identifier: Apache-2.0
"""Runs the checks: for a running VM, for an image during its build, and as the daemon.

``python -m swansong_tools.doctor.checkup PATH OPTIONS`` runs those that must run as the daemon, and prints
one finding per line, as JSON.  :mod:`swansong_tools.doctor.sandbox` starts it.
"""

from __future__ import annotations

import json
import os
import pwd
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path

import swansongd
from swansong_bucket.errors import ConfigError, Unreachable
from swansongd.config.config import Config, load
from swansongd.observe import log

from swansong_tools.doctor import checks, fixes, host, sandbox
from swansong_tools.doctor.findings import (
    Examination,
    Finding,
    examine,
    failure,
    skipped,
)
from swansong_tools.doctor.installation import (
    AskDaemon,
    Installation,
    Options,
    ask_nothing,
    daemon_account,
    own_account,
)
from swansong_tools.doctor.store import StoreProbe


def check(path: Path, ask: AskDaemon, options: Options) -> Iterator[Finding]:
    """Yield all findings as the checks finish, causes before consequences.

    Args:
        path: configuration file.
        ask: returns the answer of the daemon on a socket; raises Unreachable.
    """
    vm, problems = _installation(path, ask, options)
    for finding in chain(problems, _of_image(vm) if options.image else _of_vm(vm)):
        yield replace(finding, fix=fixes.for_this_shell(finding.fix))


def _of_image(vm: Installation) -> Iterator[Finding]:
    """The checks that need no cloud, no bucket and no daemon."""
    if vm.configured is not None:
        yield from examine(vm, (checks.CONFIGURATION,))
    yield from examine(vm, (*checks.INSTALLED, *checks.IMAGE))


def _of_vm(vm: Installation) -> Iterator[Finding]:
    installed = checks.INSTALLED if host.is_installed() else ()
    if vm.configured is None:
        yield from examine(vm, installed)
        return
    examination = Examination(vm)
    yield from examination.run((checks.CONFIGURATION, checks.CLOUD, *installed, *checks.HOST))
    lacking = examination.lacking(checks.PREREQUISITES)
    yield from map(examination.note, _as_daemon(vm, lacking))
    yield from examination.run(checks.DAEMON)


def _installation(
    path: Path, ask: AskDaemon, options: Options
) -> tuple[Installation, list[Finding]]:
    """The installation, and one finding for each problem of its configuration."""
    path = path.absolute()  # so that the printed commands work in any directory
    fixes.choose_unit(path)
    config: Config | None = None
    problems = []
    try:
        config = load(path)
    except ConfigError as error:
        fix = fixes.edit(path)
        if not path.exists():
            source = Path(swansongd.__file__).with_name("swansong.example.toml")
            make = f"install -D -m 0644 {fixes.quoted(source)} {fixes.quoted(path)}"
            fix = fixes.then(fixes.as_root(make), fixes.restart())
        problems = [checks.CONFIGURATION.finding(failure(each, fix)) for each in error.problems]
    vm = Installation(
        path=path,
        configured=config,
        user=daemon_account(),
        ask=ask,
        options=options,
        by_systemd=host.is_run_by_systemd(),
    )
    return vm, problems


# ---------------------------------------------------------------- as the daemon


def _as_daemon(vm: Installation, lacking: str) -> Iterator[Finding]:
    """The findings of a process with the user, the environment and the sandbox of the daemon."""
    if vm.by_systemd and os.geteuid() != 0:
        found = (
            "checking store and staging requires root: these checks run in the sandbox of the unit"
        )
        yield sandbox.as_the_daemon(failure(found, "sudo swansong doctor"))
        return
    if lacking:
        found = f"depends on a check that did not succeed: {lacking}"
        yield sandbox.as_the_daemon(skipped(found))
        return
    identity, whose = _identity(vm)
    vm.options = replace(vm.options, operator_file=_operator_file(vm), environment_of=whose)
    try:
        if vm.by_systemd:
            yield from sandbox.in_unit(vm)
        elif identity.is_this_process():
            yield from _examined_here(vm)
        else:
            yield from sandbox.in_process(identity, vm)
    except OSError as error:  # of temporary files: each check handles its own errors
        found = f"checking store and staging failed: {error}"
        yield sandbox.as_the_daemon(failure(found, "# set TMPDIR to a writable directory"))


def _examined_here(vm: Installation) -> Iterator[Finding]:
    try:
        yield from examine(replace(vm, user=own_account()), checks.AS_DAEMON)
    finally:
        vm.shared(StoreProbe).close()


def _identity(vm: Installation) -> tuple[sandbox.ProcessIdentity, str]:
    """The identity to run checks with, and a description of its environment's owner."""
    if vm.by_systemd:
        return sandbox.presumed(), "the daemon's unit"
    try:
        answer = vm.answer()
        found = sandbox.identity_of(answer.status.pid, answer.uid)
    except Unreachable:
        found = None  # the daemon does not run or refuses; another check reports that
    if found is not None:
        return found, f"the daemon (process {answer.status.pid})"
    return sandbox.presumed(), "this command (the daemon's environment cannot be read)"


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


def main(path: str, options: str) -> int:
    """Print the findings; the exit code is 0 unless the configuration is not valid."""
    log.configure("console", "error")  # to standard error; standard output is for findings
    vm, problems = _installation(Path(path), ask_nothing, Options(**json.loads(options)))
    for problem in problems:
        print(f"{path}: {problem.found}", file=sys.stderr)
    if problems:
        return ConfigError.exit_code
    for finding in _examined_here(vm):
        print(json.dumps(asdict(finding)), flush=True)
    os._exit(0)  # a check that timed out may have left a blocked thread


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
