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
# Versions of NIXL beside 1.4.1 that the plugin is tested with; WHEELS=1.4.1 tests with one alone. Rounds of kills in `make test-nixl-kills`.
NIXL_OTHERS := 1.3.2 1.5.1
WHEELS ?= 1.4.1 $(NIXL_OTHERS)
ROUNDS ?= 200
# Where NIXL is checked out, for `make test-upstream-nixl-python`; the wheel that it runs with (empty: nearest to the version stated there).
NIXL_CHECKOUT ?=
NIXL_WHEEL ?=
# The graph of `make serve`: workers, how KV blocks travel (cxl, nixl-cxl or nixl-ucx), a model and a pool other than those that it makes,
# how the frontend chooses workers (round-robin or kv), how processes find each other (file or etcd), the frontend's port (0 = a free one).
PREFILL ?= 1
DECODE ?= 1
CONNECTOR ?= cxl
MODEL ?=
POOL ?=
ROUTER ?= round-robin
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
RATIOS := .venv/bin/python perf/run.py $(if $(filter 1,$(RECORD)),--record)
export JOBS FUZZ_SECONDS

# Steps follow one another even under `make -j`: they share the machine's cores and the target directory.
.NOTPARALLEL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

.PHONY: help
help: ## List the targets
	@echo 'make TARGET [JOBS=2] [SEEDS=10000] [STORM_SECONDS=600] [SOAK_SECONDS=3600] [FUZZ_SECONDS=180] [RECORD=1]'
	@echo 'make serve [ONCE=1] [PREFILL=1] [DECODE=1] [CONNECTOR=cxl|cxl-zero-copy|nixl-cxl|nixl-ucx] [MODEL=] [POOL=] [ROUTER=round-robin|kv] [DISCOVERY=file|etcd] [HOSTS=processes|namespaces|lab] [PORT=0]'
	@sed -nE 's/^([a-z0-9-]+):.*## (.*)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 28

## Setting up and building

.PHONY: tools
tools:
	$(STEP) 'tools' scripts/tools

.PHONY: setup
setup: tools .venv/installed ## Make .venv from the pinned and hashed lock, fetch the crates
	$(STEP) 'crates' cargo fetch --locked -q

.venv/installed: requirements.lock scripts/setup
	$(STEP) 'Python environment' scripts/setup requirements.lock
	@touch $@

.venv/nixl-installed: requirements-nixl.lock scripts/setup | .venv/installed
	$(STEP) 'NIXL 1.4.1' scripts/setup requirements-nixl.lock
	@touch $@

.venv/nixl-%/installed: requirements-nixl-%.lock scripts/setup | .venv/installed
	$(STEP) 'NIXL $*' scripts/setup $< .venv/nixl-$*
	@touch $@

.venv/serve-installed: requirements-serve.lock scripts/setup-serve | .venv/installed
	$(STEP) 'vLLM, Dynamo and NIXL (3 GB)' scripts/setup-serve requirements-serve.lock
	@touch $@

.venv/perf-installed: requirements-perf.lock scripts/setup | .venv/installed
	$(STEP) 'matplotlib' scripts/setup requirements-perf.lock
	@touch $@

.PHONY: setup-nixl
setup-nixl: .venv/nixl-installed $(NIXL_OTHERS:%=.venv/nixl-%/installed) ## Add the NIXL wheels that the plugin is tested with (about 300 MB each)

.PHONY: setup-serve
setup-serve: .venv/serve-installed ## Add vLLM for CPUs and Dynamo in .venv/serve (3 GB to fetch, 7 GB on disk)

.venv/etcd-installed: requirements-etcd.lock scripts/setup scripts/setup-etcd | .venv/installed
	$(STEP) 'protoc' scripts/setup requirements-etcd.lock
	$(STEP) 'etcd' scripts/setup-etcd .venv/etcd
	@touch $@

.PHONY: setup-etcd
setup-etcd: .venv/etcd-installed ## Add an etcd server and what cxl-member is built with (optional)

.PHONY: setup-cross
setup-cross: .venv/installed ## Add the aarch64 linker (optional)
	$(STEP) 'cross linker' scripts/setup requirements-cross.lock

.PHONY: build
build: ## Build the release programs, the C API libraries and the Python extension
	$(STEP) 'release build' env CARGO_FLAGS='$(CARGO_FLAGS)' scripts/release-build

