# SPDX-License-Identifier: Apache-2.0
"""``swansong loss``: its tables fit a terminal, and docs/operations/loss.md explains every name."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from swansong import bounds
from swansong_bucket.format import resumption as resumptions
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.loss_records import PARTS
from swansong_tools.commands import loss as command
from swansong_tools.commands import main
from swansong_tools.economics.loss import GOODPUT, Loss

from testkit import REPOSITORY, committed
from testkit.committed import file_store
from testkit.lost_vms import RESUMPTION, claim, farewell
from tests.unit.economics.test_loss import Stay, of, told

PAGE = (REPOSITORY / "docs/operations/loss.md").read_text(encoding="utf-8")
STAY = Stay((70.0, 9000.0, 12.0, 4.0, 1.25, 9.0), 90_000, 0.9, 40, 30.0, 0.5)


def a_loss() -> Loss:
    """Two interruptions: an exact one, and one of which hardly anything is known."""
    first, second, third = told([STAY, STAY, STAY])
    assert second.resumption is not None
    unsure = replace(second.ending, is_estimated=True, stall_s=None)
    same_vm = replace(second.resumption, vm="vm1", answered_wall_s=None)
    return of(
        [first, replace(second, ending=unsure, resumption=same_vm), replace(third, resumption=None)]
    )


def names_of(value: Any) -> set[str]:
    """All keys of a JSON value."""
    if isinstance(value, dict):
        return set(value).union(*(names_of(each) for each in value.values()))
    return set().union(*map(names_of, value)) if isinstance(value, list) else set()


def test_every_field_is_explained() -> None:
    """The page names each field of the JSON."""
    fields = names_of(command.facts("r", a_loss(), 0)) - {"run", "interruptions", "total"}
    assert fields - set(re.findall(r"`(\w+)`", PAGE)) == set()
    assert json.loads(json.dumps(command.facts("r", None, 0)))["total"] is None


def test_each_part_is_in_seconds_and_in_gpu_seconds() -> None:
    """Eight GPUs before the interruption and four after it: each part counts the GPUs that it cost."""
    first, second = told([STAY, STAY])
    assert second.resumption is not None
    fewer = replace(second, resumption=replace(second.resumption, ranks=4))
    facts = command.facts("r", of([first, fewer]), 0)
    (each,) = facts["interruptions"]
    parts_s = {"stall": each["stall_s"], "redone": each["redone_s"], **each["down"]}
    assert parts_s == dict(zip(("stall", "redone", *PARTS), (0.5, 36.0, *STAY.down_s), strict=True))
    gpus = {part: 8 if part in ("stall", "redone") else 4 for part in parts_s}
    parts_gpu_s = {part: seconds * gpus[part] for part, seconds in parts_s.items()}
    assert each["lost_parts_gpu_s"] == pytest.approx(parts_gpu_s)
    assert each["down_gpu_s"] == pytest.approx(4 * each["down_s"])
    assert each["lost_gpu_s"] == pytest.approx(8 * 36.5 + 4 * each["down_s"])

    total = facts["total"]
    unproductive_s = total["unproductive"]
    first_start_s = dict(zip(PARTS, STAY.down_s, strict=True)) | {"cloud": 0.0, "boot": 0.0}
    expected = {part: 8 * first_start_s[part] + 4 * each["down"][part] for part in PARTS}
    expected |= {"redone": 8 * 36.0, "stall": (8 + 4) * 0.5, "saves": (8 + 4) * 30.0, "unknown": 0}
    assert total["unproductive_gpu_s"] == pytest.approx(expected)
    assert list(total["unproductive_gpu_s"]) == list(unproductive_s)
    spent_gpu_s = total["productive_gpu_s"] + sum(total["unproductive_gpu_s"].values())
    assert total["gpu_s"] == pytest.approx(spent_gpu_s)
    assert total["lost_gpu_s"] == pytest.approx(each["lost_gpu_s"])


def test_a_part_that_is_not_known_has_no_gpu_seconds() -> None:
    """They are null, as the seconds are, and never 0."""
    unsure, unrecorded = command.facts("r", a_loss(), 0)["interruptions"]
    assert (unsure["down"]["fetch"], unsure["lost_parts_gpu_s"]["fetch"]) == (None, None)
    assert (unrecorded["stall_s"], unrecorded["lost_parts_gpu_s"]["stall"]) == (None, None)
    assert set(unrecorded["lost_parts_gpu_s"]) == {"stall", "redone", "unknown"}


UPSTREAM = {
    "TPU_INITIALIZATION",
    "TRAINING_PREP",
    "PROGRAM_STARTUP",
    "DATA_LOADING_SYNC",
    "DATA_LOADING_ASYNC",
    "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME",
    "UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME",
    "WASTED_PROGRESS_FROM_DISRUPTION",
    "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    "CUSTOM_BADPUT_EVENTS",
    "OTHER",
    "ELASTIC_SLICE_DOWN",
    "ELASTIC_SCALE_UP",
    "ELASTIC_REINITIALIZATION",
}
"""``BadputType`` in ``src/goodput_utils.py`` of ml-goodput-measurement 0.2.3, all names."""


def test_the_categories_are_those_of_googles_library() -> None:
    """The table on the page is the mapping of the code, to names of the library."""
    found = {
        part: category
        for parts, category in re.findall(r"^\| (`.+) \| `([A-Z_]{5,})` \|$", PAGE, re.MULTILINE)
        for part in re.findall(r"`(\w+)`", parts)
    }
    assert found == GOODPUT
    assert set(PARTS) <= set(found)
    assert set(GOODPUT.values()) <= UPSTREAM
    assert "ml-goodput-measurement 0.2.3" in PAGE
    assert set(command.facts("r", a_loss(), 0)["total"]["goodput"]) == set(GOODPUT.values())


@pytest.fixture
def configuration(tmp_path: Path) -> Path:
    """A run with one preemption in a store of files."""
    store, keys = file_store(tmp_path / "bucket"), RunKeys("r")
    claim(store, 1, 1_800_000_000.0)
    farewell(store, 1, 150, 1_800_000_050.0, over=True)
    claim(store, 7, 1_800_000_100.0)
    store.put(keys.resumption(7), resumptions.encode(replace(RESUMPTION, earlier=None)))
    return committed.configuration(tmp_path)


def test_the_command_prints_json(configuration: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One interruption, with the end that the farewell reports."""
    assert main.main(["--config", str(configuration), "loss", "--json"]) == 0
    (each,) = json.loads(capfd.readouterr().out)["interruptions"]
    assert (each["after_generation"], each["generation"], each["last_step"]) == (1, 7, 150)
    assert (each["estimated"], each["down_s"]) == (False, pytest.approx(57.001))


