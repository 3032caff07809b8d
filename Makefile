# One machine, no preparation: `make demo`. Needs python3 (3.11 or newer) with its venv module, and a package index.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TRAINS := $(VENV)/.trains
CORE := base job rendezvous storage training
OLDEST := $(CURDIR)/$(VENV)/oldest
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq install --constraint constraints.txt
OUTLAST := $(BIN)/outlast
QUICK := outlast,outlast-trainer,torchrun-tuned,elastic-tuned

unexport PYTHONDONTWRITEBYTECODE # tests start hundreds of processes: each would compile what it imports

.DEFAULT_GOAL := help
.PHONY: help demo test test-core test-one watch test-slow test-oldest test-gpu check site hooks docs package bench clean

help:  ## Say what can be made
	@sed -n 's/^\([a-z-]*\):.*##/\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: $(TRAINS)  ## Train on real images, kill a worker on the way, evaluate, report (under three minutes)
	$(OUTLAST) data get digits
	$(OUTLAST) run examples/digits.yaml --fresh --chaos examples/chaos/demo.yaml
	$(OUTLAST) evaluate digits
	$(OUTLAST) report digits

test: $(READY)  ## Run the tests, but not those that take minutes
	$(BIN)/pytest -m "not jobs and not slow and not cluster and not gpu" --numprocesses 2 --dist worksteal
	$(BIN)/pytest -m "jobs and not slow and not cluster and not gpu" --numprocesses 2 --dist loadscope

test-core: $(READY)  ## Run the tests of base, job, rendezvous, storage and training (under two minutes): after a first change
	$(BIN)/pytest -m "not jobs and not slow and not cluster and not gpu" --numprocesses 2 --dist worksteal $(CORE:%=tests/%)

test-one: $(READY)  ## Run some tests: make test-one T=tests/rendezvous/test_who_trains.py::test_nobody_is_there_yet, or T="a word of their names"
	$(BIN)/pytest -p no:randomly $(if $(T),$(if $(findstring .py,$(T)),$(T),-k "$(T)"),$(error name the tests: make test-one T=tests/rendezvous/test_who_trains.py))

watch: $(READY)  ## Run tests again at every change: those of T (a file), or the files of tests that git shows as changed
	$(BIN)/watchfiles "$(BIN)/pytest -p no:randomly $(or $(T),--picked)" src tests

test-slow: $(READY)  ## Run the tests that take minutes, and property tests with forty times as many examples, others each time
	$(BIN)/pytest -m "slow and not jobs and not cluster and not gpu" --numprocesses 2 --dist worksteal
	$(BIN)/pytest -m "hypothesis and not jobs and not cluster and not gpu" --hypothesis-profile explore --numprocesses 2 --dist worksteal
	$(BIN)/pytest -m "slow and jobs and not cluster and not gpu"
	$(MAKE) test-oldest

test-oldest: $(OLDEST)/.ready  ## Run the tests of outlast.hf and outlast.accelerate with the oldest versions that these support
	PYTHONPATH=$(OLDEST)/trainer $(BIN)/python -c 'import transformers as t; assert t.__file__.startswith("$(OLDEST)/"), t'
	PYTHONPATH=$(OLDEST)/trainer $(BIN)/pytest tests/training/test_hf.py
	PYTHONPATH=$(OLDEST)/accelerate $(BIN)/python -c 'import accelerate as a; assert a.__file__.startswith("$(OLDEST)/"), a'
	PYTHONPATH=$(OLDEST)/accelerate $(BIN)/pytest tests/training/test_accelerate.py

test-gpu: $(READY)  ## Run the tests that need a GPU and measure there (under 25 minutes; where torch is installed: make test-gpu READY= BIN=/usr/bin)
	$(BIN)/python3 -c 'import sys, torch; torch.cuda.is_available() or sys.exit("this machine has no GPU that torch can use; make test needs none")'
	$(BIN)/python3 -m pytest -m gpu
	$(BIN)/python3 bench/saves.py --quick
	$(BIN)/python3 bench/recovery.py --quick --scenario kill --system outlast --system tuned
	$(BIN)/python3 -m bench.resilience --short --device cuda --systems $(QUICK) --results dist/gpu.jsonl --page dist/gpu.md

check: $(READY)  ## Check format, lint, types, imports, the map, and that generated pages are current
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -q tests/house/test_architecture.py tests/bench
	$(BIN)/python docs/reference/job_file.py | diff docs/reference/job-file.md -
	$(BIN)/python docs/reference/training.py | diff docs/reference/training.md -
	$(BIN)/python docs/reference/metrics.py | diff docs/reference/metrics.md -
	$(BIN)/python docs/guide/commands.py | diff docs/guide/commands.md -
	$(MAKE) --no-print-directory site

site: $(READY)  ## Write the site into dist/site; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

hooks: $(READY)  ## Let git commit only what passes format, lint, types and imports
	$(BIN)/pre-commit install

docs: $(READY)  ## Write the generated pages and deploy/ anew
	$(BIN)/python docs/reference/job_file.py > docs/reference/job-file.md
	$(BIN)/python docs/reference/training.py > docs/reference/training.md
	$(BIN)/python docs/reference/metrics.py > docs/reference/metrics.md
	$(BIN)/python docs/guide/commands.py > docs/guide/commands.md
	$(BIN)/python deploy/render.py
	$(BIN)/python -m bench.resilience --page

package: $(READY)  ## Build the source distribution and the wheel into dist/, check them, and use the wheel where nothing else is
	rm -f dist/outlast-*
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/outlast-*
	$(BIN)/pytest tests/house/test_package.py

bench: $(READY)  ## Measure recovery, ours and torchrun's (minutes)
	$(BIN)/python bench/recovery.py

clean:  ## Remove the virtual environment
	rm -rf $(VENV)

$(TRAINS): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is too old or missing; outlast needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "the venv module is missing; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@echo "$(VENV): installing pip and torch (once, a large download) ..."
	@$(PIP) pip torch
	@$(PIP) --editable ".[train,digits,plots]"
	@touch $@

$(READY): $(TRAINS)
	@echo "$(VENV): installing what outlast is developed with (once, a large download) ..."
	@$(PIP) --group dev --editable ".[train,digits,data,llm,plots,tracking,spark,notebook,store,kubernetes]"
	@touch $@

$(OLDEST)/.ready: $(READY)
	@rm -rf $(OLDEST)
	@for each in trainer accelerate; do \
	  $(BIN)/python -m pip --disable-pip-version-check -qq install --no-deps --target $(OLDEST)/$$each --group oldest-$$each || exit; \
	done
	@touch $@
