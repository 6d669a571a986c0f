# Everything is built and installed in .venv. Rules that end in touch leave a stamp there, and run again
# when a source is newer than the stamp.

PYTHON ?= python3
# An exact version, since any other request may find a build of torch with gigabytes of CUDA.
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0; platform_system == "Linux" and platform_machine in "x86_64 aarch64"
RUFF ?= ruff==0.17.5
MYPY ?= mypy==2.4.1
PRE_COMMIT ?= pre-commit==4.7.0
FAIRCHEM ?= fairchem-core==2.24.0
TORCHREF ?= torchref==0.7.0
TRANSFORMERS ?= transformers==5.24.0
SPHINX ?= 'sphinx==9.0.4; python_version >= "3.11"' 'sphinx==8.1.3; python_version < "3.11"' \
	myst-nb==1.4.0 numpydoc==1.11.0 furo==2025.12.19 math-core==0.9.0 ase==3.29.0

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# For the demo, of whose packages most modules are never imported, and so never compiled.
INSTALL := $(PIP) install --no-compile
IN_FAIRCHEM := .venv/with-fairchem/bin/python -m pip --disable-pip-version-check --quiet
IN_TORCHREF := .venv/with-torchref/bin/python -m pip --disable-pip-version-check --quiet
IN_TRANSFORMERS := .venv/with-transformers/bin/python -m pip --disable-pip-version-check --quiet
WHEEL = $$(echo .venv/dist/*.whl)
SOURCES := Makefile pyproject.toml README.md LICENSE meson.build meson.options cpukern/meson.build \
	$(wildcard cpukern/*.p[yx]* cpukern/*/*.p[yx]* fusedops/*.py fusedops/*/*.py fusedops/*/*/*.py \
	fusedops/py.typed fusedops/data/* gpukern/*.py gpukern/*/*.py)

# The seconds of random calls in `make sanitize`, and the folder of the kernels with sanitizers.
SANITIZE_SECONDS ?= 60
SANITIZED := $(CURDIR)/.venv/sanitized
# The sanitizer's runtime must be loaded before all libraries, and C++'s before torch's.
RUN_SANITIZED = cd .venv && PYTHONPATH="$(SANITIZED):../tests" ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
	UBSAN_OPTIONS=print_stacktrace=1 FUSEDOPS_NUM_THREADS=3 \
	LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libstdc++.so)" \
	bin/python

# Clones of the peers' repositories, whose packages have no tests: `make peer-tests` runs their tests of
# UMA, of densities and planes, of convolutions, and of pair representations too, with our ops. Of
# causal-conv1d's 13,000 tests, CAUSAL_CONV1D_SOME picks those that a CPU runs in minutes.
FAIRCHEM_TESTS ?=
TORCHREF_TESTS ?=
CAUSAL_CONV1D_TESTS ?=
CAUSAL_CONV1D_SOME ?= update or (causal_conv1d and 129) or (varlen and (151 or 128) and 64) or determ
FLA_TESTS ?=
VLLM_TESTS ?=
SGLANG_TESTS ?=
BOLTZ_TESTS ?=
CUEQUIVARIANCE_TESTS ?=
OPENFOLD_TESTS ?=
OPENFOLD3_TESTS ?=
PROTENIX_TESTS ?=
TRIANGLES = boltz:$(abspath $(BOLTZ_TESTS)) cuequivariance:$(abspath $(CUEQUIVARIANCE_TESTS)) \
	openfold:$(abspath $(OPENFOLD_TESTS)) openfold3:$(abspath $(OPENFOLD3_TESTS)) \
	protenix:$(abspath $(PROTENIX_TESTS))
define REGISTERED
import importlib, sys, pytest
importlib.import_module("fusedops.compat." + sys.argv[1]).register()
sys.exit(pytest.main(sys.argv[2:]))
endef
export REGISTERED

.PHONY: help demo bench test kernels peer-tests fuzz sanitize lint docs dev wheel clean
.NOTPARALLEL:

help: ## list these commands
	@sed -n 's/^\([a-z-]*\):.*##/make \1:/p' Makefile

demo: .venv/demo ## run every op on every backend that works here
	$(BIN)/fusedops demo

bench: .venv/bench ## time every op beside its peers and floors (BENCH="--quick --plot out")
	$(BIN)/fusedops bench $(BENCH)

# Run in another folder, so that a test and its `python -c` can't import the source tree.
test: .venv/test ## test the installed package, on CPU
	cd .venv && bin/python -m pytest -n 2 --dist worksteal -c ../pyproject.toml ../tests

kernels: .venv/test ## compile every Triton kernel for several GPUs, with none here
	cd .venv && bin/python -m pytest -n 2 --dist worksteal -c ../pyproject.toml -m compiles ../tests

