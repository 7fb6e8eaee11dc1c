# SPDX-License-Identifier: Apache-2.0
"""The state of a Lightning ``Trainer``, which :mod:`swansong.lightning` saves and restores."""

try:
    import lightning.pytorch as pl
except ImportError:  # the older name of the package
    import pytorch_lightning as pl

__all__ = ["pl"]
