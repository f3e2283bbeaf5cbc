# On a fresh machine, `make demo` trains a small model and `make test` runs the tests. Both install what they need.
PYTHON ?= python3
VENV := .venv
OUT ?= gpu-results
# Time limit of `make gpu` in seconds, for all its parts together.
SECONDS ?= 480
# For a GPU machine without network: the folder of its packages, and its version of Python.
WHEELS ?=
GPU_PYTHON ?= 3.12
PLATFORMS := manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_24_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64 \
	manylinux1_x86_64
PIP_DOWNLOAD := -m pip download --quiet --only-binary=:all: --python-version $(GPU_PYTHON) --implementation cp \
	$(addprefix --platform ,$(PLATFORMS))
# The exact version. With a range, pip could choose a newer version with gigabytes of CUDA libraries instead of the CPU
# build.
TORCH := torch==2.13.0
# Let Python write compiled modules, even if the shell forbids it: the tests start many processes, which load them
# faster.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-slow test-slow-part lint docs gpu gpu-wheels clean

demo: $(VENV)/.installed
	$(VENV)/bin/fourfold train examples/demo.toml
	@printf '%s\n' '' 'Try next:' \
		'  $(VENV)/bin/fourfold train examples/demo.toml --set name=dp --set parallel.x=1 --set parallel.z=1 --set parallel.dp=4' \
		'      the same training on another grid: compare the losses' \
		'  $(VENV)/bin/fourfold parity examples/parity.toml' \
		'      every gradient of a grid against one process in float64' \
		'  $(VENV)/bin/fourfold plan --model llama3-8b --machine dgx-h100 --gpus 64 --global-batch 256 --tokens 1e12' \
		'      fast layouts of Llama 3 8B on 64 GPUs, and how long the training takes'

test: $(VENV)/.installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/pytest -n 2 --dist worksteal

test-slow: $(VENV)/.installed-test
	$(VENV)/bin/pytest -m slow -n 2 --dist worksteal

# Run a random sample of the slow tests, which is different for each commit.
test-slow-part: $(VENV)/.installed-test
	$(VENV)/bin/pytest -m slow --sample "$$(git rev-parse HEAD)" --minutes 25

lint: $(VENV)/.installed-test
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/mypy

# Build the website in site/. Read it with `python -m http.server -d site`. A broken link is an error.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build

# Use the Python packages of the machine, without a virtual environment: a GPU machine has its own torch, and often no
# network. docs/gpu.md describes this command.
gpu:
	$(PYTHON) -m benchmarks.gpu $(OUT) --seconds $(SECONDS) $(if $(WHEELS),--wheels $(WHEELS))

# Download all packages that the tests and the benchmarks need on a GPU machine, except torch and NumPy. The benchmarks
# compare fourfold with torchtitan.
gpu-wheels:
	$(PYTHON) $(PIP_DOWNLOAD) --dest $(or $(WHEELS),wheels) pydantic safetensors xxhash tokenizers \
		typer rich pytest pytest-xdist hypothesis 'transformers>=5.21'
	rm -f $(or $(WHEELS),wheels)/numpy-*.whl # The machine already has a NumPy that fits its torch.
	$(PYTHON) $(PIP_DOWNLOAD) --dest $(or $(WHEELS),wheels) --no-deps torchao torchtitan==0.3.0 spmd_types==0.2.3 tyro \
		docstring_parser typeguard

clean:
	rm -rf $(VENV) runs data site

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check "$(TORCH)" --editable .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(VENV)/bin/pip install --quiet --disable-pip-version-check "$(TORCH)" --editable ".[test]"
	touch $@

$(VENV)/.installed-docs: pyproject.toml
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check "$$($(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')"
	touch $@
