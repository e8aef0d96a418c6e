# planroom: `make demo` and `make test` set up everything they need.
#
# Needed beforehand: make, and Python 3.11 or later with its venv module. The first run installs
# the exact packages of requirements.lock into .venv; later runs need no network.

.DEFAULT_GOAL := help
SHELL := /bin/sh
BIN := .venv/bin

# The first Python on the PATH that is new enough. PYTHON=… names another.
PYTHON ?= $(shell for name in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	"$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& command -v "$$name" && break; done)

# The demo has a database of its own, made anew each time. Root's runs as another user, who cannot
# enter a checkout in root's private folders, so it lies where system services keep theirs.
DEMO := build/demo
DEMO_HOME := $(if $(filter 0,$(shell id -u)),/var/lib/planroom-demo$(subst /,-,$(CURDIR)),$(CURDIR)/$(DEMO)/home)
DEMO_SETTINGS := env -u PLANROOM_DATABASE_URL PLANROOM_HOME="$(DEMO_HOME)"

define planroom
@printf '\n$$ planroom %s\n' '$(1)'
@$(DEMO_SETTINGS) $(BIN)/planroom $(1)
endef

.PHONY: help
help: ## Say what there is
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

.PHONY: demo
demo: .venv/installed undemo ## Index a made-up set of 24 sheets and search it
	@mkdir -p $(DEMO)
	$(BIN)/python fixtures/make_drawing_set.py $(DEMO)/riverside.pdf --sheets 24
	$(call planroom,index $(DEMO)/riverside.pdf)
	$(call planroom,search "capacity of the grease interceptor" -k 3)
	$(call planroom,search "which rooms get epoxy terrazzo" -k 3)
	$(call planroom,search "a101" -k 3)
	@printf '\nThis database goes on under %s. Ask it more:\n' "$(DEMO_HOME)"
	@printf '  PLANROOM_HOME=%s $(BIN)/planroom search "…"\n' "$(DEMO_HOME)"
	@printf '  PLANROOM_HOME=%s $(BIN)/planroom status\n' "$(DEMO_HOME)"
	@printf 'Index sets of your own with: $(BIN)/planroom index PATH…    `make clean` ends the demo.\n'

.PHONY: test
test: .venv/installed ## Lint, check the types, and run the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/python -m pytest -m "not slow"

.PHONY: slow
slow: .venv/installed ## Run the long tests: crashes, the corpus, an installation from nothing
	$(BIN)/python -m pytest -m slow

.PHONY: bench
bench: .venv/installed ## Run the benchmarks on a made-up set (see benchmarks/README.md)
	@mkdir -p build
	$(BIN)/python fixtures/make_drawing_set.py build/bench.pdf --sheets 120 --paths 20000
	$(BIN)/python benchmarks/reading.py build/bench.pdf
	$(BIN)/python benchmarks/writing.py
	$(BIN)/python benchmarks/end_to_end.py build/bench.pdf
	$(BIN)/python benchmarks/claim.py --quick
	$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[plot]'
	$(BIN)/python benchmarks/resume_after_kill.py build/bench.pdf

.PHONY: setup
setup: .venv/installed ## Only install into .venv

.venv/installed: pyproject.toml requirements.lock
	@test -n "$(PYTHON)" || { \
		echo "planroom needs Python 3.11 or later, and none is on the PATH." >&2; exit 1; }
	@$(BIN)/python -c "import pip" 2>/dev/null || $(PYTHON) -m venv --clear .venv >/dev/null || { \
		echo "$(PYTHON) cannot make virtual environments: its venv module is missing." >&2; \
		echo "On Debian and Ubuntu it is a package: apt install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install -qq --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

.PHONY: lock
lock: ## Write requirements.lock anew from pyproject.toml (needs the network)
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install -qq --disable-pip-version-check uv
	build/lock/bin/uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 \
		--upgrade --generate-hashes --no-annotate --no-header --no-emit-index-url --no-config \
		--quiet --output-file requirements.lock

.PHONY: undemo
undemo:
	@if [ -d "$(DEMO_HOME)" ]; then $(BIN)/python -c \
		'import sys; from pathlib import Path; from planroom import embedded; \
		embedded.stop(Path(sys.argv[1]))' "$(DEMO_HOME)" && rm -rf "$(DEMO_HOME)"; fi

.PHONY: clean
clean: undemo ## Stop the demo's database and remove what was built
	rm -rf build dist .ruff_cache .hypothesis
