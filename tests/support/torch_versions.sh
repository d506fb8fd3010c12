#!/usr/bin/env bash
# Whether one wheel of the extension serves several versions of torch; not part of the default test run:
#
#   bash tests/support/torch_versions.sh WHEEL [VERSION ...]        (default: 2.10.0 2.11.0 newest)
#
# Each version gets an environment of its own in a temporary folder (several GB: the package index's torch is a CUDA
# build), which is deleted when it has been tried. No GPU is needed, and none is used. In each: install torch, install
# WHEEL without dependencies, import fast_ulysses, look for the operators, and call one with fake tensors.
#
# Prints a table. Exit code: 0 all are right, 1 one is not, 2 wrong usage, 3 no uv. PYTHON names the Python; by default it
# is the one of .venv, else 3.12.
set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
say() { printf 'torch_versions: %s\n' "$*" >&2; }

if ! [ -f "${1:-}" ]; then
    say "give the wheel to try, as the first argument"
    exit 2
fi
wheel=$(cd "$(dirname "$1")" && pwd -P)/${1##*/}
shift
[ $# -gt 0 ] || set -- 2.10.0 2.11.0 newest
uv=$(bash "$repository/tools/uv.sh") || exit 3
python=${PYTHON:-$repository/.venv/bin/python}
[ -n "${PYTHON:-}" ] || [ -x "$python" ] || python=3.12

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # uv reads the pins of a project around the working folder
unset VIRTUAL_ENV PYTHONPATH FAST_CP_LIBRARY NVSHMEM_HOME
export CUDA_VISIBLE_DEVICES=""

# Prints one row: torch, its CUDA, Python, NVSHMEM built and loaded, registered operators, shape of the fake call.
read -r -d '' try <<'PYTHON' || true
import sys
import fast_ulysses as fu
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

operators = (
    "fast_cp_device_info", "all_gather_kv_4d", "fast_cp_all_to_all_qkv_4d", "fast_cp_all_to_all_out_4d",
    "kv_projection_prepare", "kv_projection_send_ce_group", "projection_sync_prepare", "projection_sync",
)
missing = [name for name in operators if not hasattr(torch.ops.fast_ulysses, name)]
assert not missing, f"these operators are not registered: {', '.join(missing)}"
with FakeTensorMode():
    k = torch.empty(1, 6, 4, 64, device="cuda", dtype=torch.bfloat16)
    shape = tuple(fu.all_gather_kv_4d(k, k, (6, 5))[0].shape)
assert shape == (1, 11, 4, 64), f"the fake all_gather_kv_4d gave {shape}"
info = fu.device_info()
nvshmem = f"{info['nvshmem']['built']} / {info['nvshmem']['loaded']}"
print("", torch.__version__, torch.version.cuda, sys.version.split()[0], nvshmem, len(info["operators"]), shape, sep="|")
PYTHON

# Leaves the row of version $1 in $work/row; its output is in $work/log.
attempt() {
    local version="$1" environment="$work/environment" wanted="torch==$1"
    [ "$version" = newest ] && wanted=torch
    "$uv" venv --quiet --python "$python" "$environment" &&
        "$uv" pip install --quiet --python "$environment/bin/python" "$wanted" &&
        "$uv" pip install --quiet --python "$environment/bin/python" --no-deps "$wheel" &&
        "$environment/bin/python" -I -c "$try" > "$work/row"
}

failed=0
rows="asked|torch|CUDA|Python|NVSHMEM built / loaded|operators|fake call|result"
for version in "$@"; do
    say "trying torch $version"
    if attempt "$version" > "$work/log" 2>&1; then
        rows+=$'\n'"$version$(tail -n 1 "$work/row")|ok"
    else
        failed=1
        said=$(grep -m 1 -E '^(error:|[A-Za-z]*Error:)' "$work/log" || grep . "$work/log" | tail -n 1 || true)
        rows+=$'\n'"$version|-|-|-|-|-|-|wrong: ${said//|//}"
    fi
    rm -rf "$work/environment"
done
printf '%s, %s bytes\n' "${wheel##*/}" "$(stat -c %s "$wheel")"
while IFS='|' read -r asked torch cuda python nvshmem operators shape result; do
    printf '%-8s %-14s %-5s %-8s %-23s %-10s %-14s %s\n' \
        "$asked" "$torch" "$cuda" "$python" "$nvshmem" "$operators" "$shape" "$result"
done <<< "$rows"
exit "$failed"
