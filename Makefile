# The only entry points: people and CI run the same commands. `make help` lists them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

# Where torch's builds for CPUs are, which PyPI has not. Asked where no GPU is seen; if it does not
# answer, pip's own index decides. TORCH_INDEX= asks that one alone.
TORCH_INDEX ?= $(if $(wildcard /dev/nvidiactl /dev/dxg),,https://download.pytorch.org/whl/cpu)
PIP_INSTALL  = $(BIN)/pip install --disable-pip-version-check -c constraints.txt
ifneq ($(TORCH_INDEX),)
SIZE = 0.3 GB to download, 1.3 GB on disk, a minute or more. torch is the build for CPUs of $(TORCH_INDEX); \
  if that does not answer, the one of pip's index, 2.8 GB on PyPI, where it is for GPUs
else
SIZE = up to 2.8 GB to download. torch is that of pip's index, on PyPI for GPUs
endif

CONTAINER ?= docker
VERSION   := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

# A lane starts hundreds of processes, which need not compile Baton each.
unexport PYTHONDONTWRITEBYTECODE

# A lane is four runs of pytest: on all cores what starts no processes; kernels without a GPU; three at
# a time what starts processes; one by one what depends on timing. All four run, whichever fails, and
# a report on them is printed. A single test that failed then runs again, alone. Kernels run in
# Triton's interpreter, or from their PTX by the emulator, which is faster, sees more, and needs a C++
# compiler. Tests wait, too: three keep two cores busy.
NUM_WORKERS  := $(shell n=$$(getconf _NPROCESSORS_ONLN); n=$$((n + n / 2)); echo $$((n < 8 ? n : 8)))
ON_ALL_CORES := -n $(NUM_WORKERS) --dist worksteal
THREE_AT_A_TIME := -n 3 --dist loadfile --no-loadscope-reorder
E2E_FILES     = $(shell grep -rlE --include='*.py' 'mark\.e2e' tests)
ALONE_FILES  = $(shell grep -rlE --include='*.py' 'mark\.alone' tests)
TEST         := not (slow or system or nightly or gpu)
FULL         := (slow or system) and not (nightly or gpu)
NIGHTLY      := (nightly or random) and not gpu
REPORT        = $(CURDIR)/.pytest_cache/$@.jsonl
PYTEST        = BATON_LANE_REPORT=$(REPORT) $(BIN)/python -m pytest
KERNELS       = $(ON_ALL_CORES) tests/kernels/interpreted tests/gpu
run_interpreted = TRITON_INTERPRET=1 $(PYTEST) $(KERNELS) -m 'interpreted and $(1)'
run_emulated    = $(PYTEST) $(KERNELS) -p tests.support.ptx.plugin -m 'emulated and $(1)'
define run_lane
	@mkdir -p .pytest_cache; rm -f $(REPORT) $(REPORT:.jsonl=.failures); status=0; \
	$(PYTEST) $(ON_ALL_CORES) -m 'not (e2e or interpreted) and $(1)' || status=$$((status | $$?)); \
	$(call $(2),$(1)) || status=$$((status | $$?)); \
	$(PYTEST) $(THREE_AT_A_TIME) -m 'e2e and not alone and $(1)' $(E2E_FILES) \
	  || status=$$((status | $$?)); \
	$(PYTEST) -m 'alone and $(1)' $(ALONE_FILES) || status=$$((status | $$?)); \
	$(BIN)/python -m tests.support.lanes $(REPORT); \
	$(BIN)/python -m tests.support.unsteady $(REPORT) $$status
endef

.DEFAULT_GOAL := help
.PHONY: help demo test test-full nightly nightly-tests deferred bare steady soak check check-lint check-types check-generated check-kernels bench gpu gpu-bundle protos dashboards chart reference survey docs dist lock audit images publish clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(BIN)/baton: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "baton needs Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "Installing Baton into $(VENV): $(SIZE)."
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH_INDEX),$(PIP_INSTALL) --no-deps --extra-index-url $(TORCH_INDEX) --retries 1 --timeout 15 torch)
	$(PIP_INSTALL) -e '.[local]'
	@touch $@

