# SPDX-License-Identifier: Apache-2.0
"""The states that the simulated training has loaded and trained, and the verdicts that are true of them.

The witness sees the processes, their requests and the bucket.  It never reads the daemon's state.

A *line* is the training of one start: it has loaded one state, and trains from there.  A rollback begins
another line in the same process, and so does a process without hooks that loads an older state by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from swansongd.core.request_ids import FOLLOW_UP, evacuation_of

from testkit.simulation.bucket import Broken


@dataclass(frozen=True)
class Point:
    """A state of the training: the line that reached it, and the number of completed steps."""

    line: str
    step: int


@dataclass
class Line:
    """The training of one start."""

    id: str
    number: int
    """Lines that began later have a greater number."""
    loads: Point | None = None
    """The state that it loads without a query to the daemon; None: what the daemon answers."""
    loaded: Point | None = None
    """None before it has loaded a state; a fresh run has loaded ``Point("", 0)``."""
    step: int = -1
    """Completed steps of the rank that is furthest ahead; -1 before it has loaded a state."""
    seen_s: float | None = None
    """When a life of the daemon first got a message of it."""
    lives: set[int] = field(default_factory=set)
    """The lives of the daemon that got a message of it."""
    asked: dict[str, int] = field(default_factory=dict)
    """Step at the first request of each evacuation that no start had answered yet."""


@dataclass
class Opened:
    """An evacuation as it was opened first, in any life of the daemon."""

    at_s: float
    steps: dict[str, int]
    """Step of each line at that moment."""


class Witness:
    """The lines of the training on one VM."""

    def __init__(self) -> None:
        self.lines: dict[str, Line] = {}
        self.sets: dict[str, Point] = {}
        """The state in each sealed set, by the nonce of the set."""
        self.opened: dict[str, Opened] = {}
        self.safe: dict[str, tuple[Point, str]] = {}
        """The first SAFE of each evacuation: the state that a reader restored, and the processes of which
        it was true."""

    def begins(self, line_id: str) -> Line:
        """A line begins; it has loaded nothing yet."""
        line = Line(line_id, len(self.lines) + 1)
        self.lines[line_id] = line
        return line

    def place(self, point: Point) -> tuple[int, int]:
        """The place of a state in the order in which it was trained."""
        line = self.lines.get(point.line)
        return (0 if line is None else line.number), point.step

    def continues(self, point: Point | None, earlier: Point) -> bool:
        """Whether a state was trained from the earlier one."""
        while point is not None and point.line != earlier.line:
            line = self.lines.get(point.line)
            point = None if line is None else line.loaded or line.loads
        return point is not None and point.step >= earlier.step

    def reaches_daemon(self, line_id: str, life: int, now_s: float) -> None:
        """This life of the daemon got a message or a set of this line."""
        line = self.lines.get(line_id)
        if line is not None:
            line.lives.add(life)
            line.seen_s = now_s if line.seen_s is None else line.seen_s

    def opens(self, evacuation_id: str, now_s: float) -> None:
        """An evacuation is opened, perhaps again after a restart of the daemon."""
        steps = {line.id: line.step for line in self.lines.values()}
        self.opened.setdefault(evacuation_id, Opened(now_s, steps))

    def is_asked(self, request_id: str, line_id: str) -> None:
        """A process of this line gets a request of an evacuation; a follow-up changes no position."""
        if FOLLOW_UP not in request_id:
            line = self.lines[line_id]
            line.asked.setdefault(evacuation_of(request_id), line.step)

    def newest_at_request(self, evacuation_id: str) -> Line | None:
        """The newest line that a life of the daemon had seen before the notice, or that was asked since."""
        opened = self.opened[evacuation_id]
        known = [
            line
            for line in self.lines.values()
            if evacuation_id in line.asked
            or (line.seen_s is not None and line.seen_s <= opened.at_s)
        ]
        return max(known, key=lambda line: line.number, default=None)

    def newest_now(self, life: int) -> Line | None:
        """The newest line that this life of the daemon has seen; None if it has seen none."""
        known = [line for line in self.lines.values() if life in line.lives]
        return max(known, key=lambda line: line.number, default=None)

    def step_at_request(self, evacuation_id: str, line: Line) -> int:
        """Step of this line when it was asked first; without a request, at the notice."""
        opened = self.opened[evacuation_id]
        return line.asked.get(evacuation_id, opened.steps.get(line.id, -1))

    def judge_safe(
        self, evacuation_id: str, life: int, read: Point | None, loadable: Iterable[Point]
    ) -> None:
        """S: the next VM resumes from the newest training here, at or after its step at the request.

        A start that has trained nothing since it loaded a state needs that very state, or a later one.  A
        start that began after the request may take the place of the one that was asked: it has left the steps
        of that one behind, and no preemption costs them.

        Args:
            evacuation_id: of the evacuation with the verdict SAFE.
            life: of the daemon that announces it.
            read: the state that a fresh reader of the bucket restores.
            loadable: the sealed sets that a start on this VM would load.

        Raises:
            Broken: the verdict is false.
        """
        asked, now = self.newest_at_request(evacuation_id), self.newest_now(life)
        lines = [line for line in (asked, self._between(asked, read, now), now) if line is not None]
        if read is None or not lines:
            raise Broken(f"S: SAFE, a reader restores {read}, and training is {lines}")
        process_id = lines[-1].id.partition("~")[0]
        first = self.safe.get(evacuation_id)
        if first is not None:
            stood, by_process = first
            if by_process == process_id and self.place(read) >= self.place(stood):
                return  # it was true of the first request, and the same processes still run
        newest = max(loadable, key=self.place, default=read)
        why = [self._what_is_lost(evacuation_id, line, read, newest) for line in lines]
        if all(why):
            raise Broken(f"S: SAFE at {read}, and {why[0]}")
        process_id = lines[why.index("")].id.partition("~")[0]
        if first is None or first[1] != process_id:
            self.safe[evacuation_id] = (read, process_id)

    def _between(self, asked: Line | None, read: Point | None, now: Line | None) -> Line | None:
        """The line of the restored state, if it took the place of the one asked and is over by now."""
        line = None if read is None else self.lines.get(read.line)
        if asked is None or line is None or now is None:
            return None
        return line if asked.number < line.number < now.number else None

    def _what_is_lost(self, evacuation_id: str, line: Line, read: Point, newest: Point) -> str:
        """Why the training of this line is not what a reader restores; empty if it is."""
        step = self.step_at_request(evacuation_id, line)
        loaded = line.loaded or line.loads
        if loaded is None:
            is_newer = self.place(newest) > self.place(read)
            return f"{line.id} loads {newest}" if is_newer else ""
        if read.line == line.id:
            return f"{line.id} was at step {step}" if read.step < step else ""
        if read == loaded and step <= read.step:
            return ""
        return f"{line.id} was at step {step}; it loaded {loaded}"
