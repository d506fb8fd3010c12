"""What the Triton kernels compute, without a GPU: the cases run in Triton's interpreter, in a process of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = "tests/support/triton_cases.py"


@pytest.mark.timeout(150)
def test_the_kernels_are_right_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    # the child must not take itself for a worker of this run
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", CASES, "-n", "0", "-p", "no:cacheprovider", "-W", "ignore"]
    child = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=140, check=False)
    assert child.returncode == 0, f"{child.stdout[-6000:]}\n{child.stderr[-2000:]}"
    passed = re.search(r"(\d+) passed", child.stdout)
    assert passed is not None, child.stdout
    assert int(passed[1]) >= 25