$(VENV)/.test: $(BIN)/baton
	@echo "Adding to $(VENV) what tests need: 0.5 GB to download, 1.8 GB on disk, a minute or more."
	$(PIP_INSTALL) -e '.[test]'
	@touch $@

$(VENV)/.dev: $(BIN)/baton
	@echo "Adding to $(VENV) what developers need: up to 0.7 GB to download, 2.3 GB on disk, a minute or more."
	$(PIP_INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.test

$(VENV)/.kube: $(VENV)/.dev tests/support/kube_tools.py
	$(BIN)/python -m tests.support.kube_tools $(VENV)/kube
	@touch $@

demo: $(BIN)/baton  ## a local cluster, three prompts, a table
	$(BIN)/baton demo

test: $(VENV)/.test  ## the tests that need Python and make only (docs/testing.md has the minutes)
	$(call run_lane,$(TEST),run_interpreted)

test-full: $(VENV)/.kube  ## slower tests, and those that need packages of the system
	$(call run_lane,$(FULL),run_emulated)

nightly: export BATON_TEST_SEED := $(or $(BATON_TEST_SEED),$(shell $(PYTHON) -c "import random; print(random.randrange(2**32))"))
nightly:  ## before a release: all families, images, browsers, soaks, random draws, deferred
	@$(MAKE) --no-print-directory --keep-going nightly-tests deferred

# Each nightly executes programs, warps and copies in another order, tensor copies as late as possible.
nightly-tests: export PTX_SEED := $(or $(PTX_SEED),$(BATON_TEST_SEED))
nightly-tests: export PTX_CHECKS := late
nightly-tests: $(VENV)/.dev
	$(call run_lane,$(NIGHTLY),run_emulated)

# PYTHONPATH is that of every process of a cluster, too.
deferred: export PYTHONPATH := $(CURDIR):$(CURDIR)/tests/support/deferred_site
deferred: export BATON_DEFERRED := 1
deferred: $(VENV)/.dev  ## engines, workers and clusters on a CPU that computes as late as a GPU may
	@status=0; \
	$(BIN)/python -m pytest $(ON_ALL_CORES) -m 'not e2e and $(TEST)' \
	  tests/engine tests/worker tests/kvtransfer || status=1; \
	$(BIN)/python -m pytest -m 'e2e and $(TEST)' tests/e2e || status=1; exit $$status

bare:  ## as root: demo and test in a root file system of Python and make; SUITE=bookworm
	.ci/bare $(or $(SUITE),bookworm) demo test

steady: $(VENV)/.kube  ## tests of processes again and again on busy cores; ROUNDS=10, FILES=tests/e2e
	$(BIN)/python -m tests.support.steady --rounds $(or $(ROUNDS),10) --files $(or $(FILES),$(E2E_FILES))

ifdef DEFERRED
soak: export PYTHONPATH := $(CURDIR):$(CURDIR)/tests/support/deferred_site
soak: export BATON_DEFERRED := 1
endif
soak: $(VENV)/.dev  ## random faults: nothing lost, wrong or held; MINUTES=10, NO_FAULTS=1, DEFERRED=1
	$(BIN)/python -m tests.support.cluster.soak --minutes $(or $(MINUTES),10) \
	  $(if $(NO_FAULTS),--no-faults) --charts dist/soak.svg

check: $(VENV)/.dev  ## lint, types, imports, protos, kernels for every GPU
	@$(MAKE) --no-print-directory --jobs 2 --keep-going --output-sync \
	  check-kernels check-types check-lint check-generated docs

check-lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python docs/check_language.py
	$(BIN)/python docs/check_tests.py
	cd protos && ../$(BIN)/buf lint

check-types: $(VENV)/.dev
	$(BIN)/mypy

check-generated: $(VENV)/.dev
	$(BIN)/python protos/generate.py --check
	$(BIN)/python helm/dashboards/generate.py --check
	$(BIN)/python helm/generate.py --check
	$(BIN)/python docs/generate.py --check

check-kernels: $(VENV)/.dev
	$(BIN)/python -m baton_kernels.compile

GPU_BUNDLE   := dist/gpu-bundle
# Wheels for a GPU machine: Python 3.12, x86-64, with glibc 2.35 or newer.
GPU_WHEELS   := --only-binary=:all: --python-version 3.12 --implementation cp \
  $(patsubst %,--platform manylinux%_x86_64,_2_35 _2_34 _2_31 _2_28 _2_27 _2_26 _2_24 _2_17 2014 2010 1)

gpu: export PYTHONPATH := .:router:kernels:kvtransfer:prefill_worker:decode_worker:bench/simulator$(if $(PYTHONPATH),:$(PYTHONPATH)):$(CURDIR)/$(GPU_BUNDLE)/site
gpu: $(if $(wildcard $(GPU_BUNDLE)/wheels),$(GPU_BUNDLE)/site)  ## on a machine with a GPU: tests, benchmarks and a verdict, 9 minutes; GPU_ARGS='--only smoke'
	$(PYTHON) -m bench.gpu.verdict $(GPU_ARGS)

$(GPU_BUNDLE)/site: $(wildcard $(GPU_BUNDLE)/wheels/*.whl)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --upgrade \
	  --target $@ $^

# TRITON: a Python with the Triton of the GPU machine, whose kernels no other one finds.
gpu-bundle: $(VENV)/.dev  ## packages and kernels for make gpu without a network, in dist/gpu-bundle; FULL=1: of a cluster; TRITON=python3.12
	rm -rf $(GPU_BUNDLE)
	$(BIN)/python -m bench.gpu.packages $(if $(FULL),--full) > $(VENV)/gpu_packages.txt
	$(BIN)/pip download --quiet --disable-pip-version-check --no-deps $(GPU_WHEELS) \
	  --dest $(GPU_BUNDLE)/wheels -r $(VENV)/gpu_packages.txt
	$(if $(TRITON),$(TRITON) -m tests.support.kernels.compiled_ahead $(GPU_BUNDLE))

protos: $(VENV)/.dev  ## regenerate the stubs in baton/v1 and baton/envoy
	$(BIN)/python protos/generate.py

dashboards: $(VENV)/.dev  ## regenerate the dashboards in helm/baton/dashboards/
	$(BIN)/python helm/dashboards/generate.py

chart: $(VENV)/.dev  ## regenerate what the chart says of values
	$(BIN)/python helm/generate.py

survey: $(VENV)/.dev  ## serve a small checkpoint of every model family and format, for docs/reference/models.md
	$(BIN)/python -m tests.support.engine.survey
	$(BIN)/python -m tests.support.engine.quantized.survey
	$(BIN)/python docs/generate.py

reference: $(VENV)/.dev  ## regenerate docs/reference/ and docs/packages.svg
	$(BIN)/python docs/generate.py

docs: $(VENV)/.dev  ## the documentation site, in dist/site
	cd docs && NO_MKDOCS_2_WARNING=1 ../$(BIN)/mkdocs build --strict --config-file - < mkdocs.yml

dist: $(VENV)/.dev  ## the sdist and the wheel, in dist/
	PYTHON=$(BIN)/python helm/image/build.sh dist dist

lock: $(VENV)/.dev  ## resolve the images' dependencies anew; LOCK=--upgrade: the newest
	$(BIN)/python helm/image/lock.py $(LOCK)

audit: $(VENV)/.dev  ## SBOMs of the images in dist/, and known vulnerabilities
	$(BIN)/python helm/image/audit.py

images: IMAGE_ARGS := $(if $(PYTHON_IMAGE),--build-arg PYTHON_IMAGE=$(PYTHON_IMAGE))
images:  ## both images; CONTAINER=podman REGISTRY=registry.example/ PYTHON_IMAGE=NAME@sha256:DIGEST
	$(CONTAINER) build --target router --tag $(REGISTRY)baton-router:$(VERSION) $(IMAGE_ARGS) .
	$(CONTAINER) build --target worker --tag $(REGISTRY)baton-worker:$(VERSION) $(IMAGE_ARGS) $(WORKER_ARGS) .

publish:  ## both images and the signed chart to a registry; REGISTRY=registry.example/llm/ GPG_KEY=NAME
	CONTAINER=$(CONTAINER) helm/publish.sh $(REGISTRY)

bench: $(VENV)/.dev  ## every benchmark this machine can run, about 13 minutes on 2 cores
	$(BIN)/python -m bench all

clean:  ## remove what the other targets made
	rm -rf $(VENV) dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
