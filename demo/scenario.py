# SPDX-License-Identifier: Apache-2.0
"""The scenario: two VMs as real processes, one after the other; only the cloud is emulated."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from swansong.fields import ProtocolError
from swansong.protocol import MAX_MESSAGE_BYTES, Status, StatusQuery, decode, encode

from demo.screen import Screen
from testkit import EXAMPLES
from testkit.emulators.process import EmulatorProcess
from testkit.rig import Process, Vm, control

T = TypeVar("T")

EVERY_STEPS = 30
STEP_DELAY_S = 0.25
REDONE_S_MAX = 4.0
"""Training after the last follow-up checkpoint: its reserve, and the time that it takes."""
ASSUMED_GRACE_S = 25.0
"""The daemon assumes this grace where the notice states no deadline."""
PAD_MB = 32
"""Padding that makes a flush long enough to watch."""
HANDOVER_AFTER_S = 2.0
"""Time from the verdict to the start of vm-2, if it starts while vm-1 trains."""
HANDOVER_S_MAX = 5.0
"""Time without training at a handover: the claim, the load and the first step."""


class Broken(Exception):
    """The demo cannot continue; ``lines`` are the last lines of the process that failed."""

    def __init__(self, text: str, lines: list[str]) -> None:
        super().__init__(text)
        self.lines = lines[-20:]


@dataclass(frozen=True)
class Cloud:
    """``grace_s`` is the time from notice to power cut; vm-1 cannot reach ``steps`` before it."""

    emulator: str
    store: str
    grace_s: float
    steps: int
    honest: str
    notice: tuple[str, dict[str, str]]
    """The order to the emulator, and its arguments."""
    states_deadline: bool
    resumes_on: str = ""
    """The cloud of vm-2, if it is another one."""

    @property
    def redone_max(self) -> int:
        """Most steps that vm-2 may have to repeat, if the trainer makes follow-up checkpoints."""
        unknown_s = 0.0 if self.states_deadline else self.grace_s - ASSUMED_GRACE_S
        return round((unknown_s + REDONE_S_MAX) / STEP_DELAY_S)


CLOUDS = {
    "aws": Cloud(
        "testkit.emulators.aws_imds",
        "s3",
        15,
        160,
        "AWS sends it 120 s before the end, the demo 15 s",
        ("notice", {"action": "terminate"}),
        states_deadline=True,
    ),
    "gcp": Cloud(
        "testkit.emulators.gcp_metadata",
        "gcs",
        30,
        220,
        f"30 s, as on Google Cloud; swansongd assumes {ASSUMED_GRACE_S:g} s",
        ("set", {"key": "instance/preempted", "value": "TRUE"}),
        states_deadline=False,
    ),
    "azure": Cloud(
        "testkit.emulators.azure_imds",
        "s3",
        15,
        160,
        "Azure sends it 30 s before the end, the demo 15 s",
        ("event", {"type": "Preempt"}),
        states_deadline=True,
        resumes_on="aws",
    ),
}
STORES = ("s3", "gcs", "file")
MOMENTS = {
    "notice": "notice from {source}, {seconds_left:.1f} s left; plan {plan}: {why}",
    "request": "checkpoint requested from the trainer",
    "signal": "SIGUSR1 to the trainer",
    "accepted": "trainer accepted the request",
    "target": "checkpoint at the boundary of step {step}",
    "sealed": "step {step} sealed in staging",
    "flush": "flush of step {step} starts",
    "flushed": "all shards of step {step} are stored",
    "committed": "manifest of step {step} created: durable from here",
    "verdict": "{verdict}, {slack_s:.1f} s before swansongd's deadline",
    "follow_up": "follow-up checkpoint {number} requested, {seconds_left:.1f} s left",
    "follow_up_failed": "the follow-up checkpoint failed: {reason}",
}
"""Text for each phase of the evacuation, with fields of the daemon's log line."""
PARTS = {
    "cloud": "no VM",
    "boot": "boot",
    "start": "trainer start",
    "fetch": "claim and fetch",
    "load": "load",
    "warm_up": "first step",
}
"""Text for each part of the time without training, by its name in ``swansong loss --json``."""


