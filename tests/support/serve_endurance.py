"""Many requests to one server, and what its processes hold after them: memory, threads, open files.

By hand: `python -m tests.support.serve_endurance 500`. It runs two ranks on the tiny Z-Image and prints a table. The
requests are what clients send: four shapes, prompts of several lengths, with and without guidance, streams, addresses
instead of pictures, and among every ten one that is refused and one whose client leaves after its first step.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.gloo.test_serve_support import Server

SHAPES = ("112x80", "64x48", "48x48", "80x112")
LIMITS = {"kept_images": 10}  # reached early, so that what is kept is no growth
PAGE_BYTES = 4096


@dataclass(frozen=True)
class Footprint:
    """Of one process; ``rss_mib`` is the memory that it has to itself or shares."""

    rss_mib: float
    threads: int
    files: int


def footprint(pid: int) -> Footprint:
    """What ``pid`` holds now."""
    process = Path(f"/proc/{pid}")
    rss = int((process / "statm").read_text().split()[1]) * PAGE_BYTES / 2**20
    return Footprint(rss, len(list((process / "task").iterdir())), len(list((process / "fd").iterdir())))


def ask(server: Server, number: int) -> None:
    """Send the request of that number, and check its answer."""
    body: dict[str, Any] = {
        "prompt": "a fox " * (1 + number % 7), "size": SHAPES[number % 4], "num_inference_steps": 2, "seed": number,
        "guidance_scale": 2.0 * (number // 4 % 2), "negative_prompt": "blur",
    }  # fmt: skip
    match number % 10:
        case 3:
            assert server.image(**{**body, "size": "100x80"}).status_code == 400
        case 5:
            leave(server, {**body, "num_inference_steps": 50})
        case 7:
            (datum,) = server.image(**body, response_format="url").json()["data"]
            assert server.client.get(datum["url"]).content.startswith(b"\x89PNG")
        case 9:
            assert "image_generation.completed" in server.image(**body, stream=True).text
        case _:
            answer = server.image(**body)
            assert answer.status_code == 200, answer.text


def leave(server: Server, body: dict[str, Any]) -> None:
    """Close the connection after the first step."""
    with httpx.stream(
        "POST", f"{server.url}/v1/images/generations", json={**body, "stream": True}, timeout=60
    ) as answer:
        assert any('"steps": 0' not in line for line in answer.iter_lines() if "progress" in line and "data" in line)


def endure(server: Server, count: int, marks: Iterable[int]) -> dict[int, list[Footprint]]:
    """Send ``count`` requests in a row; what each rank holds after those numbers of ``marks``, when all is quiet."""
    found: dict[int, list[Footprint]] = {}
    for number in range(1, count + 1):
        ask(server, number)
        if number in marks:
            server.until({"running": 0, "queued": 0, "status": "ok"})
            found[number] = [footprint(pid) for pid in server.pids]
    return found


def main(count: int) -> None:
    """Print a table: a line for each mark, with the ranks side by side."""
    server = Server("zimage", 2, limits=LIMITS)
    marks = sorted({count // 5 * part for part in range(1, 6)})
    for mark, ranks in endure(server, count, marks).items():
        told = [f"{rank.rss_mib:8.1f} MiB {rank.threads:3} threads {rank.files:3} files" for rank in ranks]
        print(f"{mark:6} requests | {' | '.join(told)}")
    print(f"exit codes {server.stop()}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
