# The two commands of a fresh clone: `make demo` and `make test`. Both need Python >= 3.11 and nothing else.
#
#   PYTHON    interpreter that makes .venv               make test PYTHON=/usr/bin/python3.12
#   PIP_ARGS  added to `pip install`. On Linux without a GPU, PyPI's torch installs several GB of CUDA; give
#             PyTorch's index of CPU wheels here         make demo PIP_ARGS="--extra-index-url <index>"
#   TESTS     what `make pytest` runs                    make pytest TESTS=tests/jobs/test_cli.py
#   LLAMA_PERPLEXITY  llama.cpp's program of that name, for `make real`
#   SEED      of hypothesis' examples                    make pytest TESTS=tests/jobs/test_cli.py SEED=1

PYTHON ?= $(shell command -v python3.11 || command -v python3)
PIP_ARGS ?=
KERNEL_TESTS := tests/drafter/gpu_triton/test_kernels_*.py tests/drafter/compute/test_delta_net.py
COMPILE_TESTS := tests/drafter/gpu_triton/test_kernels_compile.py
# Doctor's cases are of served sizes, which take the sanitizer minutes each.
SANITIZED_TESTS := $(filter-out %_cases.py %_compile.py %_variants.py, $(wildcard $(KERNEL_TESTS))) \
  $(addprefix tests/drafter/, gpu_triton/test_sanitizer.py step/test_kernels_trees.py compute/test_draft_trees.py)
GPU_TESTS := $(KERNEL_TESTS) tests/drafter/gpu_triton/test_launches.py tests/drafter/compute/test_layer_kinds.py \
  $(addprefix tests/actors/targets/, test_device_runner.py test_batch_invariant.py test_fp8_kv.py)
# Files with a short form, and those of a GPU's steps, which `make test` runs without warm-up.
GRID_TESTS := $(filter-out $(wildcard $(KERNEL_TESTS)), \
  $(shell grep -rlE --include='test_*.py' 'one_in|MANTA_GRID|import.*WHOLE|device_engines|short_warm_up' tests))
# One more than cores, because processes that test Ray wait a third of their time. With two more, ranks that wait for
# each other rarely run at the same time, and their tests take ten times as long.
TEST_PROCESSES := 3
OLDEST_TRITON := 3.6.0
# Compile loops once, before all test processes would do so at the same time.
COMPILE = MANTA_CACHE_DIR=$(VENV)/cache $(BIN)/manta generate x --max-tokens 8 --dtype
TESTS ?= tests
SEEDED = $(if $(SEED),--hypothesis-seed=$(SEED))
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-with

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Hundreds of processes of the tests import the package: its bytecode must be kept.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install demo test lint types floors pytest chaos kernels versions gpu bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## */  make \1\t/p' Makefile

# The stamp is a copy of the installed pyproject.toml, so touching that file without a change installs nothing.
install:  ## make .venv and install Manta with its development tools (skipped when nothing changed)
	@if cmp -s pyproject.toml $(STAMP); then echo "== .venv is up to date"; else $(MAKE) --no-print-directory fresh-install; fi

