# make demo: pre-train, transfer, report. make test: the quick tests.
# make study: the paper in miniature; benchmarks/notes/study.md has its results.

PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python -m
DEMO = runs/demo

.PHONY: demo study own-images weights-table check-plans faults mutants test test-all test-nightly test-newest lint wheel test-wheel clean

# Each of the three installs all by itself, so that a new environment, as that of
# .ci/run, needs one pass of pip. pip knows dependency groups since 25.1, which
# is later than Python 3.11's own.
$(VENV)/pip: pyproject.toml setup.py
	$(PYTHON) -c 'import sys; v = sys.version_info; (3, 11) <= v < (3, 15) or sys.exit("got Python %d.%d, expected 3.11 to 3.14; choose one with: make PYTHON=python3.12" % v[:2])'
	@echo "Installs jax, TensorFlow and more into $(VENV): 2.6 GB, a minute or several."
	$(PYTHON) -m venv $(VENV)
	$(RUN) pip install --quiet --upgrade 'pip>=25.1'
	touch $@

$(VENV)/installed: $(VENV)/pip
	$(RUN) pip install --quiet --editable '.[train]'
	touch $@

$(VENV)/installed-test: $(VENV)/pip
	$(RUN) pip install --quiet --editable '.[train,serve]' --group test
	touch $(VENV)/installed $@

$(VENV)/installed-parity: $(VENV)/pip
	$(RUN) pip install --quiet --editable '.[train,serve,onnx,trackers]' --group test --group parity
	touch $(VENV)/installed $(VENV)/installed-test $@

$(VENV)/installed-tpu: $(VENV)/installed-parity
	$(RUN) pip install --quiet --editable '.[train,tpu]'
	touch $@

demo: $(VENV)/installed
	rm -rf $(DEMO)
	mkdir -p $(DEMO)
	date +%s > $(DEMO)/started
	$(VENV)/bin/vit-jax train --config=glyphs --workdir=$(DEMO)/pretrain
	$(VENV)/bin/vit-jax train --config=digits_finetune:init=$(DEMO)/pretrain --workdir=$(DEMO)/finetune
	$(VENV)/bin/vit-jax train --config=digits_finetune --workdir=$(DEMO)/scratch
	$(VENV)/bin/vit-jax report $(DEMO)
	$(VENV)/bin/python benchmarks/demo_summary.py $(DEMO)

# Goes on where it was stopped: what has a line in docs/study.jsonl is not run.
study: $(VENV)/installed
	$(VENV)/bin/python benchmarks/study.py
	$(VENV)/bin/python benchmarks/study_report.py

# With PYTHONDONTWRITEBYTECODE all of TensorFlow is compiled for every run, since
# jaxtyping has names of its own for the bytecode of what our modules import.
test: $(VENV)/installed-test
	env -u PYTHONDONTWRITEBYTECODE $(RUN) pytest -n 2 --durations=10

# Compiled faster than for users (tests/conftest.py); test-nightly compiles all as
# for users. It also checks the array shapes in all signatures, which takes a
# fifth longer; here two files do.
SHAPES = --jaxtyping-packages=vit_jax,beartype.beartype

test-all: $(VENV)/installed-parity
	env -u PYTHONDONTWRITEBYTECODE $(RUN) pytest -q -n 0 $(SHAPES) tests/test_experiment.py tests/models/test_layers.py
	env -u PYTHONDONTWRITEBYTECODE $(RUN) pytest -n 2 --durations=30 -m "not nightly"

# All tests but most of `make faults`; among them those that run the
# documentation, and those that libtpu compiles.
test-nightly: $(VENV)/installed-tpu
	env -u PYTHONDONTWRITEBYTECODE TEST_WHAT_USERS_RUN=1 $(RUN) pytest -n 2 $(SHAPES) -m "not faults or not nightly" -o faulthandler_timeout=5400

# The quick tests with the newest jax, flax, optax and Orbax, also those that
# pyproject.toml does not allow yet. Our calls of deprecated functions fail.
test-newest:
	$(PYTHON) -m venv $(VENV)-newest
	$(VENV)-newest/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(VENV)-newest/bin/python -m pip install --quiet --editable '.[train,serve]' --group test
	$(VENV)-newest/bin/python -m pip install --quiet --upgrade --pre jax jaxlib flax optax orbax-checkpoint
	env -u PYTHONDONTWRITEBYTECODE $(VENV)-newest/bin/python -m pytest -n 2

# Goes on where it was stopped: what has a line in docs/own_images.jsonl is not
# run. Starts from the model of `make demo`.
own-images: $(VENV)/installed-test
	$(RUN) pip install --quiet --group own-images
	$(VENV)/bin/python benchmarks/own_images.py $(DEMO)/pretrain

# Compares weights of timm, transformers, Meta and OpenCLIP, in and out: the table
# of docs/weights.md.
weights-table: $(VENV)/installed-parity
	PYTHONPATH=tests $(VENV)/bin/python tests/weights/weights_table.py

# Prices twenty recipes on TPU slices, with the versions of docs/plans.jsonl, and
# fails if one became slower by estimate. Takes an hour of a core.
check-plans:
	$(PYTHON) -m venv $(VENV)-plans
	$(VENV)-plans/bin/python -m pip install --quiet --editable '.[tpu]' jax==0.12.0.1 libtpu==0.0.50.1
	$(VENV)-plans/bin/python benchmarks/plans.py --check

# Kills, hangs and damages runs on purpose; benchmarks/notes/reliability_trials.md
# has the last figures.
# Goes on where it was stopped: what has a line for this code is not run.
faults: $(VENV)/installed-test
	env -u PYTHONDONTWRITEBYTECODE $(RUN) pytest -n 2 --dist=load -m faults -o faulthandler_timeout=1500

# Changes a line of the package at a time, and fails if no quick test notices.
mutants: $(VENV)/installed-test
	$(VENV)/bin/python tests/mutants.py

lint: $(VENV)/installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

wheel: $(VENV)/installed-test
	rm -rf build dist
	$(RUN) build

# In an environment of its own, with what the wheel asks for to train: 2.6 GB.
test-wheel: wheel
	rm -rf $(VENV)-wheel
	$(PYTHON) -m venv $(VENV)-wheel
	$(VENV)-wheel/bin/python -m pip install --quiet "$$(echo dist/*.whl)[train]"
	$(VENV)-wheel/bin/python -I tests/check_wheel.py

clean:
	rm -rf $(VENV) $(VENV)-wheel $(VENV)-plans $(VENV)-newest $(DEMO) build dist
