# Two commands do everything on a machine with Python 3.11, make and git:
#   make reproduce   installs, makes the paper (figures 2 to 4, HateXplain, agreement), ends with a page to open
#   make test        installs, checks style and types, runs the tests

PYTHON ?= $(shell command -v python3.11 || command -v python3)
STAMP := .venv/.installed
OUT ?= out
TEST_WORKERS ?= 2
export OMP_NUM_THREADS ?= 1
# Without bytecode every worker compiles all tests again, and every interpreter that a test starts the package.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: test test-fast test-cluster test-peers crash lines reproduce docs dist lint clean
.DEFAULT_GOAL := test

# `make reproduce` needs the lab alone; everything else also what is tested with. While an installation runs,
# .venv/.installing stands; if it is found at the start, the last one was interrupted and .venv is made anew.
# A stamp is written at the end.
LAB := .venv/.lab
INSTALL := .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

$(LAB): pyproject.toml lab/pyproject.toml constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "fasterqk needs Python 3.11 or newer; set PYTHON=/path/to/python" >&2; exit 1; }
	@test ! -f .venv/.installing || rm -rf .venv
	@mkdir -p .venv && touch .venv/.installing
	@test -x .venv/bin/python || "$(PYTHON)" -m venv .venv
	@echo "installing into .venv (a few minutes the first time)"
	@$(INSTALL) torch
	@$(INSTALL) --editable . --editable ./lab
	@rm .venv/.installing && touch $@

$(STAMP): $(LAB)
	@touch .venv/.installing
	@echo "installing what the tests need"
	@$(INSTALL) --editable '.[hf,theory,dev]' --editable './lab[cluster,tensorboard]'
	@rm .venv/.installing && touch $@

lint: $(STAMP)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/python -m pytest --quiet tests/test_layers.py

# What lint has run already.
LINTED := --ignore tests/test_layers.py

test: lint
	@sh tools/ensure_chromium.sh
	.venv/bin/python -m pytest --numprocesses $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder $(LINTED)

# Without the tests marked slow.
test-fast: lint
	@sh tools/ensure_chromium.sh
	.venv/bin/python -m pytest --numprocesses $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder $(LINTED) -m "not slow"

# Real sweeps killed a hundred times at random moments, and other faults: some minutes.
crash: $(STAMP)
	.venv/bin/python -m lab.tests.crash --kills 100

# Command lines over all commands and options, with hostile values: half an hour.
lines: $(STAMP)
	.venv/bin/python -m lab.tests.crash.lines

# A real Ray cluster of two workers, one of them killed: a minute or two.
test-cluster: $(STAMP)
	.venv/bin/python -m pytest lab/tests/cluster/two_workers.py

# Our numbers and labels beside those of packages that are not installed for `make test`: some minutes, and
# three environments of their own, because the packages contradict each other.
.venv-%/.installed: pyproject.toml lab/pyproject.toml constraints.txt
	@test ! -d .venv-$* || rm -rf .venv-$*
	@"$(PYTHON)" -m venv .venv-$*
	@echo "installing into .venv-$*"
	@.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt torch
	@.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[hf,theory,dev,$*]' --editable ./lab
	@touch $@

test-peers: .venv-peers/.installed .venv-lens/.installed .venv-vision/.installed
	.venv-peers/bin/python -m pytest tests/peers
	.venv-lens/bin/python -m pytest tests/peers
	.venv-vision/bin/python -m pytest tests/peers

# The site, from docs/ and docstrings, into site/: opens from disk, loads nothing from elsewhere.
.venv-docs/.installed: pyproject.toml constraints.txt
	@"$(PYTHON)" -m venv --clear .venv-docs
	@.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		$$("$(PYTHON)" tools/extras.py docs)
	@touch $@

docs: .venv-docs/.installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet
	@echo "open site/index.html"

# Wheels and sources of both packages into dist/, checked, and installed into an environment of their own.
dist:
	@"$(PYTHON)" -m venv --clear .venv-dist
	@.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt build twine
	@rm -rf dist
	.venv-dist/bin/python -m build --outdir dist .
	.venv-dist/bin/python -m build --outdir dist lab
	.venv-dist/bin/python -m twine check --strict dist/*
	@.venv-dist/bin/python tools/wheels.py dist
	@"$(PYTHON)" -m venv --clear .venv-dist
	@.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	@.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		pytest pytest-timeout "$$(ls dist/fasterqk-*.whl)[hf,theory]"
	.venv-dist/bin/python -m pytest --quiet tests/docs/test_readme.py

reproduce: $(LAB)
	.venv/bin/fasterqk-lab reproduce all --out "$(OUT)"

clean:
	rm -rf .venv .venv-* site dist .mypy_cache .ruff_cache .pytest_cache "$(OUT)"
