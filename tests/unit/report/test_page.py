# SPDX-License-Identifier: Apache-2.0
"""The page is well-formed, loads nothing, and shows texts of the bucket as texts."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from swansong_bucket.format.farewell import RecordedEvacuation
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.runs import history
from swansong_bucket.runs.history import Commits, Evacuations, RunHistory
from swansong_bucket.runs.lives import Lives
from swansong_bucket.runs.run import Run
from swansong_tools.commands import report_text
from swansong_tools.economics.loss import Interruption, Loss
from swansong_tools.report import drawing, page, run_report
from swansong_tools.report.run_report import RunReport

from testkit import past_run
from testkit.hostile_farewells import MARKUP, evacuations, interruptions
from testkit.memory_store import MemoryStore
from testkit.records import record_of

EMPTY = RunHistory(
    commits=Commits(commits=()), evacuations=Evacuations(evacuations=()), lives=Lives(())
)
TAGS = set(
    re.findall(
        r"\S+",
        "html head meta title style body header main section article figure h1 h2 h3 p dl dt dd div "
        "table caption thead tbody tfoot tr th td details summary code strong span i "
        "svg desc rect line text tspan polyline",
    )
)
ATTRIBUTES = set(
    re.findall(
        r"\S+",
        "lang charset http-equiv content name class id role scope aria-label aria-labelledby aria-hidden "
        "x y width height rx x1 x2 y1 y2 dx points viewBox preserveAspectRatio",
    )
)


def made(found: RunHistory, run: str = "my-run", **fields: object) -> RunReport:
    return run_report.report(
        found,
        run=run,
        store_url="s3://bucket/runs",
        written_wall_s=past_run.BEGUN_S + 50000,
        **fields,  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def past_report(past: RunHistory) -> RunReport:
    return made(past, amounts={"GPU time on spot VMs": "12.00 USD"})


@pytest.fixture(scope="module")
def objects() -> dict[str, bytes]:
    """The objects of the run with the newest commit of each generation: reading all 25 takes longer."""
    store = MemoryStore()
    past_run.write(store)
    newest = {key.split("/")[2]: key for key in sorted(store.objects) if "/commits/" in key}
    return {
        key: data
        for key, data in store.objects.items()
        if "/commits/" not in key or key in newest.values()
    }


def parsed(text: str) -> ET.Element:
    """The page, which is XML, too; fails on a tag, an attribute or a style that the page does not need."""
    root = ET.fromstring(text)
    for element in root.iter():
        assert element.tag in TAGS, element.tag
        assert set(element.attrib) <= ATTRIBUTES, element.attrib
    assert not re.search(r"url\(|@import|https?:|javascript:", root.findtext("head/style") or "")
    return root


def shown(root: ET.Element) -> str:
    return " ".join(" ".join(root.itertext()).split())


def test_the_page_of_a_run(past_report: RunReport) -> None:
    """Key figures, both evacuations with their verdicts, loss, ETTR, commits and cost."""
    text = shown(parsed(page.html(past_report)))
    assert past_report.loss is not None
    for fact in (
        f"{past_report.loss.ettr:.2%}",
        "2026-11-22 02:43:45 UTC, generation 1",
        "The verdict is SAFE: the requested checkpoint is committed",
        "1,187 steps had to be done again",
        "3 h 36 min left out",
        "expected 48 s, at worst 61 s",
        "12.00 USD",
        "69300",
    ):
        assert fact in text, fact


def test_the_page_of_a_run_without_a_past() -> None:
    """A run that has not begun has a page, and a text."""
    report = made(EMPTY)
    assert "No evacuation is recorded." in shown(parsed(page.html(report)))
    assert "no evacuation is recorded" in [line.plain for line in report_text.lines(report)]


def test_damaged_farewells_and_objects_that_were_not_read_are_named(past_report: RunReport) -> None:
    """On the page and in the text."""
    evacuated = Evacuations(evacuations=(), farewells_left_out=7, damaged=("r/farewells/x.json",))
    found = RunHistory(
        commits=Commits(commits=past_report.history.commits.commits, left_out=1234),
        evacuations=evacuated,
        lives=Lives(()),
    )
    text = shown(parsed(page.html(made(found))))
    assert "r/farewells/x.json" in text
    assert "7 older records" in text
    assert "1,234 older commits" in text
    plain = "\n".join(line.plain for line in report_text.lines(made(found)))
    assert "7 older records" in plain
    assert "1 damaged record," in plain


def test_the_newest_commit_is_one_that_a_restore_can_take(past_report: RunReport) -> None:
    """A damaged manifest at the end names no step to resume from."""
    commits = past_report.history.commits
    broken = replace(commits.commits[-1], is_whole=False)
    damaged = replace(commits, commits=(*commits.commits[:-1], broken))
    assert damaged.newest_whole == commits.commits[-2]
    found = made(replace(past_report.history, commits=damaged))
    assert "1 newer ones are not whole" in shown(parsed(page.html(found)))
    plain = "\n".join(line.plain for line in report_text.lines(found))
    assert f"newest step {commits.commits[-2].ref.step}" in plain
    assert re.search(r"^ +1 newer ones are not whole$", plain, re.MULTILINE), "not cut off"


def test_a_long_note_takes_several_lines(past_report: RunReport) -> None:
    """SVG does not wrap text: the lines fit a phone, contain the whole note, and push the bars down."""
    picture = past_report.stories[0].picture
    lane = picture.course.old_vm[0]
    for note in ("until about step 173,040,000, then from 161,170,000", "w" * 64, ""):
        long = replace(picture.course, old_vm=(replace(lane, note=note), lane))
        _, row, below, *_ = drawing.gantt(replace(picture, course=long)).rows
        assert len(lane.name + row.note_lines[0]) <= drawing.NOTE_CHARACTERS
        assert max(map(len, row.note_lines)) <= drawing.NOTE_CHARACTERS
        assert "".join(row.note_lines).replace(" ", "") == note.replace(" ", "")
        assert below.top - row.bars_top == drawing.LANE_PIXELS - 17


def test_wide_characters_make_no_line_of_the_terminal_longer(past_report: RunReport) -> None:
    """A name, a note and the key of a damaged record are cut by columns, not by characters."""
    first, *others = past_report.stories
    course = first.picture.course
    lane = replace(course.old_vm[0], name="\U00017e04" * 70, note="\U00017e04" * 70)
    long = replace(first.picture, course=replace(course, old_vm=(lane,)))
    wide = replace(first, picture=long)
    found = replace(past_report, stories=(wide, *others), run="\U00017e04" * 70)
    assert all(line.cell_len < 80 for line in report_text.lines(found))


def test_every_picture_has_a_title(past_report: RunReport) -> None:
    """Screen readers announce each picture; tables have headers with a scope."""
    root = parsed(page.html(past_report))
    pictures = [svg for svg in root.iter("svg") if svg.get("role") == "img"]
    ids = {element.get("id") for element in root.iter() if element.get("id")}
    assert len(pictures) == 5
    for svg in pictures:
        assert set((svg.get("aria-labelledby") or "none").split()) <= ids
    for table in root.iter("table"):
        assert all(cell.get("scope") for cell in table.iter("th"))


@pytest.mark.fault("O41")
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(evacuations, max_size=3), st.none() | interruptions(), st.sampled_from((MARKUP, "run"))
)
def test_hostile_texts_stay_texts(
    recorded: list[RecordedEvacuation], interruption: Interruption | None, run: str
) -> None:
    """Any evacuations: no tag and no attribute of the bucket, bounded size, lines of 80 columns."""
    loss = None
    if interruption is not None:
        loss = Loss(
            begun_wall_s=0.0,
            until_wall_s=interruption.resumed_wall_s,
            productive_s=1.0,
            productive_gpu_s=8.0,
            parts_s={"redone": interruption.redone_s, "stall": 1.0},
            parts_gpu_s={"redone": 8 * interruption.redone_s, "stall": 8.0},
            last_hour_productive_s=0.5,
            interruptions=(interruption,),
        )
    past = replace(EMPTY, evacuations=Evacuations(evacuations=tuple(recorded)))
    told = run_report.stories(past, loss)
    report = RunReport(
        run=run,
        store_url=MARKUP,
        written_wall_s=0.0,
        history=EMPTY,
        loss=loss,
        amounts={run_report.LOST: MARKUP},
        stories=tuple(told),
    )
    text = page.html(report)
    root = parsed(text)
    assert len(text) < 20_000 + 60_000 * len(recorded)
    assert MARKUP in "".join(root.itertext())
    for line in report_text.lines(report, is_unicode=False):
        assert line.cell_len < 80
        assert line.plain.isprintable()


@pytest.mark.parametrize(
    "reason", ["0" * 27 + "➰➰⼀⼀", "⼀" * 300, "a ⼀" * 90, "e\u0301" * 200]
)
def test_a_wide_character_takes_two_columns(reason: str) -> None:
    """The lines of a verdict's reason have at most 79 columns, and all of its characters."""
    lines = list(report_text._wrapped(f"The verdict is SAFE: {reason}. The newest state is saved."))
    assert max(line.cell_len for line in lines) < 80
    assert "".join("".join(line.plain.split()) for line in lines).count("⼀") == reason.count("⼀")


