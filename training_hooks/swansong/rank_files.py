# SPDX-License-Identifier: Apache-2.0
"""The state of one rank as files: a JSON index, and one ``.npy`` file for each array.

Values are restored bit by bit, without pickle.  A tree consists of dict, list, tuple, str, int, float, bool,
None, bytes and numpy arrays or scalars.  A value that JSON cannot represent becomes an object with one key,
such as ``{"tuple": [...]}``.  numpy is needed only if the training script uses it.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import inspect
import json
import os
import random
import re
import struct
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from swansong._log import log
from swansong._ranks.agreement import Ranks

FORMAT = 1
INDEX = "state.json"
GENERATORS = "swansong-generators.json"
"""Name of the file with the global generators, beside the files of a save function."""
_ARRAY_NAME = re.compile(r"^array-\d{5,9}\.npy$")
_WAY_OUT = "keep it out of the state, turn it into arrays and plain values, or give attach() save= and load="
_DICTS = (dict, OrderedDict, defaultdict, Counter)
"""The types of which a content is a dict, and that keep their own type when it is put back."""
_PLAIN_MAX = 64
"""A longer tuple in the state of a generator consists of words of 32 bits."""
_TORCH = "pass it to swansong.torch.TrainingState under a separate name"


def save_tree(directory: str | os.PathLike[str], tree: object, name: str = INDEX) -> None:
    """Write ``tree`` into an existing directory, with a new index of this name.

    Raises:
        TypeError: the tree contains another type than those above; names its place in the tree.
        OSError: the file system returned an error, or the index exists.
    """
    directory = os.fspath(directory)
    index = {"format": FORMAT, "tree": encode_tree(tree, "state", _Arrays(directory).put)}
    with open(os.path.join(directory, name), "x", encoding="utf-8") as file:
        json.dump(index, file, allow_nan=False, separators=(",", ":"))


def load_tree(directory: str | os.PathLike[str], name: str = INDEX) -> Any:
    """Return the tree that :func:`save_tree` wrote into ``directory``.

    Raises:
        ValueError: the index or an array is malformed, or has another format.
        OSError: a file is missing or cannot be read.
    """
    directory = os.fspath(directory)
    with open(os.path.join(directory, name), encoding="utf-8") as file:
        index = json.load(file)
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise ValueError(f"{name} is not a state index of format {FORMAT}")
    return decode_tree(index.get("tree"), _Arrays(directory).get)


class _Arrays:
    """Stores each numpy array in a file beside the index."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._count = 0

    def check(self, value: Any, path: str) -> Any:
        """As :meth:`put`, without writing a file."""
        numpy = sys.modules.get("numpy")
        kind = type(value)
        if numpy is None or not (kind is numpy.ndarray or isinstance(value, numpy.generic)):
            return None
        if value.dtype.hasobject:
            raise TypeError(f"{path} is an array of Python objects: {_WAY_OUT}")
        name = f"array-{self._count:05d}.npy"
        self._count += 1
        return {"array" if kind is numpy.ndarray else "scalar": name}

    def put(self, value: Any, path: str) -> Any:
        node = self.check(value, path)
        if node is not None:
            (name,) = node.values()
            numpy = sys.modules["numpy"]
            numpy.save(os.path.join(self._directory, name), value, allow_pickle=False)
        return node

    def get(self, word: str, name: Any) -> Any:
        if word not in ("array", "scalar"):
            raise ValueError(f"{INDEX} contains {word!r:.40}, which this version cannot read")
        if not _ARRAY_NAME.match(name):
            raise ValueError(f"{INDEX} names the array file {name!r:.100}")
        import numpy as np  # noqa: PLC0415 - only a state that holds arrays needs it

        # Not numpy.load(), which would also open an archive of arrays.
        with open(os.path.join(self._directory, name), "rb") as file:
            array = np.lib.format.read_array(file, allow_pickle=False)
        return array if word == "array" else array[()]


