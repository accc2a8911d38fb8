# make demo           install into .venv, train a small model in one process and in two, and compare the results
# make test           install the test tools and run what CI runs; JOBS=2 tests in parallel
# make test-fast      lint, types, and the tests that start no process; run it after every edit
# make test-all       every case of every test, generated misuse, the mutants, the oldest versions
# make lint           ruff, codespell and mypy             make format   let ruff rewrite the files
# make docs           build the documentation into site/   make docs-serve   serve it and rebuild it after each edit
# make dist           build the sdist and the wheel, check both, and use the wheel in an empty environment
# make pages          write docs/configuration.md, docs/commands.md and docs/pictures from the code
# make features       test all model families and write docs/features.md from the results
# make test-oldest    test the model families with the oldest supported transformers, in .venv-oldest, and the
#                     integrations with the oldest supported libraries
# make test-integrations  test with PEFT, accelerate, TRL and Lightning, in a folder of their own
# make integration-table  run these tests and write their results into docs/integrations.md; ARGS runs some of them
# make test-versions  test in one environment per row of docs/versions.md; ARGS="--rows 3.13 --envs FOLDER --only train"
# make test-gpu       check and measure one GPU in at most 5 minutes; without a GPU, test device placement
# make hostile        run all generated misuse; ARGS="--seed 7" repeats a run
# make mutants        apply known faults to a copy of the package and run the test that finds each; ARGS="--area context"
# make bench          run every benchmark
# make clean          remove .venv and generated files

PYTHON ?= python3
ARGS ?=
JOBS ?= 2
VENV := .venv
OLDEST := .venv-oldest
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
# Hundreds of processes import the package, so its compiled files are always written.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=
STARTED := $(shell date +%s)
TIER := $(TEST_ENV) $(BIN)/python -m tests.run_tier --jobs $(JOBS) --started $(STARTED)

.PHONY: demo test test-fast test-all test-gpu test-oldest test-integrations integration-table test-versions hostile mutants features pages docs docs-serve dist lint format bench clean
.DEFAULT_GOAL := demo

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py $(ARGS)

test: $(VENV)/.installed-test $(VENV)/.installed-timm $(VENV)/.installed-integrations
	$(TIER) test $(ARGS)

test-fast: $(VENV)/.installed-test
	$(TIER) fast $(ARGS)

test-all: $(VENV)/.installed-test $(VENV)/.installed-timm $(VENV)/.installed-integrations-more \
    $(OLDEST)/.installed-test $(OLDEST)/.installed-integrations
	$(TIER) all $(ARGS)

test-gpu: $(VENV)/.installed-test
	$(TEST_ENV) $(BIN)/python -m tests.gpu $(ARGS)

test-oldest: $(OLDEST)/.installed-test $(OLDEST)/.installed-integrations $(VENV)/.installed-timm
	$(TEST_ENV) TIMM_FOLDER=$(CURDIR)/$(VENV)/timm $(OLDEST)/bin/python -m pytest -m feature $(ARGS)
	$(TEST_ENV) $(OLDEST)/bin/python -m pytest tests/policies $(ARGS)
	$(TEST_ENV) $(OLDEST)/bin/python -m pytest --tier test tests/integrations $(ARGS)

test-integrations: $(VENV)/.installed-test $(VENV)/.installed-integrations-more
	$(TEST_ENV) $(BIN)/python -m pytest --numprocesses $(JOBS) tests/integrations $(ARGS)

integration-table: $(VENV)/.installed-test $(VENV)/.installed-integrations-more
	rm -f $(VENV)/integration-rows
	$(TEST_ENV) INTEGRATION_ROWS=$(CURDIR)/$(VENV)/integration-rows $(BIN)/python -m pytest --numprocesses $(JOBS) tests/integrations $(ARGS)
	$(BIN)/python -m tests.integrations.table $(VENV)/integration-rows

test-versions: $(VENV)/.installed-test
	$(BIN)/python -m tests.versions $(ARGS)

features: $(VENV)/.installed-test $(VENV)/.installed-timm
	$(TEST_ENV) $(BIN)/python -m pytest -m feature --write-features $(ARGS)

