# SPDX-License-Identifier: Apache-2.0
"""The exporter reads buckets: each object once, whatever the bucket contains."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs
from swansong_bucket.errors import Permanent, Transient
from swansong_bucket.format import wall
from swansong_bucket.model import CheckpointKind, CommitRef
from swansong_bucket.runs import catalog, history, pins
from swansong_bucket.runs import run as runs
from swansong_bucket.runs.lives import lives_of
from swansong_bucket.runs.pins import Pin
from swansong_bucket.runs.run import Run
from swansong_bucket.runs.signing import signed
from swansong_tools.economics.cost import Prices
from swansong_tools.economics.loss import loss
from swansong_tools.exporter import readings, run_figures
from swansong_tools.exporter.own_health import ReadHealth, ReadOnly, StoreReading
from swansong_tools.exporter.readings import StoreReader
from swansong_tools.exporter.run_metrics import ExporterCollector
from swansongd.observe.exposition import registry_of

from testkit import committed
from testkit.lost_vms import BEGUN_S, KEYS, a_run, claim, farewell
from testkit.memory_store import MemoryStore
from testkit.records import KEY, record_of

Metrics = dict[tuple[str, tuple[str, ...]], float]


class Rig:
    """An exporter of one memory store, with its own clock."""

    def __init__(self, store: MemoryStore, **source: Any) -> None:
        self.store = store
        self.now_s = 0.0
        self.health = ReadHealth(store.url)
        mirror, stop = source.pop("mirror", None), threading.Event()
        self.mirror_health = None if mirror is None else ReadHealth(mirror.url)
        self.reader = StoreReader(
            ReadOnly(source.pop("view", store), self.health, stop),
            self.mirror_health and ReadOnly(mirror, self.mirror_health, stop),
            interval_s=60.0,
            stop=stop,
            monotonic=lambda: self.now_s,
            wall=lambda: BEGUN_S + 5000 + self.now_s,
            **{"runs_max": 10, "prices": None, **source},
        )

    def read(self, *, after_s: float = 3600.0) -> bool:
        """One reading, after all runs are due."""
        self.now_s += after_s
        del self.store.requests[:]
        return self.reader.read()

    @property
    def requests(self) -> dict[str, int]:
        """Requests of the last reading."""
        return {what: self.store.count(what) for what in ("folders", "list", "get", "head")}

    def metrics(self) -> Metrics:
        """The samples by name and labels, without the store."""
        healths = [each for each in (self.health, self.mirror_health) if each is not None]
        collector = ExporterCollector([self.reader], healths, wall=lambda: BEGUN_S + 9000)
        text = generate_latest(registry_of(collector)).decode()
        return {
            (sample.name, labels_of(sample.labels)): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.labels.get("store") != "memory://mirror"
        }


@pytest.fixture
def store() -> MemoryStore:
    """A run with three VMs; records and commits are older than an idle run."""
    found = MemoryStore()
    a_run(found)
    return found


def labels_of(labels: dict[str, str]) -> tuple[str, ...]:
    """The values without the store: the run first, then by name of the label except for the currency."""
    order = ("run", "part", "currency", "kind", "verdict", "drill", "vm", "operation", "version")
    return tuple(labels[name] for name in order if name in labels)


def metrics_of(store: MemoryStore, **source: Any) -> Metrics:
    """The samples of a new exporter after its first reading."""
    rig = Rig(store, **source)
    assert rig.read()
    return rig.metrics()


def delete(store: MemoryStore, *prefixes: str) -> None:
    for key in [key for key in store.objects if key.startswith(prefixes)]:
        del store.objects[key]


def a_mirror() -> MemoryStore:
    mirror = MemoryStore()
    mirror.url = "memory://mirror"
    return mirror


def counters(metrics: Metrics) -> Metrics:
    return {
        sample: value
        for sample, value in metrics.items()
        if sample[0].startswith("swansong_run_") and sample[0].endswith("_total")
    }


def test_the_figures_of_a_run(store: MemoryStore) -> None:
    """Commits, verdicts, loss and pins, the loss as swansong loss has it."""
    committed.commit(store, {"a": b"1" * 50}, generation=3, step=500)
    committed.commit(store, {"a": b"1" * 9}, generation=3, step=510, kind=CheckpointKind.EMERGENCY)
    committed.commit(store, {"a": b"1"}, generation=3, step=520, node=1, nodes=2)
    pins.create(store, KEYS, Pin(run="r", name="best", ref=CommitRef(3, 500)))
    found = metrics_of(store)
    wanted = {
        ("swansong_run_generation", ("r",)): 3,
        ("swansong_run_finished", ("r",)): 0,
        ("swansong_run_last_commit_step", ("r",)): 510,
        ("swansong_run_last_commit_generation", ("r",)): 3,
        ("swansong_run_last_commit_size_bytes", ("r",)): 9,
        ("swansong_run_last_commit_timestamp_seconds", ("r",)): 1_893_456_000,
        ("swansong_run_commits", ("r", "periodic")): 2,
        ("swansong_run_commits", ("r", "emergency")): 1,
        ("swansong_run_commits_size_bytes", ("r", "periodic")): 51,
        ("swansong_run_incomplete_commits", ("r",)): 1,
        ("swansong_run_pins", ("r",)): 1,
        ("swansong_run_evacuations_total", ("r", "SAFE", "no")): 1,
        ("swansong_run_evacuations_total", ("r", "LOST", "yes")): 0,
        ("swansong_run_interruptions_total", ("r", "new")): 2,
        ("swansong_run_foreign_objects", ("r",)): 0,
        ("swansong_exporter_store_up", ()): 1,
        ("swansong_exporter_runs", ()): 1,
    }
    assert {sample: found[sample] for sample in wanted} == wanted
    total = loss(lives_of(Run.listed(store, KEYS)).lives)
    assert total is not None
    parts = {s[1][1]: v for s, v in found.items() if s[0].endswith("gpu_seconds_total")}
    assert sum(parts.values()) == pytest.approx(total.lost_gpu_s)
    assert found["swansong_run_ettr_ratio", ("r",)] == pytest.approx(total.ettr)
    assert found["swansong_run_productive_gpu_seconds", ("r",)] == total.productive_gpu_s
    assert total.productive_gpu_s == pytest.approx(8 * total.productive_s)


def test_a_finished_run_and_costs(store: MemoryStore) -> None:
    """The end of the run is a commit of its own kind; prices add costs in their currency."""
    committed.commit(store, {"a": b"1"}, generation=3, step=600, kind=CheckpointKind.FINAL)
    found = metrics_of(store, prices=Prices(spot=3.6, currency="EUR"))
    assert found["swansong_run_finished", ("r",)] == 1
    gpu_s = found["swansong_run_gpu_seconds", ("r",)]
    assert 0 < found["swansong_run_cost", ("r", "interruptions", "EUR")] < gpu_s / 1000
    assert ("swansong_run_cost", ("r", "on_demand", "EUR")) not in found


def test_a_second_reading_reads_no_object_again(store: MemoryStore) -> None:
    """It costs the search for runs and two listings; one new object costs one request more."""
    for step in range(500, 540):
        committed.commit(store, {"a": b"1"}, generation=3, step=step)
    rig = Rig(store)
    assert rig.read()
    assert rig.requests["get"] == 41 + 3 + 2  # manifests, resumptions, farewells
    assert rig.requests["folders"] == 1
    first = rig.metrics()
    assert rig.read()
    assert (rig.requests["get"], rig.requests["head"], rig.requests["folders"]) == (0, 0, 1)
    assert {key for what, key in store.requests if what == "list"} == {"r/commits/", "r/"}
    changed = {sample for sample, value in rig.metrics().items() if value != first[sample]}
    assert {name.split("_")[1] for name, _ in changed} == {"exporter"}
    committed.commit(store, {"a": b"1"}, generation=3, step=999)
    assert rig.read()
    assert rig.requests["get"] == 1
    assert rig.metrics()["swansong_run_last_commit_step", ("r",)] == 999


def test_data_is_never_listed(store: MemoryStore) -> None:
    """The listing of the records begins after the data, for any number of objects."""
    for number in range(300):
        store.objects[f"r/data/00000001/x/{number:05d}/file"] = b""
    rig = Rig(store)
    assert rig.read()
    assert rig.requests["list"] < 10


@pytest.mark.fault("OX01")
def test_counters_survive_a_restart_and_prune(store: MemoryStore) -> None:
    """A new exporter has the same counters, and deleted commits change none."""
    rig = Rig(store)
    assert rig.read()
    before = counters(rig.metrics())
    assert sum(before.values()) > 0
    assert counters(metrics_of(store)) == before
    delete(store, "r/commits/", "r/data/")
    assert rig.read()
    assert counters(rig.metrics()) == counters(metrics_of(store)) == before
    assert rig.metrics()["swansong_run_commits", ("r", "periodic")] == 0
    assert ("swansong_run_last_commit_step", ("r",)) not in rig.metrics()


def test_an_exporter_that_runs_and_a_new_one_agree(store: MemoryStore) -> None:
    """The bucket is the source, also after a record was deleted and after another farewell."""
    rig = Rig(store)
    assert rig.read()
    del store.objects[KEYS.resumption(3)]
    assert rig.read()
    assert counters(rig.metrics()) == counters(metrics_of(store))
    assert rig.metrics()["swansong_run_interruptions_total", ("r", "new")] == 1
    wall_s = "swansong_run_wall_seconds", ("r",)
    before_s = rig.metrics()[wall_s]
    farewell(store, 3, 400, BEGUN_S + 3000, over=True, stamp="late")
    assert rig.read()
    assert before_s < rig.metrics()[wall_s] == metrics_of(store)[wall_s]


# ---------------------------------------------------------------- failures


def failing(prefix: str, error: Callable[[], Exception]) -> Callable[[str, str], None]:
    def before(what: str, key: str) -> None:
        if key.startswith(prefix):
            raise error()

    return before


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swansong_tools.exporter.own_health._CALL_BUDGET_S", 0.05)


@pytest.mark.fault("OX02")
@pytest.mark.usefixtures("_impatient")
def test_an_outage_leaves_the_old_figures(store: MemoryStore) -> None:
    """The store is down, its last success stays, and errors are counted; then it recovers."""
    rig = Rig(store)
    assert rig.read()
    before = rig.metrics()
    store.before = failing("", lambda: Transient("down"))
    committed_at = before["swansong_exporter_store_last_success_timestamp_seconds", ()]
    assert not rig.read()
    during = rig.metrics()
    assert during["swansong_exporter_store_up", ()] == 0
    assert during["swansong_exporter_store_last_success_timestamp_seconds", ()] == committed_at
    assert during["swansong_exporter_errors_total", ("transient",)] > 0
    runs = {s: v for s, v in before.items() if s[0].startswith("swansong_run_")}
    assert {sample: during[sample] for sample in runs} == runs
    store.before = lambda *_: None
    assert rig.read()
    assert rig.metrics()["swansong_exporter_store_up", ()] == 1


@pytest.mark.fault("OX02")
def test_a_refused_run_hides_no_other_run(store: MemoryStore) -> None:
    """The other runs have figures; the refused one counts as failing and is not asked each minute."""
    committed.commit(store, {"a": b"1"}, run="other")
    store.before = failing("other/", lambda: Permanent("no right"))
    rig = Rig(store)
    assert not rig.read()
    found = rig.metrics()
    assert found["swansong_run_generation", ("r",)] == 3
    assert ("swansong_run_generation", ("other",)) not in found
    assert found["swansong_exporter_runs_failing", ()] == 1
    assert found["swansong_exporter_store_up", ()] == 1
    assert not rig.read(after_s=60.0)
    assert "other/commits/" not in {key for _, key in store.requests}
    store.before = lambda *_: None
    assert rig.read(after_s=readings.REFUSED_S)
    assert rig.metrics()["swansong_run_last_commit_step", ("other",)] == 100


@pytest.mark.fault("OX02")
def test_a_store_that_refuses_all_runs_is_down(store: MemoryStore) -> None:
    rig = Rig(store, runs=("r",))
    store.before = failing("r/", lambda: Permanent("no right"))
    assert not rig.read()
    assert rig.metrics()["swansong_exporter_store_up", ()] == 0


@pytest.mark.fault("OX02")
def test_a_first_reading_with_a_fault_of_ours_shows_the_store_down(store: MemoryStore) -> None:
    """An alert on store_up needs a sample, also if no reading has ended without an unexpected error."""
    rig = Rig(store)
    store.before = failing("", lambda: ZeroDivisionError("a fault"))
    with capture_logs():
        assert not rig.read()
    found = rig.metrics()
    assert found["swansong_exporter_store_up", ()] == 0
    assert found["swansong_exporter_errors_total", ("unexpected",)] == 1


@pytest.mark.fault("OX02")
def test_a_fault_while_the_mirror_is_read_shows_the_mirror_down(store: MemoryStore) -> None:
    """The figures of the run stay, and the store is up."""
    mirror = a_mirror()
    mirror.before = failing("", lambda: ZeroDivisionError("a fault"))
    rig = Rig(store, mirror=mirror)
    with capture_logs():
        assert not rig.read()
    assert rig.metrics()["swansong_exporter_store_up", ()] == 1
    assert rig.metrics()["swansong_run_generation", ("r",)] == 3
    assert rig.mirror_health is not None
    assert rig.mirror_health.is_up is False


def test_a_mirror_that_is_also_a_store_keeps_its_own_counts() -> None:
    """Each role has its last reading; the store is up if both succeeded."""
    health = ReadHealth("memory://b")
    health.read(
        StoreReading(is_up=True, took_s=1.0, runs=3, failing=2, left_out=1),
        by="memory://b",
        now_wall_s=1.0,
    )
    for is_up in (True, False, True):
        health.read(StoreReading(is_up=is_up, took_s=1.0), by="memory://a", now_wall_s=2.0)
        found = {each.name: each.samples for each in ExporterCollector([], [health]).collect()}
        runs = ("runs", "runs_failing", "runs_left_out")
        counts = [found[f"swansong_exporter_{name}"][0].value for name in runs]
        assert counts == [3, 2, 1]
        assert health.is_up is is_up


@pytest.mark.fault("OX02")
@pytest.mark.usefixtures("_impatient")
def test_a_mirror_that_fails_leaves_the_lag(store: MemoryStore) -> None:
    """The lag is that of the last reading of the mirror, and the store is up."""
    mirror = a_mirror()
    for key in [key for key in store.objects if key.startswith(("r/commits/", "r/generations/"))]:
        mirror.objects[key] = store.objects[key]
    rig = Rig(store, mirror=mirror)
    assert rig.read()
    assert rig.metrics()["swansong_run_mirror_lag_commits", ("r",)] == 0
    assert rig.metrics()["swansong_run_mirror_lag_seconds", ("r",)] == 0
    committed.commit(store, {"a": b"1"}, generation=3, step=500)
    assert rig.read()
    assert rig.metrics()["swansong_run_mirror_lag_commits", ("r",)] == 1
    mirror.before = failing("", lambda: Transient("down"))
    assert not rig.read()
    assert rig.metrics()["swansong_run_mirror_lag_commits", ("r",)] == 1
    assert rig.metrics()["swansong_exporter_store_up", ()] == 1
    assert rig.mirror_health is not None
    assert not rig.mirror_health.is_up


def test_the_exporter_cannot_write(store: MemoryStore) -> None:
    """A call that is no read is refused before it reaches the store."""
    rig = Rig(store)
    for call in (
        lambda: rig.reader.store.put("r/x", b""),
        lambda: rig.reader.store.delete("r/generations/00000001.json"),
    ):
        with pytest.raises(AssertionError, match="only reads"):
            call()


# ---------------------------------------------------------------- hostile buckets


@pytest.mark.fault("OX03")
def test_damaged_objects_are_counted_and_read_once(store: MemoryStore) -> None:
    """Manifests, farewells and resumptions that are not valid change nothing else."""
    good = counters(metrics_of(store))
    store.objects[KEYS.commit(CommitRef(3, 700), 0, 1)] = b"{}"
    replayed = store.objects[KEYS.farewell(1, "t2")]
    damaged = b"", b"[]", b"\xff", b'{"verdict": "SAFE"}', b"[" * 100_000, b" " * (2**20 + 1)
    for number, data in enumerate((*damaged, replayed)):
        store.objects[KEYS.farewell(2, f"d{number}")] = data
    store.objects[KEYS.resumption(8)] = store.objects[KEYS.resumption(3)]
    rig = Rig(store)
    with capture_logs() as logs:
        assert rig.read()
    named = [line["key"] for line in logs if line["event"] == "damaged_object"]
    assert len(named) == len(set(named)) == 9
    found = rig.metrics()
    assert counters(found) == good
    assert found["swansong_run_damaged_objects", ("r", "commit")] == 1
    assert found["swansong_run_damaged_objects", ("r", "farewell")] == 7
    assert found["swansong_run_damaged_objects", ("r", "resumption")] == 1
    assert found["swansong_run_last_commit_step", ("r",)] == 140
    assert rig.read(after_s=60.0)
    assert rig.requests["get"] == 0
    assert rig.read(after_s=runs.AGAIN_AFTER_S)
    assert 0 < rig.requests["get"] < 10


def lost(store: MemoryStore, stamp: str, *, evacuation: str = "e9", **fields: object) -> None:
    """A farewell LOST of the second VM, written 500 s after the start of the run."""
    farewell(store, 2, 160, BEGUN_S + 500, over=False, stamp=stamp)
    key = KEYS.farewell(2, stamp)
    body = json.loads(store.objects[key]) | {"evacuation": evacuation, "verdict": "LOST"}
    store.objects[key] = record_of(body | fields)


@pytest.mark.fault("OX03")
@pytest.mark.parametrize("evacuation", ["e9", "other"])
def test_a_forged_farewell_of_the_future_hides_no_lost_evacuation(
    store: MemoryStore, evacuation: str
) -> None:
    """It is not valid, and the genuine one counts with its own time, also in the same evacuation."""
    lost(store, "t1")
    lost(store, "t2", evacuation=evacuation, written="2099-01-01T00:00:00Z")
    lost(store, "t3", evacuation=evacuation, written="2099-01-01T00:00:00Z", verdict="SAFE")
    found = metrics_of(store)
    name = "swansong_run_last_evacuation_timestamp_seconds"
    assert found[name, ("r", "LOST", "no")] == BEGUN_S + 500
    assert found["swansong_run_evacuations_total", ("r", "LOST", "no")] == 1
    assert found["swansong_run_damaged_objects", ("r", "farewell")] == 2


def test_a_drill_over_several_vms_is_a_drill(store: MemoryStore) -> None:
    """The other VMs answer the request of the VM with the drill, and know only its id."""
    answered = (
        *(("drill-0123", "drill"), ("drill-0123", "peer")),
        *(("4567", "aws.spot"), ("4567", "peer"), ("drill-89ab", "aws.spot")),
    )
    for number, (evacuation, source) in enumerate(answered):
        notices = [{"source": source, "kind": "any"}]
        lost(store, f"t{number}", evacuation=evacuation, notices=notices)
    found = metrics_of(store)
    assert found["swansong_run_evacuations_total", ("r", "LOST", "yes")] == 1
    assert found["swansong_run_evacuations_total", ("r", "LOST", "no")] == 2


def test_a_commit_is_as_old_as_its_last_manifest(store: MemoryStore) -> None:
    """It became whole then, for the exporter and for the report."""
    for node, created in enumerate(("2027-02-01T00:00:00Z", "2027-02-01T00:01:00Z")):
        committed.commit(
            store, {"a": b"1"}, generation=3, step=800, node=node, nodes=2, created=created
        )
    newest = history.commits(Run.listed(store, KEYS)).newest_whole
    assert newest is not None
    created_s = wall.required_s("2027-02-01T00:01:00Z", "created")
    assert newest.created_wall_s == created_s
    assert metrics_of(store)["swansong_run_last_commit_timestamp_seconds", ("r",)] == created_s


@pytest.mark.fault("OX03")
def test_foreign_keys_are_counted(store: MemoryStore) -> None:
    """A reader of commits would fail on them; the exporter shows them."""
    for key in ("commits/x", "generations/new", "farewells/-", "zzz", "resumptions/1"):
        store.objects[f"r/{key}"] = b"1"
    store.objects["r/commits/"] = b""  # a console shows a folder
    store.objects["r/probes/doctor-1/generations/00000001.json"] = b"1"
    found = metrics_of(store)
    assert found["swansong_run_foreign_objects", ("r",)] == 5
    assert found["swansong_run_generation", ("r",)] == 3


@pytest.mark.fault("OX03")
def test_folders_that_are_no_runs_have_no_figures(store: MemoryStore) -> None:
    """Names that no run can have are not even listed, and no label ever has one."""
    for name in ('a"b\n', "é", "-x", "x" * 101, "datasets", ""):
        store.objects[f"{name}/file"] = b"1"
    store.objects["file"] = b"1"
    rig = Rig(store)
    assert rig.read()
    assert {key for what, key in store.requests if what == "list"} == {
        "datasets/commits/",
        "datasets/",
        "r/commits/",
        "r/",
    }
    assert {labels[0] for name, labels in rig.metrics() if name == "swansong_run_pins"} == {"r"}
    assert rig.read(after_s=120.0)
    assert not [key for _, key in store.requests if key.startswith("datasets")]


@pytest.mark.fault("OX03")
def test_the_number_of_runs_is_limited() -> None:
    """Known runs stay when others come; the others are counted, and a free place is used."""
    store = MemoryStore()
    for name in ("b", "c", "d"):
        committed.commit(store, {"a": b"1"}, run=name)
    rig = Rig(store, runs_max=3)
    assert rig.read()
    for name in ("a", "e"):
        committed.commit(store, {"a": b"1"}, run=name)
    assert rig.read()
    assert {each.run for each in rig.reader.figures()} == {"b", "c", "d"}
    assert rig.metrics()["swansong_exporter_runs_left_out", ()] == 2
    delete(store, "c/")
    assert rig.read()
    assert len(rig.reader.figures()) == 3
    assert rig.metrics()["swansong_exporter_runs_left_out", ()] == 1


@pytest.mark.fault("OX03")
def test_a_run_with_too_many_keys_is_not_read(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listing ends at the limit; other runs are read."""
    monkeypatch.setattr(catalog, "LISTED_MAX", 50)
    for number in range(60):
        store.objects[f"huge/generations/{number:08d}.json"] = b""
    rig = Rig(store)
    assert not rig.read()
    assert {each.run for each in rig.reader.figures()} == {"r"}
    assert rig.metrics()["swansong_exporter_runs_failing", ()] == 1


