# Two commands: `make demo` and `make test`. Each works in a fresh clone with nothing installed.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

define NO_TORCH
make: torch could not be installed. What is wanted is the CPU build that constraints.txt names. The builds for CUDA, which are
what Linux finds on PyPI, go with another Triton than the tests need. If pip said so above, set PIP_EXTRA_INDEX_URL to PyTorch's
own index of CPU builds (pytorch.org names it under "Get started", for pip and CPU) and call make again.
endef
export NO_TORCH

.PHONY: demo test lint types imports check proofs clean

$(STAMP): pyproject.toml constraints.txt CMakeLists.txt $(wildcard core/native/* backends/cpu/native/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch numpy || { echo "$$NO_TORCH"; exit 1; }
	$(BIN)/python -m pip install --quiet --constraint constraints.txt "scikit-build-core>=1.0,<2" "pybind11>=2.13" ninja
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[dev]"
	touch $(STAMP)

demo: $(STAMP)
	mkdir -p build/demo
	rm -f build/demo/answers.jsonl
	$(BIN)/deepinfer run examples/requests.jsonl -o build/demo/answers.jsonl --model assets/deepinfer-tiny
	$(BIN)/python examples/show_answers.py examples/requests.jsonl build/demo/answers.jsonl

test: $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# Contracts are checked on a wheel install: an editable tree shows import-linter the tests too.
imports: $(STAMP)
	PYTHON=$(BIN)/python tools/check_imports.sh

check: lint types imports test

# After an edit of a kernel or of an op's cases: run the suite again and record what passed.
proofs: $(STAMP)
	$(BIN)/deepinfer conformance --backend cpu --quiet --write-proof
	$(BIN)/deepinfer conformance --backend fake --quiet --write-proof

clean:
	rm -rf build $(VENV) .typing
