"""The benchmark's command: check and time our context-parallel attention; see README.md beside this file.

``python -m tools.benchmarks.fast_cp_frameworks.chitu --preset quick --method single,nccl_agkv,nccl_ulysses``
starts its own processes; under ``torch.distributed.run`` each process is one rank.
"""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from chitu_diffusion.parallel.cp.errors import CPError, ExitCode
from tools.benchmarks.fast_cp_frameworks import launch, options

MODULE = "tools.benchmarks.fast_cp_frameworks.chitu"
# longer than another rank takes to come as far as this one, in a run that is refused before torch is imported
REFUSED_S = 5.0


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the command; returns the exit code."""
    launch.end_with_parent(environment)
    try:
        wanted = options.parse(arguments, environment)
        world = options.world_size(wanted.cp_size, environment)
        wanted.check()
        if world is None:
            return launch.run(MODULE, arguments, wanted)
        from tools.benchmarks.fast_cp_frameworks import job  # imports torch, which bad input must not wait for

        return job.run(wanted)
    except CPError as error:
        return _refuse(error, environment)


def _refuse(error: CPError, environment: Mapping[str, str]) -> ExitCode:
    """Say it once for all ranks, which meet the same error."""
    if environment.get("RANK", "0") != "0":
        time.sleep(REFUSED_S)  # a launcher ends rank 0 in mid-sentence when another rank fails first
        return error.exit_code
    print(f"error: {error}", file=sys.stderr, flush=True)
    _tell_torchrun(str(error), environment)
    return error.exit_code


def _tell_torchrun(message: str, environment: Mapping[str, str]) -> None:
    """torch.distributed.run ends its own, long report with what a failed rank left in this file."""
    file = environment.get("TORCHELASTIC_ERROR_FILE")
    if file:
        extra = {"timestamp": str(int(time.time())), "py_callstack": message}
        Path(file).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:], os.environ))
