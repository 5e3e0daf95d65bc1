# Everything below works on a machine with Python >= 3.11, pip and make, and nothing else of ours.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
INSTALLED = $(VENV)/.installed
MODEL = .demo/model
# Two threads for the real model; tests of tiny ones are faster with one.
export OMP_NUM_THREADS ?= 2

.PHONY: help install model demo test test-all test-fast torture lint format schema bench clean

help:
	@echo "make demo       train, repair, package and prove a real model on this machine (some 5 minutes)"
	@echo "make test       or test-all, every test: units, laws, a real model, a flow on a real server"
	@echo "make test-fast  without the real model and the server (under 2 minutes)"
	@echo "make torture    steps killed and failed at every system call, power cuts, fuzzing (some 20 minutes)"
	@echo "make lint       format, ruff, mypy, generated parts of the README"
	@echo "make schema     the JSON schema and the reference of the configuration, from its groups and the stages"
	@echo "make bench      ratios against cp, PEFT and TRL, measured side by side"

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	@touch $@

model: $(MODEL)

$(MODEL): | $(INSTALLED)
	@mkdir -p .demo
	$(BIN)/python examples/get_model.py $(MODEL)

demo: $(INSTALLED) $(MODEL)
	$(BIN)/python examples/demo.py

test test-all: $(INSTALLED) $(MODEL)
	@command -v strace >/dev/null || echo "strace is not installed: steps are not killed at every system call here"
	OMP_NUM_THREADS=1 $(BIN)/pytest $(shell command -v strace >/dev/null || echo '-m "not strace"')

test-fast: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not real and not server and not strace"

torture: $(INSTALLED)
	cd tests && OMP_NUM_THREADS=1 ../$(BIN)/python -m torture
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz.py 40000

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/cog --check README.md docs/configuration.md

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/cog -r README.md docs/configuration.md

schema: $(INSTALLED)
	$(BIN)/python -m tools.training.schema
	$(BIN)/cog -r docs/configuration.md

bench: $(INSTALLED) $(MODEL)
	$(BIN)/python benchmarks/run.py
	$(BIN)/python benchmarks/callbacks.py
	$(BIN)/python benchmarks/packing.py

clean:
	rm -rf .demo .prefect build dist
