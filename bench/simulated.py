# SPDX-License-Identifier: Apache-2.0
"""States and lines that a simulator reaches; then, of all simulators so far, the functions that none enters.

    python -m bench.simulated live 200 --json build/simulated.json
    python -m bench.simulated production 20 --json build/simulated.json --plot docs/simulation.svg

A state is the daemon's phase, plan and verdict, together with one fault that has happened so far.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from testkit import REPOSITORY
from testkit.simulation.simulators import SIMULATORS, isolated, load

ROOTS = tuple(str(REPOSITORY / name) for name in ("daemon", "training_hooks"))
IS_FUNCTION = 1
"""CO_OPTIMIZED: the code of a module or a class lacks it."""
TRACED = 20
"""Lines are noted in these first seeds only: that slows them down."""
Lines = set[tuple[str, int]]


def reached(name: str, seeds: int) -> dict[str, Any]:
    """The lines that the first seeds reach, and the number of states after each seed."""
    run, lines, states, curve = load(name), Lines(), set[str](), []

    def line(frame: FrameType, *_: Any) -> Any:
        lines.add((frame.f_code.co_filename, frame.f_lineno))
        return line

    def call(frame: FrameType, *_: Any) -> Any:
        return line if frame.f_code.co_filename.startswith(ROOTS) else None

    def traced(seed: int) -> Any:
        if seed < TRACED:
            threading.settrace(call)
            sys.settrace(call)
        run(seed)
        sys.settrace(None)
        return {"lines": list(lines), "states": list(states)}

    if not SIMULATORS[name].module:
        _note_states(states)
    for seed in range(seeds):
        found = isolated(seed, traced)  # threads of the production simulators remain
        lines |= {(file, number) for file, number in found["lines"]}
        states |= set(found["states"])
        curve.append(len(states))
    return {"lines": sorted(lines), "states": curve}


def _note_states(states: set[str]) -> None:
    from swansongd.observe.phase import phase_of  # noqa: PLC0415 - the simulator is loaded before

    from testkit.simulation.world import World  # noqa: PLC0415

    step = World.step

    def noted(self: World, event: Any) -> None:
        step(self, event)
        now = self.state.evacuation
        state = (phase_of(self.state), now and now.plan.kind, now and now.verdict)
        states.update(f"{state} {fault}" for fault in self.fired or {""})

    World.step = noted  # type: ignore[method-assign]


def functions(code: CodeType, path: str = "") -> Iterator[tuple[str, set[int]]]:
    """The functions of a module, each with the lines of its body."""
    for each in (const for const in code.co_consts if isinstance(const, CodeType)):
        if each.co_flags & IS_FUNCTION and not each.co_name.startswith("<"):
            yield path + each.co_name, {n for *_, n in each.co_lines() if n} - {each.co_firstlineno}
        yield from functions(each, f"{path}{each.co_name}.")


def table(lines: Lines) -> Iterator[str]:
    """Modules with their lines and the reached ones, and functions that nothing enters."""
    for file in sorted({name for name, _ in lines}):
        bodies = dict(functions(compile(Path(file).read_text(), file, "exec")))
        here = {number for name, number in lines if name == file}
        own = set().union(*bodies.values())
        missed = [name for name, body in bodies.items() if body and not body & here]
        path = Path(file).relative_to(REPOSITORY)
        yield f"| {path} | {len(own)} | {len(own & here)} | {', '.join(missed)} |"


def plot(curves: dict[str, list[int]], picture: Path) -> None:
    """Draw the number of states against the seeds."""
    import matplotlib as mpl  # noqa: PLC0415 - only for the picture

    mpl.use("svg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, axis = plt.subplots(figsize=(6, 3), layout="constrained")
    for name, curve in curves.items():
        axis.plot(range(1, len(curve) + 1), curve, label=name)
    axis.set_xlabel("seeds")
    axis.set_ylabel("states")
    axis.legend(frameon=False)
    figure.savefig(picture)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.simulated", description=__doc__)
    parser.add_argument("simulator", choices=SIMULATORS)
    parser.add_argument("seeds", type=int)
    parser.add_argument("--json", type=Path, required=True, help="file of all simulators so far")
    parser.add_argument("--plot", type=Path, help="draw this SVG; needs matplotlib")
    options = parser.parse_args()
    known = json.loads(options.json.read_text()) if options.json.exists() else {}
    if options.seeds:
        known[options.simulator] = reached(options.simulator, options.seeds)
        options.json.write_text(json.dumps(known))
    lines = {(file, line) for each in known.values() for file, line in each["lines"]}
    print(*table(lines), sep="\n")
    if options.plot is not None:
        curves = {name: each["states"] for name, each in known.items()}
        plot({name: curve for name, curve in curves.items() if any(curve)}, options.plot)


if __name__ == "__main__":
    main()
