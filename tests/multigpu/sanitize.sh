#!/usr/bin/env bash
# The SM and TMA kernels under compute-sanitizer, two ranks on one GPU:
#
#   FAST_CP_LIBRARY=build/libfast_cp.so bash tests/multigpu/sanitize.sh OUTDIR [--two-gpus]
#
# Logs go to OUTDIR, one per tool and rank. Exit code 0 where both tools ran to their end and found nothing, 1 where one
# did not, 2 for wrong usage, 3 where compute-sanitizer is missing. PYTHON names the interpreter (default: python3),
# SANITIZER_FLAGS adds flags to compute-sanitizer.
set -u

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}

if [ "${1:-}" = --rank ]; then # one rank, started below
  tool=$2 log=$3
  shift 3
  # errors of API calls are left out: probing calls that are refused belong to how libraries start
  # shellcheck disable=SC2086,SC2153 # flags are words, and RANK is given by torch.distributed.run
  exec "$FAST_CP_SANITIZER" --tool "$tool" --target-processes application-only --kernel-name kernel_substring=fast_cp \
    --report-api-errors no --print-limit 20 --log-file "$log/$tool.$RANK.txt" ${SANITIZER_FLAGS:-} \
    "$python" "$here/extension_sanitized.py" "$@"
fi

if [ $# -lt 1 ] || [ $# -gt 2 ] || { [ $# -eq 2 ] && [ "$2" != --two-gpus ]; }; then
  echo "usage: sanitize.sh OUTDIR [--two-gpus]" >&2
  exit 2
fi
mkdir -p "$1" || exit 2
out=$(cd "$1" && pwd)
one_gpu=(--one-gpu)
[ $# -eq 2 ] && one_gpu=()

FAST_CP_SANITIZER=$(command -v compute-sanitizer || command -v "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer")
if [ -z "$FAST_CP_SANITIZER" ]; then
  echo "compute-sanitizer was looked for in PATH and CUDA_HOME and not found; set CUDA_HOME to a CUDA toolkit" >&2
  exit 3
fi
export FAST_CP_SANITIZER

ranks=2
bad=0

run_tool() { # tool, seconds, number of cases
  local tool=$1 seconds=$2 cases=$3 code began=$SECONDS rank log summary
  rm -f "$out/$tool".*.txt
  timeout -k 5 "$seconds" "$python" -m torch.distributed.run --standalone --nproc-per-node=$ranks --no-python \
    bash "$here/sanitize.sh" --rank "$tool" "$out" --limit $((seconds - 5)) --cases "$cases" \
    --output "$out/$tool.json" "${one_gpu[@]}" >"$out/$tool.out" 2>&1
  code=$?
  [ $code -eq 0 ] || { bad=1 && tail -n 15 "$out/$tool.out"; }
  for ((rank = 0; rank < ranks; rank++)); do
    log=$out/$tool.$rank.txt
    summary=$(grep -h 'SUMMARY' "$log" 2>/dev/null | tail -n 1)
    case $summary in
      *"SUMMARY: 0 errors"* | *"SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"*) ;;
      *) bad=1 && { grep -hE 'Invalid|hazard|Error|error|at .*\(' "$log" 2>/dev/null | head -n 12; } ;;
    esac
    results+=("$tool, rank $rank: ${summary:-no summary: it did not end}")
  done
  results+=("$tool: exit code $code, $((SECONDS - began)) s, $(grep -o '"wrong": [0-9]*' "$out/$tool.json" 2>/dev/null)")
}

results=()
# without torch's caching, every tensor is an allocation whose bounds memcheck knows
PYTORCH_NO_CUDA_MEMORY_CACHING=1 run_tool memcheck 65 4
run_tool racecheck 72 3
printf '%s\n' "${results[@]}"
if [ $bad -eq 0 ]; then echo "ok   compute-sanitizer found nothing"; else echo "FAIL compute-sanitizer: see $out"; fi
exit $bad
