# SPDX-License-Identifier: Apache-2.0
# `make help` lists the targets.  Everything works from a fresh clone with Python 3.11 and make.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# Cache bytecode: without a cache each of the thousands of processes that the tests start compiles its modules.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup lock wheelhouse deb apt-repo release container docs pictures demo test test-quick fuzz simulate test-jax test-frameworks test-ray test-stores test-system test-vm test-gpu image terraform check bench bench-beside bench-notices bench-torch bench-gpu bench-preemption format clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 15

setup: $(STAMP)  ## create .venv with both distributions and the test dependencies

# Install only files that make lock has pinned by hash, and only wheels.
HASHED := --require-hashes --only-binary :all: --no-deps

$(STAMP): requirements/dev.txt requirements/torch.txt daemon/pyproject.toml training_hooks/pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed; name one with make PYTHON=...")'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check $(HASHED) --requirement requirements/dev.txt
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --requirement requirements/torch.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-build-isolation \
		--editable training_hooks --editable daemon
	touch $(STAMP)

LOCK = $(BIN)/uv --no-config pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	--only-binary :all: --excludes build/not-locked.txt --custom-compile-command 'make lock' $(UPGRADE)

lock: $(STAMP)  ## pin versions and hashes in constraints.txt and requirements/ (UPGRADE=--upgrade for newer versions)
	mkdir -p build
	printf 'swansong\ntorch\n' >build/not-locked.txt
	echo setuptools | $(LOCK) --output-file constraints.txt - daemon/pyproject.toml
	$(LOCK) --constraint constraints.txt --output-file requirements/dev.txt daemon/pyproject.toml requirements/dev.in
	$(LOCK) --constraint requirements/dev.txt --output-file requirements/jax.txt requirements/jax.in
	$(LOCK) --constraint requirements/dev.txt --output-file requirements/frameworks.txt requirements/frameworks.in
	$(LOCK) --constraint requirements/dev.txt --output-file requirements/ray.txt requirements/ray.in

wheelhouse:  ## make build/wheelhouse for packer/provision.sh --wheelhouse; PYTHON needs the minor version of the image's
	$(PYTHON) -m venv --clear build/wheels
	build/wheels/bin/python -m pip install --quiet --disable-pip-version-check $(HASHED) --requirement constraints.txt
	rm -rf build/wheelhouse build/sources
	build/wheels/bin/python -m pip download --quiet --disable-pip-version-check $(HASHED) --requirement constraints.txt \
		--dest build/wheelhouse
	packer/sources.sh build/sources
	SOURCE_DATE_EPOCH=315532800 build/wheels/bin/python -m pip wheel --quiet --disable-pip-version-check --no-index --no-deps --no-build-isolation \
		--wheel-dir build/wheelhouse build/sources/training_hooks build/sources/daemon

# One directory for each minor version of Python, which the package depends on.
MINOR = $$($(PYTHON) -c 'import sys; print("python%d.%d" % sys.version_info[:2])')

deb:  ## make the Debian package in build/packages; PYTHON needs the minor version of the VM's
	PYTHON=$(PYTHON) INTERPRETER=/usr/bin/$(MINOR) packer/package/build.sh build/packages/$(MINOR)

apt-repo: deb  ## index build/packages for apt, for a mirror of your own (dpkg-dev)
	packer/package/index.sh build/packages

release:  ## commit and tag VERSION=1.2.3, with the notes of CHANGELOG.md; push both to publish
	packer/release.sh "$(VERSION)"

ENGINE = $(firstword $(foreach each,podman docker,$(shell command -v $(each))))
BASE   = docker.io/library/$(subst python3,python:3,$(shell echo $(MINOR)))-slim

container:  ## build the image localhost/swansong of the daemon (podman or docker); BASE needs PYTHON's minor version
	@test -n "$(ENGINE)" || { echo 'make container failed: podman or docker is missing; run apt-get install podman' >&2; exit 1; }
	$(MAKE) wheelhouse
	$(ENGINE) build --network none $(if $(findstring podman,$(ENGINE)),--timestamp 315532800) --build-arg BASE=$(BASE) \
		--file packer/container/Containerfile --tag swansong .

STORE  ?= auto
CLOUD  ?= aws
SIGNAL ?= none
HANDOVER ?=
MIRROR ?=

