# SPDX-License-Identifier: Apache-2.0
"""The simulator: a world of one VM, and a fleet of several."""
