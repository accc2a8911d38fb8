# make demo    install into .venv and train a small model in one process and in two, side by side
# make test-fast  lint, types, and the tests that start no process; for every edit
# make test    install with the test tools and run every check that CI runs; JOBS=2 tests at once
# make test-all  every case of every test, the generated hostile cases, the mutants, the oldest versions
# make lint    ruff and mypy only            make format   let ruff rewrite the files
# make features  run the tests of the families and write docs/features.md from what they say
# make pages   write docs/configuration.md and docs/commands.md from the code
# make test-oldest  the tests of the families with the oldest transformers that is supported, in .venv-oldest
# make test-versions  the versions that users have, from the oldest to the newest: an environment of its own for each
#              row of docs/versions.md; ARGS="--rows 3.13 --envs FOLDER --only train" runs some of it
# make test-gpu  check and measure one GPU, in at most 5 minutes; without one, device placement on a fake accelerator
# make hostile  what hostile users try, all of it: ARGS="--seed 7" repeats a run
# make mutants  known faults in a copy of the package, and the test that finds each: ARGS="--area context" for some
# make bench   every script of benchmarks/   make clean    remove .venv and what the tools left

PYTHON ?= python3
ARGS ?=
JOBS ?= 2
VENV := .venv
OLDEST := .venv-oldest
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
# The package is read by hundreds of processes: its compiled files are kept, whatever the machine says of others.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=
STARTED := $(shell date +%s)
TIER := $(TEST_ENV) $(BIN)/python -m tests.run_tier --jobs $(JOBS) --started $(STARTED)

.PHONY: demo test test-fast test-all test-gpu test-oldest test-versions hostile mutants features pages lint format bench clean
.DEFAULT_GOAL := demo

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py $(ARGS)

test: $(VENV)/.installed-test $(VENV)/.installed-timm
	$(TIER) test $(ARGS)

test-fast: $(VENV)/.installed-test
	$(TIER) fast $(ARGS)

test-all: $(VENV)/.installed-test $(VENV)/.installed-timm $(OLDEST)/.installed-test
	$(TIER) all $(ARGS)

test-gpu: $(VENV)/.installed-test
	$(TEST_ENV) $(BIN)/python -m tests.gpu $(ARGS)

test-oldest: $(OLDEST)/.installed-test $(VENV)/.installed-timm
	$(TEST_ENV) TIMM_FOLDER=$(CURDIR)/$(VENV)/timm $(OLDEST)/bin/python -m pytest -m feature $(ARGS)
	$(TEST_ENV) $(OLDEST)/bin/python -m pytest tests/policies $(ARGS)

test-versions: $(VENV)/.installed-test
	$(BIN)/python -m tests.versions $(ARGS)

features: $(VENV)/.installed-test $(VENV)/.installed-timm
	$(TEST_ENV) $(BIN)/python -m pytest -m feature --write-features $(ARGS)

pages: $(VENV)/.installed-test
	$(TEST_ENV) $(BIN)/python -m tests.reference_pages

hostile: $(VENV)/.installed-test
	$(TEST_ENV) $(BIN)/python -m tests.hostile $(ARGS)

mutants: $(VENV)/.installed-test $(VENV)/.installed-timm
	$(TEST_ENV) $(BIN)/python -m tests.mutants $(ARGS)

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
	rm -rf $(VENV) $(OLDEST) .venvs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

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

# timm for its tests, in a folder of its own: torchvision, which it imports, is not always built for the torch that is
# here (a CPU build), and transformers does not start beside one that is not. Its Python files are enough; what they find
# compiled elsewhere is declared in tests/timm/process.py.
$(VENV)/.installed-timm: constraints.txt | $(BIN)/python
	@echo "Installing timm into $(VENV)/timm for its tests."
	rm -rf $(VENV)/timm
	$(PIP) --no-deps --target $(VENV)/timm timm torchvision
	@touch $@

# constraints.txt, but for the lines that constraints-oldest.txt has as well.
$(OLDEST)/.installed-test: pyproject.toml constraints.txt constraints-oldest.txt | $(BIN)/python
	@echo "Installing into $(OLDEST) with the oldest transformers; the first time this takes a minute or more."
	$(BIN)/python -m venv $(OLDEST)
	grep -v -E "^($$(sed -n 's/==.*//p' constraints-oldest.txt | paste -sd '|' -))==" constraints.txt \
	    | cat - constraints-oldest.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip --disable-pip-version-check install --quiet \
	    --constraint $(OLDEST)/constraints.txt --editable ".[test,plot]"
	@touch $@
