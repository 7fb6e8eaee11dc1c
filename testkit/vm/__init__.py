# SPDX-License-Identifier: Apache-2.0
"""Virtual machines that can be switched off."""
