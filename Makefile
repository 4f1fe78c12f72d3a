# Every target sets up what it needs in .venv; none needs more than Python (and a C++ compiler, for speed).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BENCH_READY := $(VENV)/.ready-bench
NATIVE := $(wildcard src/calipers/kernels/native/*)

.PHONY: help setup test lint format demo bench bench-speed sanitize clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(READY) ## install Calipers and its tools into .venv

$(READY): pyproject.toml constraints.txt $(NATIVE)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -c 'from calipers.kernels import describe; print(describe())'
	touch $@

$(BENCH_READY): $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,bench]'
	touch $@

test: lint ## lint, types, tests and doctests
	$(BIN)/pytest

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(READY) ## let ruff rewrite what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

demo: $(READY) ## observe a random transformer block with every observer
	$(BIN)/python -m calipers.demo

bench: $(BENCH_READY) ## agreement with the peer, and the memory of a large search
	$(BIN)/python benchmarks/agreement.py
	$(BIN)/python benchmarks/memory.py

bench-speed: $(BENCH_READY) ## time against the peer and against the limits of the machine
	$(BIN)/python benchmarks/speed.py

clean: ## remove .venv and caches
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
