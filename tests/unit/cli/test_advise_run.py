# SPDX-License-Identifier: Apache-2.0
"""``swansong advise`` for a run, from a bucket that the real writers have filled."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from swansongd.bucket import claim as claims
from swansongd.bucket import lives, wall
from swansongd.bucket import resumption as resumptions
from swansongd.bucket.claim import ClaimObject
from swansongd.bucket.farewell import Farewell, encode
from swansongd.bucket.keys import RunKeys
from swansongd.cli import main
from swansongd.core.events import Conclude
from swansongd.core.ledger import EvacuationRecord, LastReport, NoticeRecord
from swansongd.model import CheckpointKind, CommitRef, Verdict
from swansongd.observe.loss import PARTS
from swansongd.stores.file.store import FileStore

from testkit import committed
from tests.unit.bucket.test_resumption import RESUMPTION
from tests.unit.cli.test_advise import PAGE
from tests.unit.cli.test_loss import names_of

KEYS = RunKeys("r")
BEGUN_S = 1_800_000_000.0
EVERY_S, COMMITS, COST_S = 600, 10, 1.5
DOWN = {"cloud": 60.0, "boot": 10.0, "start": 10.0, "fetch": 6.0, "load": 1.0, "warm_up": 3.0}
LIFE_S = EVERY_S * COMMITS + 300
PACE = {
    "size_bytes": 4e9,
    "save_s": 4.0,
    "urgent_save_s": 2.0,
    "send_s_per_byte": 1e-9,
    "commit_s": 0.2,
}
FILES = {"rank0/a": b"a" * 900, "rank1/a": b"b" * 50, "rank1/b": b"c" * 50}


def a_vm(store: FileStore, number: int, start: int, verdict: Verdict | None) -> int:
    """The records of a VM that takes a step a second; returns the step of its newest commit."""
    booted_s = BEGUN_S + (number - 1) * (LIFE_S + sum(DOWN.values())) + DOWN["cloud"]
    first_s = booted_s + sum(DOWN.values()) - DOWN["cloud"]
    identity = {"boot_id": f"b{number}", "claimed": wall.text(booted_s + 11)}
    claim = ClaimObject(run="r", generation=number, nonce="n", identity=identity)
    store.put(KEYS.generation(number), claims.encode(claim))
    made = replace(
        RESUMPTION,
        generation=number,
        vm=f"vm{number}",
        nodes=1,
        booted_wall_s=booted_s,
        daemon_wall_s=booted_s + 10,
        download_began_wall_s=booted_s + 11,
        download_ended_wall_s=booted_s + 25,
        asked_wall_s=booted_s + 20,
        answered_wall_s=booted_s + 26,
        started_wall_s=booted_s + 27,
        first_step_wall_s=first_s,
        start_step=start,
        first_step=start + 1,
        earlier=lives.earlier_ending(store, KEYS, number, ended_by_s=(booted_s, booted_s + 10)),
    )
    store.put(KEYS.resumption(number), resumptions.encode(made))
    for count in range(1, COMMITS + 1):
        commit_at(store, number, start + count * EVERY_S, first_s + count * EVERY_S)
    step, end_s = start + LIFE_S + 1, first_s + LIFE_S
    if verdict is None:
        return start + COMMITS * EVERY_S
    if verdict is Verdict.SAFE:
        commit_at(store, number, step - 9, end_s - 5, CheckpointKind.EMERGENCY)
    evacuated(store, number, step, end_s, verdict)
    return step - 9 if verdict is Verdict.SAFE else start + COMMITS * EVERY_S


def commit_at(
    store: FileStore,
    generation: int,
    step: int,
    at_s: float,
    kind: CheckpointKind = CheckpointKind.PERIODIC,
) -> None:
    committed.commit(
        store,
        FILES,
        generation=generation,
        step=step,
        kind=kind,
        created=wall.text(at_s),
        pace=PACE,
    )


def evacuated(store: FileStore, number: int, step: int, end_s: float, verdict: Verdict) -> None:
    """A farewell of the VM's last second, after a notice of 120 s."""
    training = LastReport(
        step=step,
        wall_s=end_s,
        step_s=1.0,
        ranks=2,
        saves_s=COMMITS * COST_S,
        stall_s=3.0,
        is_over=True,
    )
    evacuation = EvacuationRecord(
        opened_wall_s=end_s - 118,
        deadline_s=120.0,
        notices=(NoticeRecord(source="aws.spot", kind="terminate"),),
    )
    made = Farewell(
        run="r",
        generation=number,
        conclusion=Conclude("e", verdict, "spot", CommitRef(number, step), 1.0),
        evacuation=evacuation,
        training=training,
        written=wall.text(end_s),
    )
    store.put(KEYS.farewell(number, "t"), encode(made))


