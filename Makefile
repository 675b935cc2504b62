# SPDX-License-Identifier: Apache-2.0
# The one entry point of the checkout. Everything lands in .venv and target; nothing needs root.

# Parallel jobs of cargo, seeds per simulator scenario in `make nightly`, seconds per storm, soak and fuzz target, and RECORD=1 to keep perf
# figures.
JOBS ?= 2
SEEDS ?= 10000
STORM_SECONDS ?= 600
SOAK_SECONDS ?= 3600
FUZZ_SECONDS ?= 180
RECORD ?= 0
# Versions of NIXL beside 1.4.1 that the plugin is tested with; WHEELS=1.4.1 tests with one alone. Rounds of kills in `make test-nixl`.
NIXL_OTHERS := 1.3.2 1.5.1
WHEELS ?= 1.4.1 $(NIXL_OTHERS)
ROUNDS ?= 20
# Where NIXL is checked out, for `make test-upstream`; the wheel that it runs with (empty: nearest to the version stated there).
NIXL_CHECKOUT ?=
# The gtest binary of NIXL's own build, for `make test-upstream`.
NIXL_GTEST ?=
NIXL_WHEEL ?=
# Where Dynamo is checked out, whose schemas `make test-deploy` then takes; the images that `make images` builds.
DYNAMO_CHECKOUT ?=
IMAGES ?= base tools services worker-cpu
# The graph of `make serve`: workers, how KV blocks travel (cxl, nixl-cxl or nixl-ucx), a model and a pool other than those that it makes,
# how the frontend chooses workers (least-loaded, round-robin or kv), how processes find each other (file or etcd), the frontend's port (0 = a free one).
PREFILL ?= 1
DECODE ?= 1
CONNECTOR ?= cxl
MODEL ?=
POOL ?=
ROUTER ?= least-loaded
DISCOVERY ?= file
# Where workers run: each by itself on this machine (processes), or on the two hosts of a lab: namespaces, or lab, virtual machines.
HOSTS ?= processes
PORT ?= 0
ONCE ?= 0
# Where install-capi puts the C interface.
PREFIX ?= target/install

STEP := @scripts/step
CARGO_FLAGS := --locked -q -j$(JOBS)
# cxl-sim compiles the named faults into cxl-pool. Cargo unifies features within one command, so the simulator always gets its own.
SHIPPED := -p cxl-pool -p cxl-capi -p cxlctl
SOAK = $(STEP) 'soak of the cache, $(SOAK_SECONDS) s' env SOAK_SECONDS=$(SOAK_SECONDS) \
	cargo test $(CARGO_FLAGS) -p cxl-pool --test soak -- --nocapture
PROTOC_ENV := PROTOC=$(CURDIR)/scripts/protoc
NIXL_PYTEST := env NIXL_WHEELS='$(WHEELS)' .venv/bin/python -m pytest -q
GRAPH_PYTEST := .venv/serve/bin/python -m pytest -q
# Pools of tests that pass are deleted at once: a whole run would leave gigabytes of them.
PYTEST_ADDOPTS ?= -o tmp_path_retention_policy=failed -o tmp_path_retention_count=1
# Of `cxlctl --version`, the wheel and the images.
GIT_COMMIT := $(shell git describe --always --abbrev=12 --exclude='*' --dirty 2>/dev/null)
export JOBS FUZZ_SECONDS PYTEST_ADDOPTS GIT_COMMIT

# Steps follow one another even under `make -j`: they share the machine's cores and the target directory.
.NOTPARALLEL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

.PHONY: help
help: ## List the targets
	@echo 'make TARGET [JOBS=2] [SEEDS=10000] [STORM_SECONDS=600] [SOAK_SECONDS=3600] [FUZZ_SECONDS=180] [ROUNDS=200] [RECORD=1]'
	@scripts/help $(firstword $(MAKEFILE_LIST))

## Try it

