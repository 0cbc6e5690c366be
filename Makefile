# make train                      trains dqn_cartpole; CONFIG=ppo_pong another, ARGS="--seed=2" more flags
# make benchmark                  runs the smoke suite and writes its report
# make test                       what CI runs

CONFIG ?= dqn_cartpole
ARGS ?=
GPU ?=

VENV := .venv
BIN := $(VENV)/bin
# GPU=1 makes the environment anew with CUDA; later calls without it keep it until the pins change.
REQUIREMENTS := requirements-dev.txt $(if $(GPU),requirements-cuda.txt)
INSTALLED := $(VENV)/.installed$(if $(GPU),-gpu)
PINS := --universal --python-version 3.11 --no-header --no-annotate --group tf-agents pyproject.toml

SUPPORTED := 3.13 3.12 3.11
# The first of PYTHONS that is usable makes .venv. pyenv's are named by path: its commands run only what is switched on.
of_version = python$(1) $(wildcard $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions/$(1).*/bin/python)
NEWEST_FIRST := $(foreach version,$(SUPPORTED),$(call of_version,$(version))) python3
PYTHONS := python3 $(NEWEST_FIRST)
# Python 3.11 to 3.13 that can make an environment with pip.
USABLE := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Without bytecode, each of the hundreds of processes that tests start would compile this package anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install train benchmark test test-pythons requirements test-crash test-learning test-peers tables docs format clean

help: ## show this list
	@echo "make TARGET   (train takes CONFIG=name and ARGS='flags'; now CONFIG=$(CONFIG))"
	@sed -n 's/^\([a-z-]*\):.*## /  \1\t/p' Makefile | expand -t 18

install: $(INSTALLED) ## make .venv with everything in it; GPU=1: with CUDA

train: $(INSTALLED) ## train CONFIG into runs/CONFIG, or go on where it stopped
	$(BIN)/python -m pipeline.train --root_dir=runs/$(CONFIG) --gin_file=$(CONFIG) $(ARGS)

benchmark: $(INSTALLED) ## run the smoke suite, or go on where it stopped, and write its report
	$(BIN)/python -m pipeline.benchmark --suite=smoke --workers=2 --report --output_dir=runs/benchmark-smoke $(ARGS)
	@echo "The report is a page for a browser: $(CURDIR)/runs/benchmark-smoke/report.html"

test: $(INSTALLED) ## lint, format, types, tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy --num-workers=2
	$(BIN)/mkdocs build --strict --site-dir build/site
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-pythons: $(SUPPORTED:%=test-python%) ## run the tests on all supported Pythons that are installed, in .venv-3.x

test-python%:
	@for python in $(call of_version,$*); do \
	  if $$python -c '$(USABLE)' 2>/dev/null; then \
	    exec $(MAKE) test VENV=.venv-$* PYTHONS=$$python; \
	  fi; \
	done; echo "Python $* is not installed, or cannot make an environment: not tested." >&2

test-crash: $(INSTALLED) ## kill, damage, fill disks, restore all games, fuzz readers (hours)
	$(BIN)/python -m pytest -m crash
	$(BIN)/python -m pytest -m "hypothesis and not crash and not learning" --hypothesis-profile=thorough

test-learning: $(INSTALLED) ## train the small configs over several seeds (hours)
	$(BIN)/python -m pytest -m learning

test-peers: $(INSTALLED) ## make the peers' environment and run the tests that need it
	$(BIN)/python -c "from benchmarks import peer_environment; peer_environment.ensure()"
	$(BIN)/python -m pytest tests/throughput

tables: $(INSTALLED) ## write the tables of README and docs from docs/results
	PYTHONPATH=. $(BIN)/python tests/page_tables.py

docs: $(INSTALLED) ## build the documentation site in build/site
	$(BIN)/mkdocs build --strict --site-dir build/site

format: $(INSTALLED) ## sort imports, fix what ruff can, format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv and caches; runs/ stays
	rm -rf $(VENV) $(SUPPORTED:%=.venv-%) build *.egg-info .pytest_cache .mypy_cache .ruff_cache

requirements: ## pin anew the newest versions that pyproject.toml allows, for all Pythons; takes uv
	uv pip compile $(PINS) --upgrade -o requirements.txt
	uv pip compile $(PINS) --upgrade -c requirements.txt --extra dev -o requirements-dev.txt
	uv pip compile $(PINS) --upgrade -c requirements.txt --extra cuda -o requirements-cuda.txt

$(INSTALLED): pyproject.toml $(REQUIREMENTS)
	@for python in $(PYTHONS); do \
	  if $$python -c '$(USABLE)' 2>/dev/null; then \
	    echo "Making $(VENV) with $$($$python --version), about a minute ..."; \
	    $$python -m venv --clear $(VENV) && \
	    $(BIN)/python -m pip install -qq --no-deps $(REQUIREMENTS:%=-r %) && \
	    $(BIN)/python -m pip install -qq --no-deps --no-build-isolation -e . && \
	    exec touch $(VENV)/.installed $@; \
	    exit 1; \
	  fi; \
	done; \
	echo "This needs Python 3.11, 3.12 or 3.13 with venv and pip on the PATH, and found none." >&2; \
	echo "Install one, on Debian or Ubuntu: apt install python3.12 python3.12-venv" >&2; \
	exit 1