@pytest.mark.fault("OX03")
def test_too_many_records_leave_the_oldest(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A counter never falls because of new records."""
    good = counters(metrics_of(store))
    monkeypatch.setattr(run_figures, "RECORDS_MAX", 3)
    for number in range(10):
        farewell(store, 3, 160, BEGUN_S + 1200 + number, over=False, stamp=f"x{number}")
        committed.commit(store, {"a": b"1"}, generation=3, step=200 + number)
    found = metrics_of(store)
    assert all(counters(found)[sample] >= value for sample, value in good.items())
    # The farewells of the first VM, and one of the third.
    assert found["swansong_run_evacuations_total", ("r", "SAFE", "no")] == 2
    assert found["swansong_run_left_out_objects", ("r", "farewell")] == 9
    assert found["swansong_run_left_out_objects", ("r", "commit")] == 8
    assert found["swansong_run_last_commit_step", ("r",)] == 209


@pytest.mark.fault("OX03")
def test_too_many_folders_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readings, "FOLDERS_MAX", 20)
    store = MemoryStore()
    for number in range(100):
        store.objects[f"f{number:03d}/x"] = b""
    rig = Rig(store)
    assert rig.read()
    assert rig.requests["list"] <= 40


@pytest.mark.fault("OX03")
def test_with_a_key_only_signed_objects_count(store: MemoryStore) -> None:
    """Planted claims, resumptions and manifests change no figure; they are counted, and cost no request.

    Neither do copies of signed records under the names of another generation.
    """
    honest = MemoryStore()
    view = signed(honest, KEY)
    for key, data in store.objects.items():
        view.put(key, data)
    rig = Rig(honest, view=view)
    assert rig.read()
    before = rig.metrics()
    assert before["swansong_run_generation", ("r",)] > 0
    replayed = {
        re.sub(r"/0000000\d", "/00000077", key): data
        for key, data in honest.objects.items()
        if "/data/" not in key
    }
    honest.objects = replayed | honest.objects
    for number in range(2_000):
        honest.objects[KEYS.farewell(99_999_999, f"junk{number}")] = b"{}"
    honest.objects |= {key: data for key, data in store.objects.items() if "/data/" not in key}
    assert rig.read()
    assert rig.requests["get"] == 0
    after = rig.metrics()
    foreign = "swansong_run_foreign_objects", ("r",)
    assert after[foreign] > 2_000
    kept = {name for name in before if name != foreign and name[0].startswith("swansong_run_")}
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}


# ---------------------------------------------------------------- schedule


def test_an_idle_run_is_read_less_often(store: MemoryStore) -> None:
    """An hour after its newest object a run waits a minute more, and never longer than half an hour."""
    age_s = 0.0
    store.clock = lambda: 10_000_000.0
    for key in store.objects:
        store.written_unix_s[key] = 10_000_000.0

    def is_read(after_s: float) -> bool:
        rig.read(after_s=after_s)
        return rig.requests["list"] > 0

    rig = Rig(store)
    assert is_read(0.0)
    assert is_read(60.0)
    age_s = 7200.0
    store.clock = lambda: 10_000_000.0 + age_s
    assert is_read(60.0)
    assert not is_read(60.0)
    assert is_read(60.0)
    age_s = 1e6
    assert is_read(120.0)
    assert not is_read(1750.0)
    assert is_read(50.0)


def test_a_named_run_may_begin_later(store: MemoryStore) -> None:
    """It is looked for at each reading; another folder is examined every ten minutes."""
    rig, other = Rig(store, runs=("new",)), Rig(store)
    store.objects["new/probes/doctor-1/x"] = b"1"
    assert rig.read()
    assert other.read()
    committed.commit(store, {"a": b"1"}, run="new")
    assert rig.read(after_s=60.0)
    assert [each.run for each in rig.reader.figures()] == ["new"]
    assert other.read(after_s=60.0)
    assert [each.run for each in other.reader.figures()] == ["r"]
    assert other.read(after_s=readings.FOLDER_S)
    assert {each.run for each in other.reader.figures()} == {"r", "new"}


def test_a_claim_alone_is_a_run() -> None:
    """A run that has not committed yet is visible."""
    store = MemoryStore()
    claim(store, 1, BEGUN_S)
    found = metrics_of(store)
    assert found["swansong_run_generation", ("r",)] == 1
    assert found["swansong_run_commits", ("r", "periodic")] == 0
