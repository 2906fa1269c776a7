# Every command of the project. VENV=... puts the virtual environment elsewhere.
VENV ?= .venv
PYTHON ?= python3
GPU_PROCESSES ?= 14
BIN = $(VENV)/bin
# Installs with uv, which takes a third of the time, or with pip if uv cannot. INSTALL="-m pip install" uses only pip.
INSTALL ?= .ci/install.py

# The older pair of torch and Triton, which the committed rows were measured with, in a separate environment.
STACK ?= .venv-triton36
STACK_TORCH = 2.11.0
STACK_TRITON = 3.6.0
# The newest Triton, in a separate folder, used with the torch of development: torch 2.15, which it pairs with, has no CPU
# build, and its other build comes with gigabytes for GPUs.
NEWEST_TRITON = 3.9.0
NEWEST = .cache/triton-$(NEWEST_TRITON)
# The launcher, lookups, and a few kernels of each kind.
NEWEST_KERNELS = gru_cell_split or linear_cat_vector or dense_layer_split or bshd_copy_half or append_half_cos_sin
NEWEST_HERE = test_launcher.py or test_lookup.py or test_quick.py or test_64_rows or (without_a_spill and ($(NEWEST_KERNELS)) and not rope_norm)
NEWEST_TESTS = tests/kernels/test_compile.py tests/kernels/test_quick.py tests/tuned/lookup/test_lookup.py tests/tuned/launching/test_launcher.py
# The tests that depend on such a pair: compiling for the GPU of the rows, rendering, lookups. Compiling for other GPUs, and that
# no two kernels are alike, is tested with the pair of development.
STACK_HERE = not every_other_architecture and not card_that_is_not_at_hand and not compile_to_the_same_code
STACK_TESTS = tests/kernels/test_compile.py tests/kernels/test_gru_compile.py tests/kernels/test_quick.py \
	tests/tuned/lookup/test_foreign_gpus.py tests/tuned/families/test_gru_variant.py \
	tests/generator/rendering/test_generated.py tests/generator/reporting/test_show.py \
	tests/generator/reporting/test_show_gru.py tests/kernels/test_sincos.py \
	tests/generator/families/test_gru_family.py tests/tuned/lookup/test_lookup.py \
	tests/tuned/test_explain.py tests/generator/evaluation/test_portfolio.py \
	tests/tuned/calls/test_gru_ops.py tests/tuned/calls/test_gru_transforms.py \
	tests/tuned/launching/test_launcher.py

# Tests start many processes: without bytecode files, each would compile its imports again.
unexport PYTHONDONTWRITEBYTECODE

help:  ## every command, and what it does
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1: \2/p' $(MAKEFILE_LIST)

.PHONY: help tune test test-fast test-stack test-newest test-gpu fuzz faults verify lint types docs render check release-check bench release clean

tune: $(VENV)/.tune  ## set up, then tune for the GPU at hand (without one: compile and estimate)
	$(BIN)/python tune.py --gpu auto

test: $(VENV)/.dev  ## set up, then every test but the GPU's full grid (make test-gpu)
	$(BIN)/python -m pytest -n auto --dist worksteal

FAST = not gpu and not sanitizer and not interpreter and not compiler and not processes
test-fast: $(VENV)/.dev  ## within a minute on two cores: no kernel is interpreted or compiled, no process started
	$(BIN)/python -m pytest -n auto --dist worksteal -m "$(FAST)"

test-stack: $(STACK)/.dev  ## set up, then the compile, render and lookup tests with the older torch and Triton
	$(STACK)/bin/python -m pytest -n auto --dist worksteal -k "$(STACK_HERE)" $(STACK_TESTS)

test-newest: $(VENV)/.dev $(NEWEST)/.here  ## set up, then launches, lookups and a few kernels with the newest Triton
	PYTHONPATH=$(abspath $(NEWEST)) $(BIN)/python -m pytest -n auto --dist worksteal -k "$(NEWEST_HERE)" $(NEWEST_TESTS)

