# Each command works on a fresh clone: it makes .venv and installs what is missing first. README gives the same without make.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: setup demo test test-all lint format bench bench-long clean

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(PIP) install -c constraints.txt torch==2.13.0
	$(PIP) install -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/remanence demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

test-all: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --slow

.venv/bench-ready: .venv/ready
	$(PIP) install -c constraints.txt -e '.[bench]'
	touch $@

bench: .venv/bench-ready
	$(BIN)/python benchmarks/cpu.py
	$(BIN)/python benchmarks/models.py

bench-long: setup
	$(BIN)/python benchmarks/long.py

clean:
	rm -rf .venv out benchmarks/out .pytest_cache .mypy_cache .ruff_cache .hypothesis
