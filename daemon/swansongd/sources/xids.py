# SPDX-License-Identifier: Apache-2.0
"""Xid messages of the NVIDIA driver: their meaning for training, and their forms in the kernel log.

The meanings follow NVIDIA's catalogue (https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html).
docs/operations/gpu-health.md lists the same codes.  A message contains the name of a process, which any user
can choose: only the beginning of a message is parsed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

RECORD_MAX_BYTES = 16 * 1024
"""Longer than any record of the kernel log."""
_TEXT_MAX = 1024
"""Everything that is parsed is in the first characters of a message."""


class XidClass(StrEnum):
    """The meaning of an Xid for the plan."""

    APPLICATION = "application"
    """An error of a program, or information: no action."""
    DEGRADED = "degraded"
    """The state on the GPU is right, and the GPU may fail: a precautionary checkpoint."""
    DYING = "dying"
    """The state on the GPU may be wrong or out of reach: no checkpoint is requested."""
    LOST = "lost"
    """The GPU has fallen off the bus: no checkpoint is requested."""


@dataclass(frozen=True, slots=True)
class XidRow:
    """Xids with one meaning."""

    codes: tuple[int, ...]
    meaning: str
    grade: XidClass


_APP, _DEGRADED, _DYING = XidClass.APPLICATION, XidClass.DEGRADED, XidClass.DYING
_COPY_ENGINES = (39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136))
_VIDEO = (60, 68, 82, 83, 84, 86, 88, 89, *range(96, 106), 139, 142)

XIDS = (
    XidRow((8,), "the GPU stopped processing a channel", _APP),
    XidRow((11, 25, 32, 80), "invalid or corrupted push buffer", _APP),
    XidRow((13,), "exception of the graphics engine", _APP),
    XidRow((14, 93, 121, 137, 141, 152, 153), "an error that NVIDIA says to ignore", _APP),
    XidRow((31,), "memory page fault", _APP),
    XidRow((37, 38, 66, 67), "error of the driver's firmware, or an illegal access by it", _APP),
    XidRow(_COPY_ENGINES, "exception of a copy engine", _APP),
    XidRow((43,), "a channel was reset", _APP),
    XidRow((44,), "fault during a context switch", _APP),
    XidRow((45,), "cleanup after an earlier error", _APP),
    XidRow((46,), "the GPU stopped processing", _DYING),
    XidRow((48,), "double-bit memory error", _DYING),
    XidRow((54,), "auxiliary power is not connected", _DEGRADED),
    XidRow(_VIDEO, "exception of a video or image engine", _APP),
    XidRow((62,), "a micro-controller of the GPU halted", _DYING),
    XidRow((63,), "a memory row or page was retired", _DEGRADED),
    XidRow((64,), "a memory row or page could not be retired", _DEGRADED),
    XidRow((69,), "class error of the graphics engine", _APP),
    XidRow((74,), "NVLink error", _DEGRADED),
    XidRow((79,), "the GPU has fallen off the bus", XidClass.LOST),
    XidRow((92,), "high rate of single-bit memory errors", _DEGRADED),
    XidRow((94,), "contained memory error", _DEGRADED),
    XidRow((95,), "uncontained memory error", _DYING),
    XidRow((106, 107), "test message", _APP),
    XidRow((109,), "timeout of a context switch", _DYING),
    XidRow((110,), "security fault", _DYING),
    XidRow((119,), "timeout of the GPU's system processor (GSP)", _DYING),
    XidRow((120,), "error of the GPU's system processor (GSP)", _DYING),
    XidRow((136, 155), "an NVLink could not be trained", _DEGRADED),
    XidRow((140,), "memory error that was not recovered", _DYING),
    XidRow((143,), "the GPU could not be initialised", _DYING),
    XidRow(tuple(range(144, 151)), "NVLink 5 error", _DEGRADED),
    XidRow((154,), "another recovery action is advised, after another Xid", _APP),
    XidRow((156, 157), "a resource of the GPU was retired, or could not be", _DEGRADED),
    XidRow((158,), "fatal timeout of the GPU", _DYING),
    XidRow((160, 161), "a memory channel was retired, or could not be", _DEGRADED),
    XidRow((162, 163, 164, 165), "the power-smoothing circuit changed its state", _APP),
    XidRow((167,), "fatal timeout on the bus", _DYING),
    XidRow((171, 172), "details of a double-bit memory error, which is Xid 48", _APP),
)
UNLISTED = XidClass.DEGRADED
"""An Xid without a row: new ones are mostly faults of the hardware, and a precaution costs little."""
_ROWS = {code: row for row in XIDS for code in row.codes}


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a GPU, or of all GPUs."""

    grade: XidClass
    text: str
    """Without any text of the message."""
    pci: str | None
    """Address of the GPU; None for all of them."""
    xid: int | None = None


