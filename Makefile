# `make demo` and `make test` are all the set-up there is; `make help` lists the rest.

VENV ?= .venv
CONSTRAINTS ?= constraints.txt
# Two workers fit the smallest machines that run the tests; each compiles, and needs about 2 GB of memory.
JOBS ?= 2
# Chooses the interpreter; without it tools/find_python.sh looks for the newest.
PYTHON ?=
# Chooses what is installed beside the package, as `EXTRAS=bench,cuda12`; without it the lines below do.
EXTRAS ?=

comma := ,
# The NVIDIA driver decides which JAX for CUDA can run: CUDA 13 needs driver 580, CUDA 12 driver 525. No driver, no CUDA.
# The first number is taken only from a line that is a version, since nvidia-smi prints its errors there too.
DRIVER := $(shell nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | sed -n '1s/^\([0-9]\{1,\}\)\.[0-9.]*$$/\1/p')
CUDA := $(shell test "$(DRIVER)" -ge 580 2>/dev/null && echo cuda || { test "$(DRIVER)" -ge 525 2>/dev/null && echo cuda12; })
DEMO_EXTRAS := $(or $(EXTRAS),bench$(if $(CUDA),$(comma)$(CUDA)))
TEST_EXTRAS := $(or $(EXTRAS),dev)
# A stamp says what was installed from which versions: while it is newer than both files, nothing is installed again.
DEMO_STAMP := $(VENV)/.installed-$(DEMO_EXTRAS)
TEST_STAMP := $(VENV)/.installed-$(TEST_EXTRAS)

export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help demo test lint venv sass-tools clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    check forward and backward on the present device; leaves check.png"
	@echo "make test    run the tests that need no GPU, on the CPU"
	@echo "make lint    ruff: rules and format"
	@echo "make venv    make $(VENV) for development, and run nothing"
	@echo "make sass-tools   install what compiles GPU kernels without a GPU, into .sass (about 700 MB)"
	@echo "make clean   remove the environments, caches and what was built"
	@echo
	@echo "PYTHON=...   the interpreter to use       EXTRAS=...   what to install, as dev,cuda"
	@echo "JOBS=...     test workers (now $(JOBS))         VENV=...     where to install (now $(VENV))"

demo: $(DEMO_STAMP)
	$(VENV)/bin/jflash check --plot check.png

# On the CPU even where there is a GPU: parallel workers would fight for its memory. `pytest -m gpu` is for the GPU.
test: $(TEST_STAMP)
	JAX_PLATFORMS=cpu $(VENV)/bin/python -m pytest -n $(JOBS) -m "not gpu and not slow and not sass"

lint: $(TEST_STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

venv: $(TEST_STAMP)

# What compiles GPU kernels without a GPU, into a folder of .sass for each JAX; does nothing where it is there already.
sass-tools: $(TEST_STAMP)
	$(VENV)/bin/python -m tools.sass install

# An environment that is there already is used, whoever made it; ensurepip gives it pip where it has none.
$(VENV)/.installed-%: pyproject.toml $(CONSTRAINTS) $(VENV)/bin/python
	@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(VENV)/bin/python -m ensurepip
	@echo "Installing jflash[$*] into $(VENV), with the versions of $(CONSTRAINTS)."
	$(VENV)/bin/python -m pip install -c $(CONSTRAINTS) -e ".[$*]"
	@touch $@

# An environment without a Python that can be run was left by one that has since been removed: make it anew.
$(VENV)/bin/python:
	@python="$$(PYTHON='$(PYTHON)' sh tools/find_python.sh)" || exit 1; \
	if [ -f "$(VENV)/pyvenv.cfg" ]; then rm -rf "$(VENV)"; fi; \
	echo "Making $(VENV) with $$("$$python" --version) ($$python)."; \
	"$$python" -m venv "$(VENV)"

clean:
	rm -rf .venv .venv-newest .sass build dist *.egg-info .pytest_cache .ruff_cache .hypothesis check.png
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
