# SPDX-License-Identifier: Apache-2.0
"""The reference pages and the example configuration, written from the declarations in the code."""
