"""A rank that is killed, stopped or raises in the middle of calls: the other ends with a sentence, and nothing is left.

    FAST_CP_LIBRARY=build/libfast_cp.so python tests/multigpu/extension_faults.py --output faults.json

Starts its own ranks, two at a time. Prints a short table last; exit code 0 where everything holds.
"""

import argparse
import faulthandler
import importlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import faults_worker

# scenario → the method that is called meanwhile
SCENARIOS = {"killed": "agkv", "stopped": "ulysses", "raising": "agkv"}
WORLD, VICTIM, SURVIVOR = 2, 1, 0
EXITS_WITHIN_S = 15.0
START_S = 60.0
BACK_WITHIN_MB = 64
WINDOW = r"window '\w+' \(slot \d+\)"
SENTENCE = re.compile(
    rf"rank {SURVIVOR} waited [\d.]+ s for "
    rf"(chunk \d+ of {WINDOW} from rank {VICTIM}: it has announced use \d+ and use \d+ was expected"
    rf"|rank {VICTIM} to finish reading {WINDOW}: it has finished use \d+ and use \d+ was expected"
    rf"|rank {VICTIM} to start use \d+ of {WINDOW}: it has started use \d+)"
)


def arguments() -> argparse.Namespace:
    parser = common.parser(__doc__, limit=200)
    parser.add_argument("--timeout-s", type=float, default=5.0, help="how long a rank waits for another")
    parser.add_argument("--scenarios", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS))
    return parser.parse_args()


class Rank:
    """One process of ours, at the head of a session of its own, and what it says."""

    def __init__(self, rank: int, scenario: str, folder: Path, options: argparse.Namespace) -> None:
        self.rank, self.log = rank, folder / f"rank{rank}.txt"
        command = [sys.executable, faults_worker.__file__, "--scenario", scenario, "--method", SCENARIOS[scenario]]
        command += ["--rank", str(rank), "--world", str(WORLD), "--store", str(folder / "store"), "--limit", "100"]
        command += ["--timeout-s", str(options.timeout_s)] + (["--one-gpu"] if options.one_gpu else [])
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def ended(self) -> bool:
        return self.process.poll() is not None

    def end(self) -> None:
        """Kill whatever is left of its session, and reap it."""
        for pid in processes_of(self.pid):
            os.kill(pid, signal.SIGKILL)
        if not self.ended():
            self.process.kill()
        self.process.wait(timeout=10)


def processes_of(session: int) -> list[int]:
    """The processes of a session that live, stopped ones included."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended while we looked
            continue
        if fields[0] not in "ZX" and int(fields[3]) == session:
            found.append(int(stat.parent.name))
    return found


def gpus() -> list[tuple[int, list[int]]]:
    """For every GPU, the bytes in use and the processes that NVML sees on it."""
    pynvml = importlib.import_module("pynvml")
    pynvml.nvmlInit()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return [
            (
                int(pynvml.nvmlDeviceGetMemoryInfo(handle).used),
                [int(process.pid) for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)],
            )
            for handle in handles
        ]
    finally:
        pynvml.nvmlShutdown()


def waited(condition: Callable[[], bool], limit_s: float) -> float | None:
    """Seconds until ``condition`` held; None where it did not in time."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > limit_s:
            return None
        time.sleep(0.02)
    return round(time.monotonic() - began, 2)


def provoke(scenario: str, ranks: list[Rank]) -> bool:
    """Let the fault happen; False where it does not come."""
    victim = ranks[VICTIM]
    if scenario == "raising":
        return waited(lambda: faults_worker.RAISES in victim.said(), 10) is not None
    time.sleep(0.5)
    os.kill(victim.pid, signal.SIGKILL if scenario == "killed" else signal.SIGSTOP)
    return True


