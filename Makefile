# Everything CI does is a target here; `make check` is what CI runs.
# quoted, since the folder may have a space in its path
UV := "$(shell tools/uv.sh)"

.PHONY: check sync lint types test acceptance extension fast-cp pins results

check: sync lint types test acceptance

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

# The wrapper's acceptance matrix, reduced, on two CPU processes.
acceptance:
	$(UV) run --no-sync bash chitu_diffusion/parallel/cp/fast/test/run_wrapper.sh outputs/acceptance --device cpu

# The extension's wheel for both architectures, by the compiler of the package index, whatever toolkit the machine has.
extension:
	$(UV) sync --inexact --group cuda-build
	env -u CUDA_HOME -u NVSHMEM_HOME $(UV) run --no-sync python tools/install/build_fast_cp.py --architectures 90 120

# Environment, NVSHMEM headers, build, install, doctor: `make fast-cp ARGS="--architectures 90 120"`.
fast-cp:
	bash tools/install/setup_fast_cp.sh $(ARGS)

# After a change of dependencies: resolve anew within their ranges, and write every version into pyproject.toml.
pins:
	$(UV) lock
	$(UV) run --no-sync --no-project python tools/pins.py

# The numbers of README.md, docs/benchmarks.md and docs/results/README.md from the JSON files of docs/results/; the tables of
# docs/scaling.md, from the cost model, and docs/api.md, from the docstrings.
results:
	$(UV) run --no-sync python -m tools.benchmarks.fast_cp_frameworks.pages --write
	$(UV) run --no-sync python -m tools.benchmarks.fast_cp_frameworks.scaling --write
	$(UV) run --no-sync python tools/api_docs.py