.PHONY: demo
demo: build ## Two processes as two hosts on one pool: one publishes data blocks, the other finds and verifies them
	@target/release/cxlctl demo

.PHONY: serve
serve: serve-ready $(if $(filter etcd,$(DISCOVERY))$(filter lab,$(HOSTS)),build-member) \
	$(if $(filter namespaces,$(HOSTS)),build-lab) $(if $(filter lab,$(HOSTS)),setup-lab) ## A Dynamo graph of vLLM workers on one pool, and a question that shows where each block came from. ONCE=1 verifies and ends; PREFILL=1 DECODE=1 CONNECTOR=cxl|nixl-cxl|nixl-ucx MODEL= POOL= ROUTER=least-loaded|round-robin|kv DISCOVERY=file|etcd HOSTS=processes|namespaces|lab PORT=0
	@.venv/serve/bin/python deploy/dynamo/serve.py --prefill $(PREFILL) --decode $(DECODE) --connector $(CONNECTOR) --router $(ROUTER) \
		--discovery $(DISCOVERY) --hosts $(HOSTS) --port $(PORT) --model '$(MODEL)' --pool '$(POOL)' $(if $(filter 1,$(ONCE)),--once)

## Set up

.PHONY: tools
tools:
	$(STEP) 'tools' scripts/tools

.PHONY: setup
setup: tools .venv/installed ## Make .venv from the pinned and hashed lock, fetch the crates; setup-NAME adds what optional suites need, NAME: nixl serve etcd lmcache kvcr sglang deploy s3 gpu aiperf ucx cross lab
	$(STEP) 'crates' cargo fetch --locked -q

.venv/installed: scripts/requirements/base.lock scripts/setup
	$(STEP) 'Python environment' scripts/setup scripts/requirements/base.lock
	@touch $@

.venv/nixl-installed: scripts/requirements/nixl.lock scripts/setup | .venv/installed
	$(STEP) 'NIXL 1.4.1' scripts/setup scripts/requirements/nixl.lock
	@touch $@

.venv/nixl-%/installed: scripts/requirements/nixl-%.lock scripts/setup | .venv/installed
	$(STEP) 'NIXL $*' scripts/setup $< .venv/nixl-$*
	@touch $@

.venv/serve-installed: scripts/requirements/serve.lock scripts/setup-serve | .venv/installed
	$(STEP) 'vLLM, Dynamo and NIXL (3 GB)' scripts/setup-serve scripts/requirements/serve.lock
	@touch $@

.venv/l2-installed: scripts/requirements/l2.lock scripts/setup | .venv/installed
	$(STEP) 'fsspec' scripts/setup scripts/requirements/l2.lock
	@touch $@

.venv/s3/installed: scripts/requirements/s3.lock scripts/setup | .venv/installed
	$(STEP) 'S3 server and client (130 MB)' scripts/setup scripts/requirements/s3.lock .venv/s3
	@touch $@

.venv/etcd-installed: scripts/requirements/etcd.lock scripts/setup scripts/setup-etcd | .venv/installed
	$(STEP) 'protoc' scripts/setup scripts/requirements/etcd.lock
	$(STEP) 'etcd' scripts/setup-etcd .venv/etcd
	@touch $@

.venv/deploy/installed: scripts/requirements/deploy.lock scripts/setup | .venv/installed
	$(STEP) 'Helm, schemas of Kubernetes' scripts/setup scripts/requirements/deploy.lock .venv/deploy/python
	@touch $@

.venv/deploy/tools/installed: scripts/setup-deploy
	$(STEP) 'Docker, docker-compose, mmdebstrap, Prometheus' scripts/setup-deploy .venv/deploy/tools
	@touch $@

.venv/deploy/apiserver/installed: scripts/setup-apiserver
	$(STEP) 'API server of Kubernetes (13 minutes of CPU time)' env JOBS=$(JOBS) scripts/setup-apiserver .venv/deploy/apiserver
	@touch $@