def describe(line: dict[str, Any]) -> str:
    """The text for a log line of the evacuation."""
    phase = str(line.get("phase", line["event"]))
    return MOMENTS.get(phase, phase + " {reason}").format_map({"reason": "", **line})


class Watch:
    """Watches one VM: shows the log of its daemon and fails when a process dies."""

    def __init__(self, screen: Screen, name: str, vm: Vm, emulators: dict[int, str]) -> None:
        self.name = name
        self.vm = vm
        self.power_off_at: float | None = None
        """Wall-clock time of the power cut, once known."""
        self.timeline: list[tuple[float, dict[str, Any]]] = []
        """Log lines of the evacuation until the verdict, each with its wall-clock time."""
        self.follow_ups: list[tuple[float, dict[str, Any]]] = []
        """Log lines of the follow-up checkpoints: their requests and their commits."""
        self.commits: list[int] = []
        self.mirrored: list[int] = []
        """Steps of the commits that the mirror has."""
        self.fetched: list[tuple[float, int]] = []
        """Steps of the commits that were fetched before a trainer asked, with the times."""
        self.successor: Watch | None = None
        """The VM that waits for this one, which is watched as well."""
        self._screen = screen
        self._emulators = emulators
        self._told = 0
        self._sealed: dict[int, float] = {}
        self._pending_bytes = 0
        self.daemon = vm.start_daemon(ready=False)
        self.alive = {"swansongd": self.daemon}
        """Processes that must not fail; the daemon must not end at all."""
        self.until(lambda: self.daemon.lines.all(event="started"), "the daemon to start")

    @property
    def steps(self) -> list[int]:
        """The steps that the trainer reported."""
        lines = self.alive["the trainer"].lines.all() if "the trainer" in self.alive else []
        return [line["step"] for line in lines if "step" in line]

    def until(self, found: Callable[[], T], what: str, timeout_s: float = 120.0) -> T:
        """Show events until ``found`` returns a truthy value; returns that value.

        Raises:
            Broken: ``timeout_s`` passed, or a process died.
        """
        give_up = time.monotonic() + timeout_s
        while True:
            self.look()
            value = found()
            if value:
                return value
            if time.monotonic() > give_up:
                text = f"timed out after {timeout_s:.0f} s: {what}; above, swansongd's last lines"
                raise Broken(text, self.daemon.lines.raw)
            time.sleep(0.05)

    def until_ended(self, who: str) -> None:
        """Wait until this process has ended with exit code 0."""
        process = self.alive[who]
        self.until(lambda: process.popen.poll() == 0, f"the end of {who}")
        process.lines.drained()

    def look(self) -> None:
        """Show what is new.

        Raises:
            Broken: a process died.
        """
        for who, process in self.alive.items():
            code = process.popen.poll()
            if code is not None and (code != 0 or process is self.daemon):
                process.lines.drained()
                text = f"{who} ended with exit code {code}; above, its last lines"
                raise Broken(text, process.lines.raw)
        for pid, module in self._emulators.items():
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                raise Broken(f"{module} ended", [])  # its output is on the terminal
        lines = self.daemon.lines.all()
        for line in lines[self._told :]:
            self._tell(line, datetime.fromisoformat(line["timestamp"]).timestamp())
        self._told = len(lines)
        if self.timeline and self.timeline[-1][1].get("phase") == "flush":
            self._tell_flush()
        elif self.steps:
            left = self.power_off_at and max(0.0, self.power_off_at - time.time())
            countdown = "" if left is None else f"; power off in {left:.0f} s"
            self._screen.live(self.name, f"training, step {self.steps[-1]}{countdown}")
        if self.successor is not None:
            self.successor.look()

    def _tell(self, line: dict[str, Any], at: float) -> None:
        is_over = bool(self.timeline) and self.timeline[-1][1]["event"] == "verdict"
        match line["event"]:
            case "sealed_set_found":
                self._sealed[line["step"]] = at
            case "committed":
                self.commits.append(line["step"])
                lag = f"{at - self._sealed[line['step']]:.1f} s after it was sealed"
                text = f"step {line['step']} committed: {megabytes(line)}, {lag}"
                if is_over or not self.timeline:  # the timeline shows it otherwise
                    self._screen.say(self.name, text, at=at, style="green")
            case "mirrored":
                self.mirrored.append(line["step"])
                self._screen.say(self.name, f"step {line['step']} is in the mirror", at=at)
            case "prefetched":
                self.fetched.append((at, line["step"]))
                self._screen.say(self.name, f"step {line['step']} fetched", at=at)
            case "evacuation" if is_over:
                phase = line["phase"]
                if phase in ("follow_up", "follow_up_failed"):
                    self._screen.say(self.name, describe(line), at=at)
                if phase in ("follow_up", "follow_up_failed", "committed"):
                    self.follow_ups.append((at, line))
            case "evacuation" | "verdict" if not is_over:
                self.timeline.append((at, line))
                style = "bold green" if line.get("verdict") == "SAFE" else "yellow"
                self._screen.say(self.name, describe(line), at=at, style=style)
            case "verdict":
                if line["verdict"] != self.timeline[-1][1]["verdict"]:
                    text = f"the verdict now: {line['verdict']}; {line['reason']}"
                    self._screen.say(self.name, text, at=at, style="yellow")
            case event if line["level"] != "info" and event != "notice":
                said = line.get("reason") or line.get("error") or json.dumps(line)
                self._screen.say(self.name, f"swansongd: {event}: {said}", at=at, style="red")

    def _tell_flush(self) -> None:
        """Show the bytes still to store, from the same query as ``swansong status``."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
            channel.settimeout(5.0)
            try:
                channel.connect(str(self.vm.socket))
                channel.send(encode(StatusQuery()))
                answer = decode(channel.recv(MAX_MESSAGE_BYTES))
            except (OSError, ProtocolError):
                return  # the daemon died: the next look reports it
        assert isinstance(answer, Status)
        pending_bytes = int(answer.report["pending_bytes"])
        evacuation = answer.report["evacuation"]
        if evacuation and pending_bytes > 50_000 and pending_bytes != self._pending_bytes:
            self._pending_bytes = pending_bytes
            left = f"{evacuation['seconds_left']:.1f} s left"
            self._screen.say(self.name, f"  {pending_bytes / 1e6:.1f} MB still to store, {left}")


class Stage:
    """Store, emulators, VMs and reference run; ``stack`` ends them and deletes their directory."""

    def __init__(
        self,
        stack: ExitStack,
        screen: Screen,
        cloud_name: str,
        store: str,
        *,
        by_signal: bool = False,
        handover: bool = False,
    ) -> None:
        self._stack = stack
        self._screen = screen
        self._cloud_name = cloud_name
        self._cloud = CLOUDS[cloud_name]
        self._by_signal = by_signal
        self._handover = handover
        self._emulators: dict[int, str] = {}
        self._processes: dict[str, EmulatorProcess] = {}
        """The emulators by URL."""
        directory = tempfile.TemporaryDirectory(prefix="swansong-demo-")
        self._disk = Path(stack.enter_context(directory))
        screen.chapter("Set up: real processes on this machine, only the cloud is emulated")
        self._store = self._start_store(self._cloud.store if store == "auto" else store)
        screen.say(
            "store",
            " at ".join(self._store[key] for key in ("url", "endpoint") if key in self._store),
        )
        # No daemon listens on this socket, so the hooks do nothing.
        nowhere = str(self._disk / "no.sock")
        command = ["nice", *self._trainer()]
        self.reference = Process(command, lines_on="stdout", SWANSONG_SOCKET=nowhere)
        stack.callback(self.reference.kill)
        screen.say("reference", f"the same run without interruption, {self._cloud.steps} steps")

    def first_vm(self) -> Watch:
        """Start vm-1 and train from step 0."""
        watch = self._start_vm("vm-1")
        self._train(watch, "--step-delay-s", str(STEP_DELAY_S))
        return watch

    def notify(self, watch: Watch) -> tuple[float, float]:
        """Send the notice, and wait for the verdict; returns the times of the notice and of the power cut."""
        url = self.metadata_url
        noticed_at = time.time()
        order, body = self._cloud.notice
        due = {"in_s": self._cloud.grace_s} if self._cloud.states_deadline else {}
        stated = control(url, order, **body, **due).get("time")
        power_off_at = noticed_at + self._cloud.grace_s
        if stated is not None:  # in whole seconds
            power_off_at = datetime.fromisoformat(stated).timestamp()
        watch.power_off_at = power_off_at
        self._screen.say("cloud", f"notice set: {self._cloud.honest}", at=noticed_at, style="bold")
        watch.until(lambda: watch.daemon.lines.all(event="verdict"), "a verdict")
        self._screen.say(watch.name, "training continues until the power is off")
        return noticed_at, power_off_at

    def cut_power(self, watch: Watch, power_off_at: float) -> None:
        """Power the VM off at this time."""
        watch.until(lambda: time.time() >= power_off_at, "the power cut")
        watch.vm.power_off()
        watch.alive["the trainer"].lines.drained()
        text = f"power off at step {watch.steps[-1]}: every process killed, the disk deleted"
        self._screen.say("cloud", text, style="bold red")

    def second_vm(self) -> Watch:
        """Start vm-2, without its trainer."""
        return self._start_vm("vm-2", cloud_name=self._cloud.resumes_on)

    def hand_over(self, watch: Watch) -> Watch:
        """Start vm-2 and its trainer while this VM trains; returns once they wait for its end."""
        starts_at = time.time() + HANDOVER_AFTER_S
        watch.until(lambda: time.time() >= starts_at, "the start of vm-2")
        self._screen.chapter("A second VM starts while the first one trains, and waits")
        watch.successor = successor = self.second_vm()
        self._train(successor)

        def waits() -> dict[str, Any]:
            status = successor.vm.status()
            is_waiting = status["trainers"] and status["state"] == "AWAITING_HANDOVER"
            return status if is_waiting else {}

        status = watch.until(waits, "AWAITING_HANDOVER")
        text = f"status {status['state']}: {status['prefetch']['reason']}"
        self._screen.say(successor.name, text, style="yellow")
        return successor

    def resume(self, watch: Watch) -> int:
        """Train from the newest commit to the end; returns the step of that commit."""
        if self._by_signal:
            to = str(watch.vm.disk / "restored")
            answer = watch.vm.swansong("restore", "--to", to, "--json")
            if answer.returncode != 0:
                raise Broken("swansong restore failed", answer.stderr.splitlines())
            found = json.loads(answer.stdout)
            self._train(watch, "--resume", to)
            how = f"swansong restore: {megabytes(found)} in {found['seconds']:.1f} s"
        else:
            if "the trainer" not in watch.alive:
                self._train(watch)
            found = watch.until(lambda: watch.daemon.lines.all(event="resume"), "a restore")[0]
            how = "guard.restore()"
        watch.look()
        text = f"restored step {found['step']} of generation {found['generation']} ({how})"
        self._screen.say(watch.name, text, style="bold green")
        watch.until_ended("the trainer")
        watch.until_ended("the uninterrupted run")
        text = f"trained from step {watch.steps[0]} to the end, step {watch.steps[-1]}"
        self._screen.say(watch.name, text)
        return int(found["step"])

    def loss(self, watch: Watch) -> dict[str, Any] | None:
        """The cost of the preemption, from ``swansong loss``; None for a trainer that reports no steps."""
        if self._by_signal:
            return None

        def found() -> list[dict[str, Any]]:
            answer = watch.vm.swansong("loss", "--json")
            if answer.returncode != 0:
                raise Broken("swansong loss failed", answer.stderr.splitlines())
            interruptions = json.loads(answer.stdout)["interruptions"]
            return [each for each in interruptions if "unknown" not in each["down"]]

        return watch.until(found, "the record of the resume in the store")[0]

    def _start_store(self, kind: str) -> dict[str, str]:
        """Start the store; returns table ``[store]`` of the configuration."""
        if kind == "file":
            store = self._disk / "store"
            store.mkdir(mode=0o700)
            return {"url": f"file://{store}"}
        endpoint = self._emulator(f"testkit.emulators.{kind}_server", "--bucket", "ckpt")
        if kind == "gcs":
            return {"url": "gs://ckpt/demo", "endpoint": endpoint}
        return {"url": "s3://ckpt/demo", "endpoint": endpoint, "region": "us-east-1"}

    def _emulator(self, module: str, *arguments: str) -> str:
        """Start an emulator; returns its URL."""
        # Ctrl-C reaches the whole process group. The demo ends the emulators itself, so they ignore it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            emulator = self._stack.enter_context(EmulatorProcess(module, *arguments))
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        self._emulators[emulator.pid] = module
        self._processes[emulator.url] = emulator
        return emulator.url

    def _start_vm(
        self,
        name: str,
        *,
        cloud_name: str = "",
        store: dict[str, str] | None = None,
        mirror: dict[str, str] | None = None,
    ) -> Watch:
        """Start a VM; by default in the cloud of the scenario, with its store and without a mirror."""
        cloud_name = cloud_name or self._cloud_name
        disk = self._disk / name
        disk.mkdir()
        self.metadata_url = self._emulator(CLOUDS[cloud_name].emulator)
        settings: dict[str, dict[str, Any]] = {
            "flush": {"chunk_bytes": "4MiB"},
            "deadline": {"assumed_grace_s": ASSUMED_GRACE_S},
            "mirror": {**(mirror or {})},
            "run": {"handover": self._handover},
        }
        if self._by_signal:
            settings["trainer"] = {"signal": "SIGUSR1", "pid_file": str(disk / "trainer.pid")}
        metadata = (cloud_name, self.metadata_url)
        store = store or self._store
        vm = self._stack.enter_context(Vm(disk, store, metadata=metadata, settings=settings))
        watch = Watch(self._screen, name, vm, self._emulators)
        watch.alive["the uninterrupted run"] = self.reference
        sources = ", ".join(watch.daemon.lines.all(event="started")[0]["sources"])
        self._screen.say(name, f"swansongd watches {sources} at {self.metadata_url}")
        return watch

    def _trainer(self, *more: str) -> list[str]:
        """The trainer's command; stderr joins stdout, so that its last lines contain the error."""
        script = str(EXAMPLES / ("usr1_trainer.py" if self._by_signal else "char_lm.py"))
        fixed = ("--steps", str(self._cloud.steps), "--pad-mb", str(PAD_MB))
        return ["sh", "-c", 'exec "$@" 2>&1', "sh", sys.executable, "-u", script, *fixed, *more]

    def _train(self, watch: Watch, *more: str) -> None:
        vm = watch.vm
        if self._by_signal:
            more += ("--checkpoints", str(vm.run_directory), "--pid-file", str(vm.pid_file))
        command = self._trainer("--every-steps", str(EVERY_STEPS), *more)
        watch.alive["the trainer"] = vm.spawn(
            command, lines_on="stdout", SWANSONG_SOCKET=str(vm.socket)
        )


