# Two commands matter: `make demo` serves the demo model with three adapters, `make test` runs every check.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_MODEL := .cache/SmolLM2-135M-Instruct
SOURCES := $(wildcard kernels/polygraft_kernels/native/*.cpp kernels/polygraft_kernels/native/*.h)

.PHONY: install demo test format lint

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Polygraft needs Python 3.11 or newer: make PYTHON=python3.12 $@")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@$(BIN)/python -m polygraft_kernels
	@touch $@

$(DEMO_MODEL)/config.json: | install
	$(BIN)/polygraft demo-model $(DEMO_MODEL)

demo: install $(DEMO_MODEL)/config.json
	$(BIN)/polygraft serve $(DEMO_MODEL) --auth none --data-dir .cache/demo-data \
	    --adapter json=examples/adapters/json \
	    --adapter pirate=examples/adapters/pirate \
	    --adapter french=examples/adapters/french

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/pytest -m "slow or not slow"
	@$(BIN)/python scripts/lines.py

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
