# SPDX-License-Identifier: Apache-2.0
"""The health of GPUs from readings and Xids, and the notices that follow."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swansong.bounds import BoundsError
from swansong_bucket.model import GpuHealth, GpuStatus, Severity
from swansongd.core.events import NoticeRaised, NoticeWithdrawn
from swansongd.sources.gpu import AGAIN_S, FAILED_S, GpuNotices
from swansongd.sources.gpu_health import (
    GPUS_MAX,
    THROTTLED_S,
    GpuReading,
    GpuRecords,
    parse_gpus,
)
from swansongd.sources.xids import Fault, XidClass, xid_fault

from testkit.strategies import json_values

PCI = "0000:00:00"
OK, DEGRADED, DYING, LOST = GpuHealth
POWER_CAP, IDLE, THERMAL = 0x04, 0x01, 0x40


def a_reading(index: int = 0, **facts: Any) -> GpuReading:
    facts = {"remaps": True, "uncorrected": 0, "pci": f"0000:{index:02x}:00", **facts}
    return GpuReading(index=index, uuid=f"GPU-{index}", name="H100", **facts)


class Machine:
    """Records with a clock."""

    def __init__(self, *readings: GpuReading) -> None:
        self.records = GpuRecords()
        self.now = 100.0
        if readings:
            self.read(*readings)

    def read(self, *readings: GpuReading, after_s: float = 2.0) -> GpuHealth:
        self.now += after_s
        self.records.record_readings(readings, self.now)
        return self.health

    def xid(self, code: int, pci: str = PCI, witness: str = "NVML") -> GpuHealth:
        self.records.record_fault(xid_fault(code, pci), witness, self.now)
        return self.health

    @property
    def first(self) -> GpuStatus:
        return self.records.statuses[0]

    @property
    def health(self) -> GpuHealth:
        return self.first.health


@pytest.mark.parametrize(
    ("facts", "health"),
    [
        ({}, OK),
        ({"throttle": POWER_CAP | IDLE}, OK),
        ({"remap_pending": True}, DEGRADED),
        ({"remap_failed": True}, DEGRADED),
        ({"recovery": 1}, DYING),
        ({"recovery": 4}, DEGRADED),
        ({"recovery": 5}, OK),
        ({"recovery": 77}, OK),
        ({"needs_reset": True}, DYING),
        ({"is_lost": True}, LOST),
    ],
)
def test_the_state_of_the_newest_reading(facts: dict[str, Any], health: GpuHealth) -> None:
    """It begins with one reading, and ends with the next one."""
    machine = Machine(a_reading())
    assert machine.read(a_reading(**facts)) is health
    assert machine.read(a_reading()) is OK


@pytest.mark.fault("X02", "X06")
def test_throttling_counts_when_it_lasts() -> None:
    """Neither a moment of it nor a moment without it changes the health."""
    machine = Machine(a_reading(throttle=THERMAL))
    assert machine.read(a_reading(throttle=THERMAL), after_s=THROTTLED_S - 1) is OK
    assert machine.read(a_reading()) is OK
    assert machine.read(a_reading(throttle=THERMAL)) is OK
    assert machine.read(a_reading(throttle=THERMAL), after_s=THROTTLED_S) is DEGRADED
    assert "thermal slowdown by the hardware" in machine.first.reason
    assert machine.read(a_reading()) is DEGRADED
    assert machine.read(a_reading(throttle=THERMAL)) is DEGRADED
    assert machine.read(a_reading()) is DEGRADED
    assert machine.read(a_reading(), after_s=THROTTLED_S) is OK


@pytest.mark.parametrize(("remaps", "health"), [(True, DEGRADED), (False, DYING)])
def test_memory_errors_count_when_they_grow(remaps: bool, health: GpuHealth) -> None:
    """Errors from before the first reading do not count; a reload of the driver resets the counter."""
    machine = Machine(a_reading(uncorrected=3, remaps=remaps))
    assert machine.health is OK
    assert machine.read(a_reading(uncorrected=0, remaps=remaps)) is OK
    assert machine.read(a_reading(uncorrected=1, remaps=remaps)) is health
    assert machine.read(a_reading(uncorrected=1, remaps=remaps)) is health


def test_the_worst_fault_counts_and_an_xid_stays() -> None:
    """A later reading without a fault does not show that an Xid is over."""
    machine = Machine(a_reading())
    assert machine.xid(13) is OK
    assert machine.xid(94) is DEGRADED
    since = machine.first.since_mono_s
    assert machine.read(a_reading()) is DEGRADED
    assert machine.first.since_mono_s == since
    assert machine.xid(95) is DYING
    assert machine.xid(63) is DYING
    assert machine.read(a_reading(is_lost=True)) is LOST
    assert machine.read(a_reading()) is DYING
    assert machine.first.reason == "Xid 95, uncontained memory error"


def test_two_witnesses_of_one_xid_count_once() -> None:
    """NVML and the kernel log report the same Xids; one of them may miss some."""
    machine = Machine(a_reading())
    for witness in ("NVML", "kernel log"):
        machine.xid(79, witness=witness)
        machine.xid(13, witness=witness)
    machine.xid(31, witness="kernel log")
    assert machine.first.xids == {"dying": 1, "application": 2}


@pytest.mark.fault("X05")
def test_a_gpu_that_is_not_listed_any_more_is_lost() -> None:
    """After two readings without it; another GPU may have its index then."""
    machine = Machine(a_reading(0), a_reading(1))
    machine.read(a_reading(0, pci="0000:01:00"))
    assert [gpu.health for gpu in machine.records.statuses] == [OK, OK]
    machine.read(a_reading(0, pci="0000:01:00"))
    assert [(gpu.pci, gpu.index, gpu.health) for gpu in machine.records.statuses] == [
        ("0000:01:00", 0, OK),
        ("0000:00:00", -1, LOST),
    ]
    machine.read(a_reading(0), a_reading(1))
    assert [gpu.health for gpu in machine.records.statuses] == [OK, OK]


@pytest.mark.fault("X05")
def test_all_gpus_can_disappear() -> None:
    """A list without any GPU is a valid reading."""
    machine = Machine(a_reading(0))
    machine.read()
    assert machine.read() is LOST


def test_an_xid_of_an_unlisted_gpu_makes_a_row() -> None:
    """It may have fallen off the bus before the daemon started; errors of programs make no row."""
    machine = Machine(a_reading(1))
    machine.xid(13, pci="0000:77:00")
    assert len(machine.records.statuses) == 1
    machine.xid(79, pci="0000:77:00")
    assert machine.records.statuses[-1].index == -1
    assert machine.records.statuses[-1].health is LOST


def test_a_fault_of_the_switch_counts_for_all_gpus() -> None:
    """A fatal error of NVSwitch ends the work of each GPU."""
    machine = Machine(a_reading(0), a_reading(1))
    machine.records.record_fault(Fault(XidClass.DYING, "SXid 20034", None), "kernel log", 1.0)
    assert [gpu.health for gpu in machine.records.statuses] == [DYING, DYING]
    assert machine.first.xids == {}


@pytest.mark.fault("X06")
def test_the_number_of_rows_is_bounded() -> None:
    """A flood of Xids with addresses that no GPU has."""
    machine = Machine(a_reading(0))
    for number in range(1000):
        machine.xid(79, pci=f"{number:04x}:00:00")
    assert len(machine.records.statuses) == GPUS_MAX


# ---------------------------------------------------------------------------- input


def row(**facts: Any) -> dict[str, Any]:
    return {"index": 0, "pci": "00000000:3B:00.0", "uuid": "GPU-1", "name": "H100", **facts}


def test_a_line_of_the_probe() -> None:
    (reading,) = parse_gpus([row(throttle=1, uncorrected=None, remaps=True)])
    assert reading == GpuReading(
        index=0, pci="0000:3b:00", uuid="GPU-1", name="H100", throttle=1, remaps=True
    )


@pytest.mark.fault("X04")
@pytest.mark.parametrize(
    "gpus",
    [
        None,
        {},
        [1],
        [row(index=-1)],
        [row(index=True)],
        [row(pci="nonsense")],
        [row(pci=None)],
        [row(uuid=7)],
        [row(name="x" * 10_000)],
        [row(throttle=-1)],
        [row(throttle=2**70)],
        [row(uncorrected=1.5)],
        [row(is_lost=1)],
        [row(), row(index=1)],
        [row(index=number) for number in range(1001)],
    ],
)
def test_garbage_is_refused(gpus: Any) -> None:
    """Wrong types, ranges and counts, and one address twice."""
    with pytest.raises(BoundsError):
        parse_gpus(gpus)


@pytest.mark.fault("X04")
def test_texts_of_the_library_are_printable_and_short() -> None:
    (reading,) = parse_gpus([row(uuid="\x1b[31mGPU", name="H100\n" + "x" * 500)])
    assert reading.uuid.isprintable()
    assert reading.name.isprintable()
    assert len(reading.name) <= 80


@given(value=st.lists(st.fixed_dictionaries(dict.fromkeys(row(), json_values)), max_size=3))
def test_no_value_raises_anything_else(value: Any) -> None:
    try:
        parse_gpus(json.loads(json.dumps(value)))
    except BoundsError:
        pass


# ---------------------------------------------------------------------------- notices


def a_status(health: GpuHealth, index: int = 0, *, since_mono_s: float = 1.0) -> GpuStatus:
    return GpuStatus(
        pci=f"0000:{index:02x}:00",
        index=index,
        health=health,
        reason="Xid 95",
        since_mono_s=since_mono_s,
    )


def raised(notices: GpuNotices, now: float, *gpus: GpuStatus) -> list[tuple[Severity, str]]:
    """Severity and identity of the notices; a withdrawal has no severity."""
    return [
        (event.notice.severity, event.notice.identity)
        for event in notices.update(gpus, now)
        if isinstance(event, NoticeRaised)
    ]


def withdrawn(notices: GpuNotices, now: float, *gpus: GpuStatus) -> bool:
    return any(isinstance(event, NoticeWithdrawn) for event in notices.update(gpus, now))


@pytest.mark.fault("X02")
def test_a_degraded_gpu_raises_an_advisory_notice() -> None:
    """Once, and it is withdrawn with the fault."""
    notices = GpuNotices()
    assert raised(notices, 0, a_status(OK)) == []
    assert raised(notices, 1, a_status(DEGRADED)) == [(Severity.ADVISORY, "gpu:0000:00:00")]
    assert raised(notices, 2, a_status(DEGRADED)) == []
    assert withdrawn(notices, 3, a_status(OK))
    assert not withdrawn(notices, 4, a_status(OK))


@pytest.mark.fault("X01", "H01")
def test_the_notice_of_an_earlier_life_of_the_daemon_is_withdrawn() -> None:
    """Once, when its evacuation is over and all GPUs are healthy: a failure after that is a new one."""
    notices = GpuNotices()
    assert not withdrawn(notices, 10)
    assert not withdrawn(notices, 10, a_status(OK, since_mono_s=5))
    later = 5 + FAILED_S + 60
    assert not withdrawn(notices, later, a_status(OK, since_mono_s=5), a_status(DYING, 1))
    assert withdrawn(notices, later, a_status(OK, since_mono_s=5))
    assert not withdrawn(notices, later + 1, a_status(OK, since_mono_s=5))


@pytest.mark.fault("X06")
def test_a_flapping_gpu_raises_one_notice_an_hour() -> None:
    """However often its health changes."""
    notices = GpuNotices()
    found = []
    for second in range(0, int(2 * AGAIN_S), 10):
        health = DEGRADED if second % 20 else OK
        found += raised(notices, float(second), a_status(health))
    assert len(found) == 2


@pytest.mark.fault("X01")
@pytest.mark.parametrize("health", [DYING, LOST])
def test_a_failed_gpu_raises_an_imminent_notice_once(health: GpuHealth) -> None:
    """It stays when the GPU is listed again: the evacuation ends by itself."""
    notices = GpuNotices()
    assert raised(notices, 0, a_status(health)) == [(Severity.IMMINENT, "gpu:0000:00:00")]
    for second in range(1, 2000):
        assert raised(notices, float(second), a_status(health if second % 2 else OK)) == []


def test_a_gpu_that_degrades_and_then_fails() -> None:
    """The identity stays, so the notice becomes more severe."""
    notices = GpuNotices()
    (first,) = raised(notices, 0, a_status(DEGRADED))
    (second,) = raised(notices, 1, a_status(DYING))
    assert first[1] == second[1]
    assert second[0] is Severity.IMMINENT


def test_gpus_that_fail_together_cause_one_evacuation() -> None:
    """One that fails after the deadline causes another one."""
    notices = GpuNotices()
    assert len(raised(notices, 0, a_status(LOST, 0), a_status(OK, 1))) == 1
    assert raised(notices, 5, a_status(LOST, 0), a_status(LOST, 1)) == []
    later = FAILED_S + 60
    gpus = a_status(LOST, 0), a_status(LOST, 1), a_status(DYING, 2, since_mono_s=later)
    assert raised(notices, later, *gpus) == [(Severity.IMMINENT, "gpu:0000:02:00")]


def test_after_a_restart_only_a_recent_failure_raises_a_notice() -> None:
    """An earlier life of the daemon has answered an older one."""
    recent, old = FAILED_S - 1, FAILED_S + 1
    assert raised(GpuNotices(), recent, a_status(LOST)) == [(Severity.IMMINENT, "gpu:0000:00:00")]
    assert raised(GpuNotices(), old, a_status(LOST)) == []


def test_a_degraded_gpu_does_not_replace_a_failed_one() -> None:
    """Neither the withdrawal nor the notice of another GPU ends the evacuation."""
    notices = GpuNotices()
    raised(notices, 0, a_status(DYING, 0))
    assert raised(notices, 1, a_status(DYING, 0), a_status(DEGRADED, 1)) == []
    assert not withdrawn(notices, 2, a_status(OK, 0), a_status(OK, 1))
