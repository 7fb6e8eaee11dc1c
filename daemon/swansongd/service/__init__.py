# SPDX-License-Identifier: Apache-2.0
"""The decision loop, and the objects that it is composed of.

structlog imports rich, if it is installed, for tracebacks in colour, which the daemon's log never has.
Without it the daemon starts sooner and needs less memory.
"""

from __future__ import annotations

import sys
from importlib import import_module


def _import_structlog_without_rich() -> None:
    if "rich" not in sys.modules:
        sys.modules["rich"] = None  # type: ignore[assignment]
        try:
            import_module("structlog")
        finally:
            del sys.modules["rich"]


_import_structlog_without_rich()
