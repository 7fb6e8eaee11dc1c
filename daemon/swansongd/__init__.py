# SPDX-License-Identifier: Apache-2.0
"""swansongd: gets a training run's checkpoints off a spot GPU VM before the power goes."""

__version__ = "0.1.0"