def encode_tree(value: Any, path: str, put: Callable[[Any, str], Any]) -> Any:
    """Encode a tree for JSON; the result shares no object with the tree.

    Args:
        value: a tree.
        path: name of its place, for errors.
        put: stores a value that JSON cannot represent elsewhere, and returns an object with one key as a
            reference.  Returns None for a value that it cannot store.

    Raises:
        TypeError: a value can be neither encoded nor stored; names its place in the tree.
    """
    # Exact types only: a subclass, such as a named tuple or an enum, would come back as its base class.
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        # Python limits the digits of a decimal integer that it parses, but not those of a hexadecimal one.
        return value if -(2**63) <= value < 2**63 else {"int": hex(value)}
    if kind is float:
        finite = value - value == 0.0
        return value if finite else {"float": struct.pack(">d", value).hex()}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode("ascii")}
    if kind in (list, tuple):
        items = [
            # Most long ones contain numbers: the state of a generator has 625.
            item
            if type(item) is int and 0 <= item < 2**63
            else encode_tree(item, f"{path}[{place}]", put)
            for place, item in enumerate(value)
        ]
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
        way_out = _TORCH if kind.__module__.partition(".")[0] == "torch" else _WAY_OUT
        raise TypeError(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be written: {way_out}"
        )
    return node


def decode_tree(node: Any, get: Callable[[str, Any], Any]) -> Any:
    """Return the tree that :func:`encode_tree` encoded as ``node``.

    Args:
        node: from JSON.
        get: returns the value that ``put`` stored, by key and value of its reference.

    Raises:
        ValueError: the node is malformed.
    """
    if isinstance(node, list):
        return [decode_tree(item, get) for item in node]
    if not isinstance(node, dict):
        return node
    if len(node) != 1:
        raise ValueError(f"{INDEX} contains an object of {len(node)} keys instead of one")
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


class Arrivals(Protocol):
    """Loads files of a checkpoint that the daemon is still fetching."""

    reads: Collection[int]
    """Ranks whose files this rank reads; empty: all ranks."""
    prefixes: Sequence[str]
    """Beginnings of the paths of the files that the ranks of this VM read; empty: all files."""

    def lacks(self, directory: Path) -> bool:
        """Whether this rank must also read files of other ranks than :attr:`reads`; or raise an error.

        Another number of ranks saved the checkpoint, for example, or sharded it differently.
        """

    def read_all(self) -> None:
        """Read the files of all ranks from now on."""

    def take(self, path: str, fd: int) -> None:
        """Load what this rank reads of a verified file, and close its descriptor; raises nothing.

        Args:
            path: within the checkpoint.
            fd: the open file; -1: the file is read from the directory at the end.
        """

    def clear(self) -> None:
        """Forget all files: the next ones are of another checkpoint."""


class Snapshots:
    """Base of all training states, which a guard saves and loads.

    A state that defines only ``snapshot`` and ``load`` is not checked before its first save.
    """

    in_background = False
    """Whether ``snapshot`` copies, so that training may continue before the copy is written."""
    reads_whole_set = False
    """Whether ``load`` takes the directory of all ranks, of any number of ranks."""
    owns_loop = True
    """Whether all that the loop needs is in this state.

    A framework may keep the position of its data, and change the objects before it loads a checkpoint.  It
    polls only at moments that it can save.
    """
    has_loaders = False
    """Whether there is a loader whose position a rollback may keep."""
    keeps_loaders = False
    """Whether the next ``load`` leaves the positions of the loaders as they are."""
    takes_code = False
    """Whether the checkpoints of the run are signed, so that code in them comes from the run."""
    ranks = Ranks()
    """Position of this process in the job.  The guard sets it before all other uses of the state."""
    read_s = 0.0
    """Time that the last ``load`` took to read and verify files; 0 if it is unknown."""

    def snapshot(self) -> Callable[[Path], object]:
        """Return a function that writes this rank's part of the current state into a directory."""
        raise NotImplementedError

    def load(self, directory: Path) -> object:
        """Load the files of this rank or, with ``reads_whole_set``, of all ranks."""
        raise NotImplementedError

    def rehearse(self) -> None:
        """Check at attach() that the state can be saved and loaded again; raise if not."""

    def before_restore(self) -> None:
        """Warn if training has begun before restore()."""

    def arrivals(self) -> Arrivals | None:
        """Begin a load that takes files as they arrive, and ends with ``load``; None: ``load`` reads all."""
        return None

    def observe_step(self) -> bool:
        """Check the state at one of the first steps; returns whether to call this at the next step too."""
        return False

    def prepare_copy(self) -> None:
        """Prepare, after the first step, for copies: the daemon will request some."""

    def count_steps_with(self, completed_steps: Callable[[], int]) -> None:
        """Take the function that returns the number of steps that the script has reported."""

    def has_continued(self) -> bool:
        """Whether the loop over the training data has begun since the last load, as far as it can be seen."""
        return not self.owns_loop

    def before_end(self) -> None:
        """The run is about to end: what only the next step would undo is undone now."""

    def note_boundary(self) -> None:
        """Remember the present state as that of the last step."""

    def own_s(self) -> float | None:
        """Time of the part of a step in which this rank waits for no other, in seconds; None: unknown."""
        return None

    def is_at_boundary(self) -> bool:
        """Whether the state is still that of the last step, as far as it can be seen."""
        return True

    def digests(self, *, with_weights: bool) -> dict[str, Any]:  # noqa: ARG002 - this state has none
        """Digests of what the last step has used, by name; see :mod:`swansong._checkpoint.redone`.

        Args:
            with_weights: also of the weights after the step, which may take some time.
        """
        return {}

    def gpus(self) -> set[Any]:
        """CUDA devices whose work the digests need."""
        return set()


