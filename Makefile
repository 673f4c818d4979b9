# One command per chore; each sets up .venv first if it is not there. Needs only Python 3.11+ and PyPI.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check format clean

# Real SGLang on whatever this machine has: a tiny model answers with a calculator, and everything is checked.
demo: .venv/ready
	$(BIN)/python -m zagent.launch --demo

# Everything: `check`, then real processes, real sockets and real SGLang.
test: check
	$(BIN)/python -m pytest tests/end_to_end

# Format, lint, types, unit tests; under two minutes.
check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests --ignore=tests/end_to_end

format: .venv/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# sglang decides the versions of torch and transformers; about 3 minutes and 11 GB.
.venv/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "zagent needs Python 3.11 or newer, got " + sys.version)'
	$(PYTHON) -m venv .venv
	@echo "installing into .venv (SGLang and PyTorch: some minutes)"
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[sglang,models,dev]'
	@touch $@

clean:
	rm -rf .venv build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
