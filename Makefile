# make train      sets up .venv, then trains the tiny sparse model on the embedded corpus (CPU or GPU)
# make test       sets up, then runs the tests that need no GPU, with up to four workers (ARGS="-n 0": one process)
# make test-fast  runs the tests of `make test` that neither compile, kill nor train for long
# make test-all   runs the tests of `make test`, for every supported GPU, and some longer ones
# make test-gpu   runs tests/gpu, on a Hopper GPU
# make attack     attacks for ATTACK_MINUTES=30: kills, hangs, damaged files, full disks, bad configurations and models
# make check      runs ruff and mypy
# make nvcc       installs pip's nvcc into .venv if there is no nvcc; without one, tests that compile are skipped
# make docs       builds the documents and the API reference into build/docs (mkdocs)
# make kernels    builds the CUDA kernels and reports their resources; needs nvcc, but no GPU and no CUDA build of torch
# make wheel      builds the kernels and a wheel in dist/ that contains them; installing the wheel needs no nvcc
# SETUP=0         uses the `python3` on PATH (or PYTHON=...) unchanged, and installs nothing

PYTHON ?= python3
# Many tests wait for processes, so use one worker more than there are cores, but at most four.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(4, 1 + len(os.sched_getaffinity(0))))')
SETUP ?= 1
# Named in the same pip call as all other packages, whose versions are in constraints.txt.
TORCH ?= torch==2.13.0
# Pip's CUDA compiler. All parts must be of one release, and nvidia-cuda-nvcc does not pin the versions of its parts.
NVCC ?= nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-cccl==13.0.85 \
	nvidia-cuda-runtime==13.0.96

ifeq ($(SETUP),0)
RUN := $(PYTHON)
READY :=
TOOLS :=
else
RUN := .venv/bin/python
READY := .venv/.ready
TOOLS := .venv/.tools
# Byte-compiling all packages takes half a minute, and a run imports only some: imports compile what they need.
INSTALL = $(RUN) -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt '$(TORCH)'
unexport PYTHONDONTWRITEBYTECODE
endif

.PHONY: setup train test test-fast test-all test-gpu attack check docs nvcc kernels wheel

setup: $(TOOLS)

.venv/.ready: pyproject.toml constraints.txt
	@echo 'Setting up .venv: about a minute, once'
	@test -x .venv/bin/pip || $(PYTHON) -m venv .venv
	@$(INSTALL) -e .
	@touch $@

# What tests and checks need in addition to the package.
.venv/.tools: .venv/.ready
	@$(INSTALL) -e '.[dev]'
	@touch $@

# Waiting threads sleep: spinning threads slow training tenfold on a machine that is busy with other work.
train: export OMP_WAIT_POLICY ?= passive
train: $(READY)
	$(RUN) -m sparsellm.train experiment=smoke $(ARGS)

# Several processes share the cores, so each computes on one thread.
test test-fast test-all attack: export OMP_NUM_THREADS ?= 1
# In the order of tests/conftest.py, which starts with the slow files.
PYTEST = $(RUN) -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
test: $(TOOLS)
	$(PYTEST) $(ARGS)

test-fast: $(TOOLS)
	$(PYTEST) -m 'not gpu and not slow' $(ARGS)

test-all: $(TOOLS)
	$(PYTEST) -m 'not gpu' $(ARGS)

test-gpu: $(TOOLS)
	$(RUN) -m pytest -m gpu tests/gpu $(ARGS)

attack: $(TOOLS)
	$(RUN) tests/attack/rounds.py $(ATTACK_MINUTES)

check: $(TOOLS)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

docs: $(READY)
	@$(RUN) -c 'import mkdocs, mkdocstrings' 2>/dev/null || $(INSTALL) -e '.[docs]'
	$(RUN) -m mkdocs build --strict --quiet

nvcc: $(READY)
	@$(RUN) -c 'from sparsellm.ops.compiler import nvcc; print(nvcc())' 2>/dev/null || $(INSTALL) $(NVCC)

kernels: $(READY)
	$(RUN) -m sparsellm.ops.build

wheel: $(READY)
	$(RUN) -m sparsellm.ops.build build/kernels
	SPARSELLM_KERNELS=build/kernels $(RUN) -m pip wheel --quiet --no-deps --wheel-dir dist .
