# The course's commands. README.md gives the plain pip and torchrun commands behind them.
#   make test-all                    every case, not a selection
#   make test PYTHON=python3.12      with another Python (3.10 or newer)
#   make check EXERCISE=ring_shift   one exercise; CHAPTER=01_intro for those of a chapter
#   make test VENV=/path/to/venv     in a virtual environment of your own

PYTHON ?= python3
VENV ?= .venv
CHAPTER ?=
EXERCISE ?=
BIN := $(abspath $(VENV))/bin
INSTALLED := $(VENV)/.installed
SITE_INSTALLED := $(VENV)/.installed-site
ENGINES := $(VENV)/.installed-engines
NOTEBOOKS := distributed_training.ipynb $(sort $(wildcard 0*/*.ipynb))

# Ranks share the cores: one thread each. And what a recipe or a notebook starts comes from the environment.
export OMP_NUM_THREADS := 1
# What hundreds of programs and workers import is compiled once.
unexport PYTHONDONTWRITEBYTECODE
export PATH := $(BIN):$(PATH)

.PHONY: train test test-all lint test-python test-notebooks test-engines coverage facts lab notebooks doctor check soak \
	soak-faults cluster-test mutate site site-check bench bench-engines clean

train: $(INSTALLED)
	torchrun --nproc_per_node=2 distributed_training.py --distributed --sample 300

test: lint test-python test-notebooks

# The same with every case in place of those that cover each pair of factors: for every week, and before a release.
test-all: export FULL := 1
test-all: test
.NOTPARALLEL: # each of the three keeps two cores busy

lint: $(INSTALLED)
	ruff check .
	ruff format --check .
	mypy

# Four workers on two cores, since some of them often wait: for a rank that has been killed to be missed, for a timeout.
test-python: $(INSTALLED)
	python -m pytest -p no:nbval -n 4 --dist loadgroup tests

# A notebook stays on one worker (loadscope) and ends at its first failing cell (conftest.py). Without names
# pytest would take the tests instead. conftest.py has measured numbers masked before outputs are compared.
test-notebooks: $(INSTALLED)
	@test -n "$(NOTEBOOKS)" || { echo "there are no notebooks"; exit 1; }
	python -m pytest -n 4 --dist loadscope --nbval --nbval-current-env --nbval-cell-timeout 120 $(NOTEBOOKS)

# Which lines the tests run, in ranks and programs that they start as well.
coverage: $(INSTALLED)
	coverage erase
	coverage run -m pytest -p no:nbval -n 4 --dist loadgroup tests
	coverage combine -q
	coverage report

# Accelerate, Fabric, DeepSpeed, the Trainer, QLoRA: with the packages of requirements-engines.txt.
test-engines: $(ENGINES)
	python -m pytest -n 2 tests/strategies/test_engines.py
	python -m tools.read_back  # what `python -m planner emit` writes

# JupyterLab runs the scripts of stored flipbooks in trusted notebooks only, and by default opens README.md as source.
# A notebook given as an argument would make its chapter the server's root folder, and the rest of the course unseen.
lab: $(INSTALLED)
	@jupyter trust $(NOTEBOOKS) > /dev/null
	@install -D -m 644 docs/jupyterlab.json $(VENV)/share/jupyter/lab/settings/overrides.json
	jupyter lab --LabApp.default_url=/lab/tree/01_intro/01_two_processes.ipynb

# Write what pages repeat from code and data: tables, counts, hours.
facts: $(INSTALLED)
	python -m tools.facts

# Run every notebook and store what it puts out.
notebooks: $(INSTALLED)
	jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.timeout=120 \
		--ExecutePreprocessor.record_timing=False $(NOTEBOOKS)

doctor: $(INSTALLED)
	python -m common.doctor

check: $(INSTALLED)
	@python -m common.check $(CHAPTER) $(EXERCISE) || [ $$? -eq 1 ]  # 1: not all is right yet, which is no error of make

soak: $(INSTALLED)
	python tools/soak.py

# Kill, stop and starve runs at random moments, and compare what comes out with undisturbed runs.
soak-faults: $(INSTALLED)
	python tools/soak_faults.py

# Change one thing in the code at a time, and see whether a test refuses it; the scores go into docs/mutation.md.
mutate: $(INSTALLED)
	python -m tools.mutate --sample 200 --seed $$(date +%Y%V) --write

# Two hosts with a slow link, and a SLURM cluster, on this machine: Linux, root, iproute2, slurm-wlm and munge.
cluster-test: $(INSTALLED)
	python tools/cluster_network.py
	python tools/cluster_slurm.py

# The course as a site, from the committed pages, without running them.
site: $(SITE_INSTALLED)
	sphinx-build -E -W -q -d .doctrees -c docs/site . _site
	python -m tools.site_runtime _site
	@echo "the site: _site/index.html"

site-check: site
	python -m tools.site_check _site

$(SITE_INSTALLED): $(INSTALLED) requirements-site.txt
	$(BIN)/python -m pip install -r requirements-site.txt
	@touch $@

# Each figure beside that of the last release (tools/bench.csv, which `python tools/bench.py --release` writes).
bench: $(INSTALLED)
	python tools/bench.py

# What 06_fsdp/07_engines.ipynb shows: a step of each engine against one of PyTorch's.
bench-engines: $(ENGINES)
	python tools/bench_engines.py

$(ENGINES): requirements-engines.txt $(INSTALLED)
	$(BIN)/python -m pip install -r requirements-engines.txt
	@touch $@

$(INSTALLED): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("needs Python 3.10 or newer: make PYTHON=..." if sys.version_info < (3, 10) else 0)'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -r requirements.txt
	@touch $@

# Runs stay: they are yours.
clean:
	rm -rf .venv build _site .doctrees *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +
