# SPDX-License-Identifier: Apache-2.0
"""Errors put into the decision core on purpose, each of which the random histories must find.

``python -m testkit.simulation mutants core 64`` runs up to 64 seeds against each mutant, and prints the
seed that finds it.  A change of a mutated line changes its mutant too.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple


class Mutant(NamedTuple):
    """One line of a module, and what replaces it."""

    module: str
    """A module of the core, or the dotted name of any module."""
    before: str
    after: str

    @property
    def name(self) -> str:
        return self.module if "." in self.module else f"swansongd.core.{self.module}"

    def changed(self, file: Path) -> str:
        """The source with this change.

        Raises:
            ValueError: the file was changed meanwhile: its line is missing, or is there twice.
        """
        source = file.read_text()
        if source.count(self.before) != 1:
            raise ValueError(f"{file} has not exactly one {self.before!r}")
        return source.replace(self.before, self.after)


MUTANTS = (
    Mutant("proof", "return newest.step >= position.step", "return newest.step >= position.step - 1"),
    Mutant("proof", "return newest.step >= position.step", "return True"),
    Mutant("proof", "is_loaded and position.step <= newest.step", "is_loaded"),
    Mutant("proof", "    step = max(steps)", "    step = min(steps)"),
    Mutant("proof", "            unknown.append(rank)", "            continue"),
    Mutant("proof", "step = max(step, request.target - 1)", "pass"),
    Mutant("starts", "start.process_ns <= written_ns]", "True]"),
    Mutant("state", "begun_mono_s <= first_mono_s", "False"),
    Mutant("starts", "for start in starts[:place] if start.generation is None", "for start in ()"),
    Mutant("starts", "is_open=s.is_open and s.id not in closed", "is_open=s.is_open"),
    Mutant("starts", "if not is_over and (not has_scanned or _has_more(state)):", "if False:"),
    Mutant("starts", "start.members.get(trainer.rank, trainer.process) == trainer.process", "True"),
    Mutant("starts", "if len(recent) < CLAIMS_MAX:", "if not recent:"),
    Mutant("starts", "trainer is None or event.step < 0 or not event.start_id", "True"),
    Mutant("proof", "safe_at and safe_at.start_id == start.id", "safe_at"),
    Mutant("verdict", "        or bool(state.uncommitted)\n", ""),
    Mutant("request", "begun_mono_s is not None and begun_mono_s < request.asked_mono_s", "False"),
    Mutant("emergency", "plan.fits and not is_safe", "False"),
    Mutant("commits", "if staged is None or staged.nodes == 1:", "if True:"),
    Mutant("staged_sets", "state.start is not None and state.start.id != state.owner_of(ref)", "False"),
    Mutant("request", "max(request.accepted.values()) + 1", "max(request.accepted.values())"),
    Mutant("request", "max(len(request.ranks), transition.state.local_world_size)", "len(request.ranks)"),
    Mutant("staged_sets", "newest_first[:NEWEST]}", "newest_first[:1]}"),
    Mutant("gpus", "if not state.gpus.suspect_starts.isdisjoint(running):", "if False:"),
    Mutant("gpus", "suspect_starts=frozenset(record.suspect_starts),", "suspect_starts=frozenset(),"),
    Mutant("verdict", "if is_worse or (last", "if (last"),
    Mutant("emergency", "or _is_to_another_start(transition.state, request) or", "or"),
    Mutant("emergency", "if not is_usable and not state.is_covered(answer):", "if False:"),
    Mutant("state", "return ref is not None and ref <= last",
           "return ref is not None and ref.step <= last.step"),
)  # fmt: skip
"""Numbered from 0."""
NOT_FOUND = (
    # Unit tests find these two, and no seed of more than a thousand.
    Mutant("proof", "if newest.generation == start.generation:\n        return newest.step",
           "if newest.generation >= (start.generation or 0):\n        return newest.step"),
    Mutant("starts", "math.inf if start.is_live else 0.0", "0.0"),
    # False SAFE of earlier versions, for which unit tests were written.  Few seeds were tried.
    Mutant("proof", "if not state.is_scanned or state.staging.is_settling:", "if not state.is_scanned:"),
    Mutant("proof", "if not state.is_scanned or state.staging.is_settling:",
           "if state.staging.is_settling:"),
    Mutant("proof", "if any(each.is_open and each.id in running for", "if any(False for"),
    Mutant("proof", "have_ended = start.ended.keys() >= set(range_of(state, start))",
           "have_ended = bool(start.ended)"),
    Mutant("proof", "if ordered is not None and ordered > newest and is_other:", "if False:"),
    Mutant("proof", "    if state.strangers:\n", "    if False:\n"),
    Mutant("starts", "if start.nodes == 1 or event.reason == Bye().reason:", "if True:"),
    Mutant("commits", "ordered = max(state.part.ref, commits.ordered or state.part.ref)",
           "ordered = commits.ordered"),
    Mutant("proof", "(is_suspect or ordered.generation != start.generation)",
           "ordered.generation != start.generation"),
    Mutant("proof", "if newest.generation == start.generation and not is_suspect:",
           "if newest.generation == start.generation:"),
    # Unit tests find these: the claim record must be lost, and a start without a claim must have sealed sets.
    Mutant("proof", "if not state.precedes(each, start)", "if False"),
    Mutant("starts", "max(first_ns.get(start.id, 0), state.began_ns(start))", "first_ns.get(start.id, 0)"),
    Mutant("starts", "start if start.is_placed or start.id not in inherited else None", "start"),
    # The world of one VM has no other VM that this claim would fence.
    Mutant("starts", "transition.do(WithdrawClaim())", "pass"),
    # A set of suspect training must wait for its commit at SAFE; the simulator of GPUs finds it.
    Mutant("proof", "s.id.start != start.id or not is_sound(s.health)", "s.id.start != start.id"),
    # A start must load an older state after the answer, and seal a set before the answer is committed.
    Mutant("proof", "or state.has_gone_back:", "or False:"),
    Mutant("proof", "return local is None or state.ref_of(local.id) == newest", "return True"),
    # Each was found before the world had slow requests, within 64 seeds; now they need more.
    Mutant("starts", "staged.id.step <= max(steps", "staged.id.step < max(steps"),
    Mutant("starts", "if refused is not None and not refused.is_live:", "if False:"),
    Mutant("proof", "        return False  # before its claim", "        pass  # before its claim"),
    Mutant("proof", "    if doubt:\n", "    if False:\n"),
    Mutant("starts", "0 < began_ticks < start.began_ticks", "False"),
    Mutant("proof", "if position.step < 0 and start.is_restoring:", "if position.step < 0:"),
    # Two starts must commit the same step, and a start must load the older one of the two.
    Mutant("proof", "loaded == (state.owner_of(newest), newest.step)", "loaded[1] == newest.step"),
    # A later set must wait for its manifest while a start loads an older, committed one.
    Mutant("proof", "any(ref is None or ref > newest for ref in refs)", "False"),
    # Two processes must write the same step before the first scan of a daemon.
    Mutant("starts", "each.id.step <= staged.id.step", "each.id.step < staged.id.step"),
    # An older process, or a late rank, must connect in the second before the newest launch.
    Mutant("starts", "            and first_start(start.id) != first_start(start_id)\n", ""),
    Mutant("starts", "or (may_reconnect and not start.is_live)", "or False"),
    # SAFE of an earlier life must end before its start has reconnected, or before its next save.
    Mutant("proof", "start.is_live and safe_at", "safe_at"),
    Mutant("proof", "if is_final and before is not None", "if before is not None"),
    # A position that was known at another verdict is as true in the next life of the daemon.
    Mutant("verdict", "if verdict is Verdict.SAFE and isinstance(position, Position):",
           "if isinstance(position, Position):"),
    # The next condition, or a request that waits, holds back the verdict as well.
    Mutant("verdict", "        or _claims(state)\n", ""),
    Mutant("verdict", "        or bool(state.commits.stored)\n        or _settles", "        or _settles"),
    Mutant("verdict", "        or _settles(state, evacuation, transition.now)\n", ""),
    Mutant("verdict", "        or not state.is_scanned\n", ""),
    # A fence ends the daemon of a single VM, and a job over several VMs starts on all that live.
    Mutant("proof", "if state.starts.fenced_by is not None:\n        return (",
           "if False:\n        return ("),
    # The hooks disconnect with the end of the run, and do not connect again for the same start.
    Mutant("proof", "t.is_connected and t.step <= max(ends)", "True"),
    Mutant("starts", "start.ended.items() if rank != trainer.rank}", "start.ended.items()}"),
    # A second answer to an evacuation must be sealed before the first one is stored.
    Mutant("proof", "return min(answers, default=None)", "return max(answers, default=None)"),
    # Training must end without the end of the run, at the very step of a commit.
    Mutant("proof", "step = start.ended.get(rank)\n", "step = None\n"),
    # The next start must answer, or save, between the end of the process that was asked and the scan.
    Mutant("request", 'if request.start_id not in ("", staged.id.start):', "if False:"),
    Mutant("request", "not is_earlier and is_of_process", "not is_earlier"),
    # The answer must be committed and deleted before a restart of the daemon, and a start begin.
    Mutant("request", "last is None or last.generation != state.generation:", "last is None:"),
    # A start must be known from its sets only, or be refused, after a later one has its generation.
    Mutant("starts", "is_open=is_of_boot and not is_overtaken", "is_open=is_of_boot"),
    # The ninth start within 90 s must begin in the evacuation, and no claim before it.
    Mutant("starts", "< EVACUATION_CLAIMS_MAX", "< 0"),
)  # fmt: skip
"""Numbered after the others.  64 seeds do not find them."""


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads the mutated source, and no cached code."""

    def __init__(self, fullname: str, path: str, mutant: Mutant) -> None:
        super().__init__(fullname, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self._mutant.changed(Path(self.path)), self.path)
        return code


class Finder(importlib.abc.MetaPathFinder):
    """Imports the module of a mutant with its change."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        name = self._mutant.name
        if fullname != name or path is None:
            return None
        file = str(Path(path[0]) / f"{name.rpartition('.')[2]}.py")
        return importlib.util.spec_from_file_location(
            fullname, file, loader=_Loader(fullname, file, self._mutant)
        )
