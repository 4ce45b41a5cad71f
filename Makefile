# make quickstart: the environment, then the main job. make test: the environment, then the tests.

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
SEED ?= 0

# Several processes share the cores; each computes in one thread.
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1
export OPENBLAS_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false
# The set-up leaves byte-compiling to the first import; without a cache every process would compile again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup test-fast test test-exhaustive test-clone test-slurm test-gpu test-gpu-set quickstart quickstart-compare demo evidence lint docs

# Its settings: PYTHON=, GPU=1, TORCH_INDEX=, MAX_JOBS=.
setup:
	@tools/setup_env.sh

WORKERS := --numprocesses 2 --dist loadfile --no-loadscope-reorder
PYTEST := .venv/bin/python -m pytest tests $(WORKERS) --durations=40 --durations-min=10

# Unit tests: those that start no process (marked `processes`) and take less than a third of a second (else `seconds`).
test-fast: setup
	$(PYTEST) -m "not gpu and not slurm and not slow and not processes and not seconds"

# All but what needs a GPU or Slurm and what test-exhaustive runs.
test: setup
	$(PYTEST) -m "not gpu and not slurm and not slow"

# Wide matrices, injected faults, long runs, further starts; with PART=1/5 a fifth of them: every fifth test, or file of
# tests that share a fixture.
test-exhaustive: setup
	$(PYTEST) -m "slow and not gpu and not slurm" $(if $(PART),--part $(PART))

# What is committed, as a stranger gets it: a clone with nothing beside it. All files of tests are collected, which
# imports them; of the unit tests the ones run that read a published data set if it is there.
test-clone: setup
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && git clone --quiet . "$$folder/clone" && cd "$$folder/clone" && \
		$(CURDIR)/.venv/bin/python -m pytest tests -q -m "dataset and not gpu and not slurm and not slow and not processes and not seconds"

# Needs root, and the package manager where Slurm is not installed: it starts a cluster of two nodes on this machine.
test-slurm: setup
	.venv/bin/python -m pytest -m slurm tests/slurm

# On a node of GPUs, in the environment that is there. What needs more devices than it has is skipped. The wheels' libraries
# come first, as in a run: TransformerEngine loads parts of cuDNN by name, and would take those of the system.
test-gpu:
	LD_LIBRARY_PATH="$$(.venv/bin/python -c 'import os; from megatron_collab.runtime import toolkit; print(toolkit.library_path(os.environ.get("LD_LIBRARY_PATH")))')" \
		.venv/bin/python -m pytest -m gpu tests --gpu-report build/gpu-report.md

# The packages for GPUs in an environment of its own, where there is no GPU: what only they can show, then the tests on
# CPU. The first time they are installed, and one is compiled. With the library that stands in for the driver's, and
# without CUDA's toolkits: a fresh node has the wheels alone.
GPU_SET := $(CURDIR)/build/gpu-set
GPU_SET_PYTEST := DRIVER_LIBRARIES=$(GPU_SET) LIBRARY_PATH=$(GPU_SET) tests/gpu_set/wheels_alone.sh \
	$(GPU_SET)/.venv/bin/python -m pytest

test-gpu-set:
	@GPU=1 VENV=build/gpu-set/.venv tools/setup_env.sh
	$(CC) -shared -fPIC -Wl,-soname,libcuda.so.1 -o $(GPU_SET)/libcuda.so.1 tests/gpu_set/libcuda.c
	ln -sf libcuda.so.1 $(GPU_SET)/libcuda.so
	$(GPU_SET_PYTEST) tests/gpu_set
	$(GPU_SET_PYTEST) tests $(WORKERS) -m "not gpu and not slurm and not slow and not processes and not seconds"
	$(GPU_SET_PYTEST) tests/trainer tests/weight_sync tests/inference $(WORKERS) --ignore tests/trainer/megatron \
		-m "(processes or seconds) and not gpu and not slurm and not slow"
	$(GPU_SET_PYTEST) tests/rehearsal/te_cpu tests/trainer/megatron $(WORKERS) -m "not gpu and not slurm"

quickstart: setup
	.venv/bin/megatron-collab quickstart --seed $(SEED)

# Five arms of the desk study in small, and the reward's estimator; ends with runs/demo/page.md.
demo: setup
	.venv/bin/python -m tools.demo runs/demo

# The whole study, in hours; the same command continues it. Then docs/evidence.md has its results.
evidence: setup
	mkdir -p docs/evidence
	.venv/bin/megatron-collab reproduce desk --seeds 1 --pilot 0 --jobs 2
	.venv/bin/python tools/bench/estimator.py | tee /dev/stderr | tail -n 1 > docs/evidence/estimator.json.unfinished
	mv docs/evidence/estimator.json.unfinished docs/evidence/estimator.json
	.venv/bin/python tools/bench/sentinels.py | tee /dev/stderr | tail -n 1 > docs/evidence/sentinels.json.unfinished
	mv docs/evidence/sentinels.json.unfinished docs/evidence/sentinels.json
	.venv/bin/python tools/bench/evidence.py --runs runs/desk

quickstart-compare: setup
	.venv/bin/megatron-collab quickstart --seed $(SEED) --compare

# The pages as a site in build/site. MkDocs has an environment of its own: it pins other versions than training does.
docs: setup
	.venv/bin/python tools/make_docs.py
	.venv/bin/python tools/figures.py
	test -x build/docs-venv/bin/python || .venv/bin/python -m venv build/docs-venv
	build/docs-venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/docs.lock
	build/docs-venv/bin/python -m mkdocs build --strict --quiet
	@echo "docs: build/site/index.html"

lint: setup
	.venv/bin/python -m ruff check .
	.venv/bin/python -m mypy
	.venv/bin/lint-imports
