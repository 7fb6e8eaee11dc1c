# SPDX-License-Identifier: Apache-2.0
"""The files of a checkpoint's state."""

from __future__ import annotations

import enum
import json
import math
import random
import struct
import tempfile
from collections import defaultdict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from swansong.rank_files import (
    GENERATORS,
    INDEX,
    Bundle,
    Functions,
    load_tree,
    save_tree,
    state_of,
)
from swansong.torch import TrainingState

from testkit.python_process import output_of
from testkit.training_parts import Counter, save_part

ARRAYS = hnp.arrays(
    dtype=st.one_of(
        hnp.scalar_dtypes(),
        hnp.byte_string_dtypes(max_len=5),
        hnp.unicode_string_dtypes(max_len=5),
    ),
    shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=10),
    st.binary(max_size=20),
    ARRAYS,
    ARRAYS.map(lambda array: array.reshape(-1)[0] if array.size else array.dtype.type()),
)
KEYS = st.one_of(
    st.integers(), st.text(max_size=5), st.booleans(), st.none(), st.binary(max_size=3)
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
    ),
    max_leaves=12,
)


def same(left: Any, right: Any) -> bool:
    """Whether two trees are equal in type and in every bit."""
    if type(left) is not type(right):
        return False
    if isinstance(left, (np.ndarray, np.generic)):
        return bool(
            left.dtype == right.dtype
            and left.shape == right.shape
            and np.ascontiguousarray(left).tobytes() == np.ascontiguousarray(right).tobytes()
        )
    if isinstance(left, float):
        return struct.pack(">d", left) == struct.pack(">d", right)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return same(list(left.keys()), list(right.keys())) and same(
            list(left.values()), list(right.values())
        )
    return bool(left == right)


@example({"a": (1, [2.5, -0.0], {}), 7: math.nan, "big": 10**5000, "t": ()})
@example(np.asfortranarray(np.arange(6.0).reshape(2, 3)))
@example(np.arange(10)[::2])
@given(TREES)
def test_a_tree_is_restored_bit_by_bit(tree: Any) -> None:
    """With types, order of keys, tuples, signed zeros, NaN bits and dtypes."""
    with tempfile.TemporaryDirectory() as directory:
        save_tree(directory, tree)
        assert same(load_tree(directory), tree)


class Colour(enum.IntEnum):
    RED = 1


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1, 2},
        Colour.RED,
        Point(1, 2),
        np.array([object()], dtype=object),
        np.ma.masked_array([1, 2], mask=[True, False]),
        lambda: None,
        1j,
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_cannot_be_written_is_named(value: Any, tmp_path: Path) -> None:
    """The error has its place in the state, and the fix; nothing is pickled."""
    with pytest.raises(TypeError, match=r"state\['optim'\]\[1\].*save="):
        save_tree(tmp_path, {"optim": [0, value]})


def test_an_index_names_no_file_elsewhere(tmp_path: Path) -> None:
    """A forged index cannot make load_tree() read another file."""
    (tmp_path / INDEX).write_text(json.dumps({"format": 1, "tree": {"array": "../x.npy"}}))
    with pytest.raises(ValueError, match="names the array file"):
        load_tree(tmp_path)


def test_all_generators_resume_where_they_were(tmp_path: Path) -> None:
    """random, numpy's global generator and a Generator draw the same numbers after a restore."""
    generator = np.random.default_rng(5)
    bundle = Bundle({"generator": generator, "counter": Counter()})

    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), np.random.normal(), generator.normal()]

    draw()
    bundle.save(tmp_path)
    drawn = draw()
    draw()
    bundle.load(tmp_path)
    assert draw() == drawn


def test_an_object_without_state_in_the_checkpoint_is_an_error(tmp_path: Path) -> None:
    """A loader that was added after the save does not silently start from the beginning."""
    Bundle({"a": Counter()}).save(tmp_path)
    with pytest.raises(KeyError, match="b"):
        Bundle({"a": Counter(), "b": Counter()}).load(tmp_path)


def test_an_object_without_a_state_dict_is_refused_at_once() -> None:
    """The error is raised when the script starts, not at a notice."""
    with pytest.raises(TypeError, match="state_dict"):
        Bundle({"thing": object()})
    with pytest.raises(TypeError, match="weights is a read-only array"):
        Bundle({"weights": np.broadcast_to(np.zeros(1), (3,))})
    with pytest.raises(TypeError, match="cannot save buffer, a dict: "):
        Bundle({"buffer": {"replay": object()}}).rehearse()


