# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds, as files: one JSON index and one ``.npy`` file for each array.

Bit for bit, and never pickle.  A tree is made of dict, list, tuple, str, int, float, bool, None, bytes
and numpy arrays or scalars; what JSON has no word for is written as an object with one key, such as
``{"tuple": [...]}``.  numpy is used if the training script uses it, and is not needed otherwise.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import random
import re
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

FORMAT = 1
INDEX = "state.json"
_ARRAY_NAME = re.compile(r"^array-\d{5,9}\.npy$")
_WAY_OUT = "keep it out of the state, turn it into arrays and plain values, or give attach() save= and load="

log = logging.getLogger("swansong")


def save_tree(directory: str | os.PathLike[str], tree: object) -> None:
    """Write ``tree`` into an existing directory.

    Raises:
        TypeError: it holds something else than the types above; names the place in the tree.
        OSError: the file system refused.
    """
    directory = os.fspath(directory)
    index = {"format": FORMAT, "tree": encode_tree(tree, "state", _Arrays(directory).put)}
    with open(os.path.join(directory, INDEX), "w", encoding="utf-8") as file:
        json.dump(index, file, allow_nan=False, separators=(",", ":"))


def load_tree(directory: str | os.PathLike[str]) -> Any:
    """The tree that :func:`save_tree` wrote into ``directory``.

    Raises:
        ValueError: the index or an array cannot be understood, or another format wrote it.
        OSError: a file is missing or cannot be read.
    """
    directory = os.fspath(directory)
    with open(os.path.join(directory, INDEX), encoding="utf-8") as file:
        index = json.load(file)
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise ValueError(f"{INDEX} is not a state index of format {FORMAT}")
    return decode_tree(index.get("tree"), _Arrays(directory).get)


class _Arrays:
    """Keeps numpy arrays beside the index, a file each."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._count = 0

    def put(self, value: Any, path: str) -> Any:
        numpy = sys.modules.get("numpy")
        kind = type(value)
        if numpy is None or not (kind is numpy.ndarray or isinstance(value, numpy.generic)):
            return None
        if value.dtype.hasobject:
            raise TypeError(f"{path} is an array of Python objects: {_WAY_OUT}")
        name = f"array-{self._count:05d}.npy"
        self._count += 1
        numpy.save(os.path.join(self._directory, name), value, allow_pickle=False)
        return {"array" if kind is numpy.ndarray else "scalar": name}

    def get(self, word: str, name: Any) -> Any:
        if word not in ("array", "scalar"):
            raise ValueError(f"{INDEX} holds {word!r:.40}, which this version does not know")
        if not _ARRAY_NAME.match(name):
            raise ValueError(f"{INDEX} names the array file {name!r:.100}")
        import numpy as np  # noqa: PLC0415 - only a state that holds arrays needs it

        # Not numpy.load(), which takes an archive for a mapping of arrays.
        with open(os.path.join(self._directory, name), "rb") as file:
            array = np.lib.format.read_array(file, allow_pickle=False)
        return array if word == "array" else array[()]


def encode_tree(value: Any, path: str, put: Callable[[Any, str], Any]) -> Any:
    """What stands for ``value`` in JSON; new objects throughout, so that it is a copy.

    Args:
        value: a tree.
        path: how to name its place in messages.
        put: keeps elsewhere what JSON has no word for, and returns the object of one key that stands
            for it; None when it does not know it either.

    Raises:
        TypeError: neither knows how to write it; names the place in the tree.
    """
    # Exact types only: a subclass (a named tuple, an enum, a masked array) would come back as
    # something else than it was.
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        # Python limits how long a decimal integer may be when it is read; hex has no limit.
        return value if -(2**63) <= value < 2**63 else {"int": hex(value)}
    if kind is float:
        finite = value - value == 0.0
        return value if finite else {"float": struct.pack(">d", value).hex()}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode("ascii")}
    if kind in (list, tuple):
        items = [encode_tree(item, f"{path}[{place}]", put) for place, item in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if isinstance(value, dict):
        return {
            "dict": [
                [
                    encode_tree(key, f"a key of {path}", put),
                    encode_tree(item, f"{path}[{key!r}]", put),
                ]
                for key, item in value.items()
            ]
        }
    node = put(value, path)
    if node is None:
        raise TypeError(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be written: {_WAY_OUT}"
        )
    return node


def decode_tree(node: Any, get: Callable[[str, Any], Any]) -> Any:
    """The tree that :func:`encode_tree` made ``node`` of.

    Args:
        node: from JSON.
        get: finds again what ``put`` kept, by the key and the value of its object.

    Raises:
        ValueError: it cannot be understood.
    """
    if isinstance(node, list):
        return [decode_tree(item, get) for item in node]
    if not isinstance(node, dict):
        return node
    if len(node) != 1:
        raise ValueError(f"{INDEX} holds an object of {len(node)} keys; each has one")
    ((word, body),) = node.items()
    if word == "tuple":
        return tuple(decode_tree(item, get) for item in body)
    if word == "dict":
        return {decode_tree(key, get): decode_tree(item, get) for key, item in body}
    if word == "int":
        return int(body, 16)
    if word == "float":
        return struct.unpack(">d", bytes.fromhex(body))[0]
    if word == "bytes":
        return base64.b64decode(body, validate=True)
    return get(word, body)


class Snapshots(Protocol):
    """A training state as the guard sees it."""

    in_background: bool
    """Whether ``snapshot`` copies, so that training may go on before the copy is written."""
    reads_whole_set: bool
    """Whether ``load`` wants the directory of all ranks, and any number of ranks may have saved."""

    def snapshot(self) -> Callable[[Path], object]:
        """What writes this rank's part of the state of this moment into a directory."""

    def load(self, directory: Path) -> object:
        """Read what was written, by this rank or (``reads_whole_set``) by all."""


class Functions:
    """A state of which only two functions are known: it is written, and read, at once.

    Args:
        save: writes it into a directory.
        load: reads it from there.
    """

    in_background = False
    reads_whole_set = False

    def __init__(self, save: Callable[[Path], object], load: Callable[[Path], object]) -> None:
        self._save = save
        self.load = load

    def snapshot(self) -> Callable[[Path], object]:
        """The function itself: nothing is copied."""
        return self._save


def take_generators() -> dict[str, Any]:
    """The state of ``random`` and of numpy's global generator, if numpy is in use."""
    generators: dict[str, Any] = {"python": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        generators["numpy"] = numpy.random.get_state(legacy=False)
    return generators


def set_generators(generators: Mapping[str, Any]) -> None:
    """Undo whatever was drawn since :func:`take_generators`."""
    random.setstate(generators["python"])
    if "numpy" in generators:
        import numpy as np  # noqa: PLC0415 - only if the script that saved had it

        np.random.set_state(generators["numpy"])


class Bundle:
    """The objects of one rank that make up its training state, and the random generators beside them.

    Args:
        objects: by name, anything with ``state_dict()`` and ``load_state_dict()``, or a numpy
            ``Generator`` (anything with a ``bit_generator``).

    Raises:
        TypeError: an object has neither.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        for name, item in objects.items():
            if not isinstance(name, str):
                raise TypeError(f"state= has the key {name!r}; names are strings")
            stateful = hasattr(item, "state_dict") and hasattr(item, "load_state_dict")
            if not stateful and not hasattr(item, "bit_generator"):
                raise TypeError(
                    f"state[{name!r}] is a {type(item).__qualname__}; it needs state_dict() and"
                    " load_state_dict(), or give attach() save= and load= instead"
                )
        self._objects = dict(objects)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write all objects and the state of ``random`` and numpy's global generator."""
        states = {}
        for name, item in self._objects.items():
            is_stateful = hasattr(item, "state_dict")
            states[name] = item.state_dict() if is_stateful else item.bit_generator.state
        save_tree(directory, {"objects": states, "random": take_generators()})

    def load(self, directory: str | os.PathLike[str]) -> None:
        """Give every object the state that it had.

        Raises:
            KeyError: the checkpoint has no state for one of the objects.
            ValueError, OSError: see :func:`load_tree`.
        """
        tree = load_tree(directory)
        states, generators = tree["objects"], tree["random"]
        missing = self._objects.keys() - states.keys()
        if missing:
            raise KeyError(f"the checkpoint holds no state for {sorted(missing)}")
        unused = states.keys() - self._objects.keys()
        if unused:
            log.warning("the checkpoint also holds %s, which nothing here takes", sorted(unused))
        for name, item in self._objects.items():
            if hasattr(item, "load_state_dict"):
                item.load_state_dict(states[name])
            else:
                item.bit_generator.state = states[name]
        # Last, since loading the objects may have drawn from them.
        set_generators(generators)


def state_of(
    state: Mapping[str, Any] | Snapshots | None,
    save: Callable[[Path], object] | None,
    load: Callable[[Path], object] | None,
) -> Snapshots:
    """The one state that :func:`swansong.attach` was told of, in whichever way.

    Raises:
        ValueError, TypeError: it was told of none, of two, or of one that cannot be saved.
    """
    if state is not None:
        if save is not None or load is not None:
            raise ValueError("attach() takes state=, or save= and load=, not both")
        if not isinstance(state, Mapping):
            return state
        bundle = Bundle(state)
        return Functions(bundle.save, bundle.load)
    if save is None or load is None:
        raise ValueError("attach() needs state=, or both save= and load=")
    return Functions(save, load)
