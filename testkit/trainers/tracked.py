# SPDX-License-Identifier: Apache-2.0
"""A trainer that logs each step to an experiment tracker, and the points that the tracker has afterwards.

python tracked.py mlflow DIRECTORY           train until the process is killed
python tracked.py mlflow DIRECTORY --read    print the points and the facts of the run as JSON
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import swansong
from swansong import trackers
from swansong.trackers import Tracker

STEP_S = 0.02
PADDING = {f"value_{number}": 1 / 3 for number in range(20)}
"""W&B writes blocks of 32 KiB: a step needs some bytes, so that a killed process leaves most of them."""


def opened(kind: str, directory: Path, guard: swansong.Guard, start: int) -> Tracker:
    if kind == "wandb":
        return trackers.to_wandb(guard, project="test", mode="offline", dir=str(directory))
    if kind == "mlflow":
        return trackers.to_mlflow(guard, "test")
    return trackers.to_tensorboard(guard, directory, start, flush_secs=1)


def train(kind: str, directory: Path) -> None:
    guard = swansong.attach(
        save=lambda to: (to / "state").write_text("state"),
        load=lambda source: (source / "state").read_text(),
    )
    start = guard.restore()
    tracker = opened(kind, directory, guard, start)
    print(json.dumps({"event": "resumed", "from_step": start}), flush=True)
    for step in range(start + 1, 10**6):
        time.sleep(STEP_S)
        tracker.log(step, {"loss": 1 / step, **(PADDING if kind == "wandb" else {})})
        guard.step(step)
        print(json.dumps({"step": step}), flush=True)


def of_wandb(directory: Path) -> dict[str, Any]:
    from swansong._offline_wandb import _entries
    from wandb.proto import wandb_internal_pb2

    steps, ids, marked = [], set(), False
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        for entry in _entries(path.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(entry)
            kind = record.WhichOneof("record_type")
            marked |= kind == "preempting"
            if kind == "history":
                steps.append(record.history.step.num)
            elif kind == "run":
                ids.add(record.run.run_id)
    return {"steps": steps, "runs": sorted(ids), "marked": marked}


def of_mlflow() -> dict[str, Any]:
    import mlflow

    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("test")
    runs = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(runs[0].info.run_id, "loss")
    return {
        "steps": [point.step for point in history],
        "runs": [run.data.tags[trackers.RUN_TAG] for run in runs],
        "marked": trackers.PREEMPTING_TAG in runs[0].data.tags,
    }


def of_tensorboard(directory: Path) -> dict[str, Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    steps = [event.step for event in events.Scalars("loss")]
    return {"steps": steps, "runs": ["run"], "marked": True}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("wandb", "mlflow", "tensorboard"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--read", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{args.directory}/mlflow.db")
    if not args.read:
        train(args.kind, args.directory)
    elif args.kind == "mlflow":
        print(json.dumps(of_mlflow()))
    else:
        read = of_wandb if args.kind == "wandb" else of_tensorboard
        print(json.dumps(read(args.directory)))


if __name__ == "__main__":
    main()
