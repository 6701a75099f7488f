# Set-up is part of every target: a clean clone needs only Python 3.11+, git and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test lint format proto bench clean

help:  ## what there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (a minute or two) ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

demo: $(READY)  ## teacher service, rollout worker and trainer on this machine: a small VLM learns
	$(BIN)/python -m examples.geometry.demo

test: $(READY)  ## the tests
	$(BIN)/python -m pytest

lint: $(READY)  ## ruff, mypy, the floors, the contract, drift of the stubs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/generate_stubs.py --check
	cd proto && $(CURDIR)/$(BIN)/buf lint
	cd proto && $(CURDIR)/$(BIN)/buf breaking --against baseline.binpb

format: $(READY)  ## let ruff put the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(READY)  ## write preceptor/v1 from proto/
	$(BIN)/python tools/generate_stubs.py

bench: $(READY)  ## measure on this machine
	$(BIN)/python -m benchmarks.scoring

clean:  ## remove the environment and runs
	rm -rf $(VENV) runs