.PHONY: fresh-install
fresh-install:
	@test -n "$(PYTHON)" || { echo "error: no Python found; install Python 3.11 or set PYTHON=..."; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: $(PYTHON) is older than Python 3.11; set PYTHON=..."; exit 1; }
	@echo "== making .venv with $(PYTHON) and installing (a few minutes the first time)"
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --no-compile $(PIP_ARGS) -e ".[dev]"
	@cp pyproject.toml $(STAMP)

demo: install  ## serve SmolLM2 and its drafter over HTTP, run a dataset, compare with plain decoding
	$(BIN)/manta demo

test: install lint  ## every check and every test; CI runs this
	@$(MAKE) --no-print-directory floors types > $(VENV)/types.log 2>&1 & types=$$!; \
	$(MAKE) --no-print-directory pytest; tests=$$?; wait $$types; types=$$?; \
	cat $(VENV)/types.log; exit $$((tests > types ? tests : types))

lint: install  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Pyright does not follow the editable install's hook; benchmarks import `manta` by this link.
types: install  ## pyright
	@mkdir -p $(VENV)/types && ln -sfn ../.. $(VENV)/types/manta
	PYTHONPATH=$(CURDIR)/$(VENV)/types $(BIN)/pyright --pythonpath $(BIN)/python

floors: install  ## import-linter: jobs -> actors -> drafter -> cluster
	$(BIN)/lint-imports

pytest: install  ## the tests, in three processes
	$(if $(filter tests,$(TESTS)),$(COMPILE) float32 >/dev/null & other=$$!; $(COMPILE) bfloat16 >/dev/null && wait $$other)
	$(BIN)/python -m pytest $(TESTS) -m "not slow" -n $(TEST_PROCESSES) --no-loadscope-reorder --durations=10 $(SEEDED)

.PHONY: check
check: install  ## ruff, and the tests that changes since BASE (default: where the branch left its upstream) reach
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@reached="$$($(BIN)/python tests/support/import_closure.py $(BASE))"; \
	if [ -n "$$reached" ]; then $(MAKE) --no-print-directory pytest TESTS="$$(echo $$reached)"; \
	else echo "no test is reached"; fi

.PHONY: grid
grid: install  ## every cell of the losslessness grid and more random workloads than in `make test`
	MANTA_GRID=whole $(BIN)/python -m pytest $(GRID_TESTS) -n 2 --no-loadscope-reorder -q

.PHONY: properties
properties: install  ## every property with twice the random examples of `make test`, and a new seed each time
	MANTA_GRID=whole $(BIN)/python -m pytest $(TESTS) -m "hypothesis and not slow" -n $(TEST_PROCESSES) --no-loadscope-reorder -q $(SEEDED)

.PHONY: slow
slow: install  ## long tests of clusters and of whole benchmarks; `make test` runs shorter forms
	$(BIN)/python -m pytest tests -m slow --durations=0

.PHONY: mutations
mutations: install  ## break the product in 62 places, one at a time; a test must fail each time (15 minutes)
	$(BIN)/python tests/trials mutations

.PHONY: real
real: install  ## compare two published GGUF models with transformers, token by token (downloads 350 MB; half an hour)
	for name in smollm2 gemma3-270m; do $(BIN)/manta models get $$name || exit 1; done
	$(BIN)/python tests/trials published_models $$($(BIN)/manta models path smollm2) $$($(BIN)/manta models path gemma3-270m) \
	  $(if $(LLAMA_PERPLEXITY),--llama-perplexity $(LLAMA_PERPLEXITY)) -o docs/benchmarks/published-models.json

.PHONY: sweep
sweep: install  ## all methods compared with plain decoding, 1 to 64 requests (15 minutes on an idle machine)
	$(BIN)/python tests/benchmarks sweep -o docs/benchmarks/sweep-cpu.json --svg docs/benchmarks

chaos: install chaos-serve  ## kill each process of servers, and batch jobs at 20 random points each (an hour or two)
	MANTA_CHAOS_POINTS=20 $(BIN)/python -m pytest tests/end_to_end/batch/test_batch_chaos.py -q --timeout=0

.PHONY: chaos-serve
chaos-serve: install  ## kill each process of a server under 32 streams; writes docs/operations-deaths.md
	$(BIN)/python tests/trials serving_chaos docs/operations-deaths

.PHONY: kv-tier
kv-tier: install  ## count what K/V pages on disk save 32 sessions; kill an engine at 20 points while it saves and reads
	$(BIN)/python tests/trials kv_tier docs/benchmarks/kv-tier-cpu.json

# In parts, each of some minutes, so that what failed can be run again alone; `make kernels PARTS="sanitize"`.
PARTS := compile-90 compile-100 compile-103 parity orders rehearse sanitize
kernels: install  ## all that checks the GPU's kernels without a GPU: compiled, interpreted, rehearsed, sanitized
	@for part in $(PARTS); do echo "== $$part"; $(MAKE) --no-print-directory $$part || exit 1; done

.PHONY: compile-90 compile-100 compile-103 parity orders rehearse
compile-90 compile-100 compile-103: compile-%: install
	MANTA_GRID=whole OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(COMPILE_TESTS) -k "$*]" -q

parity: install  ## test the GPU kernels in Triton's interpreter
	MANTA_GRID=whole OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(filter-out $(COMPILE_TESTS), $(wildcard $(KERNEL_TESTS))) -q

orders: install  ## explore all orders of ranks, streams and the host
	MANTA_GRID=whole $(BIN)/python -m pytest tests/end_to_end/gpu_start/test_interleav*.py -q

rehearse: install  ## start and run the GPU's path on a pretended GPU
	MANTA_GRID=whole $(BIN)/python -m pytest tests/end_to_end/gpu_start/test_gpu_rehearsal.py -q

.PHONY: sanitize
sanitize: install  ## look for races and accesses out of bounds in the GPU kernels, in Triton's interpreter
	MANTA_GRID=whole MANTA_SANITIZE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SANITIZED_TESTS) -q

