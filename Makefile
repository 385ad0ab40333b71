# The only list of commands. `make demo` and `make test` are all that a fresh machine needs.
#
#   make demo      load a small language model with every method, reload it, print one table
#   make rl        policy gradients with quantized rollouts, reloaded in place each step; prints, and plots
#   make test      the test suite                       make test ARGS="tests/layout -k swizzle"
#   make test-gpu  the tests that need a CUDA device; appends what they gave to benchmarks/results/verified.jsonl
#   make check     lint, types, import layers, spelling, docs with warnings as errors
#   make bench     quantization on this CPU against a copy and against torchao, dummy weights, replay: time and scratch
#   make bench-gpu kernels on a CUDA device against a copy and torch.compile (PY= an environment with a CUDA torch)
#   make pages     docs/results.md and docs/verified.md from benchmarks/results
#   make docs      HTML pages in docs/_build/html
#   make format    rewrite the code in the project's format
#   make clean     remove what these commands made, environments included
#
# Each makes what it needs of the environment .venv on first use, and again when pyproject.toml changes.
#   PYTHON=python3.12   the interpreter that the environment is made from
#   TORCH=2.11.0        another release of torch; VENV=.venv-2.11 gives it an environment of its own
#   PY=python3          run in an environment of yours; nothing is installed then

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help demo rl test test-gpu check lint types imports spelling docs bench bench-gpu pages format clean

PYTHON ?= python3
TORCH ?= 2.13.0
VENV ?= .venv
ARGS ?=
export PIP_DISABLE_PIP_VERSION_CHECK = 1

ifeq ($(origin PY),undefined)
PY := $(VENV)/bin/python
with = $(VENV)/.with-$(1)
else
with =
endif

# Two workers with one thread each: on two cores that is faster than one worker with two threads.
WORKERS ?= 2

help:
	@sed -n '3,18p' Makefile | cut -c3-

# Torch first and alone, then the rest with torch pinned to what is there: a plain "torch" among other requirements
# would fetch a CUDA build of several gigabytes. A stamp is written last, so a step that broke midway is done again.
TORCH_STAMP := $(VENV)/.with-torch-$(TORCH)

$(TORCH_STAMP):
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; \
	  sys.exit(sys.version_info < (3, 11) and f"olq needs Python 3.11 or later, this is {v}: set PYTHON=")'
	@echo "making $(VENV) with torch $(TORCH), once"
	@$(PYTHON) -m venv $(if $(filter .venv%,$(VENV)),--clear) $(VENV)
	@$(VENV)/bin/python -m pip install -qq 'torch==$(TORCH)'
	@touch $@

$(VENV)/.with-%: $(TORCH_STAMP) pyproject.toml
	@echo "installing olq[$*] into $(VENV)"
	@$(VENV)/bin/python -m pip install -qq 'torch==$(TORCH)' --editable '.[$*]'
	@touch $@

demo: $(call with,demo)
	$(PY) -m examples.demo $(ARGS)

rl: $(call with,demo)
	$(PY) -m examples.rl $(ARGS)

test: $(call with,dev) $(call with,demo)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-gpu: $(call with,dev)
	$(PY) -m pytest -m cuda --require-gpu --record benchmarks/results/verified.jsonl $(ARGS)

check: lint types imports spelling docs

lint: $(call with,dev)
	$(PY) -m ruff check .

types: $(call with,dev) $(call with,demo) $(call with,bench) $(call with,docs)
	$(PY) -m pyright --pythonpath $(PY)

imports: $(call with,dev)
	$(PY) -c 'from importlinter.cli import lint_imports_command as c; c()' --no-logo

spelling: $(call with,dev)
	$(PY) -m codespell_lib

docs: $(call with,docs)
	$(PY) -m sphinx -q -W --keep-going -E -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

bench: $(call with,bench)
	$(PY) -m benchmarks.quantize_cpu --require-peers $(ARGS)
	$(PY) -m benchmarks.dummy $(ARGS)
	$(PY) -m benchmarks.replay

bench-gpu: $(call with,bench)
	$(PY) -m benchmarks.quantize_gpu $(ARGS)
	$(PY) -m benchmarks.activations_gpu
	$(PY) -m benchmarks.linear_gpu
	$(PY) -m benchmarks.reload_gpu
	$(PY) -m benchmarks.load_gpu
	$(PY) -m benchmarks.forward_gpu

pages: $(call with,dev)
	$(PY) -m benchmarks.pages $(ARGS)

format: $(call with,dev)
	$(PY) -m ruff check --fix --select I .
	$(PY) -m ruff format .

clean:
	rm -rf .venv .venv-* build dist docs/_build *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