def play(
    screen: Screen, cloud: str, store: str, *, by_signal: bool = False, handover: bool = False
) -> bool:
    """Run the demo; returns whether all promises were kept.

    Args:
        handover: vm-2 starts while vm-1 still trains.

    Raises:
        Broken: the demo could not run to its end.
    """
    with ExitStack() as stack:
        stage = Stage(stack, screen, cloud, store, by_signal=by_signal, handover=handover)
        screen.chapter("The first VM trains; checkpoints are replicated in the background")
        first = stage.first_vm()
        first.until(lambda: len(first.commits) >= 2, "two commits")
        screen.chapter("The cloud terminates the VM")
        noticed_at, power_off_at = stage.notify(first)
        waiting = stage.hand_over(first) if handover else None
        stage.cut_power(first, power_off_at)
        screen.chapter(f"{'The' if waiting else 'A'} second VM resumes")
        second = waiting or stage.second_vm()
        restored = stage.resume(second)
        loss = stage.loss(second)

    screen.quiet()
    screen.chapter("The evacuation, in seconds since the notice")
    moments = [(at, describe(line)) for at, line in first.timeline]
    moments += [(at, describe(line)) for at, line in first.follow_ups]
    if waiting:
        ready = ((at, f"step {step} fetched by vm-2") for at, step in waiting.fetched)
        moments = sorted(each for each in (*moments, *ready) if each[0] < power_off_at)
    moments = [(noticed_at, "notice set"), *moments, (power_off_at, "power off")]
    screen.table((f"{at - noticed_at:.2f}", what) for at, what in moments)
    when = {line.get("phase", line["event"]): at for at, line in first.timeline}
    verdict = first.timeline[-1][1]
    screen.chapter("Figures")
    screen.table(_figures(first, when, power_off_at))
    screen.chapter("Promises")
    ours, theirs = weights(second.alive["the trainer"]), weights(stage.reference)
    is_safe = verdict["verdict"] == "SAFE" and when["verdict"] < power_off_at
    redone, redone_max = first.steps[-1] - restored, CLOUDS[cloud].redone_max
    kept = (
        screen.check(f"{verdict['verdict']} at step {verdict['step']}, in time", kept=is_safe),
        screen.check(
            f"vm-2 started with step {second.steps[0]}: nothing that was SAFE is lost",
            kept=second.steps[0] == restored + 1 and restored >= (verdict["step"] or 0),
        ),
        by_signal  # without hooks there are no follow-up checkpoints
        or screen.check(
            f"vm-2 repeats {redone} steps, at most {redone_max}", kept=0 <= redone <= redone_max
        ),
        not (waiting and loss)
        or screen.check(
            f"vm-2 trains {loss['down_s']:.1f} s after the last step of vm-1,"
            f" at most {HANDOVER_S_MAX:g} s",
            kept=loss["down_s"] <= HANDOVER_S_MAX,
        ),
        screen.check("the weights are those of the uninterrupted run", kept=ours == theirs),
    )
    screen.table([("vm-2", f"sha256 {ours}"), ("reference", f"sha256 {theirs}")])
    screen.chapter("The cost of the preemption" + (", from swansong loss" if loss else ""))
    screen.table(_costs(first, restored, loss))
    return all(kept)


