# `make demo` and `make test` need nothing but Python >= 3.10 and a package index.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-slow lint bench clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check \
		-c constraints.txt -e '.[test,obstore,progress,crc32c]'
	touch $@

demo: $(STAMP)
	$(BIN)/python -m examples.train_resume

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -q -m 'not slow'

test-slow: lint
	$(BIN)/python -m pytest -q -m slow

bench: $(STAMP)
	$(BIN)/python -m benchmarks.stock_vs_ours
	$(BIN)/python -m benchmarks.storage
	$(BIN)/python -m benchmarks.exchange

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
