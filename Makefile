# make quickstart   set up, fine-tune a small real model, show what it learned (NAME="…" AUTHOR="…" to choose)
# make test         set up and pass every test
# make test-unit    the tests that take seconds
# make lint         ruff: faults and layout
# make clean        remove what was built and every run; .venv stays

PYTHON ?= python3
# Set here, so that only the command line can say otherwise: some shells have a NAME of their own.
NAME =
AUTHOR =

BIN := .venv/bin
MODEL := build/models/SmolLM2-135M-Instruct

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-unit lint clean

help:
	@sed -n 's/^# make/make/p' Makefile

setup: .venv/.done

# One pip run held to exact versions: no other torch is ever downloaded.
.venv/.done: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' \
	  || { echo 'dsft needs Python 3.11 or 3.12, for example: make PYTHON=python3.12 setup' >&2; exit 1; }
	@echo 'Setting up .venv with torch, deepspeed, transformers and what they need: some minutes'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[test,quickstart]'
	@touch $@

$(MODEL): | setup
	$(BIN)/python scripts/fetch_model.py

build/data/identity.json: | setup
	$(BIN)/python scripts/make_identity.py

quickstart: setup
	@$(BIN)/python scripts/quickstart.py $${NAME:+--name "$$NAME"} $${AUTHOR:+--author "$$AUTHOR"}

test: setup $(MODEL) build/data/identity.json
	$(BIN)/python -m pytest

test-unit: setup
	$(BIN)/python -m pytest -m 'not slow and not gpu'

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check

clean:
	rm -rf build runs dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
