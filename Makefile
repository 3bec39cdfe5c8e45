# make demo   sets up .venv, converts the digits model and leaves out/digits-dit
# make test   sets up .venv and runs the tests
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Python sources are used in place; the library is built again when one of these changes.
COMPILED := pyproject.toml constraints.txt CMakeLists.txt $(shell find plugins -type f ! -name '*.md')

.PHONY: setup demo test test-gpu test-gpu-shared test-gpu-alone gpu-record soak oldest soak-gpu sanitize lint docs wheel check-wheel bench tensorrt clean

# The dependencies are installed during the compile. Python compiles modules when they are imported: most of these never are.
EXTRAS := rtx evaluate dev docs package
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt

setup: $(STAMP)

$(STAMP): $(COMPILED)
	@echo "Setting up $(VENV). Compiling the CUDA kernels takes some 16 minutes of processor time: 8 minutes on two cores."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python tools/requirements.py $(EXTRAS) > $(VENV)/requirements.txt
	$(PIP) --requirement $(VENV)/requirements.txt & installed=$$!; \
	  $(PIP) --no-deps --editable . || { kill $$installed; exit 1; }; \
	  wait $$installed
	touch $@

demo: $(STAMP)
	$(BIN)/trtconvert build recipes/digits-dit.yaml -o out/digits-dit

# A test keeps one core busy. Tests of one file run in one process, because they share builds. With a GPU all tests run in one process.
PARALLEL := $(if $(shell command -v nvidia-smi),,-n auto --maxprocesses=4 --dist=loadfile --no-loadscope-reorder)
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL)

# The tests that need a GPU. Each part writes its run to tests/gpu/record.json, which joins both parts.
test-gpu: test-gpu-shared test-gpu-alone

RECORDED := PYTHONPATH=tools $(BIN)/python -m pytest -p gpu_record -m 'gpu and not soak'
test-gpu-shared: $(STAMP)
	$(RECORDED) --part shared -n $(or $(JOBS),4) --dist worksteal --ignore tests/gpu/runtime

# These tests measure the device's memory and times.
test-gpu-alone: $(STAMP)
	$(RECORDED) --part alone tests/gpu/runtime

# Prints the sources that changed since the tests ran on a GPU.
gpu-record: $(STAMP)
	$(BIN)/python tools/gpu_record.py

# Slow tests that seldom fail, and thousands of damaged recipes, bundles, manifests, calibrations and plans; `make test` has hundreds.
soak: $(STAMP)
	TRTCONVERT_SOAK=$(or $(ROUNDS),10000) $(BIN)/python -m pytest tests/robustness
	$(BIN)/python -m pytest -m soak

# The tests with the oldest versions that pyproject.toml allows, in an environment of their own. Compiles the library for one kind of GPU.
OLDEST := out/oldest
UV_INSTALL := $(BIN)/python -m uv pip install --quiet --python $(OLDEST)
oldest: $(STAMP)
	$(BIN)/python -m uv venv --quiet --clear --python $(BIN)/python $(OLDEST)
	$(BIN)/python tools/requirements.py evaluate diffusers gguf peft > $(OLDEST)/requirements.txt
	$(UV_INSTALL) --resolution lowest-direct --requirement $(OLDEST)/requirements.txt
	$(UV_INSTALL) pytest pytest-xdist matplotlib ftfy
	$(UV_INSTALL) --no-deps -C cmake.define.TRTCONVERT_CUDA_ARCHITECTURES=90a .
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest $(PARALLEL)

# Loads an engine on a GPU and calls it from many threads, streams and processes for ten minutes (SECONDS=…). BUNDLE=… names a bundle of
# the digits model with an engine of this GPU; without BUNDLE the target builds one. Prints counts as JSON.
soak-gpu: $(STAMP)
	$(BIN)/python tests/gpu/runtime/soak.py --seconds $(or $(SECONDS),600) $(BUNDLE)

# ROUNDS=… random arguments to every C API and every plugin, under AddressSanitizer and UBSan. Compiles the library's host code for the
# sanitizers into out/sanitize: 5 minutes of processor time.
SANITIZED := out/sanitize/.built
sanitize: $(SANITIZED)
	TRTCONVERT_SOAK=$(or $(ROUNDS),10000) $(BIN)/python -m pytest -s tests/robustness/test_sanitized.py

$(SANITIZED): $(COMPILED) $(wildcard tests/robustness/sanitized/*) | $(STAMP)
	$(BIN)/python -m pip wheel . --no-deps --quiet --disable-pip-version-check --wheel-dir out/sanitize -C build-dir=out/sanitize/build \
	  -C cmake.build-type=RelWithDebInfo -C cmake.define.TRTCONVERT_CUDA_ARCHITECTURES=90a \
	  -C 'cmake.define.TRTCONVERT_SANITIZE=address;undefined'
	touch $@

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

# The documentation as a site, in out/docs; warnings are errors.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# An sdist and a manylinux wheel, in out/dist.
wheel: $(STAMP)
	$(BIN)/python tools/make_dist.py

# Installs both packages into new environments, and converts the demo there. QUICK=1 takes the dependencies and the library of this
# environment, and fewer samples.
check-wheel: $(STAMP) $(filter wheel,$(MAKECMDGOALS))
	$(BIN)/python tools/check_dist.py $(if $(QUICK),--quick)

# Measures the demo's build on this machine. The other scripts of bench/ run by themselves, most of them on a GPU.
bench: $(STAMP)
	$(BIN)/python bench/build.py

# The TensorRT libraries that tests/plugins/test_plugin_registry.py loads, into third_party/. Needs Maven.
tensorrt: $(STAMP)
	$(BIN)/python tools/get_tensorrt.py

clean:
	rm -rf $(VENV) build out .pytest_cache .ruff_cache