peer-tests: .venv/with-fairchem/done .venv/with-torchref/done .venv/with-transformers/done ## test fusedops.compat with its peers
	cd .venv && with-fairchem/bin/python -m pytest -c ../pyproject.toml \
		../tests/test_compat.py ../tests/test_compat_fairchem.py
	[ -z "$(FAIRCHEM_TESTS)" ] || (cd "$(FAIRCHEM_TESTS)" && \
		"$(CURDIR)/.venv/with-fairchem/bin/python" -c "$$REGISTERED" fairchem -m "not gpu" -p no:cacheprovider \
		tests/core/models/uma/test_escn_md.py tests/core/models/uma/test_escn_mole.py \
		tests/core/models/uma/nn/test_so2_layers.py tests/core/models/uma/nn/test_embedding.py)
	cd .venv && with-torchref/bin/python -m pytest -c ../pyproject.toml \
		../tests/test_compat_torchref.py ../tests/test_compat_torchref_start.py
	[ -z "$(TORCHREF_TESTS)" ] || (cd "$(TORCHREF_TESTS)" && \
		"$(CURDIR)/.venv/with-torchref/bin/python" -c "$$REGISTERED" torchref -m "not gpu" -p no:cacheprovider \
		tests/unit/structure_factor tests/unit/base/test_canonical_sphere_cpu.py \
		tests/unit/base/test_target_values.py)
	cd .venv && with-transformers/bin/python -m pytest -c ../pyproject.toml ../tests/test_compat_transformers.py
	[ -z "$(CAUSAL_CONV1D_TESTS)$(FLA_TESTS)$(VLLM_TESTS)$(SGLANG_TESTS)" ] || $(MAKE) .venv/test
	[ -z "$(CAUSAL_CONV1D_TESTS)" ] || (cd .venv && bin/python -m pip install --quiet einops && \
		for ours in causal_conv1d cpp_functions; do bin/python ../tests/peer_conv.py $$ours \
		"$(abspath $(CAUSAL_CONV1D_TESTS))" -k "$(CAUSAL_CONV1D_SOME)" || exit; done)
	[ -z "$(FLA_TESTS)" ] || (cd .venv && bin/python -m pip install --quiet einops && \
		for ours in fla fla_delta; do bin/python ../tests/peer_conv.py $$ours "$(abspath $(FLA_TESTS))" || exit; done)
	[ -z "$(VLLM_TESTS)" ] || (cd .venv && bin/python -m pip install --quiet einops && \
		bin/python ../tests/peer_conv.py vllm "$(abspath $(VLLM_TESTS))")
	[ -z "$(SGLANG_TESTS)" ] || (cd .venv && bin/python -m pip install --quiet einops && \
		bin/python ../tests/peer_conv.py sglang "$(abspath $(SGLANG_TESTS))")
	[ -z "$(filter-out %:,$(TRIANGLES))" ] || ($(MAKE) .venv/test && \
		.venv/bin/python -m pip install --quiet dm-tree einops ml-collections)
	for each in $(filter-out %:,$(TRIANGLES)); do (cd .venv && \
		bin/python ../tests/peer_triangles.py "$${each%%:*}" "$${each#*:}") || exit; done

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

# The command instead of `python -m sphinx`, which could import the source tree.
docs: .venv/sphinx ## build the site, with its examples run, into .venv/docs/html
	$(BIN)/sphinx-build --quiet --fresh-env --fail-on-warning --keep-going --nitpicky \
		-d .venv/docs/doctrees docs .venv/docs/html

# Without the stamps of the installed package, `make test` installs it again.
dev: .venv/test .venv/lint ## install the source tree itself, with the tools of tests, lint and pre-commit
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) install --no-deps --no-build-isolation \
		--config-settings=build-dir=.venv/build --editable .
	@rm -f .venv/own .venv/package
	@$(PIP) install '$(PRE_COMMIT)'
	@$(BIN)/pre-commit install
	@echo "Now: . .venv/bin/activate"