def test_containers_and_arrays_are_restored_in_their_place(tmp_path: Path) -> None:
    """Other references of the script to them, and to arrays and lists in them, see the restored content."""

    def script() -> dict[str, Any]:
        inner = [np.zeros(2), {"n": 0}]
        return {
            "table": {
                "inner": inner,
                "old": 1,
                "grows": np.zeros(1),
                "pair": (inner[0], np.zeros(1)),
            },
            "counts": defaultdict(int, {(0, 0): 1}),
            "fixed": {"read-only": np.broadcast_to(np.zeros(1), (3,))},
            "log": [inner[0], 1],
            "weights": np.zeros((2, 2)),
        }

    before, after = script(), script()
    before["table"]["inner"][0] += 1.5
    before["table"]["inner"][1]["n"] = 7
    del before["table"]["old"]
    before["table"]["grows"] = np.ones(3)
    before["table"]["pair"][1][0] = 4
    before["counts"][np.int64(1), np.int64(0)] += 5
    before["fixed"]["read-only"] = np.broadcast_to(np.ones(1), (3,))
    before["log"].append((2, "three"))
    before["weights"] += np.eye(2)
    state_of(before, None, None).snapshot()(tmp_path)
    inner, weights, pair = after["table"]["inner"], after["weights"], after["table"]["pair"]
    state_of(after, None, None).load(tmp_path)
    assert inner[0].tolist() == [1.5, 1.5]
    assert inner[1] == {"n": 7}
    assert after["table"].keys() == {"inner", "grows", "pair"}
    assert pair[1].tolist() == [4.0]
    assert after["counts"] == {(0, 0): 1, (1, 0): 5}
    assert after["counts"]["of a new key"] == 0, "no defaultdict any more"
    assert after["fixed"]["read-only"].tolist() == [1.0] * 3
    assert after["table"]["grows"].tolist() == [1.0, 1.0, 1.0]
    assert after["log"][1:] == [1, (2, "three")]
    assert weights.tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_an_array_of_another_shape_cannot_take_the_saved_one(tmp_path: Path) -> None:
    """The script would continue with the new array."""
    state_of({"weights": np.zeros(3)}, None, None).snapshot()(tmp_path)
    with pytest.raises(ValueError, match="another shape"):
        state_of({"weights": np.zeros(4)}, None, None).load(tmp_path)


def test_objects_of_pytorch_become_a_training_state(tmp_path: Path) -> None:
    """Also a tensor alone, whose content is restored in its place, and containers with tensors."""

    def script(value: float) -> dict[str, Any]:
        return {
            "net": torch.nn.Linear(2, 1, bias=False),
            "mean": torch.full((2,), value, requires_grad=True),
            "replay": [torch.full((3,), value), {"n": value}],
        }

    before, after = script(1.0), script(0.0)
    state = state_of(before, None, None)
    assert isinstance(state, TrainingState)
    save_part(state, tmp_path)
    mean, replayed = after["mean"], after["replay"][0]
    state_of(after, None, None).load(tmp_path)
    assert torch.equal(after["net"].weight, before["net"].weight)
    assert (mean.tolist(), replayed.tolist(), after["replay"][1]) == (
        [1.0] * 2,
        [1.0] * 3,
        {"n": 1.0},
    )


def test_numpy_is_not_imported_for_a_state_without_arrays(tmp_path: Path) -> None:
    """The hooks need the standard library only, and save and load without numpy."""
    code = (
        "import sys, swansong\nfrom swansong.rank_files import Bundle\n"
        "class C:\n state_dict = lambda self: {'x': (1, 2.5)}\n"
        " load_state_dict = lambda self, s: s['x'] == (1, 2.5) or sys.exit('wrong')\n"
        f"b = Bundle({{'c': C()}}); b.save({str(tmp_path)!r}); b.load({str(tmp_path)!r})\n"
        "sys.exit('numpy' in sys.modules)"
    )
    output_of("-c", code)


def test_generators_come_along_with_functions(tmp_path: Path) -> None:
    """``random``, numpy and, if it is imported, torch draw the same numbers after a restore."""
    import torch

    def draw() -> list[float]:
        return [random.random(), np.random.rand(), torch.rand(1).item()]

    def load(directory: Path) -> None:
        draw()  # the function may draw; the generators are set after it
        assert (directory / "own").read_text() == "mine"

    state = Functions(lambda directory: (directory / "own").write_text("mine"), load)
    draw()
    state.snapshot()(tmp_path)
    wanted = draw()
    draw()
    state.load(tmp_path)
    assert draw() == wanted
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own", GENERATORS]
    (tmp_path / GENERATORS).unlink()  # written by a program without the hooks
    state.load(tmp_path)


def test_a_save_function_cannot_write_the_file_of_the_generators(tmp_path: Path) -> None:
    """Its file is not replaced silently."""
    state = Functions(lambda directory: (directory / GENERATORS).write_text("mine"), print)
    with pytest.raises(FileExistsError, match=GENERATORS):
        state.snapshot()(tmp_path)
