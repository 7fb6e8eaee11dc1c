# SPDX-License-Identifier: Apache-2.0
"""Lines of an operator's program."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swansong.bounds import BoundsError
from swansongd.core.events import Event, NoticeRaised, NoticeWithdrawn
from swansongd.sources.command import FIELDS, CommandSource, parse
from swansongd.sources.source import Clocks

from testkit.strategies import json_values
from testkit.waiting import until

NOW_S = 1_767_225_600.0
"""2026-01-01T00:00:00Z."""


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("[]", "object"),
        ("{", "JSON"),
        ("[" * 4000, "JSON"),
        ('{"in_s": 3}', "id"),
        ('{"id": 7}', "id"),
        ('{"id": "a", "in_s": true}', "in_s"),
        ('{"id": "a", "in_s": -1}', "in_s"),
        ('{"id": "a", "in_s": NaN}', "NaN"),
        ('{"id": "a", "in_s": 1e300}', "in_s"),
        ('{"id": "a", "deadline": "2026-01-01T00:00:30"}', "time zone"),
        ('{"id": "a", "deadline": "2026-01-01T00:00:30Z", "in_s": 30}', "not both"),
        ('{"id": "a", "withdrawn": 1}', "withdrawn"),
        ('{"id": "a", "error": "x"}', "error"),
        ('{"id": "a", "deadlin": 3}', "deadlin"),
    ],
)
def test_an_invalid_line_names_its_field(text: str, field: str) -> None:
    """Types, ranges, unknown fields and contradictions are refused."""
    with pytest.raises(BoundsError, match=field):
        parse(text.encode(), now_wall_s=NOW_S)


def test_a_deadline_is_a_time_or_seconds() -> None:
    """Both forms give the time left; without one it is unknown."""
    stated = parse(b'{"id": "a", "deadline": "2026-01-01T01:00:30+01:00"}', now_wall_s=NOW_S)
    counted = parse(b'{"id": "a", "in_s": 30}', now_wall_s=NOW_S)
    assert stated.left_s == counted.left_s == 30.0
    assert parse(b'{"id": "a"}', now_wall_s=NOW_S).left_s is None


@given(st.dictionaries(st.sampled_from(FIELDS), json_values))
def test_any_line_is_read_or_refused(body: dict[str, object]) -> None:
    """No value of any field raises another error, and a time that was read is bounded."""
    try:
        line = parse(json.dumps(body).encode(), now_wall_s=NOW_S)
    except BoundsError:
        return
    assert line.left_s is None or abs(line.left_s) < 1e12


def test_a_program_that_prints_without_end_causes_few_events(tmp_path: Path) -> None:
    """A flood of lines is read slowly, one event for each read, and the last line counts."""
    events: list[Event] = []
    stop = threading.Event()
    path = tmp_path / "socket"
    source = CommandSource(path, assumed_grace_s=25.0, clocks=Clocks())
    thread = threading.Thread(target=source.run, args=(events.append, stop), daemon=True)
    thread.start()
    until(path.exists, what="the socket")
    flood = (b'{"id": "a", "in_s": 30}\n' + b'{"id": "a", "withdrawn": true}\n') * 500
    with socket.socket(socket.AF_UNIX) as program:
        until(lambda: program.connect_ex(str(path)) == 0, what="the connection")
        program.sendall(flood + b'{"id": "last", "in_s": 30}\n')

        def raised() -> list[str]:
            return [each.notice.identity for each in events if isinstance(each, NoticeRaised)]

        until(lambda: "command:last" in raised(), what="the last line")
        of_notices = [each for each in events if isinstance(each, NoticeRaised | NoticeWithdrawn)]
        assert len(of_notices) <= len(flood) // 4096 + 4
        stop.set()
    thread.join(60)
    assert not thread.is_alive()
