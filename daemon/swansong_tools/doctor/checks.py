# SPDX-License-Identifier: Apache-2.0
"""All checks in their order, causes before consequences; runs them on a VM and in the build of an image.

docs/reference/doctor.md is made of the checks, which are declared in a module for each subject.
``python -m swansong_tools.doctor.checks PATH OPTIONS`` runs those that must run as the daemon, and prints one
finding per line, as JSON.  :mod:`swansong_tools.doctor.sandbox` starts it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path

import swansongd
from swansong_bucket.errors import ConfigError
from swansongd.config.config import Config, load
from swansongd.observe import log

from swansong_tools.doctor import (
    cloud,
    daemon,
    engines,
    fixes,
    host,
    reporting,
    sandbox,
    staging,
    store,
)
from swansong_tools.doctor.findings import (
    Checklist,
    Examination,
    Finding,
    Judgement,
    examine,
    failure,
    ok,
)
from swansong_tools.doctor.installation import (
    AskDaemon,
    Installation,
    Options,
    ask_nothing,
    daemon_account,
    own_account,
)
from swansong_tools.paths import exists

CONFIGURATION = Checklist(family="configuration")


@CONFIGURATION.add("configuration")
def configuration(vm: Installation) -> Judgement:
    """Every problem of the file."""
    return ok(f"{vm.path} is valid; run {vm.config.run.name}")


AS_DAEMON = (
    *cloud.AS_DAEMON,
    *store.CHECKS,
    *store.SETTINGS,
    *staging.CHECKS,
    *reporting.AS_DAEMON,
)
"""Checks that must run as the daemon: another user could create files that the daemon cannot change."""
PREREQUISITES = ("users", "permissions", "sandbox")
"""Checks that must succeed before anything can run as the daemon."""
DAEMON = (*daemon.CHECKS, *reporting.METRICS, *engines.CHECKS)
ALL = (
    *CONFIGURATION,
    *cloud.CONFIGURATION,
    *host.INSTALLED,
    *host.RUNNING,
    *AS_DAEMON,
    *DAEMON,
    *host.IMAGE,
)


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
    configured = () if vm.configured is None else CONFIGURATION
    return examine(vm, (*configured, *host.INSTALLED, *host.IMAGE))


def _of_vm(vm: Installation) -> Iterator[Finding]:
    installed = host.INSTALLED if host.is_installed() else ()
    if vm.configured is None:
        yield from examine(vm, installed)
        return
    examination = Examination(vm)
    yield from examination.run((*CONFIGURATION, *cloud.CONFIGURATION, *installed, *host.RUNNING))
    lacking = examination.lacking(PREREQUISITES)
    yield from map(examination.note, sandbox.findings(vm, lacking))
    yield from examination.run(DAEMON)


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
        if not exists(path):
            source = Path(swansongd.__file__).with_name("swansong.example.toml")
            make = f"install -D -m 0644 {fixes.quoted(source)} {fixes.quoted(path)}"
            fix = fixes.then(fixes.as_root(make), fixes.restart())
        problems = [CONFIGURATION[0].finding(failure(each, fix)) for each in error.problems]
    vm = Installation(
        path=path,
        configured=config,
        user=daemon_account() if fixes.has_unit() else own_account(),
        ask=ask,
        options=options,
        by_systemd=host.is_run_by_systemd(),
    )
    return vm, problems


def main(path: str, options: str) -> int:
    """Print the findings; the exit code is 0 unless the configuration is not valid."""
    log.configure("console", "error")  # to standard error; standard output is for findings
    vm, problems = _installation(Path(path), ask_nothing, Options(**json.loads(options)))
    for problem in problems:
        print(f"{path}: {problem.found}", file=sys.stderr)
    if problems:
        return ConfigError.exit_code
    for finding in examine(replace(vm, user=own_account()), AS_DAEMON):
        print(json.dumps(asdict(finding)), flush=True)
    os._exit(0)  # a check that timed out may have left a blocked thread


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
