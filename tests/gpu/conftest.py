# SPDX-License-Identifier: Apache-2.0
"""Without a GPU these tests fail: a run that skipped them would show nothing."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _gpu() -> None:
    if not torch.cuda.is_available():
        pytest.fail("make test-gpu needs an NVIDIA GPU and a torch with CUDA", pytrace=False)