class Functions(Snapshots):
    """A state that two functions of the training script save and load, without a copy.

    The global generators are saved beside the files of these functions, in :data:`GENERATORS`.

    Args:
        save: writes the state into a directory.
        load: reads the state from a directory.
    """

    def __init__(self, save: Callable[[Path], object], load: Callable[[Path], object]) -> None:
        self._save, self._load = save, load

    def snapshot(self) -> Callable[[Path], object]:
        """Return a function that calls the save function: nothing is copied."""
        return self._write

    def load(self, directory: Path) -> None:
        """Call the load function, and then set the generators.

        Raises:
            ValueError: the file with the generators is malformed.
            OSError: a file cannot be read.
        """
        self._load(directory)
        # Last, because the load function may draw random numbers.
        with contextlib.suppress(FileNotFoundError):
            set_generators(unpack(load_tree(directory, GENERATORS)))

    def _write(self, directory: Path) -> None:
        generators = pack(take_generators())
        self._save(directory)
        save_tree(directory, generators, GENERATORS)


_held: dict[str, Any] | None = None
"""The states of the global generators while the numbers that are drawn do not count."""


@contextlib.contextmanager
def holding_generators() -> Iterator[None]:
    """Let the random numbers of a block not count.

    Its end sets the global generators back, and a checkpoint in it has their states from before it.
    """
    global _held  # noqa: PLW0603 - so are the generators
    if _held is not None:
        yield
        return
    _held = take_generators()
    try:
        yield
    finally:
        held, _held = _held, None
        set_generators(held)


def take_generators() -> dict[str, Any]:
    """Return the states of the global generators in use: ``random``, numpy, torch and every CUDA device."""
    if _held is not None:
        return dict(_held)
    generators: dict[str, Any] = {"python": random.getstate()}
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        generators["numpy"] = numpy.random.get_state(legacy=False)
    if torch is not None:
        generators["torch"] = torch.get_rng_state()
        if torch.cuda.is_initialized():
            generators["cuda"] = torch.cuda.get_rng_state_all()
    return generators


