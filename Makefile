# SPDX-License-Identifier: Apache-2.0
# `make help` lists what there is.  Everything works from a fresh clone with Python 3.11 and make.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test check bench-notices format clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

setup: $(STAMP)  ## create .venv with both distributions and what the tests need

$(STAMP): constraints.txt requirements-dev.txt daemon/pyproject.toml training_hooks/pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed; name one with make PYTHON=...")'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable training_hooks --editable daemon --requirement requirements-dev.txt
	touch $(STAMP)

STORE  ?= auto
CLOUD  ?= aws
SIGNAL ?= none

demo: $(STAMP)  ## the main job, live: notice, save, flush, commit, power off, resume (STORE=auto|s3|gcs|file CLOUD=aws|gcp SIGNAL=none|usr1)
	@$(BIN)/python -m demo --store $(STORE) --cloud $(CLOUD) --signal $(SIGNAL)

test: $(STAMP)  ## all tests
	$(BIN)/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

check: $(STAMP)  ## ruff, mypy, import rules, shellcheck, units, templates
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	./tests/check_system_files.sh

bench-notices: $(STAMP)  ## from the cloud's word to the trainer's knowing; about 20 minutes
	$(BIN)/python bench/notices.py

format: $(STAMP)  ## let the formatter decide
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove what the targets above made
	rm -rf $(VENV) build .hypothesis .pytest_cache .mypy_cache .ruff_cache
