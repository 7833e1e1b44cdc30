# Two commands do everything: `make demo` and `make test`. Both make .venv first, with the versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install --constraint constraints.txt

# Tests start some hundred processes, and each would compile everything anew where the environment forbids to keep it.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help docs demo test quick test-product test-frameworks test-long matrix style types tests format bench drills fuzz dist clean chromium

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: .venv/demo.stamp  ## one run, three endings; then the post-mortem of the fault and a dashboard (about two minutes)
	@$(BIN)/python examples/three_ways.py

test: style  ## everything: format, lint, import contracts, types, tests, doctests, README snippets
	@$(MAKE) --no-print-directory --jobs 2 types tests

quick: style  ## style, types, and the tests that train nothing: for the inner loop (under three minutes)
	@$(MAKE) --no-print-directory --jobs 2 types tests TESTS='-m "not trains"'

test-product: style  ## the same without the frameworks
	@$(MAKE) --no-print-directory --jobs 2 types tests TESTS=--ignore=tests/integrations

test-frameworks:  ## the guard in the loops of Hugging Face, Accelerate and Lightning, and every example
	@$(MAKE) --no-print-directory tests TESTS=tests/integrations

# DeepSpeed is built from source, and torchtitan wants older datasets: an environment beside .venv, which has all the rest.
LONG := .venv-long/bin
TODAY := $(shell date -u +%F)
CONFORMANCE = --conformance docs/benchmarks/$(TODAY)-conformance

test-long: .venv/test.stamp .venv/docs.stamp .venv-long/test.stamp  ## by hand, before a release: what `make test` leaves out; then the conformance suite over every integration, DeepSpeed, torchtitan and torchft too, its reports and the matrix (about half an hour)
	@$(MAKE) --no-print-directory tests TESTS=--long
	@$(MAKE) --no-print-directory tests TESTS='-m hypothesis --hypothesis-profile thorough'
	DS_ACCELERATOR=cpu $(LONG)/python -m pytest -p tests.conformance $(CONFORMANCE)-apart.json tests/integrations/test_deepspeed*.py tests/integrations/test_torchtitan.py tests/integrations/test_torchft.py
	$(BIN)/python -m pytest -p tests.conformance $(CONFORMANCE).json -m conforms tests/test_guard.py tests/ranks tests/integrations
	$(BIN)/python -m tests.conformance
	$(BIN)/python -m pytest tests/integrations/test_conformance.py

.venv-long/test.stamp: .venv/test.stamp
	$(BIN)/python -m venv .venv-long
	$(LONG)/python -c "import pathlib, sysconfig; place = pathlib.Path(sysconfig.get_path('purelib')); (place / 'shared.pth').write_text('import site; site.addsitedir(%r)' % str(place.resolve()).replace('.venv-long', '.venv'))"
	$(LONG)/python -m pip --disable-pip-version-check --quiet install wheel
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(LONG)/python -m pip --disable-pip-version-check --quiet install --constraint constraints.txt \
	  --no-build-isolation 'deepspeed>=0.19.8,<0.20'
	$(LONG)/python -m pip --disable-pip-version-check --quiet install --no-deps torchtitan==0.3.0 torch_checkpointing spmd_types==0.2.3 triton
	$(LONG)/python -m pip --disable-pip-version-check --quiet install --no-deps 'torchft>=0.2,<0.3'
	$(LONG)/python -m pip --disable-pip-version-check --quiet install 'opentelemetry-exporter-otlp-proto-http>=1.39'
	@touch $@

matrix: .venv/test.stamp  ## by hand, before a release: the conformance suite against the oldest and newest frameworks that are accepted; its report, and the table of docs/versions.md (about 25 minutes; MATRIX="trl lightning" for some)
	$(BIN)/python -m tests.matrix $(MATRIX)

style: .venv/test.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# One thread of a minute, so that they run beside the tests.
types: .venv/test.stamp
	$(BIN)/lint-imports
	$(BIN)/mypy

tests: .venv/test.stamp chromium
	$(BIN)/python -m pytest -n 3 --dist loadgroup $(TESTS)

format: .venv/test.stamp  ## mend what can be mended by machine
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/test.stamp  ## SpikeBench: detectors, recovery, overhead, diagnosis (about 15 minutes, then `make drills`)
	$(BIN)/python bench/detectors.py --keep experiments/bench/detectors
	OMP_NUM_THREADS=1 $(BIN)/python bench/survival.py --keep experiments/bench/survival
	$(BIN)/python bench/overhead.py
	$(BIN)/python bench/reading.py
	$(BIN)/python bench/dashboard.py

# In two steps: the pages are laid out (with the reference, from docstrings and --help), and zensical makes HTML of them.
docs: .venv/docs.stamp  ## the site of the docs in build/site/site; to search it: `python3 -m http.server -d build/site/site`
	$(BIN)/python -m docs.site.assemble build/site
	cd build/site && ../../$(BIN)/zensical build --strict

drills: .venv/test.stamp  ## break runs in every way there is, and see whether the replay says why (about half an hour)
	OMP_NUM_THREADS=1 $(BIN)/python bench/drills.py --keep experiments/drills

# By the minute, in CPU seconds for each of the eight targets: `make fuzz FUZZ="--seconds 600 --jobs 16"`.
FUZZ ?= --seconds 60 --jobs 2
fuzz: .venv/test.stamp  ## throw damaged and hostile input at everything that reads; what breaks it lies in experiments/fuzz
	OMP_NUM_THREADS=1 $(BIN)/python bench/fuzz.py --found experiments/fuzz $(FUZZ)

dist: .venv/bin/python  ## wheel and sdist in dist/, the same bytes whoever builds them
	$(PIP) hatchling
	SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH:-$$(git log -1 --format=%ct)} $(BIN)/python -m hatchling build -d dist

.venv/docs.stamp: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing zensical into .venv"
	$(PIP) --editable '.[docs]'
	@touch $@

clean:  ## remove the environment and the caches; runs in experiments/ are yours and stay
	rm -rf .venv .venv-long .venv-matrix build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# The browser that tests/browser needs, where it may be installed; where not, these tests are skipped and say so.
chromium:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
	  [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || \
	  { echo "installing chromium"; apt-get update -qq && \
	    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null 2>&1; } || \
	  echo "chromium could not be installed: the tests in tests/browser will be skipped"

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Sealegs needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv

# torch first and by its exact version: anything else lets a dependency choose a build of several gigabytes.
.venv/demo.stamp: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing sealegs[lab,report,dashboard] into .venv (about a minute the first time)"
	$(PIP) torch
	$(PIP) --editable '.[lab,report,dashboard]'
	@touch $@

.venv/test.stamp: .venv/demo.stamp
	@echo "installing the test tools into .venv (about two minutes the first time)"
	$(PIP) --editable '.[test]'
	@touch $@
