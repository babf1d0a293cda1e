# make train   sets up, then trains the tiny sparse model on the embedded corpus (CPU or GPU)
# make test    sets up, then runs the tests that need no GPU, with up to four workers (ARGS="-n 0": in one process)
# make test-fast  the tests of `make test` that are not marked slow
# make attack  attacks for ATTACK_MINUTES=30: kills, hangs, damaged files, full disks, bad configurations, broken models
# make check   ruff and mypy
# make nvcc    installs pip's nvcc into .venv, unless there is an nvcc: without one the tests that compile are skipped
# make kernels builds the CUDA kernels and reports their resources; needs nvcc, neither a GPU nor a CUDA build of torch
# make wheel   builds the kernels, and a wheel in dist/ that holds them: where it is installed, no nvcc is needed
# SETUP=0      uses the `python3` on PATH (or PYTHON=...) as it is, and installs nothing

PYTHON ?= python3
# Many tests wait for processes: one worker more than there are cores, four at most.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(4, 1 + len(os.sched_getaffinity(0))))')
SETUP ?= 1
# The version is named in the same pip call as everything else: see constraints.txt for the rest.
TORCH ?= torch==2.13.0
# Pip's CUDA compiler, all of one release: nvidia-cuda-nvcc itself asks for no version of its parts.
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
# Compiling all that is installed takes half a minute, and a run imports a part of it: imports compile what they need.
INSTALL = $(RUN) -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt '$(TORCH)'
unexport PYTHONDONTWRITEBYTECODE
endif

.PHONY: setup train test test-fast test-gpu attack check nvcc kernels wheel

setup: $(TOOLS)

.venv/.ready: pyproject.toml constraints.txt
	@echo 'Setting up .venv: about a minute, once'
	@test -x .venv/bin/pip || $(PYTHON) -m venv .venv
	@$(INSTALL) -e .
	@touch $@

# What tests and checks need beside the package.
.venv/.tools: .venv/.ready
	@$(INSTALL) -e '.[dev]'
	@touch $@

# Threads that wait for each other sleep: spinning ones slow a machine that does something else, too, by a factor of ten.
train: export OMP_WAIT_POLICY ?= passive
train: $(READY)
	$(RUN) -m sparsellm.train experiment=smoke $(ARGS)

test: $(TOOLS)
	$(RUN) -m pytest --numprocesses $(WORKERS) --dist loadfile $(ARGS)

test-fast: $(TOOLS)
	$(RUN) -m pytest --numprocesses $(WORKERS) --dist loadfile -m 'not gpu and not slow' $(ARGS)

test-gpu: $(TOOLS)
	$(RUN) -m pytest -m gpu tests/gpu $(ARGS)

attack: $(TOOLS)
	$(RUN) tests/attack/rounds.py $(ATTACK_MINUTES)

check: $(TOOLS)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

nvcc: $(READY)
	@$(RUN) -c 'from sparsellm.ops.compiler import nvcc; print(nvcc())' 2>/dev/null || $(INSTALL) $(NVCC)

kernels: $(READY)
	$(RUN) -m sparsellm.ops.build

wheel: $(READY)
	$(RUN) -m sparsellm.ops.build build/kernels
	SPARSELLM_KERNELS=build/kernels $(RUN) -m pip wheel --quiet --no-deps --wheel-dir dist .
