# gptscale from a clone: `make demo` shows what it does, `make test` proves it. Both set up an environment of their own.
VENV ?= .venv
PYTHON ?= python3
# The one place that says which Pythons do is setup.cfg.
PYTHONS = $(shell sed -n 's/^python_requires = //p' setup.cfg)
PYTHON_FITS = import re, sys; low, end = (tuple(map(int, v.split("."))) for v in re.findall(r"3\.\d+", sys.argv[1])); \
	sys.exit(not low <= sys.version_info < end)
STAMP = $(VENV)/.gptscale-pins-$(shell sha256sum < constraints/main.txt | cut -c1-16)
# An environment kept elsewhere may have served another checkout, or other packages: the editable install must be of this one.
CHECKOUT_KEY = $(shell pwd | cat - setup.cfg | sha256sum | cut -c1-16)
CHECKOUT = $(VENV)/.gptscale-checkout-$(CHECKOUT_KEY)
BIN = $(VENV)/bin
# Through python: the script pip names its interpreter by a path, which an environment that was moved no longer has.
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check
# From a checkout the operators are compiled by `prepare`, into a cache that the next checkout finds again.
export GPTSCALE_SKIP_KERNELS = 1
# Colossal-AI wants an older torch and an older transformers: an environment of its own, which gptscale finds by its name.
COLOSSALAI = $(VENV)-colossalai
COLOSSALAI_STAMP = $(COLOSSALAI)/.gptscale-pins-$(shell sha256sum < constraints/colossalai.txt | cut -c1-16)
COLOSSALAI_CHECKOUT = $(COLOSSALAI)/.gptscale-checkout-$(CHECKOUT_KEY)
COLOSSALAI_PIP = $(COLOSSALAI)/bin/python -m pip install --quiet --disable-pip-version-check
# A locked file is the whole truth, and newest means newest: no constraint of the user's own pip applies.
export PIP_CONSTRAINT = /dev/null
# uv writes and installs the locked files, in a third of pip's time. Environments share the files in its cache, ~/.cache/uv.
UV = build/uv/bin/uv
# Nothing is installed but what has a hash in the locked file. Packages that come as sources and build against torch, which must be
# there before them, have none as a wheel, so they come second.
LOCKED = --quiet --no-deps --require-hashes --no-build-isolation $(addprefix --default-index ,$(INDEX))
# uv does not read pip's configuration, which may name another index.
INDEX = $(or $(PIP_INDEX_URL),$(shell $(PYTHON) -m pip config get global.index-url 2>/dev/null))
WHEELS = awk '/^[^ ]/ { wheel = !/^(deepspeed|fairscale|colossalai|contexttimer)==/ } wheel'

# The newest of everything, past the bounds of setup.cfg: each call brings it up to date.
NEWEST = $(VENV)-newest
NEWEST_UV = $(UV) pip install --quiet --upgrade --python $(NEWEST) $(addprefix --default-index ,$(INDEX))

# The folders that are the package, and those that are run from the checkout.
ROOMS = common foresight launchers lenet ops recipes results
OUTSIDE = benchmarks tools

DEMO = --model tiny --data stdlib --steps 100 --lr 5e-4 --warmup-steps 10 --out demo

RECIPES ?= all

.DEFAULT_GOAL := help
.PHONY: help python-fits venv colossalai pins prepare demo report test quick newest lint types bench-check mutate site clean

help:  ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

venv: $(CHECKOUT)  ## the environment, in .venv (about 5 GB; a few minutes the first time)

