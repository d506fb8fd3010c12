"""`chitu doctor`: probe (never raises) → judge (pure) → render. Works without a GPU and without torch.

Whatever may crash or hang while it loads is imported by `child`, in a process of its own; `self_test` uses the
extension in two.
"""

import sys
from collections.abc import Sequence

from chitu_diffusion.commands.doctor.judge import judge, parse_required
from chitu_diffusion.commands.doctor.probe import probe
from chitu_diffusion.commands.doctor.render import to_json, write
from chitu_diffusion.parallel.cp.errors import ExitCode


def run_doctor(require: Sequence[str] = (), *, as_json: bool = False, self_test: bool = False) -> ExitCode:
    """Write the report to stdout and return how the command ends; an unknown requirement raises ConfigError."""
    required = parse_required(require)
    report = judge(probe(self_test=self_test), required)
    if as_json:
        print(to_json(report))
    else:
        write(report, sys.stdout)
    return report.exit_code
