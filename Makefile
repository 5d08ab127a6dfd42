# Each target does its own set-up, in .venv; nothing is installed outside it, except OpenBLAS and Chromium on Debian as root.
PYTHON ?= python3
VENV   ?= .venv
MINUTES ?= 10
BIN    := $(VENV)/bin
# mlx's CPU wheel has a slow matrix product; a preloaded OpenBLAS makes the demo model's prefill many times faster
BLAS   := $(firstword $(wildcard /usr/lib/*/openblas-pthread/libopenblas.so.0))
RUN    := $(if $(BLAS),LD_PRELOAD=$(BLAS) )$(BIN)/python

.PHONY: all demo test check unit bench-quality bench-decode bench-prefill bench-kernels bench-supervisor soak clean

all: test

demo: $(VENV)/.runtime  ## two servers on the demo model, asked, compared, edited, stopped
	@$(BIN)/python scripts/demo.py

test: check unit  ## lint, types, import contracts and the whole test suite

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

unit: $(VENV)/.dev
	$(RUN) scripts/suite.py

bench-quality: $(VENV)/.runtime  ## KL divergence and bytes of our schemes and published ones; ARGS=--small takes minutes
	$(RUN) tests/bench/quality.py $(ARGS)

bench-supervisor: $(VENV)/.dev  ## reload latency, status latency, memory and idle CPU with 1, 10 and 100 servers
	@PYTHONPATH=. $(BIN)/python tests/bench/supervisor.py $(ARGS)

soak: $(VENV)/.dev  ## MINUTES of edits, kills and half-written files against real processes
	@PYTHONPATH=. $(BIN)/python tests/soak/soak.py --minutes $(MINUTES) $(ARGS)

bench-decode: $(VENV)/.runtime  ## decode speed and bytes of every cache; ARGS="--clock cpu" on a machine that others use
	$(RUN) tests/bench/decode.py $(ARGS)

bench-prefill: $(VENV)/.runtime  ## prompt speed and peak memory
	$(RUN) tests/bench/prefill.py $(ARGS)

bench-kernels: $(VENV)/.dev  ## GPU time of our attention kernels against MLX's own on an fp16 cache; needs an NVIDIA GPU; ARGS="--quick --json FILE"
	$(RUN) tests/bench/kernels.py $(ARGS)

clean:
	rm -rf $(VENV)

$(VENV)/.runtime: pyproject.toml scripts/setup.sh
	@sh scripts/setup.sh $(PYTHON) $(VENV) runtime
	@touch $@

$(VENV)/.dev: pyproject.toml scripts/setup.sh
	@sh scripts/setup.sh $(PYTHON) $(VENV) dev
	@touch $@ $(VENV)/.runtime
