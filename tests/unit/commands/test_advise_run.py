# SPDX-License-Identifier: Apache-2.0
"""``swansong advise`` for a run, from a bucket that the real writers have filled."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swansong_bucket.format import wall
from swansong_bucket.format.farewell import RecordedEvacuation
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.format.manifest import Manifest
from swansong_bucket.loss_records import PARTS, EvacuationRecord, Life, NoticeRecord
from swansong_bucket.model import CheckpointKind, CommitRef, Verdict
from swansong_bucket.runs import history as history_reader
from swansong_bucket.runs.run import RecordedCommit
from swansong_bucket.stores.file.store import FileStore
from swansong_tools.commands import advise as command
from swansong_tools.commands import advise_text, main, measured
from swansong_tools.economics import loss as losses
from swansong_tools.economics.advice import advise
from swansong_tools.economics.bill import bill
from swansong_tools.economics.cost import Prices
from swansong_tools.economics.expected import DAY_S
from swansongd.config.config import parse

from testkit import committed, lost_vms
from testkit.hostile_farewells import evacuations as hostile_evacuations
from tests.unit.economics.test_loss import Stay, forged, told

KEYS = RunKeys("r")
BEGUN_S = 1_800_000_000.0
EVERY_S, COMMITS, COST_S = 600, 6, 1.5
DOWN = {"cloud": 60.0, "boot": 10.0, "start": 10.0, "fetch": 6.0, "load": 1.0, "warm_up": 3.0}
LIFE_S = EVERY_S * COMMITS + 300
PACE = {
    "size_bytes": 4e9,
    "save_s": 4.0,
    "urgent_save_s": 2.0,
    "send_s_per_byte": 1e-9,
    "commit_s": 0.2,
}
CONFIG = parse(
    {"run": {"name": "r"}, "store": {"url": "s3://bucket"}, "staging": {"path": "/staging"}}
)
FILES = {"rank0/a": b"a" * 900, "rank1/a": b"b" * 50, "rank1/b": b"c" * 50}


def a_vm(
    store: FileStore, number: int, start: int, verdict: Verdict | None, commits: int = COMMITS
) -> int:
    """The records of a VM that takes a step a second; returns the step of its newest commit."""
    booted_s = BEGUN_S + (number - 1) * (LIFE_S + sum(DOWN.values())) + DOWN["cloud"]
    first_s = booted_s + sum(DOWN.values()) - DOWN["cloud"]
    lost_vms.claim(store, number, booted_s + 11)
    parts_s = [DOWN[name] for name in ("boot", "start", "fetch", "load", "warm_up")]
    lost_vms.record(store, number, first_s, start=start, parts_s=parts_s, nodes=1)
    for count in range(1, commits + 1):
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
    notice = NoticeRecord(source="aws.spot", kind="terminate")
    evacuation = EvacuationRecord(opened_wall_s=end_s - 118, deadline_s=120.0, notices=(notice,))
    lost_vms.farewell(
        store,
        number,
        step,
        end_s,
        over=True,
        verdict=verdict,
        evacuation=evacuation,
        ranks=2,
        saves_s=COMMITS * COST_S,
        stall_s=3.0,
    )


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four VMs: two were SAFE, one was not although it had time, and one trains."""
    directory = tmp_path_factory.mktemp("history")
    store = committed.file_store(directory / "bucket")
    start = 0
    for number, verdict in enumerate([Verdict.SAFE, Verdict.SAFE, Verdict.PARTIAL, None], start=1):
        start = a_vm(store, number, start, verdict)
    return committed.configuration(directory)


