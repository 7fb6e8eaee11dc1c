# SPDX-License-Identifier: Apache-2.0
"""Virtual machines with a power switch."""
