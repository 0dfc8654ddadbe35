SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast lint types docs bench pins images base-image test-docker clean

PYTHON := .venv/bin/python
# Tests of steps/grpo import torch, so they run in its environment, and no other collects them.
TORCH_TESTS := tests/test_grpo_*.py

help: ## Show this help
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "%-12s %s\n", $$1, $$2}'

setup: ## Make the environments .venv, .venvs/serve and .venvs/train, or bring them up to date
	@tools/setup

demo: setup ## Train a tiny model to play Tic-Tac-Toe
	.venv/bin/nightschool train configs/demo.toml

# The torch tests take one core for some minutes, at the side of the others, which wait more than they compute.
test: setup lint types ## Run everything that a CPU can, in both environments
	@status=0; log=$$(mktemp); \
	.venvs/train/bin/python -m pytest -m "train and not gpu" $(TORCH_TESTS) >$$log 2>&1 & train=$$!; \
	trap "kill $$train 2>/dev/null || true; rm $$log" EXIT; \
	$(PYTHON) -m pytest -m "not train and not gpu and not docker" --ignore-glob='$(TORCH_TESTS)' || status=$$?; \
	wait $$train || status=$$?; \
	cat $$log; \
	exit $$status

test-fast: setup ## Run the tests that take seconds
	$(PYTHON) -m pytest -m "not slow and not train and not gpu and not docker and not serve" --ignore-glob='$(TORCH_TESTS)'

lint: setup ## Check style and formatting
	.venv/bin/ruff check
	.venv/bin/ruff format --check

types: setup ## Check types, of steps.grpo against the packages of its own environment
	.venv/bin/mypy --exclude '^steps/grpo/'
	.venv/bin/mypy --package steps.grpo --python-executable .venvs/train/bin/python --cache-dir .mypy_cache/train

docs: setup ## Write docs/environments.md anew from the code
	$(PYTHON) tools/environments-page

bench: setup ## Run the benchmarks; each prints a table
	$(PYTHON) benchmarks/rollout.py
	$(PYTHON) benchmarks/gateway.py
	.venvs/train/bin/python benchmarks/trainer.py
	$(PYTHON) benchmarks/overhead.py

# What is pinned stays, unless pyproject.toml forbids it; for newer releases: make pins UPGRADE=--upgrade
COMPILE = tools/uv pip compile --quiet pyproject.toml $(UPGRADE) --python-version 3.11 \
	--python-platform x86_64-manylinux_2_28 --generate-hashes --no-emit-index-url --annotation-style line \
	--custom-compile-command "make pins"
COMPILE_CPU = UV_TORCH_BACKEND=cpu $(COMPILE) --override requirements/cpu-overrides.txt

# Goes into .venv and .venvs/train, each of which keeps its own version of this.
KEPT = --no-emit-package python-dateutil

pins: ## Compile the pin files in requirements/ from pyproject.toml
	$(COMPILE) --extra flow --extra dev --output-file requirements/flow.txt
	$(COMPILE) --extra flow --constraint requirements/flow.txt --output-file requirements/flow-image.txt
	$(COMPILE) --extra rollout --constraint requirements/flow.txt --output-file requirements/rollout.txt
	$(COMPILE) --extra reasoning --constraint requirements/flow.txt $(KEPT) --output-file requirements/reasoning.txt
	$(COMPILE_CPU) --extra serve-cpu --output-file requirements/serve-cpu.txt
	$(COMPILE) --extra serve --output-file requirements/serve-cuda.txt
	$(COMPILE_CPU) --extra train --extra test --output-file requirements/train-cpu.txt
	$(COMPILE) --extra train --extra test --output-file requirements/train-cuda.txt

images: ## Build the container images (VARIANT=cuda for GPUs)
	tools/engine start
	images/build

test-docker: setup images ## Run the tests that need a container engine
	$(PYTHON) -m pytest -m "docker and not gpu" --ignore-glob='$(TORCH_TESTS)'

base-image: ## Build the images' base from Debian's packages, where no container registry can be reached
	tools/engine start
	images/base

clean: ## Remove the environments and caches; runs stay
	rm -rf .venv .venvs .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
