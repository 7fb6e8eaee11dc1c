# SPDX-License-Identifier: Apache-2.0
"""The differences between two checkpoints of one step, in words; reads them without torch and numpy."""

from __future__ import annotations

import ast
import contextlib
import filecmp
import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from swansong import layout
from swansong.rank_files import GENERATORS, decode_tree

Kind = Literal["files", "loader", "generator", "value", "tensor"]
KINDS: tuple[Kind, ...] = ("files", "loader", "generator", "value", "tensor")
"""In the order of causes: another batch changes the weights, and weights change no batch."""

_CODES = {
    "F64": "d", "F32": "f", "F16": "e", "I64": "q", "I32": "i", "I16": "h", "I8": "b", "U64": "Q", "U32": "I",
    "U16": "H", "U8": "B", "BOOL": "B", "C64": "f", "f8": "d", "f4": "f", "f2": "e", "i8": "q", "i4": "i",
    "i2": "h", "i1": "b", "u8": "Q", "u4": "I", "u2": "H", "u1": "B", "b1": "B", "c8": "f", "c16": "d",
}  # fmt: skip
"""Codes of ``struct`` by the types' names in safetensors files and in ``.npy`` files."""
_STEPS = re.compile("'(last_epoch|_step_count)' is ")
_NAMED = re.compile(
    "without a position|outside of the state|is not in the state|are not in the state|they are not saved"
    "|has other contents"
)
"""In a warning of the hooks about objects that training uses and no checkpoint contains."""
_SHOWN = 3
"""Most differences that the text names for one object."""
_GENERATORS = ("generators", "random")


@dataclass(frozen=True)
class Difference:
    """A part of the state that differs."""

    kind: Kind
    text: str
    generators: frozenset[str] = frozenset()
    """Names of the generators that differ, if nothing else of this part does."""


@dataclass(frozen=True)
class _Tensor:
    """A tensor or an array in a file."""

    path: Path
    begin: int
    size_bytes: int
    dtype: str
    shape: tuple[int, ...]

    def read(self) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.begin)
            return file.read(self.size_bytes)

    def numbers(self) -> list[float] | None:
        """The elements; None for a type that Python has no numbers for."""
        data = self.read()
        if self.dtype == "BF16":  # the upper half of a float32
            halves = struct.unpack(f"<{len(data) // 2}H", data)
            data = struct.pack(f"<{len(halves)}I", *(half << 16 for half in halves))
            return list(struct.unpack(f"<{len(halves)}f", data))
        code = _CODES.get(self.dtype)
        if code is None:
            return None
        return list(struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data))


def find_differences(
    wanted: Path, got: Path, ignoring: str = "(?!)", unseeded: frozenset[str] = frozenset()
) -> tuple[list[Difference], int]:
    """Compare two checkpoints.

    Args:
        wanted: directory of the uninterrupted run's checkpoint.
        got: directory of the other one.
        ignoring: a regular expression; files whose path matches may differ, and places in the index, such as
            ``rank-00000/state.json:values.best``.
        unseeded: names of generators that may differ, from :attr:`Difference.generators`.

    Returns:
        The differences, likely causes first; and the number of compared files.
    """
    ours, theirs = _files(wanted, ignoring), _files(got, ignoring)
    found = [
        Difference("files", f"only the {run} run saved {name}")
        for one, other, run in ((ours, theirs, "uninterrupted"), (theirs, ours, "resumed"))
        for name in sorted(one.keys() - other.keys())
    ]
    explained: set[str] = set()
    ranks = {name.split("/")[0] for name in ours if "/" in name}
    for name in sorted(ours.keys() & theirs.keys(), key=_by_index):
        if name in explained or filecmp.cmp(ours[name], theirs[name], shallow=False):
            continue
        of_rank = name.split("/")[0]
        where = f" (rank {int(of_rank[5:])})" if len(ranks) > 1 and of_rank in ranks else ""
        trees = [_read_objects(files[name]) for files in (ours, theirs)]
        if trees[0] is not None and trees[1] is not None:
            explained |= {
                each
                for each in ours
                if each.startswith(f"{of_rank}/") and each.endswith((".safetensors", ".npy"))
            }
            texts = list(_between_objects(trees[0], trees[1], where, f"{name}:", ignoring))
            texts = [each for each in texts if not each.generators or each.generators - unseeded]
        else:
            texts = [Difference("value", f"{name}: {_between_files(ours[name], theirs[name])}")]
        found += texts
    return sorted(found, key=lambda each: KINDS.index(each.kind)), len(ours)


