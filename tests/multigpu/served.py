"""`chitu serve` as a user starts it, for pictures.py and elastic.py."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import yaml

START_S, END_S = 120.0, 30.0


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "chitu_diffusion.cli", *words]


def environment() -> dict[str, str]:
    """As a user has it: no launcher's variables."""
    launcher = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
    return {name: value for name, value in os.environ.items() if name not in launcher}


class Served:
    """A server with the stage file ``keys`` on ``port``, from ``with`` to the end of its block."""

    def __init__(self, folder: Path, name: str, keys: dict[str, Any], port: int) -> None:
        self._stage, self._log = folder / f"stage-{name}.yaml", folder / f"serve-{name}.txt"
        self._stage.write_text(yaml.safe_dump(keys | {"service": {"port": port}}))
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)

    def __enter__(self) -> "Served":
        with self._log.open("w") as out:
            words = command("serve", "--stage-config", str(self._stage))
            self.process = subprocess.Popen(words, env=environment(), stdout=out, stderr=subprocess.STDOUT)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait()

    def wait_ready(self) -> None:
        """Return when it answers, when it has ended, or after ``START_S``."""
        until = time.monotonic() + START_S
        while time.monotonic() < until and self.process.poll() is None:
            try:
                if self.client.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.5)

    def image(self, **body: Any) -> httpx.Response:
        """Ask for a picture."""
        return self.client.post("/v1/images/generations", json=body)

    def stop(self) -> int:
        """Its exit code once told to end."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(END_S)

    def failed(self, error: Exception) -> dict[str, Any]:
        """What is reported where it did not answer."""
        said = self._log.read_text().splitlines()[-12:]
        return {"good": False, "error": str(error), "code": self.process.poll(), "said": said}
