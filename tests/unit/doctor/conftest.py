# SPDX-License-Identifier: Apache-2.0
"""Doctor's tests leave the choice of the daemon's unit as it was."""

from __future__ import annotations

import pytest
from swansong_tools.doctor import fixes


@pytest.fixture(autouse=True)
def _unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixes, "_chosen", fixes._FIRST)
    monkeypatch.setattr(fixes, "_is_by_unit", True)
