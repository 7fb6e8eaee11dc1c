# SPDX-License-Identifier: Apache-2.0
"""Properties that a checkpoint presupposes, and a script may have changed since.

The structure of the objects, the modes of modules, the options of optimizers, and the versions of libraries.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from swansong._log import log
from swansong._torch.kinds import modules_of, optimizers_of
from swansong._torch.modules import state_of_module, unwrap

Structure = dict[str, Any]
Options = dict[str, list[dict[str, Any]]]
Modes = dict[str, dict[str, str]]
_SCHEDULED = {"params", "lr"}
_CYCLED = {"momentum", "betas"}
"""Options that a schedule with ``base_momentum`` changes."""
_DIFFERENCES_MAX = 5


class ScriptWatch:
    """Warns if the script and a checkpoint presuppose different things.

    Args:
        objects: of the training state, by name.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = objects
        self._loadable: Structure = {}
        """The structure of the objects at the last restore, where a resumed run loads a checkpoint."""
        self._options: Options = {}
        """The options of the script, before the load in progress."""
        self._saved_modes: Modes = {}
        """The modes of modules in the checkpoint that was loaded, until the first step."""

    def note_structure(self) -> None:
        """Take the present structure as the one that a checkpoint must have."""
        self._loadable = structure_of(self._objects)

    def facts(self) -> dict[str, Any]:
        """Return the part of an index that :meth:`loaded` compares."""
        return {"surroundings": surroundings(), "modes": modes_of(self._objects)}

    def saved(self, names: Mapping[str, Any]) -> None:
        """Compare a checkpoint, which has these names in the state of each module, with the noted one."""
        structure = structure_of(self._objects, names)
        if changes := changes_of(self._loadable, structure):
            self._loadable = structure
            log.warning(
                "the script cannot load this checkpoint as it was at guard.restore(): %s; a resumed run must"
                " make the same change before it calls restore()",
                "; ".join(changes),
            )

    def before_load(self) -> None:
        """Note the options of the script, which a load replaces."""
        self._options = options_of(self._objects)

    def loaded(self, index: Mapping[str, Any]) -> None:
        """Name the options that the load has replaced, and other surroundings in the index."""
        if replaced := _replaced(self._options, options_of(self._objects)):
            log.warning(
                "the checkpoint has replaced options of the script: %s; to change an option in a run, set it"
                " after guard.restore()",
                ", ".join(replaced),
            )
        if others := _other_surroundings(_mapping(index.get("surroundings"))):
            log.warning(
                "the checkpoint was made elsewhere, so bits may differ: %s", ", ".join(others)
            )
        # Those of another form, by another writer, are left out.
        self._saved_modes = {
            name: {kind: bits for kind, bits in kinds.items() if isinstance(bits, str)}
            for name, kinds in _mapping(index.get("modes")).items()
            if isinstance(kinds, dict)
        }

    def first_step(self) -> None:
        """Compare the modes at the first step with those in the checkpoint."""
        saved, self._saved_modes = self._saved_modes, {}
        if differing := differing_modes(self._objects, saved):
            log.warning(
                "the first step after the resume used modules in another mode: %s; the script sets it"
                " only at an earlier step: let it depend on the step or the epoch",
                "; ".join(differing),
            )


def structure_of(objects: Mapping[str, Any], names: Mapping[str, Any] | None = None) -> Structure:
    """Return what must be equal when a checkpoint is saved and when it is loaded, by the name of the object.

    Args:
        objects: of the training state, by name.
        names: the names in the state of each module, if they are known already.
    """
    found: Structure = {}
    for name, optimizer in optimizers_of(objects).items():
        found[name] = tuple(len(group["params"]) for group in optimizer.param_groups)
    for name, module in modules_of(objects).items():
        found[name] = (state_of_module(module) if names is None else names[name]).keys()
    return found