demo: $(STAMP)  ## show a preemption live: notice, save, flush, commit, power off, resume (STORE=auto|s3|gcs|file CLOUD=aws|gcp|azure SIGNAL=none|usr1; HANDOVER=1: start the next VM at the verdict; or MIRROR=1: lose a region)
	@$(BIN)/python -m demo --store $(STORE) --cloud $(CLOUD) --signal $(SIGNAL) $(if $(HANDOVER),--handover) $(if $(MIRROR),--mirror)

WORKERS ?= 6
ELSEWHERE := --ignore=tests/vm --ignore=tests/gpu --ignore=tests/system/nspawn --ignore=tests/hooks_jax --ignore=tests/hooks_frameworks --ignore=tests/hooks_ray
COMPILED := $(VENV)/.tests-compiled

# The workers of pytest start at the same time, so each would compile all tests: here they are compiled once.
$(COMPILED): $(STAMP)
	-@$(BIN)/python -m pytest --collect-only --quiet $(ELSEWHERE) >/dev/null
	@touch $@

test: $(COMPILED)  ## run all tests, with WORKERS=6 for two cores, except those of whole machines and GPUs
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ELSEWHERE) $(PYTEST_ARGS)

test-quick: $(STAMP)  ## run the unit tests of the daemon and its tools (one minute)
	$(BIN)/python -m pytest -n 4 --dist worksteal tests/unit $(addprefix --ignore=tests/unit/,hooks project report) $(PYTEST_ARGS)

EXAMPLES ?= 5000

fuzz: $(STAMP)  ## fuzz the parsers of external input, with EXAMPLES=5000 inputs for each property
	SWANSONG_FUZZ_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest -n 2 --dist worksteal \
		--timeout=$$((600 + $(EXAMPLES))) tests/fuzz $(PYTEST_ARGS)

SEEDS ?= 200

simulate: $(STAMP)  ## run SEEDS=200 seeds of each simulator on all cores; a second call continues
	$(BIN)/python -m testkit.simulation many $(SEEDS) $(SIMULATORS)

JAX := build/jax/.installed

$(JAX): requirements/jax.txt
	$(PYTHON) -m venv --clear build/jax
	build/jax/bin/python -m pip install --quiet --disable-pip-version-check $(HASHED) --requirement requirements/jax.txt
	touch $@

test-jax: $(STAMP) $(JAX)  ## test the hooks with JAX and Orbax, in a separate environment (700 MB)
	$(BIN)/python -m pytest tests/hooks_jax $(PYTEST_ARGS)

FRAMEWORKS := build/frameworks/.installed

$(FRAMEWORKS): requirements/frameworks.txt requirements/torch.txt
	$(PYTHON) -m venv --clear build/frameworks
	build/frameworks/bin/python -m pip install --quiet --disable-pip-version-check $(HASHED) --requirement requirements/frameworks.txt
	build/frameworks/bin/python -m pip install --quiet --disable-pip-version-check --requirement requirements/torch.txt
	touch $@

test-frameworks: $(STAMP) $(FRAMEWORKS)  ## test the examples with further frameworks, in a separate environment (2 GB)
	$(BIN)/python -m pytest --timeout=600 tests/hooks_frameworks $(PYTEST_ARGS)

RAY := build/ray/.installed

$(RAY): requirements/ray.txt requirements/torch.txt
	$(PYTHON) -m venv --clear build/ray
	build/ray/bin/python -m pip install --quiet --disable-pip-version-check $(HASHED) --requirement requirements/ray.txt
	build/ray/bin/python -m pip install --quiet --disable-pip-version-check --requirement requirements/torch.txt
	touch $@

test-ray: $(STAMP) $(RAY)  ## test a job of Ray Train over three nodes, in a separate environment (1.4 GB)
	$(BIN)/python -m pytest tests/hooks_ray $(PYTEST_ARGS)

STORES  := build/stores/.installed
FOREIGN ?= ceph ceph-tls rclone-tls seaweedfs-tls azurite azurite-tls

