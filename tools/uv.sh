#!/usr/bin/env bash
# Prints the path of a uv that works in this folder, installing one into .deps/uv where there is none. A version
# manager's shim may be on the PATH and still not know uv here, so "works" is tried, not assumed.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
own=.deps/uv/bin/uv
for candidate in uv "$own"; do
    if "$candidate" --version > /dev/null 2>&1; then
        [ "$candidate" = uv ] && command -v uv || printf '%s\n' "$root/$own"
        exit 0
    fi
done
for python in python3 python3.12 python3.13 /usr/bin/python3; do
    if "$python" -m venv .deps/uv > /dev/null 2>&1 && .deps/uv/bin/python -m pip install -q uv==0.13.9 >&2; then
        printf '%s\n' "$root/$own"
        exit 0
    fi
done
echo "uv is not installed, and no python3 could install it into .deps/uv; install uv (for example: pip install uv)" >&2
exit 3
