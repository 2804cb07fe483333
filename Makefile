# Every command of this repository.  `make help` lists them; each does its own set-up.
# PYTHON picks the interpreter; each Python version has an environment of its own under .venv/.

PYTHON ?= python3
PYTHON311 ?= python3.11
PYTHON312 ?= python3.12
# The long ones first, so that no worker waits for the other at the end.
TESTS ?= tests/ranks tests/faults tests/docs tests/unit
# What a second Python version must show in CI, beside the whole suite on the first.  test_golden.py resumes LoRA, too.
TESTS_312 ?= tests/ranks/test_resume_layouts.py tests/ranks/test_resume.py tests/ranks/test_golden.py tests/ranks/test_interop.py \
	tests/ranks/test_megatron_fields.py tests/unit/mcore/test_wall.py tests/unit/recipe/test_recipe.py tests/unit/data/template/test_sandbox.py \
	tests/unit/mcore/checkpoint_io/test_safe_reader.py tests/unit/data/cache/test_encoding_version.py tests/unit/data/long/test_suite.py \
	tests/unit/mcore/loss/test_distill_core.py
# Processes among which make test shares the test files.  Tests of ranks and of faults wait for each other, for disks and
# for limits of time, so three keep two cores busy.
WORKERS ?= 3
SHARED_BY_FILE := --dist loadfile --no-loadscope-reorder
PYTEST_FLAGS ?=
CODE := sft tools tests
BLACK := black --quiet --line-length 120 --target-version py311

VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
VENV := .venv/$(VERSION)
BIN := $(VENV)/bin
READY := $(VENV)/.ready

export OMP_NUM_THREADS ?= 1
# Tests start hundreds of processes.  Without bytecode on disk each compiles torch and megatron-core for about 7 s again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv demo demo-text demo-retrieval test cards test-faults test-mutations test-triton test-kernels test-slurm test-standin test-gpu test-gpu-hour gpu-hour test-all venv-py312 test-py312 test-all-versions test-docs lint fmt docs pages release clean python

help:
	@echo "make venv                create .venv/<python version> with pinned dependencies"
	@echo "make demo                train two small models with context parallelism 2 on the CPU: on text, and to find evidence far back"
	@echo "make demo-text           the first of them; make demo-retrieval: the second"
	@echo "make test                the CPU test suite; TESTS=tests/unit/parallel/test_context_parallel.py and PYTEST_FLAGS=-x narrow it"
	@echo "make test-faults         runs that are killed, filled up, damaged and hung, and their end against an undisturbed one"
	@echo "make cards               runs the tests that fill the cards of families, and writes docs/cards"
	@echo "make test-mutations      deliberate faults, one at a time, each of which its tests must notice; MUTATIONS='--only loss', '--sample 10' or, for random ones, '--random SECONDS'"
	@echo "make test-triton         the Triton kernels and those of FLA, by their interpreter; downloads Triton (300 MB) first"
	@echo "make test-kernels        compiles every kernel of attention, linear attention and the loss head for Hopper and Blackwell, without a GPU; downloads compilers (1.3 GB on disk); KERNELS=changed: some of what the last commit touches, in two minutes"
	@echo "make test-slurm          launch/slurm.sbatch on a real SLURM of two nodes on this machine; root on Debian: installs slurm-wlm and munge"
	@echo "make test-standin        GPU runs without a GPU, all but their numbers: on a stand-in for CUDA; Python 3.12, downloads torch for CUDA (6 GB); TE_WHEEL=FILE: with Transformer Engine"
	@echo "make test-gpu            what only a GPU can show; skipped where torch sees none"
	@echo "make gpu-hour            probes, tests and benchmarks on one GPU, with a report; GPU_HOUR='--gpus 8' or '--tiny'"
	@echo "make test-gpu-hour       the same in toy sizes on the CPU, with processes that need not import torch: how CI runs it"
	@echo "make test-py312          the part of the suite CI repeats on Python 3.12"
	@echo "make test-all            the same with full grids of layouts and every fault"
	@echo "make test-all-versions   make test-all on Python 3.11 and on 3.12"
	@echo "make lint                style, types, import contracts, generated pages"
	@echo "make fmt                 rewrite the code in our style"
	@echo "make docs                build the site into build/site; a warning is an error"
	@echo "make test-docs           run every command and code block of the site"
	@echo "make pages               regenerate the pages of docs/ that are made from the code"
	@echo "make release             build wheel and sdist, try the wheel outside of the repository, and print how to publish"
	@echo "make clean               remove environments, caches and build leftovers; runs/ is kept"
	@echo "PYTHON=python3.12 (any path) picks the interpreter; Python 3.11 or later"

