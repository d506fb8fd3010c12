"""Real servers for tests: their ranks are forked from one process that has imported everything and made tiny models.

Starting a process that imports torch and diffusers takes seconds, and a server has several. What is forked runs the
command line as a launcher would start it. As a program, this file is the process from which they are forked.
"""

import atexit
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import yaml

START_S = 60.0
MODELS = {"wan": "wan", "qwen-image": "qwen_image", "zimage": "z_image"}  # and how tiny_pipelines makes them


class Nursery:
    """The process from which ranks are forked; it ends with its standard input, and its children with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.gloo.test_serve_support", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).resolve().parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        )
        self.pid = self._process.pid

    def ask(self, **question: Any) -> int:
        """Fork a rank, or wait for one to end; returns a process id, or an exit code."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


class Server:
    """A server of ``world`` ranks. ``patches`` are module attributes that its processes have otherwise."""

    def __init__(self, name: str, world: int, patches: dict[str, Any] | None = None, **keys: Any) -> None:
        self._nursery = nursery()
        folder = self._nursery.folder / f"server-{time.monotonic_ns()}"
        folder.mkdir()
        stage = {"model": {"name": name, "path": str(self._nursery.folder / name)}, "devices": world, **keys}
        stage["service"] = {"port": 0, **stage.get("service", {})}
        (folder / "stage.yaml").write_text(yaml.safe_dump(stage))
        self.out, self.err = folder / "out", folder / "err"
        arguments = ["serve", "--stage-config", str(folder / "stage.yaml")]
        self.pids = [
            self._nursery.ask(environ=self._environ(rank, world, folder), arguments=arguments, out=str(self.out),
                        err=str(self.err), patches=patches or {})
            for rank in range(world)
        ]  # fmt: skip
        self.url = self._wait()
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def image(self, **body: Any) -> httpx.Response:
        """Ask for a picture."""
        asked = {"prompt": "a fox", "size": "112x80", "num_inference_steps": 2, "seed": 1, **body}
        return self.client.post("/v1/images/generations", json=asked)

    def until(self, wanted: dict[str, Any], limit_s: float = 30.0) -> dict[str, Any]:
        """What /health says as soon as it says ``wanted`` among other things."""
        end = time.monotonic() + limit_s
        while True:
            health: dict[str, Any] = self.client.get("/health").json()
            if wanted.items() <= health.items():
                return health
            assert time.monotonic() < end, health
            time.sleep(0.02)

    def stop(self, *numbers: signal.Signals) -> list[int]:
        """Send a signal to all ranks, as a launcher does; returns their exit codes."""
        for number in numbers or (signal.SIGTERM,):
            for pid in self.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        codes = [self._nursery.ask(wait=pid) for pid in self.pids]
        self.pids.clear()
        self.client.close()
        return codes

    def _environ(self, rank: int, world: int, folder: Path) -> dict[str, str]:
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        own = {"CHITU_GENERATE_STORE": folder / "store", "CHITU_GENERATE_PARENT": self._nursery.pid}
        return {name: str(value) for name, value in (ranks | own).items()}

    def _wait(self) -> str:
        end = time.monotonic() + START_S
        while "http://" not in (told := self.out.read_text() if self.out.exists() else ""):
            assert time.monotonic() < end, self.err.read_text()
            time.sleep(0.02)
        return "http://" + told.split("http://")[1].split()[0]


@cache
def nursery() -> Nursery:
    """The one of this test process."""
    folder = tempfile.TemporaryDirectory()
    found = Nursery(Path(folder.name))
    atexit.register(folder.cleanup)
    atexit.register(found.close)
    return found


@cache
def kept(name: str, world: int) -> Server:
    """A server that stays for all tests that leave it as it was."""
    return Server(name, world)


def alive(pid: int) -> bool:
    """Running; a zombie, which nobody has reaped, is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _fork(question: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for number, path in ((0, os.devnull), (1, question["out"]), (2, question["err"])):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
        os.environ |= question["environ"]
        sys.argv = ["chitu", *question["arguments"]]
        for name, value in question["patches"].items():
            module, attribute = name.rsplit(".", 1)
            setattr(importlib.import_module(module), attribute, value)
        importlib.import_module("chitu_diffusion.cli").main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    finally:
        os._exit(code)


def _serve(folder: Path) -> None:
    from tests.support import tiny_pipelines

    importlib.import_module("chitu_diffusion.commands.serve.rank")
    for name, make in MODELS.items():
        getattr(tiny_pipelines, make)().save_pretrained(folder / name)
    for line in sys.stdin:
        question = json.loads(line)
        answer = (
            os.waitstatus_to_exitcode(os.waitpid(question["wait"], 0)[1]) if "wait" in question else _fork(question)
        )
        print(answer, flush=True)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
