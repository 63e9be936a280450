# Everything a contributor runs. `make demo` needs Python 3.11 and a package registry, nothing else.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# A machine without a GPU is served faster by: TORCH="torch==2.13.0 --index-url ADDRESS-OF-CPU-BUILDS"
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
# Compiling every module of torch and transformers takes longer than installing them.
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
# A process a core with one torch thread each: on a small machine two threads are often slower.
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all check fmt lint type contracts bench docs clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

# The package alone: what the demo and every command need.
$(VENV)/installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no python3.11 or python3 on PATH" >&2; exit 3; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than 3.11; run: make PYTHON=/path/to/python3.11" >&2; exit 3; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torch and lmsmith into $(VENV) ..."
	@$(PIP) install --no-compile $(TORCH)
	@$(PIP) install --no-compile -c constraints.txt -e .
	@touch $@

$(VENV)/developing: $(VENV)/installed
	@echo "installing the development tools into $(VENV) ..."
	@$(PIP) install --no-compile -c constraints.txt -e '.[dev]'
	@touch $@

setup: $(VENV)/developing ## create .venv with everything that development needs

demo: $(VENV)/installed ## a prompt cut inside a word, plainly and byte by byte, then a small bench
	@$(BIN)/lmsmith demo
	@$(BIN)/lmsmith bench byte-sampler --size smoke

test: setup ## the tests, in minutes
	$(TEST) -m "not slow"

test-all: setup ## the tests, with those that take long
	$(TEST)

check: lint type contracts test ## everything that CI holds

fmt: setup ## format the code and mend what can be mended
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

lint: setup ## style and docstrings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: setup ## static types
	$(BIN)/mypy

contracts: setup ## who may import whom
	$(BIN)/lint-imports

bench: setup ## prove the plumbing of every bench
	@for name in $$($(BIN)/lmsmith bench --json | $(BIN)/python -c \
		'import json, sys; print(*(row["name"] for row in json.load(sys.stdin)))'); do \
		$(BIN)/lmsmith bench $$name --size smoke || exit $$?; done

$(VENV)/documenting: $(VENV)/installed
	@$(PIP) install --no-compile -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(VENV)/documenting ## build the pages into site/
	$(BIN)/mkdocs build --strict

clean: ## remove what was built; models and runs stay
	rm -rf $(VENV) site dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -exec rm -rf {} +
