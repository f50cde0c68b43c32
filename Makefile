# One command set for people, pre-commit and continuous integration. `make` alone lists it.

PYTHON ?= python3
VENV ?= .venv
# Beside the oldest JAX the newest: every target takes
# VENV=.venv/newest CONSTRAINTS=constraints-newest.txt PYTHON=python3.13
CONSTRAINTS ?= constraints.txt
WORKLOAD = chainmm
CLUSTER = p100x4
GRAPH =
ARGS =
PYTEST_ARGS =
# By file, since the tests of a file share what they compiled. -n 0 in PYTEST_ARGS undoes it.
PYTEST := pytest -n auto --maxprocesses 4 --dist loadfile
GPU_TESTS = tests/simulator tests/policies
# An environment set up with CUDA once stays so when it is refreshed.
CUDA = $(if $(wildcard $(VENV)/.installed-cuda),1)

comma := ,
CUDA_WANTED := $(filter-out 0,$(CUDA))
INSTALLED := $(VENV)/.installed$(if $(CUDA_WANTED),-cuda)
# The newcomer's command waits for what it needs alone; `make test` adds the tools.
FOR_DEMO := $(VENV)/.installed-demo$(if $(CUDA_WANTED),-cuda)
RUN := $(VENV)/bin/python -m

# 'text' as one word of a shell command, whatever it holds.
quote = '$(subst ','\'',$(1))'
SOURCE = $(if $(value GRAPH),--graph $(call quote,$(value GRAPH)),--workload $(call quote,$(value WORKLOAD)))
STAGE_ARGS = $(SOURCE) --cluster $(call quote,$(value CLUSTER)) $(ARGS)

ifneq ($(value GRAPH),)
ifeq ($(origin WORKLOAD),command line)
$(error give GRAPH=file or WORKLOAD=name, not both)
endif
endif

.PHONY: help setup demo stage1 stage2 stage3 pretrain test test-slow test-gpu lint docs bench gpu clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo       train chainmm through all three stages, run it, write runs/demo/'
	@echo 'make test       the fast tests'
	@echo 'make test-slow  the slow tests'
	@echo 'make test-gpu   tests of simulator and policies on a GPU'
	@echo 'make gpu        everything once on a GPU, in eight minutes: docs/results/gpu.md'
	@echo 'make lint       ruff and mypy'
	@echo 'make docs       the documentation, build/site/index.html'
	@echo 'make stage1     learn by imitation; stage2: in simulation; stage3: on measured times'
	@echo '                WORKLOAD=chainmm (or another) or GRAPH=file, and CLUSTER=p100x4 (or another)'
	@echo 'make pretrain   one policy for many graphs, 80 minutes; what ships is checkpoints/base'
	@echo 'make bench      benchmarks of simulator, training and engine'
	@echo 'make setup      only create .venv; CUDA=1 adds the GPU libraries'
	@echo 'make clean      remove .venv and caches; runs/ stays'
	@echo
	@echo 'Further options go in ARGS="--name value", pytest options in PYTEST_ARGS.'
	@echo 'PYTHON=python3.12 makes .venv with another Python (3.11 or newer).'

# $(call install,extras): pip would compile on one core, and tests of others, too.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Python 3.11 or newer is needed, but $(PYTHON) is $$($(PYTHON) --version 2>&1); name one: make setup PYTHON=python3.12" >&2; \
	  exit 1; }
	@echo 'Installing into $(VENV): a minute or two, and 1.6 GB$(if $(CUDA_WANTED), and several GB of GPU libraries)'
	@$(PYTHON) -m venv $(VENV)
	@$(RUN) pip install --quiet --disable-pip-version-check --no-compile -c $(CONSTRAINTS) -e '.[$(1)$(if $(CUDA_WANTED),$(comma)cuda)]'
	@$(RUN) compileall -q -j 0 -x '/tests?/' $(VENV)/lib || true
endef

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	$(call install,dev)
	@touch $(VENV)/.installed $@

$(FOR_DEMO): pyproject.toml $(CONSTRAINTS)
	$(call install,cluster$(comma)exact$(comma)report)
	@touch $@

demo: $(if $(wildcard $(INSTALLED)),$(INSTALLED),$(FOR_DEMO))
	$(RUN) experiments.demo $(ARGS)

stage1 stage2 stage3: $(INSTALLED)
	$(RUN) doppler_jax train $@ $(STAGE_ARGS)

pretrain: $(INSTALLED)
	$(RUN) doppler_jax train pretrain $(ARGS)

bench: $(INSTALLED)
	$(RUN) experiments.bench $(ARGS)
	$(RUN) experiments.scaling --method doppler --batch 256 --sizes 250 1000 4000
	$(RUN) experiments.engine --parts tasks transfers

gpu: $(INSTALLED)
	$(RUN) experiments.gpu $(ARGS)

test: $(INSTALLED)
	$(RUN) $(PYTEST) $(PYTEST_ARGS)

test-slow: $(INSTALLED)
	$(RUN) $(PYTEST) -m slow $(PYTEST_ARGS)

test-gpu: export JAX_PLATFORMS = cuda,cpu
test-gpu: export XLA_PYTHON_CLIENT_PREALLOCATE = false
test-gpu: $(INSTALLED)
	$(RUN) $(PYTEST) $(GPU_TESTS) $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

# Strict: a warning, a broken link or anchor, a page outside the navigation is an error.
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(INSTALLED)
	$(RUN) mkdocs build --strict --quiet

clean:
	rm -rf .venv build dist ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
