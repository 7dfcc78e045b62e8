# The commands of the project. `make` alone lists them.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
# A machine with a GPU brings a torch of its own.
GPU_PYTHON ?= $(shell test -x .venv/bin/python && echo .venv/bin/python || command -v python3)
INSTALLED := .venv/.installed
COMPOSE ?= $(shell command -v docker-compose || echo docker compose)
SCALE ?= --scale gateway=1 --scale tokenizer=1 --scale engine=1 --scale detokenizer=1
COMPOSE_FILES := -f docker-compose.yml $(if $(CLUSTER),-f infra/docker/cluster.yml) $(if $(TRACING),-f infra/docker/tracing.yml) $(if $(MONITORING),-f infra/docker/monitoring.yml) $(if $(GPU),-f infra/docker/gpu.yml) $(if $(OPEN_WEBUI),-f infra/docker/open-webui.yml)
# What became of the tests that prove rows of the specification.
SPEC_REPORT := build/spec-report.json
SLOW_SPEC_REPORT := build/spec-report-slow.json
CONTAINER_SPEC_REPORT := build/spec-report-container.json
# The packages of other people's clients, which find no network but the loopback device where the system can arrange that.
CLIENTS := $(CURDIR)/build/clients
ALONE = $(shell unshare --map-root-user --net true 2>/dev/null && echo unshare --map-root-user --net)
# The type checker's own tool comes with the environment and downloads nothing.
export PYRIGHT_PYTHON_GLOBAL_NODE := 0
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := help
.PHONY: help install serve test slow-test quick sim chaos soak power-cut overload attack structured walk check kernels gpu-check screenshots kill-picture page-time bench bench-scale bench-models bench-open bench-peers bench-quantized bench-stages quality dist release docs docs-site coverage-of-spec spec-proofs demo-model neon-test ray-test container-test cluster-test client-test schemathesis up down vllm-test

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED)  ## make the environment .venv with everything in it

$(INSTALLED): pyproject.toml constraints.txt infra/checks/kernels/triton.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: install it, or name it with PYTHON=…"; exit 1; }
	@test -x $(BIN)/python || "$(PYTHON)" -m venv .venv
	$(BIN)/python infra/docker/group_requirements.py pyproject.toml dev >.venv/dev-requirements.txt
	$(BIN)/python -m pip install -q -c constraints.txt -r .venv/dev-requirements.txt -e .
	@# A torch without CUDA brings no Triton; the kernels are tested and compiled with this one.
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install -q -r infra/checks/kernels/triton.txt
	$(BIN)/python -m antiphon.services.engine.backends.cpu
	@touch $@

serve: install  ## serve the demo model at http://127.0.0.1:8000 (ARGS="--model DIR --port N …")
	@$(BIN)/antiphon serve $(ARGS)

test: install  ## the tests that need no Docker, without the slow ones (ARGS="-k name"; ARGS="-n 0": in one process)
	@rm -f $(SPEC_REPORT)
	@# The sources may have changed since the installation: the systems that tests start would all wait for the compiler.
	@$(BIN)/python -m antiphon.services.engine.backends.cpu >/dev/null
	@# Compiled modules are kept, also where that is switched off: the tests start a thousand processes.
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n auto --spec-report=$(SPEC_REPORT) $(ARGS)

slow-test: install  ## the tests marked as slow, about twenty minutes; their result is kept in docs/contributing/slow_tests.json
	@$(BIN)/python -m antiphon.services.engine.backends.cpu >/dev/null
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n auto -m slow --spec-report=$(SLOW_SPEC_REPORT) $(ARGS)
	$(BIN)/python -m infra.checks.spec_coverage --keep-slow $(SLOW_SPEC_REPORT)

quick: install  ## the tests that a change since a revision can affect (SINCE=HEAD~3; ARGS as for `make test`)
	@tests=$$($(BIN)/python -m infra.checks.affected $(SINCE)) || exit; test -z "$$tests" || \
		PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n auto $(ARGS) $$tests

sim: install  ## simulate whole systems under random faults (ARGS="-n 10000 --jobs 2", --seed N replays one)
	$(BIN)/python -m tests.sim.run $(ARGS)

chaos: install  ## kill and freeze a server's processes under load for minutes (ARGS="--minutes 10 --seed N")
	$(BIN)/antiphon chaos $(ARGS)

