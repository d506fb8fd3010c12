#!/usr/bin/env bash
# What is measured and proven on a machine with two GPUs: the results of docs/results/.
#
#   [CHITU_COMMIT=abc] bash tools/benchmarks/fast_cp_frameworks/two_gpus.sh OUTDIR [PART...]
#
# Without PART everything runs, in about 25 minutes; the parts and their limits are listed below. CHITU_COMMIT names the
# commit where the copy has no git repository.
#
# Beside what gpu_machine.sh needs, wrapper, models and pictures take diffusers and what `chitu serve` needs, compare the
# libraries of the uv group peers.
# Each part has its own time limit, so that one that hangs costs no other its time. Exit code: 0, or 1 if a part failed.
set -uo pipefail

out=${1:?"usage: two_gpus.sh OUTDIR [PART...]"}
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/../../.." || exit 2
shift
wanted=("$@")

# shellcheck source=tools/benchmarks/fast_cp_frameworks/gpu_machine.sh
source tools/benchmarks/fast_cp_frameworks/gpu_machine.sh
prepare_machine

bench() { # NAME SECONDS OPTIONS...: one run of the benchmark, into NAME.json
    local name=$1 limit=$2
    shift 2
    part "$name" "$limit" python3 -m tools.benchmarks.fast_cp_frameworks.chitu --cp-size 2 --debug \
        --output "$out/$name.json" "$@"
}

program() { # NAME SECONDS FILE OPTIONS...: a program of tests/multigpu on two ranks, into NAME.json
    local name=$1 limit=$2 file=$3
    shift 3
    part "$name" "$limit" python3 -m torch.distributed.run --standalone --nproc-per-node=2 \
        "tests/multigpu/$file" --output "$out/$name.json" --limit $((limit - 5)) "$@"
}

all=single,nccl_agkv,nccl_ulysses,fast_agkv,fast_ulysses
part doctor 60 python3 -m chitu_diffusion.cli doctor --require fast --self-test
program probe 60 extension_probe.py
program calls 110 fast_attention.py --cases 170 --exact 150
part faults 100 python3 tests/multigpu/extension_faults.py --output "$out/faults.json"
for late in 0.5 1.5 3; do program "late-$late" 45 fused_late.py --late "$late"; done
program endurance 60 extension_endurance.py --steps neighbours calls --budget 40
program resolutions 300 extension_endurance.py --steps resolutions
program pictures 280 pictures.py
part tests 200 python3 -m pytest -o addopts="" -p no:cacheprovider -q tests/gpu
bench dit 240 --preset dit --method $all --kernel auto,cudnn --iterations 6 --repeats 3
bench qwen-image 60 --model qwen-image --method $all,fast_auto --iterations 8
bench z-image 50 --model z-image --method $all,fast_auto --iterations 8
bench images-24 60 --heads 24 --sequence 9216,16384 --method $all,fast_auto --iterations 6
bench images-30 60 --heads 30 --sequence 6889,9216 --method $all,fast_auto --iterations 6
bench graph-or-eager 30 --sequence 4096 --compare "fast_agkv:fused(4)/cute/graph" "fast_agkv:fused(4)/cute/eager"
bench kept-plans 30 --model z-image --sequence 4096 --method single,fast_auto --iterations 8
bench wan-1.3b 90 --model wan-1.3b --method $all,fast_auto --iterations 5
part wrapper 260 bash chitu_diffusion/parallel/cp/fast/test/run_wrapper.sh "$out/wrapper" --cp 2
mkdir -p "$out/models"
part models 300 python3 -m tools.benchmarks.fast_cp_frameworks.models --output "$out/models/images.json" \
    --iterations 4 --model qwen-image-1328 z-image-1024
part models 300 python3 -m tools.benchmarks.fast_cp_frameworks.models --output "$out/models/wan-14b-720p.json" \
    --iterations 2 --model wan-14b-720p
part compare 420 python3 -m tools.benchmarks.fast_cp_frameworks.compare --preset dit --limit 400 --output "$out/compare"
bench wan-14b 90 --model wan-14b --method $all --iterations 3 --repeats 2 --warmup 1

echo "== results"
results=()
for name in dit qwen-image z-image images-24 images-30 wan-1.3b wan-14b; do
    [ -f "$out/$name.json" ] && results+=("$out/$name.json")
done
[ ${#results[@]} -gt 0 ] && python3 -m tools.benchmarks.fast_cp_frameworks.table "${results[@]}" | grep -v '^$'
exit $((failed || incomplete))
