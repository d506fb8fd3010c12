#!/usr/bin/env bash
# Everything that is measured on a machine with two GPUs, in one call of less than 8 minutes.
#
#   [CHITU_COMMIT=abc] bash tools/benchmarks/fast_cp_frameworks/two_gpus.sh OUTDIR
#
# CHITU_COMMIT names the commit where the copy has no git repository.
#
# Needs python3 with torch, triton, rich, pydantic and pytest; where pydantic lacks, its wheels are taken from .carry/.
# Each part has its own time limit, so that one that hangs costs no other its time. Exit code: 0, or 1 if a part failed.
set -uo pipefail

out=${1:?"usage: two_gpus.sh OUTDIR"}
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/../../.." || exit 2

# one host whose GPUs others share: NVLink multicast stays off (a program that uses it can put them out of service)
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

if ! python3 -c 'import pydantic' 2>/dev/null; then
    site=$(mktemp -d)
    python3 -m pip install -q --no-index --no-deps --target "$site" .carry/*.whl || {
        echo "two_gpus: python3 has no pydantic, and .carry/ has no wheels of it" >&2
        exit 3
    }
    export PYTHONPATH=$site:$PYTHONPATH
fi

failed=0
part() { # NAME SECONDS COMMAND...: run it, and remember if it failed
    local name=$1 limit=$2 begin=$SECONDS
    shift 2
    echo "== $name (at most $limit s)"
    if timeout --kill-after=10 "$limit" "$@"; then
        echo "== $name: right after $((SECONDS - begin)) s"
    else
        echo "== $name: FAILED with code $? after $((SECONDS - begin)) s"
        failed=1
    fi
}

bench() { # NAME SECONDS OPTIONS...: one run of the benchmark, into NAME.json
    local name=$1 limit=$2
    shift 2
    part "$name" "$limit" python3 -m tools.benchmarks.fast_cp_frameworks.chitu --cp-size 2 --debug \
        --output "$out/$name.json" "$@"
}

all=single,nccl_agkv,nccl_ulysses
if python3 -c "import fast_ulysses" 2> /dev/null; then all+=,fast_agkv,fast_ulysses; fi
part tests 90 python3 -m pytest -n 0 -p no:cacheprovider -m "gpu or multigpu" tests
bench dit 90 --preset dit --method $all --iterations 7 --repeats 3
bench kernels 30 --method single --kernel cudnn,triton --sequence 16384 --repeats 3
bench qwen-image 30 --model qwen-image --method $all
bench z-image 30 --model z-image --method $all
bench wan-1.3b 40 --model wan-1.3b --method $all --iterations 5
bench wan-14b 50 --model wan-14b --method $all --iterations 3 --repeats 2 --warmup 1
bench communication 35 --preset dit --method nccl_agkv,nccl_ulysses --component communication --repeats 3
bench attention 60 --preset dit --method nccl_agkv,nccl_ulysses --component attention --iterations 3 --repeats 3

echo "== results"
shopt -s nullglob
results=("$out"/*.json)
[ ${#results[@]} -gt 0 ] && python3 -m tools.benchmarks.fast_cp_frameworks.table "${results[@]}" | grep -v '^$'
exit $failed
