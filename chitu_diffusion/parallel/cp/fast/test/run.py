"""The acceptance test's command: ``python -m chitu_diffusion.parallel.cp.fast.test.run OUTDIR``; see ``options``."""

import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from types import FrameType

from chitu_diffusion.parallel.cp.errors import CPError
from chitu_diffusion.parallel.cp.fast.test import launch, options, report
from chitu_diffusion.parallel.cp.fast.test.options import Options
from chitu_diffusion.parallel.cp.fast.test.report import Record
from chitu_diffusion.parallel.cp.fast.test.rows import Case

RunDegree = Callable[[Sequence[Case], Options], list[Record]]


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    signal.signal(signal.SIGTERM, _ended)
    try:
        wanted = options.parse(arguments)
        records = run(wanted, gpus() if wanted.device == "cuda" else None, _run_degree)
    except CPError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    text = report.summary(records, shlex.join(["run_wrapper.sh", "OUTDIR", *arguments[1:]]))
    (wanted.outdir / "summary.md").write_text(text)
    told = {status: sum(record.status == status for record in records) for status in {r.status for r in records}}
    print(", ".join(f"{count} {status}" for status, count in sorted(told.items())) + f"; {wanted.outdir}/summary.md")
    return report.exit_code(records)


def run(wanted: Options, num_gpus: int | None, run_degree: RunDegree) -> list[Record]:
    """Every case's record; degrees for which there are too few GPUs (None: no GPUs are needed) are not run."""
    wanted.outdir.mkdir(parents=True, exist_ok=True)
    for case in wanted.cases:
        (wanted.outdir / f"{case.name}.json").unlink(missing_ok=True)  # an earlier run's must not pass for this one's
    print(report.header(), flush=True)
    records: list[Record] = []
    for degree, group in groupby(wanted.cases, key=lambda case: case.cp):
        cases = list(group)
        if num_gpus is not None and degree > num_gpus:
            reason = f"it needs {degree} GPUs and this machine has {num_gpus}"
            records += [_not_run(case, reason, wanted) for case in cases]
        else:
            records += run_degree(cases, wanted)
    return records


def gpus() -> int:
    """How many this machine has."""
    import torch  # --help must not wait for it

    return torch.cuda.device_count()


def _ended(number: int, _frame: FrameType | None) -> None:
    """As Ctrl-C does it: by an exception, so that the ranks are ended on the way out."""
    raise SystemExit(128 + number)


def _run_degree(cases: Sequence[Case], wanted: Options) -> list[Record]:
    return launch.run(cases, wanted.outdir, wanted.device, wanted.limit_s)


def _not_run(case: Case, reason: str, wanted: Options) -> Record:
    record = Record(case, report.NOT_RUN, reason)
    report.write(wanted.outdir, record)
    print(report.line(record), flush=True)
    return record


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
