# SPDX-License-Identifier: Apache-2.0
"""The health of each GPU, from readings of NVML and from Xids.  No IO and no clock.

An Xid and a memory error count until the daemon is stopped: no later reading shows that they are over.
Everything else follows the newest reading.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from swansong import bounds
from swansong_bucket.model import GpuFault, GpuHealth, GpuStatus
from swansong_bucket.util.forms import FLAG, Form, Kind, optional, or_else, whole

from swansongd.sources.metadata import shortened
from swansongd.sources.xids import Fault, XidClass, pci_address

GPUS_MAX = 64
"""GPUs in the status; further ones are ignored."""
XIDS_MAX = 10**9
THROTTLED_S = 60.0
"""Throttling counts after this long without a break, and is over after as long without it."""
_TEXT_MAX = 80
_LINE_MAX_BYTES = 256 * 1024

_THROTTLES = {
    0x08: "hardware slowdown",
    0x20: "thermal slowdown by the driver",
    0x40: "thermal slowdown by the hardware",
    0x80: "power brake",
}
"""Bits of NVML's clock event reasons.  Power caps, idle clocks and settings of an operator are no fault."""
_RECOVERIES = {
    1: (GpuHealth.DYING, "the driver advises a reset of the GPU"),
    2: (GpuHealth.DYING, "the driver advises a reboot"),
    3: (GpuHealth.DEGRADED, "the driver advises to drain peer-to-peer work"),
    4: (GpuHealth.DEGRADED, "the driver advises to drain and reset the GPU"),
    6: (GpuHealth.DYING, "the driver advises a reset of the bus"),
    7: (GpuHealth.DYING, "the driver advises a reboot"),
}
_RANK = {health: rank for rank, health in enumerate(GpuHealth)}
_OF_CLASS = {
    XidClass.DEGRADED: GpuHealth.DEGRADED,
    XidClass.DYING: GpuHealth.DYING,
    XidClass.LOST: GpuHealth.LOST,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """The state of one GPU in one reading."""

    index: int
    pci: str
    uuid: str
    name: str
    is_lost: bool = False
    needs_reset: bool = False
    throttle: int = 0
    """Bits of the clock event reasons."""
    uncorrected: int | None = None
    """Uncorrected memory errors since the driver was loaded."""
    remaps: bool = False
    """The GPU contains most memory errors, and replaces bad rows."""
    remap_pending: bool = False
    remap_failed: bool = False
    recovery: int = 0
    """NVML's recovery action."""


def parse_gpus(value: Any) -> tuple[GpuReading, ...]:
    """The readings in one line of the probe.

    Raises:
        BoundsError: a value has the wrong type or is out of range.
    """
    rows = bounds.items(value, "gpus", 1000)
    readings = tuple(_READING.read(row, "a GPU") for row in rows[:GPUS_MAX])
    if len({reading.pci for reading in readings}) != len(readings):
        raise bounds.BoundsError("gpus has the same address twice")
    return readings


def _pci(value: object, name: str) -> str:
    found = pci_address(bounds.text(value, name, _TEXT_MAX))
    if found is None:
        raise bounds.BoundsError(f"pci is {bounds.shown(value)}, not an address on the bus")
    return found


_LABEL = Kind(lambda value, name: shortened(bounds.text(value, name), _TEXT_MAX))
_MAYBE = or_else(FLAG, False)
_COUNT = whole(0, 2**64 - 1)
_READING = Form(
    GpuReading,
    index=whole(0, 10**6),
    pci=Kind(_pci),
    uuid=_LABEL,
    name=_LABEL,
    is_lost=_MAYBE,
    needs_reset=_MAYBE,
    throttle=or_else(_COUNT, 0),
    uncorrected=optional(_COUNT),
    remaps=_MAYBE,
    remap_pending=_MAYBE,
    remap_failed=_MAYBE,
    recovery=or_else(_COUNT, 0),
)


def parse_line(data: bytes) -> dict[str, Any]:
    """One line of the probe.

    Raises:
        BoundsError: it is not a JSON object of that size.
    """
    return bounds.json_object(data, "the probe's line", _LINE_MAX_BYTES)


@dataclass(slots=True)
class _Gpu:
    status: GpuStatus
    faults: dict[str, GpuFault] = field(default_factory=dict)
    """By cause."""
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    """Number of Xids by witness and class."""
    uncorrected: int | None = None
    throttled_mono_s: float | None = None
    """Since when without a break."""
    unthrottled_mono_s: float | None = None
    was_listed: bool = False
    """Whether NVML has listed it."""
    absences: int = 0
    """Readings in a row without it."""


class GpuRecords:
    """The GPUs of this VM.  For one thread.

    Args:
        known: their statuses at the end of the previous life of the daemon, in this boot.
    """

    def __init__(self, known: Sequence[GpuStatus] = ()) -> None:
        self._gpus: dict[str, _Gpu] = {
            status.pci: _Gpu(
                replace(status, xids={}),
                faults={fault.cause: fault for fault in status.faults},
                was_listed=bool(status.uuid),
            )
            for status in known
        }

    @property
    def statuses(self) -> tuple[GpuStatus, ...]:
        """The status of each GPU, in the order of their indexes."""
        gpus = sorted(self._gpus.values(), key=lambda gpu: (gpu.status.index < 0, gpu.status.index))
        return tuple(gpu.status for gpu in gpus)

    def record_readings(self, readings: Sequence[GpuReading], now_mono_s: float) -> None:
        """NVML returned the state of the GPUs.  One that is absent twice in a row is lost."""
        present = {reading.pci for reading in readings}
        for reading in readings:
            self._record(reading, now_mono_s)
        for pci, gpu in self._gpus.items():
            gpu.absences = 0 if pci in present else gpu.absences + 1
            if gpu.was_listed and gpu.absences >= 2:
                text = "NVML does not list it any more"
                self._set(gpu, "lost", GpuHealth.LOST, text, now_mono_s)
            if pci not in present and any(r.index == gpu.status.index for r in readings):
                gpu.status = replace(gpu.status, index=-1)  # another GPU has the index now

    def record_fault(self, fault: Fault, witness: str, now_mono_s: float) -> None:
        """NVML or the kernel log reported a fault.

        Args:
            witness: each fault may have two witnesses; the larger count of both counts.
        """
        gpus = [self._gpus.get(fault.pci)] if fault.pci else list(self._gpus.values())
        for gpu in gpus:
            known = gpu or self._unlisted(fault, now_mono_s)
            if known is not None:
                self._add(known, fault, witness, now_mono_s)

    def _unlisted(self, fault: Fault, now_mono_s: float) -> _Gpu | None:
        """A GPU that NVML does not list: it may have fallen off the bus before."""
        if fault.grade is XidClass.APPLICATION or not fault.pci:
            return None
        return self._gpu(fault.pci, now_mono_s)

    def _gpu(self, pci: str, now_mono_s: float) -> _Gpu | None:
        """The GPU at this address; None if there are too many others."""
        if pci not in self._gpus and len(self._gpus) < GPUS_MAX:
            status = GpuStatus(
                pci=pci, index=-1, health=GpuHealth.OK, reason="", since_mono_s=now_mono_s
            )
            self._gpus[pci] = _Gpu(status)
        return self._gpus.get(pci)

    def _add(self, gpu: _Gpu, fault: Fault, witness: str, now_mono_s: float) -> None:
        grade = XidClass.DYING if fault.grade is XidClass.LOST else fault.grade
        if fault.xid is not None:
            key = (witness, grade.value)
            gpu.counts[key] = min(XIDS_MAX, gpu.counts.get(key, 0) + 1)
            gpu.status = replace(gpu.status, xids=_largest(gpu.counts))
        health = _OF_CLASS.get(fault.grade)
        if health is not None:
            before = gpu.faults.get("xid")
            if before is None or _RANK[health] > _RANK[before.health]:
                self._set(gpu, "xid", health, fault.text, now_mono_s)

    def _record(self, reading: GpuReading, now_mono_s: float) -> None:
        gpu = self._gpu(reading.pci, now_mono_s)
        if gpu is None:
            return
        gpu.was_listed = True
        gpu.status = replace(gpu.status, index=reading.index, uuid=reading.uuid, name=reading.name)
        is_lost = reading.is_lost and "the driver reports that the GPU is lost"
        self._follow(gpu, "lost", GpuHealth.LOST, is_lost or "", now_mono_s)
        needs = "the driver reports that the GPU needs a reset" if reading.needs_reset else ""
        self._follow(gpu, "reset", GpuHealth.DYING, needs, now_mono_s)
        if not (reading.is_lost or reading.needs_reset):  # otherwise the rest is unknown
            self._record_details(gpu, reading, now_mono_s)

    def _record_details(self, gpu: _Gpu, reading: GpuReading, now_mono_s: float) -> None:
        pending = "a memory row waits to be replaced at the next reset"
        failed = "a memory row could not be replaced"
        remap = failed if reading.remap_failed else pending * reading.remap_pending
        self._follow(gpu, "remap", GpuHealth.DEGRADED, remap, now_mono_s)
        health, advice = _RECOVERIES.get(reading.recovery, (GpuHealth.OK, ""))
        self._follow(gpu, "recovery", health, advice, now_mono_s)
        self._record_memory_errors(gpu, reading, now_mono_s)
        self._record_throttling(gpu, reading.throttle, now_mono_s)

    def _record_memory_errors(self, gpu: _Gpu, reading: GpuReading, now_mono_s: float) -> None:
        before, gpu.uncorrected = gpu.uncorrected, reading.uncorrected
        if before is None or reading.uncorrected is None or reading.uncorrected <= before:
            return
        # Without containment each of them is a double-bit error, Xid 48.
        health = GpuHealth.DEGRADED if reading.remaps else GpuHealth.DYING
        text = f"uncorrected memory errors: {reading.uncorrected} since the driver was loaded"
        self._set(gpu, "memory", health, text, now_mono_s)

    def _record_throttling(self, gpu: _Gpu, bits: int, now_mono_s: float) -> None:
        reasons = [text for bit, text in _THROTTLES.items() if bits & bit]
        if reasons:
            gpu.unthrottled_mono_s = None
            if gpu.throttled_mono_s is None:
                gpu.throttled_mono_s = now_mono_s
            if now_mono_s - gpu.throttled_mono_s >= THROTTLED_S and "throttle" not in gpu.faults:
                text = f"throttled for {THROTTLED_S:.0f} s: {', '.join(reasons)}"
                self._set(gpu, "throttle", GpuHealth.DEGRADED, text, now_mono_s)
            return
        if "throttle" not in gpu.faults:
            gpu.throttled_mono_s = None
        elif gpu.unthrottled_mono_s is None:
            gpu.unthrottled_mono_s = now_mono_s
        elif now_mono_s - gpu.unthrottled_mono_s >= THROTTLED_S:
            gpu.throttled_mono_s = gpu.unthrottled_mono_s = None
            self._follow(gpu, "throttle", GpuHealth.DEGRADED, "", now_mono_s)

    def _follow(
        self, gpu: _Gpu, cause: str, health: GpuHealth, text: str, now_mono_s: float
    ) -> None:
        """Set the fault of this cause, or end it without a text."""
        if text:
            self._set(gpu, cause, health, text, now_mono_s)
        elif gpu.faults.pop(cause, None) is not None:
            self._judge(gpu, now_mono_s)

    def _set(self, gpu: _Gpu, cause: str, health: GpuHealth, text: str, now_mono_s: float) -> None:
        before = gpu.faults.get(cause)
        is_known = before is not None and before.health is health
        since = before.since_mono_s if before is not None and is_known else now_mono_s
        gpu.faults[cause] = GpuFault(cause, health, text, since)
        self._judge(gpu, now_mono_s)

    def _judge(self, gpu: _Gpu, now_mono_s: float) -> None:
        """The worst fault counts; of equals, the first one."""
        worst = max(
            gpu.faults.values(),
            key=lambda fault: (_RANK[fault.health], -fault.since_mono_s),
            default=GpuFault("", GpuHealth.OK, "", now_mono_s),
        )
        gpu.status = replace(gpu.status, faults=tuple(gpu.faults.values()))
        if (worst.health, worst.reason) != (gpu.status.health, gpu.status.reason):
            gpu.status = replace(
                gpu.status,
                health=worst.health,
                reason=worst.reason,
                since_mono_s=worst.since_mono_s,
            )


def _largest(counts: Mapping[tuple[str, str], int]) -> dict[str, int]:
    """By class, the larger count of the witnesses."""
    found: dict[str, int] = {}
    for (_, name), count in counts.items():
        found[name] = max(count, found.get(name, 0))
    return found
