# make demo      S2O on recorded attention inputs: figures and a picture (s2o_demo.png)
# make test      a sample of the kernels compiled, then the tests: what each commit is judged by
# make test-all  every kernel for every architecture, slow tests too, more random cases
# make loss      what S2O costs the small model of benchmarks/small_model, and what it saves; with PyTorch
# make figures   every measured figure of README.md and docs anew, on a GPU, two hours; models are trained first
# make lint      ruff and mypy
# make docs      the documentation site, into build/site
# make mutants   random faults in Python that changed since the commit SINCE: which of them no test sees
# make sanitize  small cases on a GPU under compute-sanitizer: memcheck, then racecheck; each is a target too
# make torture   hostile checks on a GPU, about 4 minutes
# make clean     remove what these commands made
#
# Each sets itself up in $(VENV). With an NVIDIA GPU that is with CuPy for its driver, and GPU tests run too.
# Without one, demo installs no CUDA library, and test only CuPy and NVRTC, to compile with. Where pip reaches
# no package index, packages of $(PYTHON) are used.
#
#   PYTHON=python3.12   the Python to start from     VENV=path   where the environment goes
#   INTEROP=1           also install PyTorch, JAX, transformers, diffusers for the CPU and test with them
#   LINT=1              lint too, while kernels compile
#   LOSS="--tune loss=0.005"   more arguments for loss
#   ONLY=retrieval,host        figures to make      FIGURES_ARGS=--list   or --check, --dry-run, which need no GPU
#   PYTEST="-k paged -x"   more arguments for pytest
#   SINCE=main  MUTANTS="--count 50"   for mutants (python -m tests.mutants --help)
#   SEED=1   other random numbers for torture    TORTURE="--only streams"   more arguments for it (--help lists them)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
INTEROP ?= 0
LINT ?= 0
PYTEST ?=
LOSS ?=
ONLY ?=
FIGURES_ARGS ?=
SINCE ?= HEAD~1
MUTANTS ?=
SEED ?= 0
TORTURE ?=

ARCHITECTURES := sm_80,sm_86,sm_89,sm_90a,sm_100a,sm_120a
# Of these what kernels are written for, and the one where the compiler most often lacks registers.
SAMPLED := sm_80,sm_90a,sm_120a

# none, cuda12 or cuda13: part of the stamps' names, so that a new driver sets up anew.
CUDA := $(shell .ci/setup cuda)
ENVIRONMENT := .ci/setup setup.cfg pyproject.toml
DEMO := $(VENV)/.demo-$(CUDA)
TEST := $(VENV)/.test-$(CUDA)
WITH_TORCH := $(VENV)/.frameworks-$(CUDA)
FRAMEWORKS := $(if $(filter 1,$(INTEROP)),$(WITH_TORCH))
DOCS := $(VENV)/.docs
BESIDE := $(FRAMEWORKS) $(if $(filter 1,$(LINT)),lint)
RUN := $(VENV)/bin/python

# Tests start many processes, in each of which Python would compile what it imports of PyTorch and transformers anew.
unexport PYTHONDONTWRITEBYTECODE

# Without a GPU files of tests go side by side, a core each, and test leaves out those marked as slow. Tests on a GPU
# share it, one after the other.
ifeq ($(CUDA),none)
WORKERS := -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder
QUICK := -m "not slow"
test test-all: export OMP_NUM_THREADS := 1
endif

.PHONY: demo loss figures test test-all kernels mutants lint mypy docs sanitize memcheck racecheck torture clean

demo: $(DEMO)
	$(RUN) -m s2o_cupy demo

# pip and mypy keep one core busy each; kernels compile meanwhile.
test: $(TEST)
	$(MAKE) -j 3 kernels $(BESIDE) KERNELS=--sample ARCHITECTURES=$(SAMPLED)
	$(RUN) -m pytest $(WORKERS) $(QUICK) $(PYTEST)

test-all: $(TEST)
	$(MAKE) -j 3 kernels $(BESIDE)
	$(RUN) -m pytest $(WORKERS) --hypothesis-profile=all $(PYTEST)

loss: $(WITH_TORCH)
	$(RUN) benchmarks/model.py --small $(LOSS)

# Without a GPU it only lists, and sets up nothing.
figures: $(if $(filter-out none,$(CUDA)),$(WITH_TORCH))
	$(if $(filter none,$(CUDA)),$(PYTHON),$(RUN)) benchmarks/figures.py $(if $(ONLY),--only $(ONLY)) $(FIGURES_ARGS)

# PyTorch for CUDA may bring another NVRTC: that comes first.
kernels: $(TEST) $(if $(filter-out none,$(CUDA)),$(FRAMEWORKS))
	$(RUN) -m s2o_cupy compile --arch $(ARCHITECTURES) $(KERNELS)

mutants: $(TEST)
	OMP_NUM_THREADS=1 $(RUN) -m tests.mutants --since $(SINCE) $(MUTANTS)

# compute-sanitizer comes with the CUDA toolkit. Padding, as one array's end may else be the next one's beginning.
sanitize: memcheck
	$(MAKE) racecheck

memcheck racecheck: $(TEST)
	PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} compute-sanitizer --tool $@ $(PADDING) --error-exitcode 1 \
	  $(RUN) tests/sanitize.py

memcheck: PADDING := --padding 65536

# With PyTorch for CUDA: that of $(PYTHON), or INTEROP=1 installs it.
torture: $(TEST) $(FRAMEWORKS)
	PYTHONPATH=.:tests$${PYTHONPATH:+:$$PYTHONPATH} $(RUN) -m torture --seed $(SEED) $(TORTURE)

lint: $(TEST) mypy
	$(RUN) -m ruff check .

# A copy laid out as the installed package is, for those who know packages only by their folders.
lay_out = rm -rf $(1) && mkdir -p $(1) && cp -r s2o_cupy $(1)/ && cp -r raw_kernels reference $(1)/s2o_cupy/

mypy: $(TEST)
	$(call lay_out,build/mypy)
	MYPYPATH=build/mypy $(RUN) -m mypy build/mypy/s2o_cupy $(wildcard tests/*.py examples/*.py benchmarks/*.py) \
	  | sed -E 's#build/mypy/(s2o_cupy/(reference|raw_kernels)/)?#\2/#; s#^/##'

# What a docstring says is read, not imported. The variable turns off a notice of another version of MkDocs.
docs: $(DOCS)
	$(call lay_out,build/docs)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

$(DEMO): $(ENVIRONMENT)
	.ci/setup demo "$(PYTHON)" "$(VENV)" $(CUDA)
	touch $@

$(TEST): $(ENVIRONMENT)
	.ci/setup test "$(PYTHON)" "$(VENV)" $(CUDA)
	touch $@

$(WITH_TORCH): $(TEST)
	.ci/setup frameworks "$(PYTHON)" "$(VENV)" $(CUDA)
	touch $@

$(DOCS): $(ENVIRONMENT)
	.ci/setup docs "$(PYTHON)" "$(VENV)" none
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis s2o_demo.png
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
