# SPDX-License-Identifier: Apache-2.0
"""Checks that a trainer resumes bit by bit: compares an uninterrupted run with one that is killed and
resumed.

::

    from swansong.testing import check_resume

    def test_resume(tmp_path):
        check_resume([sys.executable, "train.py"], steps=40, kill_at=[7, 12, 31], directory=tmp_path)

No daemon, root or cloud is needed: a stand-in answers the hooks.  At each step of ``kill_at`` it requests a
checkpoint, kills the trainer with SIGKILL when the checkpoint is sealed, and starts the same command
again.  Both runs take a last checkpoint at step ``steps``, or at their ends.  All bytes of the two must be
equal: weights, optimizer, random generators, position in the data, and all else that the trainer saves.  If
they differ, both runs are repeated up to the first difference, and the error names the step, the objects and
the likely cause.

``python -m swansong.testing --kill-at 7 -- python train.py`` is the same check as a command, and
``SWANSONG_CHECK=1 python train.py`` runs it when a fresh run of the script begins.

The trainer must seed all generators that it uses (``swansong.torch.seed_all``).  If nothing else differs, a
generator that differs between two uninterrupted starts is not compared.  Run the trainer with
deterministic kernels, or on the CPU with a fixed number of threads (the default here is one).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from swansong._differences import Difference, find_differences, likely_cause
from swansong._stand_in import CheckedRun, CheckedTrainer, TrainerFailedError, step_of

_NOT_DETERMINISTIC = (
    "the trainer is not deterministic: two uninterrupted starts differ, too; seed all generators with"
    " seed_all(), sort sets of strings or set PYTHONHASHSEED=0, use one thread, and keep clocks out of the"
    " state, or name them with ignoring="
)
_COMMAND_LIMIT_S = 1800.0
"""Longest time of one start by the command: the script may load a large data set first."""


class ResumeMismatchError(AssertionError):
    """The resumed run differs from the uninterrupted one; the text names the place."""


@dataclass
class ResumeReport:
    """The result of :func:`check_resume` for two equal runs."""

    saved_steps: list[int] = field(default_factory=list)
    """Steps at which the run was saved and killed."""
    last_step: int = 0
    """Step of the last checkpoints, which were compared."""
    files: int = 0
    """Number of compared files of the last checkpoint."""
    losses: int = 0
    """Number of compared losses: of steps up to ``last_step`` that both runs printed."""
    unseeded: list[str] = field(default_factory=list)
    """Generators that were not compared, because they differ between two uninterrupted starts."""


def check_resume(
    command: Sequence[str] | Callable[[], object],
    *,
    steps: int | None = None,
    kill_at: Sequence[int | str],
    directory: str | os.PathLike[str] | None = None,
    ranks: int = 1,
    has_launcher: bool = False,
    environment: Mapping[str, str] | None = None,
    loss_of: Callable[[str], tuple[int, float] | None] | None = None,
    ignoring: str = "(?!)",
    limit_s: float = 120.0,
    is_verbose: bool = False,
) -> ResumeReport:
    """Compare a run that is killed and resumed with one that is not.

    Args:
        command: starts the trainer; or a function at the top level of a module, which runs in a new Python.
        steps: step of the last checkpoint, at which the runs are compared.  The trainer must reach it.  None:
            both runs train to their ends, ``guard.finish()``, and must end at the same step.
        kill_at: moments at which a start of the trainer is saved and killed.  Each is a step, whose
            ``guard.step()`` saves, or a regular expression that matches a line of output.
        directory: for staging and the trainer's stderr; default: a temporary directory, removed at the end.
        ranks: number of ranks.
        has_launcher: whether ``command`` starts all ranks, as torchrun does.  Otherwise it is started once
            for each rank, with the environment variables of torchrun.
        environment: variables in addition to those of this process.
        loss_of: parses step and loss from a line of output, or returns None; default: lines that are JSON
            objects with ``step`` and ``loss``.  The trainer must print the line before ``guard.step()``,
            because it is killed when the checkpoint of that step is sealed.
        ignoring: a regular expression; files of a checkpoint whose path matches may differ, and places in its
            index, such as ``rank-00000/state.json:values.started``.
        limit_s: longest time of one start of the trainer, in seconds.
        is_verbose: print each start of the trainer on stderr.

    Raises:
        ResumeMismatchError: the runs differ.
        TrainerFailedError: the trainer did not save at a moment of ``kill_at``, or at ``steps``; or its
            processes do not agree with ``ranks``.
    """
    if callable(command):
        code = f"from {command.__module__} import {command.__qualname__} as f; f()"
        command = [sys.executable, "-c", code]
    trainer = CheckedTrainer(
        list(command),
        ranks,
        has_launcher,
        dict(environment or {}),
        loss_of or _json_loss,
        limit_s,
        is_verbose,
    )
    with tempfile.TemporaryDirectory(prefix="swansong-check-") as temporary:
        return _compare(trainer, steps, kill_at, Path(directory or temporary), ignoring)


def _summary(report: ResumeReport) -> str:
    kills = " and ".join(f"step {step}" for step in report.saved_steps)
    summary = (
        f"killed and resumed at {kills}, the run is equal to the bit at step {report.last_step}"
    )
    return summary + (f", except for {', '.join(report.unseeded)}" if report.unseeded else "")


def _compare(
    trainer: CheckedTrainer,
    steps: int | None,
    kill_at: Sequence[int | str],
    directory: Path,
    ignoring: str,
) -> ResumeReport:
    report = ResumeReport()
    reference, resumed = CheckedRun(directory / "reference"), CheckedRun(directory / "resumed")
    wanted = trainer.until_saved(reference, steps)
    saved: list[Path] = []
    losses_of_first: dict[int, float] = {}
    for moment in kill_at:
        saved.append(trainer.until_saved(resumed, moment))
        losses_of_first = losses_of_first or dict(resumed.losses)
    report.saved_steps = [step_of(path) for path in saved]
    got = trainer.until_saved(resumed, steps)
    report.last_step = last = step_of(wanted)
    # Either run may have printed losses of later steps before it was killed.
    both = [step for step in reference.losses.keys() & resumed.losses.keys() if step <= last]
    report.losses = len(both)
    loss = _first_difference(reference.losses, resumed.losses, last)
    if step_of(got) != last:
        raise _mismatch(
            resumed,
            f"the resumed run ends at step {step_of(got)}, and the uninterrupted one at step {last}:"
            " count the steps from guard.restore(), and save all that ends the run, such as the patience of"
            " an early stop",
        )
    found, report.files = find_differences(wanted, got, ignoring)
    if not found and loss is None:
        return report
    repeat = _Repeat(trainer, directory, saved, ignoring)
    first_step, unresumed = repeat.without_resume(kill_at) or (last, found)
    repeat.unseeded = frozenset().union(*(each.generators for each in unresumed))
    report.unseeded = sorted(repeat.unseeded)
    found, _ = find_differences(wanted, got, ignoring, repeat.unseeded)
    if not found and loss is None:
        return report
    has_other_losses = _first_difference(reference.losses, losses_of_first, first_step) is not None
    if has_other_losses or not all(each.generators for each in unresumed):
        step, found, cause = first_step, unresumed, _NOT_DETERMINISTIC
    else:
        step, found = repeat.first(loss) or (last, found)
        cause = likely_cause(found, resumed.errors())
    lines = ["the resumed run differs from the uninterrupted one"]
    if loss is not None:
        before, after = reference.losses[loss], resumed.losses[loss]
        lines += [f"step {loss} is the first whose loss differs: {after!r} instead of {before!r}"]
    lines += [f"the checkpoints of step {step} differ:"] if found else []
    lines += [f"  {difference.text}" for difference in found]
    raise _mismatch(resumed, *lines, f"likely cause: {cause}")


def _mismatch(resumed: CheckedRun, *lines: str) -> ResumeMismatchError:
    """The error, with the warnings of the hooks, which may name the cause."""
    written = resumed.errors()
    shown = ["standard error of the resumed run:", written] if written else []
    return ResumeMismatchError("\n".join([*lines[:-1], *shown, lines[-1]]))


def _first_difference(
    wanted: Mapping[int, float], got: Mapping[int, float], last: int
) -> int | None:
    """Return the first step, up to ``last``, whose losses differ."""
    for step in sorted(wanted.keys() & got.keys()):
        if step <= last and struct.pack("d", wanted[step]) != struct.pack("d", got[step]):
            return step
    return None


@dataclass
class _Repeat:
    """Repeats parts of both runs after a mismatch, to find the first checkpoints that differ."""

    trainer: CheckedTrainer
    directory: Path
    saved: list[Path]
    """Checkpoints at which the resumed run was killed."""
    ignoring: str
    unseeded: frozenset[str] = frozenset()
    """Names of generators that may differ."""
    count: int = 0

    def without_resume(self, moments: Sequence[int | str]) -> tuple[int, list[Difference]] | None:
        """Return how two starts differ that resume nothing, and their step; None if this is unknown."""
        if not self.saved:
            return None
        step = step_of(self.saved[0])
        try:
            one = self.saved[0]
            if not isinstance(moments[0], int):
                one = self._until(step, None)  # another moment of the step may have another state
            other = self._until(step, None)
        except TrainerFailedError:
            return step, []
        found, _ = find_differences(other, one, self.ignoring)
        return step, found if step_of(one) == step_of(other) else []

    def first(self, loss: int | None) -> tuple[int, list[Difference]] | None:
        """Return the first step whose checkpoints differ, and how; None if no repeated part differs.

        Args:
            loss: first step whose loss differs.  Without one, the steps of ``saved`` are compared.
        """
        pairs = [(step_of(path), path) for path in self.saved]
        if loss is not None:
            starts = [path for path in self.saved if step_of(path) < loss]
            pairs = [(loss, starts[-1])] if starts else []
        for step, path in pairs:
            try:
                wanted = self._until(step, None)
                got = self._until(step, path) if loss is not None else path
            except TrainerFailedError:
                return None
            found, _ = find_differences(wanted, got, self.ignoring, self.unseeded)
            if found and step_of(wanted) == step_of(got):
                return step, found
        return None

    def _until(self, step: int, start: Path | None) -> Path:
        self.count += 1
        name = f"repeat-{self.count}-until-{step}"
        return self.trainer.until_saved(CheckedRun(self.directory / name, start), step)


def _json_loss(line: str) -> tuple[int, float] | None:
    try:
        body = json.loads(line)
        return int(body["step"]), float(body["loss"])
    except (ValueError, TypeError, KeyError):
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a command; returns the exit code: 0 if the resumed run is equal, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m swansong.testing",
        description="Compare a run that is killed and resumed with one that is not.",
    )
    parser.add_argument("--steps", type=int, help="last step; default: the end, guard.finish()")
    parser.add_argument(
        "--kill-at",
        action="append",
        required=True,
        metavar="MOMENT",
        help="a step, or a regular expression of a line of output; repeat it for further kills",
    )
    parser.add_argument("--ranks", type=int, default=1, help="number of ranks that COMMAND starts")
    parser.add_argument("--ignoring", default="(?!)", help="regular expression of files")
    parser.add_argument("--limit-s", type=float, default=_COMMAND_LIMIT_S, help="of one start")
    parser.add_argument("--while-stdin", action="store_true", help="end when stdin is closed")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="after --")
    options = parser.parse_args(arguments)
    # The trainers have other sessions: these signals do not reach them.
    signal.signal(signal.SIGTERM, _end)  # also if the process that started the check ignores it
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as with nohup
        signal.signal(signal.SIGHUP, _end)
    if options.while_stdin:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        report = check_resume(
            options.command,
            steps=options.steps,
            kill_at=[int(each) if each.isdecimal() else each for each in options.kill_at],
            ranks=options.ranks,
            has_launcher=options.ranks > 1,
            ignoring=options.ignoring,
            limit_s=options.limit_s,
            is_verbose=not options.while_stdin,
        )
    except AssertionError as error:
        print(error, file=sys.stderr)
        return 1
    print(_summary(report))
    return 0


def _end(_number: int, _frame: object) -> None:
    sys.exit("the check was ended")


def _end_with_stdin() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
