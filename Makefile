# Every target sets up what it needs in .venv; none needs more than Python (and a C++ compiler, for speed).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BENCH_READY := $(VENV)/.ready-bench
DEMO ?= calipers-demo
CASES ?= 1000
JOBS ?= 2
PYTEST = $(BIN)/pytest -n $(JOBS) --dist loadfile
NATIVE := $(wildcard src/calipers/kernels/native/cpp/* src/calipers/kernels/native/cpp/bindings/*)

# For what is installed and for what builds it; the second name is that of newer versions of pip.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup test test-fast test-slow test-report mutants fuzz lint format demo bench bench-speed bench-accuracy bench-calibration bench-streaming sanitize check-arm clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

setup: $(READY) ## install Calipers and its tools into .venv

$(READY): pyproject.toml constraints.txt $(NATIVE)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[dev]'
	$(BIN)/python -c 'from calipers.kernels import describe; print(describe())'
	touch $@

$(BENCH_READY): $(READY)
	$(BIN)/pip install --quiet --editable '.[dev,bench]'
	touch $@

# Side by side: either fails for both.
test: $(READY) ## lint, types, tests and doctests in five minutes; JOBS=4 runs tests in four processes
	$(MAKE) --no-print-directory --jobs 2 lint test-fast

test-fast: $(READY)
	$(PYTEST) -m 'not slow'

test-slow: $(READY) ## what starts processes, is killed, or takes seconds
	$(PYTEST) -m slow

# A Chromium is installed where apt can do that; without one, and without npm, these tests are skipped.
test-report: $(READY) ## the page of `calipers report` in a real browser
	$(BIN)/pip install --quiet playwright
	command -v chromium >/dev/null || (apt-get update -qq && apt-get install -y -qq chromium) || true
	npm install --silent --no-audit --no-fund --prefix build/report axe-core@4 || true
	$(BIN)/pytest tests/reporting -q -s

# MUTANTS are options of the script, such as --only 'kernels-*'.
mutants: $(READY) ## break the source in small ways, and list what no test notices
	$(BIN)/python scripts/mutants.py $(MUTANTS)

fuzz: $(READY) ## thousands of damaged inputs through the real commands (CASES of each kind)
	PYTHONPATH=tests $(BIN)/python -m fuzzing --cases $(CASES)

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(READY) ## let ruff rewrite what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

demo: $(READY) ## quantize the small model that ships in six ways, and compare them
	$(BIN)/calipers demo --output $(DEMO)
	@echo "calipers is $(BIN)/calipers; '. $(BIN)/activate' puts it on your path."

bench: $(BENCH_READY) ## agreement with the peer, and the memory of a large search
	$(BIN)/python benchmarks/agreement.py
	$(BIN)/python benchmarks/memory.py

bench-speed: $(BENCH_READY) ## time against the peer and against the limits of the machine
	$(BIN)/python benchmarks/speed.py

bench-accuracy: $(BENCH_READY) ## perplexity of a small model quantized by every observer, ours and the peer's
	$(BIN)/python benchmarks/accuracy.py

bench-calibration: $(BENCH_READY) ## time from a recipe to a checkpoint, ours and the peer's
	$(BIN)/python benchmarks/calibration.py

bench-streaming: $(BENCH_READY) ## time and memory from the files of a model to those of a checkpoint, ours and the peer's
	$(BIN)/python benchmarks/streaming.py

# Python without `site`, so that the sanitized build is found before the one in .venv. A program that
# was not built with the sanitizers needs their libraries, and that of C++, from the start.
sanitize: $(READY) ## the tests of the kernels under AddressSanitizer and UBSan
	$(BIN)/pip install --quiet --no-deps --upgrade --target build/sanitized \
	    --config-settings=cmake.define.CALIPERS_SANITIZE=ON --config-settings=build-dir=build/sanitized-objects .
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so) $$($(CXX) -print-file-name=libstdc++.so.6)" \
	    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	    PYTHONPATH="build/sanitized:$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
	    $(BIN)/python -S -m pytest tests/kernels -q

# The cross-compiler and qemu are installed where apt can do that.
check-arm: ## the kernels beside plain loops, without Python: for ARM under qemu, and for this machine
	scripts/check_arm.sh

clean: ## remove .venv and caches
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