wheel: .venv/package ## build a wheel into dist
	mkdir -p dist
	cp .venv/dist/*.whl dist

clean: ## remove .venv, dist and caches
	rm -rf .venv dist .pytest_cache .ruff_cache .mypy_cache

# The demo doesn't install torch, but uses $(PYTHON)'s if there is one. Build tools are installed even if
# $(PYTHON) has them, so that their commands are in $(BIN).
.venv/new:
	@echo "Making an environment in .venv"
	@$(PYTHON) -m venv .venv $$($(PYTHON) -c 'import importlib.util as u; \
		print("--system-site-packages" if u.find_spec("torch") else "")')
	@$(INSTALL) 'pip>=22.1'
	@$(INSTALL) --ignore-installed 'meson-python>=0.17.1' 'cython>=3.1' ninja
	@touch $@

# Without isolation, and in a folder that is kept, only changed files are compiled again.
BUILD = rm -rf .venv/dist && PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) wheel --no-deps --no-build-isolation \
	--config-settings=setup-args=-Dinstruction_sets=$(1) \
	--config-settings=build-dir=.venv/build --wheel-dir=.venv/dist .
# Even if the same version is installed.
REPLACE = $(INSTALL) --no-deps --force-reinstall "$(WHEEL)"

# A third of the compiler's work, which is most of the demo's time. The demo's packages are installed
# meanwhile; if that fails, the demo's rule tries again and shows the error.
.venv/own: $(SOURCES) | .venv/new
	@echo "Compiling the kernels for this machine's instruction set; installing NumPy, SciPy, gemmi," \
		"matplotlib and rich meanwhile"
	@$(INSTALL) numpy scipy gemmi matplotlib rich shtab & ($(call BUILD,own)); built=$$?; wait; exit $$built
	@$(REPLACE)
	@touch $@

.venv/package: $(SOURCES) | .venv/new
	@echo "Compiling the kernels for all instruction sets"
	@$(call BUILD,all)
	@$(REPLACE)
	@touch .venv/own $@

# Without Numba, which would compile for longer than all else takes; `make test` installs it.
.venv/demo: .venv/own
	@echo "Installing the package"
	@$(INSTALL) "$(WHEEL)[cli]"
	@touch $@

# torch first, since a build with CUDA installs the Triton that fits it.
.venv/torch: .venv/package
	@echo "Installing torch and Triton"
	@$(PIP) install '$(TORCH)'
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) install '$(TRITON)'
	@touch $@

.venv/bench: .venv/torch
	@echo "Installing the requirements of benches"
	@$(PIP) install "$(WHEEL)[bench]"
	@touch $@

.venv/test: .venv/torch
	@echo "Installing the requirements of tests"
	@$(PIP) install "$(WHEEL)[test]"
	@touch $@

# Of the peers' environments none has a package's name: tests run in .venv, where Python would take
# its folder for the package.

# An environment of its own, since fairchem has many requirements; the last four are for its tests.
.venv/with-fairchem/done: .venv/package
	$(PYTHON) -m venv .venv/with-fairchem
	$(IN_FAIRCHEM) install '$(TORCH)'
	$(IN_FAIRCHEM) install --no-deps --force-reinstall "$(WHEEL)"
	$(IN_FAIRCHEM) install "$(WHEEL)[test]" '$(FAIRCHEM)' pyarrow pymatgen 'ray[serve]' syrupy
	touch $@

# An environment of its own, since TorchRef needs an older NumPy.
.venv/with-torchref/done: .venv/package
	$(PYTHON) -m venv .venv/with-torchref
	$(IN_TORCHREF) install '$(TORCH)'
	$(IN_TORCHREF) install --no-deps --force-reinstall "$(WHEEL)"
	$(IN_TORCHREF) install "$(WHEEL)[test]" '$(TORCHREF)'
	touch $@

# An environment of its own, since transformers has many requirements.
.venv/with-transformers/done: .venv/package
	$(PYTHON) -m venv .venv/with-transformers
	$(IN_TRANSFORMERS) install '$(TORCH)'
	$(IN_TRANSFORMERS) install --no-deps --force-reinstall "$(WHEEL)"
	$(IN_TRANSFORMERS) install "$(WHEEL)[test]" '$(TRANSFORMERS)'
	touch $@

# Built for this machine's instruction set only, beside the installed package, which is unchanged.
$(SANITIZED)/built: $(SOURCES) | .venv/test
	rm -rf $(SANITIZED)
	mkdir $(SANITIZED)
	cp -r fusedops cpukern gpukern $(SANITIZED)
	rm -f $(SANITIZED)/cpukern/*.so
	[ -d .venv/build-sanitized ] || PATH="$(CURDIR)/$(BIN):$$PATH" meson setup .venv/build-sanitized \
		-Doptimization=1 -Ddebug=true -Db_sanitize=address,undefined -Db_lundef=false \
		-Dc_args=-fno-sanitize-recover=undefined
	level=$$(cd .venv && bin/python -c 'from cpukern import isa; print(isa.level())') && \
	cd .venv/build-sanitized && \
	modules=$$(../bin/ninja -t targets all | sed -n 's/^\(cpukern\/[^ /:]*\.[a-z]*\): c_LINKER.*/\1/p' \
		| grep -e /_cpu -e "_$$level\.") && \
	PATH="$(CURDIR)/$(BIN):$$PATH" ninja $$modules && cp $$modules $(SANITIZED)/cpukern
	touch $@

# Examples on the pages use all optional packages.
.venv/sphinx: .venv/bench
	$(PIP) install $(SPHINX)
	touch $@

# mypy needs NumPy and torch for their types.
.venv/lint: Makefile | .venv/new
	$(PIP) install '$(TORCH)' 'numpy>=1.26'
	$(PIP) install '$(RUFF)' '$(MYPY)'
	touch $@
