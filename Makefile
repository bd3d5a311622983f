# Every target is what CI runs. `make install` is quick once .venv is up to date.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := $(shell grep '^torch==' constraints.txt)
# Which tests `test` and `wheel-test` run; all by default.
TESTS ?=

.PHONY: install run test chaos conformance fuzz gpu-check lint types links wheel-test clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH) -c constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test,dev]'
	touch $(STAMP)

run: install
	@exec $(BIN)/specserve serve

test: install
	$(BIN)/python -m pytest -m 'not conformance' $(TESTS)

# Third parties that know nothing of this project, each in its own environment, against a service of the embedded model.
conformance: install $(patsubst %,.conformance/%/.installed,contract clients aiperf)
	$(BIN)/python -m pytest -m conformance tests/conformance

.conformance/%/.installed: tests/conformance/%.txt
	test -x .conformance/$*/bin/python || $(PYTHON) -m venv .conformance/$*
	.conformance/$*/bin/python -m pip install --quiet -r $<
	touch $@

# Five minutes of random deaths and stalls under load.
chaos: install
	CHAOS_SECONDS=300 $(BIN)/python -m pytest -s tests/cluster/test_chaos.py

# A service of the embedded models under everything that clients and operators may do to it, right and wrong.
MINUTES ?= 10
PLACEMENT ?= inline
SEED ?= 1
fuzz: install
	PYTHONPATH=tests $(BIN)/python -m fuzz --minutes $(MINUTES) --placement $(PLACEMENT) --seed $(SEED)

# Only where there is a GPU; elsewhere every test of it is skipped, with that reason.
gpu-check: install
	$(BIN)/python -m pytest -rs -m gpu tests/gpu

lint: links
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd .types && ../$(BIN)/lint-imports --no-logo ../pyproject.toml

types: links
	MYPYPATH=.types $(BIN)/mypy --strict -p specserve

# Static tools cannot follow an editable install that renames folders, so they see the package as a tree of links.
links: install
	@mkdir -p .types/specserve
	@for name in __init__.py cli.py py.typed; do ln -sfn ../../specserve/$$name .types/specserve/$$name; done
	@for name in service policies deployments load; do ln -sfn ../../$$name .types/specserve/$$name; done

# Runs the suite against the built wheel. The second environment reads the first one's dependencies through a .pth
# file; that file does not run the editable install's hook, so `specserve` can only be the wheel's.
wheel-test: install
	rm -rf build dist .wheel-test && mkdir .wheel-test
	$(BIN)/python -m build --wheel --outdir dist .
	$(BIN)/python -m venv .wheel-test/venv
	.wheel-test/venv/bin/python -m pip install --quiet --no-deps dist/*.whl
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > .wheel-test/shared.pth
	mv .wheel-test/shared.pth "$$(.wheel-test/venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")"
	cp -r tests pyproject.toml README.md Makefile .wheel-test/
	cd .wheel-test && venv/bin/python -c "import specserve; assert '.wheel-test' in specserve.__file__, specserve.__file__"
	cd .wheel-test && venv/bin/python -m pytest -m 'not cluster and not gpu and not conformance' $(TESTS)

clean:
	rm -rf build dist .types .wheel-test .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
