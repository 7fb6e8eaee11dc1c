# SPDX-License-Identifier: Apache-2.0
"""Xid messages: each published form gives its fault, and no process name can forge one."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swansongd.sources.xids import (
    RECORD_MAX_BYTES,
    XIDS,
    XidClass,
    parse_message,
    parse_record,
    pci_address,
    xid_fault,
)

from testkit import REPOSITORY

CORPUS = tomllib.loads(Path(__file__).with_name("xid_corpus.toml").read_text())["message"]
PREFIX = re.compile(
    r"(?:\w{3} [ \d]\d \d\d:\d\d:\d\d \S+ )?(?:kernel: )?(?:kern  :err   : \S+ )?(?:\[[^\]]{1,30}\] )?"
)
"""Prefixes of journald and dmesg, which the records of the kernel do not have."""
PAGE = REPOSITORY / "docs/operations/gpu-health.md"


def record(line: str, priority: int = 4) -> bytes:
    """A record of ``/dev/kmsg``, escaped as the kernel does."""
    message = PREFIX.sub("", line, count=1)
    message = re.sub(r"\n\s*", r"\\x0a", message)
    return f"{priority},1234,98765432,-;{message}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:3b:00.0\n".encode()


@pytest.mark.parametrize("row", CORPUS, ids=lambda row: row["line"][:60])
def test_each_form_gives_its_fault(row: dict[str, Any]) -> None:
    """Address, Xid and class are those of the corpus."""
    fault = parse_record(record(row["line"]))
    if "class" not in row:
        assert fault is None
        return
    assert fault is not None
    assert (fault.pci, fault.xid) == (row.get("pci"), row.get("xid"))
    assert fault.grade == row["class"]


@pytest.mark.fault("X07")
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b";",
        b"4,1,1,-",
        b"x,1,1,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU",
        b"-4,1,1,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU",
        b"99999999999999999999,1,1,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU",
        b"4,1,1,-;NVRM: Xid (PCI:\xff\xfe00:3b:00): 79, GPU",
        b"4,1,1,-;" + b"\xff" * RECORD_MAX_BYTES,
    ],
)
def test_a_malformed_record_is_ignored(raw: bytes) -> None:
    """Records without the form of the kernel's report nothing."""
    assert parse_record(raw) is None


@pytest.mark.fault("X07")
def test_a_program_cannot_forge_a_record() -> None:
    """The kernel gives the records of programs another facility than its own."""
    line = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus"
    assert parse_record(record(line, priority=4)) is not None
    assert parse_record(record(line, priority=8 + 4)) is None


def test_bytes_that_are_not_utf8_after_the_code_change_nothing() -> None:
    """The name of a process is any sequence of bytes."""
    raw = b"4,1,1,-;NVRM: Xid (PCI:0000:3b:00): 95, pid=1, name=\xff\xfe\x80, Uncontained"
    fault = parse_record(raw)
    assert fault is not None
    assert (fault.xid, fault.grade) == (95, XidClass.DYING)


@pytest.mark.fault("X07")
@given(name=st.text(max_size=200))
def test_no_name_of_a_process_changes_the_fault(name: str) -> None:
    """Only the beginning of a message counts."""
    fault = parse_message(f"NVRM: Xid (PCI:0000:3b:00): 31, pid=1, name={name}, Ch 1")
    assert fault == xid_fault(31, "0000:3b:00")


@given(raw=st.binary(max_size=300))
def test_no_record_raises(raw: bytes) -> None:
    """Any bytes give a fault or None."""
    parse_record(b"4,1,1,-;" + raw)
    parse_record(raw)


def test_each_xid_has_one_row() -> None:
    codes = [code for row in XIDS for code in row.codes]
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("00000000:3B:00.0", "0000:3b:00"),
        ("PCI:0000:3b:00", "0000:3b:00"),
        ("3b:00.0", "0000:3b:00"),
        ("10000:E1:00", "10000:e1:00"),
        ("", None),
        ("0000:3b:00.0 x", None),
        ("GPU-1234", None),
    ],
)
def test_addresses_have_one_form(text: str, address: str | None) -> None:
    """NVML and the kernel write the same address in different forms."""
    assert pci_address(text) == address


def codes_of(cell: str) -> set[int]:
    """The numbers in a cell of the page: ``39-41, 70``."""
    found: set[int] = set()
    for part in cell.split(","):
        first, _, last = part.strip().partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def test_the_page_has_the_same_classes() -> None:
    """The page lists the codes of each class."""
    rows = re.findall(r"^\| `(\w+)` \| ([\d, -]*\d)", PAGE.read_text(), re.MULTILINE)
    page = {grade: codes_of(codes) for grade, codes in rows}
    assert page == {
        grade: {code for row in XIDS if row.grade is grade for code in row.codes}
        for grade in XidClass
    }
