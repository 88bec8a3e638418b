# Two commands first: `make demo` shows the system at work, `make test` proves it.

PYTHON ?= python3
PY := .venv/bin/python

.PHONY: help install demo dev test test-slow chaos bench lint format terraform-test checkov clean

help:  ## What there is to make
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 12

install: .venv/installed  ## Prepare .venv and nothing else

.venv/installed: requirements.txt requirements-dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 …")'
	@$(PYTHON) -c 'import ensurepip' || { echo "This Python lacks venv: install your system's python3-venv package."; exit 1; }
	$(PYTHON) -m venv .venv
	@echo "Installing packages into .venv (about a minute) …"
	@$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt -e .
	@touch $@

demo: install  ## The guided demonstration: every claim is checked before your eyes
	@$(PY) manage.py demo

dev: install  ## The whole system on this machine, until Ctrl-C
	@$(PY) manage.py dev

test: install  ## The tests, in parallel
	@$(PY) -m pytest -n auto --dist worksteal -m "not slow" $(ARGS)

test-slow: install  ## Loads and long runs
	@$(PY) -m pytest -n auto --dist worksteal -m slow $(ARGS)

chaos: install  ## Loads the whole stack while all around it breaks, for minutes, then balances the books
	@$(PY) -m tests.chaos $(ARGS)

bench: install  ## How fast an event, a claim and its verdict, and a cold start are against others
	@failed=0; for name in pipeline claims starts; do $(PY) -m bench $$name $(ARGS) || failed=1; done; exit $$failed

lint: install  ## Style, types and layers
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check --quiet .
	@$(PY) -m pyright
	@$(PY) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'

format: install  ## Rewrite the code in its style
	@$(PY) -m ruff check --fix --quiet .
	@$(PY) -m ruff format --quiet .

terraform-test: install  ## The Terraform configuration: format, validity, tests, without a cloud
	@$(PY) -m tests.terraform.program

checkov: .venv-checkov/installed  ## Security checks of the Terraform configuration
	@.venv-checkov/bin/python -m checkov.main --directory terraform --framework terraform --quiet --compact --skip-download

.venv-checkov/installed:  # apart from .venv: it pins what others need newer
	$(PYTHON) -m venv .venv-checkov
	@.venv-checkov/bin/python -m pip install --quiet --disable-pip-version-check checkov==3.3.30
	@touch $@

clean:  ## Remove what `make install` and the local stack made
	rm -rf .venv .venv-checkov .venv-terraform .hookledger build *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