soak: install  ## an hour of streams and faults, and what grows meanwhile (ARGS="--minutes 60 --json FILE")
	$(BIN)/python -m bench.reliability.soak $(ARGS)

structured: install  ## structured output: 2,000 outputs of a random model, a corpus of schemas (ARGS="SUITE …")
	$(BIN)/python -m tests.structured.run $(ARGS)

power-cut: install  ## kill everything under a batch and background responses, start it again, compare (ARGS="--items 1000 --cuts 2")
	$(BIN)/python -m bench.reliability.power_cut $(ARGS)

overload: install  ## load a server with 1, 2 and 10 times what it can do (ARGS="--seconds 20 --max-queue-wait 3")
	$(BIN)/python -m bench.overload $(ARGS)

attack: install  ## attack a server in every known way; what another client sees (ARGS="--quick --only NAME --json FILE")
	$(BIN)/python -m tests.attack.run $(ARGS)

walk: install  ## the files and functions that one plain streamed chat runs in a server (ARGS="--list --json FILE --write")
	$(BIN)/python -m infra.walk $(ARGS)

check: install  ## format, lint, types, imports, house limits, generated pages
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python infra/checks/house_limits.py
	$(BIN)/python -m infra.checks.protocol_page --check
	$(BIN)/python -m infra.checks.bus_users --check
	$(BIN)/python -m infra.checks.matrix --check
	$(BIN)/python -m tests.clients.page --check
	$(BIN)/python -m infra.checks.models.page --check
	$(BIN)/python -m infra.checks.claims
	$(BIN)/python -m infra.checks.spec_coverage --check

kernels: install  ## compile every GPU kernel for every target, without a GPU (ARGS="--write --jobs 4")
	$(BIN)/python -m infra.checks.kernels.gate $(ARGS)

gpu-check:  ## on a machine with a GPU: kernels, a model of 8B, the system; 14 minutes (ARGS="--wheels DIR")
	$(GPU_PYTHON) -m bench.gpu_check $(ARGS)

screenshots: install  ## the screenshots of the console in docs/screenshots, from a running system; needs Chromium
	$(BIN)/python -m tests.system.console.screenshots

kill-picture: install  ## docs/screenshots/kill.webp: a minute of the console while an engine is killed; needs Chromium
	$(BIN)/python -m tests.system.console.recorded_kill

page-time: install  ## the browser's time for an answer of 10,000 tokens on the chat page; needs Chromium
	$(BIN)/python -m tests.system.console.page_time

bench: install  ## every figure of this machine in one table for each model (ARGS="MODEL_DIR --rounds 3")
	$(BIN)/python -m bench.run $(ARGS)

bench-scale: install  ## what one core carries of gateway, tokenizer, detokenizer and NATS (ARGS="--streams 64 256")
	$(BIN)/python -m bench.scale $(ARGS)

bench-quantized: install  ## decode rates of the 160M shape with plain and quantized weights (after bench-models)
	$(BIN)/python -m bench.quantized_decode $(ARGS)

bench-stages: install  ## plans in flight with pipeline stages beside one plan at a time (after bench-models)
	$(BIN)/python -m bench.stages $(ARGS)

quality: install  ## the demo model quantized by every method: perplexity beside the original weights
	$(BIN)/python -m bench.quality $(ARGS)

bench-models: install  ## make the benchmark models in bench/models (1.3 GB)
	$(BIN)/python bench/peer_systems/make_models.py bench/models $(ARGS)

bench-open: install  ## more requests than they can serve, beside vLLM (ARGS="--model DIR --vllm …/bin/vllm")
	$(BIN)/python -m bench.peer_systems.open_loop $(ARGS)

bench-peers: install  ## beside other systems (ARGS="--model DIR --vllm …/bin/vllm --llama-server PATH --openvino …/bin/python")
	$(BIN)/python -m bench.peer_systems.peers $(ARGS)

vllm-test: install  ## quantized checkpoints in vLLM's CPU build (ARGS="--vllm ENVIRONMENT/bin/python")
	$(BIN)/python -m bench.peer_systems.vllm_loads $(ARGS)

dist: install  ## the sdist, and a wheel with the compiled CPU backend for each kind of machine, in dist/ (ARGS="--machine x86_64")
	$(BIN)/python -m infra.dist $(ARGS)

release:  ## commit and tag a version; nothing is pushed (VERSION=1.2.3)
	$(PYTHON) -m infra.dist.release $(VERSION)