def set_generators(generators: Mapping[str, Any]) -> None:
    """Set the generators to states that :func:`take_generators` returned."""
    random.setstate(generators["python"])
    if "numpy" in generators:
        import numpy as np  # noqa: PLC0415 - only if the script that saved used it

        np.random.set_state(generators["numpy"])
    if "torch" in generators:
        import torch  # noqa: PLC0415 - only if the script that saved used it

        torch.set_rng_state(generators["torch"])
        devices = generators.get("cuda", ()) if torch.cuda.is_available() else ()
        for device, state in enumerate(devices[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, device)


def pack(tree: Any) -> Any:
    """Return states of generators without tensors and arrays, for an index in JSON."""
    if isinstance(tree, dict):
        return {key: pack(item) for key, item in tree.items()}
    if isinstance(tree, tuple) and len(tree) > _PLAIN_MAX:
        return {"words": struct.pack(f"<{len(tree)}I", *tree)}
    if isinstance(tree, tuple | list):
        return type(tree)(pack(item) for item in tree)
    if not (hasattr(tree, "dtype") and tree.ndim):
        return tree
    if hasattr(tree, "tobytes"):
        return {"array": tree.tobytes(), "dtype": tree.dtype.str}
    return {"torch": bytes(tree.tolist())}


def unpack(tree: Any) -> Any:
    """Return the states that :func:`pack` packed."""
    if isinstance(tree, tuple | list):
        return type(tree)(unpack(item) for item in tree)
    if not isinstance(tree, dict):
        return tree
    if tree.keys() == {"torch"}:
        import torch  # noqa: PLC0415 - only if the script that saved used it

        return torch.tensor(list(tree["torch"]), dtype=torch.uint8, device="cpu")
    if tree.keys() == {"words"}:
        return struct.unpack(f"<{len(tree['words']) // 4}I", tree["words"])
    if tree.keys() == {"array", "dtype"}:
        import numpy as np  # noqa: PLC0415 - only if the script that saved used it

        return np.frombuffer(tree["array"], np.dtype(tree["dtype"])).copy()
    return {key: unpack(item) for key, item in tree.items()}


@contextlib.contextmanager
def trying(action: str, name: str, item: Any) -> Iterator[None]:
    """Name the object in an error.

    Args:
        action: ``save`` or ``load``.
        name: of the object.
        item: the object, without wrappers.

    Raises:
        TypeError: the block raised an error.
    """
    try:
        yield
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        passed = item.state_dict() if isinstance(item, Container) else item
        raise TypeError(
            f"cannot {action} {name}, a {type(passed).__qualname__}: {reason}"
        ) from error


class Container:
    """The content of a container, an array or a tensor of the script, which is restored in its place."""

    def __init__(self, item: Any) -> None:
        self._item = item

    def state_dict(self) -> Any:
        """Return the content itself: a save encodes or copies it."""
        return self._item

    def load_state_dict(self, content: Any) -> None:
        """Put the content back.

        Raises:
            ValueError: the array has another shape or type than the one that was saved.
        """
        if _filled(self._item, content) is not self._item:
            raise ValueError(
                "the saved array has another shape or type, or the elements of this one cannot be written"
            )


@dataclass(frozen=True)
class RandomSource:
    """A generator of the script, with the methods of all other objects of a state."""

    item: Any
    state_dict: Callable[[], Any]
    load_state_dict: Callable[[Any], object]

    @classmethod
    def of(cls, item: Any) -> RandomSource | None:
        """Return the source for a generator of ``random``, torch or numpy; None for another object."""
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        if isinstance(item, random.Random):
            return cls(item, item.getstate, item.setstate)
        if torch is not None and isinstance(item, torch.Generator):
            return cls(item, item.get_state, item.set_state)
        if numpy is not None and isinstance(item, numpy.random.RandomState):
            return cls(item, partial(item.get_state, legacy=False), item.set_state)
        # hasattr() is also true for objects whose __getattr__ accepts any name, such as ignite's metrics.
        if inspect.getattr_static(item, "bit_generator", None) is None:
            return None
        bits = item.bit_generator
        return cls(item, lambda: bits.state, partial(setattr, bits, "state"))


def _filled(target: Any, value: Any) -> Any:
    """Put a restored value into ``target`` if possible; return the value that now stands there.

    Containers and arrays stay the same objects, because the script may have further references to them.
    """
    if type(target) in _DICTS and type(value) is dict:
        restored = {key: _filled(target.get(key), each) for key, each in value.items()}
        target.clear()
        target.update(restored)
        return target
    if type(target) is type(value) is list:
        before = [*target, *(None for _ in value)]
        target[:] = [_filled(*pair) for pair in zip(before, value, strict=False)]
        return target
    if type(target) is type(value) is tuple and len(target) == len(value):
        return tuple(map(_filled, target, value))
    if not (_is_array(target) and type(target) is type(value)):
        return value
    if (target.shape, target.dtype) != (value.shape, value.dtype):
        return value
    try:
        # A tensor whose gradient is computed can be changed only without its history.
        (target.detach() if hasattr(target, "detach") else target)[...] = value
    except (RuntimeError, ValueError):  # expanded, made in torch.inference_mode(), or read-only
        return value
    return target


def retyped(value: Any, before: Any) -> Any:
    """Return a restored value whose dicts have the types that an object has for them before the load.

    JSON has one type, and an object may need its own, such as the ``Counter`` of torch's ``MultiStepLR``.

    Args:
        value: of the checkpoint.
        before: the object, or its attribute of the same name.
    """
    if type(value) is dict:
        parts = before if isinstance(before, dict) else getattr(before, "__dict__", {})
        items = {key: retyped(each, parts.get(key)) for key, each in value.items()}
        if type(before) not in _DICTS:
            return items
        restored = copy.copy(before)
        restored.clear()
        restored.update(items)
        return restored
    if type(value) is type(before) is list and len(value) == len(before) <= _PLAIN_MAX:
        return list(map(retyped, value, before))
    return value


def _is_array(item: Any) -> bool:
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    return (numpy is not None and type(item) is numpy.ndarray) or (
        torch is not None and isinstance(item, torch.Tensor)
    )


def by_name(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the objects of a state, all with ``state_dict()`` that can have one.

    A dict, a list, an array or a tensor becomes a :class:`Container`, a generator a :class:`RandomSource`.
    """
    for name, item in state.items():
        if not isinstance(name, str):
            raise TypeError(f"state= has the key {name!r}; names must be strings")
        if _is_array(item) and not getattr(getattr(item, "flags", None), "writeable", True):
            raise TypeError(
                f"{name} is a read-only array, which cannot be restored in its place: put it into a dict"
            )
    return {name: _stateful(item) for name, item in state.items()}


def _stateful(item: Any) -> Any:
    if type(item) in (*_DICTS, list) or _is_array(item):
        return Container(item)
    return RandomSource.of(item) or item


class Bundle(Snapshots):
    """The objects of one rank's training state, saved together with the global random generators.

    Args:
        objects: by name, anything with ``state_dict()`` and ``load_state_dict()``; a dict, a list or an array
            that is restored in its place; or a generator of ``random`` or numpy.

    Raises:
        TypeError: an object has another type.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = by_name(objects)
        for name, item in self._objects.items():
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
                raise TypeError(
                    f"state[{name!r}] has the type {type(item).__qualname__}: put a value into a dict or a"
                    " list, an object needs state_dict() and load_state_dict(); or give attach() save= and"
                    " load= instead"
                )

    def snapshot(self) -> Callable[[Path], object]:
        """Return :meth:`save`: nothing is copied."""
        return self.save

    def rehearse(self) -> None:
        """Encode the state without writing it.

        Raises:
            TypeError: an object returns a state that cannot be saved.
        """
        for name, item in self._objects.items():
            with trying("save", name, item):
                encode_tree(item.state_dict(), f"state[{name!r}]", _Arrays("").check)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write all objects and the global random generators."""
        states = {name: item.state_dict() for name, item in self._objects.items()}
        save_tree(directory, {"objects": states, "random": pack(take_generators())})

    def load(self, directory: str | os.PathLike[str]) -> None:
        """Load all objects and the global random generators.

        Raises:
            KeyError: the checkpoint contains no state for one of the objects.
            ValueError, OSError: see :func:`load_tree`.
        """
        tree = load_tree(directory)
        states, generators = tree["objects"], tree["random"]
        check_names(states.keys(), self._objects.keys())
        for name, item in self._objects.items():
            item.load_state_dict(retyped(states[name], item))
        # Last, because loading the objects may draw random numbers.
        set_generators(unpack(generators))


def check_names(saved: Set[str], loaded: Set[str]) -> None:
    """Compare the names of the objects in a checkpoint with those that the script loads.

    Raises:
        KeyError: the checkpoint contains no state for one of the objects.
    """
    if missing := loaded - saved:
        raise KeyError(f"the checkpoint contains no state for {sorted(missing)}")
    if unused := saved - loaded:
        log.warning(
            "the checkpoint also contains %s, which this script does not load", sorted(unused)
        )


def state_of(
    state: Mapping[str, Any] | Snapshots | None,
    save: Callable[[Path], object] | None,
    load: Callable[[Path], object] | None,
) -> Snapshots:
    """Return the state that the arguments of :func:`swansong.attach` describe.

    Raises:
        ValueError: the arguments describe no state, or two.
        TypeError: the state contains an object that cannot be saved.
    """
    if state is not None:
        if save is not None or load is not None:
            raise ValueError("attach() takes state=, or save= and load=, not both")
        if not isinstance(state, Mapping):
            return state
        return _with_torch(state) or Bundle(state)
    if save is None or load is None:
        raise ValueError("attach() needs state=, or both save= and load=")
    return Functions(save, load)


def _with_torch(state: Mapping[str, Any]) -> Snapshots | None:
    """Return the state as a :class:`swansong.torch.TrainingState` if it has objects of PyTorch."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    kinds = (torch.nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Generator)
    if not any(isinstance(item, kinds) for item in state.values()):
        return None
    # By name, because it builds on this module, and only scripts with torch need it.
    made: Snapshots = import_module("swansong.torch").TrainingState(**state)
    return made