# Checked before anything else is tried, so that what is missing is said in one sentence.
python:
	@test -n "$(VERSION)" || { echo "error: '$(PYTHON)' does not run. Name a Python >= 3.11: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: '$(PYTHON)' is Python $(VERSION); sft needs >= 3.11. Name another: make PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "error: '$(PYTHON)' comes without the venv module. On Debian and Ubuntu: apt install python$(VERSION)-venv; or name another Python: make PYTHON=..." >&2; exit 2; }

venv: $(READY)

$(READY): setup.cfg pyproject.toml constraints.txt launch/install.sh | python
	@echo "== installing pinned dependencies into $(VENV) (once; several minutes, gigabytes where torch comes with CUDA)"
	PYTHON='$(PYTHON)' launch/install.sh $(INSTALL) --extras dev,plot $(VENV)
	@touch $@

# Two runs: questions about text, and questions whose evidence lies far back.
demo: $(READY)
	@$(MAKE) --no-print-directory demo-text
	@$(MAKE) --no-print-directory demo-retrieval
	@echo
	@echo "Look at runs/demo/plot.png, and at the accuracy by distance in runs/demo-retrieval/plot.png."
	@echo "Next, with $(BIN) on PATH (it holds sft):"
	@echo "  continue it         sft train recipes/demo.yaml train.num_epochs=3 --processes 2"
	@echo "  another layout      sft train recipes/demo.yaml run.dir=runs/demo-tp parallel.cp=1 parallel.tp=2 --processes 2"
	@echo "  the two curves      sft plot runs/demo runs/demo-tp"
	@echo "  your own chats      launch/local.sh 2 recipes/demo.yaml run.dir=runs/mine data.train=my.jsonl"
	@echo "  what a recipe does  sft check recipes/demo.yaml --world-size 2"

demo-text: $(READY)
	@echo "== questions about Python's documentation; runs/demo of an earlier demo is removed"
	rm -rf runs/demo
	$(BIN)/python -m tools.make_demo_corpus --out runs/demo-data --samples 170
	$(BIN)/sft data prepare recipes/demo.yaml
	$(BIN)/sft train recipes/demo.yaml --processes 2
	$(BIN)/sft plot runs/demo

# What it learns and when: docs/how-to/eval.md#accuracy-by-distance.
demo-retrieval: $(READY)
	@echo "== answers from evidence up to 2,048 tokens back; runs/demo-retrieval of an earlier demo is removed"
	rm -rf runs/demo-retrieval
	$(BIN)/python -m tools.make_retrieval_data --out runs/demo-data --farthest 2048
	$(BIN)/sft data prepare recipes/demo_retrieval.yaml
	$(BIN)/sft train recipes/demo_retrieval.yaml --processes 2
	$(BIN)/sft plot runs/demo-retrieval --chance 0.125

test: $(READY)
	$(BIN)/python -m pytest $(TESTS) --numprocesses $(WORKERS) $(SHARED_BY_FILE) $(PYTEST_FLAGS)

# All rows of the fault matrix, and the table of them; make test runs the quick ones.  Faults that need root (a full or a
# read-only disk, a file that cannot be removed) are left out without it, and named.
test-faults: $(READY)
	$(BIN)/python -m pytest tests/faults --all-faults $(PYTEST_FLAGS)

# The cards of families: docs/cards and the sentence of the README.
cards: $(READY)
	$(BIN)/python -m pytest --cards --junit-xml=build/cards.xml tests/ranks tests/unit/weights --numprocesses $(WORKERS) --dist loadfile $(PYTEST_FLAGS); code=$$?; \
	$(BIN)/python -m tools.cards build/cards.xml && $(BIN)/python -m tools.pages && exit $$code

# What the tests are worth: the table of faults is tests/mutations/faults.
test-mutations: $(READY)
	$(BIN)/python -m tests.mutations $(MUTATIONS)

# Beside the environment, not in it: nothing else should find a Triton that torch for the CPU does not bring.
test-triton: $(READY)
	test -d $(VENV)/triton/fla || $(BIN)/python -m pip install --quiet --disable-pip-version-check --target $(VENV)/triton --no-deps --upgrade --constraint constraints.txt triton fla-core==0.6.0 einops
	PYTHONPATH='$(CURDIR)/$(VENV)/triton' $(BIN)/python -m pytest tests/unit/mcore/loss/test_loss_triton.py tests/unit/mcore/linear_attention/test_fla_triton.py tests/unit/mcore/linear_attention/test_ssd_triton.py $(PYTEST_FLAGS)

# An environment of its own, for the packages of kernels and their compilers.  It reads all other packages, torch among
# them, from the environment of make venv; torch for CPUs is enough.  KERNELS=pinned takes the older compilers that
# ffpa-attn pins (docs/start/install.md), in one more environment.
KERNELS ?= all
COMPILERS := $(VENV)/kernels$(if $(filter pinned,$(KERNELS)),-pinned)
$(COMPILERS)/.ready: setup.cfg constraints.txt | $(READY)
	@echo "== installing compilers of kernels into $(COMPILERS) (once; 1.3 GB)"
	$(BIN)/python -m venv --clear $(COMPILERS)
	packages='import sysconfig; print(sysconfig.get_paths()["purelib"])'; $(BIN)/python -c "$$packages" >"$$($(COMPILERS)/bin/python -c "$$packages")/environment.pth"
ifeq ($(KERNELS),pinned)
	grep -v -E '^(nvidia-cutlass-dsl|quack-kernels|cuda-|protobuf)' constraints.txt >$(COMPILERS)/constraints.txt
	$(COMPILERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint $(COMPILERS)/constraints.txt 'flash-attn-4[cu13]' fla-core triton ffpa-attn
else
	$(COMPILERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt 'flash-attn-4[cu13]' fla-core triton
	$(COMPILERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --no-deps ffpa-attn
endif
	@touch $@

# With KERNELS=changed, nothing is installed where nothing is compiled, and a slow package index fails no change: what was
# not compiled is said.  The limit is that of the installation; tests/kernels/sample.py has that of compilations.
INSTALL_S ?= 300
test-kernels: | python
ifeq ($(KERNELS),changed)
	@kinds=$$($(PYTHON) -m tests.kernels.changed) || exit 1; \
	if test -z "$$kinds"; then echo "== the last commit touches no file of a kernel: nothing is compiled"; exit 0; fi; \
	timeout $(INSTALL_S) $(MAKE) --no-print-directory $(COMPILERS)/.ready || { \
		test $$? = 124 && echo "== NOT COMPILED: $$kinds: the compilers were not installed within $(INSTALL_S) s. make test-kernels compiles everything"; exit; }; \
	$(COMPILERS)/bin/python -m tests.kernels --changed $(KERNELS_FLAGS)
else
	@$(MAKE) --no-print-directory $(COMPILERS)/.ready
	$(COMPILERS)/bin/python -m tests.kernels $(if $(filter pinned,$(KERNELS)),--pinned) $(KERNELS_FLAGS)
endif

# On a machine with CUDA; elsewhere every test says that it is skipped.
test-gpu: $(READY)
	$(BIN)/python -m pytest tests/gpu $(PYTEST_FLAGS)

# What the first hour on a GPU machine answers, and how to read its report: docs/numbers/gpu-hour.md.
gpu-hour: $(READY)
	$(BIN)/python -m tools.gpu_hour $(GPU_HOUR)

test-gpu-hour: $(READY)
	$(BIN)/python -m tests.warm_gpu_hour --tiny --fresh

# torch's own CUDA build on a library of ours instead of a driver (tests/standin).  An environment of its own: the index
# has torch with CUDA in it, and the two last packages are headers that torch does without.  The library's C alone is
# compiled and tested by make test.  The tests of Transformer Engine need its part for torch, which the index has as
# source code only: TE_WHEEL names a wheel of transformer-engine-torch that was built for this torch and Python.
TE_WHEEL ?=
STANDIN := .venv/standin
$(STANDIN)/.ready: setup.cfg constraints.txt
	@command -v $(PYTHON312) >/dev/null || { echo "error: '$(PYTHON312)' does not run, and make test-standin needs Python 3.12: make test-standin PYTHON312=/path/to/python3.12" >&2; exit 2; }
	@echo "== installing torch for CUDA into $(STANDIN) (once; several minutes, 6 GB)"
	$(PYTHON312) -m venv $(STANDIN)
	grep -v -E '^(torch|triton|setuptools|nvidia-|cuda-)' constraints.txt >$(STANDIN)/constraints.txt
	$(STANDIN)/bin/python -m pip install --disable-pip-version-check --no-compile --editable '.[dev]' --constraint $(STANDIN)/constraints.txt \
		torch==2.11.0 nvidia-cuda-crt==13.0.88 nvidia-cuda-cccl==13.0.85 \
		$(if $(TE_WHEEL),'transformer-engine[core_cu13]' '$(TE_WHEEL)')
	@touch $@

test-standin: $(STANDIN)/.ready
	$(STANDIN)/bin/python -m pytest tests/standin $(PYTEST_FLAGS)

# Where SLURM is missing and cannot be installed, the tests are skipped and say so.
test-slurm: $(READY)
	@PATH="$$PATH:/usr/sbin" command -v slurmctld >/dev/null || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null || { apt-get update --quiet && apt-get install --quiet --yes --no-install-recommends slurm-wlm munge; } || true
	$(BIN)/python -m pytest tests/slurm $(PYTEST_FLAGS)

# After the other environment: both build the package in this folder.
venv-py312: $(READY)
	$(MAKE) venv PYTHON='$(PYTHON312)'

test-py312:
	$(MAKE) test PYTHON='$(PYTHON312)' TESTS='$(TESTS_312)' PYTEST_FLAGS='-m "not one_version" $(PYTEST_FLAGS)'

# Full grids of layouts and all rows of the fault matrix, where make test takes covering sets and the quick rows.
test-all: $(READY)
	$(BIN)/python -m pytest $(TESTS) --numprocesses $(WORKERS) $(SHARED_BY_FILE) --all --all-faults $(PYTEST_FLAGS)

test-all-versions:
	$(MAKE) test-all PYTHON='$(PYTHON311)'
	$(MAKE) test-all PYTHON='$(PYTHON312)'

lint: $(READY)
	$(BIN)/python -m flake8 $(CODE)
	$(BIN)/python -m isort --check-only $(CODE)
	$(BIN)/python -m $(BLACK) --check $(CODE) || { echo "black would rewrite files: run make fmt" >&2; exit 1; }
	$(BIN)/python -m mypy
	$(BIN)/lint-imports
	$(BIN)/shellcheck .ci/run launch/*.sh launch/slurm.sbatch tools/release.sh
	$(BIN)/hadolint launch/Dockerfile
	$(BIN)/python -m tools.lint
	$(BIN)/python -m tools.pages --check

fmt: $(READY)
	$(BIN)/python -m isort $(CODE)
	$(BIN)/python -m $(BLACK) $(CODE)

pages: $(READY)
	$(BIN)/python -m tools.pages

# An environment of its own: the site needs no torch.  A warning is an error.  Open build/site/index.html, without a server.
DOCS := .venv/docs
$(DOCS)/.ready: setup.cfg | python
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check mkdocs-material==9.8.1
	@touch $@

docs: $(DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

# Every command and block of every page, each page in a folder of its own, in an order of the day; make test leaves out most of the six slow pages.
test-docs: $(READY)
	$(BIN)/python -m pytest tests/docs --all $(PYTEST_FLAGS)

# A clean tree and a tag are needed; nothing is published.
release: | python
	tools/release.sh '$(PYTHON)'

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find sft tools tests -name __pycache__ -type d -prune -exec rm -rf {} +
