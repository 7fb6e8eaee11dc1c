# SPDX-License-Identifier: Apache-2.0
"""The decision loop, and what it is composed of."""
