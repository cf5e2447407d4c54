# The tasks of a working copy. Each makes .venv first where there is none, and builds the extension
# again when its sources have changed.

# Whose torch is used, where it has one: by default the active environment's.
PYTHON ?= python3

BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
# Not bin/torchrun: where torch is the active environment's, .venv has none.
TORCHRUN := $(BIN)/python -m torch.distributed.run
CXX_FILES := $(shell git ls-files '*.cpp' '*.h')
SOURCES := $(shell find csrc -type f)
EXPLORERS := $(addprefix tests/cpp/test_,agree.py arrival.py schedules.py)

MINUTES ?= 10
DEVICE ?= cpu

.PHONY: setup setup-zero3 demo zero2 zero3 check check-unit check-explorers test nightly soak gpu-test sanitize lint format bench clean

setup: .venv/.ready

# DeepSpeed and what else only the examples of other people's frameworks need.
setup-zero3: .venv/.zero3

demo: .venv/.ready
	$(TORCHRUN) --standalone --nproc-per-node 2 examples/train_fsdp2.py \
	    --device cpu --compare --steps 200 --out out/demo

zero2: .venv/.ready
	$(TORCHRUN) --standalone --nproc-per-node 2 examples/train_zero2.py \
	    --device cpu --compare --steps 100 --param-dtype fp32 --shard-dtype fp32 --out out/zero2

zero3: setup-zero3
	$(TORCHRUN) --standalone --nproc-per-node 2 examples/train_zero3.py \
	    --device cpu --compare --batch 4 --steps 300 --out out/zero3

# What one runs while editing, on two cores. `test` has all of it but the lint.
check: .venv/.ready
	$(MAKE) --jobs 2 --output-sync lint check-unit check-explorers

check-unit: .venv/.ready
	$(PYTEST) tests/unit

check-explorers: .venv/.ready
	$(PYTEST) $(EXPLORERS) -p no:cacheprovider

test: .venv/.ready
	$(PYTEST)

nightly: .venv/.zero3 .venv/.frameworks .venv/.kernels
	$(PYTEST) -m nightly

soak: .venv/.ready
	$(BIN)/python tests/soak.py --minutes $(MINUTES) --device $(DEVICE)

gpu-test: .venv/.ready
	$(PYTEST) -m gpu tests/gpu

sanitize: .venv/.ready
	$(BIN)/python tests/cpp/sanitize.py

lint: .venv/.ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

format: .venv/.ready
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CXX_FILES)

bench: .venv/.ready
	$(BIN)/pg-sdma bench all_gather

clean:
	rm -rf .venv build dist out src/*.egg-info src/pg_sdma/*.so src/pg_sdma/built_for_torch.txt

.venv/.python:
	$(PYTHON) tools/make_venv.py
	@touch $@

.venv/.built: .venv/.python setup.py pyproject.toml $(SOURCES)
	PATH="$(CURDIR)/$(BIN):$$PATH" \
	    $(BIN)/python tools/install.py
	@touch $@

# The requirements of the extras that $(1) is true of, by what the installed metadata says, and without
# pg_sdma's own dependency: pip must never take it for a reason to replace torch.
REQUIREMENTS = $(BIN)/python -c "from importlib.metadata import requires; \
	    print(*(r.split(';')[0] for r in requires('pg-sdma') if $(1)), sep='\n')"

.venv/.ready: .venv/.built
	$(call REQUIREMENTS,'extra' in r and 'zero3' not in r and 'frameworks' not in r \
	    and 'kernels' not in r and 'mori' not in r) \
	    | $(BIN)/python -m pip install --quiet --requirement /dev/stdin
	@touch $@

# DeepSpeed's build imports torch, and would compile its operations unless told not to.
.venv/.zero3 .venv/.frameworks .venv/.kernels: .venv/.%: .venv/.ready
	$(call REQUIREMENTS,'$*' in r) | PATH="$(CURDIR)/$(BIN):$$PATH" DS_BUILD_OPS=0 \
	    $(BIN)/python -m pip install --quiet --no-build-isolation --requirement /dev/stdin
	@touch $@
