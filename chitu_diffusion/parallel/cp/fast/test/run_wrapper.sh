#!/usr/bin/env bash
# The fast wrapper on real layer shapes with random weights: right against one GPU, and timed against NCCL.
#
#   bash chitu_diffusion/parallel/cp/fast/test/run_wrapper.sh OUTDIR [--cp 2 4 8] [--model NAME ...] [--device cpu]
#
# Loads the environment of Fast CP itself and needs no checkpoint. `--help` lists everything, exit codes included.
# PYTHON names another interpreter than the repository's environment.
set -euo pipefail

here=$PWD
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../../../.." && pwd)
# shellcheck source=tools/install/fast_cp_env.sh
source "$root/tools/install/fast_cp_env.sh"

python=${PYTHON:-$root/.venv/bin/python}
[ -x "$(command -v "$python")" ] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
if [ -d "$CHITU_EXTRA_PYTHONPATH" ]; then PYTHONPATH+=":$CHITU_EXTRA_PYTHONPATH"; fi

cd "$here"
exec "$python" -m chitu_diffusion.parallel.cp.fast.test.run "$@"
