# Every target sets up what it needs; nothing but python3 (3.11+) with venv is expected on the machine.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2
STAMP := $(VENV)/.stamp
VLLM_ROUTER := .venv-bench/bin/vllm-router
COMPILED := .venv-compiled
COMPILED_STAMP := $(COMPILED)/.stamp
SOURCES := $(shell find src -name '*.py')

.DEFAULT_GOAL := help
.PHONY: help setup demo test check docs compiled test-compiled test-vllm bench bench-sim bench-vllm validate clean

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt 'pip>=25.1'
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable . --group dev
	@touch $@

$(COMPILED_STAMP): pyproject.toml constraints.txt $(SOURCES)
	@test -d $(COMPILED) || $(PYTHON) -m venv $(COMPILED)
	@$(COMPILED)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt 'pip>=25.1'
	@$(COMPILED)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --group dev
	@HATCH_BUILD_HOOKS_ENABLE=1 $(COMPILED)/bin/pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt .
	@touch $@

$(VLLM_ROUTER): # the rival of the benchmarks, apart from the project's environment
	@$(PYTHON) -m venv .venv-bench
	@.venv-bench/bin/pip install --quiet --disable-pip-version-check vllm-router==0.1.17

setup: $(STAMP) ## the project's environment in .venv

demo: $(STAMP) ## mixed rollouts on two embedded engines under three policies: table, JSON and plot in out/
	@$(BIN)/tidegate demo

test: $(STAMP) ## all tests that need no real engine
	@$(BIN)/pytest -n $(WORKERS) -q

check: $(STAMP) ## ruff, mypy --strict, import rules, docs in sync
	@$(BIN)/ruff check . && $(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo > out.lint 2>&1 || { cat out.lint; rm -f out.lint; exit 1; }; rm -f out.lint
	@$(BIN)/python docs/generate.py --check

docs: $(STAMP) ## regenerate the reference pages
	@$(BIN)/python docs/generate.py

compiled: $(COMPILED_STAMP) ## the simulator and the core compiled by mypyc, in .venv-compiled (needs a C compiler)

test-compiled: $(COMPILED_STAMP) ## the tests of what is compiled, on the compiled build
	@$(COMPILED)/bin/pytest -n $(WORKERS) -q -m "not interpreted" tests/unit/policy tests/unit/sim tests/property

test-vllm: $(STAMP) ## the end-to-end suite against two real vLLM CPU replicas
	@bash tests/vllm/setup.sh
	@$(BIN)/pytest tests/e2e tests/vllm -q --backend vllm

bench: $(STAMP) $(VLLM_ROUTER) ## scheduler and relay benchmarks (installs nginx and wrk if they are missing)
	@$(BIN)/python bench/scheduler.py
	@$(BIN)/python bench/relay.py

bench-sim: $(COMPILED_STAMP) ## the simulator's speed, memory and events/s beside simpy's, compiled
	@$(COMPILED)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --group bench
	@$(COMPILED)/bin/python bench/simulator.py

bench-vllm: $(STAMP) $(VLLM_ROUTER) ## rollouts on two real vLLM replicas: tidegate against vllm-router
	@bash tests/vllm/setup.sh
	@$(BIN)/python bench/rollouts_vllm.py

validate: $(STAMP) ## the simulator against two real vLLM replicas: throughput and hit rate, about 20 min
	@bash tests/vllm/setup.sh
	@$(BIN)/python bench/validate.py

clean:
	rm -rf $(VENV) $(COMPILED) out .pytest_cache .mypy_cache .ruff_cache .hypothesis
