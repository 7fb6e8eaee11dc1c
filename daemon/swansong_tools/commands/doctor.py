# SPDX-License-Identifier: Apache-2.0
"""``swansong doctor``: check the installation."""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Collection, Iterable
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.text import Text
from swansong_bucket.errors import ConfigError, Stopped, Unreachable, Unready
from swansong_bucket.util.printable import printable
from swansongd.config.config import load
from swansongd.observe import log

from swansong_tools.commands.common import add_flag, add_json, print_json
from swansong_tools.commands.daemon_client import DaemonClient
from swansong_tools.commands.jobs import other_jobs
from swansong_tools.commands.terminal import console
from swansong_tools.doctor.checks import check
from swansong_tools.doctor.findings import Finding, Level, has_failure
from swansong_tools.doctor.fixes import Harmless
from swansong_tools.doctor.installation import DaemonAnswer, Options

_STYLES = {
    Level.OK: "green",
    Level.WARNING: "yellow",
    Level.FAILURE: "bold red",
    Level.SKIPPED: "dim",
}
_FIX_LIMIT_S = 120.0
"""More than systemd gives the daemon to start."""

EXAMPLES = {
    "Check a VM before its first training run.": "sudo swansong doctor",
    "Check it and measure the bandwidth to the store.": "sudo swansong doctor --speed",
    "Check it and send a test notification.": "sudo swansong doctor --send-notification",
    "Check an image while it is built.": "swansong doctor --image",
    "Run the fixes that cannot lose anything, then check.": "sudo swansong doctor --fix",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    output = parser.add_mutually_exclusive_group()
    add_json(output)
    add_flag(
        output,
        "--fix",
        "first show and run the harmless fixes, which start, enable or create something; fixes that "
        "delete, open or edit something are only shown",
    )
    add_flag(
        parser,
        "--image",
        "check an image during its build: skip the metadata service, the store and the daemon",
    )
    add_flag(
        parser,
        "--speed",
        "also measure the bandwidth to the store: uploads 32 MiB for each of flush.connections, "
        "and deletes them",
    )
    add_flag(
        parser,
        "--trial",
        "accept a file:// store on this VM's own disk, for a trial: checkpoints are lost with the VM",
    )
    add_flag(
        parser,
        "--send-notification",
        "also send a test notification to the webhook of [notify], and call its heartbeat address",
    )


def run(args: argparse.Namespace) -> int:
    try:
        return _run(args)
    except KeyboardInterrupt:
        raise Stopped("checking the installation failed: interrupted by a signal") from None


def _run(args: argparse.Namespace) -> int:
    log.configure("console", "error")  # findings report persistent errors; retries are not shown
    options = Options(
        image=args.image,
        speed=args.speed,
        trial=args.trial,
        send_notification=args.send_notification,
    )
    if args.fix:
        _run_fixes(args.config, options, console())
    findings = check(args.config, _ask, options)
    if args.json:
        found = list(findings)
        print_json([printable(asdict(finding)) for finding in found])
        return Unready.exit_code if has_failure(found) else 0
    out = console()
    found = []
    family = ""
    for finding in findings:  # printed one by one: some checks take seconds
        if finding.level is not Level.FAILURE:
            if finding.family != family:
                family = finding.family
                out.print(Text(family, style="bold"))
            _show(out, finding, finding.name)
        found.append(finding)
    failures = [finding for finding in found if finding.level is Level.FAILURE]
    if failures:
        out.print(Text("FAILURES", style="bold red"))
        for finding in failures:
            _show(out, finding, f"{finding.family}: {finding.name}")
    out.print(Text(_summary(found)))
    for job in other_jobs(args.config):
        out.print(Text(f"other job: sudo swansong --config {job} doctor"), soft_wrap=True)
    if failures:
        raise Unready(
            f"{len(failures)} of {len(found)} checks failed",
            hint="Fix the first one, then run swansong doctor again",
        )
    return 0


def _run_fixes(config: Path, options: Options, out: Console) -> None:
    """Run harmless fixes, causes before consequences, until the checks find no further one."""
    if os.geteuid() != 0:
        raise Unready("running fixes requires root", hint="Run sudo swansong doctor --fix")
    quiet = replace(options, speed=False, send_notification=False)
    tried: set[str] = set()
    while finding := _next_to_fix(check(config, _ask, quiet), tried):
        if _is_evacuating(config):
            raise Unready(
                "running fixes failed: an evacuation is in progress, and a fix may restart the daemon",
                hint="Run swansong status --watch, and doctor after the verdict",
            )
        if not tried:
            out.print(Text("FIXES", style="bold"))
        tried.add(finding.fix)
        _show(out, finding, f"{finding.family}: {finding.name}")
        out.print(Text(f"           {_run_fix(finding.fix)}"), soft_wrap=True)


def _next_to_fix(findings: Iterable[Finding], tried: Collection[str]) -> Finding | None:
    return next(
        (each for each in findings if each.fix not in tried and isinstance(each.fix, Harmless)),
        None,
    )


def _run_fix(command: str) -> str:
    """Run a harmless fix; returns its result for the operator."""
    try:
        done = subprocess.run(  # noqa: S603 - made by this process, with quoted names
            ["/bin/sh", "-c", command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_FIX_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the fix timed out after {_FIX_LIMIT_S:g} s"
    if done.returncode == 0:
        return "the fix ran"
    return f"the fix failed with exit code {done.returncode}: {printable(done.stderr.strip())}"


def _is_evacuating(config: Path) -> bool:
    try:
        return _ask(load(config).trainer.socket).status.evacuation is not None
    except (ConfigError, Unreachable):
        return False


def _ask(socket: Path) -> DaemonAnswer:
    with DaemonClient(socket) as daemon:
        return DaemonAnswer(daemon.status(), daemon.peer_uid())


def _show(out: Console, finding: Finding, name: str) -> None:
    line = Text("  ").append(f"{finding.level:<8}", style=_STYLES[finding.level])
    out.print(line.append(f" {name}: {printable(finding.found)}"), soft_wrap=True)
    if finding.fix:
        out.print(Text(f"           fix: {printable(finding.fix)}"), soft_wrap=True)


def _summary(found: list[Finding]) -> str:
    counts = [(level, sum(finding.level is level for finding in found)) for level in Level]
    return ", ".join(f"{level} {count}" for level, count in counts)
