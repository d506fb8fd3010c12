#!/usr/bin/env bash
# What is proven and measured at every number of GPUs from two to those of the machine, in less than nine minutes.
#
#   [CHITU_COMMIT=abc] bash tools/benchmarks/fast_cp_frameworks/sweep.sh OUTDIR [PART...]
#   bash tools/benchmarks/fast_cp_frameworks/sweep.sh --dry-run --gpus 8 [OUTDIR [PART...]]   # the commands, not run
#
# Without PART everything runs; with some, these share the nine minutes in the proportions below, which are those of
# eight GPUs. Widths that do not take all GPUs run side by side on GPUs of their own. CHITU_COMMIT names the commit where
# the copy has no git repository. What python3 needs is in gpu_machine.sh; wrapper, step and serve also take diffusers
# and what `chitu serve` needs. Exit code: 0 right, 1 a part failed, 2 wrong usage, 3 nothing failed and something could
# not run, as where there are too few GPUs.
set -uo pipefail

all_s=540
parts=(exchanges attention e2e wrapper step serve)
declare -A seconds=([exchanges]=84 [attention]=118 [e2e]=104 [wrapper]=124 [step]=74 [serve]=33)
declare -A about=(
    [exchanges]="the extension: right, and its rates against flat copies, NCCL and torch's all-to-all"
    [attention]="AGKV, Ulysses and hybrid: right, and equal to NCCL's bits"
    [e2e]="Q, K, V to O of DiTs' shapes, against one GPU, NCCL and a flat copy"
    [wrapper]="the wrapper's matrix of real layers"
    [step]="a denoising step of Wan 14B at 720p and Qwen-Image at 1328 x 1328, ten blocks of each"
    [serve]="a server with elastic lanes of 1, 2 and 4 GPUs: pictures and times"
)

usage() {
    sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    echo
    for name in "${parts[@]}"; do
        printf '%-10s %4d s, %2d %%   %s\n' "$name" "${seconds[$name]}" $((seconds[$name] * 100 / all_s)) "${about[$name]}"
    done
}

refuse() {
    echo "error: $1" >&2
    exit 2
}

dry='' gpus=''
case ${1:---help} in
--help | -h) usage && exit ;;
--dry-run)
    [[ ${2:-} == --gpus && ${3:-} =~ ^[0-9]+$ ]] || refuse "--dry-run needs to know for how many GPUs: --dry-run --gpus 8"
    dry=1 gpus=$3
    shift 3
    ;;
-*) refuse "$1 is unknown; --help says what can be given" ;;
esac
out=${1:-OUTDIR}
wanted=("${@:2}")
for name in "${wanted[@]}"; do
    [ -n "${seconds[$name]:-}" ] || refuse "there is no part $name; the parts are ${parts[*]}"
done
if [ ! $dry ]; then
    mkdir -p "$out" || exit 2
    out=$(cd "$out" && pwd)
fi
cd "$(dirname "${BASH_SOURCE[0]}")/../../.." || exit 2
# shellcheck source=tools/benchmarks/fast_cp_frameworks/gpu_machine.sh
source tools/benchmarks/fast_cp_frameworks/gpu_machine.sh
if [ ! $dry ]; then
    prepare_machine
    gpus=$(python3 -c "import torch; print(torch.cuda.device_count())") || exit 2
fi
if [ ${#wanted[@]} -gt 0 ]; then
    sum=0
    for name in "${wanted[@]}"; do sum=$((sum + seconds[$name])); done
    for name in "${wanted[@]}"; do seconds[$name]=$((seconds[$name] * (all_s - 4) / sum)); done
fi

scheduled() { # NAME NEEDS COMMAND...: a part that needs so many GPUs
    local name=$1 needs=$2
    shift 2
    is_wanted "$name" || return 0
    if [ "$gpus" -lt "$needs" ]; then
        echo "== $name: not run, since it needs $needs GPUs and this machine has $gpus"
        incomplete=1
    elif [ $dry ]; then
        echo "== $name (at most ${seconds[$name]} s)"
        "$@"
    else
        part "$name" "${seconds[$name]}" "$@"
    fi
}

at() { # NAME WIDTHS COMMAND...: one command at each of the widths that the machine has
    local name=$1 widths
    read -ra widths <<<"$2"
    shift 2
    scheduled "$name" "${widths[0]}" python3 tests/multigpu/widths.py ${dry:+--dry-run} --gpus "$gpus" \
        --limit $((seconds[$name] - 2)) --widths "${widths[@]}" -- "$@"
}

ranks=(python3 -m torch.distributed.run --standalone '--nproc-per-node={width}')
tools=tools.benchmarks.fast_cp_frameworks
# of Wan 14B; of Qwen-Image at 1024 and 1328 squared; of Z-Image at 1024 and 2048 squared; of Wan 1.3B
shapes=40:4096,40:8192,40:16384,40:32760,40:75600,24:4096,24:6889,30:4096,30:16384,12:32760,12:75600

at exchanges "2 3 4 5 6 7 8" "${ranks[@]}" tests/multigpu/extension_probe.py --shapes 60 --replays 10 \
    --output "$out/exchanges-{width}.json" --limit '{seconds}'
at attention "2 3 4 5 6 7 8" "${ranks[@]}" tests/multigpu/fast_attention.py --cases 14 --exact 14 \
    --output "$out/attention-{width}.json" --limit '{seconds}'
at e2e "2 4 8" python3 -m $tools.compare --cp-size '{width}' --shape $shapes \
    --only fast_agkv,fast_ulysses,nccl_,flat_copy --limit '{seconds}' --output "$out/e2e-{width}"
at wrapper "4 8" bash chitu_diffusion/parallel/cp/fast/test/run_wrapper.sh "$out/wrapper-{width}" --cp '{width}' \
    --limit '{seconds}'
at step "2 4 8" python3 -m $tools.models --cp '{width}' --layers 10 --iterations 2 \
    --model wan-14b-720p qwen-image-1328 --output "$out/step-{width}.json"
scheduled serve 2 ${dry:+echo "  "} python3 tests/multigpu/elastic.py --devices $((gpus < 4 ? 2 : 4)) \
    --output "$out/serve.json"

[ $failed -eq 0 ] || exit 1
exit $((incomplete * 3))
