# make quickstart: the environment, then the main job. make test: the environment, then the tests.

SHELL := /bin/bash
PYTHON ?= python3.11
SEED ?= 0

# Several processes share the cores; each computes in one thread.
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1
export OPENBLAS_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false
# The set-up leaves byte-compiling to the first import; without a cache every process would compile again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup test test-slurm quickstart quickstart-compare lint

setup:
	@PYTHON="$(PYTHON)" tools/setup_env.sh

test: setup
	.venv/bin/python -m pytest tests --numprocesses 2 --dist loadfile --no-loadscope-reorder

# Needs root, and the package manager where Slurm is not installed: it starts a cluster of two nodes on this machine.
test-slurm: setup
	.venv/bin/python -m pytest -m slurm tests/slurm

quickstart: setup
	.venv/bin/python tools/quickstart.py --seed $(SEED)

quickstart-compare: setup
	.venv/bin/python tools/quickstart.py --seed $(SEED) --compare

lint: setup
	.venv/bin/python -m ruff check .
	.venv/bin/python -m mypy
	.venv/bin/lint-imports
