# Two commands for users: `make demo` and `make test`. Each makes its own .venv and installs what it needs.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
# The product with extras $(1): it is compiled while torch, the largest package, is unpacked, and then has its other packages
# installed. Modules are compiled when they are first imported: most of torch's never are.
COMMA := ,
INSTALL = $(PIP) install --no-compile -c constraints.txt 'torch==2.13.0' & $(PIP) install --no-deps -e .; built=$$?; \
	wait $$! && [ $$built = 0 ] && $(PIP) install --no-compile -c constraints.txt 'hybridindex[$(1)]'
# Spinning OpenMP threads make every measurement on a shared machine meaningless.
export OMP_WAIT_POLICY := PASSIVE
# Tests start many processes, and each would compile the product anew.
unexport PYTHONDONTWRITEBYTECODE
SOURCES := pyproject.toml CMakeLists.txt constraints.txt $(wildcard hybridindex/native/*/*)
SANITIZE := build/sanitize
FUZZ_SECONDS ?= 30
# Of make machine: how many, and which.
EXAMPLES ?= 500
SEED ?= 1
# Of make simulate: how long, and kills of real processes after that.
SECONDS ?= 600
KILLS ?= 500
# Worker processes: one a core, four at most. A worker that is done takes tests from the others; neighbours, which share
# fixtures, stay together.
PARALLEL := -n logical --maxprocesses=4 --dist=worksteal
# Rooms whose tests often need no folder: those tests are marked pure.
PURE := -m pure $(addprefix tests/packaging/,test_layout.py test_docs.py) $(addprefix tests/,partitioner plans refresh report router store tiers/contract)

.PHONY: help demo check test deep machine simulate test-vllm test-ecosystem environments environment-vllm environment-ecosystem chromium lint recipes wheel-check sanitize neon fuzz docs bench figures clean

help:
	@echo "make demo         real text, real queries: build, profile, plan, serve, report (build/demo)"
	@echo "make check        before a commit: ruff, mypy, the tests without I/O; a minute"
	@echo "make test         install into .venv and run the whole test suite in parallel; PYTEST_ARGS narrows it"
	@echo "make deep         the property tests with ten times the examples"
	@echo "make machine      a daemon under kills, lost stores and full disks: EXAMPLES=500 SEED=1; an hour"
	@echo "make simulate     changes of an index under kills, power cuts and a faulty disk: SECONDS=600 KILLS=500 SEED=1"
	@echo "make chromium     install the browser that tests of the page need, where this is root on Debian or Ubuntu"
	@echo "make test-vllm    beside a real vLLM on the CPU, in build/vllm (2.5 GB): plugins, profiling; or NOT VERIFIED"
	@echo "make test-ecosystem  stores and retrievers in LangChain, LlamaIndex and Haystack, in build/ecosystem (400 MB); or NOT VERIFIED"
	@echo "make lint         ruff and mypy"
	@echo "make wheel-check  build the wheel and the sdist, install the wheel elsewhere, import every module"
	@echo "make recipes      the Helm chart by helm, workflows and containers by their schemas; or NOT VERIFIED"
	@echo "make sanitize     tests of the native scan under address, undefined-behaviour and thread sanitizers"
	@echo "make neon         the native scan compiled for 64-bit Arm, in an emulator; or NOT VERIFIED"
	@echo "make fuzz         the native scan over malformed input, FUZZ_SECONDS=30"
	@echo "make docs         the documentation as a site (build/site); warnings are errors"
	@echo "make bench        the benchmarks that the documents quote, as one page (build/bench); hours. QUICK=1: ten minutes"
	@echo "make figures      the papers' figures beside ours (minutes): docs/images, benchmarks/results, and the texts that quote them"
	@echo "make clean        remove .venv and build"

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hybridindex needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.test: $(BIN)/python $(SOURCES)
	$(call INSTALL,device$(COMMA)test$(COMMA)lint)
	@touch $@

$(VENV)/.demo: $(BIN)/python $(SOURCES)
	$(call INSTALL,device$(COMMA)demo)
	@touch $@

demo: $(VENV)/.demo
	$(BIN)/hybridindex demo --output build/demo

test: $(VENV)/.test
	$(BIN)/python -m pytest $(PARALLEL) $(PYTEST_ARGS)

# The property tests alone, with ten times the examples. Hours rather than minutes.
deep: $(VENV)/.test
	$(BIN)/python -m pytest $(PARALLEL) -m hypothesis --hypothesis-profile=deep --timeout=7200 $(PYTEST_ARGS)

# The state machine over the daemon alone, and the faults that it must find.
machine: $(VENV)/.test
	HYBRIDINDEX_MACHINE=$(EXAMPLES) $(BIN)/python -m pytest -s --hypothesis-seed=$(SEED) tests/durability/machine $(PYTEST_ARGS)

# Writers, compaction, readers and kills, on a disk that loses and tears what was not synced; then kill -9 of processes.
simulate: $(VENV)/.test
	@mkdir -p build
	$(BIN)/python -m tests.simulation.changes --seconds $(SECONDS) --seed $(SEED) --json build/simulate.json
	$(BIN)/python -W ignore -m tests.durability.crasher --kills $(KILLS) --seed $(SEED) --json build/crasher.json

# Before a commit. Types are checked beside the tests: seconds where mypy ran before.
check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy & types=$$!; \
	$(BIN)/python -m pytest $(PARALLEL) --hypothesis-profile=quick $(PURE); status=$$?; \
	wait $$types && exit $$status

# Without a browser the tests of the page are skipped and say so: never a reason to fail here.
chromium:
	@if command -v chromium > /dev/null || command -v chromium-browser > /dev/null; then echo "chromium is there"; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null && { apt-get update -qq; \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; } > /dev/null 2>&1; \
	then echo "chromium was installed"; \
	else echo "no chromium, and it cannot be installed here: the tests of the page will be skipped"; fi

test-vllm:
	PYTHON=$(PYTHON) sh tests/vllm/run.sh build/vllm

# What test-vllm and test-ecosystem make themselves; with -j at the same time.
environments: environment-vllm environment-ecosystem

environment-vllm:
	ONLY_ENVIRONMENT=1 PYTHON=$(PYTHON) sh tests/vllm/run.sh build/vllm

environment-ecosystem:
	ONLY_ENVIRONMENT=1 PYTHON=$(PYTHON) sh tests/integrations/run.sh build/ecosystem

# Their packages bring many others: an environment of its own, so that the suite's stays what it is.
test-ecosystem:
	PYTHON=$(PYTHON) sh tests/integrations/run.sh build/ecosystem

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

wheel-check: $(BIN)/python
	PYTHON=$(abspath $(BIN))/python sh tests/packaging/check_wheel.sh

recipes: $(VENV)/.test
	PYTHON=$(abspath $(BIN))/python sh tests/packaging/recipes.sh build/recipes

sanitize: $(VENV)/.test
	PARALLEL="$(PARALLEL)" PYTHON=$(abspath $(BIN))/python sh tests/native/sanitize.sh $(SANITIZE)

# No Python: it needs a cross compiler and an emulator, and installs neither.
neon:
	sh tests/native/neon.sh build/neon

fuzz: $(VENV)/.test
	PYTHON=$(abspath $(BIN))/python sh tests/native/fuzz.sh $(SANITIZE) address,undefined --seconds $(FUZZ_SECONDS)

# Warnings are errors.
docs: $(VENV)/.test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

# Peers take part as far as they install.
bench: $(VENV)/.test
	-$(PIP) install -c constraints.txt -e '.[rivals]'
	$(BIN)/python -m benchmarks.all $(if $(QUICK),--quick --output build/bench-quick,--output build/bench)

figures: $(VENV)/.test
	$(BIN)/python -m benchmarks.papers.figures --plot docs/images --json benchmarks/results/figures.json
	$(BIN)/python -m benchmarks.texts

clean:
	rm -rf $(VENV) build