python-fits:
	@$(PYTHON) -c '$(PYTHON_FITS)' '$(PYTHONS)' \
		|| { echo "gptscale: Python $(PYTHONS) is needed: make PYTHON=python3.11 ..."; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null \
		|| { echo "gptscale: the venv module is missing: apt-get install python3-venv"; exit 2; }

$(STAMP): | $(UV)
	@echo "setting up $(VENV): PyTorch and what the tests need, about 5 GB, a few minutes"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(WHEELS) constraints/main.txt | $(UV) pip install --python $(VENV) --only-binary :all: $(LOCKED) -r -
	@$(UV) pip install --python $(VENV) $(LOCKED) -r constraints/main.txt
	@rm -f $(VENV)/.gptscale-*
	@touch $@

$(CHECKOUT): $(STAMP)
	@$(PIP) --no-deps --no-build-isolation -e .
	@rm -f $(VENV)/.gptscale-checkout-*
	@touch $@

colossalai: $(COLOSSALAI_CHECKOUT)  ## Colossal-AI's environment, in .venv-colossalai (about 6 GB; a few minutes the first time)

$(COLOSSALAI_STAMP): | $(UV)
	@echo "setting up $(COLOSSALAI): Colossal-AI and its PyTorch, about 6 GB, a few minutes"
	@$(PYTHON) -m venv --clear $(COLOSSALAI)
	@$(WHEELS) constraints/colossalai.txt | $(UV) pip install --python $(COLOSSALAI) --only-binary :all: $(LOCKED) -r -
	@$(UV) pip install --python $(COLOSSALAI) $(LOCKED) -r constraints/colossalai.txt
	@rm -f $(COLOSSALAI)/.gptscale-*
	@touch $@

$(COLOSSALAI_CHECKOUT): $(COLOSSALAI_STAMP)
	@$(COLOSSALAI_PIP) --no-deps --no-build-isolation -e .
	@rm -f $(COLOSSALAI)/.gptscale-checkout-*
	@touch $@

$(UV): | python-fits
	@$(PYTHON) -m venv --clear build/uv
	@build/uv/bin/python -m pip install --quiet --disable-pip-version-check uv==0.13.9

# Versions stay as they are, but for what UPGRADE names: --upgrade, or --upgrade-package NAME.
LOCK = $(UV) pip compile --quiet --generate-hashes --no-annotate --custom-compile-command 'make pins' $(UPGRADE)

pins: $(UV)  ## write the locked versions and hashes anew from setup.cfg (UPGRADE=--upgrade takes newer versions)
	@$(LOCK) setup.cfg --extra dev --python-version 3.11 -o constraints/main.txt
	@printf '%s\n' pytest pytest-timeout hypothesis setuptools wheel | BUILD_EXT=0 \
		$(LOCK) setup.cfg - --extra colossalai --python-version 3.11.5 -o constraints/colossalai.txt

prepare: venv  ## compile our operators and DeepSpeed's (about 2 minutes on 2 cores, once per machine and version)
	@$(BIN)/gptscale prepare

# Before the runs, not beside them: what compiles takes a share of the processors, and compare would rank no row of that time.
demo: venv  ## every recipe that can run here, on real text, and their comparison (RECIPES=single,ddp narrows it)
	@$(BIN)/gptscale prepare --recipes $(RECIPES)
	@rm -rf demo
	$(if $(filter all,$(RECIPES)),$(BIN)/gptscale run handout --same-work $(DEMO))
	$(BIN)/gptscale sweep --recipes $(RECIPES) $(DEMO)
	@echo "open demo/comparison.html, or demo/comparison.png"

report: venv  ## the model answer: every figure of the exercise and its reports beside ours (RESULTS=FOLDER: your own rows)
	@$(BIN)/gptscale lenet report $(if $(RESULTS),--results $(RESULTS))
	@echo "open report/report.html"

# Four files at a time for two cores, because the processes of a world wait for each other: two left a third of the cores free.
# Each process has one thread, since more would wait for each other's cores. With more cores: make test WORKERS=8.
WORKERS ?= 4
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS)

test: prepare colossalai lint types  ## everything: lint, types, all tests
	$(PYTEST) --dist loadfile --no-loadscope-reorder --durations 30

quick: prepare lint types  ## lint, types, and the tests that start no world: for while you work
	$(PYTEST) --dist worksteal -m "not world and not slow"

newest: | $(UV)  ## the quick tests and parity with the newest torch and engines, in .venv-newest (about 5 GB)
	@test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	@$(NEWEST_UV) pip setuptools wheel ninja numpy torch
	@$(NEWEST_UV) --no-build-isolation $$($(PYTHON) -m tools.newest)
	@$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	-@$(NEWEST)/bin/gptscale prepare
	@$(NEWEST)/bin/gptscale doctor
	$(NEWEST)/bin/gptscale parity; parity=$$?; \
		OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m "not world and not slow" && exit $$parity

lint: venv  ## style, and the rules of the house
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -q --noconftest -p no:cacheprovider tests/test_house.py tests/test_weight.py

# Static checkers do not follow an editable install that maps folders to packages: links give them the same package.
types: venv
	@rm -rf build/types && mkdir -p build/types/gptscale && touch build/types/gptscale/__init__.py
	@ln -s $(addprefix $(CURDIR)/,$(ROOMS)) build/types/gptscale/
	@ln -s $(addprefix $(CURDIR)/,$(OUTSIDE)) build/types/
	MYPYPATH=build/types $(BIN)/mypy --namespace-packages -p gptscale $(addprefix -p ,$(OUTSIDE))

# Ratios of one run on a CPU; a busy machine moves even those, so nothing else may run beside it.
bench-check: venv  ## are step, operators and MNIST as fast as they should be? (MNIST=FOLDER; 8 to 12 minutes on 2 quiet cores)
	$(BIN)/python -m benchmarks.check --floors results/measured/cpu-bench-model-floors.csv $(if $(MNIST),--mnist $(MNIST))

# cosmic-ray is of this target alone, so it has a folder of its own and leaves the environment as it is.
build/mutate/site:
	@$(PIP) --target $@ cosmic-ray==8.7.0

mutate: venv build/mutate/site  ## plant bugs and name those that no fast test finds (30 minutes on 2 quiet cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.mutate

# mkdocs is of this target alone. A change of its pins makes its environment anew.
SITE = build/site-$(shell cat constraints/site.txt | sha256sum | cut -c1-16)

$(SITE):
	@rm -rf build/site-*
	@$(PYTHON) -m venv $@
	@$@/bin/python -m pip install --quiet --disable-pip-version-check -c constraints/site.txt mkdocs-material || { rm -rf $@; exit 1; }

site: $(SITE)  ## the pages as a site, in build/site/html (an environment of its own, 80 MB)
	@$(SITE)/bin/python -m tools.site_pages
	@NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --quiet --strict -f build/site/mkdocs.yml
	@echo "open build/site/html/index.html"

clean:  ## remove what was made, but for the environments
	rm -rf build demo report *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
