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
from collections.abc import Mapping
from typing import Any

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
    index = {"format": FORMAT, "tree": _Writer(directory).encode(tree, "state")}
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
    return _decode(directory, index.get("tree"))


class _Writer:
    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._arrays = 0

    def encode(self, value: Any, path: str) -> Any:
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
        if kind is list:
            return [self.encode(item, f"{path}[{place}]") for place, item in enumerate(value)]
        if kind is tuple:
            return {
                "tuple": [self.encode(item, f"{path}[{place}]") for place, item in enumerate(value)]
            }
        if isinstance(value, dict):
            return {
                "dict": [
                    [self.encode(key, f"a key of {path}"), self.encode(item, f"{path}[{key!r}]")]
                    for key, item in value.items()
                ]
            }
        numpy = sys.modules.get("numpy")
        if numpy is not None and (kind is numpy.ndarray or isinstance(value, numpy.generic)):
            if value.dtype.hasobject:
                raise TypeError(f"{path} is an array of Python objects: {_WAY_OUT}")
            name = f"array-{self._arrays:05d}.npy"
            self._arrays += 1
            numpy.save(os.path.join(self._directory, name), value, allow_pickle=False)
            return {"array" if kind is numpy.ndarray else "scalar": name}
        raise TypeError(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be written: {_WAY_OUT}"
        )


def _decode(directory: str, node: Any) -> Any:
    if isinstance(node, list):
        return [_decode(directory, item) for item in node]
    if not isinstance(node, dict):
        return node
    if len(node) != 1:
        raise ValueError(f"{INDEX} holds an object of {len(node)} keys; each has one")
    ((word, body),) = node.items()
    if word == "tuple":
        return tuple(_decode(directory, item) for item in body)
    if word == "dict":
        return {_decode(directory, key): _decode(directory, item) for key, item in body}
    if word == "int":
        return int(body, 16)
    if word == "float":
        return struct.unpack(">d", bytes.fromhex(body))[0]
    if word == "bytes":
        return base64.b64decode(body, validate=True)
    if word in ("array", "scalar"):
        if not _ARRAY_NAME.match(body):
            raise ValueError(f"{INDEX} names the array file {body!r:.100}")
        import numpy as np  # noqa: PLC0415 - only a state that holds arrays needs it

        array = np.load(os.path.join(directory, body), allow_pickle=False)
        return array if word == "array" else array[()]
    raise ValueError(f"{INDEX} holds {word!r:.40}, which this version does not know")


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
        generators: dict[str, Any] = {"python": random.getstate()}
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            generators["numpy"] = numpy.random.get_state(legacy=False)
        save_tree(directory, {"objects": states, "random": generators})

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
        random.setstate(generators["python"])
        if "numpy" in generators:
            import numpy as np  # noqa: PLC0415 - only if the script that saved had it

            np.random.set_state(generators["numpy"])
