# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # who sources it sets `wanted` and reads `failed` and `incomplete`
# What two_gpus.sh and sweep.sh share, to be sourced in the repository's root: the environment of a GPU machine, and
# parts with time limits. Who sources it has `wanted`, the array of the parts that were asked for (empty: all).
#
# Needs python3 with torch, triton, rich, pydantic and pytest. A machine without network takes from .carry/ what it
# finds there: whl/*.whl, cute/*.tar.xz and peers/*.tar.xz (packed site folders), and lib/libfast_cp.so.

prepare_machine() {
    # one host whose GPUs others share: NVLink multicast stays off (a program that uses it can put them out of service)
    export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
    export PYTHON=${PYTHON:-python3} # of run_wrapper.sh
    export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
    CHITU_CACHE_DIR=$(mktemp -d) # every plan is measured anew, once for all parts
    export CHITU_CACHE_DIR
    export PYTHONPATH=$PWD:$PWD/csrc/python${PYTHONPATH:+:$PYTHONPATH}
    unpack_carried
    if [ -f .carry/lib/libfast_cp.so ]; then export FAST_CP_LIBRARY=$PWD/.carry/lib/libfast_cp.so; fi
}

unpack_carried() {
    shopt -s nullglob
    local archives=(.carry/cute/*.tar.xz .carry/peers/*.tar.xz) wheels=(.carry/whl/*.whl)
    shopt -u nullglob
    [ $((${#archives[@]} + ${#wheels[@]})) -gt 0 ] || return 0
    local site archive
    site=$(mktemp -d)
    for archive in "${archives[@]}"; do tar -xJf "$archive" -C "$site" & done
    wait
    [ ${#wheels[@]} -gt 0 ] && python3 -m pip install -q --no-index --no-deps --upgrade --target "$site" "${wheels[@]}"
    export PYTHONPATH=$site:$PYTHONPATH
}

is_wanted() { # NAME: whether it was asked for, or nothing was
    [ ${#wanted[@]} -eq 0 ] || [[ " ${wanted[*]} " == *" $1 "* ]]
}

failed=0 incomplete=0
part() { # NAME SECONDS COMMAND...: run it, and remember if it failed or lacked something (code 3)
    local name=$1 limit=$2 begin=$SECONDS code=0
    shift 2
    is_wanted "$name" || return 0
    echo "== $name (at most $limit s)"
    timeout --kill-after=10 "$limit" "$@" || code=$?
    case $code in
    0) echo "== $name: right after $((SECONDS - begin)) s" ;;
    3) echo "== $name: INCOMPLETE after $((SECONDS - begin)) s" && incomplete=1 ;;
    *) echo "== $name: FAILED with code $code after $((SECONDS - begin)) s" && failed=1 ;;
    esac
}
