# SPDX-License-Identifier: Apache-2.0
"""Checks, before the first step, that the objects of a training state belong together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from swansong._log import log
from swansong._torch.kinds import modules_of, optimizers_of
from swansong._torch.loader import ResumableLoader, find_data_loader
from swansong._torch.modules import unwrap
from swansong._torch.objects import params_of
from swansong._torch.outside import has_lasting_workers, inside
from swansong._torch.sharding import is_sharded


def warn_about_loaders(objects: Mapping[str, Any], found: Iterable[Any]) -> None:
    """Warn about loaders that change the random numbers of a resumed run.

    A loader draws a seed from the global generator when it starts its workers, or for each new iterator.  A
    resumed run draws that seed once more, and its later random numbers differ.

    Args:
        objects: of the training state, by name.
        found: of the process; evaluation loaders are no part of the state.
    """
    if any(map(has_lasting_workers, found)):
        log.warning(
            "a DataLoader has persistent_workers=True: a resumed run starts its workers again, and draws"
            " other random numbers from then on; wrap it in a ResumableLoader, evaluation loaders too"
        )
    for name, item in objects.items():
        loader = None if isinstance(item, ResumableLoader) else find_data_loader(item)
        kinds = type(getattr(loader, "sampler", None)).__mro__
        if "RandomSampler" in [kind.__name__ for kind in kinds]:  # torchdata has its own
            log.warning(
                "%s is a %s that shuffles: torchdata does not save the generator of the next epochs, which"
                " get other batches after a resume; pass ResumableLoader(%s, fixed_samples=True)",
                name,
                type(loader).__name__,
                name,
            )
        elif loader is not None and loader.generator is None:
            log.warning(
                "%s is a %s without generator=: a resumed run draws other random numbers; pass"
                " generator=torch.Generator() to it",
                name,
                type(loader).__name__,
            )


def check_relations(objects: Mapping[str, Any]) -> None:
    """Check that optimizers belong to the modules, and schedulers to the optimizers.

    Raises:
        ValueError: an object belongs to another one that is not in the state.
    """
    modules, optimizers = modules_of(objects).values(), optimizers_of(objects)
    known = {id(param): param for module in modules for param in module.parameters()}
    is_model_sharded = any(map(is_sharded, known.values()))
    for name, optimizer in optimizers.items():
        foreign = [param for param in params_of(optimizer) if id(param) not in known]
        if is_model_sharded and any(not is_sharded(param) for param in foreign):
            raise ValueError(
                f"attach failed: {name} holds {len(foreign)} parameters that the model does not have any"
                " more; create the optimizer after fully_shard()"
            )
        if foreign:
            with contextlib.suppress(ValueError):  # too many objects
                saved = set(map(id, inside(objects.values())))
                foreign = [param for param in foreign if id(param) not in saved]
        if foreign:
            log.warning(
                "%s trains %s parameters, the first of shape %s, that no module of the state contains: they"
                " are not saved; pass their module, or a list of the tensors, to TrainingState under a name",
                name,
                len(foreign),
                tuple(foreign[0].shape),
            )
    trained = {id(param) for optimizer in optimizers.values() for param in params_of(optimizer)}
    for name, item in objects.items():
        # A module may keep an optimizer, as a target network does, that never steps.
        if isinstance(item, torch.optim.Optimizer | torch.nn.Module):
            continue
        of = unwrap(getattr(item, "optimizer", None))
        if isinstance(of, torch.optim.Optimizer):
            own = {id(param) for param in params_of(of)}
            if own and not own & trained:
                raise ValueError(
                    f"attach failed: {name} belongs to an optimizer that is not in the state, so its"
                    " learning rates are not saved; pass that optimizer to TrainingState too"
                )
