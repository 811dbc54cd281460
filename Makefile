# The only entry points: people and CI run the same commands. `make help` lists them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

CONTAINER ?= docker
VERSION   := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

# Of tests that start no cluster: those do it one by one, for they mind how long things take.
ON_ALL_CORES := -n logical --maxprocesses 8 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo test test-full soak check bench gpu protos dashboards chart dist lock audit images clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(BIN)/baton: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "baton needs Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[local]'
	@touch $@

$(VENV)/.dev: $(BIN)/baton
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(BIN)/baton  ## a local cluster, three prompts, a table
	$(BIN)/baton demo

test: $(VENV)/.dev  ## the tests, about 10 minutes on 2 cores
	$(BIN)/pytest $(ON_ALL_CORES) -m 'not (slow or gpu or e2e)'
	$(BIN)/pytest -m 'e2e and not (slow or gpu)'

test-full: $(VENV)/.dev  ## the slower tests, about 45 minutes on 2 cores
	$(BIN)/pytest $(ON_ALL_CORES) -m 'slow and not (gpu or e2e)'
	$(BIN)/pytest -m 'slow and e2e and not gpu'

soak: $(VENV)/.dev  ## ten minutes of random faults: nothing lost, wrong or held
	$(BIN)/python -m tests.support.cluster.soak

check: $(VENV)/.dev  ## lint, types, imports, protos, kernels for every GPU
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	cd protos && ../$(BIN)/buf lint
	$(BIN)/python protos/generate.py --check
	$(BIN)/python helm/dashboards/generate.py --check
	$(BIN)/python helm/generate.py --check
	$(BIN)/python -m kernels.compile

gpu:  ## on a machine with a GPU: its tests, then its benchmark; 8 minutes, installs nothing
	BATON_TEST_SECONDS=210 $(PYTHON) -m pytest -c tests/gpu.ini --rootdir . tests/kernels/gpu tests/gpu
	$(PYTHON) -m bench gpu --json

protos: $(VENV)/.dev  ## regenerate the stubs in baton/v1
	$(BIN)/python protos/generate.py

dashboards: $(VENV)/.dev  ## regenerate the dashboards in helm/baton/dashboards/
	$(BIN)/python helm/dashboards/generate.py

chart: $(VENV)/.dev  ## regenerate what the chart says of values
	$(BIN)/python helm/generate.py

dist: $(VENV)/.dev  ## the sdist and the wheel, in dist/
	PYTHON=$(BIN)/python helm/image/build.sh dist dist

lock: $(VENV)/.dev  ## resolve the images' dependencies anew; LOCK=--upgrade: the newest
	$(BIN)/python helm/image/lock.py $(LOCK)

audit: $(VENV)/.dev  ## SBOMs of the images in dist/, and known vulnerabilities
	$(BIN)/python helm/image/audit.py

images:  ## both images, by docker or CONTAINER=podman; REGISTRY=registry.example/
	$(CONTAINER) build --target router --tag $(REGISTRY)baton-router:$(VERSION) .
	$(CONTAINER) build --target worker --tag $(REGISTRY)baton-worker:$(VERSION) $(WORKER_ARGS) .

bench: $(VENV)/.dev  ## every benchmark this machine can run
	$(BIN)/python -m bench all

clean:  ## remove what the other targets made
	rm -rf $(VENV) dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
