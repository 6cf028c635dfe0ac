# Two commands do everything on a machine with Python 3.11, make and git:
#   make reproduce   installs, runs the main job on embedded data, ends with a page to open
#   make test        installs, checks style and types, runs the tests

PYTHON ?= $(shell command -v python3.11 || command -v python3)
STAMP := .venv/.installed
OUT ?= out
TEST_WORKERS ?= 2
export OMP_NUM_THREADS ?= 1

.PHONY: test reproduce lint clean
.DEFAULT_GOAL := test

# The stamp is removed before and written after an installation, so a .venv without one is a
# half-made one: it is thrown away and made again.
$(STAMP): pyproject.toml constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "fasterqk needs Python 3.11 or newer; set PYTHON=/path/to/python" >&2; exit 1; }
	@test -f $(STAMP) || rm -rf .venv
	@test -x .venv/bin/python || "$(PYTHON)" -m venv .venv
	@rm -f $(STAMP)
	@echo "installing into .venv (a few minutes the first time)"
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt torch
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[hf,cluster,dev]'
	@touch $(STAMP)

lint: $(STAMP)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

test: lint
	@sh tools/ensure_chromium.sh
	.venv/bin/python -m pytest --numprocesses $(TEST_WORKERS) --dist loadfile

reproduce: $(STAMP)
	.venv/bin/fasterqk reproduce all --out "$(OUT)"

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache "$(OUT)"
