# SPDX-License-Identifier: Apache-2.0
"""A VM as a container: systemd as PID 1, a network, a disk; a power cut is a SIGKILL to all its processes."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from testkit.nspawn.build import HERE, Layer, remove_groups
from testkit.waiting import until

DAEMON = "swansongd.service"
TRAINER = "trainer.service"


@dataclass(frozen=True)
class Entry:
    """One entry of the journal.  ``facts`` are the fields of a line of JSON."""

    mono_s: float
    unit: str
    """The unit that wrote the entry, or that systemd reports on."""
    text: str
    pid: int
    facts: dict[str, Any] = field(default_factory=dict)


class Journal:
    """The entries of one boot, read as they are written; the journal outlives the container."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._entries: list[Entry] = []
        self._reader: subprocess.Popen[bytes] | None = None

    def follow(self) -> None:
        """Start to read, once the journal exists."""
        if self._reader is None:
            command = ["journalctl", "-q", "-D", str(self._directory), "-o", "json"]

            def has_begun() -> bytes:
                look = subprocess.run([*command, "-n", "1"], check=False, capture_output=True)
                return look.stdout

            until(has_begun, what="the first entry of the journal")
            self._reader = subprocess.Popen(
                [*command, "--no-tail", "--follow"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                stdin=subprocess.DEVNULL,
            )
            threading.Thread(target=self._read, args=(self._reader.stdout,), daemon=True).start()

    def _read(self, stream: Any) -> None:
        for line in stream:
            record = json.loads(line)
            text = record.get("MESSAGE") or ""
            if isinstance(text, list):  # it contains unprintable bytes
                text = bytes(text).decode(errors="replace")
            facts = {}
            with suppress(ValueError):
                facts = json.loads(text) if text.startswith("{") else {}
            entry = Entry(
                mono_s=int(record["__MONOTONIC_TIMESTAMP"]) / 1e6,
                unit=record.get("UNIT") or record.get("_SYSTEMD_UNIT") or "",
                text=text,
                pid=int(record.get("_PID", 0)),
                facts=facts,
            )
            with self._lock:
                self._entries.append(entry)

    def all(
        self, text: str = "", *, unit: str = "", since: float = 0.0, **facts: Any
    ) -> list[Entry]:
        """Every entry so far with this text, of this unit, with these facts."""
        with self._lock:
            return [
                entry
                for entry in self._entries
                if text in entry.text
                and unit in ("", entry.unit)
                and entry.mono_s >= since
                and facts.items() <= entry.facts.items()
            ]

    def wait(self, text: str = "", *, timeout_s: float = 30.0, **wanted: Any) -> Entry:
        """Wait for the first such entry."""
        try:
            return until(
                lambda: self.all(text, **wanted), timeout_s=timeout_s, what=f"{text!r} {wanted}"
            )[0]
        except AssertionError as error:
            raise AssertionError(f"{error}; the journal contains\n{self.story()}") from None

    def story(self) -> str:
        """The relevant entries as text: those of our units, and the last five."""
        with self._lock:
            entries = [e for e in self._entries if "loss" not in e.facts]
        ours = [e for e in entries if "swansong" in e.unit + e.text or TRAINER in e.unit + e.text]
        return "\n".join(f"{e.mono_s:.3f} {e.unit} {e.text[:240]}" for e in (*ours, *entries[-5:]))

    def close(self) -> None:
        if self._reader is not None:
            self._reader.kill()
            self._reader.wait()
            self._reader.stdout.close()


class Container:
    """A VM that is off.  ``disk`` keeps written files from one boot to the next.

    Args:
        name: at most 12 characters, unique on this machine.
        layers: its root file system.
        disk: a directory for its disk.
        options: further options of systemd-nspawn.
    """

    def __init__(self, name: str, layers: Layer, disk: Path, options: tuple[str, ...] = ()) -> None:
        self.name = name
        self._layers = layers
        self._disk = disk
        self._options = options
        self._upper = disk / "upper"
        self._upper.mkdir(parents=True)
        self._wrapper: subprocess.Popen[bytes] | None = None
        self._leader = 0
        self._journals: list[Journal] = []

    @property
    def journal(self) -> Journal:
        """The journal of the newest boot."""
        return self._journals[-1]

    # ------------------------------------------------------------------ the disk, while it is off

    def write(self, path: str, text: str, *, mode: int = 0o644) -> None:
        target = self._upper / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(mode)

    def remove(self, path: str) -> None:
        """Remove the file from every layer."""
        target = self._upper / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        os.mknod(target, 0o600 | 0o020000, os.makedev(0, 0))  # a whiteout of overlayfs

    def drop_in(self, unit: str, text: str) -> None:
        self.write(f"/etc/systemd/system/{unit}.d/zz-test.conf", text)

    def read(self, path: str) -> str:
        return (self._upper / path.lstrip("/")).read_text()

    def names(self, path: str) -> list[str]:
        """The entries that were created in this directory since the first boot."""
        return os.listdir(self._upper / path.lstrip("/"))

    def image_file(self, path: str) -> str:
        """The content of this file in the image, without later changes."""
        return self._layers.find(path.lstrip("/")).read_text()

    # ------------------------------------------------------------------ power

    def power_on(self) -> None:
        """Start the boot; returns when commands can run in the container."""
        journal = self._disk / f"journal-{len(self._journals)}"
        journal.mkdir()
        self._journals.append(Journal(journal))
        command = ["setpriv", "--pdeathsig", "KILL"]
        command += ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command += [str(HERE / "container_up.sh"), self.name, str(self._layers), str(self._disk)]
        command += [
            "--boot",
            "--console=read-only",
            f"--bind={journal}:/var/log/journal",
        ]
        with (self._disk / "console").open("ab") as console:
            self._wrapper = subprocess.Popen(
                [*command, *self._options], stdin=subprocess.DEVNULL, stdout=console, stderr=console
            )
        self._leader = until(self._find_leader, timeout_s=20, what=f"PID 1 of {self.name}")
        self.journal.follow()

    def _find_leader(self) -> int:
        """PID 1 of the container in the PID namespace of the test: the first systemd below the wrapper."""
        assert self._wrapper is not None
        assert self._wrapper.poll() is None, self.console()
        found = [self._wrapper.pid]
        for pid in found:
            with suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text() == "systemd\n":
                    return pid
                for task in Path(f"/proc/{pid}/task").iterdir():
                    found += map(int, (task / "children").read_text().split())
        return 0

    def power_cut(self) -> None:
        """Kill all its processes."""
        if self._wrapper is not None:
            self._wrapper.kill()
            self._wrapper.wait(60)
            self._forget()

    def wait_off(self, timeout_s: float = 60.0) -> int:
        """Wait until it has shut down; returns the exit code."""
        assert self._wrapper is not None
        try:
            code = self._wrapper.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still on after {timeout_s} s:\n{self.journal.story()}") from None
        self._forget()
        return code

    def _forget(self) -> None:
        self._wrapper, self._leader = None, 0
        remove_groups(self.name)

    def console(self) -> str:
        return (self._disk / "console").read_text(errors="replace")[-4000:]

    # ------------------------------------------------------------------ inside

    def popen(self, *command: str) -> subprocess.Popen[str]:
        assert self._leader, "it is off"
        return subprocess.Popen(
            ["nsenter", "--target", str(self._leader), "--all", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"PATH": "/usr/local/bin:/usr/sbin:/usr/bin", "TERM": "dumb"},
        )

    def run(self, *command: str, may_fail: bool = False, timeout_s: float = 30.0) -> str:
        """Run a command in it as root; returns its output."""
        process = self.popen(*command)
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        assert may_fail or process.returncode == 0, f"{command}: {stdout}{stderr}"
        return stdout.strip()

    def slow_wire(self, bytes_per_s: int) -> None:
        """Limit what it sends to this rate from now on."""
        shape = f"rate {bytes_per_s * 8}bit burst 64kb latency 400ms"
        self.run("tc", "qdisc", "add", "dev", "host0", "root", "tbf", *shape.split())

    def show(self, unit: str, name: str) -> str:
        """One property of a unit."""
        return self.run("systemctl", "show", "--value", f"--property={name}", unit)

    def main_pid(self, unit: str = DAEMON) -> int:
        return int(self.show(unit, "MainPID"))

    def wait_active(self, unit: str = DAEMON, timeout_s: float = 30.0) -> None:
        try:
            until(
                lambda: self.show(unit, "ActiveState") == "active", timeout_s=timeout_s, what=unit
            )
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.journal.story()}") from None

    def wait_booted(self, timeout_s: float = 60.0) -> str:
        """Wait until systemd has finished the boot; returns its state, such as "running" or "degraded"."""

        def state() -> str:
            answer = self.run("systemctl", "is-system-running", may_fail=True)
            return "" if answer in ("offline", "initializing", "starting") else answer

        return until(state, timeout_s=timeout_s, what="the boot")

    def status(self) -> dict[str, Any]:
        """The output of ``swansong status --json``."""
        report: dict[str, Any] = json.loads(self.run("swansong", "status", "--json"))
        return report

    def wait_connected(self, timeout_s: float = 40.0) -> None:
        """Wait until the trainer has connected: an earlier notice would find no trainer."""
        until(lambda: self.status()["trainers"], timeout_s=timeout_s, what="the trainer")

    def wait_step(self, step: int, timeout_s: float = 40.0) -> Entry:
        """Wait until the trainer has done this step."""

        def found() -> Entry | None:
            progress = self.journal.all(unit=TRAINER)
            return next((one for one in progress if one.facts.get("step", -1) >= step), None)

        entry = until(found, timeout_s=timeout_s, what=f"step {step} of the trainer")
        assert entry is not None
        return entry

    # ------------------------------------------------------------------ the end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.power_cut()
        for journal in self._journals:
            journal.close()