def test_a_run_without_training_is_no_error(
    configuration: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its total is null, and a person gets a sentence."""
    committed.commit(file_store(configuration.parent / "bucket"), {"a": b"x"}, run="other")
    words = ["--config", str(configuration), "loss", "--run", "other"]
    assert main.main([*words, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["total"] is None
    assert main.main(words) == 0
    assert "has not trained yet" in capfd.readouterr().err


@pytest.mark.parametrize("is_hostile", [False, True])
def test_the_tables_fit_into_80_columns(
    is_hostile: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """No figure is cut, the sum comes first, and all marks are explained below the tables."""
    loss = a_loss()
    if is_hostile:
        large = {
            "generation": bounds.GENERATION_MAX, "last_step": bounds.STEP_MAX, "is_skewed": True,
            "start_step": bounds.STEP_MAX, "stall_s": 1e9, "ranks": bounds.RANKS_MAX,
            "bytes_fetched": bounds.BYTES_MAX, "bytes_linked": bounds.BYTES_MAX, "redone_s": 1e9,
            "down_s": 1e9, "parts_s": dict.fromkeys(PARTS[1:], 1e9), "is_same_vm": True,
        }  # fmt: skip
        known = [each for each in loss.interruptions if each.stall_s is None]
        loss = replace(loss, interruptions=tuple(replace(each, **large) for each in known))
    command._print("r" * 100 if is_hostile else "my-run", loss, 1 if is_hostile else 3)
    shown = capfd.readouterr().out
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= 80, shown
    assert "…" not in shown
    assert shown.startswith("run ")
    assert shown.index("productive") < shown.index("GEN")
    assert ("1 older generation left" if is_hostile else "3 older generations left") in shown
    for mark in ("~", "^", "?"):
        assert re.search(rf"^\{mark}  ", shown, re.MULTILINE), shown
    assert "ETTR" in shown


def test_the_example_on_the_page_explains_its_marks(capfd: pytest.CaptureFixture[str]) -> None:
    """The page shows the lines of the command below the tables, for each mark of the example."""
    command._print("my-run", a_loss(), 0)
    shown = capfd.readouterr().out
    remarks = re.findall(r"^([~^?*])  (\S.*)$", shown, re.MULTILINE)
    example = PAGE.partition("```\nrun my-run\n")[2].partition("```")[0]
    tables = example.partition("\n~  ")[0]
    assert {mark for mark, _ in remarks} == {"~", "^", "?"}
    for mark, text in remarks:
        assert (mark in tables) == (f"{mark}  {text.strip()}\n" in example), mark
    for label in ("productive", "last hour", "lost", "saves"):
        assert re.search(rf"^{label}  ", shown, re.MULTILINE), label
        assert re.search(rf"^{label}  ", example, re.MULTILINE), label