def likely_cause(differences: list[Difference], written: str) -> str:
    """Return a sentence about the first difference.

    Args:
        differences: from :func:`find_differences`.
        written: to standard error by the resumed run.  A warning of the hooks in it may name the cause.
    """
    named = [line for line in written.splitlines() if _NAMED.search(line)]
    if named:
        return named[0]
    kind = differences[0].kind if differences else "tensor"
    if kind == "files":
        return "the runs save different files"
    if kind == "loader":
        return "the loader is at another position, so the resumed run gets other batches"
    if kind == "generator":
        return (
            "a generator is at another position: the resumed run draws more or fewer random numbers; put an"
            " evaluation that draws some into a block of guard.evaluation(), and pass objects that decide"
            " about draws, such as a replay buffer or an environment, to TrainingState"
        )
    if kind == "value" and any(_STEPS.search(each.text) for each in differences):
        return (
            "the scheduler has stepped more or fewer times: step it before guard.step(), which comes last in"
            " the loop body, or at the start of an epoch only if loader.batches is 0"
        )
    if kind == "value":
        return (
            "a value is not restored, or changes between the save and the end of the step (call guard.step()"
            " last in the loop body), or follows from something outside of the state, such as a generator"
        )
    return (
        "no generator, loader or value of the state differs, so something outside of the state decides: a"
        " loader without a position (use ResumableLoader), an environment, another generator, a tensor, an"
        " average of the weights, or kernels that are not deterministic"
    )


# ---------------------------------------------------------------- files


def _files(directory: Path, ignoring: str) -> dict[str, Path]:
    named = {str(path.relative_to(directory)): path for path in directory.rglob("*")}
    # Manifests contain the id of the request, which differs.  A script with its own save function need not
    # seed generators that it does not use.
    return {
        name: path
        for name, path in named.items()
        if path.is_file()
        and not layout.is_rank_manifest(name)
        and path.name != GENERATORS
        and not re.search(ignoring, name)
    }


def _by_index(name: str) -> tuple[str, bool, str]:
    directory, _, base = name.rpartition("/")
    return directory, base != "state.json", base


def _between_files(one: Path, other: Path) -> str:
    read = {".safetensors": _read_safetensors, ".json": _read_json}.get(one.suffix)
    if read is not None:
        parsed = None
        with contextlib.suppress(ValueError):
            parsed = read(one), read(other)
        if parsed is not None:
            return _summary(list(_walk(*parsed, ())))
    before, after = one.read_bytes(), other.read_bytes()
    pairs = enumerate(zip(before, after, strict=False))
    place = next((at for at, (a, b) in pairs if a != b), min(len(before), len(after)))
    return f"differs, first at byte {place} of {len(before)}"


def _read_objects(path: Path) -> dict[str, Any] | None:
    """Read the objects of an index; None if the file is not an index of the hooks."""
    if path.name != "state.json":
        return None
    try:
        body = json.loads(path.read_bytes())
        if "index" in body:
            return _read_torch(path.parent, body["index"])
        tree = decode_tree(body["tree"], lambda _, name: _read_array(path.parent / name))
        return {**tree["objects"], _GENERATORS[0]: tree["random"]}
    except (ValueError, KeyError, TypeError, OSError, AttributeError):
        return None


