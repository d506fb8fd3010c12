# Everything CI does is a target here; `make check` is what CI runs.
UV := $(shell tools/uv.sh)

.PHONY: check sync lint types test pins results

check: sync lint types test

# uv.lock is generated (it records registry addresses), so the pins in pyproject.toml are what a sync must resolve to
sync:
	$(UV) lock
	$(UV) run --no-sync --no-project python tools/pins.py --check
	$(UV) sync

lint:
	$(UV) run ruff check .
	$(UV) run ruff format --check .

types:
	$(UV) run mypy

test:
	$(UV) run pytest

# After a change of dependencies: resolve anew within their ranges, and write every version into pyproject.toml.
pins:
	$(UV) lock
	$(UV) run --no-sync --no-project python tools/pins.py

# The tables of docs/results/ from its JSON files.
results:
	$(UV) run python -m tools.benchmarks.fast_cp_frameworks.table docs/results/*.json > docs/results/README.md
