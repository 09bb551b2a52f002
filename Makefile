# Commands of the project; each installs what it needs first, into .venv. Needs python3 (3.11 to 3.13) with pip, make and bash.

SHELL := bash
.SHELLFLAGS := -o pipefail -ec

PYTHON ?= python3
BIN := .venv/bin
NEXT := $(BIN)/threefold generate demo/run --prompt 'In Python, a list'
OTHER := $(BIN)/threefold train examples/demo.yaml --run-dir demo/other
OTHER += --set parallel.dp=1 --set parallel.tp=1 --set parallel.pp=1

.PHONY: demo test test-slow test-gpu test-sweep test-mutations lint benchmark docs docs-site clean

# What `make demo` adds to its command line, such as DEMO_OPTIONS="--set train.max_steps=20".
DEMO_OPTIONS ?=

# Train a small GPT on real English on 8 processes of this machine and let it write.
demo: .venv/ready
	@test -d demo/text || $(BIN)/threefold data sample demo/text
	@test -d demo/tokens || $(BIN)/threefold data prepare demo/text --out demo/tokens --vocab-size 4096
	@rm -rf demo/run
	$(BIN)/threefold train examples/demo.yaml --run-dir demo/run $(DEMO_OPTIONS)
	$(BIN)/threefold generate demo/run --prompt "The function returns" --prompt "If the file" --max-new-tokens 60
	@echo
	@echo "The loss curve: $$(ls demo/run/*.png)"
	@echo "The hash of the weights: $$($(BIN)/threefold checkpoint show demo/run | sed -n 's/^ *fingerprint *\([0-9a-f]*\),.*/\1/p')"
	@echo "Every other layout ends with the same one, to the last bit. See for yourself, in one process:"
	@echo "  $(OTHER) $(DEMO_OPTIONS)"
	@echo "Next, in this folder:"
	@echo "  $(NEXT)"
	@echo "  source .venv/bin/activate       # then \`threefold\` alone is enough"

# Idle threads of the tests' many processes sleep at once, and leave the cores to the others; benchmarks run as torch does.
test test-slow test-sweep test-mutations: export GOMP_SPINCOUNT ?= 2000

# Tests start many processes; they read what the first ones have compiled, also where Python is told to write none.
unexport PYTHONDONTWRITEBYTECODE

# Three workers share the files, in the order of tests/conftest.py: on two cores, as one of them often waits.
SHARED := -n 3 --dist loadfile --no-loadscope-reorder --durations=40

test: .venv/test-ready
	$(BIN)/pytest $(SHARED) -m "not slow and not sweep"

test-slow: .venv/test-ready
	$(BIN)/pytest $(SHARED) -m "slow and not sweep"

# On a GPU, against the CPU; without one they are skipped, and the summary says how many.
test-gpu: .venv/test-ready
	$(BIN)/pytest -m gpu

# What takes too long for CI: many kills, long fuzzing, and all cases of the long lists of layouts.
test-sweep: .venv/test-ready
	$(BIN)/pytest -m sweep

# Makes the mistakes of the catalogue one at a time and sees that a test and `threefold verify` find each.
test-mutations: .venv/test-ready
	$(BIN)/python -m tests.mutations.run

lint: .venv/test-ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m docs.generate

# Ratios against what a user would pick instead; needs an idle machine, takes about ten minutes.
benchmark: .venv/test-ready
	$(BIN)/python benchmarks/collectives.py
	$(BIN)/python benchmarks/single_process.py
	$(BIN)/python benchmarks/limit.py
	$(BIN)/python benchmarks/layouts.py
	$(BIN)/python benchmarks/start.py
	$(BIN)/python benchmarks/pipeline.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/saving.py
	$(BIN)/python benchmarks/head.py
	$(BIN)/python benchmarks/attention.py
	$(BIN)/python benchmarks/generation.py

# What the site has beside the pages: the settings, from their schema; what can be combined, from the rules; the commands and the
# public names, from the code; the rooms, from the imports; capabilities, promises and mistakes, from their lists.
docs: .venv/test-ready
	$(BIN)/python -m docs.generate

# The pages of docs/ as a site, with search, in docs/_build/site; its tools have an environment of their own. With
# SPHINX_OPTIONS='-t online' the names of Python and torch are links.
SPHINX_OPTIONS ?=
docs-site: docs .venv-docs/ready
	.venv-docs/bin/sphinx-build --fail-on-warning --keep-going --quiet -j auto $(SPHINX_OPTIONS) docs docs/_build/site
	@echo "The site: docs/_build/site/index.html"

clean:
	rm -rf .venv .venv-docs docs/_build demo build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# Installs $(2) with the Python of the environment $(1), and names on one line what pip gets; its warnings are shown if it fails.
# Nothing is compiled ahead that may never be imported.
define install
@$(1)/bin/python -m pip install --no-compile --disable-pip-version-check $(2) 2> $(1)/install.log | awk \
	'/^(Collecting|Processing) / { sub(".*/", "", $$2); sub(/[^A-Za-z0-9._-].*|-[0-9].*/, "", $$2); printf "%s ", $$2; fflush() } \
	END { print "" }' || { cat $(1)/install.log >&2; exit 1; }
@touch $@
endef

.venv/ready: pyproject.toml parity/pyproject.toml
	@echo "Setting up .venv, once: torch and what Threefold needs to train."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(call install,.venv,-e . -e ./parity)

TOOLS := [test,lint]

.venv/test-ready: .venv/ready
	@echo "Installing the tools of tests and lint into .venv, once."
	$(call install,.venv,-e '.$(TOOLS)')

.venv-docs/ready: pyproject.toml
	@echo "Setting up .venv-docs, once: Sphinx."
	@test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	@$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], \
		sep="\n")' > .venv-docs/requirements.txt
	$(call install,.venv-docs,-r .venv-docs/requirements.txt)
