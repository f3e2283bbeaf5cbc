# On a fresh machine, `make demo` trains a small model and `make test` runs the tests. Both install what they need.
PYTHON ?= python3
VENV := .venv
OUT ?= gpu-results
# Of `make gpu`, all parts together.
SECONDS ?= 480
# Packages for a GPU machine without network, and the Python that runs there.
WHEELS ?=
GPU_PYTHON ?= 3.12
PLATFORMS := manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_24_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64 \
	manylinux1_x86_64
PIP_DOWNLOAD := -m pip download --quiet --only-binary=:all: --python-version $(GPU_PYTHON) --implementation cp \
	$(addprefix --platform ,$(PLATFORMS))
# Named exactly: a range would fetch gigabytes of CUDA libraries where the CPU build is wanted.
TORCH := torch==2.13.0
# The tests start many processes: they find compiled modules, also where the shell wants none written.
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

# A part of the slow tests that changes from commit to commit.
test-slow-part: $(VENV)/.installed-test
	$(VENV)/bin/pytest -m slow --sample "$$(git rev-parse HEAD)" --minutes 25

lint: $(VENV)/.installed-test
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/mypy

# A site in site/, to be read with `python -m http.server -d site`; a link that leads nowhere is an error.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build

# With the packages that are there: a machine with a GPU has its own torch, and often no network. docs/gpu.md has more.
gpu:
	$(PYTHON) -m benchmarks.gpu $(OUT) --seconds $(SECONDS) $(if $(WHEELS),--wheels $(WHEELS))

# Everything but torch that the tests and the benchmarks need on a GPU machine; torchtitan as a contender.
gpu-wheels:
	$(PYTHON) $(PIP_DOWNLOAD) --dest $(or $(WHEELS),wheels) pydantic safetensors xxhash tokenizers \
		typer rich pytest pytest-xdist hypothesis 'transformers>=5.21'
	rm -f $(or $(WHEELS),wheels)/numpy-*.whl # the machine's torch has its own
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
