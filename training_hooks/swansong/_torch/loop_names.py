# SPDX-License-Identifier: Apache-2.0
"""Finds names that a script assigns only in its loop over a loader, and reads after it.

A run that resumes after the last batch of an epoch gets no batch in that loop, so such a name is unknown.
"""

from __future__ import annotations

import dis
import re
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

import torch

_LIBRARIES = (str(Path(torch.__file__).parents[1]), str(Path(__file__).parents[1]))
_LEVELS_MAX = 8


def names_of_loop(frame: FrameType | None) -> list[str]:
    """Return these names of the ``for`` statement that the script's frame executes.

    Args:
        frame: that asks an iterator for its next item, or a function of a library that the script iterates
            over, such as tqdm.
    """
    for _ in range(_LEVELS_MAX):
        if frame is None or not frame.f_code.co_filename.startswith(_LIBRARIES):
            break
        frame = frame.f_back
    return [] if frame is None else _names(frame.f_code, frame.f_lasti)


def _names(code: CodeType, at: int) -> list[str]:
    instructions = list(dis.get_instructions(code))
    # Python 3.12 returns the place behind the instruction if the iterator is a generator.
    loops = (
        each for each in instructions if each.opname == "FOR_ITER" and each.offset in (at, at - 2)
    )
    if (loop := next(loops, None)) is None:
        return []
    count = code.co_argcount + code.co_kwonlyargcount
    known = set(code.co_varnames[: count + bool(code.co_flags & 4) + bool(code.co_flags & 8)])
    in_loop: set[str] = set()
    found: dict[str, None] = {}
    for instruction in instructions:
        for is_store, name in _accesses(instruction):
            if instruction.offset < at:
                known |= {name} if is_store else set()
            elif instruction.offset < loop.argval:
                in_loop |= {name} if is_store else set()
            elif is_store:
                known.add(name)
            elif name in in_loop - known:
                found[name] = None
    return list(found)


def _accesses(instruction: dis.Instruction) -> Iterator[tuple[bool, str]]:
    """Whether it assigns a name, and the name; one instruction may access two of them."""
    kinds = re.findall(r"(STORE|LOAD)_(?:FAST|NAME|DEREF)", instruction.opname)
    names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    if kinds and "CLEAR" not in instruction.opname:
        yield from ((kind == "STORE", name) for kind, name in zip(kinds, names, strict=False))
