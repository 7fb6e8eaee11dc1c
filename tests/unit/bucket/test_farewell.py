# SPDX-License-Identifier: Apache-2.0
"""A farewell contains the verdict and the timeline, and readers need only three of its fields."""

from __future__ import annotations

import json
from typing import Any

import pytest
from swansongd.bucket.farewell import (
    BYTES_MAX,
    Farewell,
    encode,
    names_commit,
    verdict_and_time,
)
from swansongd.core.events import Conclude
from swansongd.errors import CorruptError
from swansongd.model import CommitRef, Verdict, VmPart

WRITTEN = "2030-01-01T00:00:00Z"
SAFE = Conclude("e1", Verdict.SAFE, "it is committed", CommitRef(2, 7), 101.5)


def written(conclusion: Conclude = SAFE, **fields: Any) -> bytes:
    values = {"run": "r", "generation": 2, "timeline": [], "written": WRITTEN, **fields}
    return encode(Farewell(conclusion=conclusion, **values))


def test_a_farewell_has_the_verdict_and_the_timeline() -> None:
    """Without a part and without missing entries, there are no fields for them."""
    timeline = [{"phase": "notice", "at_s": 0.0, "source": "aws.spot"}]
    assert json.loads(written(timeline=timeline)) == {
        "format": "swansong-farewell",
        "version": 1,
        "run": "r",
        "generation": 2,
        "evacuation": "e1",
        "verdict": "SAFE",
        "reason": "it is committed",
        "commit": {"generation": 2, "step": 7},
        "complete": True,
        "slack_s": 101.5,
        "expected_s": None,
        "took_s": None,
        "timeline": timeline,
        "written": WRITTEN,
    }


def test_a_farewell_names_the_part_of_a_checkpoint_that_is_not_whole() -> None:
    """Over several VMs: the part that this VM has committed, and the number of VMs that have."""
    part = VmPart(CommitRef(2, 9), 3, 2)
    body = json.loads(written(Conclude("e1", Verdict.PARTIAL, "late", CommitRef(2, 7), 1.0, part)))
    assert (body["commit"]["step"], body["complete"]) == (7, False)
    assert body["part"] == {"generation": 2, "step": 9, "nodes": 3, "nodes_committed": 2}


def test_a_loss_names_no_commit() -> None:
    """The field is null, not a commit of step 0."""
    data = written(Conclude("e1", Verdict.LOST, "nothing was staged", None, -0.5), left_out=3)
    body = json.loads(data)
    assert (body["commit"], body["timeline"], body["left_out"]) == (None, [], 3)
    assert (body["verdict"], body["slack_s"]) == ("LOST", -0.5)
    assert not names_commit(data)


def test_a_reader_gets_verdict_time_and_whether_there_was_a_commit() -> None:
    """The history needs the first two, and a fresh start the third."""
    assert verdict_and_time(written()) == ("SAFE", WRITTEN)
    assert names_commit(written())


@pytest.mark.parametrize("data", [b"", b"no json", b"[]", b'{"a": 1' + b" " * BYTES_MAX + b"}"])
def test_bytes_that_are_not_a_farewell_are_corrupt(data: bytes) -> None:
    """Both readers refuse them."""
    for read in (verdict_and_time, names_commit):
        with pytest.raises(CorruptError):
            read(data)


@pytest.mark.parametrize("field", ["verdict", "written"])
def test_a_farewell_without_verdict_or_time_is_corrupt(field: str) -> None:
    """The history passes over it."""
    body = json.loads(written()) | {field: None}
    with pytest.raises(CorruptError, match="farewell"):
        verdict_and_time(json.dumps(body).encode())
