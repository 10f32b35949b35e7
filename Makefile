# Two commands are all the set-up: `make serve` and `make test`. They need Python 3.11 or newer, make and a package
# registry; each makes or mends its environment (.venv) from the lock first.

SHELL := /bin/sh
.DEFAULT_GOAL := help

# The first Python that is new enough. Name another one with: make PYTHON=/path/to/python3 …
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3.14 python3 python; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
ENV ?= .venv
BIN := $(ENV)/bin
ARGS ?=
TESTS ?= tests
# The tests mostly wait, so all of them together are spread over some processes; a part of them starts sooner in one.
SPREAD ?= $(if $(filter tests,$(TESTS)),--numprocesses auto --dist worksteal)
NIGHTLY = $(BIN)/python -m pytest $(TESTS) --timeout 1800 -o faulthandler_timeout=2400
NONE_FOUND := 5
# What a process has compiled is read by the next: without that, each server that a test starts compiles all its modules.
unexport PYTHONDONTWRITEBYTECODE

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1|/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-16s %s\n", $$1, $$2}'

serve: env-serve  ## start a server with the demo agent on http://127.0.0.1:8420 (ARGS="--port 9000")
	@exec $(BIN)/holdfast serve $(ARGS)

chat: env-serve  ## talk to the running server (ARGS="--session bob")
	@exec $(BIN)/holdfast chat $(ARGS)

test: env-dev  ## all tests but the slow ones (TESTS=tests/runtime ARGS="-x")
	@exec $(BIN)/python -m pytest $(TESTS) $(SPREAD) $(ARGS)

nightly: env-dev  ## the slow tests: long explorations, real killing, repeated runs, known faults put back
	@failed=0; \
	$(NIGHTLY) $(SPREAD) -m "nightly and not alone" $(ARGS) || [ $$? -eq $(NONE_FOUND) ] || failed=1; \
	$(NIGHTLY) -m "nightly and alone" $(ARGS) || [ $$? -eq $(NONE_FOUND) ] || failed=1; \
	exit $$failed

mutants: env-dev  ## put known faults back, one at a time: a test must see each (ARGS="--only fence --jobs 2")
	@exec $(BIN)/python -m tests.mutants $(ARGS)

bench: env-dev  ## measure, print the table, and write it for the docs
	@exec $(BIN)/python -m benchmarks $(ARGS)

lint: env-dev  ## ruff: rules and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: env-dev  ## mypy, strict
	@$(BIN)/mypy

layers: env-dev  ## imports only go down
	@$(BIN)/lint-imports --no-cache

docs: env-dev  ## build the docs strictly into docs/_build/html
	@$(BIN)/python docs/_generate.py
	@$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

format: env-dev  ## let ruff rewrite what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

lock: env-lock  ## compile requirements/*.txt anew (ARGS="--upgrade")
	@for lock in serve dev bench lock pip; do \
		case $$lock in \
		serve) from="pyproject.toml requirements/build.in" ;; \
		dev) from="pyproject.toml requirements/build.in requirements/dev.in -c requirements/serve.txt" ;; \
		*) from="requirements/$$lock.in" ;; esac; \
		echo "» requirements/$$lock.txt"; \
		$(ENV)-lock/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header \
			--no-strip-extras --no-emit-index-url --fork-strategy fewest $$from -o requirements/$$lock.txt $(ARGS) || exit 1; \
	done

clean:  ## take away the environments and what was built
	rm -rf .venv .venv-lock .venv-bench docs/_build build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

python:
	@test -n "$(PYTHON)" || { echo "Holdfast needs Python 3.11 or newer, and none was found on PATH."; \
		echo "Install one (Debian, Ubuntu: apt install python3 python3-venv; macOS: brew install python)"; \
		echo "or name it: make PYTHON=/path/to/python3 $(MAKECMDGOALS)"; exit 1; }

env-serve: python
	@$(PYTHON) requirements/install.py serve $(ENV)

env-dev: python
	@$(PYTHON) requirements/install.py dev $(ENV)

env-lock: python
	@$(PYTHON) requirements/install.py lock $(ENV)-lock

.PHONY: help serve chat test nightly mutants bench lint types layers docs format lock clean python env-serve env-dev env-lock