.venv/nfpm/installed: scripts/setup-nfpm
	$(STEP) 'nfpm' scripts/setup-nfpm .venv/nfpm
	@touch $@

.venv/lmcache/installed: scripts/requirements/lmcache.lock scripts/setup scripts/setup-lmcache .venv/serve-installed
	$(STEP) 'LMCache' scripts/setup-lmcache scripts/requirements/lmcache.lock
	@touch $@

# Other versions of the windows in kvbm_cxl/versions.py: these packages alone, over those of .venv/serve and .venv/lmcache.
VERSIONS := vllm-0.32 vllm-0.33 lmcache-0.5.7
$(VERSIONS:%=.venv/versions/%/installed): .venv/versions/%/installed: scripts/requirements/%.lock scripts/setup | .venv/installed
	$(STEP) '$*' scripts/setup $< .venv/versions/$*
	@touch $@

.venv/kvcr/installed: scripts/requirements/kvcr.lock scripts/setup | .venv/installed
	$(STEP) 'KVCR' scripts/setup scripts/requirements/kvcr.lock .venv/kvcr
	@touch $@

.venv/sglang/installed: scripts/requirements/sglang.lock scripts/setup | .venv/installed
	$(STEP) "SGLang's modules" scripts/setup scripts/requirements/sglang.lock .venv/sglang
	@touch $@

.venv/gpu/installed: scripts/requirements/gpu.lock scripts/setup | .venv/installed
	$(STEP) 'NVRTC' scripts/setup scripts/requirements/gpu.lock .venv/gpu
	@touch $@

# For the Python of machines with GPUs, which is not that of .venv.
.venv/gpu-kit/installed: scripts/requirements/gpu-kit.lock | .venv/installed
	@rm -rf .venv/gpu-kit
	$(STEP) 'NIXL for the kit' .venv/bin/uv pip install --quiet --no-deps --require-hashes --python .venv/bin/python --python-version 3.12 \
		--target .venv/gpu-kit -r $<
	@touch $@

.venv/aiperf/installed: scripts/requirements/aiperf.lock scripts/setup | .venv/installed
	$(STEP) "AIPerf's synthesizer" scripts/setup scripts/requirements/aiperf.lock .venv/aiperf
	@touch $@

.venv/ucx/installed: scripts/unpack-debian
	$(STEP) 'UCX' scripts/unpack-debian .venv/ucx "$$(dpkg --print-architecture)" bookworm libucx-dev
	@touch $@

.venv/cross/installed: scripts/requirements/cross.lock scripts/setup scripts/setup-cross scripts/unpack-debian | .venv/installed
	$(STEP) 'zig' scripts/setup $< .venv/cross/python
	$(STEP) 'GCC for aarch64, C library of manylinux_2_28' scripts/setup-cross .venv/cross
	@touch $@