def test_the_text_fits_80_columns(past_report: RunReport) -> None:
    """With and without Unicode; the bars of the text lie below each other."""
    for is_unicode in (True, False):
        lines = [line.plain for line in report_text.lines(past_report, is_unicode=is_unicode)]
        assert max(map(len, lines)) < 80
        upload = next(line for line in lines if line.startswith("Upload"))
        assert ("▒" if is_unicode else "x") in upload
        assert any("SAFE" in line for line in lines)
        if not is_unicode:
            assert all(line.isascii() for line in lines)


FAR_INSTANTS = (
    *("1970-01-01T00:00:00Z", "2099-12-31T23:59:59Z", "9999-12-31T23:59:59Z"),
    *("0001-01-01T00:00:00+14:00", "2026-11-22T02:43:45Z"),
)
numbers = st.one_of(
    st.sampled_from((1e9, -1e9, 1e10, 1e300, -1e300, 2**53, 2**63, 10**400, -1, 0, 0.1)),
    st.integers(),
    st.floats(),
)


def places(value: Any, name: str = "") -> Iterator[tuple[Any, Any, str]]:
    """The container, the key and the field name of each number and instant in a JSON value."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        field = key if isinstance(key, str) else name
        if isinstance(inner, (dict, list)):
            yield from places(inner, field)
        elif isinstance(inner, (int, float)) or inner in FAR_INSTANTS or "T" in str(inner)[10:11]:
            yield value, key, field


def checked_size(store: MemoryStore) -> None:
    """The report of the run has a page of bounded size, and a text of 80 columns."""
    report = made(history.read(Run.listed(store, RunKeys(past_run.RUN))))
    text = page.html(report)
    parsed(text)
    assert len(text) < 250_000
    for line in report_text.lines(report):
        assert line.cell_len < 80


@settings(max_examples=30)
@given(st.data())
def test_hostile_numbers_of_the_bucket_make_a_page_of_bounded_size(
    objects: dict[str, bytes], data: st.DataObject
) -> None:
    """Any numbers and instants in farewells, resumptions and claims: the record is drawn, or is damaged."""
    store = MemoryStore()
    store.objects.update(objects)
    own = [key for key in store.objects if "/commits/" not in key]
    for key in data.draw(st.lists(st.sampled_from(own), min_size=1, max_size=4, unique=True)):
        body = json.loads(store.objects[key])
        found = list(places(body))
        names = sorted({name for _, _, name in found} - {"version", "generation", "node"})
        for name in data.draw(st.lists(st.sampled_from(names), max_size=3, unique=True)):
            container, place, _ = data.draw(st.sampled_from([at for at in found if at[2] == name]))
            is_text = isinstance(container[place], str)
            container[place] = data.draw(st.sampled_from(FAR_INSTANTS) if is_text else numbers)
        store.objects[key] = record_of(body)
    checked_size(store)


@pytest.mark.parametrize("extreme", [1e9, -1e300, math.nan, FAR_INSTANTS[1]])
def test_each_number_of_a_farewell_at_an_extreme(
    objects: dict[str, bytes], extreme: float | str
) -> None:
    """No field of a farewell, wherever it appears, makes a report slow or long."""
    store = MemoryStore()
    store.objects.update(objects)
    honest = {key: data for key, data in objects.items() if "/farewells/" in key}
    names = {name for data in honest.values() for _, _, name in places(json.loads(data))}
    for name in sorted(names - {"version", "generation", "node", "samples"}):
        for key, data in honest.items():
            body = json.loads(data)
            for container, place, field in list(places(body)):
                if field == name and isinstance(container[place], str) == isinstance(extreme, str):
                    container[place] = extreme
            store.objects[key] = record_of(body)
        checked_size(store)
