# make demo            train on this machine: no Slurm, no network beyond the package index
# make test            install what the tests need and run those that a commit must pass
# make test-long       the rest: every signal of the first seconds, repeated and slow faults
# make test-beside SUITE=trixie   the tests of tests/slurm, long ones too, beside the Slurm of a Debian suite: trixie (24.11), forky (it moves
#                      on, the release is printed first); root and apt-get, 500 MB in $(TREE), which is kept
# make drill           a Slurm on this machine, and the fire drill on it: every fault once, 5 to 8 minutes
# make lint            formatting, lint rules, types
#
# TORCH_INDEX          index of another torch build, such as the small CPU one (see README)
# PYTHON               interpreter that makes .venv

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_FLAGS := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
SLURM_PACKAGES := slurmctld slurmd slurm-client munge slurmdbd mariadb-server-core mariadb-client-core iproute2 strace
TREE ?= /var/tmp/debian-$(SUITE)

.PHONY: demo test test-long test-beside drill lint slurm clean

demo: $(VENV)/installed
	$(BIN)/python -m cluster.submit configs/local.yaml

test: $(VENV)/installed-dev slurm
	$(BIN)/python -m pytest -m "not long" $(PYTEST_FLAGS)

test-long: $(VENV)/installed-dev slurm
	$(BIN)/python -m pytest -m long $(PYTEST_FLAGS)

test-beside: $(VENV)/installed-dev
	@if [ -z "$(SUITE)" ]; then echo "SUITE is not set: make test-beside SUITE=trixie, or SUITE=forky"; exit 2; fi
	tests/slurm/beside_debian.sh $(SUITE) $(TREE) $(BIN)/python -m pytest -m "long or not long" tests/slurm $(PYTEST_FLAGS)

drill: $(VENV)/installed slurm
	@set -e; python="$$PWD/$(BIN)/python"; folder=$$(mktemp -d /tmp/drill-XXXXXX); \
	trap '$$python -m cluster.sandbox down --dir $$folder/s; rmdir $$folder' EXIT; \
	$$python -m cluster.sandbox up --dir $$folder/s; eval "$$($$python -m cluster.sandbox env --dir $$folder/s)"; \
	$$python -m cluster.drill configs/drill.yaml $(DRILL_FLAGS)

lint: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Slurm for the tests, where this user may install packages; elsewhere the tests that need it say that they are skipped.
slurm:
	@if PATH="$$PATH:/usr/sbin" command -v slurmctld >/dev/null && PATH="$$PATH:/usr/sbin" command -v mariadbd >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $(SLURM_PACKAGES); \
	else \
		echo "no Slurm, or no accounting, here and no right to install it: tests under tests/slurm will be skipped"; \
	fi

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install -q $(PIP_FLAGS) -e .
	touch $@

$(VENV)/installed-dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install -q $(PIP_FLAGS) -e ".[dev]"
	touch $@ $(VENV)/installed

clean:
	rm -rf $(VENV)
