# Every target does its own set-up; a machine needs Python 3.11 or newer and make.
PYTHON ?= python3
BIN := .venv/bin
SAY_PATH := echo 'the command piper is $(BIN)/piper: source $(BIN)/activate has your shell find it'

.PHONY: demo test browser web matrix models bench bench-gpu scale fuzz fuzz-files chaos check format docs site clean

demo: .venv/ready
	$(BIN)/python examples/demo.py
	@$(SAY_PATH)

# Ray changes the process that it is started from: its tests have one of their own.
test: .venv/ready
	$(BIN)/python -m pytest -n 2 --dist loadgroup --ignore tests/procs/test_ray.py --ignore tests/browser tests
	$(BIN)/python -m pytest tests/procs/test_ray.py

matrix: .venv/ready
	$(BIN)/python -m tests.run_matrix
	$(BIN)/python -m tests.run_tensor_matrix

# Models as people have them, into docs/models.md: two hours.
models: .venv/ready
	$(BIN)/python -m tests.run_models

# Piper beside its peers in the same run: on two pinned cores and on four ranks of a CPU.
bench: .venv/ready
	$(BIN)/python benchmarks/host_cost.py
	$(BIN)/python benchmarks/peers.py --device cpu --regimes masters --json peers-cpu.json

# On one GPU that four ranks share, with the Python that has torch for it. Peers go on where they ended.
bench-gpu:
	$(PYTHON) benchmarks/shared_gpu.py --compile
	$(PYTHON) benchmarks/peers.py --json peers-gpu.json --machine peers-machine.json
	$(PYTHON) benchmarks/largest_batch.py --limit least --sides again --json peers-largest.json

# Large mixtures of experts on thousands of GPUs, on paper, into docs/scale.md: it goes on where it ended.
scale: .venv/ready
	$(BIN)/python benchmarks/scale_study.py
	$(BIN)/python benchmarks/scale_study.py --page

# Random programs, other ones each time; a failure prints its program.
FUZZ ?= 500
fuzz: .venv/ready
	PIPER_FUZZ=$(FUZZ) PIPER_FUZZ_MODELS=$$(date +%s) $(BIN)/python -m pytest -n 2 tests/property/test_programs.py

# Damaged files: each is refused by one error, or means what it says.
FILES ?= 3000
fuzz-files: .venv/ready
	$(BIN)/python -m tests.fuzz_files --cases $(FILES)

# Random kills and hangs of workers, other ones each time.
CHAOS ?= 30
chaos: .venv/ready
	PIPER_CHAOS=$(CHAOS) PIPER_CHAOS_SEED=$$(date +%s) $(BIN)/python -m pytest -s tests/procs/test_chaos.py

check: .venv/ready
	$(BIN)/ruff format --check src tests examples benchmarks docs
	$(BIN)/ruff check src tests examples benchmarks docs
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/ready
	$(BIN)/ruff format src tests examples benchmarks docs
	$(BIN)/ruff check --fix src tests examples benchmarks docs

# The page of `piper show`, from web/ into the package; it needs npm and node 20.
web: web/node_modules/ready
	cd web && npm run check && npm run build

web/node_modules/ready: web/package.json web/package-lock.json
	cd web && npm ci --no-audit --no-fund
	touch web/node_modules/ready

# Reports in a real browser: Chromium (installed if it is missing and we may), driven from node.
browser: .venv/ready web/node_modules/ready
	command -v chromium || command -v chromium-browser || command -v google-chrome || test "$$(id -u)" != 0 || \
		(apt-get update && apt-get install -y chromium)
	cd web && npm run check
	$(BIN)/python -m pytest -rsP tests/browser

docs: .venv/ready
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/lessons.py

# The documentation as a site in site/; a link or an anchor that leads nowhere ends it.
site: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch .venv/ready
	@$(SAY_PATH)

clean:
	rm -rf .venv site .pytest_cache .mypy_cache .ruff_cache .hypothesis