def changes_of(before: Structure, now: Structure) -> list[str]:
    """Return a clause for each object whose structure has changed."""
    texts = []
    for name in before.keys() & now.keys():
        old, new = before[name], now[name]
        if old == new:
            continue
        if isinstance(new, tuple):
            texts.append(
                f"{name} has groups of {_numbers(new)} parameters instead of {_numbers(old)}"
            )
        else:
            gained, lost = sorted(new - old), sorted(old - new)
            parts = [f"has {gained[0]!r}"] * bool(gained) + [f"lacks {lost[0]!r}"] * bool(lost)
            texts.append(f"{name} {' and '.join(parts)}")
    return sorted(texts)


def _numbers(sizes: Iterable[int]) -> str:
    return " and ".join(map(str, sizes))


def modes_of(objects: Mapping[str, Any]) -> Modes:
    """Return, for each module, which parameters require a gradient and which modules train, as bits.

    During an evaluation the second one is left out: a resume does not return into it.
    """
    return {
        name: {kind: "".join("01"[bit] for _, bit in bits) for kind, bits in _modes(item)}
        for name, item in modules_of(objects).items()
    }


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def differing_modes(
    objects: Mapping[str, Any], saved: Mapping[str, Mapping[str, str]]
) -> list[str]:
    """Return a clause for each kind of mode in which modules differ from the checkpoint."""
    texts = []
    for name, item in objects.items():
        for kind, bits in _modes(item) if name in saved else ():
            before = saved[name].get(kind, "")
            found = [
                (path, was)
                for (path, bit), was in zip(bits, before, strict=False)
                if bit != (was == "1")
            ]
            if found and len(before) == len(bits):
                path, was = found[0]
                texts.append(
                    f"{len(found)} of {name} ({path or 'itself'} had {kind}={was == '1'} when it was saved)"
                )
    return texts


def _modes(module: torch.nn.Module) -> Iterator[tuple[str, list[tuple[str, bool]]]]:
    # Not named_modules(): it takes twice as long, and training stands still at a save.
    inner = unwrap(module)
    found, level = {inner: ""}, [inner]
    for each in level:
        for name, child in each._modules.items():  # noqa: SLF001
            if child is not None and child not in found:
                found[child] = f"{found[each]}.{name}" if found[each] else name
                level.append(child)
    yield (
        "requires_grad",
        [
            (f"{path}.{name}" if path else name, parameter.requires_grad)
            for each, path in found.items()
            for name, parameter in each._parameters.items()  # noqa: SLF001
            if parameter is not None
        ],
    )
    if inner.training:
        yield "training", [(path, each.training) for each, path in found.items()]


def options_of(objects: Mapping[str, Any]) -> Options:
    """Return the options of the optimizers' groups that no scheduler changes."""
    return {
        name: [
            {
                key: value
                for key, value in group.items()
                if key not in (_SCHEDULED | _CYCLED if "base_momentum" in group else _SCHEDULED)
            }
            for group in item.param_groups
        ]
        for name, item in optimizers_of(objects).items()
    }


def _replaced(of_script: Options, of_checkpoint: Options) -> list[str]:
    texts = {
        f"{key}={new[key]!r} of {name} instead of {value!r}": None
        for name, groups in of_script.items()
        for old, new in zip(groups, of_checkpoint[name], strict=False)
        for key, value in old.items()
        if key in new and _is_plain(value) and _is_plain(new[key]) and new[key] != value
    }
    return list(texts)[:_DIFFERENCES_MAX]


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (int, float, str))


def surroundings() -> dict[str, str]:
    """Return the versions and the hardware on which the bits of a step depend."""
    found = {"torch": torch.__version__, "python": platform.python_version()}
    if torch.cuda.is_initialized():  # a question to an idle GPU would take memory there
        found["GPU"] = torch.cuda.get_device_name()
    return found


def _other_surroundings(saved: Mapping[str, Any]) -> list[str]:
    now = surroundings()
    return [
        f"{name} {now[name]} instead of {str(saved[name])!r:.60}"
        for name in now.keys() & saved.keys()
        if now[name] != saved[name]
    ]
