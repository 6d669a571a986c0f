# Everything is built and installed in .venv. The rules that end in touch leave a stamp there: their
# step is done, and is done again when a source is newer.

PYTHON ?= python3
# Exact, because other requests find builds of torch with gigabytes of CUDA.
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0; platform_system == "Linux" and platform_machine in "x86_64 aarch64"
RUFF ?= ruff==0.17.5
MYPY ?= mypy==2.4.1

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
WHEEL = $$(echo .venv/dist/*.whl)
SOURCES := Makefile pyproject.toml README.md LICENSE meson.build cpukern/meson.build \
	$(wildcard cpukern/*.p[yx]* fusedops/*.py fusedops/*/*.py fusedops/*/*/*.py \
	fusedops/py.typed fusedops/data/* gpukern/*.py gpukern/*/*.py)

# For how long `make sanitize` makes up calls, and what stops at an error of memory or arithmetic.
SANITIZE_SECONDS ?= 60
SANITIZED := $(CURDIR)/.venv/sanitized
# gcc's runtime comes before all libraries; torch's needs that of C++ to have been found by then.
RUN_SANITIZED = cd .venv && PYTHONPATH="$(SANITIZED):../tests" ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
	UBSAN_OPTIONS=print_stacktrace=1 FUSEDOPS_NUM_THREADS=3 \
	LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libstdc++.so)" \
	bin/python

.PHONY: help demo bench test fuzz sanitize lint wheel clean
.NOTPARALLEL:

help:
	@sed -n 's/^\([a-z]*\):.*##/make \1:/p' Makefile

demo: .venv/demo ## show every op on every backend that works here
	$(BIN)/fusedops demo

bench: .venv/bench ## time every op beside its peers and floors (BENCH="--quick --plot out")
	$(BIN)/fusedops bench $(BENCH)

# From another folder, where a test and its `python -c` can't import the source tree.
test: .venv/test ## test the installed package, on CPU
	cd .venv && bin/python -m pytest -n 2 --dist worksteal -c ../pyproject.toml ../tests

fuzz: .venv/test ## call every op at random (FUZZ="--calls 1000000 --seed 1")
	cd .venv && PYTHONPATH=../tests bin/python -m fuzz $(FUZZ)

sanitize: $(SANITIZED)/built ## run kernels built with ASan and UBSan: matrix and campaign; needs gcc
	$(RUN_SANITIZED) -m pytest -c ../pyproject.toml ../tests/test_matrix.py ../tests/test_conv.py \
		../tests/test_scatter.py -k "cython and not interpret"
	$(RUN_SANITIZED) -m fuzz --seconds $(SANITIZE_SECONDS) --backend cython

lint: .venv/lint ## check style, format and types
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m mypy

wheel: .venv/package ## build a wheel into dist
	mkdir -p dist
	cp .venv/dist/*.whl dist

clean: ## remove .venv, dist and caches
	rm -rf .venv dist .pytest_cache .ruff_cache .mypy_cache

# The demo installs no torch, but uses one that $(PYTHON) has. Tools to build with are installed in
# any case, so that their commands are in $(BIN).
.venv/new:
	$(PYTHON) -m venv .venv $$($(PYTHON) -c 'import importlib.util as u; \
		print("--system-site-packages" if u.find_spec("torch") else "")')
	$(PIP) install --ignore-installed 'meson-python>=0.17.1' 'cython>=3.1' ninja
	touch $@

# Without isolation, and in a folder that stays, only what has changed is compiled again.
.venv/package: $(SOURCES) | .venv/new
	rm -rf .venv/dist
	PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) wheel --no-deps --no-build-isolation \
		--config-settings=build-dir=.venv/build --wheel-dir=.venv/dist .
	$(PIP) install --no-deps --force-reinstall "$(WHEEL)"
	touch $@

.venv/demo: .venv/package
	$(PIP) install "$(WHEEL)[numba,structure,cli]"
	touch $@

# torch first: a build of it with CUDA brings the Triton that it goes with.
.venv/torch: .venv/demo
	$(PIP) install '$(TORCH)'
	$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) install '$(TRITON)'
	touch $@

.venv/bench: .venv/torch
	$(PIP) install "$(WHEEL)[bench]"
	touch $@

.venv/test: .venv/torch
	$(PIP) install "$(WHEEL)[test]"
	touch $@

# For this machine's instruction set alone, beside the installed package, which stays as it is.
$(SANITIZED)/built: $(SOURCES) | .venv/test
	rm -rf $(SANITIZED)
	mkdir $(SANITIZED)
	cp -r fusedops gpukern $(SANITIZED)
	mkdir $(SANITIZED)/cpukern
	cp cpukern/*.py $(SANITIZED)/cpukern
	[ -d .venv/build-sanitized ] || PATH="$(CURDIR)/$(BIN):$$PATH" meson setup .venv/build-sanitized \
		-Doptimization=1 -Ddebug=true -Db_sanitize=address,undefined -Db_lundef=false \
		-Dc_args=-fno-sanitize-recover=undefined
	level=$$(cd .venv && bin/python -c 'from cpukern import isa; print(isa.level())') && \
	cd .venv/build-sanitized && \
	modules=$$(../bin/ninja -t targets all | sed -n 's/^\(cpukern\/[^ /:]*\.[a-z]*\): c_LINKER.*/\1/p' \
		| grep -e /_cpu -e "_$$level\.") && \
	PATH="$(CURDIR)/$(BIN):$$PATH" ninja $$modules && cp $$modules $(SANITIZED)/cpukern
	touch $@

# NumPy and torch for their types.
.venv/lint: Makefile | .venv/new
	$(PIP) install '$(TORCH)' 'numpy>=1.26'
	$(PIP) install '$(RUFF)' '$(MYPY)'
	touch $@
