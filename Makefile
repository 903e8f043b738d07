PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STDLIB = $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
QUICKSTART := runs/quickstart
DEMO := runs/demo

.PHONY: help install lint test quickstart demo benchmarks check-tensorboard soak

help:
	@echo "make install     make the environment in $(VENV) (once; cheap to repeat)"
	@echo "make lint        ruff and mypy"
	@echo "make test        all tests, the slow ones too"
	@echo "make quickstart  train a TST model and its equal-FLOPs baseline on the Python standard library's text"
	@echo "make demo        two more seeds and a longer baseline: is it more than chance, and what is it worth?"
	@echo "make benchmarks  time the loss, the step, the loader and prepare beside their alternatives"
	@echo "make soak        kill a run of two processes 60 times, and hold it against one left alone (docs/soak.md)"
	@echo "make check-tensorboard   look at the quickstart's runs in TensorBoard (needs Chromium and chromedriver)"

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
		--train-tokenizer 2048 --held-out 0.02 --output data/stdlib

# Run again, each arm goes on where it was, and a finished one stays as it is.
FIT := $(BIN)/tst-lightning fit --config configs/quickstart.yaml --ckpt_path last

quickstart: install data/stdlib/corpus.json
	$(FIT) --phases.bag_size=1 --trainer.default_root_dir=$(QUICKSTART)/baseline
	$(FIT) --trainer.default_root_dir=$(QUICKSTART)/tst
	$(BIN)/tst-lightning report $(QUICKSTART) --output $(QUICKSTART)

demo: quickstart
	set -e; for seed in 2 3; do \
		$(FIT) --seed_everything=$$seed --data.seed=$$seed \
			--phases.bag_size=1 --trainer.default_root_dir=$(DEMO)/seed-$$seed/baseline; \
		$(FIT) --seed_everything=$$seed --data.seed=$$seed \
			--trainer.default_root_dir=$(DEMO)/seed-$$seed/tst; \
	done
	$(FIT) --trainer.max_steps=24000 --phases.bag_size=1 --trainer.default_root_dir=$(DEMO)/baseline-24000
	$(BIN)/tst-lightning report $(QUICKSTART) $(DEMO) --output $(DEMO)

benchmarks: install
	$(BIN)/python benchmarks/loss.py
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/loader.py --remote
	$(BIN)/python benchmarks/prepare.py

# kills a run of two processes at 60 seeded moments; the log goes to docs/soak.md
soak: install
	$(BIN)/python -m tests.soak

check-tensorboard: install
	$(BIN)/python -m tests.tensorboard_page $(QUICKSTART)