.venv/lab/ready: scripts/setup-lab scripts/unpack-debian tests/lab/cxl_lab/image.py $(wildcard tests/lab/guest/*) | .venv/installed
	$(if $(wildcard .venv/lab/root/boot),,$(STEP) 'QEMU and Linux for the lab (150 MB)' scripts/setup-lab .venv/lab)
	$(STEP) 'image of the virtual hosts' .venv/bin/python tests/lab/cxl_lab/image.py .venv/lab/root .venv/lab
	@touch $@

# What optional suites and benchmarks need; those fetch it themselves, but where a download is large or may be refused.
SETUPS := nixl serve etcd lmcache kvcr sglang deploy apiserver s3 gpu aiperf ucx cross lab
SETUP_nixl := .venv/nixl-installed $(NIXL_OTHERS:%=.venv/nixl-%/installed)
SETUP_serve := .venv/serve-installed
SETUP_etcd := .venv/etcd-installed
SETUP_lmcache := .venv/lmcache/installed
SETUP_kvcr := .venv/kvcr/installed
SETUP_sglang := .venv/sglang/installed
SETUP_deploy := .venv/deploy/installed .venv/deploy/tools/installed .venv/etcd-installed .venv/nfpm/installed
SETUP_apiserver := .venv/deploy/installed .venv/etcd-installed .venv/deploy/apiserver/installed
SETUP_s3 := .venv/s3/installed
SETUP_gpu := .venv/gpu/installed .venv/gpu-kit/installed
SETUP_aiperf := .venv/aiperf/installed
SETUP_ucx := .venv/ucx/installed
SETUP_cross := .venv/cross/installed
SETUP_lab := .venv/lab/ready build-lab
.PHONY: $(SETUPS:%=setup-%)
.SECONDEXPANSION:
$(SETUPS:%=setup-%): setup-%: $$(SETUP_$$*)

.PHONY: build-lab
build-lab: build
	$(STEP) 'agent of the lab' cargo build $(CARGO_FLAGS) --release -p lab-agent

# What is fetched and what is built wait for different things, so they go side by side. The programs take longest, and go first (`nice`).
.PHONY: serve-ready
serve-ready: ## What `make serve` runs: vLLM, Dynamo and NIXL from the lock, and package kvbm-cxl with them
	@$(MAKE) -s --no-print-directory .venv/serve-imported & fetched=$$!; \
	nice $(MAKE) --no-print-directory compile-plugin & compiled=$$!; \
	$(MAKE) --no-print-directory build; status=$$?; wait $$compiled || status=$$?; wait $$fetched || status=$$?; exit $$status
	@$(MAKE) --no-print-directory python-package

.venv/serve-imported: .venv/serve-installed deploy/dynamo/graph/imports.py
	$(STEP) 'bytecode' nice env -u PYTHONDONTWRITEBYTECODE CUDA_VISIBLE_DEVICES= .venv/serve/bin/python deploy/dynamo/graph/imports.py
	@touch $@

.PHONY: clean
clean: ## Remove .venv and target
	rm -rf .venv target kvbm_cxl/fuzz/target python/kvbm_cxl/_native.abi3.so

## Build

.PHONY: build
build: ## Build the release programs, the C API libraries and the Python extension
	$(STEP) 'release build' env CARGO_FLAGS='$(CARGO_FLAGS)' scripts/release-build

# With the programs: cargo would unify other features for the C interface alone, and build it anew whenever the two take turns.
.PHONY: build-plugin
build-plugin: build
	$(STEP) 'NIXL plugin' scripts/nixl-plugin target/nixl_plugin shipped -DKVBM_CXL_TESTS=OFF

# All of the plugin that is compiled without the pool's library, which is only linked.
.PHONY: compile-plugin
compile-plugin:
	$(STEP) 'NIXL plugin, compiled' scripts/nixl-plugin target/nixl_plugin kvbm_cxl_nixl -DKVBM_CXL_TESTS=OFF

.PHONY: python-extension
python-extension: build ## Build the compiled part of the Python package into python/kvbm_cxl, for PYTHONPATH=python
	$(STEP) 'Python extension' scripts/python-extension

.PHONY: gpu-kit
gpu-kit: python-package ## Pack what a machine with a GPU and nothing else needs to try and time the GPU path, in target/gpu-kit.tar.gz: at most 64 MiB
	$(STEP) 'kit for a machine with a GPU' env CARGO_FLAGS='$(CARGO_FLAGS)' scripts/gpu-kit target/gpu-kit

.PHONY: build-member
build-member: .venv/etcd-installed ## Build cxl-member, which keeps a host's slot in etcd
	$(STEP) 'release build of cxl-member' env $(PROTOC_ENV) cargo build $(CARGO_FLAGS) --release -p cxl-member

.PHONY: python-package
python-package: build build-plugin .venv/installed ## Build the wheel of package kvbm-cxl in target/wheels; into .venv/serve, too, where that is there
	@rm -f target/wheels/kvbm_cxl-*.whl
	$(STEP) 'Python package' scripts/python-package target/wheels
	$(if $(wildcard .venv/serve-installed),$(STEP) 'Python package in .venv/serve' .venv/bin/uv pip install --quiet \
		--python .venv/serve/bin/python --no-deps --no-index --reinstall target/wheels/kvbm_cxl-*.whl)

.PHONY: wheels
wheels: .venv/cross/installed .venv/deploy/installed ## Build the wheels for manylinux_2_28 in target/manylinux/wheels, x86_64 and aarch64, and test them: what auditwheel says of them, blocks, NIXL, qemu-user (20 minutes)
	$(STEP) 'wheels for manylinux_2_28' env CARGO_FLAGS='$(CARGO_FLAGS)' scripts/wheels target/manylinux/wheels x86_64 aarch64
	$(STEP) 'pytest, wheels' env PYTHONPATH=.venv/deploy/python .venv/bin/python -m pytest -q -rs tests/deploy/test_wheel.py

.PHONY: images
images: setup-deploy serve-ready ## Build the images of deploy/images that need no registry; IMAGES='base tools services worker-cpu', or worker-gpu, from NVIDIA's
	$(STEP) 'images: $(IMAGES)' .venv/bin/python tests/deploy/daemon.py scripts/images $(IMAGES)

.PHONY: packages
packages: build .venv/nfpm/installed ## Make kvbm-cxl-tools as deb and rpm in target/packages: cxlctl, cxl-bench, cxl-plan, udev rule, systemd unit, manual pages
	$(STEP) 'packages' scripts/packages .venv/nfpm/nfpm target/packages

.PHONY: fmt
fmt: .venv/installed ## Format Rust, C and C++
	$(STEP) 'rustfmt' cargo fmt --all
	$(STEP) 'clang-format' scripts/clang-format write

## Checks before a merge

.PHONY: test
test: lint test-rust test-sim test-tidy test-python test-documented test-nixl test-connector-logic test-serve ## Everything that must pass before a change is merged

.PHONY: lint
lint: .venv/installed ## Formatting, clippy, links of the documentation
	$(STEP) 'rustfmt' cargo fmt --all --check
	$(STEP) 'clang-format' scripts/clang-format check
	$(STEP) 'clippy' cargo clippy $(CARGO_FLAGS) $(SHIPPED) -p kvbm-cxl-python --all-targets -- -D warnings
	$(STEP) 'clippy, faults compiled in' cargo clippy $(CARGO_FLAGS) -p cxl-pool -p cxl-sim --all-targets -- -D warnings
	$(STEP) 'rustdoc' env RUSTDOCFLAGS='-D warnings' cargo doc $(CARGO_FLAGS) --no-deps $(SHIPPED)

.PHONY: test-rust
test-rust: ## Tests of the pool, its C API and its command line
	$(STEP) 'cargo test, pool' cargo test $(CARGO_FLAGS) $(SHIPPED)

.PHONY: test-sim
test-sim: ## Simulated hosts: scenarios, crash points, mutants
	$(STEP) 'cargo test, simulator' cargo test $(CARGO_FLAGS) -p cxl-sim

.PHONY: test-tidy
test-tidy: .venv/installed ## House rules and documents (pytest)
	$(STEP) 'pytest' .venv/bin/python -m pytest -q tests/test_*.py tests/versions/test_interface.py tests/versions/test_settings_of_versions.py

.PHONY: test-python
test-python: build build-lab python-extension .venv/nixl-installed .venv/l2-installed ## The Python package over the pool, in one and two processes, on S3 after `make setup-s3`; the lab's own parts
	$(STEP) 'pytest, Python package' env PYTHONPATH=$(wildcard .venv/s3) .venv/bin/python -m pytest -q -rs python/tests/test_native_*.py \
		tests/lab/test_lab_itself.py tests/lab/test_fork_server.py

.PHONY: test-documented
test-documented: serve-ready python-extension .venv/nixl-installed ## The commands of the documents as they stand, where this machine can run them, and the examples but those of vLLM
	$(STEP) 'pytest, examples' .venv/bin/python -m pytest -q tests/examples
	$(STEP) 'pytest, documents' .venv/bin/python -m pytest -q tests/documented

.PHONY: test-nixl
test-nixl: build build-plugin setup-nixl ## The NIXL plugin under real NIXL wheels, in two and three processes; peers killed and stopped at random points, ROUNDS times
	$(STEP) 'pytest, NIXL' env NIXL_ROUNDS=$(ROUNDS) $(NIXL_PYTEST) python/tests tests/nixl --ignore-glob='*/test_native_*'

.PHONY: test-connector-logic
test-connector-logic: serve-ready ## The vLLM connector's logic, without an engine
	$(STEP) 'pytest, logic of the vLLM connector' $(GRAPH_PYTEST) tests/vllm_integration --ignore-glob='*/test_engine_*'

.PHONY: test-serve
test-serve: serve-ready ## The launcher, and one graph of a prefill and a decode worker
	$(STEP) 'pytest, graph 1P1D' $(GRAPH_PYTEST) tests/graph/test_cpu_harness.py tests/graph/test_launcher.py \
		tests/graph/test_one_by_one.py

## Further suites: what `make nightly` and CI run beyond these

.PHONY: test-nixl-cpp
test-nixl-cpp: build ## C++ tests of the NIXL plugin
	$(STEP) 'NIXL plugin and its tests' scripts/nixl-plugin target/nixl_tests all
	$(STEP) 'ctest' scripts/nixl-ctest target/nixl_tests

.PHONY: test-nixl-sanitizers
test-nixl-sanitizers: build ## The same under ASan and UBSan, and under TSan
	$(STEP) 'ASan and UBSan build' scripts/nixl-plugin target/nixl_asan all -DKVBM_CXL_SANITIZE=address,undefined
	$(STEP) 'ctest, ASan and UBSan' scripts/nixl-ctest target/nixl_asan
	$(STEP) 'TSan build' scripts/nixl-plugin target/nixl_tsan all -DKVBM_CXL_SANITIZE=thread
	$(STEP) 'ctest, TSan' scripts/nixl-ctest target/nixl_tsan

.PHONY: test-upstream
test-upstream: build-plugin setup-nixl ## NIXL's own tests with our plugin: the crate nixl-sys; its Python tests of NIXL_CHECKOUT=/path; its gtests, NIXL_GTEST=/path of the binary; NIXL_WHEEL=1.5.1
	$(STEP) 'tests of nixl-sys' scripts/upstream-nixl
	$(if $(NIXL_CHECKOUT),$(STEP) "NIXL's Python tests" env PYTHONPATH=tests/nixl .venv/bin/python tests/nixl/upstream_suite.py \
		'$(NIXL_CHECKOUT)' $(NIXL_WHEEL:%=--wheel %),@echo "== NIXL's Python tests: skipped: name a checkout of NIXL with NIXL_CHECKOUT=")
	$(if $(NIXL_GTEST),$(STEP) "NIXL's gtests" env PYTHONPATH=tests/nixl:tests .venv/bin/python tests/nixl/upstream_gtest.py \
		'$(NIXL_GTEST)' $(NIXL_WHEEL:%=--wheel %),@echo "== NIXL's gtests: skipped: name the gtest binary of NIXL's build with NIXL_GTEST=")

.PHONY: test-member
test-member: build-member build ## Hosts whose slots are leased in etcd: leases that run out, an etcd that goes away
	$(STEP) 'clippy, cxl-member' env $(PROTOC_ENV) cargo clippy $(CARGO_FLAGS) -p cxl-member --all-targets -- -D warnings
	$(STEP) 'cargo test, cxl-member' env $(PROTOC_ENV) cargo test $(CARGO_FLAGS) -p cxl-member
	$(STEP) 'pytest, cxl-member' .venv/bin/python -m pytest -q tests/member

.PHONY: test-connector
test-connector: serve-ready ## The vLLM connector: its logic, and real engines in one process
	$(STEP) 'pytest, vLLM connector' $(GRAPH_PYTEST) tests/vllm_integration

# No vLLM 0.33 for CPUs is published; test_layouts makes caches with functions that 0.33 has moved.
.PHONY: test-versions
test-versions: serve-ready .venv/lmcache/installed .venv/sglang/installed $(VERSIONS:%=.venv/versions/%/installed) ## Other versions of vLLM and LMCache: interfaces, logic, engines on one pool (half an hour); RECORD=1 records interfaces
	$(STEP) 'pytest, interfaces of versions' env RECORD=$(RECORD) .venv/bin/python -m pytest -q -rs tests/versions
	$(STEP) 'pytest, vLLM 0.32, logic' env PYTHONPATH=$(CURDIR)/.venv/versions/vllm-0.32 $(GRAPH_PYTEST) tests/vllm_integration \
		--ignore-glob='*/test_engine_*'
	$(STEP) 'pytest, vLLM 0.32, engines' env PYTHONPATH=$(CURDIR)/.venv/versions/vllm-0.32 $(GRAPH_PYTEST) \
		tests/vllm_integration/test_engine_handover.py tests/vllm_integration/test_engine_second_level.py
	$(STEP) 'pytest, vLLM 0.33, logic' env PYTHONPATH=$(CURDIR)/.venv/versions/vllm-0.33 $(GRAPH_PYTEST) tests/vllm_integration \
		--ignore-glob='*/test_engine_*' --ignore-glob='*/test_layouts.py'
	$(STEP) 'pytest, LMCache 0.5.7' env PYTHONPATH=$(CURDIR)/.venv/versions/lmcache-0.5.7:$(CURDIR)/.venv/lmcache $(GRAPH_PYTEST) tests/consumers -k lmcache

.PHONY: test-graph
test-graph: serve-ready build-member build-lab ## All tests of graphs: 2P2D, workers killed, pools full and lost, two models, NIXL (half an hour)
	$(STEP) 'pytest, graphs' $(GRAPH_PYTEST) tests/graph

# What of deploy/ needs no daemon: a minute, with its packages, so that CI runs it.
.PHONY: test-chart
test-chart: .venv/deploy/installed ## The chart with many values against strict schemas, and settings of chart, Compose, scripts and launcher beside each other
	$(STEP) 'pytest, chart and settings' env DYNAMO_CHECKOUT='$(DYNAMO_CHECKOUT)' PYTHONPATH=python:.venv/deploy/python .venv/bin/python -m pytest -q \
		tests/deploy/test_chart.py tests/deploy/test_settings.py tests/deploy/test_dashboards.py -k 'not prometheus'

.PHONY: test-deploy
test-deploy: build python-package python-extension .venv/deploy/installed ## Chart, dashboards, Compose and containers; what `make setup-deploy` has not added is skipped. DYNAMO_CHECKOUT=/path for Dynamo's own schema
	$(STEP) 'pytest, deployment' env DYNAMO_CHECKOUT='$(DYNAMO_CHECKOUT)' PYTHONPATH=python:.venv/deploy/python .venv/bin/python -m pytest -q -rs tests/deploy

.PHONY: test-consumers
test-consumers: build build-plugin python-extension .venv/installed $(if $(wildcard .venv/serve-installed),python-package) ## The adapters for other caches, in the real consumers: vLLM's tiers, LMCache's server and storage manager, KVCR and SGLang's modules; what `make setup-serve setup-lmcache setup-kvcr setup-sglang` has not added is skipped (12 minutes once built)
	$(STEP) 'pytest, adapters for other caches' env PYTHONPATH=$(CURDIR)/.venv/lmcache $(firstword $(wildcard .venv/serve/bin/python) .venv/bin/python) \
		-m pytest -q -rs tests/consumers

# KVBM's 360 crates are no part of `make test` or .ci/run: a workspace of its own, built in target/tier (8 minutes the first time, on two free cores).
.PHONY: test-tier
test-tier: build-plugin .venv/nixl-installed ## The KVBM tier: KVBM's own leaders in two processes, prefill killed at every step, ranks, layouts, a router; KVBM's own tests with our plugin (minutes once built)
	$(STEP) 'rustfmt, tier' scripts/tier fmt --check
	$(STEP) 'clippy, tier' scripts/tier clippy $(CARGO_FLAGS) --features faults,router --all-targets -- -D warnings
	$(STEP) 'cargo test, tier' scripts/tier test $(CARGO_FLAGS) --features faults,router
	$(STEP) "tests of KVBM's crates" env JOBS=$(JOBS) scripts/upstream-kvbm

.PHONY: test-lab
test-lab: setup-lab python-extension build-plugin .venv/nixl-installed ## Virtual hosts with emulated CXL memory: pool, cache, locks, NIXL and the KVBM tier on real /dev/dax (10 minutes)
	$(STEP) 'tests of the tier, as a program' sh -c 'mkdir -p target/tier && scripts/tier-program >target/tier/lab-program'
	$(STEP) 'pytest, lab' .venv/bin/python -m pytest -q tests/lab

# Continuous integration calls this: a machine that cannot have the lab passes, and says what it did not test.
.PHONY: test-lab-smoke
test-lab-smoke: python-extension ## Two virtual hosts exchange blocks and survive three faults (a minute); where the lab cannot be set up, the reason
	@if $(MAKE) --no-print-directory setup-lab; then \
		scripts/step 'pytest, two hosts' .venv/bin/python -m pytest -q -m smoke tests/lab; \
	else echo '   NOT TESTED: virtual hosts, because the lab cannot be set up here (see above)'; fi

.PHONY: test-aarch64
test-aarch64: ## Link the tests for 64-bit ARM with zig, run them under qemu-user if there (optional)
	$(STEP) 'aarch64 tests' scripts/aarch64 test

## Long runs

# The tier and KVBM's own tests are among the suites, and not in .ci/run: a clean checkout builds their 560 crates for a quarter of an hour.
.PHONY: nightly
nightly: ## SEEDS seeds per simulator scenario, long storms, fuzzing, and every suite that `make test` and CI leave out
	$(STEP) 'simulator, $(SEEDS) seeds' env SEEDS=$(SEEDS) cargo test $(CARGO_FLAGS) -p cxl-sim
	$(STEP) 'storms, $(STORM_SECONDS) s' env STORM_SECONDS=$(STORM_SECONDS) cargo test $(CARGO_FLAGS) $(SHIPPED)
	$(SOAK)
	$(STEP) 'fuzz targets' scripts/fuzz
	$(STEP) 'suites that CI does not run' scripts/nightly-suites

.PHONY: soak
soak: ## The prefix cache under kills, stops and comings and goings for SOAK_SECONDS
	$(SOAK)

## Performance: each prints ratios against a baseline of the same run; RECORD=1 keeps them

PERF := $(shell sed -n 's/^\[\(.*\)\]$$/\1/p' perf/programs.toml)
.PHONY: perf $(PERF)
perf: .venv/installed ## List the benchmarks; `make perf-NAME` runs one
	@.venv/bin/python perf/run.py

$(PERF): .venv/installed
	@.venv/bin/python perf/run.py $(if $(filter 1,$(RECORD)),--record) $@

target/ucx-calls: perf/ucx_calls.c scripts/ucx-calls .venv/ucx/installed
	@scripts/ucx-calls $< $@
