# SPDX-License-Identifier: Apache-2.0
"""Experiment trackers over preemptions: the same run continues, and no step has two points.

A resumed run repeats the steps after its checkpoint.  Its points would appear twice in most trackers.  Each
function here opens the tracker's own run again, by the name of the Swansong run, and returns a
:class:`Tracker`.  The rule for a repeated step depends on the tracker:

- W&B and MLflow keep the first point, and the tracker drops the second one;
- TensorBoard hides the first point, so the second one replaces it.

Call the function after :meth:`swansong.Guard.restore`, and log a step before :meth:`swansong.Guard.step`.
Only rank 0 opens a tracker; the trackers of other ranks do nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from swansong._log import log
from swansong._offline_wandb import last_step
from swansong.guard import Guard

RUN_TAG = "swansong.run"
"""Tag of an MLflow run: the name of the Swansong run that it belongs to."""
PREEMPTING_TAG = "swansong.preempting_at"
"""Tag of an MLflow run: UTC of the last request for an emergency checkpoint."""
_WANDB_ID_CHARS_MAX = 128


class Tracker:
    """Logs points to a tracker, each step once, and marks the run when its VM is about to be terminated.

    Args:
        guard: its requests show that the VM is about to be terminated.
        native: the run or writer of the tracker itself, for everything else that it offers.
        write: logs values at a step; called for steps that have no point yet.
        mark: marks the run as being preempted.
        end: closes the tracker.
    """

    def __init__(
        self,
        guard: Guard,
        native: Any = None,
        *,
        write: Callable[[int, Mapping[str, float]], object] | None = None,
        mark: Callable[[], object] | None = None,
        end: Callable[[], object] | None = None,
    ) -> None:
        self._guard = guard
        self.native = native
        self._write = write
        self._mark = mark
        self._end = end

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log all values of a step, in one call, unless the tracker has them.

        An error of the tracker is logged as a warning and never raised: training continues without the point.
        """
        if self._guard.preempting:
            self.mark_preempting()
        if self._write is not None:
            self._guarded("logging a point", partial(self._write, int(step), values))

    def mark_preempting(self) -> None:
        """Mark the run as being preempted, once; :meth:`log` does it at a request for a checkpoint.

        Returns immediately: a thread of its own calls the tracker, so that a slow one delays no save.
        """
        mark, self._mark = self._mark, None
        if mark is not None:
            call = partial(self._guarded, "marking the run as preempting", mark)
            threading.Thread(target=call, name="swansong-tracker", daemon=True).start()

    def close(self) -> None:
        """End the tracker's run: at the end of the training only, because a preempted run continues."""
        end, self._write, self._end = self._end, None, None
        if end is not None:
            self._guarded("closing the tracker", end)

    @staticmethod
    def _guarded(purpose: str, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            log.warning("%s failed: %s: %s", purpose, type(error).__name__, error)


def to_wandb(guard: Guard, **settings: Any) -> Tracker:
    """Open the W&B run of this Swansong run, or resume it.

    The id of the W&B run follows from the name of the Swansong run, so each VM resumes the same one.

    Online, the server reports the last step of the run.  Offline, the files of earlier VMs contain it, so
    the W&B directory must survive the VM.  Offline, W&B itself loses the newest points of a killed process.

    Args:
        guard: after :meth:`swansong.Guard.restore`.
        settings: arguments of ``wandb.init``, such as ``project``; ``id`` replaces the id.

    Raises:
        ImportError: the package ``wandb`` is missing.
        Exception: ``wandb.init`` failed.
    """
    if guard.rank != 0:
        return Tracker(guard)
    import wandb  # noqa: PLC0415  optional, and slow to import

    if guard.run:
        settings = {"id": wandb_id(guard.run), "resume": "allow", **settings}
    run = wandb.init(**settings)
    next_step = _next_offline_step(run) if run.offline else int(run.starting_step)

    def write(step: int, values: Mapping[str, float]) -> None:
        if step >= next_step:
            run.log(dict(values), step=step, commit=True)

    return Tracker(guard, run, write=write, mark=run.mark_preempting, end=run.finish)


def wandb_id(run: str) -> str:
    """The id of the W&B run for a Swansong run: its name where W&B allows it, otherwise with a digest."""
    allowed = re.sub(r"[^A-Za-z0-9._-]", "-", run)
    if allowed == run and len(run) <= _WANDB_ID_CHARS_MAX:
        return run
    return f"{allowed[:100]}-{hashlib.sha256(run.encode()).hexdigest()[:16]}"


def _next_offline_step(run: Any) -> int:
    """The first step without a point in the files of earlier VMs; without such files 0."""
    offline_run = os.path.dirname(run.dir)  # .../wandb/offline-run-.../files
    try:
        return last_step(os.path.dirname(offline_run), run.id) + 1
    except Exception as error:
        log.warning(
            "the offline files of W&B cannot be read, so repeated steps may have two points: %s",
            error,
        )
        return 0


def to_mlflow(guard: Guard, experiment: str = "Default", **settings: Any) -> Tracker:
    """Open the MLflow run of this Swansong run, or resume it.

    MLflow chooses the ids of its runs.  The run has the tag ``swansong.run``, by which later VMs find it.

    Args:
        guard: after :meth:`swansong.Guard.restore`.
        experiment: name of the MLflow experiment; it is created if it does not exist.
        settings: arguments of ``mlflow.start_run`` for a new run, such as ``run_name``.

    Raises:
        ImportError: the package ``mlflow`` is missing.
        Exception: the tracking server cannot be reached.
    """
    if guard.rank != 0:
        return Tracker(guard)
    import mlflow  # noqa: PLC0415  optional, and slow to import

    client = mlflow.MlflowClient()
    experiment_id = mlflow.set_experiment(experiment).experiment_id
    found = _mlflow_run(client, experiment_id, guard.run) if guard.run else None
    tags = {RUN_TAG: guard.run} if guard.run else {}
    if found is None:
        settings["tags"] = {**tags, **settings.get("tags", {})}
        run = mlflow.start_run(experiment_id=experiment_id, **settings)
    else:
        run = mlflow.start_run(run_id=found)
    run_id = run.info.run_id
    newest: dict[str, int] = {}
    """Last step of each metric."""

    def is_new(key: str, step: int) -> bool:
        if key not in newest:  # one request for each metric of a resumed run
            history = [] if found is None else client.get_metric_history(run_id, key)
            newest[key] = max((point.step for point in history), default=-1)
        return step > newest[key]

    def write(step: int, values: Mapping[str, float]) -> None:
        new = {key: float(value) for key, value in values.items() if is_new(key, step)}
        if new:
            mlflow.log_metrics(new, step=step, run_id=run_id)
            newest.update(dict.fromkeys(new, step))

    def mark() -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        client.set_tag(run_id, PREEMPTING_TAG, now)

    return Tracker(guard, run, write=write, mark=mark, end=mlflow.end_run)


def _mlflow_run(client: Any, experiment_id: str, run: str) -> str | None:
    """The id of the oldest MLflow run with this tag; None without one."""
    quoted = run.replace("'", "\\'")
    found = client.search_runs(
        [experiment_id],
        filter_string=f"tags.`{RUN_TAG}` = '{quoted}'",
        order_by=["attributes.start_time ASC"],
        max_results=1,
    )
    return None if not found else str(found[0].info.run_id)


def to_tensorboard(
    guard: Guard, directory: str | os.PathLike[str], start_step: int, **settings: Any
) -> Tracker:
    """Open a TensorBoard writer that hides the points after the restored step.

    The directory must survive the VM: on a shared file system, or in a bucket that TensorBoard can write.

    Args:
        guard: after :meth:`swansong.Guard.restore`.
        directory: of the event files, the same on each VM.
        start_step: result of :meth:`swansong.Guard.restore`.
        settings: arguments of ``torch.utils.tensorboard.SummaryWriter``.

    Raises:
        ImportError: torch or the package ``tensorboard`` is missing.
    """
    if guard.rank != 0:
        return Tracker(guard)
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  optional, and slow to import

    writer = SummaryWriter(os.fspath(directory), purge_step=start_step + 1, **settings)

    def write(step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            writer.add_scalar(key, value, step)

    # TensorBoard has no state of a run to mark; the points so far reach the disk.
    return Tracker(guard, writer, write=write, mark=writer.flush, end=writer.close)
