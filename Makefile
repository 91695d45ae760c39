# Each recipe is a script of scripts/ or one plain command, so that CI and hooks can call the same.

PYTHON ?= python3
export PYTHON

.DEFAULT_GOAL := help
.PHONY: help env env-agents demo examples bench verify-evidence test test-unit test-fast test-hooks test-engine test-gateway soak lint lint-deploy format typecheck docs docs-check clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' Makefile

env: ## Set up the environment: a shared one of 6.2 GiB, once, and a thin .venv over it
	@$(PYTHON) scripts/environment.py

env-agents: ## Set up the environment of the agent libraries: a shared one of 0.6 GiB, and a thin .venv-agents
	@$(PYTHON) scripts/environment.py --agents

demo: ## Set up, then watch one agent turn on a real model
	@scripts/demo

examples: env env-agents ## Run every example of examples/ against one real server on the CPU
	@.venv/bin/python scripts/examples.py

bench: env ## Measure on this machine's CPU: the matrix of evidence/cpu-matrix, a quarter of an hour
	@.venv/bin/toolgap bench run --cpu -o bench-output/matrix

verify-evidence: env ## Recompute every figure of evidence/ from its raw trials, and compare
	@.venv/bin/python scripts/evidence.py

test: ## Set up, then run every test
	@scripts/test

test-unit: ## Run the quick ones of the tests that start no SGLang server: a minute or so
	@scripts/test --ignore tests/engine -m "not engine and not slow"

test-fast: ## Run all of those: three to four minutes
	@scripts/test --ignore tests/engine -m "not engine"

test-hooks: ## Run the tests of the hooks, in the agent libraries' environment
	@scripts/test-hooks

test-engine: ## Run the tests that drive real SGLang servers on the CPU
	@scripts/test -m engine

test-gateway: ## Run the tests of the gateway, also those with real servers
	@scripts/test tests/gateway $(wildcard tests/engine/test_gateway*.py)

soak: env ## Random work and every fault at once on a real server, SOAK_S seconds (120); report in soak-output/
	@cd tests/engine && PATH="$(CURDIR)/.venv/bin:$$PATH" ../../.venv/bin/python soak.py --output ../../soak-output

lint: ## Check style, formatting and types
	@scripts/lint

lint-deploy: ## Check the Dockerfiles, compose file and Kubernetes manifests of deploy/, in an environment of 0.2 GiB
	@scripts/lint-deploy

format: ## Format the code, and mend what ruff can mend
	@scripts/format

typecheck: env ## Check types only
	@.venv/bin/python -m mypy

docs: env ## Write the pages of docs/ that are made from the source
	@.venv/bin/python scripts/docs.py

docs-check: env ## Check those pages, and the links, headings and make targets in all documents
	@.venv/bin/python scripts/docs.py --check
	@.venv/bin/python scripts/docs_check.py

clean: ## Remove .venv and its like, caches and build output; the shared environment stays
	rm -rf .venv .venv-agents .venv-deploy build dist demo-output bench-output soak-output .hypothesis .mypy_cache .pytest_cache .ruff_cache
