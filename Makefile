# Needs python3 (3.11 or newer, with venv) and make; installs everything else into .venv.
# Options: PYTHON=python3.12, VENV=folder, PIP_OPTIONS="...", WORKERS=2, PYTEST_OPTIONS="...".

SHELL := /bin/sh
PYTHON ?= python3
VENV ?= .venv
PIP_OPTIONS ?=
WORKERS ?= 2
PYTEST_OPTIONS ?=

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_OPTIONS) \
	--constraint constraints.txt --editable
SCRIPTS := .ci/run binder/postBuild

.DEFAULT_GOAL := help
.PHONY: help lab app demo test lint docs format pin clean

help:
	@echo "make lab    install, then open JupyterLab on notebooks/00_start.ipynb"
	@echo "make app    install, then open all explorers as one page without code"
	@echo "make demo   install, then run that notebook into an HTML page, without a browser"
	@echo "make test   install, then lint and run every test (notebooks and browser included)"
	@echo "make lint   ruff, mypy, shellcheck"
	@echo "make docs   the API reference, from docstrings, into site/"
	@echo "make format lay out the code; make pin: renew constraints.txt"
	@echo "make clean  remove .venv, caches and what runs leave behind"

lab: $(VENV)/.lab
	$(BIN)/bigunet lab

app: $(VENV)/.lab
	$(BIN)/bigunet lab --app

demo: $(VENV)/.lab
	$(BIN)/bigunet demo

# First whatever may share the cores, one thread each; then, alone, what is timed or needs them all.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not alone" \
		$(PYTEST_OPTIONS)
	$(BIN)/python -m pytest -m alone $(PYTEST_OPTIONS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck $(SCRIPTS)

docs: $(VENV)/.test
	$(BIN)/python docs/make_reference.py

format: $(VENV)/.test
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

# The tested versions anew: run it, run `make test`, then commit constraints.txt.
pin:
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade $(PIP_OPTIONS) --editable ".[all]"
	$(BIN)/python -m pip freeze --all --exclude-editable \
		| sed -e '/^pip==/d' -e 's/+[a-z0-9.]*$$//' > constraints.txt

clean:
	rm -rf $(VENV) build dist site artefacts runs notebooks/work .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp for each set of packages, so that a second `make lab` starts at once.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "bigunet needs Python 3.11 or newer: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.lab: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing into $(VENV): one to three minutes, once."
	$(INSTALL) ".[lab,pipe,train]"
	@touch $@

$(VENV)/.test: $(VENV)/.lab
	$(INSTALL) ".[all]"
	@touch $@
