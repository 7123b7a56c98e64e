VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0

.PHONY: run test test-identity format clean

run: $(VENV)/installed  ## install, fetch the default model, stream an answer and compare with plain decoding
	$(BIN)/foretell generate --chat "List the numbers from one to twenty in words, one on each line." --max-tokens 128 --temperature 0 --compare

test: $(VENV)/tests  ## everything but the slow tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -m "not slow"

SPEC_BENCH ?=
test-identity: $(VENV)/tests  ## a quarter of an hour: bit-identity over 60 Spec-Bench questions; SPEC_BENCH=question.jsonl
	SPEC_BENCH="$(SPEC_BENCH)" $(BIN)/pytest -m slow tests/engine/test_identity.py

format: $(VENV)/tests
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/installed: pyproject.toml
	python3 -m venv $(VENV)
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/tests: $(VENV)/installed
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