def xid_fault(code: int, pci: str) -> Fault:
    """The fault that an Xid reports."""
    row = _ROWS.get(code)
    grade, meaning = (
        (row.grade, row.meaning) if row else (UNLISTED, "an Xid without a known meaning")
    )
    return Fault(grade, f"Xid {code}, {meaning}", pci, code)


_ADDRESS = (
    r"(?:PCI:)?(?:(?P<domain>[0-9a-fA-F]{1,8}):)?"
    r"(?P<bus>[0-9a-fA-F]{1,4}):(?P<device>[0-9a-fA-F]{1,2})(?:\.[0-7])?"
)
_ADDRESS_ALONE = re.compile(_ADDRESS)
_XID = re.compile(rf"NVRM: Xid \({_ADDRESS}(?: GPU-C?I:\d{{1,3}}){{0,2}}\): (?P<xid>\d{{1,5}}),")
_OFF_THE_BUS = re.compile(rf"NVRM: GPU (?:at )?{_ADDRESS}: GPU has fallen off the bus")
_OFF_AT_PROBE = re.compile(
    rf"NVRM: The NVIDIA GPU {_ADDRESS}\s+(?:NVRM: )?\(PCI ID: [0-9a-fA-F:]{{1,16}}\) installed in this "
    r"system has\s+(?:NVRM: )?fallen off the bus"
)
_SXID = re.compile(
    r"nvidia-nvswitch(?P<switch>\d{1,3}): SXid \([^()]{1,40}\): (?P<sxid>\d{1,6}), Fatal\b"
)
_ESCAPED = re.compile(r"\\x([0-9a-f]{2})")


def pci_address(text: str) -> str | None:
    """The address in the form ``0000:3b:00``, without the function; None for any other text."""
    match = _ADDRESS_ALONE.fullmatch(text)
    return None if match is None else _address_of(match)


def _address_of(match: re.Match[str]) -> str:
    domain, bus, device = (int(match[name] or "0", 16) for name in ("domain", "bus", "device"))
    return f"{domain:04x}:{bus:02x}:{device:02x}"


def record_number(record: bytes) -> int | None:
    """The number of a record of ``/dev/kmsg``, which grows by one for each record of this boot."""
    fields = record[:_TEXT_MAX].split(b";", 1)[0].split(b",")
    if len(fields) < 3 or not fields[1].isdigit() or len(fields[1]) > 19:
        return None
    return int(fields[1])


def parse_record(record: bytes) -> Fault | None:
    """The fault in one record of ``/dev/kmsg``; None for any other record.

    Records that programs have written have another facility than the kernel's: they do not count.
    """
    head, separator, body = record.partition(b";")
    priority = head.split(b",", 1)[0]
    if not separator or not priority.isdigit() or len(priority) > 4 or int(priority) >= 8:
        return None
    line = body.split(b"\n", 1)[0][:_TEXT_MAX].decode("utf-8", "replace")
    return parse_message(_ESCAPED.sub(lambda match: chr(int(match[1], 16)), line))


def parse_message(text: str) -> Fault | None:
    """The fault in one message of the kernel; None for any other message."""
    if match := _XID.match(text):
        return xid_fault(int(match["xid"]), _address_of(match))
    if match := _OFF_THE_BUS.match(text) or _OFF_AT_PROBE.match(text):
        return Fault(XidClass.LOST, "the GPU has fallen off the bus", _address_of(match))
    if match := _SXID.match(text):
        switch, sxid = int(match["switch"]), int(match["sxid"])
        return Fault(_DYING, f"SXid {sxid} of NVSwitch {switch}, fatal", None)
    return None
