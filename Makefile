# Every target sets up what it needs by itself: a Python 3.11+ called python3 is enough.
# ARGS passes options on, e.g. `make demo ARGS=--once`, `make test ARGS="-k takeover"`.

SHELL := /bin/sh
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

# Where nobody chooses one, a Python that was built with optimisation is preferred.
PYTHON ?= python3
ARGS ?=
# The engines a demo installs: `make demo ENGINE=gpu` on a machine with a GPU.
ENGINE ?= cpu
RUN = PYTHON_ORIGIN="$(origin PYTHON)" $(PYTHON) scripts/bootstrap.py --extras
DEV = $(ENGINE),onnx,stores,test
# Of pytest, each with a broker of its own: tests mostly wait.
PROCESSES ?= 2
CHAOS_SEED ?= 1
CHAOS_MINUTES ?= 5
CHAOS_STREAMS ?= 500

.PHONY: help demo test chaos check format bench install clean

help:  ## Print this help
	@echo "Headrace: model serving through a Kafka log."
	@echo
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1|\2/p' Makefile | while IFS='|' read -r name text; do printf '%-14s %s\n' "$$name" "$$text"; done
	@echo
	@echo "The first run installs about 7 GB into .venv and takes minutes; later runs start at once."

demo:  ## Start everything, ask a question, embed, classify, stay up (ARGS=--once: end after the answers)
	@$(RUN) $(ENGINE),onnx -- headrace up --demo $(ARGS)

test:  ## Run the tests (ARGS goes to pytest)
	@$(RUN) $(DEV) -- pytest -n $(PROCESSES) --reruns 1 $(ARGS)

chaos:  ## Kill, freeze and restart everything for minutes while callers read (CHAOS_SEED=1 CHAOS_MINUTES=5 CHAOS_STREAMS=500)
	@CHAOS_SEED=$(CHAOS_SEED) CHAOS_MINUTES=$(CHAOS_MINUTES) CHAOS_STREAMS=$(CHAOS_STREAMS) \
		$(RUN) $(DEV) -- pytest -o log_cli=true -o log_cli_level=INFO tests/system/test_chaos.py tests/system/test_broker_trouble.py $(ARGS)

check:  ## Lint, types, import rules and schema compatibility: what CI runs before the tests
	@$(RUN) $(DEV) -- ruff check .
	@$(RUN) $(DEV) -- ruff format --check .
	@$(RUN) $(DEV) -- mypy
	@$(RUN) $(DEV) -- lint-imports
	@$(RUN) $(DEV) -- python -m schemas.files check

format:  ## Put the code into the form that check wants
	@$(RUN) $(DEV) -- ruff check --fix .
	@$(RUN) $(DEV) -- ruff format .

bench:  ## Measure (ARGS="NAME [--json]"; ARGS=--help lists the names)
	@$(RUN) $(DEV) -- headrace bench $(ARGS)

install:  ## Only install, for work on the code
	@$(RUN) $(DEV)

clean:  ## Remove what was installed and every local data directory
	rm -rf .venv .bootstrap .headrace .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