def observe(scenario: str, ranks: list[Rank]) -> dict[str, Any]:
    """From the start of the calls to the end of the survivor."""
    started = waited(lambda: all(faults_worker.RUNNING in r.said() or r.ended() for r in ranks), START_S)
    if started is None or any(r.ended() for r in ranks) or not provoke(scenario, ranks):
        return {"started": False}
    survivor, victim = ranks[SURVIVOR], ranks[VICTIM]
    began = time.monotonic()
    told = waited(lambda: faults_worker.TOLD in survivor.said() or survivor.ended(), 2 * EXITS_WITHIN_S)
    waited(survivor.ended, EXITS_WITHIN_S)
    seconds = round(time.monotonic() - began, 2)
    found = SENTENCE.search(survivor.said())
    seen: dict[str, Any] = {
        "started": True,
        "seconds_to_sentence": told,
        "seconds_to_exit": seconds if survivor.ended() else None,
        "exit_code": survivor.process.poll(),
        "sentence": found.group(0) if found else None,
    }
    if scenario == "raising":
        waited(victim.ended, max(0.0, EXITS_WITHIN_S - seconds))
        seen["victim_exit_code"] = victim.process.poll()
        seen["victim_says_why"] = f"ValueError: {faults_worker.PLANNED}" in victim.said()
    return seen


def run_scenario(scenario: str, options: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks, watch them, end them, and look for what is left."""
    before = gpus()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [Rank(rank, scenario, Path(folder), options) for rank in range(WORLD)]
        try:
            seen = observe(scenario, ranks)
            seen["gpu_mb_while_victim_is_there"] = [round(used / common.MB) for used, _ in gpus()]
        finally:
            for rank in ranks:
                rank.end()
        ours = {rank.pid for rank in ranks}
        seen["processes_left"] = [pid for rank in ranks for pid in processes_of(rank.pid)]
        seen["seconds_to_free_gpus"] = waited(lambda: freed(before, gpus(), ours), 10)
        seen["gpu_mb_before"] = [round(used / common.MB) for used, _ in before]
        seen["gpu_mb_after"] = [round(used / common.MB) for used, _ in gpus()]
        seen["said"] = {rank.rank: rank.said()[-3000:] for rank in ranks}
    return seen


def freed(before: list[tuple[int, list[int]]], after: list[tuple[int, list[int]]], ours: set[int]) -> bool:
    """Whether none of our processes is on a GPU, and the memory is what it was."""
    if any(ours & set(pids) for _, pids in after):
        return False
    return all(now - then <= BACK_WITHIN_MB * common.MB for (then, _), (now, _) in zip(before, after, strict=True))


def verdict(scenario: str, seen: dict[str, Any]) -> dict[str, bool]:
    name = f"{scenario}: "
    if not seen["started"]:
        return {name + "started": False}
    seconds, code = seen["seconds_to_exit"], seen["exit_code"]
    checks = {
        name + f"the other ends within {EXITS_WITHIN_S:g} s ({seconds} s)": seconds is not None
        and seconds <= EXITS_WITHIN_S,
        name + f"with a sentence and an exit code ({code})": seen["sentence"] is not None and code not in (None, 0),
        name + "no process left": not seen["processes_left"],
        name + "GPU memory back": seen["seconds_to_free_gpus"] is not None,
    }
    if scenario == "raising":
        checks[name + "the cause is shown"] = seen["victim_says_why"] and seen["victim_exit_code"] not in (None, 0)
    return checks


def out_of_time(*_: object) -> None:
    raise TimeoutError("--limit has passed")  # so that the ranks are ended on the way out


def main() -> int:
    options = arguments()
    signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(options.limit)
    faulthandler.dump_traceback_later(options.limit + 30, exit=True)
    report: dict[str, Any] = {"world": WORLD, "one_gpu": options.one_gpu}
    checks: dict[str, bool] = {}
    for scenario in options.scenarios:
        report[scenario] = seen = run_scenario(scenario, options)
        checks |= verdict(scenario, seen)
        common.write(report, options.output)
        told = seen["said"][SURVIVOR] if not seen.get("sentence") else seen["sentence"]
        print(f"{scenario}: {told}", flush=True)
    report["checks"] = checks
    common.write(report, options.output)
    common.show(checks)
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