$(STORES): testkit/install_stores.sh $(wildcard requirements/stores/*)
	testkit/install_stores.sh build/stores
	touch $@

test-stores: $(STAMP) $(STORES)  ## test the stores with further servers: Ceph, Azurite, TLS (Node.js with npm, apt of Debian 12; 500 MB, 12 minutes)
	SWANSONG_STORES="$(FOREIGN)" $(BIN)/python -m pytest --timeout=300 tests/contract/test_store_contract.py \
		tests/contract/test_store_create.py tests/contract/test_store_table.py tests/contract/test_store_azure.py tests/contract/test_store_histories.py tests/process/test_foreign_stores.py $(PYTEST_ARGS)

test-system: $(STAMP)  ## test the image in containers with a real systemd (root, systemd-container, mmdebstrap)
	$(BIN)/python -m pytest -n 3 --dist worksteal tests/system/nspawn $(PYTEST_ARGS)

test-vm: $(STAMP)  ## test VMs that are switched off (root, QEMU; about 10 minutes; PYTEST_ARGS='-k button_alone' for one test)
	$(BIN)/python -m pytest tests/vm $(PYTEST_ARGS)

test-gpu: $(STAMP)  ## test what CUDA has to show: copies, resumes, NVML (an NVIDIA GPU; 5 minutes)
	$(BIN)/python -m pytest --timeout=120 tests/gpu $(PYTEST_ARGS)
	SWANSONG_TEST_DEVICE=cuda $(BIN)/python -m pytest -n 4 --dist worksteal tests/hooks/test_torch_state.py tests/hooks/test_torch_snapshot.py \
		tests/hooks/test_last_boundary.py tests/hooks/test_boundary.py tests/hooks/test_arrivals.py $(PYTEST_ARGS)

image: $(STAMP)  ## make the image of the VMs with provision.sh, and print the command that boots it in a terminal
	@$(BIN)/python -m testkit.vm.image

docs: $(STAMP)  ## write docs/reference and the example configuration from the declarations in the code
	$(BIN)/python -m testkit.reference

PICTURES := $(sort $(basename $(notdir $(wildcard testkit/*_picture.py testkit/*_pictures.py))))

pictures: $(STAMP)  ## take the pictures of docs/operations again (Debian's prometheus, chromium, tmux, gcc and libc6-dev)
	set -e; for each in $(PICTURES); do $(BIN)/python -m testkit.$$each; done

terraform:  ## validate the examples against their providers (Terraform; a network or TERRAFORM_INIT=-plugin-dir=MIRROR)
	rm -rf build/terraform && mkdir -p build && cp -r packer build/terraform
	set -e; for each in aws gcp; do (cd build/terraform/examples/$$each && \
		terraform init -input=false -no-color $(TERRAFORM_INIT) && terraform validate -no-color); done
	terraform fmt -check -recursive packer/examples

check: $(STAMP)  ## run ruff, mypy, import rules, shellcheck and the checks of units, templates and generated pages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tests/check_prose.py
	$(BIN)/python -m testkit.reference --check
	./tests/check_system_files.sh

bench: $(STAMP)  ## measure speed, CPU and memory of transfers and of other tools (40 minutes on a quiet machine; BENCH_ARGS=--quick for a smoke run)
	$(BIN)/python -m bench.transfer $(if $(BENCH_ARGS),$(BENCH_ARGS),--write)

bench-beside: $(STAMP)  ## measure what a flush costs the trainer on the same VM (5 minutes)
	$(BIN)/python -m bench.beside $(if $(BENCH_ARGS),$(BENCH_ARGS),--write)

bench-notices: $(STAMP)  ## measure the time from a notice to the request at the trainer (30 minutes)
	$(BIN)/python -m bench.notices

bench-preemption: $(STAMP)  ## measure what one preemption costs, also with other means (40 minutes on a quiet machine; BENCH_ARGS=--quick for a smoke run)
	$(BIN)/python -m bench.preemption $(if $(BENCH_ARGS),$(BENCH_ARGS),--write)

bench-gpu: $(STAMP)  ## measure saves and restores of a state on a GPU, also with torch.save and DCP (an NVIDIA GPU; 7 minutes)
	$(BIN)/python -m bench.gpu $(if $(BENCH_ARGS),$(BENCH_ARGS),--write)

bench-torch: $(STAMP)  ## measure what a checkpoint costs the training loop, also with torch.save and DCP (5 minutes)
	$(BIN)/python -m bench.torch_snapshot $(if $(BENCH_ARGS),$(BENCH_ARGS),--write)

format: $(STAMP)  ## format the code and apply ruff's fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove the files that the targets above made
	rm -rf $(VENV) build .hypothesis .pytest_cache .mypy_cache .ruff_cache