test-gpu: $(VENV)/.dev  ## the full grid on a GPU, then what nothing else there may disturb
	$(BIN)/python -m pytest tests/gpu -m "gpu and not alone" -n $(GPU_PROCESSES) --dist worksteal
	$(BIN)/python -m pytest tests/gpu -m "gpu and alone"

GPUS =
verify: $(VENV)/.dev  ## plain tests, GPU tests, fuzz and sanitizers on a GPU, or on GPUS=all; what passed is kept, and not run again
	$(BIN)/python -m benchmarks.verify $(if $(GPUS),--gpus $(GPUS))

fuzz: SECONDS ?= 60
SEED =
fuzz: $(VENV)/.dev  ## random calls for SECONDS=60, of one SEED= or a new one, on a GPU or without
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

faults: $(VENV)/.dev  ## put each seeded fault into a copy of the tree: its tests must fail there
	$(BIN)/python -m tests.faults

lint: $(VENV)/.dev  ## ruff, its format, and which module may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.dev  ## mypy, strict
	$(BIN)/mypy

docs: $(VENV)/.dev  ## the pages of docs as a site in build/docs, warnings as errors
	$(BIN)/sphinx-build -q -W --keep-going -b html docs build/docs

render: $(VENV)/.dev  ## write every generated file again
	$(BIN)/python tune.py --render

check: $(VENV)/.dev  ## stale or missing rows, generated files out of date
	$(BIN)/python tune.py --check

release-check: $(VENV)/.dev  ## the same, and what is here must be what was verified on its GPU
	$(BIN)/python tune.py --check --release

bench: $(VENV)/.bench  ## against the peers that are installed, on a GPU; then the tables and the plots
	$(BIN)/python -m benchmarks.rope --minutes 60
	$(BIN)/python -m benchmarks.gru --minutes 60
	$(BIN)/python -m benchmarks.table --here --write docs/results.md
	$(BIN)/python -m benchmarks.plot --here
	$(BIN)/python -m benchmarks.summary --out .cache/summary.json --write README.md --plot docs/images/speedups.png
	$(BIN)/python -m benchmarks.pages

BUDGET =
BY_ROW =
WITHOUT_PEERS =
TUNED =
release: $(VENV)/.dev  ## tune from empty, verify, measure all, draw: of one commit; goes on where it was cut. BUDGET=10m GPUS=all TUNED=1 SECONDS=60
	$(BIN)/python -m benchmarks.release $(if $(BUDGET),--budget $(BUDGET)) $(if $(BY_ROW),--by-row) \
		$(if $(GPUS),--gpus $(GPUS)) $(if $(TUNED),--tuned) $(if $(SECONDS),--seconds $(SECONDS)) $(if $(WITHOUT_PEERS),--without-peers $(WITHOUT_PEERS))

clean:  ## remove environments, what was built, and caches: all trials of searches too
	rm -rf $(VENV) $(STACK) .cache build *.egg-info

$(VENV)/.tune: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) -c constraints.txt -e '.[tune]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) -c constraints.txt -e '.[tune,hosts,bench,docs,dev]'
	touch $@

$(STACK)/.dev: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(STACK)
	sed 's/^torch==.*/torch==$(STACK_TORCH)/; s/^triton==.*/triton==$(STACK_TRITON)/' constraints.txt > $(STACK)/constraints.txt
	$(STACK)/bin/python $(INSTALL) -c $(STACK)/constraints.txt -e '.[tune]' hypothesis pytest pytest-xdist ruff
	touch $@

$(NEWEST)/.here: $(VENV)/.dev
	rm -rf $(NEWEST)
	$(BIN)/python $(INSTALL) --no-deps --target $(NEWEST) triton==$(NEWEST_TRITON)
	touch $@

$(VENV)/.bench: $(VENV)/.tune
	$(BIN)/python $(INSTALL) -c constraints.txt -e '.[tune,bench]'
	touch $@