pages: $(VENV)/.installed-test
	$(TEST_ENV) $(BIN)/python -m tests.reference_pages
	$(TEST_ENV) $(BIN)/python -m tests.pictures

hostile: $(VENV)/.installed-test
	$(TEST_ENV) $(BIN)/python -m tests.hostile $(ARGS)

mutants: $(VENV)/.installed-test $(VENV)/.installed-timm
	$(TEST_ENV) $(BIN)/python -m tests.mutants $(ARGS)

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

dist: $(VENV)/.installed-dist
	rm -rf dist build
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*
	rm -rf .venvs/dist && $(BIN)/python -m venv .venvs/dist
	.venvs/dist/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt dist/*.whl
	cd .venvs/dist && bin/shardformer --version && bin/shardformer verify gpt2 --tensor 2

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-test
	set -e; for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script $(ARGS); done

clean:
	rm -rf $(VENV) $(OLDEST) .venvs site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("ShardFormer needs Python 3.11 or newer, and $(PYTHON) is %d.%d. \
	Name another one: make PYTHON=python3.12" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

# The constraint on torch keeps a machine with a local CPU build from downloading the CUDA build.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV); the first time this takes a minute or more."
	$(PIP) --editable .
	@touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV) with the test tools; the first time this takes a minute or more."
	$(PIP) --editable ".[test,plot]"
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-dist: pyproject.toml | $(BIN)/python
	$(PIP) build twine
	@touch $@

$(VENV)/.installed-docs: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable ".[docs]"
	@touch $@

# timm has its own folder: it imports torchvision, which may not exist for the installed CPU build of torch, and a
# mismatched torchvision breaks transformers. The tests need only its Python files; tests/timm/process.py declares the
# compiled operators.
$(VENV)/.installed-timm: constraints.txt | $(BIN)/python
	@echo "Installing timm into $(VENV)/timm for its tests."
	rm -rf $(VENV)/timm
	$(PIP) --no-deps --target $(VENV)/timm timm torchvision
	@touch $@

# A folder of their own for the libraries of shardformer/integrations: transformers changes its behavior when accelerate
# can be imported, and the other tests must run without it. Their dependencies are in constraints.txt.
$(VENV)/.installed-integrations: constraints-integrations.txt | $(BIN)/python
	@echo "Installing PEFT, bitsandbytes, accelerate, TRL and Lightning into $(VENV)/integrations for their tests."
	rm -rf $(VENV)/integrations
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps --target $(VENV)/integrations \
	    --requirement constraints-integrations.txt
	@touch $@

$(VENV)/.installed-integrations-more: constraints-integrations.txt constraints-integrations-more.txt | $(BIN)/python
	@echo "Installing the libraries of the integrations with Wandb, MLflow and Ray into $(VENV)/integrations for their tests."
	rm -rf $(VENV)/integrations
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps --target $(VENV)/integrations \
	    --requirement constraints-integrations.txt --requirement constraints-integrations-more.txt
	@touch $(VENV)/.installed-integrations $@

# Constraints: constraints.txt, with the versions of constraints-oldest.txt instead of its own.
$(OLDEST)/.installed-test: pyproject.toml constraints.txt constraints-oldest.txt | $(BIN)/python
	@echo "Installing into $(OLDEST) with the oldest transformers; the first time this takes a minute or more."
	$(BIN)/python -m venv $(OLDEST)
	grep -v -E "^($$(sed -n 's/==.*//p' constraints-oldest.txt | paste -sd '|' -))==" constraints.txt \
	    | cat - constraints-oldest.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip --disable-pip-version-check install --quiet \
	    --constraint $(OLDEST)/constraints.txt --editable ".[test,plot]"
	@touch $@

# The integrations are tested with their oldest supported releases and the oldest transformers together.
$(OLDEST)/.installed-integrations: constraints-integrations-oldest.txt | $(OLDEST)/.installed-test
	@echo "Installing the oldest PEFT, accelerate, TRL and Lightning into $(OLDEST)/integrations for their tests."
	rm -rf $(OLDEST)/integrations
	$(OLDEST)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --target $(OLDEST)/integrations \
	    --requirement constraints-integrations-oldest.txt
	@touch $@
