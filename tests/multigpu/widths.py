"""One command at several numbers of GPUs, side by side on GPUs of their own where they fit on the machine together.

    python tests/multigpu/widths.py --gpus 8 --widths 2 4 8 --limit 120 -- COMMAND... --cp {width} --limit {seconds}

``{width}`` and ``{seconds}`` are filled in. A round that does not end in its share of the time costs no other its own.
Exit code: 0, 1 where one failed, 3 where none did and one lacked something. Imports no torch.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

GRACE_S = 2.0  # to end by itself once told to
MARGIN_S = 3.0  # of a command's own limit before ours
POLL_S = 0.1
INCOMPLETE, TOO_LATE = 3, 124
MARK = "CHITU_WIDTHS_MARK"

Round = tuple[int, ...]


def rounds(widths: Sequence[int], gpus: int) -> list[Round]:
    """Which widths run at the same time, widest first; those above ``gpus`` are left out."""
    made: list[Round] = []
    for width in sorted((width for width in widths if width <= gpus), reverse=True):
        fits = next((i for i, row in enumerate(made) if sum(row) + width <= gpus), None)
        if fits is None:
            made.append((width,))
        else:
            made[fits] += (width,)
    return made


def filled(command: Sequence[str], width: int, seconds: float) -> list[str]:
    """``command`` with its two names."""
    return [word.replace("{width}", str(width)).replace("{seconds}", f"{seconds:.0f}") for word in command]


def devices_of(row: Round, visible: Sequence[str]) -> list[str]:
    """What each width of a round sees of the machine, as CUDA_VISIBLE_DEVICES."""
    starts = [sum(row[:index]) for index in range(len(row))]
    return [",".join(visible[start : start + width]) for start, width in zip(starts, row, strict=True)]


@dataclass
class Running:
    """One command at one width; ``mark`` stands in the environment of all that it starts, in whatever session."""

    width: int
    mark: str
    process: "subprocess.Popen[bytes]"

    def end(self) -> None:
        """Tell it to end, then end it with all it started: a launcher that is killed leaves its ranks behind."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE_S)
        for pid in marked(self.mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def start(width: int, command: Sequence[str], devices: str, environment: Mapping[str, str]) -> Running:
    mark = uuid.uuid4().hex
    own = {**environment, "CUDA_VISIBLE_DEVICES": devices, MARK: mark}
    return Running(width, mark, subprocess.Popen(command, env=own, start_new_session=True))


def marked(mark: str) -> list[int]:
    """The processes that have ``mark`` in their environment."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # of another user, or gone
            if f"{MARK}={mark}".encode() in file.read_bytes().split(b"\0"):
                found.append(int(file.parent.name))
    return found


def run_round(row: Round, command: Sequence[str], seconds: float, environment: Mapping[str, str]) -> dict[int, int]:
    """The exit code of every width; 124 where it took longer than ``seconds``."""
    visible = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    visible = visible if len(visible) >= sum(row) else [str(gpu) for gpu in range(sum(row))]
    running: list[Running] = []
    try:
        for width, devices in zip(row, devices_of(row, visible), strict=True):
            running.append(start(width, filled(command, width, seconds - MARGIN_S), devices, environment))
        until = time.monotonic() + seconds
        while time.monotonic() < until and any(one.process.poll() is None for one in running):
            time.sleep(POLL_S)
        codes = [one.process.poll() for one in running]
        return {one.width: TOO_LATE if code is None else code for one, code in zip(running, codes, strict=True)}
    finally:
        for one in running:
            one.end()


def exit_code(codes: Mapping[int, int]) -> int:
    """Of all widths together."""
    worst = {code for code in codes.values() if code}
    return 0 if not worst else INCOMPLETE if worst == {INCOMPLETE} else 1


def plan(made: Sequence[Round], command: Sequence[str], limit: float) -> str:
    """What would run, a line for each width."""
    told = []
    for number, row in enumerate(made, 1):
        share = limit / len(made)
        for width in row:
            words = shlex.join(filled(command, width, share - MARGIN_S))
            told.append(f"   round {number}, {width} GPUs, at most {share:.0f} s: {words}")
    return "\n".join(told)


def run_all(made: Sequence[Round], command: Sequence[str], limit: float) -> int:
    """Every round; the time that one leaves over is for those after it."""
    codes: dict[int, int] = {}
    until = time.monotonic() + limit
    for index, row in enumerate(made):
        share = (until - time.monotonic()) / (len(made) - index)
        began = time.monotonic()
        codes |= run_round(row, command, share, os.environ)
        for width in row:
            print(f"-- {width} GPUs: code {codes[width]}, round of {time.monotonic() - began:.0f} s", flush=True)
    return exit_code(codes)


def arguments(typed: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, required=True, help="how many the machine has")
    parser.add_argument("--widths", type=int, nargs="+", required=True, help="numbers of GPUs to run on")
    parser.add_argument("--limit", type=float, required=True, help="seconds for all of it")
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    parser.add_argument("command", nargs="+", help="behind --; {width} and {seconds} are filled in")
    return parser.parse_args(typed)


def _stop(number: int, _: FrameType | None) -> NoReturn:
    """The commands are no part of our process group, so whoever ends us must not leave them behind."""
    raise SystemExit(128 + number)


def main(typed: Sequence[str]) -> int:
    options = arguments(typed)
    made = rounds(options.widths, options.gpus)
    if not made:
        print(f"not run: it needs {min(options.widths)} GPUs and this machine has {options.gpus}")
        return INCOMPLETE
    if options.dry_run:
        print(plan(made, options.command, options.limit))
        return 0
    signal.signal(signal.SIGTERM, _stop)
    return run_all(made, options.command, options.limit)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
