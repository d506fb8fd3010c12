# shellcheck shell=bash
# The environment of Fast CP, for bash and zsh:  source tools/install/fast_cp_env.sh
#
#   FAST_CP_DEPS_ROOT      downloads and builds           (.deps/fast-cp in this repository)
#   FAST_CP_BUILD_ROOT     checkout of fast-ulysses       ($FAST_CP_DEPS_ROOT/src/fast-ulysses)
#   FLASH_ATTENTION_ROOT   checkout of flash-attention    ($FAST_CP_DEPS_ROOT/src/flash-attention)
#   NVSHMEM_HOME           NVSHMEM to build against       (torch's own copy, else $FAST_CP_DEPS_ROOT/python)
#   CHITU_EXTRA_PYTHONPATH isolated packages for workers  ($FAST_CP_DEPS_ROOT/python)
#
# Each may be set before; a relative path counts from the folder in which this is sourced. Sourcing it again changes
# nothing. FAST_CP_ENV_NOTED remembers that the note about NVSHMEM was given.

# The folder above tools/, of the file at path $1.
_fast_cp_root() {
    (
        unset CDPATH
        # a hook or alias of an interactive shell may print where it goes
        builtin cd "$(dirname "$1")/../.." > /dev/null 2>&1 && pwd -P
    )
}

_fast_cp_absolute() {
    case $1 in
        /*) printf '%s\n' "$1" ;;
        *) printf '%s/%s\n' "$PWD" "${1#./}" ;;
    esac
}

# The NVSHMEM beside torch in the active virtual environment or in the repository's ($1); prints nothing where none is.
_fast_cp_torch_nvshmem() {
    local venv minor packages
    for venv in "${VIRTUAL_ENV:-}" "$1/.venv"; do
        for minor in 12 13 14; do
            packages="$venv/lib/python3.$minor/site-packages"
            if [ -n "$venv" ] && [ -d "$packages/torch" ] && [ -d "$packages/nvidia/nvshmem" ]; then
                printf '%s\n' "$packages/nvidia/nvshmem"
                return 0
            fi
        done
    done
}

# Chooses NVSHMEM_HOME where it is not set, and says once which copy runs where there is more than one.
_fast_cp_nvshmem() {
    local root="$1" own isolated="$FAST_CP_DEPS_ROOT/python/nvidia/nvshmem" note=""
    own=$(_fast_cp_torch_nvshmem "$root")
    if [ -z "${NVSHMEM_HOME:-}" ]; then
        if [ -z "$own" ] && [ -d "$isolated" ]; then
            NVSHMEM_HOME="$isolated"
        else # without torch yet, the place where the locked environment will have it
            NVSHMEM_HOME="${own:-$root/.venv/lib/python3.12/site-packages/nvidia/nvshmem}"
        fi
        if [ -n "$own" ] && [ -d "$isolated" ]; then
            note="the NVSHMEM in $isolated is not used: torch loads its own copy, $own"
        fi
    elif [ -n "$own" ] && ! [ "$NVSHMEM_HOME" -ef "$own" ]; then
        note="NVSHMEM_HOME, $NVSHMEM_HOME, is only built against: torch loads its own copy, $own"
    fi
    if [ -n "$note" ] && [ -z "${FAST_CP_ENV_NOTED:-}" ]; then
        printf 'fast_cp_env: %s\n' "$note" >&2
        export FAST_CP_ENV_NOTED=nvshmem
    fi
}

_fast_cp_env() {
    local root
    root=$(_fast_cp_root "$1") || return 1
    FAST_CP_DEPS_ROOT=$(_fast_cp_absolute "${FAST_CP_DEPS_ROOT:-$root/.deps/fast-cp}")
    FAST_CP_BUILD_ROOT=$(_fast_cp_absolute "${FAST_CP_BUILD_ROOT:-$FAST_CP_DEPS_ROOT/src/fast-ulysses}")
    FLASH_ATTENTION_ROOT=$(_fast_cp_absolute "${FLASH_ATTENTION_ROOT:-$FAST_CP_DEPS_ROOT/src/flash-attention}")
    CHITU_EXTRA_PYTHONPATH="${CHITU_EXTRA_PYTHONPATH:-$FAST_CP_DEPS_ROOT/python}"
    _fast_cp_nvshmem "$root"
    NVSHMEM_HOME=$(_fast_cp_absolute "$NVSHMEM_HOME")
    export FAST_CP_DEPS_ROOT FAST_CP_BUILD_ROOT FLASH_ATTENTION_ROOT NVSHMEM_HOME CHITU_EXTRA_PYTHONPATH
}

if [ -n "${ZSH_VERSION:-}" ]; then
    case ${ZSH_EVAL_CONTEXT:-} in
        *:file*) eval '_fast_cp_env "${(%):-%x}"' ;; # zsh's name of the file being sourced, which bash cannot parse
        *) echo "fast_cp_env.sh sets variables of the calling shell; run: source $0" >&2 && exit 2 ;;
    esac
elif [ -n "${BASH_VERSION:-}" ]; then
    if (return 0 2> /dev/null); then
        _fast_cp_env "${BASH_SOURCE[0]}"
    else
        echo "fast_cp_env.sh sets variables of the calling shell; run: source $0" >&2
        exit 2
    fi
else
    echo "fast_cp_env.sh needs bash or zsh; source it in one of them" >&2
    # shellcheck disable=SC2317 # reached where the file is run and not sourced
    return 2 2> /dev/null || exit 2
fi
unset -f _fast_cp_root _fast_cp_absolute _fast_cp_torch_nvshmem _fast_cp_nvshmem _fast_cp_env