@pytest.fixture
def configuration(tmp_path: Path) -> Path:
    """Five VMs: three were SAFE, one was not in time, and one trains."""
    store = committed.file_store(tmp_path / "bucket")
    start = 0
    for number, verdict in enumerate([Verdict.SAFE, Verdict.SAFE, Verdict.PARTIAL, None], start=1):
        start = a_vm(store, number, start, verdict)
    (tmp_path / "staging").mkdir()
    file = tmp_path / "swansong.toml"
    file.write_text(
        f'[run]\nname = "r"\n[store]\nurl = "file://{tmp_path}/bucket"\n'
        f'[staging]\npath = "{tmp_path}/staging"\n'
    )
    return file


def asked(configuration: Path, capfd: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main.main(["--config", str(configuration), *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


def test_the_figures_are_those_of_the_bucket(
    configuration: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Cost of a save, interval, parts of down, notices, and the uneven save of two ranks."""
    found = asked(configuration, capfd, "advise", "--price", "spot=1")
    job = found["job"]
    assert (job["gpus"], job["size_bytes"]) == (8, 1000)
    assert job["save_cost_s"] == pytest.approx(COST_S)
    assert found["interval"]["in_use_s"] == pytest.approx(EVERY_S - COST_S)
    assert {name: job["down_s"][name] for name in PARTS} == pytest.approx(DOWN)
    assert "3 interruptions" in found["rests_on"]
    assert "1 of them without a usable notice" in found["rests_on"]
    margins = {(each["source"], each["grace_s"]): each["spare_s"] for each in found["margins"]}
    assert {"aws.spot", "logind", "host"} == {source for source, _ in margins}
    assert found["verdict"].startswith("A preemption with 120 s of notice would be SAFE")
    assert found["proposals"]


def test_the_observed_loss_is_that_of_swansong_loss(
    configuration: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A day of the one, times the days of the run, is the total of the other."""
    total = asked(configuration, capfd, "loss")["total"]
    found = asked(configuration, capfd, "advise")["observed_per_day"]
    days = total["wall_s"] / 86400
    parts = total["unproductive"]
    assert found["redone_s"] * days == pytest.approx(parts["redone"], abs=0.01)
    assert found["stall_s"] * days == pytest.approx(parts["stall"], abs=0.01)
    assert found["saves_s"] * days == pytest.approx(parts["saves"], abs=0.01)
    down_s = sum(parts[name] for name in (*PARTS, "unknown"))
    assert found["down_s"] * days == pytest.approx(down_s, abs=0.01)
    assert found["ettr"] == pytest.approx(total["ettr"], abs=1e-5)


def test_the_model_expects_what_the_run_has_lost(
    configuration: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two of three VMs were SAFE; the prior of four hours makes the expectation a little worse."""
    found = asked(configuration, capfd, "advise")
    observed, expected = found["observed_per_day"], found["expected_per_day"]
    for part in ("redone_s", "down_s", "saves_s"):
        assert expected[part] == pytest.approx(observed[part], rel=0.6), part
    assert expected["lost_gpu_s"] == pytest.approx(observed["lost_gpu_s"], rel=0.5)


def test_every_field_of_a_run_is_explained(
    configuration: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The page names each field of the JSON."""
    fields = names_of(asked(configuration, capfd, "advise"))
    explained = set(PAGE.replace("[]", "").split("`")[1::2])
    assert fields - explained - set(PARTS) - {"unknown"} == set()


def test_the_text_fits_into_80_columns(
    configuration: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The verdict, what it rests on, and what is assumed."""
    words = ["--config", str(configuration), "advise", "--price", "spot=1"]
    assert main.main([*words, "--price", "on_demand=3"]) == 0
    text = capfd.readouterr().out
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80, text
    lines = [line.split()[0] for line in text.splitlines() if line]
    assert lines[0] == "A"
    for word in ("NOTICE", "observed", "expected", "Rests", "Assumed:"):
        assert word in lines, text


def test_a_run_without_commits_is_a_clear_error(
    configuration: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The fix is a description of the run."""
    assert main.main(["--config", str(configuration), "advise", "--run", "other"]) == 17
    assert "--size" in capfd.readouterr().err


def test_without_a_pace_the_margin_is_unknown(
    tmp_path: Path, configuration: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing is promised from figures that are not measured."""
    store = committed.file_store(tmp_path / "bucket")
    committed.commit(store, FILES, generation=4, step=10**6)
    found = asked(configuration, capfd, "advise")
    assert found["margins"] == []
    assert "unknown" in found["verdict"]
