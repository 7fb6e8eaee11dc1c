# SPDX-License-Identifier: Apache-2.0
"""The format of the bucket: keys, manifests, claims, farewells.  No other package knows it."""
