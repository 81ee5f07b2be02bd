# make quickstart   train on every 2013 flight from New York, on a Spark cluster of two processes
# make test         the tests, but for what has a session of its own
# make test-gate    these, and what has a session of its own and is the only test of a fault
# make test-nightly all tests, with new examples of what hypothesis draws
# make test-sparks  tests so marked with the oldest Spark that is supported, which it installs, or with VERSIONS=
# make test-versions  the same with each Spark, clients of each, and what can be tried of each Python; writes docs/versions.md
# make test-times   seconds and lines of tests by folder, by the report of a run of CI (or TIMES=)
# make test-guests  programs written for Lightning, accelerate and Transformers, which it installs
# make models-table write the tables of tests/estimator/what_happens.md anew, by fitting every row
# make notebooks    run the notebooks of examples/, and store what they show
# make bench-before BEFORE=<commit>   rounds, throughput, feed and start-up, beside those of a commit
# make storms       trainings under a hundred random faults; as root, also of whole hosts
# make lint         ruff and mypy
# make docs         the site, in build/site/index.html
# make dist         the sdist and the wheel, in dist/
# make wheel-test   build a wheel, and run the README's notebook lines with it in an environment of its own

PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
MASTER ?= local-cluster[2,1,2048]
# Of two processes one has the Spark session, and its tests; PARALLEL= is for one.
PARALLEL ?= -n 2 --dist loadgroup
# What python runs the tests with; .ci/run has one that runs again what failed.
PYTEST ?= -m pytest

# Sparks that `make test-sparks` tries.
VERSIONS ?= 3.5

TIMES ?= build/ci/tests.xml

.PHONY: quickstart test test-gate test-times test-nightly test-sparks test-versions test-guests models-table notebooks bench-before storms lint docs dist wheel-test java clean

quickstart: java $(VENV)/installed-jobs
	$(BIN)/python jobs/train.py --config conf/flights.yaml --session.master '$(MASTER)'

# Spark's JVMs live for minutes here, too short for the optimizing compiler to pay.
test test-gate test-nightly test-guests: export JDK_JAVA_OPTIONS ?= -XX:TieredStopAtLevel=1 -XX:+UseSerialGC
test: java $(VENV)/installed-test
	$(BIN)/python $(PYTEST) $(PARALLEL) -m "not gate and not nightly" $(ARGS)

test-gate: java $(VENV)/installed-test
	$(BIN)/python $(PYTEST) $(PARALLEL) -m "not nightly" $(ARGS)

test-nightly: java $(VENV)/installed-test $(VENV)/installed-guests
	$(BIN)/python -m pytest $(PARALLEL) --hypothesis-profile=nightly $(ARGS)

test-sparks: java $(VENV)/installed-test
	PYTEST="$(PYTEST)" $(BIN)/python .ci/versions.py spark $(VERSIONS) -- $(PARALLEL) $(ARGS)

test-versions: java $(VENV)/installed-test
	$(BIN)/python .ci/versions.py --write python 3.10 3.11 3.12 3.13
	$(BIN)/python .ci/versions.py --write spark 3.5 4.0 4.1 4.2 4.3 -- $(PARALLEL)
	$(BIN)/python .ci/versions.py --write client 4.0 4.1 4.2 4.3 -- $(PARALLEL)

test-times:
	$(BIN)/python .ci/test_times.py $(TIMES)

test-guests: java $(VENV)/installed-guests
	$(BIN)/python $(PYTEST) --timeout=600 tests/guests $(ARGS)

models-table: java $(VENV)/installed-test
	REWRITE_MODELS_TABLE=1 $(BIN)/python -m pytest tests/estimator/test_table.py $(ARGS)

notebooks: java $(VENV)/installed-test
	REWRITE_NOTEBOOKS=1 $(BIN)/python -m pytest tests/docs/test_notebooks.py $(ARGS)

# In one environment, both checkouts in turns; prints by how much each ratio to a peer is worse now.
bench-before: java $(VENV)/installed-test
	@test -n "$(BEFORE)" || { echo "say which commit: make bench-before BEFORE=<commit>"; exit 1; }
	$(BIN)/python benchmarks/run.py "rounds gloo" "rounds scale" throughput "feed overhead" "startup jobs" --against $(BEFORE) $(ARGS)

storms: java $(VENV)/installed-test
	$(BIN)/python -m pytest -s tests/storms $(ARGS)

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/installed-docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going -q -b html docs build/site

dist: $(VENV)/installed-release
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

wheel-test: java $(VENV)/installed-test
	$(BIN)/python -m pytest tests/docs/test_wheel.py $(ARGS)

java:
	@test -x "$$JAVA_HOME/bin/java" || command -v java >/dev/null || { \
	  echo "Spark needs Java 17 or 21, and there is none on PATH nor in JAVA_HOME. Install it:"; \
	  echo "  Debian, Ubuntu   sudo apt-get install openjdk-17-jre-headless"; \
	  echo "  Fedora, RHEL     sudo dnf install java-17-openjdk-headless"; \
	  echo "  macOS            brew install openjdk@17"; \
	  echo "  conda            conda install openjdk=17"; \
	  exit 1; }

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "$(PYTHON) is not on PATH. Install Python 3.11, or name yours: make PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed-%: pyproject.toml setup.cfg conf/constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c conf/constraints.txt -e ".[$(extras-$*)]"
	@touch $@

extras-jobs := spark,jobs,flights
extras-test := spark,jobs,test,examples
extras-docs := spark,docs
extras-release := release
extras-guests := spark,jobs,test,guests

clean:
	rm -rf $(VENV) output build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