versions: install  ## interpret and compile the GPU kernels with the oldest supported Triton
	@test -d $(VENV)/triton-$(OLDEST_TRITON) || $(BIN)/python -m pip install --progress-bar off $(PIP_ARGS) \
	  --no-deps --target $(VENV)/triton-$(OLDEST_TRITON) triton==$(OLDEST_TRITON)
	MANTA_GRID=whole PYTHONPATH=$(CURDIR)/$(VENV)/triton-$(OLDEST_TRITON) OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(KERNEL_TESTS) -q

gpu: install  ## on a GPU: tests of kernels and runner, manta doctor, a step compared with the roofline
	@MANTA_TEST_DEVICE=cuda $(BIN)/python -m pytest $(GPU_TESTS) -q; tests=$$?; \
	$(BIN)/manta doctor -o docs/benchmarks/doctor-gpu.json; doctor=$$?; \
	$(BIN)/manta bench step -o docs/benchmarks/step-gpu.json; bench=$$?; exit $$((tests + doctor + bench > 0))

bench: install  ## compare speculation on with off; writes docs/benchmarks/
	$(BIN)/manta bench smollm2 --spec-model smollm2-drafter --prompts models/chats.jsonl --num-prompts 24 \
	  --output docs/benchmarks/smollm2-cpu.json --plot docs/benchmarks/speedup.svg

.PHONY: simulate-gpt-oss
simulate-gpt-oss: install  ## simulate gpt-oss-120b on eight B300 with each method; see docs/benchmarks/simulation.md
	$(BIN)/manta simulate node -m docs/benchmarks/gpt-oss-120b/target --drafter docs/benchmarks/gpt-oss-120b/drafter \
	  --method plain --method eagle3-3 --method dflash-9 --method dflash --max-model-len 16k \
	  --acceptance 4.91 --eagle3-acceptance 3.62 --eagle3-drafts 9 \
	  -o docs/benchmarks/simulated-gpt-oss-120b.json --plot docs/simulated-gpt-oss-120b.svg

QWEN := docs/benchmarks/qwen3-8b
.PHONY: simulate-trees
simulate-trees: install  ## simulate draft trees and chains on an H200 and a B300; see docs/benchmarks/simulation.md
	for gpu in h200 b300; do \
	  $(BIN)/manta simulate node -m $(QWEN)/target --drafter $(QWEN)/drafter --gpu $$gpu --gpus 1 --tp 1 \
	    --method plain --method dflash --method dflash-tree --acceptance 4.9 \
	    --concurrency 1 --concurrency 4 --concurrency 16 --concurrency 64 \
	    -o docs/benchmarks/simulated-trees-$$gpu.json --plot docs/simulated-trees-$$gpu.svg || exit 1; \
	done

.PHONY: docs
docs: install  ## build the site into site/, without a network
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

.PHONY: ui-pictures
ui-pictures: install  ## take pictures of the live page on an idle machine; writes docs/ui*.png
	$(BIN)/python tests/trials ui_pictures docs

.PHONY: soak-batch
soak-batch: install  ## run 5 million rows through a batch job on a simulated executor; fails if memory grows
	$(BIN)/python tests/benchmarks soak-batch -o docs/benchmarks/soak-batch.json

.PHONY: soak-serve
soak-serve: install  ## ten minutes of streams that end or are aborted, then overload; fails if memory grows
	$(BIN)/python tests/benchmarks soak-serve -o docs/benchmarks/soak-serve.json

.PHONY: compat
compat: install  ## run third-party clients against the served pair; writes docs/compatibility.md
	$(BIN)/python tests/compat/compat.py docs/compatibility.md

.PHONY: abuse
abuse: install  ## run hostile clients and the longest possible requests; writes docs/benchmarks/abuse.json
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) "schemathesis>=4,<5"
	$(BIN)/python tests/trials abuse -o docs/benchmarks/abuse.json

clean:  ## remove everything that the targets made
	rm -rf $(VENV) build dist site .pytest_cache .ruff_cache .hypothesis