docs: install  ## write the generated pages: settings, protocol, models, coverage of the specification
	$(BIN)/python -m infra.checks.settings_page
	$(BIN)/python -m infra.checks.fields_page
	$(BIN)/python -m infra.checks.protocol_page
	$(BIN)/python -m infra.checks.bus_users
	$(BIN)/python -m infra.checks.matrix
	$(BIN)/python -m tests.clients.page
	$(BIN)/python -m infra.checks.models.page
	$(BIN)/python -m infra.checks.spec_coverage --claim

docs-site:  ## build the documentation site in build/site; installs mkdocs in build/site-venv
	@test -x build/site-venv/bin/python || "$(PYTHON)" -m venv build/site-venv
	build/site-venv/bin/pip install -q -r infra/site/requirements.txt
	NO_MKDOCS_2_WARNING=1 build/site-venv/bin/python -m mkdocs build -q --strict -d build/site
	@build/site-venv/bin/python infra/site/no_network.py build/site

coverage-of-spec: install  ## write docs/contributing/coverage.md from the last `make test` (ARGS=--claim: from the marks alone)
	$(BIN)/python -m infra.checks.spec_coverage --report $(SPEC_REPORT) --container-report $(CONTAINER_SPEC_REPORT) $(ARGS)

spec-proofs: install  ## after the tests: what docs/contributing/coverage.md calls proven has passed (ARGS=--without-container: no Docker)
	$(BIN)/python -m infra.checks.spec_coverage --proofs --report $(SPEC_REPORT) --container-report $(CONTAINER_SPEC_REPORT) $(ARGS)

demo-model: install  ## train the demo model anew
	$(BIN)/python -m infra.demo_model.train $(ARGS)

neon-test: install  ## the CPU backend for ARM, emulated (needs g++-aarch64-linux-gnu and qemu-user-static)
	$(BIN)/python -m pytest -q --timeout 600 tests/emulated $(ARGS)

client-test: install  ## other people's clients and coding agents against the system; needs npm (ARGS="-k codex")
	@mkdir -p $(CLIENTS)
	test -d $(CLIENTS)/venv || $(PYTHON) -m venv $(CLIENTS)/venv
	$(CLIENTS)/venv/bin/pip install -q -r tests/clients/requirements.txt
	cp tests/clients/package.json $(CLIENTS)/ && npm install --prefix $(CLIENTS) --no-fund --no-audit
	ANTIPHON_CLIENTS=$(CLIENTS) $(ALONE) $(BIN)/python -m pytest -q tests/clients $(ARGS); \
		status=$$?; $(BIN)/python -m tests.clients.page && exit $$status

schemathesis: install  ## 5,000 requests drawn from /openapi.json; installs the tool in build/schemathesis (ARGS="--examples N")
	@test -x build/schemathesis/bin/python || $(PYTHON) -m venv build/schemathesis
	build/schemathesis/bin/pip install -q -r tests/fuzz/requirements.txt
	$(BIN)/python -m tests.fuzz.run $(ARGS)

ray-test: install  ## engines whose processes Ray starts; installs the extra `ray` in build/ray, beside .venv
	@test -x build/ray/bin/python || $(BIN)/python -m venv build/ray
	@# What .venv has is used from there.
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		>"$$(build/ray/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/antiphon.pth"
	build/ray/bin/python -m pip install -q -c constraints.txt 'ray>=2.40'
	build/ray/bin/python -m pytest -q tests/system/devices/test_ray.py $(ARGS)

container-test: install  ## build the images, run two of each service, break some (needs Docker)
	@rm -f $(CONTAINER_SPEC_REPORT)
	$(BIN)/python -m pytest -q --timeout 1200 --spec-report=$(CONTAINER_SPEC_REPORT) tests/container $(ARGS)

cluster-test: install  ## a NATS cluster and the services on three hosts, which are killed and cut off (needs root: network namespaces)
	$(BIN)/python -m pytest -q --timeout 1200 tests/cluster $(ARGS)

up:  ## start everything in containers (SCALE="--scale engine=2 …", CLUSTER=1, TRACING=1, MONITORING=1, GPU=1, OPEN_WEBUI=1)
	$(COMPOSE) $(COMPOSE_FILES) up --build -d $(SCALE)
	@echo "Antiphon starts at http://127.0.0.1:8000 (make down stops it)"

down:  ## stop the containers and remove what they kept
	$(COMPOSE) $(COMPOSE_FILES) down -v
