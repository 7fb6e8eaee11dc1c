# SPDX-License-Identifier: Apache-2.0
"""Network namespaces with VMs of their own."""
