# SPDX-License-Identifier: Apache-2.0
"""Runs a script where the binary of torchvision does not fit torch, as with a CPU build of torch.

timm and transformers import torchvision, which needs the names of two operators at its import.
"""

from __future__ import annotations

import runpy
import sys

import torch


def main() -> None:
    if torch.version.cuda is None:
        for name in ("nms", "qnms"):
            signature = "(Tensor boxes, Tensor scores, float limit) -> Tensor"
            torch.library.define(f"torchvision::{name}", signature)
    del sys.argv[0]
    sys.path.insert(0, sys.argv[0].rpartition("/")[0])
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