def _read_torch(directory: Path, index: dict[str, Any]) -> dict[str, Any]:
    stored = {
        (file["group"], key): tensor
        for name, file in index["files"].items()
        for key, tensor in _read_safetensors(directory / name).items()
    }
    objects = {}
    for name, node in index["objects"].items():
        group = name if name in index["tensors"] else "others"

        def get(_: str, key: str, group: str = group) -> Any:
            # The whole tensor may be in the files of another rank, which are compared as well.
            return stored.get((group, key))

        if group == name and "state" in node and "rest" in node:
            of_params = {key: decode_tree(value, get) for key, value in node["state"]}
            objects[name] = {"state": of_params, **decode_tree(node["rest"], get)}
        elif group == name:
            objects[name] = {key: decode_tree(value, get) for key, value in node.items()}
        else:
            objects[name] = decode_tree(node, get)
    return objects


def _read_json(path: Path) -> Any:
    return json.loads(path.read_bytes())


def _read_safetensors(path: Path) -> dict[str, _Tensor]:
    with path.open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        entries = json.loads(file.read(length))
    return {
        key: _Tensor(path, 8 + length + begin, end - begin, entry["dtype"], tuple(entry["shape"]))
        for key, entry in entries.items()
        if key != "__metadata__"
        for begin, end in [entry["data_offsets"]]
    }


def _read_array(path: Path) -> _Tensor:
    """Read the header of a ``.npy`` file.

    Source: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
    """
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(file.read(2 if prefix[6] == 1 else 4), "little")
        header = ast.literal_eval(file.read(length).decode("latin-1"))
        begin = file.tell()
    size_bytes = path.stat().st_size - begin
    return _Tensor(path, begin, size_bytes, header["descr"].lstrip("<|="), tuple(header["shape"]))


# ---------------------------------------------------------------- objects


def _between_objects(
    wanted: Mapping[str, Any], got: Mapping[str, Any], where: str, prefix: str, ignoring: str
) -> Iterator[Difference]:
    for name in {**wanted, **got}:
        if name not in got or name not in wanted:
            run = "resumed" if name in got else "uninterrupted"
            yield Difference("value", f"{name}{where}: only the {run} run saved it")
            continue
        one, other = wanted[name], got[name]
        places = [
            (path, text)
            for path, text in _walk(one, other, ())
            if not re.search(ignoring, prefix + ".".join(map(str, (name, *path))))
        ]
        if not places:
            continue
        if name in _GENERATORS:
            for each in sorted({str(path[0]) for path, _ in places}):
                of_process = f"generators.{each}"
                text = f"{of_process} differs{where}"
                yield Difference("generator", text, frozenset({of_process}))
        elif _is_generator(one):
            text = f"{name}: this generator differs{where}"
            yield Difference("generator", text, frozenset({name}))
        elif _is_loader(name, one):
            kind, text = _between_loaders(one, other, places)
            names = (_generator_at(name, path) for path, _ in places if kind == "generator")
            yield Difference(kind, f"{name}{where}: {text}", frozenset(names))
        else:
            values = [place for place in places if not place[1].startswith("differs in")]
            tensors = [place for place in places if place not in values]
            if values:
                yield Difference("value", f"{name}{where}: {_summary(values)}")
            if tensors:
                yield Difference("tensor", f"{name}{where}: {_summary(tensors)}")


def _is_generator(tree: Any) -> bool:
    is_torch = isinstance(tree, _Tensor) and tree.dtype == "U8"
    return is_torch or (isinstance(tree, dict) and "bit_generator" in tree)


def _is_loader(name: str, tree: Any) -> bool:
    return isinstance(tree, dict) and (
        name == "loader" or {"epoch", "batches"} <= tree.keys() or "_num_yielded" in tree
    )


