# Every target does its own set-up; a machine needs Python 3.11 or newer and make.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test matrix check format clean

demo: .venv/ready
	$(BIN)/python examples/demo.py

test: .venv/ready
	$(BIN)/python -m pytest -n 2 --dist loadgroup tests

matrix: .venv/ready
	$(BIN)/python -m tests.run_matrix

check: .venv/ready
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/ready
	$(BIN)/ruff format src tests examples benchmarks
	$(BIN)/ruff check --fix src tests examples benchmarks

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch .venv/ready

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
