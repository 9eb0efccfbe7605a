# `make demo` and `make test` need Linux, Python 3.10 to 3.13, make and a C compiler; each sets up
# .venv at its first run. PYTHON=python3.12 picks an interpreter, and pip's own variables (such as
# PIP_INDEX_URL or PIP_EXTRA_INDEX_URL, to get a CPU-only build of PyTorch) are honoured.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= $(shell nproc)
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test lint format typecheck pytest bench compile-all clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

demo: $(VENV)/cli.stamp  ## build a kernel, run it on a batch, compare it with PyTorch
	$(BIN)/tvm-attn demo

test: lint typecheck pytest  ## everything that CI checks

lint: $(VENV)/test.stamp  ## ruff: rules and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: $(VENV)/test.stamp  ## let ruff fix and format the sources
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

typecheck: $(VENV)/test.stamp  ## mypy, strict
	$(BIN)/mypy

pytest: $(VENV)/test.stamp  ## the tests alone, on all cores
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

bench: $(VENV)/cli.stamp  ## measure this machine
	$(BIN)/tvm-attn bench

compile-all: $(VENV)/test.stamp  ## every shipped CUDA kernel, for every architecture; needs nvcc, no GPU
	$(BIN)/python -m tests.compile_all --jobs $(JOBS)

clean:  ## remove what was built, and .venv
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp per extra: set-up runs again only when what it installs has changed.
$(VENV)/%.stamp: pyproject.toml constraints.txt | $(VENV)/created.stamp
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@

$(VENV)/created.stamp:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; \
	(3, 10) <= v <= (3, 13) or sys.exit("Python 3.10 to 3.13 is needed, but $(PYTHON) is %d.%d; use make PYTHON=..." % v)'
	$(PYTHON) -m venv $(VENV)
	@touch $@