def _between_loaders(
    one: Any, other: Any, places: list[tuple[tuple[Any, ...], str]]
) -> tuple[Kind, str]:
    epoch, batch = one.get("epoch"), one.get("batches")
    other_epoch, other_batch = other.get("epoch"), other.get("batches")
    if None not in (batch, other_batch) and (epoch, batch) != (other_epoch, other_batch):
        of_epoch = f" of epoch {epoch}" if epoch != other_epoch else ""
        return (
            "loader",
            f"batch {other_batch} of epoch {other_epoch} instead of batch {batch}{of_epoch}",
        )
    keys = {str(path[0]) for path, _ in places}
    if "checksum" in keys:
        return "loader", f"batch {batch} of epoch {epoch} has other contents"
    if batch is not None and all(key.endswith("_with") for key in keys):
        return "generator", f"its generators differ: {', '.join(sorted(keys))}"
    return "loader", _summary(places)


def _generator_at(loader: str, path: tuple[Any, ...]) -> str:
    """Return the name of the generator whose state is at this place of a loader's state."""
    for holder, prefix in (("all", _GENERATORS[0]), ("own", loader)):
        if holder in path[:-1]:
            return f"{prefix}.{path[path.index(holder) + 1]}"
    return ".".join(map(str, (loader, *path)))


def _summary(places: list[tuple[tuple[Any, ...], str]]) -> str:
    texts = []
    for path, text in places[:_SHOWN]:
        name = ".".join(map(str, path))
        texts.append(f"{name!r} {text}" if name else text)
    more = [f"{len(places) - _SHOWN} more"] if len(places) > _SHOWN else []
    return "; ".join(texts + more)


def _without_directory(value: Any) -> Any:
    """Return the name of the file that a path names; of a dict, the same with such keys.

    A logger of Lightning creates another directory at each start, and callbacks save paths in it.
    """
    if isinstance(value, dict):
        return {_without_directory(key): item for key, item in value.items()}
    is_path = isinstance(value, str) and (value.startswith("/") or "://" in value)
    return value.rpartition("/")[2] if is_path else value


def _walk(one: Any, other: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Yield each place that differs: its path, and the difference in words."""
    if "callbacks" in path:
        one, other = _without_directory(one), _without_directory(other)
    if type(one) is not type(other):
        yield path, f"is {_short(other)} instead of {_short(one)}"
    elif isinstance(one, dict):
        for key in {**one, **other}:
            if key not in other:
                yield (*path, key), "is missing"
            elif key not in one:
                yield (*path, key), "is there, and is not without interruption"
            else:
                yield from _walk(one[key], other[key], (*path, key))
    elif isinstance(one, list | tuple):
        if len(one) != len(other):
            yield path, f"has {len(other)} entries instead of {len(one)}"
        else:
            for place, (a, b) in enumerate(zip(one, other, strict=True)):
                yield from _walk(a, b, (*path, place))
    elif isinstance(one, _Tensor):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            yield (
                path,
                f"is {other.dtype} {list(other.shape)} instead of {one.dtype} {list(one.shape)}",
            )
        elif one.read() != other.read():
            yield path, _between_tensors(one, other)
    elif isinstance(one, float):
        if struct.pack("d", one) != struct.pack("d", other):
            yield path, f"is {other!r} instead of {one!r}"
    elif isinstance(one, bytes) and one != other and len(one) == len(other):
        count = sum(a != b for a, b in zip(one, other, strict=True))
        yield path, f"differs in {count} of {len(one)} bytes"
    elif one != other:
        yield path, f"is {_short(other)} instead of {_short(one)}"


def _short(value: Any) -> str:
    return (
        f"a {type(value).__name__}"
        if isinstance(value, dict | list | tuple | _Tensor)
        else f"{value!r:.80}"
    )


def _between_tensors(one: _Tensor, other: _Tensor) -> str:
    count = math.prod(one.shape)
    size = one.size_bytes // count
    before, after = one.read(), other.read()
    differing = sum(
        before[begin : begin + size] != after[begin : begin + size]
        for begin in range(0, len(before), size)
    )
    text = f"differs in {differing} of {count} elements"
    numbers, others = one.numbers(), other.numbers()
    if numbers is None or others is None:
        return text
    pairs = zip(numbers, others, strict=True)
    gaps = [abs(a - b) for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
    return f"{text} (largest difference {max(gaps, default=math.nan):.2g})"