def _figures(
    watch: Watch, when: dict[str, float], power_off_at: float
) -> Iterator[tuple[str, str]]:
    size = next((megabytes(line) for _, line in watch.timeline if "size_bytes" in line), "nothing")
    if {"accepted", "sealed"} <= when.keys():
        save_s = when["sealed"] - when["accepted"]
        yield "save", f"{size}, sealed {save_s:.2f} s after the trainer accepted the request"
    if {"flush", "flushed"} <= when.keys():
        flush_s = when["flushed"] - when["flush"]
        speed = float(size.split()[0]) / flush_s
        yield "flush", f"{size} in {flush_s:.2f} s, {speed:.0f} MB/s"
    yield "slack", f"{power_off_at - when['verdict']:.1f} s from the verdict to the power cut"
    count = sum(line["phase"] == "follow_up" for _, line in watch.follow_ups)
    yield "follow-up", f"{count} requested between the verdict and the power cut"


def _costs(watch: Watch, restored: int, loss: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    """The preemption loss; without a report of ``swansong loss`` only the steps."""
    reached = watch.steps[-1]
    redone = f"{reached - restored} steps: {reached} done at the power cut, {restored} restored"
    if loss is None:
        yield "redone", redone
        yield "", "swansong loss has no figures: a trainer without hooks reports no steps"
        return
    seconds = ((PARTS.get(name, name), part_s) for name, part_s in loss["down"].items())
    parts = ", ".join(f"{text} {part_s:.1f} s" for text, part_s in seconds if part_s is not None)
    yield "stall", f"{loss['stall_s'] or 0:5.2f} s  for the checkpoints since the notice"
    yield "redone", f"{loss['redone_s']:5.2f} s  {redone}"
    yield "down", f"{loss['down_s']:5.2f} s  {parts}"
    yield "lost", f"{loss['lost_s']:5.2f} s  for each GPU"


def weights(process: Process) -> str:
    """SHA-256 of the weights at the end of a training."""
    lines = process.lines.all()
    return next((str(line["weights_sha256"]) for line in lines if "weights_sha256" in line), "none")


def megabytes(line: dict[str, Any]) -> str:
    return f"{line['size_bytes'] / 1e6:.1f} MB"
