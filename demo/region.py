# SPDX-License-Identifier: Apache-2.0
"""The loss of a region: train on AWS with S3, lose both without notice, resume on GCP from the mirror."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from typing import Any

from demo.scenario import STEP_DELAY_S, Broken, Stage, Watch, megabytes, weights
from demo.screen import Screen
from testkit.rig import Vm

COMMITS = 2
STEPS_AFTER = 10
"""Steps that vm-1 trains after its last commit reached the mirror, so that some are lost."""


class Regions(Stage):
    """Two regions: AWS with the store, and GCP with the mirror."""

    def __init__(self, stack: ExitStack, screen: Screen) -> None:
        super().__init__(stack, screen, "aws", "s3")
        self._mirror = self._start_store("gcs")
        screen.say("mirror", f"{self._mirror['url']} at {self._mirror['endpoint']}")

    def first_vm(self) -> Watch:
        """Start vm-1 on AWS, with the mirror, and train from step 0."""
        watch = self._start_vm("vm-1", mirror=self._mirror)
        self._train(watch, "--step-delay-s", str(STEP_DELAY_S))
        return watch

    def lose(self, watch: Watch) -> dict[str, Any]:
        """Cut the power of vm-1 and of its store; returns the last status of the mirror."""
        watch.until(lambda: len(watch.mirrored) >= COMMITS, "commits in the mirror")
        enough = watch.mirrored[-1] + STEPS_AFTER
        watch.until(lambda: watch.steps[-1] >= enough, "further steps")
        shown: dict[str, Any] = watch.vm.status()["mirror"]
        for url in (self._store["endpoint"], self.metadata_url):
            emulator = self._processes[url]
            del self._emulators[emulator.pid]
            emulator.kill()
        watch.vm.power_off()
        watch.alive["the trainer"].lines.drained()
        text = (
            f"the region is lost at step {watch.steps[-1]}, without notice: vm-1, its disk and S3"
        )
        self._screen.say("cloud", text, style="bold red")
        return shown

    def promote(self) -> tuple[dict[str, Any], float]:
        """Run ``swansong mirror --promote``; returns its output, and the seconds that it took."""
        disk = self._disk / "operator"
        disk.mkdir()
        began = time.monotonic()
        with Vm(disk, self._store, settings={"mirror": self._mirror}) as machine:
            answer = machine.swansong("mirror", "--promote", "--json")
        if answer.returncode != 0:
            raise Broken("swansong mirror --promote failed", answer.stderr.splitlines())
        promotion: dict[str, Any] = json.loads(answer.stdout)
        took_s = time.monotonic() - began
        text = f"the mirror is promoted by generation {promotion['promoted_generation']}"
        self._screen.say("operator", text, style="bold")
        return promotion, took_s

    def second_vm(self) -> Watch:
        """Start vm-2 on GCP, with the mirror as its store, without its trainer."""
        return self._start_vm("vm-2", cloud_name="gcp", store=self._mirror)


def lose_region(screen: Screen) -> bool:
    """Run the demo; returns whether all promises were kept.

    Raises:
        Broken: the demo could not run to its end.
    """
    with ExitStack() as stack:
        stage = Regions(stack, screen)
        screen.chapter("A VM on AWS trains; each commit is copied to the mirror on GCS")
        first = stage.first_vm()
        lag = stage.lose(first)
        screen.chapter("An operator promotes the mirror")
        promotion, promoted_s = stage.promote()
        screen.chapter("A VM on GCP resumes")
        second = stage.second_vm()
        restored = stage.resume(second)
        resumed = second.daemon.lines.all(event="committed")
    screen.quiet()
    screen.chapter("Promises")
    mirrored = max(first.mirrored)
    ours, theirs = weights(second.alive["the trainer"]), weights(stage.reference)
    kept = (
        screen.check(
            f"vm-2 started with step {second.steps[0]}, after the newest commit in the mirror",
            kept=second.steps[0] == restored + 1 and restored >= mirrored,
        ),
        screen.check(
            f"vm-2 commits above generation {promotion['promoted_generation']}",
            kept=bool(resumed)
            and all(line["generation"] > promotion["promoted_generation"] for line in resumed),
        ),
        screen.check("the weights are those of the uninterrupted run", kept=ours == theirs),
    )
    behind = lag["lag"]
    reached = first.steps[-1]
    screen.table(
        [
            ("copies", f"{lag['copied_commits']} commits, {lag['copied_bytes'] / 1e6:.1f} MB"),
            ("lag", f"{behind['commits']} commits and {behind['seconds']:.1f} s at the loss"),
            ("promoted", f"in {promoted_s:.1f} s, most of it for attempts to reach S3"),
            ("redone", f"{reached - restored} steps: {reached} done, {restored} restored"),
            ("size", megabytes(resumed[0]) if resumed else "unknown"),
            ("vm-2", f"sha256 {ours}"),
            ("reference", f"sha256 {theirs}"),
        ]
    )
    return all(kept)