def asked(configuration: Path, capfd: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main.main(["--config", str(configuration), *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


def test_the_figures_are_those_of_the_bucket(
    history: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Cost of a save, interval, parts of down, notices, and the uneven save of two ranks."""
    found = asked(history, capfd, "advise", "--price", "spot=1")
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
    history: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A day of the one, times the days of the run, is the total of the other."""
    total = asked(history, capfd, "loss")["total"]
    found = asked(history, capfd, "advise")["observed_per_day"]
    days = total["wall_s"] / 86400
    parts = total["unproductive"]
    assert found["redone_s"] * days == pytest.approx(parts["redone"], abs=0.01)
    assert found["stall_s"] * days == pytest.approx(parts["stall"], abs=0.01)
    assert found["saves_s"] * days == pytest.approx(parts["saves"], abs=0.01)
    down_s = sum(parts[name] for name in (*PARTS, "unknown"))
    assert found["down_s"] * days == pytest.approx(down_s, abs=0.01)
    assert found["ettr"] == pytest.approx(total["ettr"], abs=1e-5)


def test_the_model_expects_what_the_run_has_lost(
    history: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two of three VMs were SAFE; the prior of four hours makes the expectation a little worse."""
    found = asked(history, capfd, "advise")
    observed, expected = found["observed_per_day"], found["expected_per_day"]
    for part in ("redone_s", "down_s", "saves_s"):
        assert expected[part] == pytest.approx(observed[part], rel=0.6), part
    assert expected["lost_gpu_s"] == pytest.approx(observed["lost_gpu_s"], rel=0.5)


def test_the_text_fits_into_80_columns(history: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The verdict, what it rests on, and what is assumed."""
    words = ["--config", str(history), "advise", "--price", "spot=1"]
    assert main.main([*words, "--price", "on_demand=3"]) == 0
    text = capfd.readouterr().out
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80, text
    lines = [line.split()[0] for line in text.splitlines() if line]
    assert lines[0] == "A"
    for word in ("NOTICE", "observed", "expected", "Rests", "Assumed:"):
        assert word in lines, text


def test_storage_counts_each_object_once_whichever_commit_sent_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base of an old commit counts in full; above the limit the amount is marked."""
    store = committed.file_store(tmp_path / "bucket")
    for number, size in enumerate((9000, 1, 1)):
        store.put(f"{KEYS.data}0000000{number}/000000000001-n-u/00000/rank0/a", b"a" * size)
    assert history_reader.stored_bytes(store, KEYS) == (9002, True)
    monkeypatch.setattr(history_reader, "STORED_MAX", 2)
    counted, is_all = history_reader.stored_bytes(store, KEYS)
    assert 0 < counted <= 9002
    assert not is_all
    few = replace(read_of(told([STAY]), [], []), is_all_stored=False)
    assert "the run has more of them" in " ".join(measured._subject(few).assumed)


@pytest.mark.fault("OA01")
def test_a_run_without_commits_is_a_clear_error(
    history: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The fix is a description of the run."""
    assert main.main(["--config", str(history), "advise", "--run", "other"]) == 17
    assert "--size" in capfd.readouterr().err


@pytest.mark.fault("OA01")
def test_without_a_pace_the_margin_is_unknown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing is promised from figures that are not measured, and each assumption is named."""
    store = committed.file_store(tmp_path / "bucket")
    a_vm(store, 1, 0, None, commits=0)
    committed.commit(store, FILES, generation=1, step=300)
    found = asked(committed.configuration(tmp_path), capfd, "advise")
    assert found["margins"] == []
    assert "unknown" in found["verdict"]
    notes = " ".join(found["assumed"])
    for words in ("stops training for", "a checkpoint every", "without training after"):
        assert words in notes


# ---------------------------------------------------------------- records in memory

STAY = Stay((60.0, 10.0, 10.0, 6.0, 1.0, 3.0), 1000, 1.0, 9, 6.0, 3.0)
MANIFEST = committed.manifest_of(committed.named_shard("rank0/a", 1000, "r/x"), pace=PACE)


def read_of(
    found: list[Life],
    commits: list[RecordedCommit],
    evacuations: list[RecordedEvacuation],
    newest: Manifest = MANIFEST,
) -> measured._Bucket:
    loss = losses.loss(found)
    assert loss is not None
    return measured._Bucket(
        config=CONFIG,
        run="r",
        lives=tuple(found),
        loss=loss,
        newest=newest,
        commits=tuple(commits),
        evacuations=tuple(evacuations),
        stored_bytes=1000,
        is_all_stored=True,
    )


def commits_of(life: Life, *after_s: float) -> list[RecordedCommit]:
    """Periodic commits of this VM, by their time after its first step."""
    assert life.resumption is not None
    return [
        RecordedCommit(
            ref=CommitRef(life.generation, number),
            kind=CheckpointKind.PERIODIC,
            created_wall_s=life.resumption.first_step_wall_s + at_s,
            size_bytes=1000,
            bytes_sent=1000,
            nodes=1,
            is_whole=True,
        )
        for number, at_s in enumerate(after_s)
    ]


def evacuation_of(
    life: Life, *, source: str = "aws.spot", before_s: float = 100.0, is_safe: bool = True
) -> RecordedEvacuation:
    """An evacuation that opened this long before the end of the VM."""
    return RecordedEvacuation(
        run="r",
        generation=life.generation,
        evacuation_id="e",
        node=0,
        notices=(NoticeRecord(source, "k"),),
        opened_wall_s=life.ending.wall_s - before_s,
        deadline_s=120.0,
        verdict=Verdict.SAFE if is_safe else Verdict.PARTIAL,
        reason="",
        commit=None,
        part=None,
        slack_s=1.0,
        expected_s=None,
        took_s=None,
        timeline=(),
        left_out=0,
        samples=(),
        training=None,
        written_wall_s=life.ending.wall_s,
    )


def test_each_interruption_has_the_notice_before_its_end() -> None:
    """A drill hours earlier does not count; a restart on the same VM is no interruption."""
    found = told([STAY, replace(STAY, steps=9000), STAY, STAY, STAY])
    assert found[3].resumption is not None
    same_vm = replace(found[3].resumption, vm="vm3")
    found[3] = replace(found[3], resumption=same_vm)
    job = measured._subject(
        read_of(
            found,
            [],
            [
                evacuation_of(found[0]),
                evacuation_of(found[1], source="drill", before_s=8000.0),
                evacuation_of(found[3], is_safe=False),
            ],
        )
    ).job
    silent, spot = job.kinds
    loss = losses.loss(found)
    assert loss is not None
    # The drill, and the evacuation that had time and was not SAFE: two, and one more in four hours.
    assert silent.per_day == pytest.approx(3 * DAY_S / (loss.wall_s + 4 * 3600))
    assert (spot.source, spot.grace_s) == ("aws.spot", 120.0)
    assert spot.per_day == pytest.approx(DAY_S / (loss.wall_s + 4 * 3600))


def test_a_notice_that_was_too_short_is_one_all_the_same() -> None:
    """A VM with 2 s of grace could not be SAFE: more time would have helped."""
    found = told([STAY, STAY])
    late = replace(evacuation_of(found[0], before_s=2.0, is_safe=False), deadline_s=2.0)
    subject = measured._subject(read_of(found, [], [late]))
    assert subject.headline == ("aws.spot", 2.0)
    assert "0 of them without" in subject.rests_on


def test_a_cloud_that_gives_no_notice_gets_the_cost_of_its_interval() -> None:
    """Two of three VMs ended without a notice: the verdict is not on the notice of the third."""
    found = told([STAY, STAY, STAY, STAY])
    subject = measured._subject(read_of(found, [], [evacuation_of(found[0])]))
    assert subject.headline == ("", 0.0)
    verdict = advise_text.verdict(subject)
    assert verdict.startswith("Without a usable notice, an interruption repeats ")
    assert "of the run" in verdict


def test_the_most_frequent_notice_comes_first() -> None:
    """The verdict is on the notice that this run gets."""
    found = told([STAY, STAY, STAY, STAY])
    evacuations = [
        evacuation_of(life, source=source)
        for life, source in zip(found, ("aws.spot", "gcp.preempted", "gcp.preempted"), strict=False)
    ]
    assert measured._subject(read_of(found, [], evacuations)).headline[0] == "gcp.preempted"


def test_commits_that_retention_thinned_out_show_no_cost() -> None:
    """Neither the oldest of the recent generations counts, nor any that is a day older."""
    old, first, second = told([replace(STAY, steps=90_000), STAY, replace(STAY, saves_s=4.0)])
    commits = [*commits_of(old, 10.0), *commits_of(first, 500.0), *commits_of(second, 10.0, 520.0)]
    job = measured._subject(read_of([old, first, second], commits, [])).job
    assert job.save_cost_s == pytest.approx(2.0)
    assert job.interval_s == pytest.approx(508.0)


@pytest.mark.parametrize("age_s", [10 * 365 * DAY_S, -10 * 365 * DAY_S])
def test_a_commit_with_a_wrong_clock_hides_no_other(age_s: float) -> None:
    """Interval and cost of a save are those of the other commits."""
    first, second = told([STAY, replace(STAY, saves_s=4.0)])
    commits = [*commits_of(first, 500.0), *commits_of(second, 10.0, 520.0)]
    wrong = replace(
        commits[-1], ref=CommitRef(2, 9), created_wall_s=(commits[-1].created_wall_s or 0.0) + age_s
    )
    for read in (commits, [*commits, wrong]):
        job = measured._subject(read_of([first, second], read, [])).job
        assert job.save_cost_s == pytest.approx(2.0)
        assert job.interval_s == pytest.approx(508.0)


@pytest.mark.parametrize("count", [0, 1])
def test_a_short_run_has_the_rate_of_the_prior(count: int) -> None:
    """Ten minutes without an interruption do not show 0 a day, and with one they do not show 144."""
    stay = replace(STAY, down_s=(1.0, 1.0, 1.0, 1.0, 1.0, 1.0), steps=600 // (count + 1))
    found = told([stay] * (count + 1))
    evacuations = [evacuation_of(life) for life in found[:count]]
    subject = measured._subject(read_of(found, [], evacuations))
    assert subject.job.per_day == pytest.approx(6 * (count + 1), rel=0.06)
    rate = f"{subject.job.per_day:.2g} interruptions a day in all"
    assert any("run.mtbf_s = 4 h" in note and rate in note for note in subject.assumed)
    assert "too short for a rate" in subject.rests_on


def test_gpus_and_vms_are_those_of_the_newest_commit() -> None:
    """The newest VM belongs to another job with more and smaller VMs, which has no commit yet."""
    first, second = told([STAY, STAY])
    assert first.resumption is not None
    assert second.resumption is not None
    lives_read = [
        replace(first, resumption=replace(first.resumption, ranks=16, nodes=2)),
        replace(second, resumption=replace(second.resumption, ranks=16, nodes=4)),
    ]
    newest = replace(MANIFEST, generation=1, nodes=2)
    job = measured._subject(read_of(lives_read, [], [], newest)).job
    assert (job.gpus, job.nodes) == (16, 2)
    unknown = replace(newest, generation=7)
    job = measured._subject(read_of(lives_read, [], [], unknown)).job
    assert (job.gpus, job.nodes) == (8, 2), "the GPUs of a newest VM"


def test_a_save_writes_its_new_chunks() -> None:
    """A restore reads all chunks, also those of earlier commits."""
    shards = tuple(committed.named_shard(f"rank0/{name}", 1000) for name in "abc")
    newest = replace(MANIFEST, step=7, shards=shards)
    lives = told([STAY])
    commits = [
        replace(each, size_bytes=3000, bytes_sent=sent_bytes)
        for each, sent_bytes in zip(commits_of(lives[0], 60, 120), (1500, 500), strict=True)
    ]
    upkeep = measured._subject(read_of(lives, commits, [], newest)).upkeep
    assert upkeep.writes_per_save == 2, "one of three chunks and the manifest"
    assert upkeep.reads_per_restore == 4


numbers = st.floats(0.0, 1e9)
forged_commits = st.builds(
    RecordedCommit,
    ref=st.builds(CommitRef, st.integers(0, 10), st.integers(0, 10**12 - 1)),
    kind=st.sampled_from([None, *CheckpointKind]),
    created_wall_s=st.none() | st.floats(0.0, wall.WALL_S_MAX),
    size_bytes=st.integers(0, 2**60),
    bytes_sent=st.integers(0, 2**60),
    nodes=st.just(1),
    is_whole=st.booleans(),
)


@pytest.mark.fault("OA01")
@settings(max_examples=50)
@given(
    found=st.lists(forged, min_size=1, max_size=5),
    commits=st.lists(forged_commits, max_size=5),
    evacuations=st.lists(hostile_evacuations, max_size=5),
    figures=st.dictionaries(st.sampled_from(sorted(PACE)), numbers),
    shard_bytes=st.integers(0, 2**59),
)
def test_a_forged_history_yields_finite_figures(
    found: list[Life],
    commits: list[RecordedCommit],
    evacuations: list[RecordedEvacuation],
    figures: dict[str, float],
    shard_bytes: int,
) -> None:
    """Whatever a bucket writer has written: no exception, and no infinite or negative amount."""
    shard = replace(MANIFEST.shards[0], size_bytes=shard_bytes)
    newest = replace(MANIFEST, nodes=2, pace=figures, shards=(shard,))
    subject = measured._subject(read_of(found, commits, evacuations, newest))
    prices = Prices(spot=1.0, on_demand=3.0, gb_month=0.02, writes=0.005, reads=0.0004)
    advice = advise(subject.job, subject.setup, subject.notices)
    amounts = bill(subject.job, subject.upkeep, prices)
    facts = command.facts(subject, advice, prices, amounts)
    assert "Infinity" not in json.dumps(facts)
    assert "NaN" not in json.dumps(facts)
    assert 0 <= facts["expected_per_day"]["ettr"] <= 1
    assert all(
        amount is None or amount >= 0
        for name, amount in facts["cost_per_day"].items()
        if name != "saved"
    )
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        advise_text.show(subject, advice, prices, amounts)
    assert "Rests on" in shown.getvalue()
