# One command per chore; each sets up .venv first if it is not there. Needs only Python 3.11+ and PyPI.
PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
# A file's tests share fixtures, so they share a process.
PARALLEL := -n 2 --dist loadfile

.PHONY: demo test test-adapters check types units bench chaos soak learn format clean

# Real SGLang on whatever this machine has: a tiny model answers with a calculator, and everything is checked.
demo: .venv/ready
	$(BIN)/python -m zagent.launch --demo

# Everything: `check`, then real processes, real sockets and real SGLang, and a short form of `chaos`. Whole clusters start
# in seconds, but other work on the same cores may slow them many times.
test: check
	$(PYTEST) $(PARALLEL) --timeout 180 --durations 10 -m 'not sglang' tests/end_to_end tests/chaos
	$(PYTEST) --durations 30 -m sglang tests/end_to_end

# Format, lint, types, unit tests; under two minutes.
check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(MAKE) -j 2 types units

# Without its cache mypy takes a minute, on one core: the tests, some of which only wait, run beside it.
types: .venv/ready
	$(BIN)/mypy

units: .venv/ready
	$(PYTEST) $(PARALLEL) tests --ignore=tests/end_to_end --ignore=tests/chaos --ignore=tests/adapters/real

# zagent under TRL's and verl's own code: trl 1.16 beside sglang, verl 0.9.1 in an environment without (5 minutes).
test-adapters: .venv/ready .venv-verl/ready
	$(PYTEST) -W default tests/adapters/real/test_trl.py
	.venv-verl/bin/python -m pytest -W default tests/adapters/real/test_verl.py

# What zagent costs beside bare sockets, HTTP, sglang-router and Ray: tables, CSV, JSON and plots in outputs/bench.
bench: .venv/ready
	$(BIN)/python -m benchmarks.run

# Processes killed, stopped and slowed under load, by ten seeds, then for a minute four times as often; 200 000 hostile
# messages, and what a thousand a second cost: about 25 minutes.
chaos: .venv/ready
	$(BIN)/python -m benchmarks.chaos --seeds 10
	$(BIN)/python -m benchmarks.chaos --seeds 3 --every 0.5 --for 60 --kills 0
	ZAGENT_FUZZ=200000 $(BIN)/python -m pytest tests/chaos/test_fuzz.py
	$(BIN)/python -m benchmarks.hostile

# 300 000 calls, and what has grown since the first tenth of them: about 2 minutes.
soak: .venv/ready
	$(BIN)/python -m benchmarks.soak

# The GRPO example in full, three seeds: fails unless each gains ten points of greedy accuracy. Under 20 minutes a seed.
learn: .venv/ready
	$(BIN)/python -m benchmarks.learn

format: .venv/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# sglang decides the versions of torch and transformers; about 3 minutes and 11 GB.
.venv/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "zagent needs Python 3.11 or newer, got " + sys.version)'
	$(PYTHON) -m venv .venv
	@echo "installing into .venv (SGLang and PyTorch: some minutes)"
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[sglang,models,trl,dev,bench]'
	@touch $@

# verl's pins and sglang's cannot live together: its own transformers and tensordict; torch, ray and the like are shared.
.venv-verl/ready: .venv/ready tests/adapters/real/verl.txt tests/support/environments.py
	rm -rf .venv-verl
	$(BIN)/python tests/support/environments.py .venv-verl sglang transformers tokenizers tensordict codetiming pyvers
	.venv-verl/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/adapters/real/verl.txt
	@touch $@

clean:
	rm -rf .venv .venv-verl build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
