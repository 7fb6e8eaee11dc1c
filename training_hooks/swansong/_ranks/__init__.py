# SPDX-License-Identifier: Apache-2.0
"""Agreement of the ranks on the step at which all of them save."""
