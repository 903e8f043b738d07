PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STDLIB = $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
QUICKSTART := runs/quickstart

.PHONY: help install lint test quickstart

help:
	@echo "make install     make the environment in $(VENV) (once; cheap to repeat)"
	@echo "make lint        ruff and mypy"
	@echo "make test        all tests, the slow ones too"
	@echo "make quickstart  train a TST model and its equal-FLOPs baseline on the Python standard library's text"

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

test: install
	$(BIN)/python -m pytest

data/stdlib/corpus.json: | install
	$(BIN)/tst-lightning prepare $(STDLIB) --pattern '*.py' --exclude site-packages \
		--train-tokenizer 2048 --output data/stdlib

# Run again, each arm goes on where it was, and a finished one stays as it is.
quickstart: install data/stdlib/corpus.json
	$(BIN)/tst-lightning fit --config configs/quickstart.yaml --ckpt_path last \
		--phases.bag_size=1 --trainer.default_root_dir=$(QUICKSTART)/baseline
	$(BIN)/tst-lightning fit --config configs/quickstart.yaml --ckpt_path last
	$(BIN)/tst-lightning report $(QUICKSTART)/baseline $(QUICKSTART)/tst
