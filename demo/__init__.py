# SPDX-License-Identifier: Apache-2.0
"""The main task, live: ``python -m demo`` loses a VM during a training run and resumes on another VM."""
