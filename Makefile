# Two commands do everything on a machine with Python 3.11, make and a network:
#   make tune    installs the CPU engine and fenno into .venv and runs `fenno tune`; more options by ARGS="--budget 5m"
#   make test    lint, types, the fast tests, then the tests on a real engine
# What is installed stays installed: a second run starts at once. `make help` lists the rest.

PYTHON ?= python3.11
# Where torch's CPU build comes from. Empty: wherever pip is configured to look (an index, or find-links).
# Elsewhere: make tune TORCH_INDEX=ADDRESS, the address of the index with PyTorch's CPU builds.
TORCH_INDEX ?=
ARGS ?=

BIN := .venv/bin
# A shared host may stand still for a minute. What fails is tried once more, and the summary names it: a fault to look into.
PYTEST := $(BIN)/python -m pytest --durations=15 --reruns 1 -raR

.DEFAULT_GOAL := help
.PHONY: help install tune test lint fast scenarios engine docs lock clean

help: ## this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 18

install: .venv/.fenno ## make .venv with the CPU engine and fenno (once)

tune: install ## the main job on a real engine: turn the knobs until first-token P95 is 800 ms or less
	@$(BIN)/fenno tune --target-p95 800ms $(ARGS)

test: lint fast scenarios engine ## everything that CI runs

lint: install ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/mypy

fast: install ## the tests without an engine, under a minute
	$(PYTEST) -m "not scenario and not engine and not gpu" $(ARGS)

scenarios: install ## whole commands on a stub engine: interruptions, faults, verdicts; about four minutes
	$(PYTEST) -m "scenario" $(ARGS)

engine: install ## the tests on a real engine, one after the other, about a quarter of an hour on two cores
	$(PYTEST) -m "engine and not gpu" $(ARGS)

docs: .venv-docs/.done ## the pages of docs/ as a site with search, in build/site; mkdocs is in a .venv-docs of its own
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

lock: ## resolve the locks anew (see locks/relock.py)
	$(PYTHON) locks/relock.py $(ARGS)

clean: ## remove everything that make made; studies stay
	rm -rf .venv .venv-docs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/.engine: locks/cpu.txt locks/torch-cpu.txt
	@locks/install.sh "$(PYTHON)" "$(TORCH_INDEX)" "$(MAKECMDGOALS)"

# Editable, and built by the hatchling that the lock brought: nothing is downloaded.
.venv/.fenno: .venv/.engine pyproject.toml
	@$(BIN)/python -m pip --disable-pip-version-check install -qq --no-deps --no-build-isolation --editable .
	@touch $@

.venv-docs/.done: docs/requirements.txt
	$(PYTHON) -m venv --clear .venv-docs
	.venv-docs/bin/pip --disable-pip-version-check install -qq -r docs/requirements.txt
	@touch $@
