# `make demo` and `make test` need nothing but Python >= 3.10 and a package index.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Three at a time: while ranks of one test wait for each other, others use the cores.
PYTEST := -q -n 3 --dist loadfile --no-loadscope-reorder
# Many processes import the same modules: each is compiled once, whatever the caller's setting.
export PYTHONDONTWRITEBYTECODE :=

# Another torch, from PyPI with gigabytes of CUDA: make test-torch TORCH=2.6.0 [TESTS=tests/storage]
TORCH ?= 2.6.0
TESTS ?= tests
TORCH_VENV := .venv-torch-$(TORCH)
# Checkpoints between two: make test-versions PYTHONS=".venv-torch-2.6.0/bin/python ..."
PYTHONS ?=
# How many mutants of the pure modules are tried, drawn by a seed: make mutate MUTANTS=200 SEED=2
MUTANTS ?= 100
SEED ?= 1
# How long the soak runs, and from which seed: make soak SOAK_MINUTES=20 SEED=1000
SOAK_MINUTES ?= 120

.PHONY: demo test test-slow test-gpu test-torch test-versions soak mutate lint bench docs clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check \
		-c constraints.txt -e '.[test,docs,optimizers,obstore,progress,crc32c]'
	touch $@

demo: $(STAMP)
	$(BIN)/python -m examples.train_resume

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest $(PYTEST) -m 'not slow'

test-slow: lint
	$(BIN)/python -m pytest $(PYTEST) -m slow

$(TORCH_VENV)/.installed: pyproject.toml constraints.txt tests/versions/pins.py
	$(PYTHON) -m venv $(TORCH_VENV)
	$(PYTHON) tests/versions/pins.py $(TORCH) > $(TORCH_VENV)/constraints.txt
	$(TORCH_VENV)/bin/pip install --quiet --disable-pip-version-check \
		-c $(TORCH_VENV)/constraints.txt -e '.[test,obstore,progress,crc32c]'
	touch $@

test-torch: $(TORCH_VENV)/.installed
	$(TORCH_VENV)/bin/python -m pytest $(PYTEST) -m 'not slow' $(TESTS)

# On a machine with an accelerator; torch's build for it is what the package index gives.
test-gpu: $(STAMP)
	$(BIN)/python -c "import torch; assert torch.accelerator.is_available(), 'no accelerator'"
	$(BIN)/python -m pytest -q tests/gpu
	$(BIN)/python -m benchmarks.gpu

test-versions: $(STAMP)
	$(BIN)/python -m pytest -q tests/versions $(foreach python,$(PYTHONS),--other-python=$(python))

soak: $(STAMP)
	$(BIN)/python -m tests.soak --minutes $(SOAK_MINUTES) --seed $(SEED) --log out/soak-$(SEED).log

$(VENV)/.mutmut: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[mutate]'
	touch $@

# The first run makes all mutants, finds which tests reach which, and tries those of one function.
mutate: $(VENV)/.mutmut
	$(BIN)/mutmut run --max-children 1 'dcp_fsdp_osd.layout.geometry.x_box_view__mutmut_*'
	$(BIN)/mutmut results --all true | $(BIN)/python -c "import random, sys; \
		names = sorted(line.split(':')[0].strip() for line in sys.stdin if '__mutmut_' in line); \
		print(*random.Random($(SEED)).sample(names, min($(MUTANTS), len(names))))" \
		| xargs $(BIN)/mutmut run --max-children 1
	$(BIN)/mutmut results --all true | grep -v 'not checked' \
		| awk -F': ' '{ split($$1, path, "."); tried[path[2] "/" path[3] ": " $$2]++ } \
			END { for (each in tried) print each, tried[each] }' | tr -d ' ' | sort

bench: $(STAMP)
	$(BIN)/python -m benchmarks.stock_vs_ours
	$(BIN)/python -m benchmarks.storage
	$(BIN)/python -m benchmarks.exchange

# To site/; tests/test_docs.py, in `make test`, builds them too and runs what they show.
docs: $(STAMP)
	$(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) .venv-torch-* mutants build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
