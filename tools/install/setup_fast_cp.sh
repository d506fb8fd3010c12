#!/usr/bin/env bash
# One command from a clone to a working Fast CP:
#
#   bash tools/install/setup_fast_cp.sh [options and CHECKOUT of build_fast_cp.py]
#
# 1. the Python environment .venv, with the compiler wheels unless a toolkit is named   (uv sync)
# 2. the NVSHMEM to build against: torch's own copy, else one in $FAST_CP_DEPS_ROOT/python
# 3. the extension, for the GPUs found, else for all architectures                      (build_fast_cp.py)
# 4. its wheel, installed into .venv                                                    (uv pip install)
# 5. whether it is ready                                                                (chitu doctor)
#
# Exit code: 0 ready, 1 a step failed, 2 wrong usage, 3 something is absent: without a GPU it ends with 3 at step 5.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
python="$root/.venv/bin/python"
build="$root/tools/install/build_fast_cp.py"
export UV_PROJECT_ENVIRONMENT="$root/.venv"
unset VIRTUAL_ENV # another active environment is not the one that is set up here

say() { printf 'setup_fast_cp: %s\n' "$*" >&2; }

# Ends the script where a step fails: with the code of a build, which means what it means here, else with 1.
step() {
    local what="$1" code=0
    shift
    say "$what"
    "$@" || code=$?
    if [ "$code" -ne 0 ]; then
        say "stopped at \"$what\": a command ended with code $code, and its message is above: $*"
        case "$code $*" in [123]" $python $build "*) exit "$code" ;; esac
        exit 1
    fi
}

# The folder that --nvshmem-home names among the arguments, if it does.
nvshmem_asked() {
    local argument previous=""
    for argument in "$@"; do
        case $argument in --nvshmem-home=*) printf '%s' "${argument#*=}" ;; esac
        [ "$previous" = --nvshmem-home ] && printf '%s' "$argument"
        previous=$argument
    done
    return 0
}

names_toolkit() {
    local argument
    for argument in "$@"; do
        case $argument in --cuda-home | --cuda-home=*) return 0 ;; esac
    done
    [ -n "${CUDA_HOME:-}" ]
}

for argument in "$@"; do
    case $argument in
        -h | --help)
            sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        --json | --json=* | --csrc | --csrc=*) say "$argument belongs to build_fast_cp.py alone; run that" && exit 2 ;;
    esac
done

# wrong usage before anything is fetched, where some Python is there: the build's own parser, which --help ends
complaint=$(python3 "$build" "$@" --help 2>&1 > /dev/null) || if [ $? -eq 2 ]; then printf '%s\n' "$complaint" >&2 && exit 2; fi

# 1. environment
uv=$(bash "$root/tools/uv.sh") || { say "no uv; the message above says what to do" && exit 3; }
groups=()
names_toolkit "$@" || groups=(--group cuda-build)
cd_to_root() { (cd "$root" && "$@"); }
step "environment: resolving" cd_to_root "$uv" lock --quiet
step "environment: installing into .venv" cd_to_root "$uv" sync --inexact "${groups[@]}"

# 2. NVSHMEM, chosen when torch is there
# shellcheck source=tools/install/fast_cp_env.sh
source "$root/tools/install/fast_cp_env.sh"
if ! [ -f "$NVSHMEM_HOME/include/nvshmem.h" ] && [ "$NVSHMEM_HOME" != "$FAST_CP_DEPS_ROOT/python/nvidia/nvshmem" ]; then
    pinned=$(sed -n 's/^ *"\(nvidia-nvshmem-[a-z0-9]*==[^"]*\)".*/\1/p' "$root/pyproject.toml")
    step "NVSHMEM: $NVSHMEM_HOME holds no headers; installing ${pinned:=nvidia-nvshmem-cu13}" \
        "$uv" pip install --python "$python" --target "$FAST_CP_DEPS_ROOT/python" --no-deps "$pinned"
    export NVSHMEM_HOME="$FAST_CP_DEPS_ROOT/python/nvidia/nvshmem"
fi
asked=$(nvshmem_asked "$@")
say "NVSHMEM: building against ${asked:-$NVSHMEM_HOME}"

# 3. build
result=$(mktemp)
trap 'rm -f "$result"' EXIT
step "building the extension" "$python" "$build" "$@" --json "$result"
wheel=$("$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["wheel"])' "$result")

# 4. install
step "installing ${wheel##*/} into .venv" "$uv" pip install --python "$python" --no-deps --reinstall "$wheel"
mkdir -p "$FAST_CP_DEPS_ROOT"
printf '%s\n' "$root/.venv" "$wheel" > "$FAST_CP_DEPS_ROOT/installed" # by which doctor knows what a sync has removed

# 5. doctor
say "asking doctor"
code=0
(cd "$root" && "$python" -m chitu_diffusion.cli doctor --require fast) || code=$?
case $code in
    0) say "Fast CP is built, installed and ready" ;;
    3) say "Fast CP is built and installed, and cannot run here: doctor lists above what this machine lacks (exit code 3)" ;;
    *) say "Fast CP is built and installed, but doctor ended with $code: see the checks above" ;;
esac
exit "$code"
