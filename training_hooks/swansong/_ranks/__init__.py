# SPDX-License-Identifier: Apache-2.0
"""The ranks of a job: agreement on the step at which all save, over one or several VMs."""
