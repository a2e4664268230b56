# `make demo` and `make test` do all their own set-up: a .venv with the versions of constraints.txt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2

.PHONY: demo test lint docs format clean

demo: $(VENV)/ready
	$(BIN)/mla-convert demo

test: lint $(VENV)/ready-megatron
	$(BIN)/pytest -n $(WORKERS)
	@echo "all checks passed: ruff, mypy --strict, generated docs, tests"

lint: $(VENV)/ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python docs/generate.py --check

format: $(VENV)/ready-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/ready-test
	$(BIN)/python docs/generate.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/ready: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/ready-test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $(VENV)/ready $@

# Real megatron-core for the tests, which skip what needs it where it cannot be had.
$(VENV)/ready-megatron: tests/fetch_megatron.sh | $(VENV)/ready-test
	@PYTHON=$(BIN)/python tests/fetch_megatron.sh $(VENV)/megatron-core && touch $@ || \
		echo "megatron-core could not be fetched: tests that need it will be skipped"

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
