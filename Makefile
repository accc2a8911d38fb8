# make demo    install into .venv and train a small model in one process and in two, side by side
# make test    install with the test tools and run every check
# make lint    ruff and mypy only            make format   let ruff rewrite the files
# make bench   every script of benchmarks/   make clean    remove .venv and what the tools left

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

.PHONY: demo test lint format bench clean
.DEFAULT_GOAL := demo

demo: $(VENV)/.installed
	$(BIN)/shardformer demo $(ARGS)

test: lint
	$(TEST_ENV) $(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-test
	set -e; for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script $(ARGS); done

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("ShardFormer needs Python 3.11 or newer, and $(PYTHON) is %d.%d. \
	Name another one: make PYTHON=python3.12" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

# The constraint on torch is what keeps a machine with a local CPU build from fetching the CUDA one.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV); the first time this takes a minute or more."
	$(PIP) --editable .
	@touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV) with the test tools; the first time this takes a minute or more."
	$(PIP) --editable ".[test,plot]"
	@touch $@ $(VENV)/.installed