# With the programs: cargo would unify other features for the C interface alone, and build it anew whenever the two take turns.
.PHONY: build-plugin
build-plugin: build ## Build the NIXL plugin: target/nixl_plugin/libplugin_CXL.so
	$(STEP) 'NIXL plugin' scripts/nixl-plugin target/nixl_plugin plugin_CXL -DKVBM_CXL_TESTS=OFF

# All of the plugin that is compiled without the pool's library, which is only linked.
.PHONY: compile-plugin
compile-plugin:
	$(STEP) 'NIXL plugin, compiled' scripts/nixl-plugin target/nixl_plugin kvbm_cxl_nixl -DKVBM_CXL_TESTS=OFF

.PHONY: python-extension
python-extension: build ## Build the compiled part of the Python package into python/kvbm_cxl, for PYTHONPATH=python
	$(STEP) 'Python extension' scripts/python-extension

.PHONY: build-member
build-member: .venv/etcd-installed ## Build cxl-member, which keeps a host's slot in etcd
	$(STEP) 'release build of cxl-member' env $(PROTOC_ENV) cargo build $(CARGO_FLAGS) --release -p cxl-member

.PHONY: python-package
python-package: build build-plugin .venv/installed ## Build the wheel of package kvbm-cxl in target/wheels; into .venv/serve, too, where that is there
	@rm -f target/wheels/kvbm_cxl-*.whl
	$(STEP) 'Python package' scripts/python-package target/wheels
	$(if $(wildcard .venv/serve-installed),$(STEP) 'Python package in .venv/serve' .venv/bin/uv pip install --quiet \
		--python .venv/serve/bin/python --no-deps --no-index --reinstall target/wheels/kvbm_cxl-*.whl)

