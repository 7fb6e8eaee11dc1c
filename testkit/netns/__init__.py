# SPDX-License-Identifier: Apache-2.0
"""VMs in network namespaces."""
