# SPDX-License-Identifier: Apache-2.0
"""Training hooks of Swansong: emergency checkpoints on spot GPU VMs.

::

    import swansong

    guard = swansong.attach(state={"model": model, "optim": optimizer, "loader": loader})
    for step in range(guard.restore(), total_steps):
        loss = train_one_step()
        guard.step(step + 1, loss=loss)  # last in the loop body
    guard.finish()

Standard library only.  Without the daemon every call does nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swansong._checkpoint.load import RestoreError
    from swansong._ranks.agreement import SaveRequest
    from swansong.guard import Guard, attach
    from swansong.protocol import EXIT_SAVED

__version__ = "0.1.0"

__all__ = ["EXIT_SAVED", "Guard", "RestoreError", "SaveRequest", "attach"]

_HOMES = {
    "EXIT_SAVED": "protocol",
    "SaveRequest": "_ranks.agreement",
    "Guard": "guard",
    "RestoreError": "_checkpoint.load",
    "attach": "guard",
}


def __getattr__(name: str) -> Any:
    # The daemon imports swansong.protocol at each start, and needs nothing else of the hooks.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