.venv/lab/ready: scripts/setup-lab tests/lab/cxl_lab/image.py $(wildcard tests/lab/guest/*) | .venv/installed
	$(if $(wildcard .venv/lab/root/boot),,$(STEP) 'QEMU and Linux for the lab (150 MB)' scripts/setup-lab .venv/lab)
	$(STEP) 'image of the virtual hosts' .venv/bin/python tests/lab/cxl_lab/image.py .venv/lab/root .venv/lab
	@touch $@

.PHONY: lab
lab: .venv/lab/ready build-lab ## Set up the lab: virtual hosts on one emulated CXL memory (Debian packages, unpacked, not installed); scripts/lab uses it

.PHONY: build-lab
build-lab: build
	$(STEP) 'agent of the lab' cargo build $(CARGO_FLAGS) --release -p lab-agent

.PHONY: install-capi
install-capi: build ## Install the C interface under PREFIX
	$(STEP) 'install the C interface' scripts/install-capi $(PREFIX)

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

.PHONY: serve
serve: serve-ready $(if $(filter etcd,$(DISCOVERY))$(filter lab,$(HOSTS)),build-member) \
	$(if $(filter namespaces,$(HOSTS)),build-lab) $(if $(filter lab,$(HOSTS)),lab) ## A Dynamo graph of vLLM workers on one pool, and a question that shows where each block came from; ONCE=1 verifies and ends
	@.venv/serve/bin/python deploy/dynamo/serve.py --prefill $(PREFILL) --decode $(DECODE) --connector $(CONNECTOR) --router $(ROUTER) \
		--discovery $(DISCOVERY) --hosts $(HOSTS) --port $(PORT) --model '$(MODEL)' --pool '$(POOL)' $(if $(filter 1,$(ONCE)),--once)

.PHONY: demo
demo: build ## Two processes as two hosts on one pool: one publishes data blocks, the other finds and verifies them
	@target/release/cxlctl demo

.PHONY: clean
clean: ## Remove .venv and target
	rm -rf .venv target kvbm_cxl/*/fuzz/target python/kvbm_cxl/_native.abi3.so

## Checks

.PHONY: test
test: lint test-rust test-sim test-tidy test-lab-itself test-python test-nixl test-connector-logic test-serve ## Everything that must pass before a change is merged

.PHONY: lint
lint: .venv/installed ## Formatting and clippy
	$(STEP) 'rustfmt' cargo fmt --all --check
	$(STEP) 'clang-format' scripts/clang-format check
	$(STEP) 'clippy' cargo clippy $(CARGO_FLAGS) $(SHIPPED) -p kvbm-cxl-python --all-targets -- -D warnings
	$(STEP) 'clippy, faults compiled in' cargo clippy $(CARGO_FLAGS) -p cxl-pool -p cxl-sim --all-targets -- -D warnings

.PHONY: test-rust
test-rust: ## Tests of the pool, its C API and its command line
	$(STEP) 'cargo test, pool' cargo test $(CARGO_FLAGS) $(SHIPPED)

.PHONY: test-sim
test-sim: ## Simulated hosts: scenarios, crash points, mutants
	$(STEP) 'cargo test, simulator' cargo test $(CARGO_FLAGS) -p cxl-sim

.PHONY: test-tidy
test-tidy: .venv/installed ## House rules and documents (pytest)
	$(STEP) 'pytest' .venv/bin/python -m pytest -q tests/test_*.py

.PHONY: test-python
test-python: build python-extension .venv/nixl-installed ## The Python package over the pool, in one and two processes
	$(STEP) 'pytest, Python package' .venv/bin/python -m pytest -q python/tests/test_native_*.py

.PHONY: test-nixl
test-nixl: build build-plugin setup-nixl ## The NIXL plugin under real NIXL wheels, in two and three processes
	$(STEP) 'pytest, NIXL' $(NIXL_PYTEST) python/tests tests/nixl --ignore-glob='*/test_native_*'

.PHONY: test-serve
test-serve: serve-ready ## The launcher, and one graph of a prefill and a decode worker
	$(STEP) 'pytest, graph 1P1D' $(GRAPH_PYTEST) tests/graph/test_cpu_harness.py tests/graph/test_launcher.py \
		tests/graph/test_one_by_one.py

.PHONY: test-connector-logic
test-connector-logic: serve-ready ## The vLLM connector's logic, without an engine
	$(STEP) 'pytest, logic of the vLLM connector' $(GRAPH_PYTEST) tests/vllm_integration --ignore-glob='*/test_engine_*'

.PHONY: test-connector
test-connector: serve-ready ## The vLLM connector: its logic, and real engines in one process
	$(STEP) 'pytest, vLLM connector' $(GRAPH_PYTEST) tests/vllm_integration

.PHONY: test-graph
test-graph: serve-ready build-member build-lab ## All tests of graphs: 2P2D, workers killed, pools full and lost, two models, NIXL (half an hour)
	$(STEP) 'pytest, graphs' $(GRAPH_PYTEST) tests/graph

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

.PHONY: test-nixl-kills
test-nixl-kills: build-plugin setup-nixl ## Peers killed and stopped at random points, ROUNDS times
	$(STEP) 'NIXL, $(ROUNDS) kills and stops' env NIXL_ROUNDS=$(ROUNDS) $(NIXL_PYTEST) tests/nixl/test_deaths.py

.PHONY: test-upstream-nixl
test-upstream-nixl: build-plugin setup-nixl ## The tests of the nixl-sys crate with our plugin in the place of UCX
	$(STEP) 'tests of nixl-sys' scripts/upstream-nixl

.PHONY: test-upstream-nixl-python
test-upstream-nixl-python: $(if $(NIXL_CHECKOUT),build-plugin setup-nixl) ## NIXL's own Python tests with our plugin and with UCX; NIXL_CHECKOUT=/path of a checkout of NIXL, NIXL_WHEEL=1.5.1
	$(if $(NIXL_CHECKOUT),$(STEP) "NIXL's Python tests" env PYTHONPATH=tests/nixl .venv/bin/python tests/nixl/upstream_suite.py \
		'$(NIXL_CHECKOUT)' $(NIXL_WHEEL:%=--wheel %),@echo "== NIXL's Python tests: SKIPPED, no test was run: name a checkout of NIXL with NIXL_CHECKOUT=")

.PHONY: test-member
test-member: build-member build ## Hosts whose slots are leased in etcd: leases that run out, an etcd that goes away
	$(STEP) 'clippy, cxl-member' env $(PROTOC_ENV) cargo clippy $(CARGO_FLAGS) -p cxl-member --all-targets -- -D warnings
	$(STEP) 'cargo test, cxl-member' env $(PROTOC_ENV) cargo test $(CARGO_FLAGS) -p cxl-member
	$(STEP) 'pytest, cxl-member' .venv/bin/python -m pytest -q tests/member

.PHONY: test-lab-itself
test-lab-itself: build-lab python-extension .venv/installed ## The lab's own parts, without virtual hosts (seconds)
	$(STEP) 'pytest, lab without virtual hosts' .venv/bin/python -m pytest -q tests/lab/test_lab_itself.py tests/lab/test_fork_server.py

.PHONY: test-lab
test-lab: lab python-extension build-plugin .venv/nixl-installed ## Virtual hosts with emulated CXL memory: pool, cache, locks and NIXL on real /dev/dax (8 minutes)
	$(STEP) 'pytest, lab' .venv/bin/python -m pytest -q tests/lab

.PHONY: test-lab-smoke
test-lab-smoke: lab python-extension ## Two hosts exchange blocks and survive three faults (a minute)
	$(STEP) 'pytest, two hosts' .venv/bin/python -m pytest -q -m smoke tests/lab

.PHONY: fmt
fmt: .venv/installed ## Format Rust, C and C++
	$(STEP) 'rustfmt' cargo fmt --all
	$(STEP) 'clang-format' scripts/clang-format write

.PHONY: check-aarch64
check-aarch64: ## Type-check for 64-bit ARM
	$(STEP) 'aarch64 check' scripts/aarch64 check

.PHONY: test-aarch64
test-aarch64: ## Link the tests for 64-bit ARM with zig, run them under qemu-user if there (optional)
	$(STEP) 'aarch64 tests' scripts/aarch64 test

# Continuous integration calls this: a machine that cannot have the lab passes, and says what it did not test.
.PHONY: test-lab-if-possible
test-lab-if-possible: ## The short tests of the lab where it can be set up; elsewhere the reason
	@if $(MAKE) --no-print-directory .venv/lab/ready; then $(MAKE) --no-print-directory test-lab-smoke; \
	else echo '   NOT TESTED: virtual hosts, because the lab cannot be set up here (see above)'; fi

## Long runs

.PHONY: nightly
nightly: ## SEEDS seeds per simulator scenario, long storms, fuzzing
	$(STEP) 'simulator, $(SEEDS) seeds' env SEEDS=$(SEEDS) cargo test $(CARGO_FLAGS) -p cxl-sim
	$(STEP) 'storms, $(STORM_SECONDS) s' env STORM_SECONDS=$(STORM_SECONDS) cargo test $(CARGO_FLAGS) $(SHIPPED)
	$(SOAK)
	$(STEP) 'fuzz targets' scripts/fuzz

.PHONY: soak
soak: ## The prefix cache under kills, stops and comings and goings for SOAK_SECONDS
	$(SOAK)

.PHONY: fuzz
fuzz: ## Every fuzz target for FUZZ_SECONDS
	$(STEP) 'fuzz targets' scripts/fuzz

## Performance: each prints ratios against a baseline of the same run; RECORD=1 appends them to perf/RESULTS.md

.PHONY: perf-line perf-lock perf-alloc perf-rpc
perf-line: ## Publish and fetch of one line
perf-lock: ## Lock: sticky, contended, handed over
perf-alloc: ## Allocator: blocks and chunks
perf-rpc: ## Calls between two processes
perf-line perf-lock perf-alloc perf-rpc: perf-%: build .venv/installed
	@$(RATIOS) perf-$* -- target/release/cxlctl bench $* --ratios

.PHONY: perf-copy
perf-copy: build .venv/installed ## Copies of payload: publish, pull, gather, sparse reads
	@$(RATIOS) perf-copy -- target/release/cxlctl bench copy --ratios

.PHONY: perf-pool
perf-pool: build .venv/nixl-installed ## Prefix cache: publish, pull and lookup beside bare loops and beside NIXL UCX
	@$(RATIOS) perf-pool --timeout-s 1800 -- target/release/cxlctl bench pool --ratios \
		--ucx '.venv/bin/python perf/ucx_peer.py'

.PHONY: perf-hit-rate
perf-hit-rate: build .venv/installed ## Hit rates of the eviction policies; writes perf/hit-rate.csv and .svg
	@$(RATIOS) perf-hit-rate -- target/release/cxlctl bench policies --ratios --write perf

.PHONY: perf-nixl
perf-nixl: build-plugin .venv/nixl-installed .venv/perf-installed ## NIXL transfers: CXL beside UCX and POSIX; writes perf/nixl.csv and .svg
	@$(RATIOS) perf-nixl --timeout-s 3600 -- .venv/bin/python perf/nixl_transfers.py --write perf

.PHONY: perf-routing
perf-routing: serve-ready ## Dynamo's round-robin and kv routers, with the pool and without: what prefill computes (a quarter of an hour)
	@$(RATIOS) perf-routing --timeout-s 7200 -- .venv/serve/bin/python perf/routing.py

.PHONY: perf-serve
perf-serve: serve-ready ## Dynamo graphs with CxlConnector, NixlConnector over the plugin and over UCX: bytes, transfer times, first tokens
	@$(RATIOS) perf-serve --timeout-s 7200 -- .venv/serve/bin/python perf/serve.py
